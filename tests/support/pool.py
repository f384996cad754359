"""Real processes with real gloo groups, for the tests: started once, used by many.

A worker imports torch once and then waits on a pipe. For each job it loads the test function, reports that it has,
waits until every rank has, joins a new process group and calls it. A group for each job costs 50 ms and leaves nothing
of an earlier test behind; starting together keeps a slow import out of gloo's timeouts and out of the deadline.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT = 30.0  # of a gloo group
DEADLINE = 120.0  # of a job, counted from when every rank has loaded it
START = 180.0  # to import torch and the test module, on a machine that is busy with other things
GRACE = 2.0  # for the other ranks, when the result of the job is already known
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

# ("returned", value), ("raised", type name, message, traceback), ("died", exit code) or, where the deadline passed,
# ("hung", stacks). A worker also says ("loaded",) and ("unloadable", traceback), which are not outcomes.
Outcome = tuple[Any, ...]
Outcomes = dict[int, Outcome]


class Pool:
    """`world_size` processes that run one job after another; after a failure, new ones take their place."""

    def __init__(self, world_size: int, *, timeout: float = TIMEOUT) -> None:
        self.world_size, self.timeout = world_size, timeout
        self._world: _World | None = _World(world_size, timeout)

    def run(self, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE, **kwargs: Any) -> list[Any]:
        """`function(rank, world_size, *args, **kwargs)` on every rank; what it returns, by rank.

        If a rank fails, the others get a few seconds more (they may wait for it in vain) and an AssertionError carries
        every traceback. The processes are then replaced: half a collective would poison the next test.
        """
        __tracebackhide__ = True
        job = _pack(function, args, kwargs)
        world, self._world = self._world or _World(self.world_size, self.timeout), None
        try:
            outcomes = world.call(job, deadline=deadline, settled=_any_failed)
            if not _any_failed(outcomes):
                self._world = world
                return [outcomes[rank][1] for rank in range(self.world_size)]
            raise AssertionError(world.report(outcomes, deadline))
        finally:
            if self._world is None:
                world.kill()

    def close(self) -> None:
        if self._world is not None:
            self._world.kill()
            self._world = None


def run_fresh(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    deadline: float = DEADLINE,
    expect_death: Collection[int] = (),
    **kwargs: Any,
) -> list[Outcome]:
    """The outcome of every rank, from new processes that are gone afterwards: for tests that kill or hang a rank.

    A failing rank does not end the others, since what they do about it is what such a test looks at. They see that a
    rank died, as its connections close; one that raised or returned keeps them open until all are done. Ranks in
    `expect_death` are not waited for: soon after all others are done they are killed, and count as died, not as hung.
    """
    job = _pack(function, args, kwargs)
    others = set(range(world_size)) - set(expect_death)
    world = _World(world_size, timeout)
    try:
        outcomes = world.call(job, deadline=deadline, settled=lambda known: others <= known.keys())
    finally:
        world.kill()
    for rank in expect_death:
        if outcomes[rank][0] == "hung":
            outcomes[rank] = ("died", -signal.SIGKILL)
    return [outcomes[rank] for rank in range(world_size)]


class _World:
    """One set of processes, from their start to their end."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="thinwire-pool-")
        self.workers = [_Worker(rank, world_size, timeout, self.folder.name) for rank in range(world_size)]

    def call(self, job: bytes, *, deadline: float, settled: Callable[[Outcomes], bool]) -> Outcomes:
        """What became of the job on every rank; raises only if a rank could not even load it.

        Once `settled` holds, the ranks that are still busy have `GRACE` seconds left.
        """
        for worker in self.workers:
            worker.send(job)
        loaded = self._gather(START, settled=lambda known: any(answer != ("loaded",) for answer in known.values()))
        failed = {rank: answer for rank, answer in loaded.items() if answer != ("loaded",)}
        if failed:
            raise AssertionError(self.report(failed, START))
        for worker in self.workers:
            worker.send(b"go")
        return self._gather(deadline, settled=settled)

    def _gather(self, seconds: float, *, settled: Callable[[Outcomes], bool]) -> Outcomes:
        """One answer of every rank; a rank that has none in time gives its stacks."""
        answers: Outcomes = {}
        pending = {worker.pipe: worker for worker in self.workers}
        end = time.monotonic() + seconds
        while pending and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(pending), left):
                assert isinstance(pipe, Connection)
                worker = pending.pop(pipe)
                answers[worker.rank] = worker.receive()
            if settled(answers):
                end = min(end, time.monotonic() + GRACE)
        for worker in pending.values():
            worker.process.send_signal(signal.SIGUSR1)
        return answers | {worker.rank: ("hung", worker.stacks()) for worker in pending.values()}

    def report(self, outcomes: Outcomes, seconds: float) -> str:
        """Every failure; those who hang come last, since they often wait for one who failed."""
        others_failed = any(outcome[0] not in ("returned", "hung") for outcome in outcomes.values())
        limit = f"{GRACE:g} s after another rank failed" if others_failed else f"after {seconds:g} s"
        failures = []
        for rank, outcome in sorted(outcomes.items(), key=lambda item: (item[1][0] == "hung", item[0])):
            match outcome:
                case ("returned", _):
                    continue
                case ("unloadable", trace):
                    what = f"could not load the job:\n{trace}"
                case ("raised", _, _, trace):
                    what = f"raised:\n{trace}"
                case ("died", code):
                    what = f"died with exit code {code}:\n{self.workers[rank].stacks(wait_for=0.0)}"
                case ("hung", stacks):
                    what = f"had not finished {limit}; it was here:\n{stacks}"
            failures.append(f"rank {rank} of {len(self.workers)} {what}")
        return "\n\n".join(failures)

    def kill(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
            worker.pipe.close()
        self.folder.cleanup()


class _Worker:
    """The parent's end of one process."""

    def __init__(self, rank: int, world_size: int, timeout: float, folder: str) -> None:
        self.rank = rank
        self.pipe, theirs = Pipe()
        self._stacks = _stack_file(folder, rank)
        options = json.dumps([sys.path, [theirs.fileno(), rank, world_size, timeout, folder]])
        # Not multiprocessing: it can neither set the environment of a child nor leave pytest's main module alone.
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", BOOT, options],
            env=os.environ | ENVIRONMENT,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for pytest, whose end is theirs too
        )
        theirs.close()

    def send(self, message: bytes) -> None:
        with suppress(OSError):  # it died, as `receive` will find
            self.pipe.send_bytes(message)

    def receive(self) -> Outcome:
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            return ("died", self.process.wait())
        answer: Outcome = pickle.loads(message)
        return answer

    def stacks(self, *, wait_for: float = 2.0) -> str:
        """What faulthandler wrote, on our signal or on a fatal one; a stopped process writes nothing."""
        end = time.monotonic() + wait_for
        text, before = self._read_stacks(), ""
        while time.monotonic() < end and (not text or text != before):
            time.sleep(0.05)
            text, before = self._read_stacks(), text
        return text or "(no stack)"

    def _read_stacks(self) -> str:
        return self._stacks.read_text() if self._stacks.exists() else ""


