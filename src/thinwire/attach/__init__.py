"""`attach` puts a recipe into a training program; a `Link` is what it returns."""

from .ddp import attach
from .link import Link

__all__ = ["Link", "attach"]
