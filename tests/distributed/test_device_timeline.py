"""On a device nothing waits on the host: every preset under a fake device, whose ops torch's race detector watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from support.fake_streams import SIDE, FakeDevice, HostReadError, RaceError, fake_device
from support.forced_auto import Wish, forced
from support.ledger import grad_of
from support.pool import Pool

Pools = Callable[[int], Pool]
STEPS = 4


class Training:
    """A small model on the fake device; its backward passes are watched."""

    def __init__(self, device: FakeDevice, recipe: Any, rank: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 40))
        self.model = DistributedDataParallel(
            self.net, bucket_cap_mb=0.02, find_unused_parameters=options.pop("unused", False)
        )
        self.device, self.rank, self.step_number = device, rank, 0
        self.link = tw.attach(self.model, recipe, **options)
        self._let_ddp_wait()

    def _let_ddp_wait(self) -> None:
        """DDP waits for a future: its stream then follows the one under which the future was completed."""
        finish, device = self.link._finish, self.device

        def finished() -> None:
            finish()
            with device.paused():
                event = device.record_on(SIDE if not self.plain() else 0)
                device.handler._handle_event_wait(event, 0)

        self.link._finish = finished  # type: ignore[method-assign]

    def plain(self) -> bool:
        return self.link.reducer._is_plain()

    def loss(self, scale: float = 1.0) -> Tensor:
        numbers = torch.Generator().manual_seed(1000 * self.step_number + self.rank)
        out: Tensor = self.model(torch.randn(8, 48, generator=numbers)).square().mean() * scale
        return out

    def step(self, scale: float = 1.0) -> None:
        self.net.zero_grad()
        loss = self.loss(scale)
        with self.device.watch():
            loss.backward()
        self.device.check()
        with torch.no_grad():
            for parameter in self.net.parameters():
                if parameter.grad is not None and bool(parameter.grad.isfinite().all()):
                    parameter.sub_(0.05 * parameter.grad)
        self.step_number += 1

    def weights(self) -> list[Any]:
        return [parameter.detach().tolist() for parameter in self.net.parameters()]

    def gradients(self) -> list[Any]:
        return [parameter.grad.tolist() for parameter in self.net.parameters() if parameter.grad is not None]


def trained(rank: int, world_size: int, recipe: str, options: dict[str, Any]) -> Any:
    with fake_device() as device:
        run = Training(device, recipe, rank, **options)
        for _ in range(STEPS):
            run.step()
        assert run.link.stats()["comm/bytes_total"] > 0
        run.link.close()
        return run.weights()


@pytest.mark.parametrize("recipe", tw.PRESETS)
def test_every_preset_is_ordered_and_reads_nothing(pools: Pools, recipe: str) -> None:
    first, second = pools(2).run(trained, recipe, {"check_every": 2})
    assert first == second


@pytest.mark.parametrize("recipe", ["top-k", "dgc", "powersgd-4", "two-shot-2-ef"])
def test_unused_parameters(pools: Pools, recipe: str) -> None:
    first, second = pools(2).run(trained, recipe, {"unused": True})
    assert first == second


def accumulated(rank: int, world_size: int, recipe: str) -> Any:
    with fake_device() as device:
        run = Training(device, recipe, rank)
        for _ in range(3):
            run.net.zero_grad()
            with run.model.no_sync():
                run.loss().backward()
            run.step_number += 1
            loss = run.loss()
            with device.watch():
                loss.backward()
            device.check()
            run.step_number += 1
        run.link.close()
        return run.gradients()


@pytest.mark.parametrize("recipe", ["two-shot-4", "threshold-k", "dense"])
def test_no_sync(pools: Pools, recipe: str) -> None:
    first, second = pools(2).run(accumulated, recipe)
    assert first == second


def overflown(rank: int, world_size: int, recipe: str) -> Any:
    """A step that is not finite on one rank: the flag on the device keeps everything as it was."""
    with fake_device() as device:
        run = Training(device, recipe, rank)
        for _ in range(2):
            run.step()
        before = [run.link.residual(name).tolist() for name in run.link.layout.of]
        run.step(float("nan") if rank else 1.0)
        assert all(not grad_of(parameter).isfinite().all() for parameter in run.net[0].parameters())
        after = [run.link.residual(name).tolist() for name in run.link.layout.of]
        run.step()
        run.link.close()
        return before == after, run.weights()


@pytest.mark.parametrize(
    "recipe", ["threshold-k", "top-k", "ar-top-k", "dgc", "powersgd-4", "two-shot-2-ef", "gaussian-k"]
)
def test_an_overflow_leaves_no_trace(pools: Pools, recipe: str) -> None:
    first, second = pools(2).run(overflown, recipe)
    assert first[0]
    assert second[0]
    assert first[1] == second[1]


def changed(rank: int, world_size: int) -> Any:
    with fake_device() as device:
        run = Training(device, "threshold-k", rank)
        for recipe in ("two-shot-4", "ar-top-k", "dense", "powersgd-4", "bf16"):
            run.step()
            run.link.set_recipe(recipe)
        for _ in range(2):
            run.step()
        run.link.close()
        return run.weights()


def test_set_recipe(pools: Pools) -> None:
    first, second = pools(2).run(changed)
    assert first == second


def chosen_by_auto(rank: int, world_size: int) -> Any:
    """`auto` with decisions that are forced: every round another recipe, and one more on a single bucket."""
    with fake_device() as device:
        run = Training(device, tw.auto(allow=["bf16", "two-shot-4", "threshold-k", "ar-top-k"]), rank)
        tuner: Any = run.link.reducer.policy
        for name in ("before_step", "before_wait", "after_step"):  # what ranks tell each other is read on the host
            setattr(tuner, name, _paused(device, getattr(tuner, name)))
        names = [one.name for one in tuner.candidates if one.name != "dense"]
        turns = zip(names, [*names[1:], names[0]], strict=True)
        forced(run.link, [Wish((name,), canary=(tried, 0)) for name, tried in turns])
        recipes = []
        for _ in range(12):
            run.step()
            recipes.append(str(run.link.recipe))
        run.link.close()
        return run.weights(), recipes


def _paused(device: FakeDevice, method: Callable[..., None]) -> Callable[..., None]:
    def instead(*args: Any) -> None:
        with device.paused():
            method(*args)

    return instead


def test_auto(pools: Pools) -> None:
    first, second = pools(2).run(chosen_by_auto)
    assert first == second
    assert len(set(first[1])) > 2


def in_a_loop_of_ones_own(rank: int, world_size: int, recipe: str) -> Any:
    """The public Reducer: the current stream waits for a mean, the host does not."""
    with fake_device() as device:
        reducer, seen = tw.Reducer(recipe, check_every=1), []
        for step in range(3):
            numbers = torch.Generator().manual_seed(10 * step + rank)
            tensors = {"w": torch.randn(40, 50, generator=numbers), "v": torch.randn(3000, generator=numbers)}
            with device.watch():
                made = {name: tensor * 2.0 for name, tensor in tensors.items()}  # on training's own stream
                works = [reducer.start(name, tensor) for name, tensor in made.items()]
                used = [work.wait() * 0.5 for work in works]
                reducer.commit()
            device.check()
            seen.append([one.tolist() for one in used])
        reducer.close()
        return seen


@pytest.mark.parametrize("recipe", ["dense", "bf16", "two-shot-4", "threshold-k", "powersgd-4"])
def test_the_public_reducer(pools: Pools, recipe: str) -> None:
    first, second = pools(2).run(in_a_loop_of_ones_own, recipe)
    assert first == second


# ------------------------------------------------------------------------------------------------ the test of the test


def forgetful(rank: int, world_size: int, number: int) -> str:
    """One of our waits is left out."""
    with fake_device() as device:
        run = Training(device, "two-shot-4", rank, check_every=0)
        run.step()
        device.skipped_wait = device.waits + number
        try:
            for _ in range(2):
                run.step()
        except RaceError as race:
            return str(race)
        finally:
            run.link.close()
        return ""


def test_a_missing_wait_is_found(pools: Pools) -> None:
    for told in pools(2).run(forgetful, 1):
        assert "races" in told


def reading(rank: int, world_size: int) -> str:
    """A codec that looks at a value."""
    with fake_device() as device:
        run = Training(device, "bf16|all_gather", rank)
        kind: Any = type(run.link.recipe.codec)
        write = kind.write
        kind.write = lambda self, x, *rest: (float(x.sum()), write(self, x, *rest))[1]
        try:
            run.step()
        except Exception as failure:
            return f"{type(failure).__name__} {failure} {failure.__cause__!r}"
        finally:
            kind.write = write
            run.link.close()
        return ""


def test_a_host_read_is_found(pools: Pools) -> None:
    for told in pools(2).run(reading):
        assert HostReadError.__name__ in told
