"""The simulated network: bandwidth of every host, latency between any two, and how both change with time.

A host has one access link that its workers share. A message between two hosts has the bandwidth of the slower end. Its
latency is that between the two regions plus both last miles. Workers of one host have a link of their own between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import OptionError
from ...predict.presets import UNLIMITED, Household, NetworkPreset
from ...predict.spec import NetworkSpec, Phase, named_network

Floats: TypeAlias = NDArray[np.float64]
Whole: TypeAlias = NDArray[np.int64]
_INSIDE = (5e-6, 100e9)  # seconds, and bytes a second, between workers of one host
_HOUSEHOLD_DRAWS = 0x686F6D65  # stream of draws


@dataclass(frozen=True)
class Links:
    """Access links of hosts and the latency between them. All rates in bytes a second, all times in seconds.

    >>> links = Links.named("100mbit,5ms", workers=4)
    >>> float(links.up[0]), float(links.latency(np.array([0]), np.array([1]))[0])
    (12500000.0, 0.005)
    """

    name: str
    host: Whole  # of each worker
    up: Floats  # of each host
    down: Floats
    region: Whole  # of each host
    between: Floats  # one-way latency from region to region
    mile: Floats  # latency that each host adds: its last mile
    inner: tuple[float, float] = _INSIDE  # latency and rate inside a host
    changes: tuple[tuple[float, float, float], ...] = ()  # from when on, factor of the rates, latency or -1 (as before)
    loss: float = 0.0  # share of the messages that never arrive
    straggle: float = 0.0  # spread of compute times from step to step: the sigma of their logarithm
    uneven: float = 0.0  # the same from worker to worker
    about: str = ""

    def __post_init__(self) -> None:
        if not (self.up > 0).all() or not (self.down > 0).all():
            raise OptionError(f"network {self.name} has a link without any rate: give every host more than 0")

    @property
    def workers(self) -> int:
        return len(self.host)

    @property
    def hosts(self) -> int:
        return len(self.up)

    # --------------------------------------------------------------------------------------------- what holds when

    def factor(self, seconds: Floats) -> Floats:
        """The factor of all rates at these times."""
        begins, factors, _ = self._phases()
        return factors[np.searchsorted(begins, seconds, side="right") - 1]

    def ways(self, seconds: float) -> Floats:
        """One-way latencies between regions at this time."""
        begins, _, latencies = self._phases()
        changed = latencies[np.searchsorted(begins, seconds, side="right") - 1]
        return self.between if changed < 0 else np.full_like(self.between, changed)

    def latency(self, source: Whole, target: Whole, *, seconds: Floats | float = 0.0) -> Floats:
        """One-way latency from worker to worker."""
        a, b = self.host[source], self.host[target]
        begins, _, latencies = self._phases()
        changed = latencies[np.searchsorted(begins, seconds, side="right") - 1]
        way = np.where(changed < 0, self.between[self.region[a], self.region[b]], changed)
        return np.where(a == b, self.inner[0], way + self.mile[a] + self.mile[b])

    def _phases(self) -> tuple[Floats, Floats, Floats]:
        table = np.array([(-np.inf, 1.0, -1.0), *self.changes])
        return table[:, 0], table[:, 1], table[:, 2]

    # ------------------------------------------------------------------------------------------------------- making

    @classmethod
    def named(cls, name: str, *, workers: int, seed: int = 0) -> Links:
        """A preset, or a network as text. The seed draws the links of a preset whose hosts differ.

        >>> Links.named("data-centre", workers=16).hosts
        2
        """
        if workers < 1:
            raise OptionError(f"a simulation has 1 worker or more, not {workers}")
        found = named_network(name)
        if isinstance(found, NetworkPreset):
            return cls.of_preset(found, workers=workers, seed=seed)
        return cls.alike(found, workers=workers)

    @classmethod
    def alike(cls, spec: NetworkSpec, *, workers: int) -> Links:
        """Every worker is a host with the same link, as `compare` emulates it. Jitter and packet loss are left out."""
        first = spec.phases[0]
        rate = _rate(first)
        changes = tuple((phase.at_seconds, _rate(phase) / rate, phase.delay_seconds) for phase in spec.phases[1:])
        return cls(
            name=str(spec),
            host=np.arange(workers),
            up=np.full(workers, rate),
            down=np.full(workers, rate),
            region=np.zeros(workers, dtype=np.int64),
            between=np.array([[first.delay_seconds]]),
            mile=np.zeros(workers),
            changes=changes,
            about="Every worker has the same link.",
        )

    @classmethod
    def of_preset(cls, preset: NetworkPreset, *, workers: int, seed: int = 0) -> Links:
        """Workers fill hosts in order, and hosts fill regions in order."""
        inside = preset.inside
        host = np.arange(workers) // (1 if inside is None else inside.workers)
        hosts = int(host[-1]) + 1
        up = down = np.full(hosts, preset.bandwidth / 8)
        mile = np.zeros(hosts)
        if preset.household is not None:
            up, down, mile = _access_links(preset.household, preset.bandwidth / 8, hosts, seed)
        regions = preset.regions or ((preset.latency,),)
        return cls(
            name=preset.name,
            host=host,
            up=up,
            down=down,
            region=np.arange(hosts) * len(regions) // hosts,
            between=np.array(regions),
            mile=mile,
            inner=_INSIDE if inside is None else (inside.latency, inside.bandwidth / 8),
            straggle=preset.straggle,
            uneven=preset.uneven,
            about=preset.about,
        )

    def with_loss(self, loss: float) -> Links:
        if not 0 <= loss < 1:
            raise OptionError(f"loss is a share from 0 to 1, not {loss}")
        return replace(self, loss=loss)


def _rate(phase: Phase) -> float:
    return (UNLIMITED if phase.rate_bits is None else phase.rate_bits) / 8


def _access_links(household: Household, median: float, hosts: int, seed: int) -> tuple[Floats, Floats, Floats]:
    """Uplink, downlink and last mile of each host, drawn by seed."""
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, _HOUSEHOLD_DRAWS], dtype=np.uint64)))
    up = median * np.exp(household.spread * draw.standard_normal(hosts))
    slowest, fastest = (rate / 8 for rate in household.up)
    least, most = (rate / 8 for rate in household.down)
    mile = draw.uniform(*household.last_mile, hosts)
    return np.clip(up, slowest, fastest), np.clip(household.downlink * up, least, most), mile


@dataclass
class Occupied:
    """Until when the access links of the hosts are busy."""

    up: Floats
    down: Floats
    sent: Floats  # bytes so far, by worker

    @classmethod
    def none(cls, links: Links) -> Occupied:
        return cls(np.zeros(links.hosts), np.zeros(links.hosts), np.zeros(links.workers))
