"""Checks of both compiled bodies before they touch memory, because a kernel cannot notice a short buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MessageError, OptionError
from .layout import CHUNK, blocks_of, packed_bytes


def check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise OptionError(f"bits must be from 1 to 8, not {bits}")


def check_block(block: int) -> None:
    if block % CHUNK:
        raise OptionError(f"block must be 0 or a multiple of {CHUNK}, not {block}")


def flat32(x: Tensor) -> Tensor:
    """Flat contiguous float32, a copy only where dtype or layout ask for one."""
    if x.requires_grad:
        x = x.detach()
    if x.dtype == torch.float32 and x.dim() == 1 and x.is_contiguous():
        return x
    return x.reshape(-1).to(torch.float32).contiguous()


def scales(values: Tensor, numel: int, block: int) -> Tensor:
    """One float32 for each block, and no fewer."""
    check_block(block)
    if values.numel() < blocks_of(numel, block):
        raise OptionError(f"give one scale for each of the {blocks_of(numel, block)} blocks, not {values.numel()}")
    return flat32(values)


def packed_codes(data: Tensor, numel: int, bits: int) -> Tensor:
    """Flat contiguous bytes, at least as many as the kernel will read."""
    check_bits(bits)
    if data.numel() < packed_bytes(numel, bits):
        raise MessageError(f"{data.numel()} bytes of codes where {packed_bytes(numel, bits)} are needed")
    return data if data.dim() == 1 and data.is_contiguous() else data.reshape(-1).contiguous()


def same_length(a: Tensor, b: Tensor) -> None:
    if a.numel() != b.numel():
        raise OptionError(f"give tensors of one length, not {a.numel()} and {b.numel()}")


def writable(out: Tensor) -> bool:
    """Whether a kernel can change it in place; other dtypes and strides, which are rare, are left to torch."""
    return out.dtype == torch.float32 and out.is_contiguous()


def packed_out(out: Tensor, numel: int, bits: int) -> Tensor:
    """A place for packed codes: exactly their size, contiguous bytes."""
    if out.dtype != torch.uint8 or out.numel() != packed_bytes(numel, bits) or not out.is_contiguous():
        raise OptionError(f"give {packed_bytes(numel, bits)} contiguous bytes for the codes of {numel} elements")
    return out


def float_out(out: Tensor | None, numel: int, like: Tensor) -> Tensor:
    """A place for `numel` float32: the one given if it fits, else a new one."""
    if out is None:
        return torch.empty(numel, dtype=torch.float32, device=like.device)
    if out.numel() != numel or out.dim() != 1 or not writable(out):
        raise OptionError(f"give {numel} contiguous float32 as `out`, flat")
    return out


def selection_out(memory: Tensor, gradient: Tensor, out: Tensor | None) -> Tensor:
    """Where `select_ef` writes the rest: `memory` unless told otherwise; all of another tensor, or none of it."""
    same_length(memory, gradient)
    if out is None or out is memory:
        return memory
    same_length(memory, out)
    for other in (memory, gradient):
        start, place = other.data_ptr(), out.data_ptr()
        apart = place + out.nbytes <= start or start + other.nbytes <= place
        if not apart and (place != start or out.stride() != other.stride() or out.dtype != other.dtype):
            raise OptionError(
                "give `out` memory of its own, or `memory`, or `gradient`: it overlaps one of them partly"
            )
    return out


def words(x: Tensor) -> tuple[Tensor, int]:
    """The bytes of a tensor as int32 words, the last one padded with zeros; and how many bytes there are."""
    flat = (x.detach() if x.requires_grad else x).reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    if flat.element_size() == 4:
        return flat.view(torch.int32), flat.nbytes
    data = flat.view(torch.uint8)
    length = data.numel()
    if length % 4:
        data = torch.cat((data, data.new_zeros(-length % 4)))
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32), length
