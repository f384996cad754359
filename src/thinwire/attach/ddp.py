"""`attach`: puts a recipe into a DistributedDataParallel model. It knows DDP and nothing of codecs.

No `from __future__ import annotations` here: DDP compares the annotations of a hook with live objects.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ..errors import AttachError, OptionError
from ..recipe.compose import Recipe, parse
from ..reduce import Meter, Reducer, Sink
from ..reduce.buckets import FIRST_BUCKET, Exempt, Layout, Parameter, one_dimensional_or_tiny
from ..reduce.policy import PolicyOptions
from . import ddp_buckets
from .link import Link
from .model import ANOTHER_HOOK, PYTHON_REDUCER, Scaler, checked_model, known_parameters


def attach(
    model: torch.nn.Module,
    recipe: Recipe | str | PolicyOptions,
    *,
    warmup_steps: int = 0,
    exempt: Exempt | Collection[str] = one_dimensional_or_tiny,
    bucket_cap_mb: float | None = None,
    scaler: Scaler | None = None,
    seed: int = 0,
    check_every: int = 100,
    sinks: Sequence[Sink] = (),
    log_every: int = 1,
    sample_every: int = 50,
) -> Link:
    """Let the gradients of a DDP model travel by a recipe. The training loop does not change.

    Call it on every rank, after wrapping the model and before the first backward pass.

    Args:
        model: a DistributedDataParallel model, or what torch.compile made of one.
        recipe: a recipe, its text, the name of a preset, or `"auto"`, which chooses while training (see `auto`).
        warmup_steps: the first N steps are sent uncompressed.
        exempt: which parameters travel exact: a function of name and parameter, or their names; `()` for none.
        bucket_cap_mb: the most that travels together, in MiB of gradients. None: half of the model, at most what DDP
            was given, so that the first bytes leave early. DDP's buckets are built anew for it; after a forward
            pass they stay as they are.
        scaler: the GradScaler in use, so that residuals follow a change of its scale.
        seed: of all random draws.
        check_every: every N steps ranks compare a hash of means and weights, and raise if they differ; 0 for never.
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
    ddp = checked_model(model, Link)
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise OptionError(f"warmup_steps is a number of steps, 0 or more, not {warmup_steps}")
    if recipe == "auto":
        from ..auto import auto  # and all that predicts, which others do not need

        recipe = auto()
    policy = None if isinstance(recipe, Recipe | str) else recipe
    if policy is not None and not callable(getattr(policy, "bind", None)):
        raise AttachError(f"attach takes a recipe, its text or the name of a preset, not {recipe!r}")
    known = known_parameters(ddp, exempt)
    cap = _cap(ddp, known, bucket_cap_mb, changes=not _dense(recipe))
    written = " ".join(f"{p.name}{list(p.shape)}{'=' if p.exact else ''}" for p in known)
    reducer = Reducer(
        recipe if isinstance(recipe, Recipe | str) else "dense",
        group=ddp.process_group,
        seed=seed,
        check_every=check_every,
        policy=policy,
        warmup_steps=warmup_steps,
        meter=Meter(sinks=sinks, every=log_every, sample_every=sample_every),
        layout=Layout.planned(known, first=min(FIRST_BUCKET, cap), cap=cap),
        facts={
            "warm-up": str(warmup_steps),
            "bucket_cap": str(cap),
            "parameters": written,
            "sample_every": str(sample_every),
        },
    )
    link = Link(ddp, reducer, scaler)
    try:
        ddp.register_comm_hook(link, thinwire_hook)
    except RuntimeError as refusal:  # a hook written in C++, of which the model keeps no list
        link.close()
        raise AttachError(ANOTHER_HOOK) from refusal
    if cap != int(ddp.bucket_bytes_cap):
        ddp_buckets.rebuild(ddp, cap, first=min(FIRST_BUCKET, cap))
        ddp_buckets.follow(ddp, link, thinwire_hook)
    return link


def _dense(recipe: Recipe | str | PolicyOptions) -> bool:
    """Whether gradients travel as DDP sends them, so that its buckets suit."""
    if not isinstance(recipe, Recipe | str):
        return False
    checked = parse(recipe) if isinstance(recipe, str) else recipe
    return checked.dense and checked.memory is None


def _cap(ddp: DistributedDataParallel, known: Sequence[Parameter], wanted: float | None, *, changes: bool) -> int:
    """Bytes of a bucket of gradients."""
    given = int(ddp.bucket_bytes_cap)
    if wanted is not None and not wanted > 0:
        raise OptionError(f"bucket_cap_mb is a size in MiB, more than 0, not {wanted}")
    if not ddp_buckets.can_rebuild(ddp):
        return given
    if wanted is not None:
        return max(1, int(wanted * (1 << 20)))
    total = sum(parameter.numel * parameter.dtype.itemsize for parameter in known)
    return ddp_buckets.planned_cap(total, given) if changes else given


def thinwire_hook(link: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls when a bucket of gradients is ready."""
    if isinstance(bucket, tuple):
        raise AttachError(PYTHON_REDUCER)
    future: torch.futures.Future[torch.Tensor] = link.take(bucket)
    return future
