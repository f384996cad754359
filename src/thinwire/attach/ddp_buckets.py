"""The size of DDP's buckets, changed after the model was wrapped: DDP calls its hook for full buckets only.

With its default of 25 MB, the gradients of a small model are ready for sending when backward ends. DDP builds its C++
reducer anew when a model is unpickled; this calls the same two methods. The old reducer takes its autograd hooks with
it. Where torch has no such methods, or a forward pass may be under way, DDP keeps its buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..reduce.buckets import FIRST_BUCKET, Bucket, InPlace, as_parameter

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

# That gradients travel in, if nothing else is known. On four ranks that share two cores, 2 were quickest: see
# benchmarks/results/2026-11-18-hotpath-buckets.json. More hide more and cost more processor time.
BUCKETS = 2
LEAST = 1 << 19  # bytes of a bucket: each costs processor time of its own


def planned_cap(total: int, cap: int) -> int:
    """Bytes of a bucket, for a model of `total` bytes; never more than the user allows.

    >>> planned_cap(13_000_000, 25 << 20), planned_cap(1_000_000, 25 << 20), planned_cap(10**9, 25 << 20)
    (6500000, 524288, 26214400)
    >>> planned_cap(1000, 25 << 20)  # one bucket anyway
    26214400
    """
    return cap if total <= LEAST else min(cap, max(LEAST, -(-total // BUCKETS)))


def can_rebuild(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's reducer may be built anew: no forward pass has run yet, and DDP has no special way to reduce."""
    has_methods = all(
        hasattr(ddp, name)
        for name in ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")
    )
    special = getattr(ddp, "_delay_all_reduce_params", None) or getattr(ddp, "bucket_bytes_cap_list", None)
    return has_methods and not special and getattr(ddp, "_lazy_init_ran", True) is False


def rebuild(ddp: DistributedDataParallel, cap: int, *, first: int) -> None:
    """Build DDP's reducer anew with buckets of `cap` bytes, `first` of them in the first; the hook has to follow."""
    model: Any = ddp
    config = getattr(model, "_bucket_config", None)
    if config is not None:  # torch 2.13 and newer
        model._bucket_config = dataclasses.replace(config, bucket_bytes_cap=cap, first_bucket_bytes_cap=first)
    model.bucket_bytes_cap, model.bucket_bytes_cap_default = cap, first < cap
    parameters, expect_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expect_sparse, names, model.static_graph)
    model.bucket_bytes_cap = max(cap, FIRST_BUCKET)  # torch.compile cuts graphs by it and refuses less
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()


def follow(ddp: DistributedDataParallel, state: object, hook: Any) -> None:
    """Put the hook that DDP has into its new reducer."""
    model: Any = ddp
    distributed: Any = torch.distributed
    model.logger._set_comm_hook_name(hook.__qualname__)
    distributed._register_comm_hook(model.reducer, state, hook)


class Seen:
    """What a bucket of DDP shows, which is the same in every step while its buffer and its parameters are."""

    def __init__(self, bucket: GradBucket, buffer: Tensor, names: Sequence[str]) -> None:
        gradients = zip(bucket.parameters(), bucket.gradients(), strict=True)
        self.views = dict(zip(names, (as_parameter(*pair) for pair in gradients), strict=True))
        self._buffer, self._names = buffer, list(names)
        self._in_place: dict[str, tuple[Bucket, InPlace | None]] = {}

    def shows(self, buffer: Tensor, names: Sequence[str]) -> bool:
        """Whether a bucket is the one that was seen."""
        same = buffer.data_ptr() == self._buffer.data_ptr() and buffer.numel() == self._buffer.numel()
        return same and self._names == names

    def in_place(self, ours: Bucket) -> InPlace | None:
        """Where the tensors of one of our buckets lie in it, if all of them do."""
        known = self._in_place.get(ours.name)
        if known is None or known[0] is not ours:
            whole = all(name in self.views for name in ours.names)
            known = ours, InPlace.of(ours, self.views, self._buffer) if whole else None
            self._in_place[ours.name] = known
        return known[1]
