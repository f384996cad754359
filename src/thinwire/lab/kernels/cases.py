"""The cases of `thinwire kernels`: every kernel beside the torch code that a user would write instead."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ... import kernels
from ...codecs.rotated import gaussian_codebook
from .case import KEY, Case, Data
from .select_cases import select_cases

_BLOCK = 64
_PIECE = 1 << 16  # elements of one message of several


class Pieces:
    """The tensor in pieces of 65,536 elements, as exchanges send it: a row of bytes and a key for each."""

    def __init__(self, numel: int, block: int, bits: int, length: Callable[[int], int] = lambda numel: numel) -> None:
        starts, longest = range(0, numel, _PIECE), length(min(numel, _PIECE))
        self.places = [slice(start, min(start + _PIECE, numel)) for start in starts]
        self.keys = [(KEY.fold(2 * number), KEY.fold(2 * number + 1)) for number in range(len(starts))]
        size = 4 * kernels.blocks_of(longest, block) + kernels.packed_bytes(longest, bits)
        self.rows = torch.empty(len(starts), size, dtype=torch.uint8)


def quantize_cases(data: Data) -> Iterator[Case]:
    """Stochastic rounding to a symmetric grid, and decode-accumulate, at 8, 4 and 2 bits."""
    x, out = data.x, data.out
    largest = kernels.block_abs_max(x, block=0)
    zero = torch.zeros_like(largest)
    for bits in (8, 4, 2):
        levels = 2 ** (bits - 1) - 1
        step = largest / levels
        grid = {"bits": bits, "offset": levels, "block": 0}
        message = torch.empty(kernels.packed_bytes(x.numel(), bits), dtype=torch.uint8)

        def ours(step: Tensor = step, bits: int = bits, levels: int = levels, message: Tensor = message) -> Tensor:
            return kernels.quantize(
                x, zero, 1 / step, bits=bits, top=2 * levels, offset=levels, block=0, key=KEY, out=message
            )

        def eager(step: Tensor = step, levels: int = levels, bits: int = bits) -> Tensor:
            codes = (x / step + torch.rand_like(x)).floor_().clamp_(-levels, levels).to(torch.int8)
            return codes if bits == 8 else _eager_pack(codes + levels, bits)

        packed = ours()

        def add(packed: Tensor = packed, step: Tensor = step, grid: dict[str, int] = grid) -> None:
            kernels.dequantize_add(out, packed, zero, step, **grid)

        yield Case(f"quantize_int{bits}", ours, eager, 4 + bits / 8)
        eager_codes = eager()

        def eager_add(codes: Tensor = eager_codes, step: Tensor = step, bits: int = bits, levels: int = levels) -> None:
            out.add_((codes if bits == 8 else _eager_unpack(codes, bits, out.numel()) - levels).float() * step)

        yield Case(f"dequantize_add_int{bits}", add, eager_add, 8 + bits / 8)
    small = kernels.block_abs_max(x, block=_BLOCK)
    codes = torch.empty(kernels.packed_bytes(x.numel(), 8), dtype=torch.uint8)
    zeros = torch.zeros_like(small)
    rows = x[: x.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)
    yield Case(
        f"quantize_int8_block{_BLOCK}",
        lambda: kernels.quantize(x, zeros, 127 / small, bits=8, top=254, offset=127, block=_BLOCK, key=KEY, out=codes),
        lambda: (rows * (127 / rows.abs().amax(1, keepdim=True)) + torch.rand_like(rows)).floor_().to(torch.int8),
        5 + 8 / _BLOCK,
    )
    few, steps = torch.empty(kernels.packed_bytes(x.numel(), 4), dtype=torch.uint8), torch.empty_like(small)

    def eager_abs_max() -> Tensor:
        codes = rows * (7 / rows.abs().amax(1, keepdim=True)) + torch.rand_like(rows)
        return _eager_pack(codes.floor_().to(torch.int8).view(-1) + 7, 4)

    yield Case(
        f"abs_max_encode_int4_block{_BLOCK}",
        lambda: kernels.abs_max_encode(x, steps, few, levels=7, bits=4, block=_BLOCK, key=KEY),
        eager_abs_max,
        4 + 4 / 8 + 4 / _BLOCK,
    )
    pieces = Pieces(x.numel(), _BLOCK, 4)
    keys = [first for first, _ in pieces.keys]
    yield Case(
        f"abs_max_encode_rows_int4_block{_BLOCK}",
        lambda: kernels.abs_max_encode_rows(x, pieces.places, pieces.rows, keys=keys, levels=7, bits=4, block=_BLOCK),
        eager_abs_max,
        4 + 4 / 8 + 4 / _BLOCK,
    )


def packing_cases(data: Data) -> Iterator[Case]:
    """Codes of four bits to bytes and back."""
    codes = (data.x.view(torch.int32) & 15).to(torch.uint8)
    packed = kernels.pack(codes, bits=4)
    eager = _eager_pack(codes, 4)
    yield Case("pack_4bit", lambda: kernels.pack(codes, bits=4), lambda: _eager_pack(codes, 4), 1.5)
    yield Case(
        "unpack_4bit",
        lambda: kernels.unpack(packed, codes.numel(), bits=4),
        lambda: _eager_unpack(eager, 4, codes.numel()),
        1.5,
    )


def _eager_pack(codes: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte).to(torch.uint8)
    packed = padded[:, 0].clone()
    for place in range(1, per_byte):
        packed |= padded[:, place] << (place * bits)
    return packed


def _eager_unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    parts = [(packed >> (place * bits)) & ((1 << bits) - 1) for place in range(8 // bits)]
    return torch.stack(parts, dim=1).reshape(-1)[:numel].to(torch.int8)


def exponential_cases(data: Data) -> Iterator[Case]:
    """Rounding to powers of two, and adding such codes without decoding."""
    x, out = data.x, data.out
    scale = kernels.block_abs_max(x, block=0) * 2
    codes = kernels.exponential_encode(x, 1 / scale, top=127, block=0, key=KEY)
    other = codes.flip(0)

    def eager_encode(x: Tensor = x) -> Tensor:
        mantissa, exponent = torch.frexp(x.abs() / scale)
        up = torch.rand_like(x) < mantissa * 2 - 1
        return ((exponent - 1 + up + 127).clamp_(0, 127) + (x < 0) * 128).to(torch.uint8)

    def eager_decode(codes: Tensor = codes) -> Tensor:
        return torch.ldexp((codes < 128).float() * 2 - 1, (codes & 127).int() - 127) * scale

    def eager_add() -> Tensor:
        return eager_encode(eager_decode() + eager_decode(other))

    yield Case(
        "exponential_encode",
        lambda: kernels.exponential_encode(x, 1 / scale, top=127, block=0, key=KEY),
        eager_encode,
        5,
    )
    yield Case(
        "exponential_decode_add",
        lambda: kernels.exponential_decode_add(out, codes, scale, top=127, block=0),
        lambda: out.add_(eager_decode()),
        9,
    )
    yield Case(
        "exponential_add",
        lambda: kernels.exponential_add(codes, other, top=127, key=KEY),
        eager_add,
        3,
    )


def scale_cases(data: Data) -> Iterator[Case]:
    """Scales of blocks, sums, and the two checks."""
    x = data.x
    rows = x[: x.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)
    as_bytes = x.view(torch.uint8)
    per_block = 4 + 4 / _BLOCK
    yield Case("block_abs_max", lambda: kernels.block_abs_max(x, block=_BLOCK), lambda: rows.abs().amax(1), per_block)
    yield Case(
        "block_min_max", lambda: kernels.block_min_max(x, block=_BLOCK), lambda: torch.aminmax(rows, dim=1), per_block
    )
    yield Case(
        "block_square_sum",
        lambda: kernels.block_square_sum(x, block=_BLOCK),
        lambda: rows.double().square().sum(1),
        per_block,
    )
    yield Case("moments", lambda: kernels.moments(x), lambda: (x.sum(), x.norm(), x.abs().max()), 4)
    yield Case("all_finite", lambda: kernels.all_finite(x), lambda: bool(x.isfinite().all()), 4)
    yield Case("finite", lambda: kernels.finite(x), lambda: x.isfinite().all(), 4)
    yield Case("hash64", lambda: kernels.hash64(x), lambda: hashlib.blake2b(as_bytes.numpy().data, digest_size=8), 4)
    yield Case("checksum", lambda: kernels.checksum(as_bytes), lambda: zlib.crc32(as_bytes.numpy().data), 4)


def rotation_cases(data: Data) -> Iterator[Case]:
    """The randomised Hadamard transform and the Gaussian codebook behind it."""
    x = data.x
    codebook, boundaries = gaussian_codebook(3, x.device)
    rotated = kernels.rotate(x, key=KEY)
    scale = torch.ones(kernels.blocks_of(rotated.numel(), kernels.ROTATION))
    block = kernels.ROTATION
    packed = kernels.codebook_encode(rotated, scale, boundaries, bits=3, block=block)
    place = torch.empty_like(rotated)
    words = torch.empty_like(rotated)
    rows = x[: x.numel() // block * block].view(-1, block)
    hadamard = functools.reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]])] * 10) / 32
    yield Case(
        "rotate",
        lambda: kernels.rotate(x, key=KEY, out=place),
        lambda: (rows * (torch.randint(0, 2, (block,)) * 2 - 1)) @ hadamard,
        8,
    )
    yield Case(
        "unrotate",
        lambda: kernels.unrotate(rotated, x.numel(), key=KEY, out=data.out),
        lambda: (rows @ hadamard) * (torch.randint(0, 2, (block,)) * 2 - 1),
        8,
    )
    yield Case(
        "codebook_encode_3bit",
        lambda: kernels.codebook_encode(rotated, scale, boundaries, bits=3, block=block, out=packed),
        lambda: _eager_pack(torch.bucketize(rotated, boundaries).to(torch.uint8), 4),
        4 + 3 / 8,
    )
    yield Case(
        "codebook_decode_3bit",
        lambda: kernels.codebook_decode(packed, rotated.numel(), scale, codebook, bits=3, block=block, out=words),
        lambda: codebook[kernels.unpack(packed, rotated.numel(), bits=3).to(torch.int64)],
        4 + 3 / 8,
    )


def rotated_cases(data: Data) -> Iterator[Case]:
    """All of the `rotated` codec at once: two rotations, codewords, scales, and back."""
    x, numel = data.x, kernels.rotated_numel(data.x.numel())
    codebook, boundaries = gaussian_codebook(2, x.device)
    scale = torch.empty(kernels.blocks_of(numel, kernels.ROTATION))
    codes = torch.empty(kernels.packed_bytes(numel, 2), dtype=torch.uint8)
    keys = KEY.fold(0), KEY.fold(1)
    rows = x[: x.numel() // kernels.ROTATION * kernels.ROTATION].view(-1, kernels.ROTATION)
    hadamard = functools.reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]])] * 10) / 32
    signs = torch.randint(0, 2, (kernels.ROTATION,)) * 2 - 1

    def eager_encode() -> object:
        z = (((rows * signs) @ hadamard) * signs) @ hadamard
        return _eager_pack(torch.bucketize(z / z.square().mean(1, keepdim=True).sqrt(), boundaries).to(torch.uint8), 2)

    def eager_add() -> object:
        z = codebook[kernels.unpack(codes, numel, bits=2).to(torch.int64)][: rows.numel()].view_as(rows)
        return data.out[: rows.numel()].view_as(rows).add_(((z @ hadamard) * signs @ hadamard) * signs)

    yield Case(
        "rotated_encode_2bit",
        lambda: kernels.rotated_encode(x, scale, codes, keys=keys, codebook=codebook, boundaries=boundaries, bits=2),
        eager_encode,
        4 + 2 / 8,
    )
    yield Case(
        "rotated_add_2bit",
        lambda: kernels.rotated_add(codes, scale, data.out, keys=keys, codebook=codebook, bits=2),
        eager_add,
        8 + 2 / 8,
    )
    pieces = Pieces(x.numel(), kernels.ROTATION, 2, kernels.rotated_numel)

    def encode_rows() -> None:
        tables = {"codebook": codebook, "boundaries": boundaries}
        kernels.rotated_encode_rows(x, pieces.places, pieces.rows, keys=pieces.keys, **tables, bits=2)

    def add_rows() -> None:
        kernels.rotated_add_rows(pieces.rows, pieces.places, data.out, keys=pieces.keys, codebook=codebook, bits=2)

    encode_rows()
    yield Case("rotated_encode_rows_2bit", encode_rows, eager_encode, 4 + 2 / 8)
    yield Case("rotated_add_rows_2bit", add_rows, eager_add, 8 + 2 / 8)


_GROUPS = (quantize_cases, packing_cases, exponential_cases, scale_cases, rotation_cases, rotated_cases)
_DENSITIES = (0.01, 0.001)
GROUPS = len(_GROUPS) + len(_DENSITIES)  # how many `all_cases` yields


def all_cases(numel: int, *, seed: int = 0) -> Iterator[list[Case]]:
    """Every case, in groups that share tensors, lazily: one group lives at a time."""
    data = Data(numel, seed)
    for group in _GROUPS:
        yield list(group(data))
    for density in _DENSITIES:
        yield list(select_cases(data, density))
