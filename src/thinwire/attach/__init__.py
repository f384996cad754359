"""Putting a recipe into a training program."""

from .ddp import attach
from .link import Link

__all__ = ["Link", "attach"]
