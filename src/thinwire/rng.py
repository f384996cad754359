"""Randomness without state: (seed, step, stream, rank) -> key, (key, element) -> bits.

A `Draw` names one random sequence. Its `Key` is two 32-bit words; the kernels mix them with the element's position
(`kernels/reference.py: random_bits`), so reference, numba and Triton draw the same bits, a run repeats, and a receiver
can redraw what a sender drew because the key travels in the message header.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

_MASK64 = (1 << 64) - 1


def _mix64(value: int) -> int:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=4096)  # a training step asks for the same few
def _number_of(stream: str) -> int:
    """hash() differs between processes, a digest does not."""
    return int.from_bytes(hashlib.blake2s(stream.encode(), digest_size=8).digest(), "little")


class Key(NamedTuple):
    """Two 32-bit words that select one random sequence.

    >>> Key.unpack(Key(1, 2).packed)
    Key(k0=1, k1=2)
    """

    k0: int
    k1: int

    @property
    def packed(self) -> int:
        return self.k0 | (self.k1 << 32)

    @classmethod
    def unpack(cls, packed: int) -> Key:
        return cls(packed & 0xFFFFFFFF, (packed >> 32) & 0xFFFFFFFF)

    def fold(self, purpose: int) -> Key:
        """An independent key for another use inside the same message (positions, signs, dither)."""
        return Key.unpack(_mix64(self.packed ^ _mix64(purpose)))


@dataclass(frozen=True)
class Draw:
    """Names one random sequence: who draws, for what, and when.

    >>> Draw(seed=1, step=7, stream="layer.weight", rank=0).key() == Draw(seed=1, step=7, stream="layer.weight").key()
    True
    >>> Draw(step=1).key() != Draw(step=2).key()
    True
    """

    seed: int = 0
    step: int = 0
    stream: str | int = 0
    rank: int = 0

    def key(self) -> Key:
        stream = _number_of(self.stream) if isinstance(self.stream, str) else self.stream
        state = 0
        for word in (self.seed, self.step, stream, self.rank):
            state = _mix64(state ^ _mix64(word & _MASK64))
        return Key.unpack(state)


class Keys(Sequence[Key]):
    """A key for each of several messages, folded from one when it is asked for; compiled loops fold them by themselves.

    >>> keys = Keys(Draw(step=7).key(), (3, 5))
    >>> keys[1] == Draw(step=7).key().fold(5), len(keys)
    (True, 2)
    """

    def __init__(self, base: Key, purposes: tuple[int, ...]) -> None:
        self.base, self.purposes = base, purposes

    def __len__(self) -> int:
        return len(self.purposes)

    @overload
    def __getitem__(self, index: int) -> Key: ...

    @overload
    def __getitem__(self, index: slice) -> Keys: ...

    def __getitem__(self, index: int | slice) -> Key | Keys:
        if isinstance(index, slice):
            return Keys(self.base, self.purposes[index])
        return self.base.fold(self.purposes[index])
