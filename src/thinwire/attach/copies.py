"""A copy of a DDP model has no hook. What stands in for the link there says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ..recipe.compose import Recipe


class Detached:
    """What a copy of a DDP model has in place of its link: nothing that works."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe


class NotCopied:
    """A link is not copied with its model: the copy gets a `Detached`, and a warning."""

    @property
    def recipe(self) -> Recipe:
        """How gradients travel now."""
        raise NotImplementedError

    def __deepcopy__(self, memo: object) -> Detached:
        _warn_of_copy()
        return Detached(str(self.recipe))

    def __reduce__(self) -> tuple[Callable[[str], Detached], tuple[str]]:
        _warn_of_copy()
        return Detached, (str(self.recipe),)


def _warn_of_copy() -> None:
    warnings.warn(
        "a copy of a DDP model loses its communication hook, so the copy is not compressed: "
        "call thinwire.attach on the copy",
        stacklevel=4,
    )
