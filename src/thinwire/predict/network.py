"""What collectives cost on a network: a line (latency, time a byte) for each collective and range of sizes.

Libraries do not follow one line: small messages take other ways than large ones, rings and trees differ, TCP needs time
to fill a long line. So `probe` measures each collective by itself. Where nothing was measured, one line stands for the
network and the formulas of the algorithms that gloo uses for the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from ..comm.network import FEW_RANKS, SMALL_SUM
from ..errors import OptionError
from ..exchange.script import Collective
from .fit import Regime, fit_error, fit_regimes
from .spec import Phase, parse_network
from .textbook import Line

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
SCHEMA = 1
_KIND = "network"
_UNSHAPED = Line(50e-6, 8e-9 / 20)  # a good local line, where nothing limits it and nothing was measured


@dataclass(frozen=True)
class Cost:
    """Seconds of one collective: until the first byte, during which others may send, and of its bytes."""

    latency: float
    transfer: float

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer


def hops(collective: Collective, size: float, ranks: int) -> tuple[float, float]:
    """How many latencies, and how many times `size`, a collective takes on the path that decides when it ends.

    >>> hops("all_reduce", 1e6, 4), hops("all_gather", 1e6, 4), hops("all_to_all", 1e6, 4)
    ((6.0, 1.5), (3.0, 3.0), (1.0, 0.75))
    """
    n = ranks
    if n == 1:
        return 0.0, 0.0
    if collective == "all_reduce":
        return 2.0 * (n - 1), 2 * (n - 1) / n
    if collective == "small_sum":
        return 2.0, 2 * (n - 1) / n
    if collective == "all_gather":
        return (1.0 if size <= SMALL_SUM and n <= FEW_RANKS else n - 1.0), n - 1.0
    if collective == "broadcast":
        return float(math.ceil(math.log2(n))), float(math.ceil(math.log2(n)))
    return 1.0, (n - 1) / n if collective == "all_to_all" else 1.0


@dataclass(frozen=True)
class Fit:
    """What was measured of one collective, and the lines through it."""

    collective: Collective
    regimes: tuple[Regime, ...]
    error: float  # relative, median over the points
    points: tuple[tuple[float, float], ...] = ()  # size in bytes, seconds

    @classmethod
    def through(cls, collective: Collective, points: Sequence[tuple[float, float]]) -> Fit:
        regimes = fit_regimes(points)
        return cls(collective, regimes, fit_error(regimes, points), tuple(sorted(points)))

    def regime(self, size: float) -> Regime:
        return next((regime for regime in self.regimes if size <= regime.upto), self.regimes[-1])


@dataclass(frozen=True)
class NetworkModel:
    """A network that collectives can be priced on: measured ones (`fits`, between `ranks` hosts), or one line.

    >>> network = NetworkModel.named("100mbit,1ms")
    >>> round(network.cost("all_reduce", 12.5e6, ranks=4).seconds, 3)
    1.506
    """

    name: str
    line: Line
    ranks: int | None = None
    fits: Mapping[Collective, Fit] = field(default_factory=dict)
    inner: Line | None = None  # inside a host of `per_host` ranks
    per_host: int = 1
    pairs: Mapping[str, Line] = field(default_factory=dict)  # "0-3": what two hosts have between them
    about: str = ""

    @property
    def measured(self) -> bool:
        return bool(self.fits)

    def cost(self, collective: Collective, size: float, *, ranks: int) -> Cost:
        """Of one collective that `size` bytes are given to on every rank."""
        if ranks == 1 or size <= 0:
            return Cost(0.0, 0.0)
        fit = self.fits.get(collective)
        if fit is None or self.ranks is None:
            return self._by_the_book(collective, size, ranks)
        regime = fit.regime(size)
        here, there = hops(collective, size, self.ranks), hops(collective, size, ranks)
        return Cost(regime.latency * there[0] / here[0], regime.byte_seconds * size * there[1] / here[1])

    def _by_the_book(self, collective: Collective, size: float, ranks: int) -> Cost:
        hosts = -(-ranks // self.per_host)
        trips, times = hops(collective, size, hosts)
        latency, transfer = trips * self.line.latency, times * size * self.line.byte_seconds
        if self.inner is not None and self.per_host > 1:  # inside the host first, and back at the end
            trips, times = hops(collective, size, min(ranks, self.per_host))
            latency += trips * self.inner.latency
            transfer += times * size * self.inner.byte_seconds
        return Cost(latency, transfer)

    # ------------------------------------------------------------------------------------------------- by name

    @classmethod
    def named(cls, text: str) -> NetworkModel:
        """A preset, a network as it is written for `compare`, or the file of a probe.

        >>> NetworkModel.named("10gbe").line.byte_seconds
        8e-10
        >>> NetworkModel.named("10gbee")
        Traceback (most recent call last):
        thinwire.errors.OptionError: network '10gbee': ...
        """
        if text in PRESETS:
            return PRESETS[text]
        if text.endswith(".json"):
            return cls.load(text)
        spec = parse_network(text)
        if len(spec.phases) > 1:
            raise OptionError(f"{text!r} changes with time, and a plan is made for one network: give one phase of it")
        return cls(text, line_of(spec.phases[0]))

    # -------------------------------------------------------------------------------------------------- as JSON

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": _KIND,
            "name": self.name,
            "about": self.about,
            "ranks": self.ranks,
            "latency_ms": 1e3 * self.line.latency,
            "mbit": 8e-6 / self.line.byte_seconds,
            "inner": None if self.inner is None else asdict(self.inner),
            "per_host": self.per_host,
            "fits": [
                {
                    "collective": fit.collective,
                    "error": fit.error,
                    "regimes": [_regime_as_dict(regime) for regime in fit.regimes],
                    "points": [{"bytes": size, "seconds": seconds} for size, seconds in fit.points],
                }
                for fit in self.fits.values()
            ],
            "pairs": {pair: asdict(line) for pair, line in self.pairs.items()},
        }

    @classmethod
    def from_dict(cls, told: Any, *, source: str = "this network") -> NetworkModel:
        """Refuses what is not a network, or not a possible one, in one sentence."""
        try:
            if told["kind"] != _KIND or told["schema"] != SCHEMA:
                raise OptionError(f"{source} is not a network of this version of thinwire: run thinwire probe again")
            fits = {}
            for entry in told["fits"]:
                if entry["collective"] not in COLLECTIVES:
                    raise OptionError(f"{source} names a collective that is none: {entry['collective']}")
                regimes = tuple(
                    Regime(math.inf if one["upto"] is None else one["upto"], one["latency"], one["byte_seconds"])
                    for one in entry["regimes"]
                )
                points = tuple((point["bytes"], point["seconds"]) for point in entry["points"])
                fits[entry["collective"]] = Fit(entry["collective"], regimes, entry["error"], points)
            line = Line(told["latency_ms"] / 1e3, 8e-6 / told["mbit"])
            inner = None if told["inner"] is None else Line(**told["inner"])
            pairs = {pair: Line(**entry) for pair, entry in told["pairs"].items()}
            model = cls(told["name"], line, told["ranks"], fits, inner, told["per_host"], pairs, told["about"])
        except OptionError:
            raise
        except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as problem:
            raise OptionError(
                f"{source} is not a network that thinwire probe wrote ({type(problem).__name__}: {problem})"
            ) from None
        model.check(source)
        return model

    def check(self, source: str) -> None:
        """Numbers that no network has."""
        lines = [self.line, *self.pairs.values(), *([self.inner] if self.inner else [])]
        regimes = [regime for fit in self.fits.values() for regime in fit.regimes]
        numbers = [(one.latency, one.byte_seconds) for one in lines]
        for pair in numbers + [(one.latency, one.byte_seconds) for one in regimes]:
            if not all(0 <= number < math.inf for number in pair):
                raise OptionError(f"{source} has a latency or a rate that no network has: {pair} s, s/byte")
        if any(line.byte_seconds <= 0 for line in lines) or not all(fit.regimes for fit in self.fits.values()):
            raise OptionError(f"{source} has a line without a rate: give one above 0")
        if (self.fits and (self.ranks is None or self.ranks < 2)) or self.per_host < 1:
            raise OptionError(f"{source} was not measured between two ranks or more: run thinwire probe again")

    def save(self, path: str) -> None:
        try:
            Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        except OSError as problem:
            raise OptionError(f"cannot write {path}: {problem.strerror}; choose another file") from None

    @classmethod
    def load(cls, path: str) -> NetworkModel:
        try:
            told = json.loads(Path(path).read_text())
        except OSError as problem:
            raise OptionError(f"cannot read {path}: {problem.strerror}; thinwire probe writes such files") from None
        except ValueError:
            raise OptionError(f"{path} is not JSON: thinwire probe writes such files") from None
        return cls.from_dict(told, source=path)


def line_of(phase: Phase) -> Line:
    """A phase of an emulated network; half the jitter comes on top, and loss is not in it."""
    rate = _UNSHAPED.byte_seconds if phase.rate_bits is None else 8 / phase.rate_bits
    return Line(phase.delay_seconds + _UNSHAPED.latency, rate)


def _regime_as_dict(regime: Regime) -> dict[str, float | None]:
    return {**asdict(regime), "upto": None if math.isinf(regime.upto) else regime.upto}


def _on_nvlink(name: str, *, milliseconds: float, gigabits: float) -> NetworkModel:
    inner, about = Line.of(milliseconds=0.005, gigabits=2400), f"8 GPUs a host on NVLink, {gigabits:g} Gbit/s between"
    return NetworkModel(
        name, Line.of(milliseconds=milliseconds, gigabits=gigabits), inner=inner, per_host=8, about=about
    )


PRESETS: Mapping[str, NetworkModel] = {
    model.name: model
    for model in (
        NetworkModel("1gbe", Line.of(milliseconds=0.1, gigabits=1), about="1 Gbit/s Ethernet"),
        NetworkModel("10gbe", Line.of(milliseconds=0.05, gigabits=10), about="10 Gbit/s Ethernet"),
        NetworkModel("25gbe", Line.of(milliseconds=0.03, gigabits=25), about="25 Gbit/s Ethernet"),
        NetworkModel("100gbe", Line.of(milliseconds=0.02, gigabits=100), about="100 Gbit/s Ethernet"),
        NetworkModel("cross-region", Line.of(milliseconds=30, gigabits=0.5), about="two regions of a cloud"),
        NetworkModel("home-dsl", Line.of(milliseconds=15, gigabits=0.01), about="what a household sends by DSL"),
        _on_nvlink("nvlink+10gbe", milliseconds=0.05, gigabits=10),
        _on_nvlink("nvlink+100gbe", milliseconds=0.02, gigabits=100),
    )
}
