"""How the loops of the numba body are compiled, and the random number that several of them draw one at a time."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import hashlib
from pathlib import Path

from numba import njit, uint32

from .layout import MIX_1, MIX_2

_SOURCES = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
_STAMP = hashlib.blake2s(_SOURCES).hexdigest()


def compiled(function, **options):
    """Compile on first call, release the GIL; the disk cache is a help, not a need (a read-only home has none).

    Numba looks only at the file of the function to see whether its cache is stale; these loops also depend on the
    intrinsics in other files. So all sources of the kernels become part of the stamp, where numba lets us.
    """
    try:
        dispatcher = njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:
        return njit(nogil=True, **options)(function)
    cache_file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if cache_file is not None and hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = (cache_file._source_stamp, _STAMP)
    return dispatcher


def summing(function):
    """As `compiled`; sums may be reordered, so that they run in vector registers."""
    return compiled(function, fastmath={"reassoc", "nsz", "contract"})


@compiled
def random_word(i, k0, k1):
    """`reference.random_bits` of element i. Every step is cast back: numba widens 32-bit arithmetic to 64 bits."""
    h = uint32(uint32(i) + k0)
    h = uint32(uint32(h ^ uint32(h >> uint32(16))) * uint32(MIX_1))
    h = uint32(h ^ uint32(uint32(h >> uint32(15)) ^ k1))
    return uint32(h * uint32(MIX_2))


@compiled
def negative(i, k0, k1):
    """Whether the random sign of element i is minus: `reference_parts.signs`."""
    h = random_word(i >> 5, k0, k1)
    return (uint32(h ^ uint32(h >> uint32(16))) >> uint32(i & 31)) & uint32(1) != 0
