"""Which recipes a group of ranks can run, and what one recipe inherits from another."""

from __future__ import annotations

from ..codecs.cast import Fp32
from ..errors import AttachError
from ..exchange import AllReduce, Local
from ..exchange.carrier import Carrier
from ..memory import RunningMemory
from ..recipe import Recipe, parse


def is_dense(recipe: Recipe) -> bool:
    """Whether the recipe does what DDP does without it."""
    return isinstance(recipe.codec, Fp32) and isinstance(recipe.exchange, AllReduce) and recipe.memory is None


def checked_recipe(recipe: Recipe | str, world_size: int) -> Recipe:
    """A recipe that this many ranks can run."""
    if isinstance(recipe, str):
        recipe = parse(recipe)
    if not isinstance(recipe, Recipe):
        raise AttachError(f"attach takes a recipe, its text or the name of a preset, not {recipe!r}")
    if isinstance(recipe.exchange, Local):
        raise AttachError(f"local stays in one process: end {recipe} with all_gather or all_reduce instead")
    if refusal := recipe.exchange.refuses(recipe.codec, world_size=world_size, remembers=recipe.memory is not None):
        raise AttachError(refusal)
    return recipe


def carried_over(old: Carrier, new: Recipe) -> RunningMemory | None:
    """The memory of the next recipe, with everything that the old one still owes."""
    if old.memory is None or new.memory is None:
        return old.memory
    memory = new.memory.start()
    memory.take_over(old.memory)
    return memory
