"""`study` around real training loops: it sees what is sent, and changes nothing."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

import thinwire as tw
from thinwire.lab.study.memories import OfLink
from thinwire.lab.study.portrait import Lens, look
from thinwire.lab.study.sampler import Study

DENSITIES = (0.01, 0.1)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Dropout(0.1), nn.Linear(60, 40))


def batch(number: int) -> Tensor:
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(number))


def train(
    model: nn.Module, steps: int = 4, *, passes: int = 1, seen: Callable[[int], None] | None = None
) -> list[Tensor]:
    torch.manual_seed(99)  # dropout draws from it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            model(batch(step * passes + number)).square().mean().backward()
        if seen is not None:
            seen(step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hooks_of(model: nn.Module) -> int:
    held = [getattr(parameter, "_post_accumulate_grad_hooks", None) or {} for parameter in model.parameters()]
    return sum(len(each) for each in held) + len(_global_optimizer_pre_hooks)


# ----------------------------------------------------------------------------------------------------- changes nothing


@pytest.mark.parametrize("recipe", [None, "ef|top_k:0.05|local", "momentum_correction|top_k:0.05|local"])
def test_training_is_the_same_to_the_bit(recipe: str | None) -> None:
    plain = train(net())
    model = net()
    with tw.study(model, every=2, recipe=recipe, densities=DENSITIES, least=100) as found:
        studied = train(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, studied, strict=True))
    assert [sample["step"] for sample in found.samples] == [0, 2]
    assert list(found.samples[0]["layers"]) == ["0.weight", "3.weight"]
    assert found.samples[0]["whole"]["numel"] == sum(parameter.numel() for parameter in plain)


def test_hooks_go_at_the_end_after_an_error_and_after_the_last_step() -> None:
    model = net()
    before = hooks_of(model)
    with tw.study(model, densities=DENSITIES):
        assert hooks_of(model) > before
    assert hooks_of(model) == before
    with pytest.raises(RuntimeError, match="in the loop"), tw.study(model):
        raise RuntimeError("in the loop")
    assert hooks_of(model) == before
    with tw.study(model, every=1, steps=2, densities=DENSITIES) as found:
        train(model, 2)
        assert hooks_of(model) == before
        train(model, 2)
    assert len(found.samples) == 2


# ------------------------------------------------------------------------------------------------------ sees what is so


def seen_by(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, tuple[Tensor, Tensor | None]]]:
    """The tensors behind every look: u, and the gradient where it is not u."""
    kept: list[dict[str, tuple[Tensor, Tensor | None]]] = []

    def watched(tensors: Any, **options: Any) -> Any:
        kept.append({name: (u.clone(), None if g is None else g.clone()) for name, u, g in tensors})
        return look(tensors, **options)

    monkeypatch.setattr(sys.modules["thinwire.lab.study.sampler"], "look", watched)
    return kept


@pytest.mark.parametrize("passes", [1, 3])
def test_u_is_the_gradient_of_the_step_however_many_passes_it_took(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, model, grads = seen_by(monkeypatch), net(), []

    def remember(step: int) -> None:
        grads.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])

    with tw.study(model, every=1, densities=DENSITIES) as found:
        train(model, 3, passes=passes, seen=remember)
    assert found.steps_seen == len(kept) == 3
    for step, tensors in enumerate(kept):
        assert list(tensors) == [name for name, _ in model.named_parameters()]
        for (u, gradient), real in zip(tensors.values(), grads[step], strict=True):
            assert torch.equal(u, real.reshape(-1))
            assert gradient is None


def test_its_own_memory_keeps_what_top_k_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, model = seen_by(monkeypatch), net()
    codec = tw.codecs.top_k(0.05)
    with tw.study(model, at=[0, 2, 3], recipe="ef|top_k:0.05|local", densities=DENSITIES) as found:
        grads: list[Tensor] = []

        def keep(step: int) -> None:
            gradient = model.get_parameter("0.weight").grad
            assert gradient is not None
            grads.append(gradient.reshape(-1).clone())

        train(model, 4, seen=keep)
    memory = torch.zeros(2400)
    expected = []
    for gradient in grads:
        u = gradient + memory
        expected.append(u)
        memory = u - codec.decode(codec.encode(u))
    for place, step in enumerate((0, 2, 3)):
        assert torch.equal(kept[place]["0.weight"][0], expected[step])
        assert kept[place]["0.bias"][1] is None  # it would travel exact
    assert found.samples[0]["whole"]["gradient"] is None
    last = found.samples[-1]["whole"]
    assert last["gradient"]["numel"] == last["numel"]
    assert 0.1 < last["memory_share"] < 1


@pytest.mark.parametrize("passes", [1, 2])
def test_a_ddp_model_with_no_sync(passes: int, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = seen_by(monkeypatch)
    model = DistributedDataParallel(net())
    grads = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.study(model, every=1, densities=DENSITIES) as found:
        for step in range(3):
            optimizer.zero_grad()
            for number in range(passes):
                last = number == passes - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    model(batch(step * passes + number)).square().mean().backward()
            grads.append({name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None})
            optimizer.step()
    assert found.steps_seen == 3
    for tensors, real in zip(kept, grads, strict=True):
        assert tensors.keys() == real.keys()
        for name, (u, _) in tensors.items():
            assert torch.equal(u, real[name].reshape(-1))  # the mean of one rank is its own


@pytest.mark.parametrize("as_view", [False, True])
def test_the_gradient_is_that_of_this_rank_before_anything_is_averaged(
    as_view: bool, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that triples what it gets stands for the other ranks."""

    def tripled(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with live objects
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() * 3.0)
        return done

    kept = seen_by(monkeypatch)
    model = DistributedDataParallel(net(), gradient_as_bucket_view=as_view)
    model.register_comm_hook(None, tripled)
    with tw.study(model, every=1, densities=DENSITIES):
        grads: list[dict[str, Tensor]] = []

        def remember(step: int) -> None:
            grads.append({name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None})

        train(model, 3, seen=remember)
    for tensors, real in zip(kept, grads, strict=True):
        for name, (u, _) in tensors.items():
            torch.testing.assert_close(3.0 * u, real[name].reshape(-1))


