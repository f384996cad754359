"""A workload that no recipe was tuned on: a recurrent network on packages of the standard library, with Adam."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.lab.compare.workloads import Batch, Workload

_HELD_OUT_EVERY = 15  # files


class _Gru(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 96)
        self.recurrent = nn.GRU(96, 320, batch_first=True)
        self.head = nn.Linear(320, 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(inputs))
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())


class GruOnPackages(Workload):
    """Next-byte prediction on modules inside packages; the workload gpt reads those at the top."""

    name = "gru"
    about = "a recurrent network of 0.5 M parameters on the packages of Python's standard library"
    optimizer_text = "Adam, lr 3e-3, gradients clipped to norm 1"
    batch_per_worker = 8
    context = 48
    clip = 1.0

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-k]*/*.py"))
        texts = {
            held_out: b"".join(
                path.read_bytes() for n, path in enumerate(files) if (n % _HELD_OUT_EVERY == 0) == held_out
            )
            for held_out in (False, True)
        }
        self._text = {key: torch.frombuffer(bytearray(text), dtype=torch.uint8) for key, text in texts.items()}

    def model(self, *, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return _Gru()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=3e-3)

    def count(self, *, held_out: bool = False) -> int:
        return (len(self._text[held_out]) - 1) // self.context

    def examples(self, which: Tensor, *, held_out: bool = False) -> Batch:
        sequences = self._text[held_out][which[:, None] * self.context + torch.arange(self.context + 1)].long()
        return sequences[:, :-1], sequences[:, 1:]
