"""Writes the tables of docs/codecs.md and docs/recipes.md and the counts of README.md from the registry.

python docs/make_codecs.py          write them
python docs/make_codecs.py --check  fail if any is out of date

A codec, memory, exchange or preset that is added to the code needs no other edit of these pages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import thinwire as tw
from thinwire.codecs import Codec
from thinwire.exchange import Exchange
from thinwire.kernels import reference
from thinwire.memory import Memory
from thinwire.recipe.presets import ABOUT, PRESETS
from thinwire.recipe.registry import ALIASES, STAGES
from thinwire.recipe.stage import Stage

sys.path.insert(0, str(Path(__file__).parent))
import special_values

ROOT = Path(__file__).parents[1]
CODECS_PAGE, RECIPES_PAGE, README = ROOT / "docs" / "codecs.md", ROOT / "docs" / "recipes.md", ROOT / "README.md"
SHAPE = (1000, 1000)
MILLION = math.prod(SHAPE)
RANKS = 4
_END = "<!-- end of table -->"
_BITS = range(1, 33)  # that are tried to find out which a codec takes

# The words that stand for a codec in the tables; of others, their `examples`, or the bare name.
_WORDS = {
    "qsgd": ("qsgd:4", "qsgd:4,block=128"),
    "abs_max": ("abs_max:4",),
    "min_max": ("min_max:4",),
    "global_qsgd": ("global_qsgd", "global_qsgd:norm=l2", "global_qsgd:dither=exponential"),
    "rotated": ("rotated:1", "rotated:2", "rotated:3", "rotated:4"),
    "top_k": ("top_k:0.01", "top_k:0.01|bf16", "top_k:0.01|abs_max:4"),
    "random_k": ("random_k:0.01", "random_k:0.01,scaled=false"),
    "low_rank": ("low_rank",),
}


def registered(kind: type[Stage]) -> Iterator[tuple[str, type[Stage]]]:
    """Name and class of the stages of one kind that thinwire itself registers, in the order of their files."""
    for name, stage in STAGES.items():
        if issubclass(stage, kind) and stage.__module__.startswith("thinwire."):
            yield name, stage


def words() -> Iterator[str]:
    """The words that stand for codecs in the tables."""
    for name, stage in registered(Codec):
        yield from _WORDS.get(name) or getattr(stage, "examples", ()) or (name,)


def codec_of(word: str) -> Codec:
    return tw.parse(f"{word}|local").codec


def sentence(stage: type[Stage]) -> str:
    """The first line of a class's docstring."""
    return (inspect.getdoc(stage) or "").splitlines()[0]


# -------------------------------------------------------------------------------------------------------- options


def _taken_bits(stage: type[Stage]) -> str:
    """The numbers of bits that a codec takes, found by trying."""
    taken = []
    for bits in _BITS:
        with contextlib.suppress(tw.OptionError):
            stage(**{"bits": bits})
            taken.append(bits)
    return f" {taken[0]}-{taken[-1]}" if taken else ""


def options(stage: type[Stage]) -> str:
    """The options of a word with their defaults."""
    found, kinds = [], typing.get_type_hints(stage)
    for field in dataclasses.fields(stage):
        if field.metadata.get("inner"):
            continue
        default = "" if field.default is dataclasses.MISSING else f"={field.default}"
        also = _taken_bits(stage) if field.name == "bits" else ""
        if typing.get_origin(kinds[field.name]) is typing.Literal:
            others = [word for word in typing.get_args(kinds[field.name]) if word != field.default]
            also = f" or {' or '.join(others)}"
        found.append(f"`{field.name}{default}`{also}")
    return ", ".join(found) or "none"


def papers(stage: type[Stage]) -> str:
    """Links to the papers that a docstring names."""
    found = re.findall(r"arXiv (\d{4}\.\d{5})", inspect.getdoc(stage) or "")
    return ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(found)) or "-"


