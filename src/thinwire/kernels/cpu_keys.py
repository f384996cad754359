"""Keys of several messages in one compiled call: `rng.Keys` without a Python integer for each."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import uint32, uint64

from .cpu_compile import compiled


@compiled
def _mix(value):
    """`rng._mix64`."""
    value = uint64(value + uint64(0x9E3779B97F4A7C15))
    value = uint64((value ^ (value >> uint64(30))) * uint64(0xBF58476D1CE4E5B9))
    value = uint64((value ^ (value >> uint64(27))) * uint64(0x94D049BB133111EB))
    return value ^ (value >> uint64(31))


@compiled
def folded(base, purposes):
    """The two words of `base.fold(purpose)` for each purpose, a line each."""
    out = np.empty((purposes.size, 2), np.uint32)
    for i in range(purposes.size):
        key = _mix(base ^ _mix(purposes[i]))
        out[i, 0], out[i, 1] = uint32(key & uint64(0xFFFFFFFF)), uint32(key >> uint64(32))
    return out


@compiled
def folded_twice(base, purposes):
    """Of each of these keys the four words of its folds 0 and 1."""
    out = np.empty((purposes.size, 4), np.uint32)
    for i in range(purposes.size):
        key = _mix(base ^ _mix(purposes[i]))
        for turn in range(2):
            fold = _mix(key ^ _mix(uint64(turn)))
            out[i, 2 * turn], out[i, 2 * turn + 1] = uint32(fold & uint64(0xFFFFFFFF)), uint32(fold >> uint64(32))
    return out
