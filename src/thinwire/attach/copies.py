"""A copy of a DDP model has no hook. What stands in for the link there says so."""

from __future__ import annotations

import warnings


class Detached:
    """What a copy of a DDP model has in place of its link: nothing that works."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe


def warn_of_copy() -> None:
    warnings.warn(
        "a copy of a DDP model loses its communication hook, so the copy is not compressed: "
        "call thinwire.attach on the copy",
        stacklevel=4,
    )
