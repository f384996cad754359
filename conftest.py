"""For every test: Triton kernels run in Triton's interpreter, and what shares fixtures runs in one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before triton is imported, which is when it chooses. On a machine with a GPU, TRITON_INTERPRET=0 runs them on it.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`: a file is a group, and all of tests/multi is one, because starting ranks takes long.

    That group is the longest and comes first, so that the others can run beside it.
    """
    for item in items:
        together = item.path.parent if item.path.parent.name == "multi" else item.path
        item.add_marker(pytest.mark.xdist_group(str(together.relative_to(Path(__file__).parent))))
    items.sort(key=lambda item: item.path.parent.name != "multi")
