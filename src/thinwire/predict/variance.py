"""The variance that a recipe adds to the mean gradient, by theory; for plans and for `auto`."""

from __future__ import annotations

from .. import theory
from ..codecs.global_qsgd import GlobalQsgd
from ..exchange import TwoShot
from ..recipe.compose import Recipe


def variance_of_mean(recipe: Recipe, numel: int, workers: int) -> float | None:
    """Of the mean over so many workers, in terms of one worker's |g|^2; None for a codec that is biased."""
    codec, exchange = recipe.codec, recipe.exchange
    omega = codec.omega(numel)
    if omega is None:
        return None
    if isinstance(codec, GlobalQsgd) and codec.addition == "sum" and codec.norm != "l2":
        omega = theory.uniform_linf(codec.block or numel, codec.levels(workers))  # which they share
    back = exchange.codec_back(codec).omega(numel) if isinstance(exchange, TwoShot) else 0.0
    return omega / workers + (back or 0.0)
