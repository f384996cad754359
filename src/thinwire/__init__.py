"""thinwire: train PyTorch models over slow networks with compressed gradients.

>>> import thinwire as tw
>>> recipe = tw.parse("ef|threshold_k:0.01|bf16|all_gather")
>>> recipe.wire_bytes(1_000_000) < 4_000_000 / 100
True
"""

from . import theory
from .attach import Link, attach
from .auto import auto
from .codecs.base import Codec
from .codecs.cast import bf16, fp8, fp16, fp32
from .codecs.global_qsgd import global_qsgd
from .codecs.low_rank import low_rank
from .codecs.quantize import abs_max, min_max, natural, qsgd, sign, terngrad
from .codecs.rotated import rotated
from .codecs.sparsify import dgc_k, gaussian_k, random_k, top_k, trimmed_k
from .codecs.threshold_k import threshold_k
from .comm.communicator import Communicator
from .comm.peers import mail_at
from .errors import AttachError, ExchangeError, MessageError, OptionError, RecipeError, StateError, ThinwireError
from .exchange import Exchange, all_gather, all_reduce, local, shared_top_k, two_shot
from .gossip import Decentralized, decentralize
from .gossip.topology import Topology, complete, exponential, from_graph, one_peer_exponential, ring, star, torus
from .lab.study import study  # the function takes the name of its package: see there
from .memory import Memory, error_feedback, momentum_correction
from .recipe.compose import Recipe, chain, parse
from .recipe.presets import PRESETS
from .reduce.local_group import LocalGroup
from .rng import Draw

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AttachError",
    "Codec",
    "Communicator",
    "Decentralized",
    "Draw",
    "Exchange",
    "ExchangeError",
    "Link",
    "LocalGroup",
    "Memory",
    "MessageError",
    "OptionError",
    "Recipe",
    "RecipeError",
    "StateError",
    "ThinwireError",
    "Topology",
    "__version__",
    "abs_max",
    "all_gather",
    "all_reduce",
    "attach",
    "auto",
    "bf16",
    "chain",
    "complete",
    "decentralize",
    "dgc_k",
    "error_feedback",
    "exponential",
    "fp8",
    "fp16",
    "fp32",
    "from_graph",
    "gaussian_k",
    "global_qsgd",
    "local",
    "low_rank",
    "mail_at",
    "min_max",
    "momentum_correction",
    "natural",
    "one_peer_exponential",
    "parse",
    "qsgd",
    "random_k",
    "ring",
    "rotated",
    "shared_top_k",
    "sign",
    "star",
    "study",
    "terngrad",
    "theory",
    "threshold_k",
    "top_k",
    "torus",
    "trimmed_k",
    "two_shot",
]
