"""Where processes find each other: a store at an address, served by torchrun, a file, a command or rank 0."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from ...errors import OptionError
from .gloo import GlooTransport

_PROBE_SECONDS = 1.0


def peers_at(address: str, *, rank: int, world_size: int, seconds: float = 300.0, run: str = "run") -> GlooTransport:
    """A transport between processes that find each other at `address`, without a process group.

    Any process may die and start again, as long as the store at the address lives. Only connecting needs the store.

    - `file:///shared/run7`: a file that all ranks see. Give every run a new file.
    - `tcp://host:port`: a store that `python -m thinwire.comm.peers.serve PORT` serves on that host. If nothing listens
      there, rank 0 serves it, and the loss of rank 0 is final: a restarted rank 0 is refused.
    - `env://`: the store of torchrun (MASTER_ADDR and MASTER_PORT), which outlives the processes that it starts.

    `run` names the run in the store. Give another name when all ranks start again with the store of an earlier run.

    >>> transport = peers_at("tcp://127.0.0.1:0", rank=0, world_size=1)
    >>> transport.incarnation
    1
    """
    if address.startswith("file://"):
        path = Path(address.removeprefix("file://"))
        if not path.is_absolute() or not path.parent.is_dir():
            raise OptionError(f"{address} is not a file in a directory that exists: write file:///shared/run7")
        return GlooTransport(FileStore(str(path), -1), rank, world_size, name=run)  # -1: the file stays
    wait = timedelta(seconds=seconds)
    if address == "env://":
        host, port = _of_environment()
        # torchrun starts all its processes again after a failure. Each attempt is a run of its own.
        run = f"{run}/attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        may_serve = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
    else:
        host, _, written = address.removeprefix("tcp://").rpartition(":")
        if not address.startswith("tcp://") or not host or not written.isdigit():
            raise OptionError(f"{address} is not an address: write tcp://10.0.0.1:29500, file:///shared/run7 or env://")
        port, may_serve = int(written), rank == 0
    serves = may_serve and not (port and _listens(host, port))
    try:
        store = TCPStore(host, port, world_size, is_master=serves, timeout=wait, wait_for_workers=False)
    except RuntimeError:
        if not serves:
            raise
        store = TCPStore(host, port, world_size, is_master=False, timeout=wait, wait_for_workers=False)

    def reopen() -> Store | None:
        if not _listens(host, port):
            return None
        return TCPStore(host, port, world_size, is_master=False, timeout=wait, wait_for_workers=False)

    return GlooTransport(store, rank, world_size, name=run, reopen=None if serves else reopen)


def _of_environment() -> tuple[str, int]:
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise OptionError("env:// needs MASTER_ADDR and MASTER_PORT: start the program with torchrun") from None


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_PROBE_SECONDS):
            return True
    except OSError:
        return False
