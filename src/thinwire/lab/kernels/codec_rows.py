"""Seconds of every registered codec, stage by stage, over those of a copy: `thinwire kernels --codecs`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ...codecs import Codec
from ...recipe.compose import parse
from ...recipe.registry import STAGES
from ...rng import Draw


@dataclass(frozen=True)
class CodecRow:
    """One stage of one codec: nanoseconds for an element of the tensor, and its time over that of a copy."""

    codec: str
    stage: str
    bits: float  # an element takes in a message
    ns_per_element: float
    x_copy: float


def registered_codecs() -> list[Codec]:
    """One codec of every registered kind: the first of its examples.

    >>> [codec.name for codec in registered_codecs()][:3]
    ['fp32', 'fp16', 'bf16']
    """
    found = []
    for name, stage in list(STAGES.items()):
        if issubclass(stage, Codec):
            word = (stage.examples or (name,))[0]
            found.append(parse(f"{word}|local").codec)
    order = {name: place for place, name in enumerate(("fp32", "fp16", "bf16"))}
    return sorted(found, key=lambda codec: order.get(codec.name, len(order)))


def codec_rows(
    numel: int, *, rounds: int = 5, seed: int = 0, on_codec: Callable[[str], object] = lambda name: None
) -> Iterator[CodecRow]:
    """Time the stages of every registered codec on `numel` float32 elements, in one thread.

    >>> {row.stage for row in codec_rows(4096, rounds=1) if row.codec == "bf16"} >= {"encode", "add"}
    True
    """
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(numel, generator=generator) for _ in range(2)]
    out, before = torch.empty(numel), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        copy = _best(lambda: out.copy_(given[0]), rounds)
        for codec in registered_codecs():
            on_codec(codec.spec())
            bits = 8 * codec.message_bytes(numel, shape=_matrix(numel) if codec.needs_shape else None) / numel
            for stage, (run, _) in codec.trials([x.clone() for x in given], Draw(step=1)).items():
                seconds = _best(run, rounds)
                yield CodecRow(codec.spec(), stage, bits, 1e9 * seconds / numel, seconds / copy)
    finally:
        torch.set_num_threads(before)


def _matrix(numel: int) -> tuple[int, int]:
    rows = 1 << (numel.bit_length() // 2)
    return rows, numel // rows


def _best(run: Callable[[], object], rounds: int) -> float:
    run()
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken)
