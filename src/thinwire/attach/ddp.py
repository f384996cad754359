"""`attach`: puts a recipe into a DistributedDataParallel model.

No `from __future__ import annotations` here: DDP compares the annotations of a hook with live objects.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ..auto import Auto, auto
from ..comm.communicator import Communicator
from ..errors import AttachError, OptionError
from ..recipe.compose import Recipe
from ..reduce import Meter, Sink
from ..reduce.buckets import FIRST_BUCKET, Exempt, Layout, Parameter, one_dimensional_or_tiny
from ..reduce.recipes import checked_recipe
from .copies import Detached
from .link import Link, Scaler


def attach(
    model: torch.nn.Module,
    recipe: Recipe | str | Auto,
    *,
    warmup_steps: int = 0,
    exempt: Exempt | Collection[str] = one_dimensional_or_tiny,
    scaler: Scaler | None = None,
    seed: int = 0,
    sinks: Sequence[Sink] = (),
    log_every: int = 1,
    sample_every: int = 50,
) -> Link:
    """Let the gradients of a DDP model travel by a recipe. The training loop does not change.

    Call it on every rank, after wrapping the model and before the first backward pass.

    Args:
        model: a DistributedDataParallel model, or what torch.compile made of one.
        recipe: a recipe, its text, the name of a preset, or `"auto"`, which chooses while training (see `auto`).
        warmup_steps: so many first steps are sent uncompressed.
        exempt: which parameters travel exact: a function of name and parameter, or their names; `()` for none.
        scaler: the GradScaler in use, so that memories follow a change of its scale.
        seed: of all random draws.
        sinks: where the numbers of every `log_every`-th step go; see `thinwire.reduce`.
        sample_every: how often gain, memory norm and the agreement of the ranks are measured, if there are sinks.

    >>> import torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    >>> link = attach(model, "ef|top_k:0.01|bf16|all_gather")
    >>> model(torch.ones(1, 64)).sum().backward()
    >>> int(model.module.weight.grad.count_nonzero())  # one percent of 4096
    41
    >>> link.close(); dist.destroy_process_group()
    """
    ddp = _checked_model(model)
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise OptionError(f"warmup_steps is a number of steps, 0 or more, not {warmup_steps}")
    communicator = Communicator(ddp.process_group)
    found = _trained(ddp)
    exempts, sparse = _exempt(exempt, found), _sparse(ddp)
    known = [Parameter.of(name, p, exempts, sparse=id(p) in sparse) for name, p in found.items()]
    cap = int(ddp.bucket_bytes_cap)
    chooses = auto() if recipe == "auto" else recipe if isinstance(recipe, Auto) else None
    link = Link(
        known,
        {id(parameter): name for name, parameter in found.items()},
        checked_recipe("dense" if chooses is not None or isinstance(recipe, Auto) else recipe, communicator.world_size),
        communicator,
        seed=seed,
        warmup_steps=warmup_steps,
        layout=Layout.planned(known, first=min(FIRST_BUCKET, cap), cap=cap),
        model=weakref.ref(ddp),
        finds_unused=bool(ddp.find_unused_parameters),
        scaler=scaler,
        meter=Meter(sinks=sinks, every=log_every, sample_every=sample_every),
        auto=chooses,
        embeddings=_embeddings(ddp, found),
    )
    if link.pilot is not None:
        _time_forward(ddp, link)
    try:
        ddp.register_comm_hook(link, thinwire_hook)
    except RuntimeError as refusal:  # a hook written in C++, of which the model keeps no list
        link.close()
        raise AttachError(_ANOTHER_HOOK) from refusal
    return link


def thinwire_hook(link: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls when a bucket of gradients is ready."""
    if isinstance(bucket, tuple):
        raise AttachError(_PYTHON_REDUCER)
    future: torch.futures.Future[torch.Tensor] = link.take(bucket)
    return future


# ---------------------------------------------------------------------------------------------------------- checks

_PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp = "python_reducer" calls hooks for single gradients and ignores their result: '
    "set it to True, or leave it as it was, before building the DDP model"
)
_ONE_HOOK = "a DDP model takes one communication hook only, and "
_ATTACHED = f"{_ONE_HOOK}thinwire is attached: use link.set_recipe to change the recipe"
_ANOTHER_HOOK = f"{_ONE_HOOK}it has one: build the model anew without it"


def _checked_model(model: torch.nn.Module) -> DistributedDataParallel:
    ddp = getattr(model, "_orig_mod", model)  # of torch.compile(ddp)
    if not isinstance(ddp, DistributedDataParallel):
        raise AttachError(
            f"attach needs a DistributedDataParallel model, not {type(model).__name__}: "
            "wrap it first, DistributedDataParallel(model)"
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise AttachError(_PYTHON_REDUCER)
    if getattr(ddp, "mixed_precision", None) is not None:
        raise AttachError(
            "DistributedDataParallel(mixed_precision=...) uses the only communication hook itself: "
            "use torch.autocast instead"
        )
    hooks = getattr(ddp, "_comm_hooks", [])
    hooks[:] = [hook for hook in hooks if not isinstance(hook[1], Detached)]  # a copied model has no hook
    if hooks:
        raise AttachError(_ATTACHED if isinstance(hooks[0][1], Link) else _ANOTHER_HOOK)
    return ddp


def _trained(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters that DDP reduces, by name in the model, without `module.` in front."""
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    named = ddp.module.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad and name not in ignored}


def _sparse(ddp: DistributedDataParallel) -> set[int]:
    """Parameters that DDP expects sparse gradients of, by id; it looks at the same."""
    tables = [m for m in ddp.module.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag) and m.sparse]
    return {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}


def _embeddings(ddp: DistributedDataParallel, found: Mapping[str, Tensor]) -> dict[str, int]:
    """Elements of the tables of embeddings, by the name of the parameter."""
    tables = [m for m in ddp.module.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)]
    ids = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    return {name: parameter.numel() for name, parameter in found.items() if id(parameter) in ids}


def _time_forward(ddp: DistributedDataParallel, link: Link) -> None:
    """Weakly: a hook of the model must not keep the link alive."""
    held = weakref.ref(link)

    def begins(*_: object) -> None:
        if (found := held()) is not None and found.pilot is not None:
            found.pilot.forward_begins()

    def ends(*_: object) -> None:
        if (found := held()) is not None and found.pilot is not None:
            found.pilot.forward_ends()

    ddp.register_forward_pre_hook(begins)
    ddp.register_forward_hook(ends)


def _exempt(exempt: Exempt | Collection[str], found: Collection[str]) -> Exempt:
    if callable(exempt):
        return exempt
    names = {exempt} if isinstance(exempt, str) else set(exempt)
    if unknown := names - set(found):
        raise OptionError(f"exempt names {min(unknown)}, which the model does not train: it has {', '.join(found)}")
    return lambda name, parameter: name in names
