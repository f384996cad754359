"""Which codecs go together, and which a memory can serve: None, or one sentence that says what to write instead."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from ..codecs.base import Codec
from ..codecs.cast import Bf16, Fp16, Fp32
from ..codecs.global_qsgd import GlobalQsgd
from ..codecs.low_rank import LowRank
from ..codecs.rotated import Rotated
from ..codecs.sparse import SparseCodec
from ..codecs.sparsify import RandomK
from ..memory import Memory

TYPICAL_NUMEL = 1 << 20  # where variance is judged
_FLOATS = (Fp32, Fp16, Bf16)
_WHOLE = (LowRank, Rotated, GlobalQsgd)


def order_refusal(outer: Codec, inner: Codec) -> str | None:
    """Why `inner` cannot write what `outer` leaves.

    >>> from thinwire import bf16, top_k
    >>> order_refusal(top_k(0.01), bf16()) is None
    True
    >>> order_refusal(bf16(), top_k(0.01))
    'top_k comes before the codec of its values: write top_k:0.01|bf16'
    """
    if outer.sparse:
        if inner.sparse:
            return f"{outer.name} and {inner.name} both choose elements: keep one of them"
        if isinstance(inner, _WHOLE):
            reason = f"{inner.name} needs whole tensors, and {outer.name} leaves single values"
            return f"{reason}: write {outer.text()}|abs_max:4"
        return None
    if isinstance(outer, LowRank):
        if isinstance(inner, _FLOATS):
            return None
        return f"{inner.name} cannot write the factors of low_rank, which ranks add: write {outer.text()}|bf16"
    if (inner.sparse or isinstance(inner, LowRank)) and order_refusal(inner, outer) is None:
        return f"{inner.name} comes before the codec of its values: write {inner.text()}|{outer.text()}"
    return f"{outer.name} and {inner.name} do not go together: keep one of them"


def _contracts(codec: Codec) -> bool:
    if codec.unbiased:
        omega = codec.omega(TYPICAL_NUMEL)
        return omega is None or omega < 1
    return codec.delta(TYPICAL_NUMEL) is not None


def contraction_refusal(memory: Memory, codec: Codec) -> str | None:
    """Why this memory cannot serve the codec: a memory of errors larger than the gradient would grow without end.

    >>> from thinwire import error_feedback, qsgd
    >>> contraction_refusal(error_feedback(), qsgd(4, block=64)) is None
    True
    >>> contraction_refusal(error_feedback(), qsgd(4))
    'error_feedback needs a contraction, and qsgd:4 may err by more than ...: ... or write qsgd:4,block=128'
    """
    if _contracts(codec):
        return None
    tamed = next(filter(_contracts, _milder(codec)), None)
    fix = f"write {tamed.spec()}" if tamed else "use abs_max:4"
    return (
        f"{memory.name} needs a contraction, and {codec.spec()} may err by more than the gradient itself: "
        f"leave out {memory.name}, or {fix}"
    )


def _milder(codec: Codec) -> Iterator[Codec]:
    """Variants with smaller error: unscaled, in blocks, with more bits."""
    if isinstance(codec, SparseCodec):
        unscaled = dataclasses.replace(codec, scaled=False) if isinstance(codec, RandomK) else codec
        yield unscaled
        yield from (dataclasses.replace(unscaled, values=values) for values in _milder(unscaled.values))
    elif {"bits", "block"} <= set(codec.option_names()):
        for bits, block in itertools.product(range(vars(codec)["bits"], 9), (1024, 512, 256, 128, 64)):
            yield dataclasses.replace(codec, **{"bits": bits, "block": block})
