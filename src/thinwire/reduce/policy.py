"""A policy says which recipe runs in a step; the default one always says the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ExchangeError, ThinwireError
from ..recipe.compose import Recipe

if TYPE_CHECKING:
    from .reducer import Reducer
    from .step import Step


class Policy(Protocol):
    """What a reducer asks in every step, on every rank, in the same order."""

    name: str  # what ranks compare: a policy must be the same on all of them

    def before_step(self, step: int) -> None:
        """A step begins: `recipe` and `overrides` hold for it."""

    @property
    def recipe(self) -> Recipe:
        """How most buckets travel."""

    @property
    def overrides(self) -> Mapping[str, Recipe]:
        """The buckets that travel by another recipe in this step; all recipes with a memory have the same one."""

    def measures(self, step: int) -> bool:
        """Whether this step should tell how much of the gradient its codecs keep."""

    def arrived(self, names: Sequence[str]) -> None:
        """Tensors were given to the reducer."""

    def before_wait(self) -> None:
        """Everything of the step is under way."""

    def after_step(self, step: Step) -> None:
        """The step is committed."""

    def layout_changed(self) -> None:
        """The reducer's buckets are others than before."""

    def stats(self) -> dict[str, float]:
        """What it has to tell, under slashed names."""

    def state_dict(self) -> dict[str, Any] | None:
        """What it needs to resume; JSON."""

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resume, or begin anew."""

    def close(self) -> None:
        """Nothing is asked any more."""


class PolicyOptions(Protocol):
    """Options that make a policy for a reducer: what `tw.auto(...)` returns."""

    def bind(self, reducer: Reducer) -> Policy:
        """The policy of one reducer; called on all ranks at the same place."""


def ask(reducer: Reducer, question: Callable[..., None], *arguments: object) -> None:
    """Ask a policy. Where ranks cannot agree, a rank is lost: the reducer ends as after a failed exchange."""
    try:
        question(*arguments)
    except Exception as failure:
        why = str(failure) if isinstance(failure, ThinwireError) else repr(failure)
        told = f"{reducer.policy.name} failed in step {reducer.step}, with {reducer.recipe}: {why}"
        reducer.fail(ExchangeError(told), failure)


class Fixed:
    """One recipe, until `set_recipe` says another.

    >>> from thinwire import parse
    >>> Fixed(parse("bf16|all_reduce")).overrides
    {}
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.name = str(recipe)
        self.overrides: Mapping[str, Recipe] = {}

    def before_step(self, step: int) -> None:
        pass

    def measures(self, step: int) -> bool:
        return False

    def arrived(self, names: Sequence[str]) -> None:
        pass

    def before_wait(self) -> None:
        pass

    def after_step(self, step: Step) -> None:
        pass

    def layout_changed(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        pass

    def close(self) -> None:
        pass
