"""One step of a reducer: from the first tensor after a commit to the next commit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..comm import streams
from ..comm.network import Pending, Traffic
from ..errors import ExchangeError
from ..exchange.request import Flag

if TYPE_CHECKING:
    from .buckets import Bucket
    from .lanes import Ticket

Outputs = Mapping[str, Tensor]


@dataclasses.dataclass
class Step:
    """What is under way, and what commit needs to know of it."""

    number: int
    plain: bool = False  # tensors are summed as they are
    measures: bool = False  # codecs tell how much of the gradient they keep
    samples: bool = False  # the meter's sinks want values that cost a pass
    checks: bool = False  # ranks compare hashes of the means
    works: dict[str, Work] = dataclasses.field(default_factory=dict)
    finite: list[Flag] = dataclasses.field(default_factory=list)
    energies: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # offered and left, where measured
    hashes: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    exposed_seconds: float = 0.0
    device: torch.device | None = None  # of tensors whose values stay on it
    traffic: Traffic = dataclasses.field(default_factory=Traffic)  # of the group itself before it

    def largest(self) -> Tensor | None:
        """The mean with the most elements."""
        means = [mean for work in self.works.values() for mean in work.outputs.values() if not mean.is_sparse]
        return max(means, key=Tensor.numel, default=None)

    def all_finite(self) -> Flag:
        """Whether every mean so far is: a bool, or a flag on the device."""
        on_device = [flag for flag in self.finite if isinstance(flag, Tensor)]
        if on_device:
            return torch.stack([flag.view(()) for flag in on_device]).all()
        return all(self.finite)


class Work:
    """A reduction under way. `wait()` returns the mean: a tensor, or as many as were given, by name.

    >>> from thinwire.comm.local import LocalNetwork
    >>> import thinwire as tw
    >>> reducer = tw.Reducer("bf16|all_reduce", group=LocalNetwork.alone())
    >>> work = reducer.start("w", torch.tensor([1.0, 2.5]))
    >>> work.wait()
    tensor([1.0000, 2.5000])
    >>> reducer.commit()
    True
    """

    def __init__(self, bucket: Bucket, outputs: Outputs, *, single: bool, sharded: bool = False) -> None:
        self.bucket, self.outputs, self._single = bucket, outputs, single
        self.sharded = sharded  # ranks get different parts of the mean
        self.ticket: Ticket | None = None  # of a lane
        self.pending: Pending | None = None  # of a plain sum
        self.event: Any = None  # on a device: when the mean is there
        self.is_sum = False  # it travels as it is
        self.copies: list[tuple[str, Tensor]] = []  # where a plain sum lies, by output
        self.failed = "a reduction failed"

    def wait(self) -> Any:
        """The mean, the same bits on every rank. On a device, the current stream waits and the host does not."""
        if self.ticket is not None:
            self.ticket.wait()
        self.finish_sum()
        if self.event is not None:
            streams.active().wait(self.event, self.bucket.device)
            for mean in self.outputs.values():
                streams.active().use(mean)
        return next(iter(self.outputs.values())) if self._single else dict(self.outputs)

    def finish_sum(self) -> None:
        """Wait for a plain sum."""
        pending, self.pending = self.pending, None
        if pending is not None:
            try:
                pending.wait()
            except ExchangeError as failure:
                raise ExchangeError(f"{self.failed}: {failure}") from failure
        copies, self.copies = self.copies, []
        for name, flat in copies:
            self.outputs[name].copy_(flat.view(self.outputs[name].shape))
