"""For every test: Triton kernels run in Triton's interpreter, and what shares fixtures runs in one process."""

from __future__ import annotations

import os
from typing import Any

import pytest

# Before triton is imported, which is when it chooses. On a machine with a GPU, TRITON_INTERPRET=0 runs them on it.
os.environ.setdefault("TRITON_INTERPRET", "1")

_TOGETHER = "tests/distributed"  # the folder whose tests share ranks, which take long to start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest group comes first, so that the others can run beside it."""
    items.sort(key=lambda item: not item.nodeid.startswith(_TOGETHER))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is a group, and all of `_TOGETHER` is one. Marks of xdist do not say so to pytest 9.2 any more."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return _TOGETHER if nodeid.startswith(_TOGETHER) else nodeid.partition("::")[0]

    return ByFile(config, log)
