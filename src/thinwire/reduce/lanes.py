"""Ordered lanes: each is a thread with a process group of its own, and works on its jobs one after another.

Collectives must be started in the same order on all ranks. Callbacks that start the next one when the last has ended
run in the order of completion, which differs between ranks. In a lane the order is that of submission, which is the
same everywhere, and two lanes overlap the compression of one bucket with the sending of another.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm.communicator import Communicator

_FAREWELL = 5.0  # seconds to wait for a thread that should have nothing to do


class Lane:
    """A thread's own process group and the memory that its jobs may use while they run."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._scratch: dict[str, Tensor] = {}

    def scratch(self, purpose: str, numel: int, device: torch.device) -> Tensor:
        """Flat float32 that lasts until the next job of this lane asks for the same; new memory costs page faults."""
        key = f"{purpose} {device}"
        held = self._scratch.get(key)
        if held is None or held.numel() < numel:
            held = self._scratch[key] = torch.empty(numel, dtype=torch.float32, device=device)
        return held[:numel]


Job = Callable[[Lane], None]


class Conductor:
    """Runs jobs in lanes. After the first failure nothing more is started, and `wait` raises it.

    Jobs must not refer to the conductor's owner for longer than they run, or the owner is never freed.
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

    def __len__(self) -> int:
        return len(self._lanes)

    def submit(self, lane: int, job: Job) -> None:
        """Run a job in a lane, after those submitted to that lane before."""
        with self._changed:
            self._open += 1
        self._lanes[lane % len(self._lanes)].jobs.put(job)

    def wait(self) -> None:
        """Return when nothing is left to do; raise what went wrong first."""
        with self._changed:
            while self._open:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure

    def log_spans(self) -> None:
        """Keep begin and end of every collective from now on, for `take_spans`."""
        for lane in self._lanes:
            lane.communicator.spans = []

    def take_spans(self) -> list[tuple[float, float]]:
        return [span for lane in self._lanes for span in lane.communicator.take_spans()]

    def close(self) -> None:
        """End the threads and release the process groups. Afterwards nothing can be submitted."""
        for lane in self._lanes:
            lane.jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_FAREWELL)
        for lane in self._lanes:
            lane.communicator.close()
        self._threads.clear()

    def _work(self, lane: Lane) -> None:
        with torch.no_grad():  # a new thread has gradients enabled
            while (job := lane.jobs.get()) is not None:
                try:
                    if self._failure is None:
                        job(lane)
                except BaseException as failure:
                    with self._changed:
                        self._failure = self._failure or failure
                finally:
                    del job  # the thread waits for the next one and must not keep this one's tensors
                    with self._changed:
                        self._open -= 1
                        self._changed.notify_all()
