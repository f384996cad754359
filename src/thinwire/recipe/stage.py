"""A stage is one word of a recipe: a memory, a codec or an exchange, with its options. It is data and prints itself."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ..errors import OptionError


def _is_inner(field: dataclasses.Field[Any]) -> bool:
    """Inner stages (the codec of a sparsifier's values) are words of their own in a recipe, not options."""
    return bool(field.metadata.get("inner"))


@dataclasses.dataclass(frozen=True, repr=False)
class Stage:
    """Base of memories, codecs and exchanges: frozen options that print as they are written.

    >>> from thinwire.codecs import qsgd
    >>> qsgd(4, block=512)
    qsgd(4, block=512)
    >>> qsgd(4, block=512).text()
    'qsgd:4,block=512'
    """

    name: ClassVar[str]

    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults; the first field is always there if it has no default."""
        found = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _is_inner(field) and (field.default is dataclasses.MISSING or value != field.default):
                found[field.name] = value
        return found

    def _written(self, quote: bool) -> str:
        first = next((f.name for f in dataclasses.fields(self) if not _is_inner(f)), None)
        parts = []
        for key, value in self.options().items():
            shown = repr(value) if quote or not isinstance(value, str) else value
            parts.append(shown if key == first else f"{key}={shown}")
        if quote:  # Python writes an inner stage as an argument; in a recipe it is a word of its own
            inner = [f for f in dataclasses.fields(self) if _is_inner(f) and getattr(self, f.name) != f.default]
            parts += [f"{field.name}={getattr(self, field.name)!r}" for field in inner]
        return (", " if quote else ",").join(parts)

    def text(self) -> str:
        """The stage as a word of a recipe: `name:first,option=value`."""
        written = self._written(quote=False)
        return f"{self.name}:{written}" if written else self.name

    def __repr__(self) -> str:
        return f"{self.name}({self._written(quote=True)})"

    @classmethod
    def option_names(cls) -> list[str]:
        return [f.name for f in dataclasses.fields(cls) if not _is_inner(f)]

    def _require(self, condition: bool, sentence: str) -> None:
        """Refuse an option when the stage is built; `sentence` says what to write instead."""
        if not condition:
            raise OptionError(f"{self.name}: {sentence}")