def _any_failed(outcomes: Outcomes) -> bool:
    return any(outcome[0] != "returned" for outcome in outcomes.values())


def _pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Plain pickle, in which tensors are bytes; the one of multiprocessing would send them as shared memory.

    The path goes with it, and outside, because it finds the module of the function: pytest adds to it as it collects.
    """
    return pickle.dumps((sys.path, pickle.dumps((function, args, kwargs))))


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stacks.{rank}")


# From here on, the worker's side.

BOOT = """
import json, sys
sys.path[:], options = json.loads(sys.argv.pop())
from support.pool import serve
serve(*options)
"""


def serve(fd: int, rank: int, world_size: int, timeout: float, folder: str) -> None:
    """Jobs, until the parent closes the pipe or is gone."""
    stacks = _stack_file(folder, rank).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks)  # before torch, whose import may be what hangs
    os.set_inheritable(fd, False)
    pipe = Connection(fd)
    mail: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(pipe, mail), daemon=True).start()

    import torch

    torch.set_num_threads(1)
    count = 0
    while True:
        answer = _load(mail.get())
        if not callable(answer):
            pipe.send_bytes(pickle.dumps(answer))
            continue
        pipe.send_bytes(pickle.dumps(("loaded",)))
        mail.get()
        pipe.send_bytes(_outcome(answer, rank, world_size, file=f"{folder}/store.{count}", timeout=timeout))
        del answer
        count += 1


def _read(pipe: Connection, mail: queue.SimpleQueue[bytes]) -> None:
    """In a thread, so that a worker also ends when its parent dies in the middle of a job."""
    with suppress(EOFError, OSError):
        while True:
            mail.put(pipe.recv_bytes())
    os._exit(0)


def _load(job: bytes) -> Callable[[int, int], Any] | Outcome:
    """The call to make, once the groups and models of the job before are gone (all ranks are done with it by now)."""
    import torch.distributed as dist

    try:
        gc.collect()  # first, since a model may still use its group when it is deleted
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.path[:], call = pickle.loads(job)
        function, args, kwargs = pickle.loads(call)
        gc.freeze()  # what modules hold stays anyway; looking through all of torch takes longer than most jobs
        return lambda rank, world_size: function(rank, world_size, *args, **kwargs)
    except BaseException:
        return ("unloadable", traceback.format_exc())


def _outcome(call: Callable[[int, int], Any], rank: int, world_size: int, *, file: str, timeout: float) -> bytes:
    """Pickled here, because a value that cannot be pickled is a failure of the job."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    try:
        limit = timedelta(seconds=timeout)
        store = FileStore(file, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        # A rank that dies at once must not do so while others still connect. A file tells them, as no socket could.
        store.set(f"joined/{rank}", "")
        store.wait([f"joined/{other}" for other in range(world_size)], limit)
        torch.manual_seed(0)
        return pickle.dumps(("returned", call(rank, world_size)))
    except BaseException as error:
        return pickle.dumps(("raised", type(error).__name__, str(error), traceback.format_exc()))
