"""The exchanges by name, with the codecs each accepts. Facts only: what runs them is elsewhere."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Literal

from ..codecs.base import Codec
from ..codecs.cast import Bf16, Fp8, Fp16, Fp32
from ..codecs.low_rank import LowRank
from ..codecs.quantize import Natural
from ..codecs.sparse import SparseCodec
from ..codecs.sparsify import RandomK
from ..errors import OptionError
from ..stage import Stage

_FLOATS = (Fp32, Fp16, Bf16)  # what networks can add


@dataclasses.dataclass(frozen=True, repr=False)
class Exchange(Stage, ABC):
    """Combines the tensors of all ranks into their mean, with the same bits on every rank."""

    @abstractmethod
    def accepts(self, codec: Codec) -> str | None:
        """None if messages of this codec can travel this way, else one sentence that says what to write instead."""


@dataclasses.dataclass(frozen=True, repr=False)
class AllReduce(Exchange):
    """The network adds the messages: for dense tensors and for codecs whose messages can be added.

    >>> from thinwire.codecs import bf16, top_k
    >>> AllReduce().accepts(bf16()) is None
    True
    >>> AllReduce().accepts(top_k(0.01))
    'top_k keeps other positions on every rank, so its messages cannot be added: use all_gather, or shared_top_k'
    """

    name = "all_reduce"

    def accepts(self, codec: Codec) -> str | None:
        if codec.linear:
            return None
        if isinstance(codec, RandomK):
            values = codec.values if isinstance(codec.values, _FLOATS) else Bf16()
            shared = dataclasses.replace(codec, shared=True, values=values)
            return f"messages of {codec.spec()} cannot be added: write {shared.spec()}, or use all_gather"
        if codec.sparse:
            return (
                f"{codec.name} keeps other positions on every rank, so its messages cannot be added: "
                "use all_gather, or shared_top_k"
            )
        if isinstance(codec, (Fp8, Natural)):
            return f"the network cannot add numbers in {codec.name}: use bf16, all_gather or two_shot"
        return (
            f"{codec.name} writes the values of every rank on a scale of its own, so its messages cannot be added: "
            "use global_qsgd, all_gather or two_shot"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class AllGather(Exchange):
    """Every rank gets every message and adds them in rank order: for any codec; traffic grows with the ranks.

    >>> from thinwire.codecs import top_k
    >>> AllGather().accepts(top_k(0.01)) is None
    True
    """

    name = "all_gather"

    def accepts(self, codec: Codec) -> str | None:
        return None


@dataclasses.dataclass(frozen=True, repr=False)
class TwoShot(Exchange):
    """Each rank adds one piece in float32 and sends it back compressed: for codecs that keep all elements.

    `back`: bits of the second shot, 0 for those of the first.

    >>> from thinwire.codecs import rotated
    >>> TwoShot(4).accepts(rotated(3)) is None
    True
    >>> TwoShot(8).accepts(rotated(3))
    'two_shot cannot send 8 bits back, rotated: bits must be 2, 3 or 4, got 8'
    """

    name = "two_shot"

    back: int = 0

    def __post_init__(self) -> None:
        self._require(
            isinstance(self.back, int) and 0 <= self.back <= 8,
            f"back is 1 to 8 bits for the second shot, or 0 for those of the first, got {self.back}",
        )

    def accepts(self, codec: Codec) -> str | None:
        if codec.sparse:
            return (
                f"two_shot sends back a sum, which is no longer sparse after {codec.name}: "
                "use all_gather, or shared_top_k"
            )
        if isinstance(codec, LowRank):
            return "two_shot cuts a tensor into pieces, and low_rank needs the whole matrix: use all_reduce"
        try:
            self.codec_back(codec)
        except OptionError as refusal:
            return str(refusal)
        return None

    def codec_back(self, codec: Codec) -> Codec:
        """The codec of the second shot.

        >>> from thinwire.codecs import rotated
        >>> TwoShot(4).codec_back(rotated(3))
        rotated(4)
        """
        if not self.back:
            return codec
        if "bits" not in codec.option_names():
            raise OptionError(f"{codec.name} has no bits to choose for the way back: write two_shot without a number")
        try:
            return dataclasses.replace(codec, **{"bits": self.back})  # as a dict: only some codecs have bits
        except OptionError as refusal:
            raise OptionError(f"two_shot cannot send {self.back} bits back, {refusal}") from None


@dataclasses.dataclass(frozen=True, repr=False)
class SharedTopK(Exchange):
    """One rank chooses the positions, all ranks add their values there: a sparse all-reduce.

    `leader`: "turn", every rank in turn (STAR), or "norm", the rank with the largest gradient (VAR).

    >>> from thinwire.codecs import bf16, top_k
    >>> SharedTopK().accepts(top_k(0.01, values=bf16())) is None
    True
    >>> SharedTopK().accepts(bf16())
    'shared_top_k shares the positions of a sparsifier, and bf16 has none: write top_k:0.01|bf16|shared_top_k, or ...'
    """

    name = "shared_top_k"

    leader: Literal["turn", "norm"] = "turn"

    def __post_init__(self) -> None:
        self._require(self.leader in ("turn", "norm"), f"leader is turn or norm, not {self.leader}")

    def accepts(self, codec: Codec) -> str | None:
        if not isinstance(codec, SparseCodec):
            written = f"top_k:0.01|{codec.spec()}" if isinstance(codec, (Bf16, Fp16)) else "top_k:0.01|bf16"
            other = "all_reduce" if codec.linear else "two_shot"
            return (
                f"shared_top_k shares the positions of a sparsifier, and {codec.name} has none: "
                f"write {written}|shared_top_k, or use {other}"
            )
        if isinstance(codec, RandomK):
            return "random_k needs no leader to agree on positions: use all_reduce"
        if not isinstance(codec.values, _FLOATS):
            return (
                f"shared_top_k lets the network add the values, which {codec.values.name} does not allow: "
                f"write {dataclasses.replace(codec, values=Bf16()).spec()}|shared_top_k"
            )
        return None


@dataclasses.dataclass(frozen=True, repr=False)
class Local(Exchange):
    """Stands in for a network: all ranks in one process (`LocalGroup`), to try a recipe before there are processes.

    >>> from thinwire.codecs import top_k
    >>> Local().accepts(top_k(0.01)) is None
    True
    """

    name = "local"

    def accepts(self, codec: Codec) -> str | None:
        return None


all_reduce = AllReduce
all_gather = AllGather
two_shot = TwoShot
shared_top_k = SharedTopK
local = Local
