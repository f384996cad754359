"""The network of many workers: what each host may send and receive, how long the way between two takes, how it changes.

A host has one access link that its workers share; everything between hosts is as fast as the slower end, and as late as
the way between their regions plus both last miles. Workers of one host have a line of their own between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import OptionError
from ...predict.spec import NetworkSpec, parse_network

Floats: TypeAlias = NDArray[np.float64]
Whole: TypeAlias = NDArray[np.int64]
_UNLIMITED = 20e9 / 8  # bytes a second of a network that nothing limits
_INNER_RATE, _INNER_LATENCY = 100e9, 5e-6  # inside a host, where a preset has several workers in one


@dataclass(frozen=True)
class Links:
    """Access links of hosts and the ways between them. All rates in bytes a second, all times in seconds.

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
    mile: Floats  # what each host adds to every way
    inner: tuple[float, float] = (_INNER_LATENCY, _INNER_RATE)
    changes: tuple[tuple[float, float, float], ...] = ()  # from then on: times the rates, latency of every way or -1
    loss: float = 0.0  # share of the letters that never arrive
    straggle: float = 0.0  # spread of compute times, the sigma of their logarithm: from step to step
    uneven: float = 0.0  # and from worker to worker
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
        """What the rates are multiplied by at these times."""
        begins, factors, _ = self._phases()
        return factors[np.searchsorted(begins, seconds, side="right") - 1]

    def ways(self, seconds: float) -> Floats:
        """One-way latencies between regions at a time."""
        begins, _, latencies = self._phases()
        changed = latencies[np.searchsorted(begins, seconds, side="right") - 1]
        return self.between if changed < 0 else np.full_like(self.between, changed)

    def latency(self, source: Whole, target: Whole, *, seconds: Floats | float = 0.0) -> Floats:
        """One way from worker to worker."""
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
        """A preset (`data-centre`, `three-regions`, `home-1000`), or a network as `compare` takes it."""
        if workers < 1:
            raise OptionError(f"a simulation has 1 worker or more, not {workers}")
        if name in PRESETS:
            return PRESETS[name](workers, seed)
        try:
            return cls.alike(parse_network(name), workers=workers)
        except OptionError as refusal:
            raise OptionError(f"{refusal}; or choose {', '.join(PRESETS)}") from None

    @classmethod
    def alike(cls, spec: NetworkSpec, *, workers: int) -> Links:
        """Every worker a host with the same line: what `compare` emulates. Jitter and lost packets are left out."""
        first = spec.phases[0]
        rate = _UNLIMITED if first.rate_bits is None else first.rate_bits / 8
        changes = tuple(
            (
                phase.at_seconds,
                (_UNLIMITED if phase.rate_bits is None else phase.rate_bits / 8) / rate,
                phase.delay_seconds,
            )
            for phase in spec.phases[1:]
        )
        return cls(
            name=str(spec),
            host=np.arange(workers),
            up=np.full(workers, rate),
            down=np.full(workers, rate),
            region=np.zeros(workers, dtype=np.int64),
            between=np.array([[first.delay_seconds]]),
            mile=np.zeros(workers),
            changes=changes,
            about="every worker has the same line",
        )

    def with_loss(self, loss: float) -> Links:
        if not 0 <= loss < 1:
            raise OptionError(f"loss is a share from 0 to 1, not {loss}")
        return replace(self, loss=loss)


# ------------------------------------------------------------------------------------------------------------ presets


def data_centre(workers: int, seed: int = 0) -> Links:
    """Hosts of eight workers, 25 Gbit/s and 50 us between them, 100 GB/s inside."""
    hosts = -(-workers // 8)
    return Links(
        name="data-centre",
        host=np.arange(workers) // 8,
        up=np.full(hosts, 25e9 / 8),
        down=np.full(hosts, 25e9 / 8),
        region=np.zeros(hosts, dtype=np.int64),
        between=np.array([[50e-6]]),
        mile=np.zeros(hosts),
        straggle=0.03,
        about="hosts of 8 workers, 25 Gbit/s and 0.05 ms between hosts, 100 GB/s inside",
    )


def three_regions(workers: int, seed: int = 0) -> Links:
    """Workers in three regions, 1 Gbit/s each; 0.5 ms inside a region, 35, 45 and 75 ms one way between them."""
    region = np.arange(workers) * 3 // max(1, workers)
    ways = np.array([[0.5, 35.0, 75.0], [35.0, 0.5, 45.0], [75.0, 45.0, 0.5]]) / 1e3
    return Links(
        name="three-regions",
        host=np.arange(workers),
        up=np.full(workers, 1e9 / 8),
        down=np.full(workers, 1e9 / 8),
        region=region.astype(np.int64),
        between=ways,
        mile=np.zeros(workers),
        straggle=0.05,
        about="1 Gbit/s a worker; 0.5 ms inside a region, 35, 45 and 75 ms between regions",
    )


def home(workers: int, seed: int = 0) -> Links:
    """Households: uplinks around 20 Mbit/s, downlinks five times that, 5 to 40 ms to a backbone of 5 ms."""
    draw = np.random.Generator(np.random.Philox(key=np.array([seed, 0x686F6D65], dtype=np.uint64)))
    up = 20e6 / 8 * np.exp(0.6 * draw.standard_normal(workers))
    return Links(
        name="home-1000",
        host=np.arange(workers),
        up=np.clip(up, 2e6 / 8, 200e6 / 8),
        down=np.clip(5 * up, 10e6 / 8, 1e9 / 8),
        region=np.zeros(workers, dtype=np.int64),
        between=np.array([[5e-3]]),
        mile=draw.uniform(5e-3, 40e-3, workers),
        straggle=0.2,
        uneven=0.3,
        about="uplinks of 2 to 200 Mbit/s, median 20; downlinks 5 x as fast; 15 to 85 ms one way; uneven workers",
    )


PRESETS: Mapping[str, Callable[[int, int], Links]] = MappingProxyType(
    {"data-centre": data_centre, "three-regions": three_regions, "home-1000": home}
)


@dataclass
class Occupied:
    """Until when the access links of the hosts are busy."""

    up: Floats
    down: Floats
    sent: Floats  # bytes so far, by worker

    @classmethod
    def none(cls, links: Links) -> Occupied:
        return cls(np.zeros(links.hosts), np.zeros(links.hosts), np.zeros(links.workers))
