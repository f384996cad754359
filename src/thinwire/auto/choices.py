"""A choice gives every kind of bucket one candidate: large buckets, embeddings and small buckets may differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .candidates import Candidate

KINDS = ("large", "embeddings", "small")
DENSE = 0  # the first candidate
_SMALL = 1 << 16  # elements
Choice: TypeAlias = tuple[int, ...]  # for each of `KINDS` the number of a candidate


def kind_of(numel: int, embedding: int) -> str:
    """The kind of a bucket with `numel` elements, of which `embedding` belong to embedding tables.

    >>> kind_of(1_000_000, 0), kind_of(1_000_000, 900_000), kind_of(1000, 0)
    ('large', 'embeddings', 'small')
    """
    if numel < _SMALL:
        return "small"
    return "embeddings" if 2 * embedding > numel else "large"


def uniform(number: int) -> Choice:
    """The choice that gives all kinds the same candidate.

    >>> uniform(4)
    (4, 4, 4)
    """
    return (number,) * len(KINDS)


def main_kind(kinds: Sequence[str]) -> int:
    """The kind that stands for the whole model: the first of `KINDS` that is present.

    >>> main_kind(["small", "embeddings"]), main_kind([])
    (1, 0)
    """
    return next((number for number, kind in enumerate(KINDS) if kind in kinds), 0)


def per_bucket(choice: Choice, kinds: Sequence[str], canary: tuple[int, int] | None = None) -> list[int]:
    """The candidate of every bucket. A canary (candidate, bucket) replaces one of them.

    >>> per_bucket((4, 7, 0), ["large", "embeddings", "large"], canary=(9, 2))
    [4, 7, 9]
    """
    numbers = [choice[KINDS.index(kind)] for kind in kinds]
    if canary is not None and canary[1] < len(numbers):
        numbers[canary[1]] = canary[0]
    return numbers


class Choices:
    """Names and groups choices, given the candidates and the kinds of the model's buckets.

    >>> from thinwire.auto.candidates import candidate
    >>> choices = Choices([candidate("dense"), candidate("two-shot-4")], kinds=["large", "small"])
    >>> choices.name((1, 0, 0)), choices.family((1, 0, 0)), choices.group((0, 1, 0))
    ('two-shot-4 and dense', 'two_shot', 'dense')
    """

    def __init__(self, candidates: Sequence[Candidate], *, kinds: Sequence[str] = ()) -> None:
        self.candidates = list(candidates)
        self.kinds = list(kinds)  # of the buckets, in their order

    def present(self) -> list[int]:
        """The numbers of the kinds that the model has, large buckets first."""
        return [number for number, kind in enumerate(KINDS) if kind in self.kinds]

    def main(self, choice: Choice) -> Candidate:
        """The candidate of the main kind, which holds most elements."""
        return self.candidates[choice[main_kind(self.kinds)]]

    def family(self, choice: Choice) -> str:
        return self.main(choice).family

    def group(self, choice: Choice) -> str:
        """Choices of one group have similar prediction errors: a family, or dense, which runs no codec."""
        dense = [self.candidates[choice[kind]].recipe.dense for kind in self.present()]
        return "dense" if all(dense) else self.family(choice)

    def name(self, choice: Choice) -> str:
        names = dict.fromkeys(self.candidates[choice[kind]].name for kind in self.present())
        return " and ".join(names) or self.candidates[choice[0]].name

    def named(self, name: str) -> Choice:
        """The uniform choice of the candidate with this name."""
        return uniform(next(number for number, one in enumerate(self.candidates) if one.name == name))
