"""Local steps between real processes: presets, DDP, FSDP2, resumed runs, and ranks that fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from support.local_runs import Weights, adam, batch, in_threads, net, one_step, same, sgd, train, weights
from support.pool import Pool, run_fresh

Pools = Callable[[int], Pool]


def trained(rank: int, world_size: int, options: dict[str, Any]) -> tuple[Weights, dict[str, float]]:
    return train(rank, None, 14, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "average", "every": 4},
        {"preset": "diloco", "every": 4},
        {"preset": "diloco-1", "every": 4},
        {"preset": "sparseloco", "every": 4},
        {"preset": "diloco-1", "every": 6, "fragments": 3, "delay": 1},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_all_ranks_end_with_the_same_bits(pools: Pools, options: dict[str, Any]) -> None:
    results = pools(3).run(trained, options)
    assert all(same(results[0][0], other) for other, _ in results)
    assert results[0][1]["local/steps"] == 14
    assert results[0][1]["local/rounds"] == (3 if options["every"] == 6 else 4)


ONE_BIT = "two-shot-1"
SPARSE = "ef:0.95|chunked_top_k:0.02|bin_mean:2|all_gather"


@pytest.mark.parametrize("recipe", ["fp32|two_shot", ONE_BIT, SPARSE])
def test_threads_of_one_process_stand_for_processes(pools: Pools, recipe: str) -> None:
    """To the bit, but for what gloo adds in an order of its own: buffers, and exact parts beside an all-gather."""
    options: dict[str, Any] = {"preset": "diloco", "every": 4, "recipe": recipe, "exempt": ()}
    processes = pools(4).run(trained, options)
    threads = in_threads(4, lambda network: train(network.rank, network, 14, **options))
    for (ours, _), (theirs, _) in zip(threads, processes, strict=True):
        torch.testing.assert_close(ours.pop("mean"), theirs.pop("mean"))
        assert same(ours, theirs)


# ------------------------------------------------------------------------------------------------------------ DDP


def in_ddp(rank: int, world_size: int) -> dict[str, Any]:
    """DDP sends nothing within a round, gradients accumulate, and only optimizer steps count."""
    model = DistributedDataParallel(net())
    optimizer = sgd(model)
    local = tw.local_steps(model, optimizer, "diloco", every=3)
    sent: list[float] = []
    for step in range(6):
        for part in range(2):
            x, y = batch(2 * step + part, rank)
            (model(x) - y).square().mean().backward()
        apart = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        sent.append(local.stats()["local/bytes_total"])
    local.finish()
    found = weights(model)
    local.close()
    x, y = batch(0, rank)
    (model(x) - y).square().mean().backward()  # it averages again
    again = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
    return {"weights": found, "apart": apart, "again": again, "sent": sent, "round": local.round}


def plain(rank: int, world_size: int) -> Weights:
    """The same without DDP."""
    model = net()
    optimizer = sgd(model)
    with tw.local_steps(model, optimizer, "diloco", every=3):
        for step in range(6):
            for part in range(2):
                x, y = batch(2 * step + part, rank)
                (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_ddp_keeps_quiet_within_a_round(pools: Pools) -> None:
    found = pools(2).run(in_ddp)
    assert same(found[0]["weights"], found[1]["weights"])
    assert all(same(one["weights"], other) for one, other in zip(found, pools(2).run(plain), strict=True))
    assert not torch.equal(found[0]["apart"], found[1]["apart"])
    assert torch.equal(found[0]["again"], found[1]["again"])
    sent = found[0]["sent"]
    assert sent[0] == sent[1] < sent[2] == sent[4] < sent[5]
    assert found[0]["round"] == 2


def other_groups(rank: int, world_size: int) -> list[str]:
    """A DDP model that an attached link compresses, and one over the ranks of a node."""
    said = []
    model = DistributedDataParallel(net())
    link = tw.attach(model, "bf16")
    try:
        tw.local_steps(model, sgd(model))
    except tw.AttachError as refusal:
        said.append(str(refusal))
    link.close()
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    inner = DistributedDataParallel(net(), process_group=nodes[rank // 2])
    optimizer = sgd(inner)
    with tw.local_steps(inner, optimizer, every=2, group=across[rank % 2]):
        for step in range(3):
            one_step(inner, optimizer, step, rank)
    everyone = [torch.zeros_like(inner.module.head.weight) for _ in range(world_size)]
    dist.all_gather(everyone, inner.module.head.weight.detach())
    said.append(str(all(torch.equal(everyone[0], one) for one in everyone)))
    return said


def test_ddp_within_a_node_goes_on(pools: Pools) -> None:
    for refused, equal in pools(4).run(other_groups):
        assert "use one of them" in refused
        assert equal == "True"


# ----------------------------------------------------------------------------------------------------------- FSDP2


def sharded(rank: int, world_size: int, preset: str, folder: str | None) -> Any:
    """Two shards, each held by two ranks: shards meet their like, and the whole is as without shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = net()
    for block in model.layers:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo adds and does not divide for AVG, pytorch#162338
    optimizer = adam(model)
    said = []
    for group in (None, dist.group.WORLD):
        try:
            tw.local_steps(model, optimizer, preset, group=group)
        except tw.AttachError as refusal:
            said.append(str(refusal))
    options: dict[str, Any] = {"every": 3, "group": mesh["replicate"].get_group(), "autosave": folder, "exempt": ()}
    local = tw.local_steps(model, optimizer, preset, **options)
    begin = local.steps
    for step in range(begin, 8):
        # Ranks of one shard group see the same data; replicas see their own.
        one_step(model, optimizer, step, rank // 2)
    if folder is None or begin:
        local.finish()
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return whole, said, begin


@pytest.mark.parametrize("preset", ["diloco", "sparseloco"])
def test_shards_meet_their_like(pools: Pools, preset: str) -> None:
    found = pools(4).run(sharded, preset, None)
    for whole, said, _ in found:
        assert same(whole, found[0][0])
        assert "the model is sharded" in said[0]
        assert "fully_shard with the shard dimension alone" in said[1]
    if preset == "diloco":
        expected = in_threads(2, lambda network: train(network.rank, network, 8, preset=preset, every=3))[0][0]
        for name, tensor in found[0][0].items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5)


