"""Deciding while training: which recipe, by which collective, how much of it. `attach(model, "auto")` runs it."""

from .candidates import Auto, Candidate, auto

__all__ = ["Auto", "Candidate", "auto"]
