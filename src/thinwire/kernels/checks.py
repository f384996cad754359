"""What both compiled bodies check before they touch memory, because a kernel cannot notice a short buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MessageError, OptionError
from .layout import CHUNK, blocks_of, packed_bytes


def check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise OptionError(f"bits must be from 1 to 8, not {bits}")


def flat32(x: Tensor) -> Tensor:
    """Flat contiguous float32, a copy only where dtype or layout ask for one."""
    x = x.detach()
    if x.dtype == torch.float32 and x.dim() == 1 and x.is_contiguous():
        return x
    return x.reshape(-1).to(torch.float32).contiguous()


def scales(values: Tensor, numel: int, block: int) -> Tensor:
    """One float32 for each block, and no fewer."""
    if block % CHUNK:
        raise OptionError(f"block must be 0 or a multiple of {CHUNK}, not {block}")
    if values.numel() < blocks_of(numel, block):
        raise OptionError(f"give one scale for each of the {blocks_of(numel, block)} blocks, not {values.numel()}")
    return flat32(values)


def packed_codes(data: Tensor, numel: int, bits: int) -> Tensor:
    """Flat contiguous bytes, at least as many as the kernel will read."""
    check_bits(bits)
    if data.numel() < packed_bytes(numel, bits):
        raise MessageError(f"{data.numel()} bytes of codes where {packed_bytes(numel, bits)} are needed")
    return data.reshape(-1).contiguous()


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
