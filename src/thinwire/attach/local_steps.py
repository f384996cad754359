"""`local_steps`: ranks take optimizer steps of their own and exchange what they changed now and then."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.communicator import Communicator
from ..comm.network import Network
from ..errors import AttachError, OptionError
from ..recipe.compose import Recipe
from ..reduce import Meter, Reducer, Sink
from ..reduce.buckets import Exempt, Layout, Parameter, one_dimensional_or_tiny
from .local import autosave as saving
from .local.fragments import buckets, partition
from .local.link import LocalSteps
from .local.outer import Outer, OuterSteps
from .local.presets import LOCAL_PRESETS, LocalPreset
from .local.rounds import Rounds
from .local.schedule import Schedule
from .local.settings import Fragments, OuterFactory, Settings
from .local.tensors import ModelTensors, QuietDdp, check_same_start, check_shards, group_of, inner_optimizers, unwrapped
from .model import exempt_of


def local_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    preset: str = "average",
    *,
    every: int | str | None = None,
    recipe: Recipe | str | None = None,
    outer: Outer | OuterFactory | str | None = None,
    fragments: Fragments | None = None,
    delay: int | None = None,
    mixing: float | None = None,
    sync_state: Mapping[str, int] | None = None,
    keep: Literal["device", "cpu"] = "device",
    exempt: Exempt | Collection[str] = one_dimensional_or_tiny,
    autosave: str | Path | None = None,
    group: dist.ProcessGroup | Network | None = None,
    seed: int = 0,
    check_every: int = 10,
    sinks: Sequence[Sink] = (),
    log_every: int = 1,
    sample_every: int = 50,
) -> LocalSteps:
    """Let ranks take local steps, and average what they changed once a round. The training loop does not change.

    Call it on every rank, with the same weights, before the first step. A DDP model then no longer averages gradients.

    Args:
        model: any module: plain, in DDP, or sharded by FSDP2 (give `group`); or what torch.compile made of one.
        optimizer: the inner optimizer, or several that each take a step in turn.
        preset: a name of `LOCAL_PRESETS`; what is given beside it takes the place of its settings.
        every: a round is N optimizer steps, or a time such as `"30s"`: ranks may then take different numbers of steps.
        recipe: how pseudo-gradients (start minus end) travel: a recipe, its text, or the name of a preset.
        outer: what is done with their mean: `"average"`, `"sgd:lr,momentum"`, `"nesterov:lr,momentum"`, `"none:lr"`, or
            a function that builds a torch optimizer from the tensors of a fragment.
        fragments: that take turns within a round: their number, or the names of parameters or modules in each.
        delay: steps during which an exchange is under way in the background.
        mixing: the share that the local parameters keep after a delay.
        sync_state: keys of the inner optimizer's state, and after how many rounds each is averaged.
        keep: where the copy of the start and the outer optimizer's state are.
        exempt: which parameters travel exact: a function of name and parameter, or their names; `()` for none.
        autosave: a folder for the state after every round; if it holds one already, training resumes from it.
        group: the ranks that average; for sharded models those that hold the same shard.
        seed: of all random draws.
        check_every: every N turns ranks compare hashes of means and starts, and raise if they differ; 0 for never.
        sinks: where the numbers of every `log_every`-th turn go; see `thinwire.reduce`.
        sample_every: how often gain, memory norm and agreement are measured, in turns, if there are sinks.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with local_steps(model, optimizer, "diloco-1", every=4) as local:
    ...     for step in range(10):
    ...         model(torch.ones(1, 64)).square().mean().backward()
    ...         optimizer.step(); optimizer.zero_grad()
    >>> local
    LocalSteps(every=4 recipe=rotated:1|two_shot:1 outer=nesterov:0.7,0.9, rank 0 of 1, round 3, step 10)
    >>> dist.destroy_process_group()
    """
    chosen = _preset(preset)
    settings = Settings.of(
        chosen.every if every is None else every,
        chosen.recipe if recipe is None else recipe,
        chosen.outer if outer is None else outer,
        fragments=chosen.fragments if fragments is None else fragments,
        delay=chosen.delay if delay is None else delay,
        mixing=chosen.mixing if mixing is None else mixing,
        sync_state=sync_state,
    )
    if keep not in ("device", "cpu"):
        raise OptionError(f'keep says where the copy of the start is, "device" or "cpu", not {keep!r}')
    inner = inner_optimizers(optimizer)
    _check_inner(chosen, inner)
    module = unwrapped(model)
    tensors = ModelTensors(module, inner)
    found = group_of(module, group)
    network = found if isinstance(found, Network) else Communicator(found)  # type: ignore[arg-type]
    check_shards(module, network)
    check_same_start({**tensors.parameters, **tensors.buffers}, network)
    shares = partition(tensors.parameters, settings.fragments)
    start = {name: _kept(tensor, keep) for name, tensor in tensors.parameters.items()}
    rounds = Rounds(
        tensors,
        shares,
        outer=OuterSteps(settings.outer, [[start[name] for name in names] for names in shares]),
        start=start,
        buffers={name: _kept(tensor, keep) for name, tensor in tensors.buffers.items()},
        mixing=settings.mixing,
        in_background=settings.delay > 0,
    )
    meter = Meter(sinks=sinks, every=log_every, sample_every=sample_every)
    written = " ".join(f"{name}{list(tensor.shape)}" for name, tensor in tensors.parameters.items())
    facts = {"settings": str(settings), "parameters": written, "keep": keep}

    def build(where: Any) -> tuple[Reducer, Reducer]:
        """The reducers of a group: by the recipe, and of what travels as it is."""
        over = where if isinstance(where, Network) else Communicator(where)
        by_recipe = Reducer(
            settings.recipe,
            group=over,
            seed=seed,
            check_every=check_every,
            meter=meter,
            layout=_layout(tensors, shares, exempt),
            facts=facts,
        )
        return by_recipe, Reducer("dense", group=over, check_every=check_every)

    rounds.connect(*build(network))
    schedule = Schedule(steps=settings.steps, seconds=settings.seconds, fragments=settings.turns)
    folder = None if autosave is None else saving.folder_of(Path(autosave), network)
    local = LocalSteps(settings, rounds, schedule, QuietDdp(module, network), build=build, autosave=folder)
    if folder is not None:
        saving.resume(local, folder)
    return local


def _preset(name: str) -> LocalPreset:
    if name in LOCAL_PRESETS:
        return LOCAL_PRESETS[name]
    close = difflib.get_close_matches(str(name), LOCAL_PRESETS, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else f"use {', '.join(LOCAL_PRESETS)}"
    raise OptionError(f"there is no preset {name} of local steps: {hint}")


def _check_inner(preset: LocalPreset, inner: Sequence[torch.optim.Optimizer]) -> None:
    if preset.inner is not None and not any(type(one).__name__ == preset.inner for one in inner):
        raise AttachError(
            f"{preset.name} is made for torch.optim.{preset.inner} inside: give [torch.optim.{preset.inner}(matrices), "
            "torch.optim.AdamW(the rest)], or choose diloco"
        )


def _kept(tensor: Tensor, keep: str) -> Tensor:
    """A copy, float32 or wider: small outer steps would be lost in a narrower type."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    if keep == "cpu" and tensor.device.type != "cpu":
        return tensor.to("cpu", wide, copy=True).pin_memory()
    return tensor.to(wide, copy=True)


def _layout(tensors: ModelTensors, shares: Sequence[Sequence[str]], exempt: Exempt | Collection[str]) -> Layout:
    """Every fragment in buckets of its own."""
    local = tensors.parameters
    groups = [names for share in shares for names in buckets(local, share)]
    exempts = exempt_of(exempt, local)
    known = [
        dataclasses.replace(Parameter.of(name, tensor, exempts), dtype=torch.promote_types(tensor.dtype, torch.float32))
        for name, tensor in local.items()
    ]
    return Layout(known, groups)
