"""Serve the store of `peers_at` in a process that does not train: python -m thinwire.comm.peers.serve PORT."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Sequence

from torch._C._distributed_c10d import TCPStore


def serve(port: int) -> TCPStore:
    """A store that listens on all interfaces of this machine until the returned object is deleted.

    >>> store = serve(0)
    >>> store.port > 0
    True
    """
    return TCPStore("localhost", port, None, is_master=True, wait_for_workers=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m thinwire.comm.peers.serve", description=__doc__)
    parser.add_argument("port", type=int)
    given = parser.parse_args(arguments)
    stopped = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stopped.set())
    store = serve(given.port)
    stopped.wait()
    del store


if __name__ == "__main__":
    main()
