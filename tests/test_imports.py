"""Dependencies point one way, and importing thinwire stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire

SOURCE = Path(thinwire.__file__).parent

# A unit (a package or module directly under thinwire) may import units of earlier lines only.
# A unit that is not listed may import every other, and none of these may import it.
ORDER = [
    {"errors", "rng", "theory"},
    {"kernels", "comm"},
    {"codecs"},
    {"memory"},
    {"exchange"},
    {"recipe"},
    {"reduce"},
    {"predict"},
    {"auto"},
    {"gossip", "attach"},
]
SMALL_WORDS = {"recipe/stage.py", "recipe/presets.py"}  # what every stage and every layer may use
LEVEL = {unit: level for level, units in enumerate(ORDER) for unit in units}
HEAVY = ["numba", "triton", "scipy", "typer", "yaml", "tensorboard", "pandas", "matplotlib"]


def _runtime(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every node but those that only type checkers see."""
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _runtime(node.orelse)
        else:
            yield from ast.walk(node)


def _imported(path: Path) -> Iterator[str]:
    """The units that a file imports, by absolute or relative name."""
    package = ["thinwire", *path.relative_to(SOURCE).with_suffix("").parts[:-1]]
    for node in _runtime(ast.parse(path.read_text()).body):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            ours = parts[0] == "thinwire" and len(parts) > 1 and _is_unit(parts[1])
            if ours and "/".join(parts[1:3]) + ".py" not in SMALL_WORDS:
                yield parts[1]


def _is_unit(name: str) -> bool:
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists()


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_dependencies_point_one_way(path: Path) -> None:
    unit = path.relative_to(SOURCE).with_suffix("").parts[0]
    if unit not in LEVEL:
        return
    allowed = {other for other, level in LEVEL.items() if level < LEVEL[unit]} | {unit}
    assert set(_imported(path)) <= allowed


def test_the_import_graph_was_really_read() -> None:
    assert set(_imported(SOURCE / "recipe" / "compose.py")) >= {"codecs", "exchange", "memory"}
    assert set(_imported(SOURCE / "codecs" / "base.py")) >= {"kernels", "rng", "errors"}
    assert "recipe" not in set(_imported(SOURCE / "exchange" / "two_shot.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_comm_and_attach_know_torch_distributed(path: Path) -> None:
    unit = path.relative_to(SOURCE).with_suffix("").parts[0]
    # emulate has a backend for torch.distributed, and tells which ones there are; checkpoints are read by its DCP
    if path == SOURCE / "reduce" / "checkpoint.py":
        return
    if LEVEL.get(unit, LEVEL["attach"]) < LEVEL["attach"] and unit not in ("comm",):
        assert "torch.distributed" not in path.read_text()


def test_importing_thinwire_is_lean() -> None:
    """No heavy module, and less than 0.3 s of work beyond torch, however busy the machine is; the best of three."""
    script = (
        "import sys, time, torch; start = time.process_time(); import thinwire;"
        f"print(time.process_time() - start, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
        elapsed, _, loaded = done.stdout.strip().partition(" ")
        assert loaded == "[]"
        seconds.append(float(elapsed))
        if seconds[-1] < 0.3:
            break
    assert min(seconds) < 0.3


def test_public_names_are_there_and_few() -> None:
    assert all(hasattr(thinwire, name) for name in thinwire.__all__)
    assert len(set(thinwire.__all__)) == len(thinwire.__all__) <= 60


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert thinwire.__version__ == version("thinwire")
