"""Local: the exchange of recipes that are tried out in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..codecs.base import Codec, Shape
from ..comm.network import Network
from .all_gather import AllGather
from .all_reduce import AllReduce
from .base import Cargo, Delivery, Exchange
from .script import Script


@dataclasses.dataclass(frozen=True, repr=False)
class Local(Exchange):
    """Stands in for a network: all ranks in one process (`LocalGroup`), to try a recipe before there are processes.

    It does what `all_reduce` does where that accepts the codec, else what `all_gather` does.

    >>> from thinwire.codecs import top_k
    >>> Local().accepts(top_k(0.01)) is None
    True
    """

    name = "local"

    def accepts(self, codec: Codec) -> str | None:
        return None

    def _like(self, codec: Codec) -> Exchange:
        return AllGather() if AllReduce().accepts(codec) else AllReduce()

    def script(
        self, codec: Codec, numel: int, *, world_size: int, exact: int = 0, shapes: Sequence[Shape] = ()
    ) -> Script:
        return self._like(codec).script(codec, numel, world_size=world_size, exact=exact, shapes=shapes)

    def mean(self, codec: Codec, cargo: Cargo, network: Network) -> Delivery:
        return self._like(codec).mean(codec, cargo, network)


local = Local
