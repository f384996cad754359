"""Lanes run the buckets of a CPU: each is a thread with its own process group, one bucket after another.

Collectives must be started in the same order on all ranks. Callbacks that start the next one when the last has ended
run in the order of completion, which differs between ranks. In a lane the order is that of submission, which is the
same everywhere, and two lanes overlap the compression of one bucket with the sending of another. Where no thread is
needed (a device with streams, ranks in one process), `Inline` runs a bucket when it is submitted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..comm.network import Network

_JOIN_SECONDS = 5.0  # to wait for all threads, which should have nothing to do


class Lane:
    """A network that one thread uses, and the memory that its jobs may use while they run."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.jobs: queue.SimpleQueue[tuple[Job, Ticket] | None] = queue.SimpleQueue()
        self._scratch: dict[str, Tensor] = {}

    def scratch(self, purpose: str, numel: int, device: torch.device) -> Tensor:
        """Flat float32 that lasts until the next job of this lane asks for the same; new memory costs page faults."""
        key = f"{purpose} {device}"
        held = self._scratch.get(key)
        if held is None or held.numel() < numel:
            held = self._scratch[key] = torch.empty(numel, dtype=torch.float32, device=device)
        return held[:numel]


class Ticket:
    """A job that was submitted: `wait` returns when it is done and raises what went wrong."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.failure: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.failure is not None:
            raise self.failure


Job = Callable[[Lane], None]


class Inline:
    """Runs every job when it is submitted, in the thread of the caller.

    >>> from thinwire.comm.local import LocalNetwork
    >>> runner, seen = Inline(LocalNetwork.alone()), []
    >>> runner.submit(0, lambda lane: seen.append(lane.network.rank)).wait()
    >>> seen
    [0]
    """

    def __init__(self, network: Network) -> None:
        self._lane = Lane(network)

    @property
    def networks(self) -> list[Network]:
        return [self._lane.network]

    def submit(self, index: int, job: Job) -> Ticket:
        ticket = Ticket()
        with torch.no_grad():
            job(self._lane)
        ticket.done.set()
        return ticket

    def wait(self) -> None:
        """Nothing is ever left to do."""

    def close(self) -> None:
        """Nothing was opened."""


class Lanes:
    """Runs jobs in lanes. After the first failure nothing more is started, and `wait` raises it.

    Jobs must not refer to the owner of the lanes for longer than they run, or the owner is never freed.
    """

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        self._lanes = [Lane(communicator) for communicator in communicators]
        self._changed = threading.Condition()
        self._open = 0
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"thinwire-lane-{index}", daemon=True)
            for index, lane in enumerate(self._lanes)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def networks(self) -> list[Network]:
        return [lane.network for lane in self._lanes]

    def submit(self, index: int, job: Job) -> Ticket:
        """Run a job in a lane, after those submitted to that lane before."""
        ticket = Ticket()
        with self._changed:
            self._open += 1
        self._lanes[index % len(self._lanes)].jobs.put((job, ticket))
        return ticket

    def wait(self) -> None:
        """Return when nothing is left to do; raise what went wrong first."""
        with self._changed:
            while self._open:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """End the threads and release the process groups. Afterwards nothing can be submitted."""
        for lane in self._lanes:
            lane.jobs.put(None)
        end = time.monotonic() + _JOIN_SECONDS
        for lane, thread in zip(self._lanes, self._threads, strict=False):
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
            if not thread.is_alive() and isinstance(lane.network, Communicator):
                lane.network.close()  # else it hangs in a collective, and closing would wait for its timeout
        self._threads.clear()

    def _work(self, lane: Lane) -> None:
        with torch.no_grad():  # a new thread has gradients enabled
            while (submitted := lane.jobs.get()) is not None:
                job, ticket = submitted
                try:
                    if self._failure is None:
                        job(lane)
                except BaseException as failure:
                    with self._changed:
                        self._failure = self._failure or failure
                finally:
                    ticket.failure = self._failure
                    ticket.done.set()
                    del job, ticket, submitted  # the thread waits for the next one and must not keep this one's tensors
                    with self._changed:
                        self._open -= 1
                        self._changed.notify_all()
