"""The words that a recipe may use: one decorator adds a codec, a memory or an exchange under its name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar, dataclass_transform

from ..errors import OptionError
from .stage import Stage

_S = TypeVar("_S", bound=type[Stage])
_WORD = re.compile(r"[a-z][a-z0-9_]*")
_known: dict[str, type[Stage]] = {}

STAGES: Mapping[str, type[Stage]] = MappingProxyType(_known)  # a live view: what is registered later is in it
ALIASES: Mapping[str, str] = MappingProxyType(
    {"ef": "error_feedback", "dgc": "momentum_correction", "none": "fp32", "dense": "fp32"}
)


@dataclass_transform(frozen_default=True)
def register(stage: _S) -> _S:
    """Make a stage usable by its name in recipe text, `chain`, YAML, presets, `plan` and `thinwire kernels`.

    The class becomes a frozen dataclass, if it is none yet: its fields are the options of the word.

    >>> import torch
    >>> from thinwire import parse
    >>> from thinwire.codecs import Codec
    >>> @register
    ... class Half(Codec):
    ...     "Sends float16."
    ...     name = "half"
    ...     def body_bytes(self, numel, *, shape=None):
    ...         return 2 * numel
    ...     def write(self, x, body, key, state):
    ...         body.view(torch.float16).copy_(x.reshape(-1))
    ...     def add_body(self, body, out, key, shape):
    ...         out += body.view(torch.float16)
    >>> parse("half|all_gather")
    chain(half(), all_gather())
    >>> unregister("half")
    """
    name = getattr(stage, "name", "")
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise OptionError(f"{stage.__name__} needs a name of lower-case letters, digits and _, not {name!r}: set name")
    if name in ALIASES or _known.get(name, stage).__qualname__ != stage.__qualname__:
        raise OptionError(f"there is a stage {name} already: choose another name for {stage.__name__}")
    if "__dataclass_params__" not in vars(stage):
        dataclasses.dataclass(frozen=True, repr=False)(stage)
    _known[name] = stage
    return stage


def unregister(name: str) -> None:
    """Forget a stage that a program or a test has registered."""
    _known.pop(name, None)
