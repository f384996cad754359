"""A recipe says how gradients travel, as data: memory | codec | codec of its values | exchange.

    chain(error_feedback(), threshold_k(0.01), bf16(), all_gather())  ==  parse("ef|threshold_k:0.01|bf16|all_gather")

What makes no sense is refused here, when it is composed, in one sentence that says what to write instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from ..codecs import Codec, Shape
from ..codecs.cast import Fp32
from ..errors import OptionError, RecipeError
from ..exchange import AllGather, AllReduce, Exchange
from ..memory import ErrorFeedback, Memory
from .fits import TYPICAL_NUMEL, contraction_refusal, order_refusal
from .presets import PRESETS
from .registry import ALIASES, STAGES
from .stage import Stage

_TYPICAL_SHAPE = (1024, 1024)  # whose size and error are told
_EXAMPLES = {"bits": 4, "ratio": 0.01}  # of options without a default


@dataclasses.dataclass(frozen=True, repr=False)
class Recipe:
    """Memory, codec and exchange that fit together; the codec already holds the codec of its values.

    >>> recipe = parse("ef | top_k:0.01 | bf16 | all_gather")
    >>> recipe
    chain(error_feedback(), top_k(0.01), bf16(), all_gather())
    >>> str(recipe), recipe.codec.values
    ('error_feedback|top_k:0.01|bf16|all_gather', bf16())
    >>> recipe.unbiased, recipe.wire_bytes(1_000_000)
    (False, 30748)
    """

    memory: Memory | None
    codec: Codec
    exchange: Exchange

    def __post_init__(self) -> None:
        for inner in _inner(self.codec).values():
            _raise(order_refusal(self.codec, inner))
        if self.memory is not None:
            _raise(self.memory.accepts(self.codec))
            _raise(contraction_refusal(self.memory, self.codec))
        _raise(self.exchange.accepts(self.codec))
        if self.exchange.feedback:
            _raise(contraction_refusal(ErrorFeedback(), self.exchange.codecs(self.codec)[-1]))

    def stages(self) -> tuple[Stage, ...]:
        """The words of the recipe, left to right."""
        memory = () if self.memory is None else (self.memory,)
        return (*memory, *_unrolled(self.codec), self.exchange)

    def text(self) -> str:
        """The recipe as `parse` reads it."""
        return self._text

    __str__ = text

    @functools.cached_property  # every step tells it to the meter
    def _text(self) -> str:
        return "|".join(stage.text() for stage in self.stages())

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.stages()))})"

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of what is sent is the gradient itself; a memory adds older ones."""
        return self.memory is None and self.codec.unbiased

    @property
    def dense(self) -> bool:
        """Whether it does what DDP does without it."""
        return self.codec.lossless and self.exchange.sums and self.memory is None

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Every codec that runs: of what is sent, and of what two_shot sends back."""
        return self.exchange.codecs(self.codec)

    def refusal(self, world_size: int) -> str | None:
        """One sentence if this many ranks cannot run it, else None."""
        return self.exchange.refuses(self.codec, world_size=world_size, remembers=self.memory is not None)

    def wire_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        """Exact size of one rank's message for a tensor; what an all-reduce moves depends on the ranks as well."""
        return self.codec.message_bytes(numel, shape=shape)

    def describe(self) -> str:
        """What every stage does, and what the codec costs and promises, for people to read."""
        codec, numel, shape = self.codec, TYPICAL_NUMEL, _TYPICAL_SHAPE
        if codec.unbiased:
            promise, lost = "unbiased", codec.omega(numel)
        else:
            delta = codec.delta(numel, shape=shape)
            promise, lost = "biased", None if delta is None else 1 - delta
        if lost is not None:
            promise += f", expected squared error at most {lost:.3g} |x|^2"
        size = self.wire_bytes(numel, shape=shape)
        lines = [self.text()]
        lines += [f"  {stage.text()}: {(inspect.getdoc(type(stage)) or '').splitlines()[0]}" for stage in self.stages()]
        lines.append(f"  a 1024 x 1024 matrix: {size:,} bytes, {4 * numel / size:.1f} x fewer than fp32; {promise}")
        return "\n".join(lines)

    def to_yaml(self) -> str:
        """The recipe as a YAML list, one stage a line.

        >>> print(parse("ef|top_k:0.01|bf16|all_gather").to_yaml(), end="")
        - error_feedback
        - top_k:
            ratio: 0.01
        - bf16
        - all_gather
        """
        import yaml  # only who reads or writes YAML pays for the import

        words = [{stage.name: stage.options()} if stage.options() else stage.name for stage in self.stages()]
        return yaml.safe_dump(words, sort_keys=False)

    @staticmethod
    def from_yaml(source: str) -> Recipe:
        """The recipe of a YAML list of stages, or of a YAML string that holds recipe text.

        >>> Recipe.from_yaml("[ef, {top_k: {ratio: 0.01}}, bf16, all_gather]")
        chain(error_feedback(), top_k(0.01), bf16(), all_gather())
        """
        import yaml

        try:
            words = yaml.safe_load(source)
        except yaml.YAMLError as damage:
            raise RecipeError(f"this is not YAML ({' '.join(str(damage).split())}): write a list of stages") from None
        if isinstance(words, str):
            return parse(words)
        if not isinstance(words, list):
            raise RecipeError(
                f"a recipe in YAML is a list of stages such as [ef, top_k: {{ratio: 0.01}}], not {words!r}"
            )
        return chain(*(_stage_from_yaml(word) for word in words))


