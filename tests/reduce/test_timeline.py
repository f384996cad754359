"""The host on a device's timeline: a few steps ahead and no more, and a rank that is lost is told, not waited for."""

from __future__ import annotations

import pytest
import torch

from support.fake_streams import FakeDevice, fake_device
from thinwire.errors import ExchangeError
from thinwire.recipe.compose import parse
from thinwire.reduce.deferred import Deferred
from thinwire.reduce.residuals import Residuals
from thinwire.reduce.step import Step
from thinwire.reduce.timeline import Timeline

CPU = torch.device("cpu")


class Stuck(FakeDevice):
    """A device on which nothing ends any more."""

    def passed(self, event: int) -> bool:
        return False


def settled(timeline: Timeline, number: int) -> None:
    step = Step(number)
    step.device = timeline.begin(CPU)
    timeline.settle(step, timeline.counts(step, True), Residuals(parse("bf16")))


def test_a_device_that_does_not_get_there_is_given_up_after_two_steps() -> None:
    with fake_device(Stuck()):
        timeline = Timeline(timeout=0.01)
        for number in range(2):
            settled(timeline, number)
            timeline.keep_up("step")
        settled(timeline, 2)
        with pytest.raises(ExchangeError, match="step 0 did not end within 0 s: a rank is lost"):
            timeline.keep_up("step 0")


def test_a_device_that_gets_there_is_not_waited_for() -> None:
    with fake_device():
        timeline = Timeline(timeout=0.0)
        for number in range(5):
            settled(timeline, number)
            timeline.keep_up("step")


def test_on_a_cpu_there_is_no_timeline() -> None:
    timeline, step = Timeline(timeout=0.0), Step(0)
    assert timeline.begin(CPU) is None
    assert timeline.counts(step, True) is True
    step.finite.append(False)
    assert timeline.counts(step, True) is False
    with timeline.beside():
        timeline.keep_up("step")


def test_values_are_looked_at_when_they_have_come_and_not_before() -> None:
    seen: list[float] = []
    with fake_device() as device:
        later = Deferred()
        later.add(torch.ones(1), CPU, lambda host: seen.append(float(host)))
        later.run()
        assert seen == []  # nothing has happened on the device since
        device.record(CPU)
        later.run()
        assert seen == [1.0]


def test_a_value_that_never_comes_is_not_waited_for() -> None:
    with fake_device(Stuck()):
        later = Deferred()
        later.add(torch.ones(1), CPU, lambda host: None)
        later.run()
        later.drain(seconds=0.01)
