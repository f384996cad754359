"""`thinwire simulate`: many workers in one process, with the code of real runs, a virtual clock and a model network."""

from .links import Links
from .run import simulate
from .settings import Settings

__all__ = ["Links", "Settings", "simulate"]
