"""Several messages per call: what exchanges ask of codecs, by the calls for one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..kernels import Spread
from ..rng import Key

if TYPE_CHECKING:
    from .base import Codec


class SeveralMessages:
    """Each message has a row and a key of its own; codecs that can loop in compiled code define these anew.

    A row may be longer than the body; the row of an empty place is left alone. Codecs that declare `in_place` take a
    `Spread` for a flat tensor.
    """

    if TYPE_CHECKING:  # of the codec

        def body_bytes(self, numel: int) -> int: ...
        def write(self, x: Tensor, body: Tensor, key: Key, state: dict[str, Any]) -> None: ...
        def add_body(self, body: Tensor, out: Tensor, key: Key, shape: tuple[int, ...]) -> None: ...
        def put_body(self, body: Tensor, out: Tensor, key: Key, shape: tuple[int, ...]) -> None: ...
        def new_state(self) -> dict[str, Any]: ...

    def write_rows(self, x: Tensor | Spread, places: Sequence[slice], rows: Tensor, keys: Sequence[Key]) -> None:
        """Write the body of x[place] at the start of each row; `x` is flat float32."""
        assert isinstance(x, Tensor)
        for place, row, key in zip(places, rows, keys, strict=True):
            if place.stop > place.start:
                self.write(x[place], row[: self.body_bytes(place.stop - place.start)], key, self.new_state())

    def add_rows(self, rows: Tensor, places: Sequence[slice], out: Tensor, keys: Sequence[Key]) -> None:
        """out[place] += what each row says, in the order of the rows."""
        for place, row, key in zip(places, rows, keys, strict=True):
            if (size := place.stop - place.start) > 0:
                self.add_body(row[: self.body_bytes(size)], out[place], key, (size,))

    def put_rows(
        self, rows: Tensor, places: Sequence[slice], out: Tensor | Spread, keys: Sequence[Key]
    ) -> bool | Tensor | None:
        """out[place] = what each row says. Returns whether all of it is finite, if that is known without a pass."""
        assert isinstance(out, Tensor)
        for place, row, key in zip(places, rows, keys, strict=True):
            if (size := place.stop - place.start) > 0:
                self.put_body(row[: self.body_bytes(size)], out[place], key, (size,))
        return None

    def write_mean(
        self,
        rows: Tensor,
        own: Tensor | Spread,
        body: Tensor,
        *,
        skip: int,
        keys: Sequence[Key],
        back: Codec,
        key: Key,
        held: Tensor | None = None,
        left: Tensor | None = None,
    ) -> None:
        """Write the mean of all rows but one and of `own` in its place, plus `held`, by the codec `back`.

        `left`, if given, becomes what the body does not carry; it may be `own`. What `own` holds else means nothing.
        """
        assert isinstance(own, Tensor)
        self.add_mean(rows, own, skip=skip, keys=keys)
        if held is not None:
            own += held
        if left is None:
            back.write(own, body, key, back.new_state())
            return
        back.write_taking(own, body, key, back.new_state())
        if left is not own:
            left.copy_(own)

    def add_mean(self, rows: Tensor, total: Tensor, *, skip: int, keys: Sequence[Key]) -> None:
        """Add all rows but one to `total`, in their order, and divide by the number of rows."""
        places = [slice(0, 0) if number == skip else slice(0, total.numel()) for number in range(len(rows))]
        self.add_rows(rows, places, total, keys)
        total.mul_(1.0 / len(rows))
