"""Rounds may be late, repeated or lost and sent again: no two ranks ever run different decisions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.auto.agreement import Agreement, Decision
from thinwire.auto.alarm import Alarm
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
    """Rank 0 decides at random. Every delivery to every rank may be delayed, repeated, or lost and sent again."""
    dice = random.Random(seed)
    first = Decision(0, (0, 0, 0))
    ranks = [Agreement(first) for _ in range(RANKS)]
    steps = [0] * RANKS
    ran: list[list[tuple[object, ...]]] = [[] for _ in range(RANKS)]
    written: list[tuple[int, int, Decision, bool]] = []  # number, step, decision of rank 0, whether all hurry
    inbox: list[list[tuple[int, int, Decision, bool]]] = [[] for _ in range(RANKS)]
    number = 0
    while min(steps) < STEPS:
        rank = dice.randrange(RANKS)
        agreement = ranks[rank]
        if inbox[rank] and dice.random() < 0.7:
            sent, at, decision, hurry = inbox[rank].pop(0)
            agreement.adopt(sent, at, decision, hurry=hurry)
            continue
        if agreement.needs_round(steps[rank]):
            if agreement.round == len(written):  # a round is a collective: the first rank that arrives writes it
                number += dice.random() < 0.4
                canary = (dice.randrange(9), 0) if dice.random() < 0.3 else None
                choice = (number % 7, number % 5, number % 3)
                decision = Decision(number, choice, dice.randint(1, 5), canary)
                written.append((len(written), steps[rank], decision, dice.random() < 0.2))
            if dice.random() < 0.6:  # else it is lost and requested again
                inbox[rank] += [written[agreement.round]] * dice.randint(1, 3)
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
    agreement.adopt(0, 0, Decision(0, (1, 1, 1), 3, (4, 0)))
    assert [agreement.for_step(step).canary for step in range(3)] == [(4, 0), None, None]
    assert agreement.needs_round(3)


def test_in_a_hurry_the_next_round_comes_after_one_step() -> None:
    agreement = Agreement(Decision(0, (0, 0, 0)))
    agreement.adopt(0, 0, Decision(0, (1, 1, 1), 5), hurry=True)
    assert not agreement.needs_round(0)
    assert agreement.needs_round(1)
    agreement.adopt(1, 1, Decision(0, (1, 1, 1), 5))
    assert [agreement.needs_round(step) for step in (5, 6)] == [False, True]


def test_the_alarm_reacts_to_the_link_and_not_to_a_slow_rank() -> None:
    alarm = Alarm()
    rows = [[0.1, 0.1], [0.1, 0.9], [0.0, 0.0], [0.11, 0.1], [0.02, 0.9]]  # no step was timed in the third round
    assert [alarm.update(row, step=0.2) for row in rows] == [False, False, False, False, True]
    alarm = Alarm()
    assert [alarm.update([seconds], step=1.0) for seconds in (0.02, 0.1)] == [False, False]  # a small part of the step


def test_a_round_that_is_skipped_is_an_error() -> None:
    agreement = Agreement(Decision(0, (0, 0, 0)))
    with pytest.raises(ExchangeError, match="received round 1 before round 0"):
        agreement.adopt(1, 0, Decision(1, (1, 1, 1)))
