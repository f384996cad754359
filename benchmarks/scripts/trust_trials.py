"""One trial of benchmarks.scripts.trust: three processes, what is done to one of them, and the outcome in one word."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from benchmarks.scripts.trust_ranks import GOSSIP, RANKS, SLOWER, TIMEOUT, WARM, train
from thinwire.recipe.presets import PRESETS

LATE = 5  # seconds after the timeout that a survivor may take
MORE = 20  # steps that a survivor of gossip trains on within that time
PAUSE = 0.02  # seconds of a step that stand for computing, so that a trial is under way when it is disturbed
LOST = ("kill", "long stop")  # kinds after which a rank is missing
STEPS = {"damage": 30, "short stop": 60, "slow": 40, "loss": 40}


def contenders(kind: str) -> list[str]:
    """What trials of this kind train with. Messages of gossip have checksums, and tests of their own for damage."""
    return [*PRESETS, "auto", *(() if kind == "damage" else GOSSIP)]


class Trial:
    """Three processes on the loopback, what is done to them, and what they told."""

    undamaged: ClassVar[dict[str, list[bytes]]] = {}  # the weights after an undisturbed run, by contender

    def __init__(self, kind: str, seed: int, contender: str, folder: str) -> None:
        self.kind, self.seed, self.contender = kind, seed, contender
        self.random = random.Random(f"{kind} {seed}")
        self.victim = self.random.randrange(RANKS)
        self.gossip = contender in GOSSIP and contender != "gossip:allreduce"  # survivors train on
        self.meet_at = f"file://{folder}/{kind.replace(' ', '-')}-{seed}"
        self.packets, self.packets_lost = 0, 0
        self.details = ""

    def run(self) -> str:
        """The outcome in one word; a word that begins with `bad` breaks a promise."""
        if self.kind == "damage" and self.contender not in self.undamaged:
            self.undamaged[self.contender] = self._end_without_damage()
        with self.started(self._plan()) as ranks:
            return self.judged(ranks)

    def _plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = {"victim": self.victim, "pause": 0.0, "slow": self.kind == "slow", "damage": None}
        plan["steps"] = STEPS.get(self.kind, 120 if self.gossip else 10**6)
        if self.kind == "damage":
            at, bit = self.random.random(), self.random.randrange(8)
            plan["damage"] = {"message": self.random.randrange(1, 40), "at": at, "bit": bit}
        if self.gossip or self.kind in ("short stop", "slow"):
            plan["pause"] = PAUSE
        return plan

    def _end_without_damage(self) -> list[bytes]:
        with self.started({**self._plan(), "damage": None}, "-reference") as ranks:
            for _, pipe in ranks:
                _heard(pipe, 120)
            told = [_heard(pipe, 60) or {"bits": []} for _, pipe in ranks]
        bits: list[bytes] = told[0]["bits"]
        return bits

    @contextlib.contextmanager
    def started(self, plan: dict[str, Any], mark: str = "") -> Iterator[list[tuple[int, Any]]]:
        """The processes, until the end of the block: the id of each and a pipe to it."""
        context = multiprocessing.get_context("forkserver")
        pipes = [context.Pipe() for _ in range(RANKS)]
        arguments = [(rank, self.meet_at + mark, self.contender, plan, pipes[rank][1]) for rank in range(RANKS)]
        processes = [context.Process(target=train, args=one, daemon=True) for one in arguments]
        for process in processes:
            process.start()
        try:
            yield [(process.pid or -1, mine) for process, (mine, _) in zip(processes, pipes, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.join(10)
            for end in (end for pipe in pipes for end in pipe):
                end.close()

    def judged(self, ranks: list[tuple[int, Any]]) -> str:
        """Disturb the ranks, hear what they tell, and put it into one word."""
        if not all(_heard(pipe, 120) == "ready" for _, pipe in ranks):
            return "bad: did not start"
        at = self._disturb(ranks[self.victim][0])
        survivors = [pipe for rank, (_, pipe) in enumerate(ranks) if rank != self.victim or self.kind not in LOST]
        seconds = TIMEOUT + LATE + (300 if self.kind == "loss" else 30)  # TCP has timeouts of its own
        told = [_heard(pipe, seconds) for pipe in survivors]
        if any(one is None for one in told):
            return "bad: a rank hangs"
        self.packets = sum(one["packets"] for one in told)
        self.details = "; ".join(sorted({one["wrong"] or one["raised"] for one in told} - {""}))
        if any(one["wrong"] for one in told):
            return "bad: raised what is no ThinwireError"
        if any(one["threads"] or one["threads_left"] for one in told):
            return "bad: threads are left"
        if any(one["sockets_left"] for one in told):
            return "bad: sockets are left"
        if self.kind not in LOST:
            return self._undisturbed(told)
        return self._trained_on(told, at) if self.gossip else self._raised(told)

    def _disturb(self, victim: int) -> float:
        """Do to a process what this kind does to it; the time at which that was done."""
        time.sleep(self.random.random() * 0.5)
        if self.kind in (*LOST, "short stop"):
            os.kill(victim, signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        at = time.monotonic()
        if self.kind == "short stop":
            time.sleep(TIMEOUT / 3)
            os.kill(victim, signal.SIGCONT)
        return at

    def _raised(self, told: list[dict[str, Any]]) -> str:
        if not all(one["raised"] for one in told):
            return "bad: nothing was raised"
        # A link remembers its error. The baseline of gossip has no memory: it fails anew, maybe in other words.
        if any(one["again"] != one["raised"] for one in told if self.contender not in GOSSIP or not one["again"]):
            return "bad: the next step raised something else"
        return "raised" if all(one["seconds"] < TIMEOUT + LATE for one in told) else "bad: late"

    def _trained_on(self, told: list[dict[str, Any]], at: float) -> str:
        if any(one["raised"] for one in told):
            return "bad: gossip raised"
        for one in told:
            after = [end for end in one["ends"][1:] if end > at]  # the first is when it began
            if len(after) < MORE or after[MORE - 1] > at + TIMEOUT + LATE:
                return "bad: late"
        return self._average(told, alive=RANKS - 1)

    def _average(self, told: list[dict[str, Any]], *, alive: int) -> str:
        if any(one["alive"] != alive for one in told):
            return "bad: wrong ranks are thought dead"
        if not all(one["finite"] for one in told):
            return "bad: a model is not finite"
        return "trained on" if all(one["bits"] == told[0]["bits"] for one in told) else "bad: averages differ"

    def _undisturbed(self, told: list[dict[str, Any]]) -> str:
        if all(one["raised"] for one in told):
            return "raised" if self.kind == "damage" else "bad: raised"
        if any(one["raised"] for one in told):
            return "bad: some ranks raised"
        if any(one["steps"] != WARM + STEPS[self.kind] for one in told):
            return "bad: steps are missing"
        if not self._was_done(told[self.victim]):
            return "bad: the trial disturbed nothing"
        if self.gossip:
            return self._average(told, alive=RANKS)
        if any(one["bits"] != told[0]["bits"] for one in told):
            return "bad: replicas differ"
        if self.kind != "damage" or self.contender == "auto":  # two runs of auto may decide differently
            return "replicas equal"
        self.details = f"{told[self.victim]['damaged'][0]} was damaged"
        return "no effect" if told[0]["bits"] == self.undamaged[self.contender] else "bad: all replicas took the damage"

    def _was_done(self, victim: dict[str, Any]) -> bool:
        """Whether the rank was stopped while it trained, was slower than the others, or has read a damaged message."""
        if self.kind == "damage":
            return bool(victim["damaged"])
        ends: list[float] = victim["ends"]
        steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
        if self.kind == "short stop":
            return max(steps) > 0.9 * TIMEOUT / 3
        return self.kind != "slow" or min(steps) > (SLOWER - 1) * float(victim["usual"])


def _heard(pipe: Any, seconds: float) -> Any:
    """The next message of a rank; None if it hangs or has ended."""
    try:
        return pipe.recv() if pipe.poll(seconds) else None
    except EOFError:
        return None
