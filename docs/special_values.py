"""What a codec makes of zeros, constants, single elements, denormals, inf and NaN: one word each, found by running it.

The words are those of the table "Special values" in docs/codecs.md, which docs/make_codecs.py writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from thinwire import Draw
from thinwire.codecs import Codec

GRID = (64, 64)
CONSTANTS = (0.7, -3.3, 1e-3, 12345.678)
DENORMALS = (torch.arange(1, 4097) * 1e-42).view(GRID)
_HALF_STEP = 2.0**-133 / 2  # of bfloat16 below its normal range
_PLACE = 30 * 64 + 10  # of the element that is not finite
_BLOCKS = tuple(64 << power for power in range(6))


def through(codec: Codec, x: Tensor, step: int = 0) -> Tensor:
    """The tensor after one message."""
    return codec.decode(codec.encode(x, draw=Draw(step=step)), shape=tuple(x.shape))


# ------------------------------------------------------------------------------------------------- single words


def is_exact(codec: Codec, x: Tensor) -> bool:
    return torch.equal(through(codec, x), x)


def is_zero(codec: Codec, x: Tensor) -> bool:
    return not through(codec, x).any()


def is_rounded(codec: Codec, x: Tensor) -> bool:
    """Not the same, but nearly, in every draw."""
    return not is_exact(codec, x) and all(
        torch.allclose(through(codec, x, step), x, rtol=0.01, atol=_HALF_STEP) for step in range(5)
    )


def is_random(codec: Codec, x: Tensor) -> bool:
    results = [through(codec, x, step) for step in range(60)]
    return codec.unbiased and any(not torch.equal(results[0], other) for other in results[1:])


def is_kept(codec: Codec, x: Tensor) -> bool:
    """Some elements as they are (times d/k if that makes it unbiased), the others zero."""
    if codec.density is None:
        return False
    y = through(codec, x)
    sent, k = y != 0, min(x.numel(), max(1, round(codec.density * x.numel())))
    factor = x.numel() / k if codec.unbiased else 1.0
    within = 0.8 * k <= int(sent.sum()) <= codec.capacity(x.numel())
    return within and torch.allclose(y[sent], x[sent] * factor, rtol=1e-5, atol=1e-44)


def is_smallest_of_block(codec: Codec, x: Tensor) -> bool:
    block = codec.options().get("block", getattr(codec, "block", 0))
    if not block or x.numel() % block:
        return False
    smallest = x.view(-1, block).amin(dim=1, keepdim=True)
    return torch.equal(through(codec, x).view(len(smallest), -1), smallest.expand(-1, block))


# In the order in which they are tried. Some numbers happen to be exact: rounding and chance are told by the others.
MEANINGS: dict[str, tuple[Callable[[Codec, Tensor], bool], Callable[[Iterable[bool]], bool]]] = {
    "exact": (is_exact, all),
    "zero": (is_zero, all),
    "smallest of its block": (is_smallest_of_block, all),
    "kept": (is_kept, all),
    "rounded": (is_rounded, any),
    "random": (is_random, any),
}


def word_for(codec: Codec, inputs: list[Tensor]) -> str:
    """The first word that describes what becomes of the inputs.

    >>> from thinwire.codecs import bf16
    >>> word_for(bf16(), [torch.full(GRID, value) for value in CONSTANTS])
    'rounded'
    """
    for word, (judge, among) in MEANINGS.items():
        if among(judge(codec, x) for x in inputs):
            return word
    return "other"


# ------------------------------------------------------------------------------------------------------ non-finite


def spoiled_by(codec: Codec, value: float) -> str:
    """Which elements of the decoded tensor one inf or NaN spoils, in words."""
    x = torch.randn(math.prod(GRID), generator=torch.Generator().manual_seed(0))
    x[_PLACE] = value
    y = through(codec, x.view(GRID)).view(-1)
    spoiled = y.isfinite().logical_not().nonzero().view(-1).tolist()
    rest_is_zero = not y[y.isfinite()].any()
    if not spoiled:
        return "nothing"
    if len(spoiled) == x.numel():
        return "the whole tensor"
    if spoiled == [_PLACE]:
        return "its place; the rest is 0" if codec.sparse and rest_is_zero else "that element"
    for block in _BLOCKS:
        if spoiled == list(range(_PLACE // block * block, (_PLACE // block + 1) * block)):
            return f"its block of {block}"
    return "every place it sends; the rest is 0" if codec.sparse and rest_is_zero else "other"


def row(codec: Codec) -> list[str]:
    """What becomes of zeros, a constant, one element and denormals, and what inf and NaN spoil."""
    spoiled = {spoiled_by(codec, value) for value in (math.inf, -math.inf, math.nan)}
    return [
        word_for(codec, [torch.zeros(GRID)]),
        word_for(codec, [torch.full(GRID, value) for value in CONSTANTS]),
        word_for(codec, [torch.tensor([value]) for value in CONSTANTS]),
        word_for(codec, [DENORMALS]),
        " or ".join(sorted(spoiled)),
    ]
