"""Rotated quantisation: after a random rotation a tensor looks Gaussian, for which two to four bits do very well."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels, theory
from ..draw import Key
from .base import Codec, Shape, State
from .scales import SCALE_BYTES, take_scales, usable_steps

# One transform turns a block with one or two dominating elements into few distinct values, whose error is a bias that
# stays from step to step (measured: 2.2 times the Gaussian error, nearly all of it bias). Two cost little more.
_ROUNDS = 2
_TILE = 1 << 20  # elements, a multiple of 1024: four megabytes
# Positive half of the Lloyd-Max codebooks of a unit Gaussian (fixed point of Lloyd's iteration, float64).
_CODEWORDS = {
    2: (0.452780035, 1.510417608),
    3: (0.245094179, 0.756005281, 1.343909279, 2.151945705),
    4: (0.128395030, 0.388048299, 0.656759119, 0.942340456, 1.256231197, 1.618046386, 2.069017227, 2.732589571),
}


@functools.cache
def gaussian_codebook(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codewords and the boundaries half-way between them, float32."""
    half = torch.tensor(_CODEWORDS[bits], dtype=torch.float64)
    words = torch.cat((-half.flip(0), half))
    boundaries = (words[1:] + words[:-1]) / 2
    return words.to(device, torch.float32), boundaries.to(device, torch.float32)


@dataclass(frozen=True, repr=False)
class Rotated(Codec):
    """Rotates blocks of 1024 at random, then sends the nearest Lloyd-Max codeword and one scale a block.

    `bits`: 2, 3 or 4. The scale |z|^2 / <c, z> makes the result unbiased if the rotation is uniform (EDEN); two random
    Hadamard transforms come close: where one element outweighs all others of its block, a bias of up to 1.5 % of the
    block's norm was found (7 % in a last block of 64), elsewhere none.
    A block of 1024 with inf or NaN decodes to NaN, as does one with magnitudes above 1e35, which the rotation may
    overflow; one whose root mean square is below 2**-100 decodes to zero.
    Reference: Vargaftik et al. 2022, EDEN, arXiv 2108.08842.

    >>> codec = rotated(4)
    >>> x = torch.linspace(-1, 1, 1000)
    >>> float((codec.decode(codec.encode(x)) - x).norm() / x.norm()) < 0.12
    True
    >>> codec.wire_bytes(1024)
    548
    """

    name: ClassVar[str] = "rotated"
    unbiased: ClassVar[bool] = True
    bits: int

    def __post_init__(self) -> None:
        self._require(self.bits in _CODEWORDS, f"bits must be 2, 3 or 4, got {self.bits}")

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        scales = kernels.blocks_of(numel, kernels.ROTATION)
        return scales * SCALE_BYTES + kernels.packed_bytes(kernels.rotated_numel(numel), self.bits)

    def omega(self, numel: int) -> float:
        return theory.rotated(self.bits)

    def _pack(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        flat = x.reshape(-1)
        scales, codes = take_scales(body, kernels.blocks_of(flat.numel(), kernels.ROTATION))
        for elements, blocks, packed in self._tiles(flat):
            z = self._rotate(flat[elements], key, elements.start)
            squares = kernels.block_square_sum(z, block=kernels.ROTATION)
            rms, inverse = usable_steps((squares / self._block_sizes(z)).sqrt())
            _, boundaries = gaussian_codebook(self.bits, z.device)
            kernels.codebook_encode(z, inverse, boundaries, bits=self.bits, block=kernels.ROTATION, out=codes[packed])
            scales[blocks] = self._unbiased_scale(z, squares, rms, codes[packed])

    def _add(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        scales, codes = take_scales(body, kernels.blocks_of(out.numel(), kernels.ROTATION))
        for elements, blocks, packed in self._tiles(out):
            part = out[elements]
            z = self._codewords(codes[packed], kernels.rotated_numel(part.numel()), scales[blocks])
            for turn in range(_ROUNDS - 1, 0, -1):
                z = kernels.unrotate(z, z.numel(), key=key.fold(turn).advanced(elements.start), out=z)
            part += kernels.unrotate(z, part.numel(), key=key.fold(0).advanced(elements.start))

    def _tiles(self, flat: Tensor) -> Iterator[tuple[slice, slice, slice]]:
        """Parts of whole rotation blocks: their elements, scales and packed codes.

        On a CPU the temporaries of a part stay in its cache; of a large tensor they would be fresh memory every time,
        which costs several times the arithmetic.
        """
        tile = _TILE if flat.device.type == "cpu" else max(flat.numel(), 1)
        for start in range(0, flat.numel(), tile):
            stop = min(start + tile, flat.numel())
            first, last = start // kernels.ROTATION, -(-stop // kernels.ROTATION)
            begin, end = (kernels.packed_bytes(kernels.rotated_numel(n), self.bits) for n in (start, stop))
            yield slice(start, stop), slice(first, last), slice(begin, end)

    def _rotate(self, x: Tensor, key: Key, start: int) -> Tensor:
        z = kernels.rotate(x, key=key.fold(0).advanced(start))
        for turn in range(1, _ROUNDS):
            z = kernels.rotate(z, key=key.fold(turn).advanced(start), out=z)
        return z

    def _codewords(self, packed: Tensor, numel: int, scale: Tensor) -> Tensor:
        codebook, _ = gaussian_codebook(self.bits, packed.device)
        return kernels.codebook_decode(packed, numel, scale, codebook, bits=self.bits, block=kernels.ROTATION)

    def _unbiased_scale(self, z: Tensor, squares: Tensor, rms: Tensor, packed: Tensor) -> Tensor:
        """|z|^2 / <c, z> of each block; 0 for a block of zeros, NaN for one that is not finite."""
        nearest = self._codewords(packed, z.numel(), rms)
        # <a, b> = (|a|^2 + |b|^2 - |a - b|^2) / 2: three sums of squares in float64 are exact enough in any order, so
        # that every kernel body sends the same bits. Nothing cancels, because the difference is small.
        own = kernels.block_square_sum(nearest, block=kernels.ROTATION)
        difference = kernels.block_square_sum(nearest.sub_(z), block=kernels.ROTATION)
        scale = rms * squares / ((own + squares - difference) / 2)
        return torch.where(rms > 0, scale, rms).to(torch.float32)

    @staticmethod
    def _block_sizes(z: Tensor) -> Tensor:
        """1024 for every block but a shorter last one."""
        blocks = kernels.blocks_of(z.numel(), kernels.ROTATION)
        sizes = torch.full((blocks,), kernels.ROTATION, dtype=torch.float64, device=z.device)
        sizes[-1] = z.numel() - (blocks - 1) * kernels.ROTATION
        return sizes


rotated = Rotated
