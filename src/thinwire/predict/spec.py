"""A network as text, such as 100mbit,5ms: bandwidth, latency, jitter and loss of a link, and when they change.

`parse_network` is the one parser: every command reads networks with it. Standard library only: the processes that
emulate a network read it without loading torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise

from ..errors import OptionError
from .presets import PRESETS, NetworkPreset, emulated_names, preset_names

RATE_UNITS = {"gbit": Decimal(10**9), "mbit": Decimal(10**6), "kbit": Decimal(10**3)}
TIME_UNITS = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}

SLOWEST, FASTEST = 64_000, 100_000_000_000  # bit/s
LONGEST = 10.0  # seconds of delay
MTU_SMALLEST, MTU_LARGEST = 1500, 60_000

_EXAMPLE = "write for example 100mbit,5ms,jitter=1ms,loss=0.1%"


@dataclass(frozen=True)
class Phase:
    """One state of the network, from `at_seconds` of the schedule on.

    `rate_bits` is the bandwidth of each host, both ways (None: no limit). `delay_seconds` is the one-way latency from
    host to host, so a ping takes twice that. Jitter is uniform, up to `jitter_seconds` more or less. Packets between
    two hosts stay in order.

    >>> str(Phase(rate_bits=100_000_000, delay_seconds=0.005))
    '100mbit,5ms'
    """

    at_seconds: float = 0.0
    rate_bits: int | None = None
    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    loss_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.rate_bits is not None and not SLOWEST <= self.rate_bits <= FASTEST:
            raise OptionError(f"a rate must be from 64kbit to 100gbit, got {_with_unit(self.rate_bits, RATE_UNITS)}")
        if not 0 <= self.delay_seconds <= LONGEST:
            raise OptionError(f"a delay must be from 0 to 10s, got {self.delay_seconds:g}s")
        if not 0 <= self.jitter_seconds <= self.delay_seconds:
            raise OptionError(
                f"jitter must be between 0 and the delay, or packets would arrive before they are sent: "
                f"got jitter={_with_unit(self.jitter_seconds, TIME_UNITS)}, "
                f"delay {_with_unit(self.delay_seconds, TIME_UNITS)}"
            )
        if not 0 <= self.loss_fraction <= 0.5:
            raise OptionError(f"loss must be from 0% to 50%, got {self.loss_fraction:.6g} of the packets")
        if self.at_seconds < 0:
            raise OptionError(f"a phase cannot begin before the run, got @{self.at_seconds:g}s")

    @property
    def rate_only(self) -> bool:
        """No delay, no jitter, no loss: a token bucket is enough."""
        return not (self.delay_seconds or self.jitter_seconds or self.loss_fraction)

    def __str__(self) -> str:
        parts = [] if self.rate_bits is None else [_with_unit(self.rate_bits, RATE_UNITS)]
        if self.delay_seconds:
            parts.append(_with_unit(self.delay_seconds, TIME_UNITS))
        if self.jitter_seconds:
            parts.append(f"jitter={_with_unit(self.jitter_seconds, TIME_UNITS)}")
        if self.loss_fraction:
            parts.append(f"loss={_plain(Decimal(repr(self.loss_fraction)) * 100)}%")
        return ",".join(parts) or "unshaped"


@dataclass(frozen=True)
class NetworkSpec:
    """The phases of a network in the order of time; the first begins at 0.

    >>> network = parse_network("1gbit,0.1ms;50mbit,20ms@30s")
    >>> network.at(29.0).rate_bits, network.at(30.0).rate_bits
    (1000000000, 50000000)
    >>> str(network)
    '1gbit,100us@0s;50mbit,20ms@30s'
    """

    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        times = [phase.at_seconds for phase in self.phases]
        if not times or times[0] != 0:
            raise OptionError("the first phase of a network begins at 0: write 1gbit,0.1ms@0s;50mbit,20ms@30s")
        if any(later <= earlier for earlier, later in pairwise(times)):
            raise OptionError("the phases of a network must begin one after the other: give each a later @ time")

    def at(self, seconds: float) -> Phase:
        """The phase in force that many seconds after the clock started."""
        return next((phase for phase in reversed(self.phases) if phase.at_seconds <= seconds), self.phases[0])

    @property
    def rate_only(self) -> bool:
        """Whether all phases limit the rate and nothing else."""
        return all(phase.rate_only for phase in self.phases)

    @property
    def shaped(self) -> bool:
        """Whether there is anything to emulate."""
        return any(phase.rate_bits is not None or not phase.rate_only for phase in self.phases)

    @property
    def mtu(self) -> int:
        """Bytes of the largest packet, one size for the whole schedule.

        Large packets keep a user-space switch cheap, but a packet must not block the link for long. It takes at most
        2 ms at the highest rate and at most 10 ms at the lowest. With loss, packets are smaller (0.25 ms), so that a
        lost one stands for a few lost frames and not for dozens.

        >>> [parse_network(text).mtu for text in ("1gbit", "100mbit,1ms", "10mbit", "1gbit;10mbit@5s", "unshaped")]
        [60000, 25000, 2500, 12500, 60000]
        """
        rates = [phase.rate_bits for phase in self.phases if phase.rate_bits is not None]
        if not rates:
            return MTU_LARGEST
        seconds = 0.25e-3 if any(phase.loss_fraction for phase in self.phases) else 2e-3
        size = min(max(rates) / 8 * seconds, min(rates) / 8 * 10e-3)
        return int(min(max(size, MTU_SMALLEST), MTU_LARGEST))

    def __str__(self) -> str:
        if len(self.phases) == 1:
            return str(self.phases[0])
        return ";".join(f"{phase}@{_with_unit(phase.at_seconds, TIME_UNITS)}" for phase in self.phases)


def parse_network(text: str) -> NetworkSpec:
    """A network whose hosts all have the same link: rate, one-way delay, `jitter=` and `loss=`; a preset; a schedule.

    Rates are in kbit, mbit or gbit, times in us, ms or s. `unshaped` is the machine as it is.

    >>> parse_network("100mbit,5ms,loss=0.1%").phases[0].loss_fraction
    0.001
    >>> str(parse_network("lan-100m"))
    '100mbit,1ms'
    >>> parse_network("fast")
    Traceback (most recent call last):
    thinwire.errors.OptionError: network 'fast': 'fast' is neither a rate, a delay nor a preset (1gbe, ...
    """
    entries = text.split(";")
    phases = []
    for number, entry in enumerate(entries):
        body, at, when = entry.strip().partition("@")
        try:
            if at:
                seconds = _number(when.strip(), TIME_UNITS, "time after @")
            elif number:
                raise OptionError("every phase after the first needs the time at which it begins, such as @30s")
            else:
                seconds = Decimal(0)
            phases.append(_parse_phase(body.strip(), float(seconds)))
        except OptionError as problem:
            raise OptionError(f"network {text!r}: {problem}") from None
    try:
        return NetworkSpec(tuple(phases))
    except OptionError as problem:
        raise OptionError(f"network {text!r}: {problem}") from None


def named_network(text: str) -> NetworkPreset | NetworkSpec:
    """The preset of this name, of any kind; else the network that the text describes.

    >>> named_network("three-regions").about
    '1 Gbit/s a worker; 0.5 ms inside a region, 35, 45 and 75 ms between regions.'
    >>> named_network("1gbit;50mbit@5s").phases[1].rate_bits
    50000000
    """
    preset = PRESETS.get(text.strip().lower())
    return parse_network(text) if preset is None else preset


def _parse_phase(body: str, at_seconds: float) -> Phase:
    body = body.lower()
    if body == "unshaped":
        return Phase(at_seconds)
    if body in PRESETS:
        return _phase_of(PRESETS[body], at_seconds)
    found: dict[str, Decimal] = {}
    for part in (part.strip() for part in body.split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            name, value = ("rate" if part.endswith("bit") else "delay"), part
        if not part:
            raise OptionError(f"something is missing between commas; {_EXAMPLE}")
        if part == "unshaped" or part in PRESETS:
            raise OptionError(f"{part} stands alone: leave out what is beside it, or {_EXAMPLE}")
        if name in found:
            raise OptionError(f"it has two values for {name}: leave one out")
        if name == "rate":
            found[name] = _number(value, RATE_UNITS, "rate")
        elif name in ("delay", "jitter"):
            found[name] = _number(value, TIME_UNITS, name)
        elif name == "loss":
            found[name] = _number(value, {"%": Decimal("0.01")}, "loss")
        else:
            raise OptionError(f"{name} is not a property of a network; use rate, delay, jitter or loss")
    rate = found.get("rate")
    delay, jitter, loss = (float(found.get(name, 0)) for name in ("delay", "jitter", "loss"))
    return Phase(at_seconds, None if rate is None else int(rate), delay, jitter, loss)


def _phase_of(preset: NetworkPreset, at_seconds: float) -> Phase:
    if not preset.emulated:
        what = "hosts of several workers" if preset.uniform else "links that differ between hosts"
        raise OptionError(
            f"{preset.name} has {what}, which is for thinwire simulate; here all workers have the same link: "
            f"choose {emulated_names()}"
        )
    return Phase(at_seconds, int(preset.bandwidth), preset.latency, preset.jitter, preset.loss)


def _number(text: str, units: dict[str, Decimal], what: str) -> Decimal:
    """Decimal, so that 0.1ms and 100us are the same float."""
    match = re.fullmatch(r"([0-9.]+(?:e-?[0-9]+)?) *([a-z%]+)", text)
    if match and match[2] in units:
        try:
            return Decimal(match[1]) * units[match[2]]
        except InvalidOperation:
            pass
    if what == "delay" and not match:
        raise OptionError(f"{text!r} is neither a rate, a delay nor a preset ({preset_names()}, unshaped); {_EXAMPLE}")
    raise OptionError(f"{text!r} is not a {what}: give a number and {', '.join(units)}; {_EXAMPLE}")


def _with_unit(value: float, units: dict[str, Decimal]) -> str:
    """In the largest unit that gives at least 1; exactly the value that was parsed."""
    exact = Decimal(repr(value))
    smallest = list(units)[-1 if value else 0]
    unit = next((unit for unit in units if exact >= units[unit]), smallest)
    return _plain(exact / units[unit]) + unit


def _plain(value: Decimal) -> str:
    return f"{value.normalize():f}"
