"""Rotated quantisation: a random rotation makes a tensor look Gaussian, which one to four bits describe well."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import kernels, theory
from ..comm import streams
from ..kernels import Spread
from ..recipe.registry import register
from ..rng import Key
from .base import Codec, Shape, State
from .scales import SCALE_BYTES, take_scales

# Positive half of the Lloyd-Max codebooks of a unit Gaussian (fixed point of Lloyd's iteration, float64).
_CODEWORDS = {
    1: (0.797884561,),
    2: (0.452780035, 1.510417608),
    3: (0.245094179, 0.756005281, 1.343909279, 2.151945705),
    4: (0.128395030, 0.388048299, 0.656759119, 0.942340456, 1.256231197, 1.618046386, 2.069017227, 2.732589571),
}


def _rounds(key: Key) -> tuple[Key, Key]:
    """Of the rotations, one after the other.

    `kernels.TwoRounds` makes them of several keys. One turns a block with one or two dominating elements into few
    distinct values, whose error is a bias that stays from step to step (measured: 2.2 times the Gaussian error, nearly
    all of it bias). Such a block is rotated twice.
    """
    return key.fold(0), key.fold(1)


@functools.cache
def gaussian_codebook(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codewords and the boundaries half-way between them, float32."""
    half = torch.tensor(_CODEWORDS[bits], dtype=torch.float64)
    words = torch.cat((-half.flip(0), half))
    boundaries = (words[1:] + words[:-1]) / 2
    return words.to(device, torch.float32), boundaries.to(device, torch.float32)


@functools.cache
def _smaller_scales(bits: int, device: torch.device) -> Tensor:
    """The codebook that makes the encoder's scale |z|^2 / <c, z> smaller by 1 - D: with it only scales differ."""
    return gaussian_codebook(bits, device)[0] / (1 - theory.LLOYD_MAX_ERROR[bits])