def test_a_sharded_run_resumes_from_its_folder(pools: Pools, tmp_path: Path) -> None:
    pools(4).run(sharded, "sparseloco", str(tmp_path))
    resumed = pools(4).run(sharded, "sparseloco", str(tmp_path))
    whole = pools(4).run(sharded, "sparseloco", None)
    assert [begin for *_, begin in resumed] == [6] * 4
    assert same(resumed[0][0], whole[0][0])


# ------------------------------------------------------------------------------------------------------------ failures


def spoiled(rank: int, world_size: int, recipe: str) -> tuple[bool, bool, float, Weights]:
    model = net()
    optimizer = adam(model)
    local = tw.local_steps(model, optimizer, "diloco", every=2, recipe=recipe, check_every=1)
    for step in range(2):
        one_step(model, optimizer, step, rank)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    residuals = {name: local.residual(name) for name in before}
    for step in range(2, 4):
        if step == 3 and rank == 1:
            with torch.no_grad():
                model.head.weight[0, 0] = float("inf")
        one_step(model, optimizer, step, rank)
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = all(torch.equal(local.residual(name), residual) for name, residual in residuals.items())
    for step in range(4, 9):
        one_step(model, optimizer, step, rank)
    local.finish()
    return same(before, after), kept, local.stats()["local/void_turns"], weights(model)


@pytest.mark.parametrize("recipe", ["dense", "two-shot-1", "ef:0.95|chunked_top_k:0.02|bin_mean:2|all_gather:median"])
def test_a_value_that_is_not_finite_on_one_rank_voids_the_round_on_all(pools: Pools, recipe: str) -> None:
    found = pools(3).run(spoiled, recipe)
    assert all(one[:3] == (True, True, 1.0) for one in found)
    assert all(same(one[3], found[0][3]) for one in found)
    assert all(bool(tensor.isfinite().all()) for tensor in found[0][3].values())


def killed(rank: int, world_size: int, folder: str) -> Any:
    """Rank 2 dies within a round; the others are told which, with parameters and residuals as before the exchange."""
    model = net()
    optimizer = adam(model)
    local = tw.local_steps(model, optimizer, "sparseloco", every=4, autosave=folder)
    for step in range(4):
        one_step(model, optimizer, step, rank)
    residual = local.residual("layers.0.weight")
    for step in range(4, 7):
        one_step(model, optimizer, step, rank)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        one_step(model, optimizer, 7, rank)
    except tw.ExchangeError as failure:
        return str(failure), torch.equal(residual, local.residual("layers.0.weight")), local.round
    return "nothing was raised"


def resumed(rank: int, world_size: int, folder: str) -> Any:
    model = net(seed=0)
    optimizer = adam(model)
    local = tw.local_steps(model, optimizer, "sparseloco", every=4, autosave=folder)
    begin = local.round, local.steps
    for step in range(4, 8):
        one_step(model, optimizer, step, rank)
    return begin, local.round, weights(model)


def test_a_rank_that_dies_costs_the_round_and_the_others_resume_without_it(pools: Pools, tmp_path: Path) -> None:
    outcomes = run_fresh(3, killed, str(tmp_path), timeout=10.0, expect_death=[2])
    for kind, value in outcomes[:2]:
        assert kind == "returned", value
        told, kept, rounds = value
        assert "round 1 of local steps by error_feedback:0.95|chunked_top_k" in told
        assert kept
        assert rounds == 1
    ends = pools(2).run(resumed, str(tmp_path))
    assert [end[:2] for end in ends] == [((1, 4), 2)] * 2
    assert same(ends[0][2], ends[1][2])


def a_look_at_it(rank: int, world_size: int) -> list[str]:
    """Threads, groups and hooks are gone after the block."""
    import threading

    model = net()
    optimizer = sgd(model)
    with tw.local_steps(model, optimizer, "diloco-1", every=2, fragments=2) as local:
        for step in range(5):
            one_step(model, optimizer, step, rank)
        shown = repr(local)
    one_step(model, optimizer, 9, rank)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]
    return [shown, *left]


def test_nothing_is_left_after_the_block(pools: Pools) -> None:
    for found in pools(2).run(a_look_at_it):
        assert len(found) == 1
        assert "fragments=2, rank " in found[0]
        assert "round 2, step 5" in found[0]
