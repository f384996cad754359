"""A small model in training, the same numbers in every run, and checkpoints of it: for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.nn.parallel import DistributedDataParallel

from support.forced_auto import attach
from thinwire.exchange.first_shot import pieces
from thinwire.reduce.policy import PolicyOptions

Tree = Any
MANY, ONE = 0.02, 25.0  # MB a bucket: several buckets, other ones than planned, or a single one
SAVED_AFTER, STEPS = 4, 8
MOMENTUM = 0.9  # of dgc
# Presets that differ in more than bits, selection or leader. The others are tried by `make test-all` too.
ONE_OF_A_KIND = {"dense", "global-qsgd-8", "qsgd-4", "two-shot-4", "two-shot-1", "two-shot-2-ef"}
ONE_OF_A_KIND |= {"threshold-k", "ar-top-k", "dgc", "powersgd-4"}


class Net(nn.Module):
    """Used in another order than made, so that DDP's buckets are not the ones that were planned."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.last = nn.Linear(64, 40)
        self.middle = nn.Linear(width, 64)
        self.first = nn.Linear(48, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return out


class Run:
    """One model in training; step by step the same numbers in every run."""

    def __init__(
        self,
        recipe: str | PolicyOptions,
        rank: int,
        *,
        cap: float = MANY,
        start: int = 0,
        width: int = 96,
        **options: Any,
    ):
        torch.manual_seed(start)
        self.net, self.rank, self.scaler = Net(width), rank, options.get("scaler")
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=cap)
        self.link = attach(self.model, recipe, **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)

    def train(self, until: int) -> Run:
        while self.link.step < until:
            numbers = torch.Generator().manual_seed(1000 * self.link.step + self.rank)
            loss = self.model(torch.randn(8, 48, generator=numbers)).square().mean()
            self.optimizer.zero_grad()
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

    def end(self) -> Tree:
        """Everything that decides what comes next, when nothing of it is in use any more."""
        residuals = self.link.reducer.residuals
        memory = residuals.memory
        everything = {
            "parameters": self.weights(),
            "kept": {} if memory is None else {name: dict(memory.tensors(name)) for name in memory.names()},
            "states": residuals.states,
            "backs": residuals.backs,
            "layout": str(self.link.layout.groups),
        }
        self.link.close()
        return everything

    def owed(self) -> dict[str, Tensor]:
        """What this rank adds to the sum that is still to be delivered, by parameter, float64."""
        [part] = self.link.state_dict().values()
        owed = {}
        for name, kept in part.get("memory", {}).items():
            owed[name] = kept["residual"].double()
            if "momentum" in kept:
                owed[name] += MOMENTUM * kept["momentum"].double()
        n, backs = self.link.world_size, self.link.reducer.residuals.backs
        for bucket in self.link.layout.buckets:
            if bucket.name in backs:
                flat = torch.zeros(bucket.numel, dtype=torch.float64)
                flat[list(pieces(bucket.numel, n))[self.rank]] = backs[bucket.name].double() * n
                for one in bucket.parts:
                    owed[one.name] = owed.get(one.name, 0.0) + one.of(flat).view(one.shape)
        return owed


def assert_same(a: Tree, b: Tree, where: str = "") -> None:
    if isinstance(a, Mapping):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    else:
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, where


def save(rank: int, world_size: int, recipe: str, folder: Path, cap: float, after: int) -> tuple[Tree, Tree]:
    """Saves in the middle, in both ways, and trains on; what was owed when it saved, and the end."""
    run = Run(recipe, rank, cap=cap)
    planned = run.link.layout.groups
    run.train(after)
    assert (run.link.layout.groups != planned) == (cap == MANY and after > 1)
    assert (len(planned) > 1) == (cap == MANY)
    owed, mine = run.owed(), {"link": run.link.state_dict(), "model": run.weights()}
    save_distributed({"link": run.link, "model": run.net.state_dict()}, checkpoint_id=folder / "dcp")
    run.train(STEPS)
    torch.save(mine, folder / f"{rank}.pt")  # only now: what state_dict gave must not have changed with training
    return owed, run.end()


def parts_in(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(file, weights_only=True) for file in sorted(folder.glob("*.pt"))]
