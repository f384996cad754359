"""How the loops of the numba body are compiled, and the random number that several of them draw one at a time."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from numba import njit, uint32

from .layout import MIX_1, MIX_2


def compiled(function, **options):
    """Compile on first call, release the GIL; the disk cache is a help, not a need (a read-only home has none)."""
    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        return njit(nogil=True, **options)(function)


def summing(function):
    """As `compiled`; sums may be reordered, so that they run in vector registers."""
    return compiled(function, fastmath={"reassoc", "nsz", "contract"})


def inlined(function):
    """For the choice between intrinsics inside a loop: as a call it would cost more than the work on its chunk."""
    return compiled(function, inline="always")


@compiled
def random_word(i, k0, k1):
    """`reference.random_bits` of element i. Every step is cast back: numba widens 32-bit arithmetic to 64 bits."""
    h = uint32(uint32(i) + k0)
    h = uint32(uint32(h ^ uint32(h >> uint32(16))) * uint32(MIX_1))
    h = uint32(h ^ uint32(uint32(h >> uint32(15)) ^ k1))
    return uint32(h * uint32(MIX_2))
