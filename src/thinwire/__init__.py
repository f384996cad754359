"""thinwire: train PyTorch models over slow networks with compressed gradients.

>>> import thinwire as tw
>>> recipe = tw.parse("ef|threshold_k:0.01|bf16|all_gather")
>>> recipe.wire_bytes(1_000_000) < 4_000_000 / 100
True
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import codecs, exchange, memory, theory
from .attach import LOCAL_PRESETS, Link, LocalSteps, attach, local_steps
from .errors import AttachError, ExchangeError, MessageError, OptionError, RecipeError, StateError, ThinwireError
from .recipe.compose import Recipe, chain, parse
from .recipe.presets import PRESETS
from .reduce import LocalGroup, Reducer
from .rng import Draw

if TYPE_CHECKING:
    from .auto import auto
    from .gossip import Decentralized, decentralize, topology
    from .lab.study import study

__version__ = "0.2.0.dev0"

__all__ = [
    "LOCAL_PRESETS",
    "PRESETS",
    "AttachError",
    "Decentralized",
    "Draw",
    "ExchangeError",
    "Link",
    "LocalGroup",
    "LocalSteps",
    "MessageError",
    "OptionError",
    "Recipe",
    "RecipeError",
    "Reducer",
    "StateError",
    "ThinwireError",
    "__version__",
    "attach",
    "auto",
    "chain",
    "codecs",
    "decentralize",
    "exchange",
    "local_steps",
    "memory",
    "parse",
    "study",
    "theory",
    "topology",
]

# Loaded when they are asked for: nothing of them is needed to train with a recipe.
_LATER = {
    "auto": ".auto",
    "Decentralized": ".gossip",
    "decentralize": ".gossip",
    "topology": ".gossip.topology",
    "study": ".lab.study",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LATER[name], __name__)
    found = module if name == "topology" else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
