"""The `thinwire` command: one module for each group of subcommands."""

from .main import main

__all__ = ["main"]
