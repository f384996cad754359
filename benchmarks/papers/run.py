"""How a page is measured and built: the options of a run, its JSON file, and its parts in order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.scripts import results
from benchmarks.scripts.results import ROOT
from thinwire.lab.compare.machine import describe_machine

from .page import Page

DOCS = ROOT / "docs" / "reproductions"
NAMES = ("top-k", "global-qsgd", "flexible", "decentralized")
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts it


@dataclass(frozen=True)
class Options:
    """What a measurement is asked for; `quick` takes sizes for tests, whose numbers mean nothing."""

    seeds: int = 3
    quick: bool = False
    data: str | None = None
    first_seed: int = 0

    @property
    def all_seeds(self) -> list[int]:
        return list(range(self.first_seed, self.first_seed + self.seeds))


class MixedError(ValueError):
    """A file that holds parts of another run than the one that should be added to it."""


def module(name: str) -> Any:
    """The module of a page: PARTS, measure and page."""
    return import_module(f"{__package__}.{name.replace('-', '_')}")


def default_data() -> str | None:
    return str(FASHION_MNIST) if FASHION_MNIST.is_dir() else None


def default_file(name: str) -> Path:
    return results.path_of_today(f"reproduce-{name}")


def newest(name: str) -> Path | None:
    return results.newest(f"reproduce-{name}")


def load(file: Path) -> dict[str, Any]:
    """What was measured, with the name of its file for the page to say."""
    return {**results.read(file), "file": file.name}


def missing(found: dict[str, Any]) -> list[str]:
    """The parts that a file lacks."""
    return [part for part in module(found["name"]).PARTS if part not in found["parts"]]


def measure(name: str, options: Options, *, out: Path, parts: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure all parts, or only some and keep the others that `out` holds; the file is written after every part."""
    page = module(name)
    unknown = set(parts or ()) - set(page.PARTS)
    if unknown:
        raise MixedError(f"{name} has no part {', '.join(sorted(unknown))}: choose from {', '.join(page.PARTS)}")
    run = {"kind": "reproduce", "name": name, "seeds": options.all_seeds, "quick": options.quick}
    found: dict[str, Any] = {**run, "machine": describe_machine(), "seconds": {}, "parts": {}}
    if parts and out.exists():
        found = results.read(out)
        kept = {key: found.get(key) for key in run}
        if kept != run:
            raise MixedError(f"{out.name} is of another run ({kept}, now {run}): give another --out, or all parts")
    for part in parts or page.PARTS:
        print(f"{name}: {part}", flush=True)
        begin = time.perf_counter()
        found["parts"][part] = page.measure(part, options)
        found["seconds"][part] = round(time.perf_counter() - begin, 1)
        found["date"] = datetime.now(UTC).date().isoformat()
        for key in ("parts", "seconds"):  # in the order of the page, whichever was measured first
            found[key] = {one: found[key][one] for one in page.PARTS if one in found[key]}
        results.write(out, found)
    return load(out)


def build(found: dict[str, Any]) -> Page:
    """The page of what was measured."""
    if lacking := missing(found):
        raise MixedError(f"{found['name']} lacks {', '.join(lacking)}: measure with --parts {','.join(lacking)}")
    page: Page = module(found["name"]).page(found)
    return page
