"""Ordinary users, and machines that allow nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import lean

NOBODY = 65534

TRY = """
import json, os, subprocess
from thinwire.lab.emulate.hosts import emulated_hosts
from thinwire.lab.emulate.prove import Prober
found = []
for network in ("50mbit", "50mbit,3ms"):
    with emulated_hosts(2, network=network, prove=False) as hosts:
        worker = hosts.start(0, ["id", "-u"], stdout=subprocess.PIPE, text=True)
        worker.communicate()
        facts = {"method": hosts.method, "notice": hosts.notice, "code": worker.returncode}
        if hosts.method != "paced":
            with Prober(hosts) as prober:
                best = min((prober.delay(0, 1) for _ in range(5)), key=lambda found: found["low"])
                facts |= {"low": best["low"], "mbit": max(prober.rates(seconds=1.0, skip=0.4)) / 1e6}
        found.append(facts)
print(json.dumps([os.getuid(), found]))
"""


@pytest.fixture
def copied() -> Iterator[Path]:
    """The sources where everyone can read them."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        (folder / "thinwire").mkdir(mode=0o755)
        shutil.copy(lean.SOURCE / "errors.py", folder / "thinwire")
        for package in ("predict", "lab/emulate"):
            shutil.copytree(lean.SOURCE / package, folder / "thinwire" / package)
        yield folder / "thinwire"
    finally:
        shutil.rmtree(folder)


def python_for(**user: Any) -> str:
    """A Python that this user can run: that of the tests may lie in a closed home directory."""
    for candidate in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            subprocess.run(
                [candidate, "-I", "-c", "import sys; assert sys.version_info >= (3, 11)"], check=True, **user
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    pytest.skip("an ordinary user of this machine has no Python 3.11")


def test_an_ordinary_user(copied: Path) -> None:
    user: dict[str, Any] = {"cwd": "/", "stderr": subprocess.DEVNULL}
    if os.geteuid() == 0:
        user |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    command = lean.command(TRY, python=python_for(**user), source=copied)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True, **user)
    uid, (limited, delayed) = json.loads(done.stdout)
    assert uid != 0
    if limited["method"] == "paced":
        pytest.skip(f"ordinary users may not make networks here: {limited['notice']}")
    for found in (limited, delayed):
        assert found["code"] == 0
        assert found["method"] == "paced" or 10 < found["mbit"] < 55
    if delayed["method"] == "paced":
        pytest.skip(f"ordinary users have no delay here: {delayed['notice']}")
    assert 0.0025 < delayed["low"] < 0.030


def test_a_machine_that_allows_nothing(copied: Path) -> None:
    """In a user namespace of its own, a process may forbid itself all further network namespaces."""
    forbid = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    outer = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*outer, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let a process forbid itself namespaces")
    command = [*outer, *lean.command(TRY, source=copied)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    for found in json.loads(done.stdout)[1]:
        assert found["method"] == "paced"
        assert "not emulated but computed" in found["notice"]
        assert "no more namespaces are allowed" in found["notice"]
        assert found["code"] == 0
