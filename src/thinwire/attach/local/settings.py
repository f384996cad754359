"""The settings of local steps: a preset and what differs from it, checked once, as data that prints itself."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ...errors import OptionError
from ...recipe.compose import Recipe, parse
from .outer import Outer, outer_of

Fragments = int | Sequence[Sequence[str]]
OuterFactory = Callable[[list[Tensor]], torch.optim.Optimizer]
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all ranks agree on before the first step.

    >>> print(Settings.of(30, "two-shot-1", "nesterov:0.7,0.9", fragments=2, delay=1))
    every=30 recipe=rotated:1|two_shot:1 outer=nesterov:0.7,0.9 fragments=2 delay=1
    """

    steps: int | None  # of a round
    seconds: float | None  # of a round, where ranks may take different numbers of steps
    recipe: Recipe
    outer: Outer | OuterFactory
    fragments: Fragments
    delay: int
    mixing: float
    sync_state: Mapping[str, int]

    @classmethod
    def of(
        cls,
        every: int | str,
        recipe: Recipe | str,
        outer: Outer | OuterFactory | str,
        *,
        fragments: Fragments = 1,
        delay: int = 0,
        mixing: float = 0.0,
        sync_state: Mapping[str, int] | None = None,
    ) -> Settings:
        """Checked, with texts read."""
        steps, seconds = _period(every)
        found = cls(
            steps,
            seconds,
            parse(recipe) if isinstance(recipe, str) else recipe,
            outer if callable(outer) else outer_of(outer),
            fragments if isinstance(fragments, int) else tuple(tuple(names) for names in fragments),
            delay,
            float(mixing),
            dict(sync_state or {}),
        )
        found._check()
        return found

    @property
    def turns(self) -> int:
        """Fragments, each of which has one turn in a round."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    @property
    def every(self) -> int | str:
        """As it was given."""
        return self.steps if self.steps is not None else f"{self.seconds:g}s"

    def _check(self) -> None:
        if self.turns < 1:
            raise OptionError(f"fragments counts them, or lists the parameters of each, not {self.fragments}")
        spacing = None if self.steps is None else self.steps // self.turns
        if spacing is not None and spacing < 1:
            raise OptionError(f"{self.turns} fragments need a round of at least as many steps: every={self.steps}")
        if not isinstance(self.delay, int) or self.delay < 0:
            raise OptionError(f"delay is a number of steps, 0 or more, not {self.delay}")
        if spacing is not None and self.delay >= spacing and self.delay:
            raise OptionError(
                f"delay={self.delay} and a turn every {spacing} steps: an exchange must end before the next begins, "
                f"so use a delay below {spacing}, fewer fragments or longer rounds"
            )
        if not 0.0 <= self.mixing < 1.0:
            raise OptionError(f"mixing is the share of the local parameters, 0 to below 1, not {self.mixing}")
        if self.mixing and not self.delay:
            raise OptionError("mixing keeps a share of the steps taken during a delay: give delay too, or leave it out")
        if isinstance(self.outer, Outer) and self.outer.kind == "none" and self.recipe.memory is None:
            raise OptionError(
                f'outer="none" leaves momentum to the feedback of the recipe, and {self.recipe} has none: '
                f'write ef:0.95|{self.recipe}, or use outer="average"'
            )
        for name, rounds in self.sync_state.items():
            if not isinstance(rounds, int) or rounds < 1:
                raise OptionError(f"sync_state[{name!r}] is a number of rounds, 1 or more, not {rounds}")

    def __str__(self) -> str:
        outer = self.outer if isinstance(self.outer, Outer) else getattr(self.outer, "__name__", "own")
        words = [f"every={self.every}", f"recipe={self.recipe}", f"outer={outer}"]
        if self.turns > 1:
            words.append(f"fragments={self.turns}")
        words += [f"{name}={getattr(self, name)}" for name in ("delay", "mixing", "sync_state") if getattr(self, name)]
        return " ".join(words)


def _period(every: int | str) -> tuple[int | None, float | None]:
    """Steps, or seconds.

    >>> _period(30), _period("1.5m")
    ((30, None), (None, 90.0))
    """
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return every, None
    match = re.fullmatch(r"([\d.]+)\s*(ms|s|min|m|h)", every.strip()) if isinstance(every, str) else None
    if match is not None and (seconds := float(match[1]) * _SECONDS[match[2]]) > 0:
        return None, seconds
    raise OptionError(f'every is a number of optimizer steps, 1 or more, or a time such as "30s", not {every!r}')