@pytest.mark.parametrize("recipe", ["ef|top_k:0.05|all_gather", "error_feedback:0.5|top_k:0.05|all_gather"])
def test_u_of_an_attached_link_is_the_gradient_and_what_it_remembers(
    recipe: str, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = seen_by(monkeypatch)
    model = DistributedDataParallel(net())
    link = tw.attach(model, recipe)
    decay = 0.5 if "0.5" in recipe.partition("|")[0] else 1.0
    twin = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()
    twin.eval()
    with tw.study(model, every=1, densities=DENSITIES, least=100) as found:
        for step in range(4):
            owed = {name: link.residual(name) for name, _ in model.module.named_parameters()}
            twin.load_state_dict(model.module.state_dict())
            twin.zero_grad()
            twin(batch(step)).square().mean().backward()
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            for name, parameter in twin.named_parameters():
                assert parameter.grad is not None
                u = parameter.grad + decay * owed[name]
                torch.testing.assert_close(kept[step][name][0].view_as(u), u)
            assert (kept[step]["0.weight"][1] is not None) == (step > 0)
    link.close()
    assert found.result()["rows"][0]["recipe"] == str(link.recipe)
    assert found.samples[3]["whole"]["memory_share"] > 0


def test_with_a_link_the_weights_are_the_same_to_the_bit(alone: None) -> None:
    def run(studied: bool) -> list[Tensor]:
        model = DistributedDataParallel(net())
        link = tw.attach(model, "ef|threshold_k:0.05|bf16|all_gather")
        if studied:
            with tw.study(model, every=1, densities=DENSITIES):
                weights = train(model, 5)
        else:
            weights = train(model, 5)
        link.close()
        return weights

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_two_optimizers_of_one_model_make_one_step_and_strangers_none() -> None:
    model, other = net(), nn.Linear(3, 3)
    parameters = list(model.parameters())
    halves = [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.SGD(parameters[2:], lr=0.1)]
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    with tw.study(model, every=1, densities=DENSITIES) as found:
        for step in range(2):
            model(batch(step)).square().mean().backward()
            stranger.step()
            for optimizer in halves:
                optimizer.step()
    assert found.steps_seen == len(found.samples) == 2


def test_a_loop_without_an_optimizer_ends_its_steps_by_hand() -> None:
    model = net()
    with tw.study(model, every=1, densities=DENSITIES) as found:
        for step in range(2):
            model(batch(step)).square().mean().backward()
            found.step()
        found.step()  # no gradient has come since
    assert found.steps_seen == 2


def test_a_step_that_overflowed_says_so() -> None:
    model = net()
    with tw.study(model, every=1, densities=DENSITIES) as found:
        for scale in (float("inf"), 1.0):
            model.zero_grad()
            (model(batch(0)).square().mean() * scale).backward()
            found.step()
    assert not found.samples[0]["whole"]["finite"]
    assert found.samples[1]["whole"]["finite"]
    assert "not finite" in repr(found)
    assert found.result()["findings"]["not_finite"] > 0


def test_of_a_large_model_an_equal_share_of_every_parameter_is_kept() -> None:
    model = net()
    with tw.study(model, every=1, elements=100, most=1000, least=10, densities=DENSITIES) as found:
        train(model, 1)
    sample = found.samples[0]
    assert sample["share"] == pytest.approx(1000 / found.result()["settings"]["parameters"])
    assert sample["layers"]["0.weight"]["numel"] == round(sample["share"] * 2400)
    assert abs(sample["whole"]["numel"] - 1000) < 5


# ------------------------------------------------------------------------------------------------------------- results


def test_the_result_is_json_and_prints(tmp_path: Path) -> None:
    model = net()
    with tw.study(model, every=3, densities=DENSITIES, least=100) as found:
        assert "nothing sampled" in repr(found)
        with pytest.raises(tw.OptionError, match="nothing was sampled"):
            found.result()
        train(model, 4)
    told = json.loads(found.json(tmp_path / "s.json").read_text())
    assert (told["schema"], told["kind"]) == (1, "study")
    assert [sample["step"] for sample in told["rows"][0]["samples"]] == [0, 3]
    layer = told["rows"][0]["samples"][1]["layers"]["0.weight"]
    assert set(layer["fits"]) == {"gaussian", "laplace", "student_t"}
    assert layer["best"] in layer["fits"]
    assert [row["density"] for row in layer["contraction"]] == [0.01, 0.1]
    assert "kurtosis" in repr(found)
    assert found.write(tmp_path / "s.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"every": 0}, "every"),
        ({"at": [-1]}, "at"),
        ({"steps": 0}, "steps"),
        ({"elements": 3}, "elements"),
        ({"densities": [2.0]}, "densities"),
        ({"recipe": "dense"}, "no memory"),
        ({"recipe": "nonsense"}, "nonsense"),
    ],
)
def test_nonsense_is_refused_at_once(options: dict[str, Any], word: str) -> None:
    with pytest.raises(tw.ThinwireError, match=word):
        tw.study(net(), **options)


def test_a_model_must_train_and_a_link_brings_its_own_memory(alone: None) -> None:
    with pytest.raises(tw.OptionError, match="no parameter"):
        tw.study(nn.ReLU())
    model = DistributedDataParallel(net())
    link = tw.attach(model, "ef|top_k:0.05|all_gather")
    with pytest.raises(tw.OptionError, match="leave recipe out"):
        tw.study(model, recipe="ef|top_k:0.05|local")
    assert OfLink(link).offered("0.weight", torch.ones(2400)) is None  # nothing is owed before the first step
    link.close()


def test_the_name_stays_the_function_whatever_is_imported() -> None:
    script = (
        "import thinwire as tw; import thinwire.lab.study.bounds; from thinwire.lab.study.gradients import Settings;"
        "import thinwire.lab.study; from thinwire import study; import importlib;"
        "module = importlib.import_module('thinwire.lab.study');"
        "assert tw.study is study is module.study and callable(study), tw.study"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert isinstance(tw.study(net()), Study)


def test_a_lens_is_part_of_the_settings() -> None:
    assert Lens(densities=(0.1, 0.01)).told()["densities"] == [0.01, 0.1]
