"""What collectives cost on a network: latency and time per byte, measured by collective and size or from one link.

No library follows one formula: small messages take another path than large ones, rings and trees differ, and TCP needs
time to fill a long link. So `probe` measures each collective by itself. A network that was not measured is one link,
priced by the schedules of `collectives.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from ..errors import OptionError
from ..exchange.script import Collective
from .collectives import Cost, Link, hops, schedule_of
from .fit import Regime, fit_error, fit_regimes
from .presets import HOST_LATENCY, UNLIMITED, NetworkPreset
from .spec import Phase, named_network

COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
SCHEMA = 1
_KIND = "network"


@dataclass(frozen=True)
class Fit:
    """The timings of one collective, and the latency and rate fitted to each range of sizes."""

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
    """A network that prices collectives: by what was measured (`fits`, between `ranks` hosts), else by one link.

    >>> network = NetworkModel.named("100mbit,1ms")
    >>> round(network.cost("all_reduce", 12.5e6, ranks=4).seconds, 3)
    1.506
    """

    name: str
    link: Link
    ranks: int | None = None
    fits: Mapping[Collective, Fit] = field(default_factory=dict)
    inner: Link | None = None  # inside a host of `per_host` ranks
    per_host: int = 1
    pairs: Mapping[str, Link] = field(default_factory=dict)  # "0-3": the link between two hosts
    about: str = ""

    @property
    def measured(self) -> bool:
        return bool(self.fits)

    def cost(self, collective: Collective, size: float, *, ranks: int) -> Cost:
        """Of one collective that gets `size` bytes from every rank."""
        if ranks == 1 or size <= 0:
            return Cost(0.0, 0.0)
        fit = self.fits.get(collective)
        if fit is None or self.ranks is None:
            return self._by_schedule(collective, size, ranks)
        regime = fit.regime(size)
        here, there = hops(collective, size, self.ranks), hops(collective, size, ranks)
        return Cost(regime.latency * there[0] / here[0], regime.byte_seconds * size * there[1] / here[1])

    def _by_schedule(self, collective: Collective, size: float, ranks: int) -> Cost:
        between = schedule_of(collective, size, -(-ranks // self.per_host)).cost(self.link, size)
        if self.inner is None or self.per_host == 1:
            return between
        inside = schedule_of(collective, size, min(ranks, self.per_host)).cost(self.inner, size)
        return Cost(between.latency + inside.latency, between.transfer + inside.transfer)

    # ------------------------------------------------------------------------------------------------- by name

    @classmethod
    def named(cls, text: str) -> NetworkModel:
        """A preset, a network as text, or the file of a probe.

        >>> NetworkModel.named("10gbe").link.byte_seconds
        8e-10
        >>> NetworkModel.named("10gbee")
        Traceback (most recent call last):
        thinwire.errors.OptionError: network '10gbee': ...
        """
        if text.endswith(".json"):
            return cls.load(text)
        found = named_network(text)
        if isinstance(found, NetworkPreset):
            return cls.of_preset(found)
        if len(found.phases) > 1:
            raise OptionError(f"{text!r} changes with time, and a plan is made for one network: give one phase of it")
        return cls(text, link_of(found.phases[0]))

    @classmethod
    def of_preset(cls, preset: NetworkPreset) -> NetworkModel:
        """
        >>> from thinwire.predict.presets import PRESETS
        >>> NetworkModel.of_preset(PRESETS["nvlink+10gbe"]).per_host
        8
        """
        if not preset.uniform:
            raise OptionError(
                f"network {preset.name!r} has links that differ, and a plan is made for equal ones: "
                f"give one of its links as text, or run thinwire simulate --cost-only --network {preset.name}"
            )
        link = Link(preset.latency, 8 / preset.bandwidth)
        if preset.inside is None:
            return cls(preset.name, link, about=preset.about)
        inner = Link(preset.inside.latency, 8 / preset.inside.bandwidth)
        return cls(preset.name, link, inner=inner, per_host=preset.inside.workers, about=preset.about)

    # -------------------------------------------------------------------------------------------------- as JSON

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": _KIND,
            "name": self.name,
            "about": self.about,
            "ranks": self.ranks,
            "latency_ms": 1e3 * self.link.latency,
            "mbit": 8e-6 / self.link.byte_seconds,
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
            "pairs": {pair: asdict(link) for pair, link in self.pairs.items()},
        }

    @classmethod
    def from_dict(cls, told: Any, *, source: str = "this network") -> NetworkModel:
        """Refuses a file that is no network, or an impossible one, in one sentence."""
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
            link = Link(told["latency_ms"] / 1e3, 8e-6 / told["mbit"])
            inner = None if told["inner"] is None else Link(**told["inner"])
            pairs = {pair: Link(**entry) for pair, entry in told["pairs"].items()}
            model = cls(told["name"], link, told["ranks"], fits, inner, told["per_host"], pairs, told["about"])
        except OptionError:
            raise
        except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as problem:
            raise OptionError(
                f"{source} is not a network that thinwire probe wrote ({type(problem).__name__}: {problem})"
            ) from None
        model.check(source)
        return model

    def check(self, source: str) -> None:
        """Refuse numbers that no network has."""
        links = [self.link, *self.pairs.values(), *([self.inner] if self.inner else [])]
        regimes = [regime for fit in self.fits.values() for regime in fit.regimes]
        numbers = [(one.latency, one.byte_seconds) for one in links]
        for pair in numbers + [(one.latency, one.byte_seconds) for one in regimes]:
            if not all(0 <= number < math.inf for number in pair):
                raise OptionError(f"{source} has a latency or a rate that no network has: {pair} s, s/byte")
        if any(link.byte_seconds <= 0 for link in links) or not all(fit.regimes for fit in self.fits.values()):
            raise OptionError(f"{source} has a link without a rate: give one above 0")
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


def link_of(phase: Phase) -> Link:
    """The link of a phase, with the time that gloo and the hosts add to a hop. Jitter and loss are left out."""
    bandwidth = UNLIMITED if phase.rate_bits is None else phase.rate_bits
    return Link(phase.delay_seconds + HOST_LATENCY, 8 / bandwidth)


def _regime_as_dict(regime: Regime) -> dict[str, float | None]:
    return {**asdict(regime), "upto": None if math.isinf(regime.upto) else regime.upto}
