"""Local: the exchange of recipes that run with all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence

from ..codecs.base import Codec, Shape
from ..comm.network import Network
from ..recipe.registry import register
from .all_gather import AllGather
from .all_reduce import AllReduce
from .base import Exchange
from .request import Request, Result
from .script import Script


@register
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

    def refuses(self, codec: Codec, *, world_size: int, remembers: bool) -> str | None:
        return "local stays in one process: end the recipe with all_gather or all_reduce instead"

    def _like(self, codec: Codec) -> Exchange:
        return AllGather() if AllReduce().accepts(codec) else AllReduce()

    def script(
        self, codec: Codec, numel: int, *, world_size: int, exact: int = 0, shapes: Sequence[Shape] = ()
    ) -> Script:
        return self._like(codec).script(codec, numel, world_size=world_size, exact=exact, shapes=shapes)

    def mean(self, codec: Codec, request: Request, network: Network) -> Result:
        return self._like(codec).mean(codec, request, network)


local = Local
