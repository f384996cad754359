"""For every test: Triton kernels run in Triton's interpreter, and what shares fixtures runs in one process."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

# Before triton is imported, which is when it chooses. On a machine with a GPU, TRITON_INTERPRET=0 runs them on it.
os.environ.setdefault("TRITON_INTERPRET", "1")

_TOGETHER = "tests/distributed"  # the folder whose tests share ranks, which take long to start
_SECOND = f"{_TOGETHER}/test_d"  # two halves of equal length, by file name: one group would end last, alone
_ROOT = Path(__file__).parent


@functools.cache
def _group(file: str) -> str:
    """A file is a group, and all files of `_TOGETHER` whose tests share pools of ranks are two."""
    shares = file.startswith(_TOGETHER) and "pools" in (_ROOT / file).read_text()
    return f"{_TOGETHER} {file >= _SECOND}" if shares else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups come first, so that the others can run beside them."""
    items.sort(key=lambda item: not item.nodeid.startswith(_TOGETHER))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups run in one process each. Marks of xdist do not say so to pytest 9.2 any more."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid.partition("::")[0])

    return ByFile(config, log)
