"""Many workers in one process, by a virtual clock: the algorithms of real runs on a network that is reckoned."""

from .links import Links
from .run import simulate
from .settings import Settings

__all__ = ["Links", "Settings", "simulate"]