# --------------------------------------------------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> str:
    """A Markdown table; the columns in `numbers` are aligned to the right."""
    rule = ["---:" if title in numbers else "---" for title in head]
    lines = [head, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" if line is not rule else f"|{'|'.join(line)}|" for line in lines)


def codec_list() -> str:
    rows = [[f"`{name}`", options(stage), papers(stage), sentence(stage)] for name, stage in registered(Codec)]
    return table(["codec", "options and defaults", "arXiv", "in one sentence"], rows)


def _bound(codec: Codec) -> str:
    """The bound of the squared error, in |x|^2: omega, or 1 - delta."""
    if codec.unbiased:
        found = codec.omega(MILLION)
        return "-" if found is None else f"{found:.3g}"
    delta = codec.delta(MILLION, shape=SHAPE if codec.needs_shape else None)
    return "-" if delta is None else f"{1 - delta:.3g}"


def sizes() -> str:
    rows = []
    for word in words():
        codec = codec_of(word)
        size = codec.message_bytes(MILLION, shape=SHAPE)
        bias = "unbiased" if codec.unbiased else "biased"
        added = "-" if codec.sum_dtype is None else f"`{str(codec.sum_dtype).removeprefix('torch.')}`"
        rows.append([f"`{word}`", f"{size:,}", f"{8 * size / MILLION:.3g}", bias, _bound(codec), added])
    head = ["codec", "bytes", "bits an element", "bias", "error", "added as"]
    return table(head, rows, numbers=["bytes", "bits an element", "error"])


def specials() -> str:
    rows = [[f"`{word}`", *special_values.row(codec_of(word))] for word in words() if "|" not in word]
    return table(["codec", "zeros", "a constant", "one element", "denormals", "inf or NaN spoils"], rows)


def memories() -> str:
    rows = []
    for name, stage in registered(Memory):
        aliases = [alias for alias, long in ALIASES.items() if long == name]
        rows.append([", ".join(f"`{word}`" for word in (name, *aliases)), options(stage), sentence(stage)])
    return table(["memory", "options and defaults", "in one sentence"], rows)


def _accepted(exchange: Exchange) -> str:
    """The codecs that an exchange accepts, or those that it does not, whichever are fewer."""
    of = {name: any(exchange.accepts(codec_of(word)) is None for word in _all_words(name)) for name in _codec_names()}
    yes, no = ([f"`{name}`" for name, fits in of.items() if fits is wanted] for wanted in (True, False))
    if not no:
        return "every codec"
    return f"all but {', '.join(no)}" if len(no) < len(yes) else ", ".join(yes)


def _codec_names() -> list[str]:
    return [name for name, _ in registered(Codec)]


def _all_words(name: str) -> set[str]:
    return {word for word in words() if word.partition(":")[0] == name}


def exchanges() -> str:
    rows = []
    for name, stage in registered(Exchange):
        plain = stage()
        assert isinstance(plain, Exchange)
        rows.append([f"`{name}`", options(stage), _accepted(plain), sentence(stage)])
    return table(["exchange", "options and defaults", "accepts", "in one sentence"], rows)


def presets() -> str:
    rows = []
    for name, text in PRESETS.items():
        recipe = tw.parse(text)
        size = recipe.exchange.sent_bytes(recipe.codec, MILLION, world_size=RANKS, shapes=[SHAPE])
        rows.append([f"`{name}`", f"`{text}`", f"{size:,}", ABOUT[name]])
    return table(["preset", "recipe", "bytes", "in one sentence"], rows, numbers=["bytes"])


# ---------------------------------------------------------------------------------------------------------- pages


def kernel_names() -> set[str]:
    """The loops that kernels/reference.py defines."""
    found = inspect.getmembers(reference, inspect.isfunction)
    return {name for name, loop in found if not name.startswith("_") and loop.__module__ == reference.__name__}


def between(page: str, name: str, text: str) -> str:
    """The page with another table between its markers."""
    before, found, rest = page.partition(f"<!-- table: {name} -->")
    _, ended, after = rest.partition(_END)
    assert found, f"the page has no marker for {name}"
    assert ended, f"the table {name} does not end"
    return f"{before}{found}\n\n{text}\n\n{ended}{after}"


def codecs_page(page: str) -> str:
    for name, text in (("codecs", codec_list()), ("sizes", sizes()), ("special values", specials())):
        page = between(page, name, text)
    return page


def recipes_page(page: str) -> str:
    for name, text in (("memories", memories()), ("exchanges", exchanges()), ("presets", presets())):
        page = between(page, name, text)
    return re.sub(r"All \d+ are in", f"All {len(_codec_names())} are in", page)


def readme(page: str) -> str:
    """The counts in the table of contents."""
    numbers = {
        r"(\| codecs \| )\d+": len(_codec_names()),
        r"(\| exchanges \| )\d+": len(list(registered(Exchange))),
        r"(; )\d+(?= presets;)": len(PRESETS),
        r"(\| kernels \| )\d+": len(kernel_names()),
    }
    for pattern, number in numbers.items():
        page, replaced = re.subn(pattern, rf"\g<1>{number}", page)
        assert replaced == 1, f"README.md has no place for {pattern}"
    return page


PAGES = {CODECS_PAGE: codecs_page, RECIPES_PAGE: recipes_page, README: readme}


def main() -> int:
    stale = []
    for path, written in PAGES.items():
        old = path.read_text()
        new = written(old)
        if new != old:
            stale.append(path.name)
            if "--check" not in sys.argv[1:]:
                path.write_text(new)
    if stale and "--check" in sys.argv[1:]:
        sys.stderr.write(f"out of date: {', '.join(stale)}: run python docs/make_codecs.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
