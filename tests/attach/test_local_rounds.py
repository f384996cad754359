"""Rounds of local steps: fragments, weights of ranks, what is not finite, state, autosave, and what is refused."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from support.local_runs import Net, adam, batch, in_threads, net, one_step, same, sgd, train, weights
from thinwire.attach.local.fragments import buckets, partition
from thinwire.attach.local.schedule import Schedule
from thinwire.comm.local import LocalNetwork, on_all_ranks

# --------------------------------------------------------------------------------------------------------- fragments


@pytest.mark.parametrize("fragments", [1, 2, 3, 5, 10])
def test_fragments_partition_the_parameters(fragments: int) -> None:
    parameters = dict(net().named_parameters())
    found = partition(parameters, fragments)
    assert len(found) == fragments
    assert sorted(name for names in found for name in names) == sorted(parameters)
    assert all(found)
    for names in found:
        assert [name for group in buckets(parameters, names) for name in group] == names


def test_layers_are_dealt_out_in_turn() -> None:
    found = partition(dict(net().named_parameters()), 3)
    for place, names in enumerate(found):
        assert {f"layers.{place}.weight", f"layers.{place}.bias"} <= set(names)


@pytest.mark.parametrize(
    ("fragments", "says"),
    [
        ([["embed"], ["layers", "head", "embed.bias"]], "embed.bias is in fragments 0 and 1"),
        ([["embed"], ["layers"]], "no fragment has head.weight"),
        ([["embed"], ["layer", "head"]], "fragment 1 names layer"),
        (11, "11 fragments of 10 parameters"),
    ],
)
def test_fragments_that_are_no_partition_are_refused(fragments: Any, says: str) -> None:
    with pytest.raises(tw.OptionError, match=says):
        partition(dict(net().named_parameters()), fragments)


def test_turns_are_spread_over_the_round() -> None:
    schedule, seen = Schedule(steps=10, seconds=None, fragments=4), []
    for step in range(1, 31):
        schedule.count += 1
        if schedule.due:
            seen.append((step, schedule.fragment, schedule.taken(), schedule.expected(schedule.turn)))
            schedule.begin()
            schedule.end(1.0)
    assert [step for step, *_ in seen] == [2, 5, 7, 10, 12, 15, 17, 20, 22, 25, 27, 30]
    assert all(taken == expected for *_, taken, expected in seen)
    assert all(taken == 10 for _, _, taken, _ in seen[4:])


# ------------------------------------------------------------------------------------------- different numbers of steps


@pytest.mark.parametrize(
    "options", [{"every": 4}, {"every": 6, "fragments": 3}, {"every": 6, "fragments": 2, "delay": 2}]
)
def test_a_rank_with_fewer_steps_takes_part_until_all_are_done(options: dict[str, Any]) -> None:
    lengths = [13, 5, 0]
    found = in_threads(3, lambda n: train(n.rank, n, lengths[n.rank], preset="diloco", recipe="two-shot-4", **options))
    assert all(same(found[0][0], other) for other, _ in found)
    assert [stats["local/steps"] for _, stats in found] == lengths
    assert not same(found[0][0], weights(net()))


@pytest.mark.parametrize("delay", [0, 1])
def test_contributions_weigh_by_steps(delay: int) -> None:
    """Rank 0 takes 2 steps of a round, rank 1 takes 6: in the mean they count 1 to 3."""

    def work(network: LocalNetwork) -> Any:
        w = nn.Parameter(torch.zeros(40, 30))
        optimizer = torch.optim.SGD([w], lr=1.0)
        options: dict[str, Any] = {"every": 6, "delay": delay, "mixing": 0.0}
        with tw.local_steps(nn.ParameterDict({"w": w}), optimizer, group=network, **options):
            for _ in range(2 if network.rank == 0 else 6):
                w.grad = torch.full_like(w, -1.0 if network.rank else 2.0)
                optimizer.step()
        return w.detach()

    for end in in_threads(2, work):
        torch.testing.assert_close(end, torch.full((40, 30), (2 * -4.0 + 6 * 6.0) / 8))


def test_a_round_may_last_a_time() -> None:
    """A slow rank takes fewer steps until the deadline; nobody counts steps for it."""
    clocks, seen = [0.0, 0.0], [0, 0]
    together = threading.Barrier(2)

    def work(network: LocalNetwork) -> Any:
        rank, model = network.rank, net()
        optimizer = sgd(model)
        local = tw.local_steps(model, optimizer, every="10s", group=network)
        local.schedule.clock = lambda: clocks[rank]
        local.schedule.restart()
        for step in range(12 if rank else 4):
            clocks[rank] += 1.0 if rank else 3.0
            before = local.round
            one_step(model, optimizer, step, rank)
            seen[rank] += local.round > before
        together.wait()
        local.finish()
        return weights(model), local.steps

    (one, fast), (other, slow) = in_threads(2, work)
    assert same(one, other)
    assert (fast, slow) == (4, 12)
    assert seen == [1, 1]


def test_gradients_that_a_scaler_skips_are_no_steps() -> None:
    """Also with fused optimizers, whose step is called although nothing happens in it."""

    def work(network: LocalNetwork, fused: bool) -> tuple[int, int]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        local = tw.local_steps(model, optimizer, every=3, group=network)
        for step in range(9):
            x, y = batch(step, network.rank)
            loss = (model(x) - y).square().mean()
            if step == 4 and network.rank == 0:
                loss = loss * float("inf")
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        local.finish()
        return local.steps, local.round

    for fused in (False, True):
        found = in_threads(2, functools.partial(work, fused=fused))
        assert [steps for steps, _ in found] == [8, 9]
        assert found[0][1] == found[1][1]


def test_two_optimizers_make_one_step() -> None:
    def work(network: LocalNetwork) -> Any:
        model = net()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() < 2]
        inner = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
        with tw.local_steps(model, inner, "muloco", every=3, group=network) as local:
            for step in range(7):
                x, y = batch(step, network.rank)
                model.zero_grad()
                (model(x) - y).square().mean().backward()
                for optimizer in inner:
                    optimizer.step()
        return weights(model), local.steps, local.round

    (one, steps, rounds), (other, *_) = in_threads(2, work)
    assert same(one, other)
    assert (steps, rounds) == (7, 3)


# --------------------------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("recipe", ["dense", "ef|top_k:0.1|all_gather", "two-shot-1-2", "two-shot-2"])
def test_a_round_that_is_not_finite_leaves_no_trace(recipe: str) -> None:
    def work(network: LocalNetwork) -> Any:
        model = net()
        optimizer = adam(model)
        local = tw.local_steps(model, optimizer, "diloco", every=3, recipe=recipe, group=network, exempt=())
        for step in range(3):
            one_step(model, optimizer, step, network.rank)
        before, names = weights(model), list(dict(model.named_parameters()))
        residuals = [local.residual(name) for name in names]
        outer = local.state_dict()[f"{network.rank}of2"]["local_steps"]["outer"]
        for step in range(3, 6):
            one_step(model, optimizer, step, network.rank)
            if step == 4 and network.rank == 1:
                with torch.no_grad():
                    model.get_parameter("layers.1.weight")[3, 4] = float("nan")
        after = weights(model)
        if network.rank == 0:  # its buffers were fine, and go on
            before.pop("mean"), after.pop("mean")
        kept = all(torch.equal(a, local.residual(name)) for a, name in zip(residuals, names, strict=True))
        now = local.state_dict()[f"{network.rank}of2"]["local_steps"]["outer"]
        same_outer = str(outer) == str(now)
        for step in range(6, 12):  # and it goes on
            one_step(model, optimizer, step, network.rank)
        return same(before, after), kept, same_outer, local.stats()["local/void_turns"], weights(model)

    one, other = in_threads(2, work)
    assert one[:4] == other[:4] == (True, True, True, 1.0)
    assert same(one[4], other[4])
    assert all(bool(tensor.isfinite().all()) for tensor in one[4].values())


# --------------------------------------------------------------------------------------------------------------- state

RESUMED: list[dict[str, Any]] = [
    {"preset": "diloco", "every": 5},
    {"preset": "sparseloco", "every": 5},
    {"preset": "diloco-1", "every": 6, "fragments": 3},
    {"preset": "diloco", "every": 6, "recipe": "two-shot-2-ef", "fragments": 2, "delay": 2, "mixing": 0.25},
    {"preset": "average", "every": 4, "sync_state": {"exp_avg": 1, "exp_avg_sq": 2}},
]


@pytest.mark.parametrize("at", [7, 8, 10])
@pytest.mark.parametrize("options", RESUMED, ids=lambda options: " ".join(map(str, options.values())))
def test_a_run_that_resumes_within_a_round_is_the_uninterrupted_one(options: dict[str, Any], at: int) -> None:
    def work(network: LocalNetwork) -> Any:
        def run(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> Any:
            for step in steps:
                one_step(model, optimizer, step, network.rank)

        model = net()
        optimizer = adam(model)
        local = tw.local_steps(model, optimizer, group=network, **options)
        run(model, optimizer, range(at))
        saved = (weights(model), optimizer.state_dict(), local.state_dict())
        saved = torch.load(_written(saved), weights_only=True)
        run(model, optimizer, range(at, 17))
        local.finish()
        again = Net()
        second = adam(again)
        resumed = tw.local_steps(_filled(again), second, group=network, **options)
        again.load_state_dict(saved[0])
        second.load_state_dict(saved[1])
        resumed.load_state_dict(saved[2])
        run(again, second, range(at, 17))
        resumed.finish()
        assert resumed.steps == local.steps
        assert resumed.round == local.round
        return same(weights(model), weights(again))

    assert in_threads(2, work) == [True, True]


def _written(saved: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return file


def _filled(model: Net) -> Net:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    return model


@pytest.mark.parametrize("new_world", [1, 2, 5])
def test_a_state_resumes_on_another_number_of_ranks(new_world: int) -> None:
    """The round begins again; residuals are dealt out so that their sum stays."""
    options: dict[str, Any] = {"preset": "sparseloco", "every": 4}
    name = "layers.1.weight"

    def before(network: LocalNetwork) -> Any:
        model = net()
        optimizer = adam(model)
        local = tw.local_steps(model, optimizer, group=network, **options)
        for step in range(4):
            one_step(model, optimizer, step, network.rank)
        at_round = weights(model)
        for step in range(4, 6):
            one_step(model, optimizer, step, network.rank)
        return local.state_dict(), at_round, local.residual(name)

    old = in_threads(3, before)

    def after(network: LocalNetwork) -> Any:
        model = net()
        optimizer = adam(model)
        local = tw.local_steps(model, optimizer, group=network, **options)
        local.load_state_dict([state for state, *_ in old])
        found, residual = weights(model), local.residual(name)
        for step in range(6, 10):
            one_step(model, optimizer, step, network.rank)
        return found, residual, local.round, weights(model)

    new = in_threads(new_world, after)
    for found, _, rounds, end in new:
        assert same(found, old[0][1])
        assert rounds == 2
        assert same(end, new[0][3])
    total = torch.stack([residual for _, residual, *_ in new]).sum(0)
    torch.testing.assert_close(total, torch.stack([residual for *_, residual in old]).sum(0))


@pytest.mark.parametrize(("new_world", "fragments"), [(2, 1), (2, 2), (3, 1)])
def test_autosave_resumes_after_the_last_whole_round(tmp_path: Path, new_world: int, fragments: int) -> None:
    options: dict[str, Any] = {"preset": "diloco-1", "every": 4, "fragments": fragments, "autosave": tmp_path}

    def run(network: LocalNetwork, steps: range) -> Any:
        model = net() if steps.start == 0 else _filled(Net())
        optimizer = adam(model)
        local = tw.local_steps(model, optimizer, group=network, **options)
        assert local.steps == steps.start or new_world == 3
        for step in steps:
            one_step(model, optimizer, step, network.rank)
        return weights(model)

    whole = in_threads(2, lambda network: run(network, range(16)))
    for folder in tmp_path.iterdir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    in_threads(2, lambda network: run(network, range(11)))  # killed in the third round
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-00000001", "round-00000002"]
    ends = in_threads(new_world, lambda network: run(network, range(8, 16)))
    if new_world == 2:
        assert all(same(*pair) for pair in zip(ends, whole, strict=True))
    else:
        assert all(same(ends[0], end) for end in ends)


def test_autosave_takes_the_last_round_that_all_ranks_have(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": 2, "autosave": tmp_path}
    in_threads(2, lambda network: train(network.rank, network, 6, finish=False, **options))
    (tmp_path / "round-00000003" / "1of2.pt").unlink()

    def rounds(network: LocalNetwork) -> int:
        model = net()
        return tw.local_steps(model, adam(model), group=network, **options).round

    assert in_threads(2, rounds) == [2, 2]
    (tmp_path / "round-00000002" / "0of2.pt").write_bytes(b"cut short")
    with pytest.raises(tw.StateError, match=r"0of2\.pt cannot be read"):
        in_threads(2, rounds)


# ----------------------------------------------------------------------------------------- a group that loses a rank


@pytest.mark.parametrize("options", [{"every": 4}, {"every": 6, "fragments": 2, "delay": 1}])
@pytest.mark.parametrize("recipe", ["dense", "ef|top_k:0.2|all_gather", "two-shot-1-2"])
def test_survivors_repeat_the_round_in_another_group(recipe: str, options: dict[str, Any]) -> None:
    """A rank is lost within an exchange. The others are as before it, and equal ranks that never had it."""
    networks = LocalNetwork.of(3)
    survivors = LocalNetwork.of(2)
    before = threading.Barrier(3)  # nobody is in an earlier exchange any more
    dies_at = 8

    def work(network: LocalNetwork) -> Any:
        model, rank = net(), network.rank
        optimizer = adam(model)
        local = tw.local_steps(model, optimizer, "diloco", recipe=recipe, group=network, exempt=(), **options)
        for step in range(16):
            if step == dies_at - 1:
                before.wait()
                if rank == 2:
                    network.abort()
                    return None
            try:
                one_step(model, optimizer, step, rank)
            except tw.ExchangeError:
                with pytest.raises(tw.ExchangeError, match="of local steps by"):
                    local.advance()
                taken = local.steps
                local.move_to(survivors[rank])
                assert local.steps == taken
        local.finish()
        return weights(model), local.round, local.steps

    results = on_all_ranks(networks, work)
    assert same(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert results[0][2] == 16
    assert results[0][1] == (4 if options["every"] == 4 else 3)


def test_what_was_not_delivered_is_not_taken_from_residuals() -> None:
    networks, survivors, before = LocalNetwork.of(2), LocalNetwork.of(1), threading.Barrier(2)
    name = "layers.0.weight"

    def work(network: LocalNetwork) -> Any:
        model = net()
        optimizer = sgd(model)
        local = tw.local_steps(model, optimizer, recipe="ef|top_k:0.1|all_gather", every=2, group=network)
        for step in range(2):
            one_step(model, optimizer, step, network.rank)
        residual, start = local.residual(name), weights(model)[name]
        one_step(model, optimizer, 2, network.rank)
        before.wait()
        if network.rank == 1:
            network.abort()
            return None
        with pytest.raises(tw.ExchangeError, match="round 1 of local steps by"):
            one_step(model, optimizer, 3, network.rank)
        assert torch.equal(local.residual(name), residual)
        change = start - weights(model)[name]
        local.move_to(survivors[0])  # alone, what is sent is all that is applied
        applied = start - weights(model)[name]
        return torch.allclose(applied + local.residual(name), residual + change, atol=1e-6)

    assert on_all_ranks(networks, work)[0]


def test_ranks_that_ended_different_turns_do_not_go_on_together() -> None:
    """A rank that was lost while ranks agreed leaves one ahead: they are told before anything is mixed."""
    networks = LocalNetwork.of(2)

    def work(network: LocalNetwork) -> None:
        model = net()
        alone = LocalNetwork.alone()
        local = tw.local_steps(model, sgd(model), every=2, group=alone)
        for _ in range(2 + 2 * network.rank):
            local.advance()
        with pytest.raises(tw.StateError, match=r"rank 0 has ended 1 turns of local steps and rank 1 2"):
            local.move_to(network)

    on_all_ranks(networks, work)


# ------------------------------------------------------------------------------------------------------------ beside it


def test_states_of_the_inner_optimizer_are_averaged_every_few_rounds() -> None:
    def work(network: LocalNetwork) -> Any:
        model = net()
        optimizer = adam(model)
        tw.local_steps(model, optimizer, every=2, sync_state={"exp_avg": 1, "exp_avg_sq": 2}, group=network)
        found = []
        for step in range(8):
            one_step(model, optimizer, step, network.rank)
            state = optimizer.state[model.head.weight]
            found.append((state["exp_avg"].clone(), state["exp_avg_sq"].clone()))
        return found

    one, other = in_threads(2, work)
    first = [torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True)]
    second = [torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True)]
    assert first == [step % 2 == 1 for step in range(8)]
    assert second == [step % 4 == 3 for step in range(8)]


def test_frozen_parameters_stay_and_buffers_are_averaged() -> None:
    def work(network: LocalNetwork) -> Any:
        model = net()
        model.embed.requires_grad_(False)
        with torch.no_grad():
            model.embed.weight += network.rank * 0.5  # not trained: not compared, not exchanged
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        with tw.local_steps(model, optimizer, every=3, group=network):
            for step in range(3):
                one_step(model, optimizer, step, network.rank)
        return model.embed.weight.detach(), model.mean.clone(), model.head.weight.detach()

    (one, mean, head), (other, mean2, head2) = in_threads(2, work)
    torch.testing.assert_close(other - one, torch.full_like(one, 0.5))
    assert torch.equal(mean, mean2)
    assert torch.equal(head, head2)


def test_bfloat16_parameters_keep_what_they_cannot_say_in_the_start() -> None:
    """An outer rate of 1/1024 moves nothing in bfloat16; in the float32 copies of the start it adds up."""

    def work(network: LocalNetwork) -> Any:
        w = nn.Parameter(torch.ones(40, 30, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([w], lr=0.5)
        local = tw.local_steps(nn.ParameterDict({"w": w}), optimizer, outer="sgd:0.001", every=1, group=network)
        for _ in range(20):
            w.grad = torch.ones_like(w)
            optimizer.step()
        return float(local.rounds.start["w"].mean()), float(w.detach().float().mean())

    for start, now in in_threads(2, work):
        assert start == pytest.approx(1 - 20 * 0.001 * 0.5, abs=1e-5)
        assert now == pytest.approx(start, abs=0.004)


# ---------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "every is a number"),
        ({"every": "soon"}, 'a time such as "30s"'),
        ({"preset": "dilocco"}, "did you mean diloco"),
        ({"outer": "adam"}, "no outer optimizer adam"),
        ({"outer": "nesterov:0.7,0.9,1"}, "takes 2"),
        ({"outer": "none"}, "write ef:0.95"),
        ({"fragments": 6}, "every=5"),
        ({"fragments": 2, "delay": 2}, "must end before the next"),
        ({"mixing": 0.5}, "give delay too"),
        ({"keep": "disk"}, "keep says where"),
        ({"sync_state": {"exp_avg": 0}}, "number of rounds"),
        ({"exempt": ["nobody"]}, "exempt names nobody"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], says: str) -> None:
    model = net()
    with pytest.raises(tw.OptionError, match=says):
        tw.local_steps(model, sgd(model), group=LocalNetwork.alone(), **options)


def test_ranks_that_start_apart_are_told_who_does() -> None:
    def work(network: LocalNetwork) -> Any:
        model = net(seed=network.rank // 2)
        with pytest.raises(tw.AttachError, match=r"rank 2 starts from another value of embed.weight"):
            tw.local_steps(model, sgd(model), group=network)

    in_threads(3, work)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(tw.AttachError, match="not the model's"):
        tw.local_steps(net(), sgd(net()), group=LocalNetwork.alone())


def test_after_close_the_optimizer_is_free() -> None:
    model = net()
    optimizer = sgd(model)
    local = tw.local_steps(model, optimizer, every=1, group=LocalNetwork.alone())
    one_step(model, optimizer, 0, 0)
    local.close()
    one_step(model, optimizer, 1, 0)
    assert local.round == local.steps == 1
    assert "round 1, step 1" in repr(local)


def test_presets_print_their_settings_and_source() -> None:
    for name, preset in tw.LOCAL_PRESETS.items():
        first, about, source = str(preset).splitlines()
        assert first.startswith(f"{name}: every=")
        assert about.strip()
        assert source.strip().startswith("Source: ")
        tw.parse(preset.recipe)
