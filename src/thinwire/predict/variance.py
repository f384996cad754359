"""The variance that a recipe adds to the mean gradient, by theory; for plans and for `auto`."""

from __future__ import annotations

from ..recipe.compose import Recipe


def variance_of_mean(recipe: Recipe, numel: int, workers: int) -> float | None:
    """Variance of the mean over the workers, in units of one worker's |g|^2; None for a biased codec.

    >>> from thinwire import parse
    >>> round(variance_of_mean(parse("two-shot-4"), 1 << 20, workers=4), 3)
    0.013
    >>> variance_of_mean(parse("top-k"), 1 << 20, workers=4) is None
    True
    """
    first, *back = recipe.codecs
    variance = first.omega_of_mean(numel, workers)
    if variance is None:
        return None
    return variance + sum(codec.omega(numel) or 0.0 for codec in back)  # errors on the way back do not average out
