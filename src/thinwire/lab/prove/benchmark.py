"""The paired benchmark in its processes: plain DDP, torch's own hook and recipes train in turns, lap by lap."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import thinwire

from ..compare.models import Gpt
from .place import Place
from .settings import LAP, MODELS

PLAIN, SILENT = "ddp", "no-communication"
HALF_PRECISION = {"cuda": "torch-bf16", "cpu": "torch-fp16"}  # DDP takes the bf16 hook with NCCL only
_BATCHES = 4
_HEAD = 64  # channels


class Contender:
    """One model with its own hook; time passes for it only in its laps."""

    def __init__(self, name: str, model: str, place: Place) -> None:
        torch.manual_seed(0)
        self.name, self._place = name, place
        layers, width = MODELS[model]
        net = Gpt(layers=layers, width=width, heads=width // _HEAD).to(place.device)
        options: dict[str, Any] = {"device_ids": [place.device]} if place.device.type == "cuda" else {}
        self.model = DistributedDataParallel(net, **options)
        self.link: Any = None
        if name == "torch-bf16":
            self.model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif name == "torch-fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name not in (PLAIN, SILENT):
            self.link = thinwire.attach(self.model, name)
        self._optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self._autocast = torch.autocast(place.device.type, torch.bfloat16, enabled=computes_in_bf16(place.device))
        self._number = 0
        self.loss: Any = torch.zeros(())

    def train(self, steps: int, batches: list[tuple[Tensor, Tensor]]) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            with self.model.no_sync() if self.name == SILENT else contextlib.nullcontext():
                with self._autocast:
                    self.loss = self.model(*batches[self._number % len(batches)])
                self.loss.backward()
            self._optimizer.step()
            self._number += 1

    def lap(self, steps: int, batches: list[tuple[Tensor, Tensor]]) -> float:
        """Seconds for some steps, of the slowest rank; the same on all ranks."""
        self._place.meet()
        begin = time.perf_counter()
        self.train(steps, batches)
        self._place.synchronize()
        return self._place.largest(time.perf_counter() - begin)

    def summary(self) -> dict[str, Any]:
        """What it sent, and whether it still trains: -1 bytes where nobody counted."""
        sent = -1.0 if self.link is None else self.link.stats().get("comm/bytes_per_step", -1.0)
        return {"bytes_per_step": float(sent), "finite": bool(self.loss.detach().isfinite())}


def computes_in_bf16(device: torch.device) -> bool:
    """Whether matrices are multiplied in bfloat16, as most do on GPUs that can; gradients are float32 anyway.

    >>> computes_in_bf16(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def random_batches(place: Place, *, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Random bytes: the benchmark measures time, not what is learnt.

    >>> inputs, targets = random_batches(Place(0, 1, torch.device("cpu")), batch=2, length=16)[0]
    >>> inputs.shape == targets.shape == (2, 16)
    True
    """
    draw = torch.Generator().manual_seed(place.rank)
    made = [torch.randint(256, (batch, length + 1), generator=draw).to(place.device) for _ in range(_BATCHES)]
    return [(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()) for sequences in made]


def run_task(task: dict[str, Any], place: Place, report: Callable[[dict[str, Any]], None]) -> None:
    """Contenders take turns; whoever is first in a round is another one each time. Rank 0 reports."""
    say = report if place.rank == 0 else lambda event: None
    batches = random_batches(place, batch=task["batch"], length=task["length"])
    contenders = []
    for name in (PLAIN, SILENT, HALF_PRECISION[task["device"]], *task["recipes"]):
        say({"event": "begin", "word": f"{name}, warming up"})
        contenders.append(Contender(name, task["model"], place))
        contenders[-1].lap(LAP, batches)  # compiles, and lets DDP arrange its buckets
    parameters = sum(p.numel() for p in _module(contenders[0]).parameters())
    say({"event": "model", "parameters": parameters, "autocast": computes_in_bf16(place.device)})
    for number in range(task["steps"] // LAP):
        start = number % len(contenders)
        for contender in contenders[start:] + contenders[:start]:
            seconds = contender.lap(LAP, batches)
            say({"event": "lap", "contender": contender.name, "round": number, "step_ms": 1e3 * seconds / LAP})
    for contender in contenders:
        say({"event": "summary", "contender": contender.name, **contender.summary()})
        if contender.link is not None:
            contender.link.close()


def _module(contender: Contender) -> nn.Module:
    found: nn.Module = contender.model.module
    return found
