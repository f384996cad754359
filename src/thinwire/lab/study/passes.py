"""Counts how often code reads a tensor while it runs: the passes of a selector are measured, not claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOOKS = frozenset(
    (
        *("__get__", "__getitem__", "__setitem__", "__len__", "numel", "dim", "size", "stride", "is_contiguous"),
        *("view", "reshape", "detach", "untyped_storage", "storage_offset", "data_ptr", "index_put_"),
    )
)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, Tensor):
            yield value


class Passes(TorchFunctionMode):
    """Adds up the elements of `x`, of its views and of temporaries made from it that any operation reads.

    A compiled loop reads what it is handed as a NumPy array. An operation on a strided sample counts as the part that
    the sample is; reading single positions counts as nothing.

    >>> import torch
    >>> x = torch.arange(8.0)
    >>> with Passes(x) as passes:
    ...     _ = x.abs().mean(), x[::4].sum(), x[0]
    >>> passes.count
    2.25
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self._numel, self._read = max(1, x.numel()), 0
        self._known = {x.untyped_storage().data_ptr(): x}  # held, so that no address is used twice

    @property
    def count(self) -> float:
        """Elements read over elements of the tensor."""
        return self._read / self._numel

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _LOOKS:
            return found
        read = [given.numel() for given in _tensors(args) if given.untyped_storage().data_ptr() in self._known]
        if read:
            self._read += max(read)
            for made in _tensors(found):
                if made.numel() == self._numel:
                    self._known[made.untyped_storage().data_ptr()] = made
        return found
