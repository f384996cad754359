"""One gloo connection between two ranks: a thread that sends, a thread that receives."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .transport import PeerGoneError, seconds_until

_FOREVER = timedelta(days=30)
_SIZE = torch.int64
_LEAVING = -1  # sent in place of a size
_POSTED = 4  # message sizes for which a receive is posted in advance
_NO_TAG = (1 << 30) + 1  # no message has it
_AT_ONCE = timedelta(milliseconds=1)
_END_SECONDS = 1.0  # for a thread to notice that its wait was ended
_WAITING = 16  # messages of the largest size that may wait to be read; then the sender has to wait


class Connection:
    """Sends and receives messages over a gloo group of two ranks, the other of which has number `other` in it.

    The size of a message travels before it; a size of -1 says that the sender leaves. The tag of a message depends on
    its size. So the receive for another message of the last size can be posted before that message is announced, which
    saves the round trip in which gloo asks for a buffer.

    `most_bytes`: no honest message is larger. A larger size ends the connection before anything is allocated, and
    received messages that nobody reads take a bounded amount of memory.
    """

    def __init__(
        self,
        group: Any,
        other: int,
        peer: int,
        delay: Callable[[int], float] | None,
        *,
        most_bytes: int | None = None,
    ) -> None:
        self._group, self._other, self._peer, self._delay = group, other, peer, delay
        self._most_bytes = most_bytes
        self._room = threading.Condition()
        self._held = 0  # bytes of messages that wait to be read
        self._leaving = False
        self._outgoing: queue.Queue[Tensor | None] = queue.Queue()
        self._incoming: queue.Queue[Tensor | PeerGoneError] = queue.Queue()
        self._gone: PeerGoneError | None = None
        names = (f"thinwire-to-{peer}", f"thinwire-from-{peer}")
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in zip((self._send_loop, self._receive_loop), names, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Tensor) -> None:
        self._outgoing.put(message.cpu())

    def receive(self, until: float) -> Tensor | None:
        if self._gone is not None:
            raise self._gone
        try:
            found = self._incoming.get(timeout=seconds_until(until))
        except queue.Empty:
            return None
        if isinstance(found, PeerGoneError):
            self._gone = found
            raise found
        with self._room:
            self._held -= found.numel()
            self._room.notify()
        return found

    def leave(self) -> None:
        """Tell the peer, after all messages that are queued. What still arrives is dropped."""
        with self._room:
            self._leaving = True
            self._room.notify()
        self._outgoing.put(None)

    def join(self, until: float) -> None:
        """Wait for both threads to end, and end them then: a peer that is stopped never answers."""
        for thread in self._threads:
            thread.join(seconds_until(until))
        if self.open:
            # A receive that times out makes gloo end every other wait of the group. Nothing else can end one.
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.zeros(1, dtype=_SIZE)], self._other, _NO_TAG).wait(_AT_ONCE)
            for thread in self._threads:
                thread.join(_END_SECONDS)

    @property
    def open(self) -> bool:
        """Whether a thread still serves it."""
        return any(thread.is_alive() for thread in self._threads)

    def _send_loop(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                if self._delay is not None:
                    time.sleep(max(0.0, self._delay(message.numel())))
                size = self._group.send([torch.tensor([message.numel()], dtype=_SIZE)], self._other, 0)
                body = self._group.send([message], self._other, _tag(message.numel()))
                self._wait(size)
                self._wait(body)
            self._wait(self._group.send([torch.tensor([_LEAVING], dtype=_SIZE)], self._other, 0))
        except RuntimeError as problem:
            self._fail(problem)

    def _receive_loop(self) -> None:
        announced, before = torch.zeros(1, dtype=_SIZE), -1
        posted: dict[int, tuple[Any, Tensor]] = {}  # gloo transfers nothing before the receiver has a buffer
        try:
            while True:
                self._wait(self._group.recv([announced], self._other, 0))
                size = int(announced)
                if size == _LEAVING:
                    # Answer at once. Otherwise the rank that leaves first still has a thread inside gloo when its
                    # interpreter ends, and that aborts the process.
                    self.leave()
                    raise RuntimeError("it has left")
                if size < 0 or (self._most_bytes is not None and size > self._most_bytes):
                    raise RuntimeError(f"it announced a message of {size} bytes, not at most {self._most_bytes}")
                work, message = posted.pop(size) if size in posted else self._post_receive(size)
                self._wait(work)
                if size == before and len(posted) < _POSTED:
                    posted[size] = self._post_receive(size)
                before = size
                self._keep(message)
        except RuntimeError as problem:
            self._fail(problem)

    def _keep(self, message: Tensor) -> None:
        """Queue a message for the reader. Until there is room the peer cannot send another one."""
        with self._room:
            if self._most_bytes is not None:
                most = _WAITING * self._most_bytes
                self._room.wait_for(lambda: self._leaving or self._held + message.numel() <= most)
            if self._leaving:
                return
            self._held += message.numel()
        self._incoming.put(message)

    def _post_receive(self, size: int) -> tuple[Any, Tensor]:
        buffer = torch.empty(size, dtype=torch.uint8)
        return self._group.recv([buffer], self._other, _tag(size)), buffer

    def _fail(self, problem: RuntimeError) -> None:
        self._incoming.put(PeerGoneError(f"rank {self._peer} is gone: {' '.join(str(problem).split())}"))

    @staticmethod
    def _wait(work: Any) -> None:
        work.wait(_FOREVER)


def gloo_device() -> Any:
    """The network interface of GLOO_SOCKET_IFNAME, or gloo's default."""
    gloo: Any = dist.ProcessGroupGloo
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


def _tag(size: int) -> int:
    return 1 + size % (1 << 30)  # 0 is the tag of sizes