def chain(*stages: Stage) -> Recipe:
    """Compose a recipe: at most one memory, codecs from outer to inner, one exchange.

    >>> from thinwire.codecs import bf16, top_k
    >>> from thinwire.exchange import all_gather
    >>> from thinwire.memory import error_feedback
    >>> print(chain(error_feedback(), top_k(0.01), bf16(), all_gather()))
    error_feedback|top_k:0.01|bf16|all_gather
    """
    for stage in stages:
        _raise(_type_refusal(stage))
    memories = [stage for stage in stages if isinstance(stage, Memory)]
    codecs = [stage for stage in stages if isinstance(stage, Codec)]
    exchanges = [stage for stage in stages if isinstance(stage, Exchange)]
    for found, purpose in ((memories, "keep what was not sent"), (exchanges, "combine the ranks")):
        if len(found) > 1:
            raise RecipeError(f"{found[0].name} and {found[1].name} both {purpose}: keep one of them")
    codec = _combined(codecs)
    if not exchanges:
        fitting = next(e.name for e in (AllReduce(), AllGather()) if e.accepts(codec) is None)
        written = "|".join([*(stage.text() for stage in stages), fitting])
        raise RecipeError(f"the recipe does not say how ranks combine: end it with an exchange, {written}")
    in_order = [*memories, *codecs, *exchanges]
    if list(stages) != in_order:
        written = "|".join(stage.text() for stage in in_order)
        raise RecipeError(f"a memory comes first, then codecs, then one exchange: write {written}")
    return Recipe(memories[0] if memories else None, codec, exchanges[0])


def parse(text: str) -> Recipe:
    """Read a recipe: stages between `|`, each `name:first,option=value`; spaces do not matter. Or name a preset.

    >>> parse("qsgd:4,block=512|all_gather")
    chain(qsgd(4, block=512), all_gather())
    >>> print(parse("two-shot-3"))
    rotated:3|two_shot:4
    >>> parse("all_reduce")
    chain(fp32(), all_reduce())
    """
    if not isinstance(text, str):
        raise RecipeError(
            f"parse reads text such as 'ef|top_k:0.01|all_gather', not {type(text).__name__}: use chain()"
        )
    text = PRESETS.get(text.strip(), text)
    if "|" not in text and text.partition(":")[0].strip() not in {*STAGES, *ALIASES}:
        close = difflib.get_close_matches(text.strip(), PRESETS, n=1, cutoff=0.8)
        _raise(f"there is no preset {text.strip()}: did you mean {close[0]}?" if close else None)
    return chain(*(_parsed_stage("".join(word.split())) for word in text.split("|")))


# ---------------------------------------------------------------------------------------------------- words to stages


def _parsed_stage(word: str) -> Stage:
    name, _, written = word.partition(":")
    stage = _named(name)
    options: dict[str, Any] = {}
    for place, part in enumerate(written.split(",") if written else []):
        key, given, value = part.partition("=")
        if not given:
            names = stage.option_names()
            if place >= len(names):
                _raise(_option_refusal(stage, part))
            key, value = names[place], part
        if key in options:
            raise RecipeError(f"{word} gives {key} twice: keep one of them")
        options[key] = value
    return _built(stage, options)


