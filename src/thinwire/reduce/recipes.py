"""Which recipes a group of ranks can run, and what one recipe inherits from another."""

from __future__ import annotations

from ..errors import AttachError
from ..memory import RunningMemory
from ..recipe.compose import Recipe, parse
from .carrier import Carrier


def checked_recipe(recipe: Recipe | str, world_size: int) -> Recipe:
    """A recipe that this many ranks can run."""
    if isinstance(recipe, str):
        recipe = parse(recipe)
    if not isinstance(recipe, Recipe):
        raise AttachError(f"attach takes a recipe, its text or the name of a preset, not {recipe!r}")
    if refusal := recipe.refusal(world_size):
        raise AttachError(refusal)
    return recipe


def carried_over(old: Carrier, new: Recipe) -> RunningMemory | None:
    """The memory of the next recipe, with everything that the old one still owes."""
    if old.memory is None or new.memory is None:
        return old.memory
    memory = new.memory.start()
    memory.take_over(old.memory)
    return memory
