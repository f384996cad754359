"""The `thinwire` command in the process of the test: a process of its own takes seconds to import torch."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from unittest import mock

from thinwire.cli.main import main


def thinwire_here(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What `thinwire` with these arguments prints, and its exit code."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(contextlib.chdir(cwd or Path.cwd()))
        stack.enter_context(mock.patch.object(sys, "argv", ["thinwire", *arguments]))
        stack.enter_context(mock.patch.dict("os.environ", {"COLUMNS": "120"}))
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())
