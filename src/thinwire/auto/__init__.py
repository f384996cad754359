"""Chooses the recipe while training, from measured steps and predictions: `attach(model, "auto")` uses it.

The module may be called: `thinwire.auto` is this package and the function at once, and it is loaded when it is used.
"""

import sys
import types
from typing import Any

from .candidates import Auto, Candidate, auto

__all__ = ["Auto", "Candidate", "auto"]


class _Callable(types.ModuleType):
    """Importing a package puts it over a function of the same name in its parent: then the package must do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Auto:
        return auto(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
