"""One browser for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.browser import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()