def _stage_from_yaml(word: object) -> Stage:
    if isinstance(word, str):
        return _parsed_stage("".join(word.split()))
    if isinstance(word, dict) and len(word) == 1:
        name, options = next(iter(word.items()))
        if isinstance(name, str) and isinstance(options, dict) and all(isinstance(key, str) for key in options):
            return _built(_named(name), options)
    raise RecipeError(f"a stage in YAML is a name, or a name with options such as top_k: {{ratio: 0.01}}, not {word!r}")


def _named(name: str) -> type[Stage]:
    stage = STAGES.get(ALIASES.get(name, name))
    if stage is not None:
        return stage
    kinds = (Memory, Codec, Exchange)  # in the order of a recipe
    known = [*(word for kind in kinds for word, each in STAGES.items() if issubclass(each, kind)), *ALIASES]
    if not name:
        raise RecipeError("a stage is missing: write a recipe such as ef|top_k:0.01|bf16|all_gather")
    close = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1, cutoff=0.5)
    raise RecipeError(
        f"there is no stage {name}: " + (f"did you mean {close[0]}?" if close else f"use {', '.join(known)}")
    )


def _built(stage: type[Stage], options: Mapping[str, object]) -> Stage:
    for key in options:
        if key not in stage.option_names():
            _raise(_option_refusal(stage, key))
    values = {key: _converted(stage, key, value) for key, value in options.items()}
    for field in dataclasses.fields(stage):
        if field.default is dataclasses.MISSING and field.name not in values:
            raise RecipeError(f"{stage.name} needs {field.name}: write {stage.name}:{_EXAMPLES.get(field.name, '...')}")
    try:
        return stage(**values)
    except OptionError as refusal:
        raise RecipeError(str(refusal)) from None


def _option_refusal(stage: type[Stage], option: str) -> str:
    names = stage.option_names()
    return f"{stage.name} has no option {option}: " + (
        f"use {', '.join(names)}" if names else f"write {stage.name} alone"
    )


def _converted(stage: type[Stage], option: str, value: object) -> object:
    """A value as its field declares it, from text or from YAML."""
    kind = typing.get_type_hints(stage)[option]
    if typing.get_origin(kind) is Literal:
        words = typing.get_args(kind)
        if value in words:
            return value
        expected = " or ".join(words)
    else:
        expected = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a word")
        fits = (int, float) if kind is float else kind
        if isinstance(value, fits) and isinstance(value, bool) == (kind is bool):  # True is an int to Python, not to us
            return value
        if isinstance(value, str):
            with contextlib.suppress(KeyError, ValueError):
                return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    raise RecipeError(f"{option} of {stage.name} is {expected}, not {value}")


# ------------------------------------------------------------------------------------------------------- what fits


def _raise(refusal: str | None) -> None:
    if refusal is not None:
        raise RecipeError(refusal)


def _inner(codec: Codec) -> dict[str, Codec]:
    """The codec of a sparsifier's values or of low-rank factors, under the name of its field."""
    return {
        field.name: getattr(codec, field.name) for field in dataclasses.fields(codec) if field.metadata.get("inner")
    }


def _unrolled(codec: Codec) -> Iterator[Codec]:
    """The codec and the codecs inside it as stages of their own; a plain float32 inside is not worth a word."""
    inner = _inner(codec)
    yield dataclasses.replace(codec, **dict.fromkeys(inner, Fp32()))
    for each in inner.values():
        if not each.lossless:
            yield from _unrolled(each)


def _combined(codecs: Sequence[Codec]) -> Codec:
    """One codec: the second becomes the codec of the first one's values or factors."""
    for outer, inner in itertools.pairwise(codecs):
        _raise(order_refusal(outer, inner))
    if len(codecs) < 2:
        return codecs[0] if codecs else Fp32()
    outer, inner = codecs  # three cannot pass: a codec of values takes no other
    field, present = next(iter(_inner(outer).items()))
    if not present.lossless:
        raise RecipeError(f"{outer.spec()} already says how its values are written: leave out {inner.text()}")
    try:
        return dataclasses.replace(outer, **{field: inner})
    except OptionError as refusal:
        raise RecipeError(str(refusal)) from None


def _type_refusal(stage: object) -> str | None:
    if isinstance(stage, (Memory, Codec, Exchange)):
        return None
    if isinstance(stage, type) and issubclass(stage, Stage):
        return f"chain takes stages, and {stage.name} is only the name of one: write {stage.name}(...)"
    if isinstance(stage, Recipe):
        return f"chain takes stages, and {stage} is a whole recipe: use it as it is"
    return f"chain takes stages such as top_k(0.01), not {stage!r}: use parse() for text"
