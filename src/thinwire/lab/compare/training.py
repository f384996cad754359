"""One contender in training: its model, its optimizer, and a clock that runs only while it trains."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...attach import Link
from ...comm.communicator import Communicator
from ...comm.network import Op
from ...comm.peers import LocalTransport, PeerTransport
from .contenders import Contender
from .workloads import Workload


class TrainingRun:
    """Trains some steps at a time. Its clock stops during evaluation and while other contenders train."""

    def __init__(
        self,
        contender: Contender,
        workload: Workload,
        *,
        seed: int,
        group: Any,
        sent_bytes: Callable[[], int] = lambda: 0,
        bucket_mb: float = 25.0,
        transport: Callable[[], PeerTransport] = lambda: LocalTransport.of(1)[0],
    ) -> None:
        self.contender, self.workload, self.seed = contender, workload, seed
        self._ranks, self._sent_bytes = Communicator(group), sent_bytes
        self._rank, self._world_size = self._ranks.rank, self._ranks.world_size
        self.net = workload.model(seed=seed)
        self.model: nn.Module = self.net
        self.link: Link | None = None
        self._gossip: Any = None
        if contender.gossip is None:
            self.model, self.link = contender.wrap(self.net, group, seed=seed, bucket_mb=bucket_mb)
        self._optimizer = workload.optimizer(self.model)
        if contender.gossip is not None:
            self._gossip = self._optimizer = contender.gossip.join(
                self.net, self._optimizer, transport=transport(), network=self._ranks, seed=seed
            )
        self._rates = [entry["lr"] for entry in self._optimizer.param_groups]
        self.step, self.seconds, self.bytes = 0, 0.0, 0.0
        self._began: list[float] = []  # start of each step, on this clock

    def train(self, steps: int) -> tuple[float, list[float]]:
        """The mean loss of this rank, and how long each step took."""
        losses, taken = [], []
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(self._train_one())
            taken.append(time.perf_counter() - begin)
        return sum(losses) / len(losses), taken

    def _train_one(self) -> float:
        work = self.workload
        for entry, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            entry["lr"] = rate * work.rate(self.step)
        inputs, targets = work.batch(self.step, seed=self.seed, rank=self._rank, world_size=self._world_size)
        self._optimizer.zero_grad()
        loss = self.model(inputs, targets)
        loss.backward()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), work.clip)
        self._optimizer.step()
        self.step += 1
        return float(loss.detach())

    def lap(self, steps: int) -> dict[str, Any]:
        """Train some steps with the other ranks, then look at held-out data. All ranks get the same result."""
        self._meet()
        sent, begin, cpu = self._sent_bytes(), time.perf_counter(), time.process_time()
        loss, taken = self.train(steps)
        if self._gossip is not None:
            self._gossip.finish()  # messages under way belong to the steps that sent them
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        [seconds] = self._over_ranks([seconds], "max")
        self._meet()  # a rank that has sent its own messages may still forward those of others
        sent_bytes = float(self._sent_bytes() - sent)
        looked = self._look()
        means = [loss, sent_bytes, cpu, *(value for value in looked.values() if value is not None)]
        loss, sent_bytes, cpu, *seen = (value / self._world_size for value in self._over_ranks(means, "sum"))
        looked.update(zip([key for key, value in looked.items() if value is not None], seen, strict=True))
        held_out = looked.pop("held_out")
        self._began += [self.seconds + before for before in itertools.accumulate(taken[:-1], initial=0.0)]
        self.seconds += seconds
        self.bytes += sent_bytes
        return {
            "step": self.step,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "loss": loss,
            "held_out": held_out,
            "lap_seconds": seconds,
            "lap_bytes": sent_bytes,
            "lap_cpu_seconds": cpu,
            "step_seconds": taken,
            **looked,
        }

    def _look(self) -> dict[str, float | None]:
        """Loss on this rank's share of the held-out data; decentralised ranks use their averaged model."""
        if self._gossip is None:
            held_out, accuracy = self._held_out()
            return {"held_out": held_out, "accuracy": accuracy}
        local_loss, _ = self._held_out()
        with self._gossip.averaged():
            averaged_loss, accuracy = self._held_out()
        return {
            "held_out": averaged_loss,
            "accuracy": accuracy,
            "averaged_loss": averaged_loss,
            "local_loss": local_loss,
            "consensus_distance": self._gossip.consensus_distance(),
        }

    def _held_out(self) -> tuple[float, float | None]:
        """Mean loss, and the accuracy if the workload has one."""
        self.net.eval()
        losses, right, total = [], 0, 0
        with torch.no_grad():
            some, all_ = self.workload.held_out_batches, self.workload.accuracy_batches
            shares = self.workload.held_out(rank=self._rank, world_size=self._world_size, batches=all_)
            for number, batch in enumerate(shares):
                if number < some:
                    losses.append(float(self.net(*batch)))
                right += (found := self.workload.correct(self.net, batch)) or 0
                total += 0 if found is None else len(batch[1])
        self.net.train()
        return sum(losses) / len(losses), right / total if total else None

    def _over_ranks(self, values: list[float], op: Op) -> list[float]:
        result: list[float] = self._ranks.all_reduce(torch.tensor(values, dtype=torch.float64), op=op).tolist()
        return result

    def _meet(self) -> None:
        self._over_ranks([0.0], "sum")

    def breakdown(self) -> dict[str, float | None]:
        """Milliseconds a step of encoding, exchange, decoding, their processor time and exposed communication.

        None where they are not measured.
        """
        names = ("encode", "exchange", "decode", "cpu", "exposed")
        if self.link is None:
            return {f"{name}_ms": None for name in names}
        stats = self.link.stats()
        return {f"{name}_ms": 1e3 * stats[f"comm/{name}_seconds"] for name in names}

    def decisions(self) -> dict[str, Any]:
        """The decisions of `auto` so far and its last Pareto front; nothing for other contenders."""
        if self.link is None or not self.link.chooses:
            return {}
        told = [
            {
                "step": event.step,
                "seconds": self._began[min(event.step, len(self._began) - 1)],
                "recipe": event.recipe,
                "text": event.text,
                "predicted_ms": 1e3 * event.predicted_seconds,
                "mbit": event.mbit,
            }
            for event in self.link.events()
        ]
        front = [
            {"recipe": one.name, "predicted_ms": 1e3 * one.seconds, "progress_per_step": one.progress_per_step}
            for one in self.link.front()
        ]
        share = self.link.stats().get("auto/deciding_seconds", 0.0) / max(self.seconds, 1e-9)
        return {"decisions": told, "front": front, "deciding_share": share}

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        if self._gossip is not None:
            self._gossip.close()
