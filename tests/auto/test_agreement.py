"""Rounds that come late, twice, or are lost on the way and sent again: no two ranks ever run different things."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.auto.agreement import Agreement, Alarm, Decision, check_rows
from thinwire.errors import ExchangeError

RANKS, STEPS = 4, 60


@given(
    st.integers(0, 10**6),
    st.integers(-1, 5),
    st.integers(-1, 9),
    st.integers(1, 9),
    st.tuples(*[st.integers(0, 40)] * 3),
)
def test_a_decision_survives_its_numbers(
    number: int, candidate: int, bucket: int, every: int, choice: tuple[int, ...]
) -> None:
    canary = None if candidate < 0 or bucket < 0 else (candidate, bucket)
    decision = Decision(number, choice, every, canary)
    assert Decision.from_numbers(decision.numbers()) == decision


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_ranks_never_disagree(seed: int) -> None:
    """Rank 0 decides what it likes; every delivery to every rank may be delayed, doubled, or lost and sent again."""
    dice = random.Random(seed)
    first = Decision(0, (0, 0, 0))
    ranks = [Agreement(first) for _ in range(RANKS)]
    steps = [0] * RANKS
    ran: list[list[tuple[object, ...]]] = [[] for _ in range(RANKS)]
    written: list[tuple[int, int, Decision, bool]] = []  # number, step, what rank 0 said in it, whether all hurry
    mail: list[list[tuple[int, int, Decision, bool]]] = [[] for _ in range(RANKS)]
    number = 0
    while min(steps) < STEPS:
        rank = dice.randrange(RANKS)
        agreement = ranks[rank]
        if mail[rank] and dice.random() < 0.7:
            *said, soon = mail[rank].pop(0)
            agreement.take(*said, soon=soon)
            continue
        if agreement.waits(steps[rank]):
            if agreement.round == len(written):  # a round is a collective: written once, when the first rank comes
                number += dice.random() < 0.4
                canary = (dice.randrange(9), 0) if dice.random() < 0.3 else None
                choice = (number % 7, number % 5, number % 3)
                said = Decision(number, choice, dice.randint(1, 5), canary)
                written.append((len(written), steps[rank], said, dice.random() < 0.2))
            if dice.random() < 0.6:  # else it is lost, and asked for again
                mail[rank] += [written[agreement.round]] * dice.randint(1, 3)
            with pytest.raises(ExchangeError):
                agreement.for_step(steps[rank])
            continue
        decision = agreement.for_step(steps[rank])
        ran[rank].append((decision.choice, decision.canary))
        steps[rank] += 1
    for others in ran[1:]:
        assert others[:STEPS] == ran[0][:STEPS]


def test_a_canary_lasts_one_step() -> None:
    agreement = Agreement(Decision(0, (0, 0, 0)))
    agreement.take(0, 0, Decision(0, (1, 1, 1), 3, (4, 0)))
    assert [agreement.for_step(step).canary for step in range(3)] == [(4, 0), None, None]
    assert agreement.waits(3)


def test_in_a_hurry_the_next_round_comes_after_one_step() -> None:
    agreement = Agreement(Decision(0, (0, 0, 0)))
    agreement.take(0, 0, Decision(0, (1, 1, 1), 5), soon=True)
    assert not agreement.waits(0)
    assert agreement.waits(1)
    agreement.take(1, 1, Decision(0, (1, 1, 1), 5))
    assert [agreement.waits(step) for step in (5, 6)] == [False, True]


def test_the_alarm_rings_for_the_line_and_not_for_a_slow_rank() -> None:
    alarm = Alarm()
    rows = [[0.1, 0.1], [0.1, 0.9], [0.0, 0.0], [0.11, 0.1], [0.02, 0.9]]  # the third round had no step to be timed
    assert [alarm.rings(row, step=0.2) for row in rows] == [False, False, False, False, True]
    alarm = Alarm()
    assert [alarm.rings([seconds], step=1.0) for seconds in (0.02, 0.1)] == [False, False]  # a step hardly feels it


def test_a_round_that_is_skipped_is_an_error() -> None:
    agreement = Agreement(Decision(0, (0, 0, 0)))
    with pytest.raises(ExchangeError, match="round 0 of auto is missing"):
        agreement.take(1, 0, Decision(1, (1, 1, 1)))


def test_ranks_at_different_places_are_told() -> None:
    check_rows([[3.0, 12.0], [3.0, 12.0]], number=3)
    with pytest.raises(ExchangeError, match="rank 1 is at round 3, step 13"):
        check_rows([[3.0, 12.0], [3.0, 13.0]], number=3)