@register
class Rotated(Codec):
    """Rotates blocks of 1024 at random, then sends the nearest Lloyd-Max codeword and one scale a block.

    `bits`: 1 to 4. `scale`: "unbiased" is |z|^2 / <c, z>, which makes the result unbiased if the rotation is uniform
    (EDEN). "mmse" is 1 - D times that, where D is the codebook's error on a Gaussian: the smallest error, with a result
    that is too short by D. It is for error feedback: the residual of white gradients settles at D / (1 - D) times their
    energy, instead of D / (1 - 2D), and their energy is what is sent, instead of 1 / (1 - 2D) times that.
    Random Hadamard transforms come close to uniform rotations. One is used where no element has more than 1/32 of the
    block's energy and many carry the rest: the worst bias found is 2.4 % of the block's norm (12 equal elements with
    3/8 of the energy).
    Two are used elsewhere: where one element outweighs all others, a bias of up to 1.5 % was found (7 % in a last block
    of 64), else none.
    A block of 1024 with inf or NaN decodes to NaN, as does one with magnitudes above 1e35, which the rotation may
    overflow; one whose root mean square is below 2**-100 decodes to zero.
    Reference: Vargaftik et al. 2022, EDEN, arXiv 2108.08842.

    >>> codec = rotated(4)
    >>> x = torch.linspace(-1, 1, 1000)
    >>> float((codec.decode(codec.encode(x)) - x).norm() / x.norm()) < 0.12
    True
    >>> codec.wire_bytes(1024)
    548
    >>> closer = rotated(1, scale="mmse")
    >>> rotated(1).unbiased, round(rotated(1).omega(1024), 2), closer.unbiased, round(1 - closer.delta(1024), 2)
    (True, 0.6, False, 0.37)
    """

    name: ClassVar[str] = "rotated"
    examples: ClassVar[tuple[str, ...]] = ("rotated:1", "rotated:2", "rotated:4", "rotated:1,scale=mmse")
    whole_tensors: ClassVar[bool] = True
    in_place: ClassVar[bool] = True
    bits: int
    scale: Literal["unbiased", "mmse"] = field(default="unbiased", kw_only=True)

    def __post_init__(self) -> None:
        self._require(self.bits in _CODEWORDS, f"bits must be 1, 2, 3 or 4, got {self.bits}")
        self._require(self.scale in ("unbiased", "mmse"), f"scale must be 'unbiased' or 'mmse', got {self.scale!r}")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]  # the base declares it for the class
        return self.scale == "unbiased"

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        scales = kernels.blocks_of(numel, kernels.ROTATION)
        return scales * SCALE_BYTES + kernels.packed_bytes(kernels.rotated_numel(numel), self.bits)

    def omega(self, numel: int) -> float | None:
        return theory.rotated(self.bits) if self.unbiased else None

    def delta(self, numel: int, *, shape: Shape | None = None) -> float | None:
        return None if self.unbiased else theory.rotated_mmse(self.bits)

    def _tables(self, device: torch.device) -> dict[str, Tensor]:
        """What the encoder looks up."""
        codebook, boundaries = gaussian_codebook(self.bits, device)
        return {"codebook": codebook if self.unbiased else _smaller_scales(self.bits, device), "boundaries": boundaries}

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat = x.reshape(-1)
        scales, codes = take_scales(body, kernels.blocks_of(flat.numel(), kernels.ROTATION))
        kernels.rotated_encode(flat, scales, codes, keys=_rounds(key), **self._tables(flat.device), bits=self.bits)

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        self._decode(body, out, key, fresh=False)

    def put_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        self._decode(body, out, key, fresh=True)

    def _decode(self, body: Tensor, out: Tensor, key: Key, *, fresh: bool) -> None:
        scales, codes = take_scales(body, kernels.blocks_of(out.numel(), kernels.ROTATION))
        codebook, _ = gaussian_codebook(self.bits, out.device)
        kernels.rotated_add(codes, scales, out, keys=_rounds(key), codebook=codebook, bits=self.bits, fresh=fresh)

    def write_rows(self, x: Tensor | Spread, places: Sequence[slice], rows: Tensor, keys: Sequence[Key]) -> None:
        options: dict[str, Any] = {**self._tables(x.device), "bits": self.bits}
        kernels.rotated_encode_rows(x, places, rows, keys=kernels.TwoRounds(keys), **options)

    def add_rows(self, rows: Tensor, places: Sequence[slice], out: Tensor, keys: Sequence[Key]) -> None:
        self._decode_rows(rows, places, out, keys, fresh=False)

    def put_rows(
        self, rows: Tensor, places: Sequence[slice], out: Tensor | Spread, keys: Sequence[Key]
    ) -> bool | Tensor | None:
        return self._decode_rows(rows, places, out, keys, fresh=True)

    def _decode_rows(
        self, rows: Tensor, places: Sequence[slice], out: Tensor | Spread, keys: Sequence[Key], *, fresh: bool
    ) -> bool | Tensor:
        codebook, _ = gaussian_codebook(self.bits, out.device)
        options: dict[str, Any] = {"codebook": codebook, "bits": self.bits, "fresh": fresh}
        finite = kernels.rotated_add_rows(rows, places, out, keys=kernels.TwoRounds(keys), **options)
        return finite if streams.resident(out.device) else bool(finite)

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
        if not isinstance(back, Rotated):
            super().write_mean(rows, own, body, skip=skip, keys=keys, back=back, key=key, held=held, left=left)
            return
        codebook, _ = gaussian_codebook(self.bits, own.device)
        tables = back._tables(own.device)
        kernels.rotated_mean_rows(
            rows,
            own,
            body,
            skip=skip,
            keys=kernels.TwoRounds(keys),
            codebook=codebook,
            bits=self.bits,
            back=_rounds(key),
            back_codebook=gaussian_codebook(back.bits, own.device)[0],
            matched=tables["codebook"],
            boundaries=tables["boundaries"],
            back_bits=back.bits,
            held=held,
            left=left,
        )


rotated = Rotated
