"""The network presets: one table of names, each with its bandwidth, its latency and one sentence.

`compare`, `emulate`, `plan`, `probe` and `simulate` all read this table. Standard library only: the processes that
emulate a network read it without loading torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

UNLIMITED = 20e9  # bit/s of a network that nothing limits: loopback, a good local network
HOST_LATENCY = 50e-6  # seconds that the two hosts of a hop add to the latency of a link that is given as text


@dataclass(frozen=True)
class InsideHost:
    """Hosts with several workers each, and the link between the workers of one host."""

    workers: int
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Household:
    """Access links that differ from host to host. The uplinks are log-normal, with the preset's bandwidth as median.

    Bandwidths in bit/s. `downlink` is how many times as fast a host receives. `last_mile` is the range of seconds that
    a host adds to the latency of every path.
    """

    spread: float  # sigma of the logarithm
    up: tuple[float, float]  # the slowest and the fastest uplink
    downlink: float
    down: tuple[float, float]
    last_mile: tuple[float, float]


@dataclass(frozen=True)
class NetworkPreset:
    """A network by name. Bandwidth in bit/s, both ways; latency in seconds, one way, of a whole hop between two hosts.

    >>> PRESETS["10gbe"].bandwidth, PRESETS["10gbe"].latency
    (10000000000.0, 5e-05)
    >>> PRESETS["three-regions"].uniform, PRESETS["nvlink+10gbe"].emulated
    (False, False)
    """

    name: str
    about: str
    bandwidth: float
    latency: float
    jitter: float = 0.0
    loss: float = 0.0
    inside: InsideHost | None = None
    regions: tuple[tuple[float, ...], ...] = ()  # one-way latency from region to region
    household: Household | None = None
    straggle: float = 0.0  # spread of compute times from step to step: the sigma of their logarithm
    uneven: float = 0.0  # the same from worker to worker
    aliases: tuple[str, ...] = ()

    @property
    def uniform(self) -> bool:
        """Whether one link describes the network between any two hosts: `plan` needs that."""
        return not self.regions and self.household is None

    @property
    def emulated(self) -> bool:
        """Whether every worker is a host with the same link: `compare` and `probe --emulate` need that."""
        return self.uniform and self.inside is None


_NVLINK = InsideHost(workers=8, bandwidth=2400e9, latency=5e-6)

_TABLE = (
    NetworkPreset("1gbe", "1 Gbit/s Ethernet: machines on one switch.", 1e9, 1e-4, aliases=("lan-1g",)),
    NetworkPreset("10gbe", "10 Gbit/s Ethernet.", 10e9, 5e-5),
    NetworkPreset("25gbe", "25 Gbit/s Ethernet.", 25e9, 3e-5),
    NetworkPreset("100gbe", "100 Gbit/s Ethernet.", 100e9, 2e-5),
    NetworkPreset("lan-100m", "An old or crowded office network.", 100e6, 1e-3),
    NetworkPreset("cross-region", "Two regions of a cloud.", 500e6, 30e-3, jitter=1e-3),
    NetworkPreset("home", "What homes send by cable or fibre.", 50e6, 10e-3, jitter=1e-3, loss=1e-4),
    NetworkPreset("dsl", "What homes send by DSL.", 10e6, 15e-3, jitter=1e-3, loss=5e-4, aliases=("home-dsl",)),
    NetworkPreset("nvlink+10gbe", "Hosts of 8 GPUs on NVLink, 10 Gbit/s between hosts.", 10e9, 5e-5, inside=_NVLINK),
    NetworkPreset("nvlink+100gbe", "Hosts of 8 GPUs on NVLink, 100 Gbit/s between hosts.", 100e9, 2e-5, inside=_NVLINK),
    NetworkPreset(
        "data-centre",
        "Hosts of 8 workers, 25 Gbit/s and 0.05 ms between hosts, 100 GB/s inside.",
        25e9,
        50e-6,
        inside=InsideHost(workers=8, bandwidth=800e9, latency=5e-6),
        straggle=0.03,
    ),
    NetworkPreset(
        "three-regions",
        "1 Gbit/s a worker; 0.5 ms inside a region, 35, 45 and 75 ms between regions.",
        1e9,
        0.5e-3,
        regions=((0.5e-3, 35e-3, 75e-3), (35e-3, 0.5e-3, 45e-3), (75e-3, 45e-3, 0.5e-3)),
        straggle=0.05,
    ),
    NetworkPreset(
        "home-1000",
        "Uplinks of 2 to 200 Mbit/s, median 20; downlinks 5 times as fast; 15 to 85 ms one way; uneven workers.",
        20e6,
        5e-3,
        household=Household(0.6, up=(2e6, 200e6), downlink=5.0, down=(10e6, 1e9), last_mile=(5e-3, 40e-3)),
        straggle=0.2,
        uneven=0.3,
    ),
)

PRESETS: Mapping[str, NetworkPreset] = MappingProxyType(
    {name: preset for preset in _TABLE for name in (preset.name, *preset.aliases)}
)


def preset_names() -> str:
    """All presets, for an error or a help text.

    >>> preset_names()[:20]
    '1gbe, 10gbe, 25gbe, '
    """
    return ", ".join(preset.name for preset in _TABLE)


def emulated_names() -> str:
    """The presets that give every worker a host with the same link."""
    return ", ".join(preset.name for preset in _TABLE if preset.emulated)
