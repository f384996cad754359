"""Reports keep their numbers, ranks at different steps are detected, and all ranks combine to one observation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.auto.agreement import Decision
from thinwire.auto.candidates import DENSITIES
from thinwire.auto.reports import Measurement, RankReport, check_reports, combined
from thinwire.errors import ExchangeError

seconds = st.floats(0, 1e6)
measurements = st.builds(
    Measurement,
    steps=st.integers(0, 1000),
    seconds=seconds,
    forward=seconds,
    backward=seconds,
    rest=seconds,
    latency=seconds,
    canary=seconds,
    offered=seconds,
    left=seconds,
    steady=st.sampled_from([None, False, True]),
    exchange=seconds,
    last_exchange=seconds,
    curve=st.tuples(*[st.floats(0, 1)] * len(DENSITIES)),
)


@given(st.integers(0, 10**6), st.integers(0, 10**9), measurements)
def test_a_report_survives_its_numbers(number: int, step: int, measured: Measurement) -> None:
    report = RankReport(number, step, Decision(4, (1, 2, 3), 3, (5, 0)), measured)
    assert RankReport.from_numbers(report.numbers()) == report


def test_ranks_at_different_places_are_told() -> None:
    one = RankReport(3, 12, Decision(0, (0, 0, 0)), Measurement())
    check_reports([one, one], number=3)
    with pytest.raises(ExchangeError, match="rank 1 is at round 3, step 13"):
        check_reports([one, replace(one, step=13)], number=3)


def test_the_slowest_rank_gives_the_step_and_the_rank_that_waits_least_the_exchange() -> None:
    one = Measurement(steps=3, seconds=0.5, forward=0.1, exchange=0.2, steady=True, offered=4.0, left=1.0)
    other = replace(one, seconds=0.7, forward=0.3, exchange=0.1, left=2.0, latency=0.01)
    seen = combined(9, [one, other], ready=(1.0,))
    assert seen is not None
    assert (seen.seconds, seen.forward, seen.exchange) == (0.7, 0.3, 0.1)
    assert (seen.energy_kept, seen.steady) == (1 - 3 / 8, True)
    assert (seen.latency, seen.canary, seen.curve) == (None, None, None)
    unknown = combined(9, [one, replace(other, steady=None)], ready=(1.0,))
    assert unknown is not None
    assert unknown.steady is None


def test_without_a_timed_step_nothing_is_observed() -> None:
    timed = Measurement(steps=1, seconds=0.5)
    assert combined(9, [timed, Measurement()], ready=()) is None
    assert combined(9, [replace(timed, canary=0.1), Measurement(canary=0.2)], ready=()) is not None
