"""Which codecs fit together, and which a memory can serve: None, or one sentence that names the fix."""

from __future__ import annotations

from ..codecs.base import Codec
from ..memory import Memory

TYPICAL_NUMEL = 1 << 20  # where variance is judged


def order_refusal(outer: Codec, inner: Codec) -> str | None:
    """Why `inner` cannot write what `outer` leaves.

    >>> from thinwire.codecs import bf16, top_k
    >>> order_refusal(top_k(0.01), bf16()) is None
    True
    >>> order_refusal(bf16(), top_k(0.01))
    'top_k comes before the codec of its values: write top_k:0.01|bf16'
    """
    refusal = outer.accepts_inner(inner)
    if refusal is None or outer.has_inner():
        return refusal
    if inner.has_inner() and inner.accepts_inner(outer) is None:
        return f"{inner.name} comes before the codec of its values: write {inner.text()}|{outer.text()}"
    return refusal


def _contracts(codec: Codec) -> bool:
    if codec.unbiased:
        omega = codec.omega(TYPICAL_NUMEL)
        return omega is None or omega < 1
    return codec.delta(TYPICAL_NUMEL) is not None


def contraction_refusal(memory: Memory, codec: Codec) -> str | None:
    """Why this memory cannot serve the codec: a memory of errors larger than the gradient would grow without end.

    >>> from thinwire.codecs import qsgd
    >>> from thinwire.memory import error_feedback
    >>> contraction_refusal(error_feedback(), qsgd(4, block=64)) is None
    True
    >>> contraction_refusal(error_feedback(), qsgd(4))
    'error_feedback needs a contraction, and qsgd:4 may err by more than ...: ... or write qsgd:4,block=128'
    """
    if _contracts(codec):
        return None
    tamed = next(filter(_contracts, codec.milder()), None)
    fix = f"write {tamed.spec()}" if tamed else "use abs_max:4"
    return (
        f"{memory.name} needs a contraction, and {codec.spec()} may err by more than the gradient itself: "
        f"leave out {memory.name}, or {fix}"
    )
