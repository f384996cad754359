"""The scripts under benchmarks/ are no installed package; the browser is that of the report's tests."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
for _folder in (_ROOT / "benchmarks", _ROOT / "tests" / "bench"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))
