"""The rows of `thinwire compare`: plain DDP, torch's own hooks, no communication, recipes, decentralised algorithms.

No `from __future__ import annotations` here: DDP compares the annotations of a hook with live objects.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ...attach import Link, attach
from ...errors import OptionError, RecipeError
from ...predict.workload import passed_on
from ...recipe.compose import parse
from ...recipe.presets import ABOUT, PRESETS
from .gossips import Gossip

NO_COMMUNICATION = "no-communication"
_BASELINES = {
    "ddp": "DistributedDataParallel as it is: float32, summed by all-reduce.",
    "torch-fp16": "torch's fp16_compress_hook: half precision, summed by all-reduce.",
    "torch-bf16": "torch's bf16_compress_hook: half precision, summed by all-reduce.",
    "torch-powersgd": "torch's powerSGD_hook: every matrix as two thin factors, with error feedback.",
    "auto": "Chooses one of 24 while training, dense among them.",
}
_ONE_BUCKET = "one bucket: with more it aborts on gloo"


@dataclass(frozen=True)
class Contender:
    """One row of the table, by name: `ddp`, `torch-fp16`, `torch-powersgd:4`, a preset, or a recipe as text.

    >>> Contender.named("two-shot-2").spelled
    'rotated:2|two_shot:3'
    >>> Contender.named("torch-powersgd:4").note
    'one bucket: with more it aborts on gloo'
    >>> Contender.named("two-shots-2")
    Traceback (most recent call last):
    thinwire.errors.OptionError: there is no preset two-shots-2: did you mean two-shot-2?
    """

    name: str
    spelled: str
    about: str
    note: str | None = None
    gossip: Gossip | None = None

    @classmethod
    def named(cls, name: str) -> "Contender":
        kind, _, argument = name.partition(":")
        if (gossip := Gossip.named(name)) is not None:
            return cls(name, gossip.spelled, gossip.about, gossip=gossip)
        if kind == "torch-powersgd":
            if not argument.isascii() or not argument.isdigit() or int(argument) < 1:
                raise OptionError(f"{name} needs a rank of 1 or more: write torch-powersgd:4")
            return cls(name, f"powerSGD_hook, rank {int(argument)}", _BASELINES[kind], _ONE_BUCKET)
        if name in ("ddp", "torch-fp16", "torch-bf16"):
            spelled = {"ddp": "DistributedDataParallel", "torch-fp16": "fp16_compress_hook"}
            return cls(name, spelled.get(name, "bf16_compress_hook"), _BASELINES[name])
        if name == "auto":
            return cls(name, "chosen while training", _BASELINES[name])
        if name == NO_COMMUNICATION:
            return cls(name, "a hook that sends nothing", "Every worker trains alone: the limit.")
        try:
            recipe = parse(name)
        except RecipeError as problem:
            if "|" in name or "there is no preset" in str(problem):
                raise OptionError(str(problem)) from None
            raise OptionError(f"there is no recipe {name}: {_choices()}") from None
        return cls(name, str(recipe), ABOUT.get(name, "A recipe as given."))

    @property
    def is_recipe(self) -> bool:
        """Whether the name is that of a recipe, whose step time can be predicted."""
        return self.gossip is None and self.name not in ("ddp", "auto", NO_COMMUNICATION) and "torch-" not in self.name

    @property
    def one_bucket(self) -> bool:
        return self.note == _ONE_BUCKET

    def wrap(
        self, net: nn.Module, group: Any, *, seed: int, bucket_mb: float
    ) -> tuple[DistributedDataParallel, Link | None]:
        """The DDP model as this contender trains it, between the ranks of the group."""
        cap = 1e6 if self.one_bucket else bucket_mb
        model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=cap, init_sync=False)
        if self.name == NO_COMMUNICATION:
            model.register_comm_hook(None, _send_nothing)
        elif self.name.startswith("torch-"):
            _register_torch_hook(model, self.name, group)
        elif self.name != "ddp":
            return model, attach(model, self.name, seed=seed)
        return model, None


def _choices() -> str:
    return (
        f"choose ddp, auto, dcd:4@ring, torch-fp16, torch-bf16, torch-powersgd:RANK, {', '.join(PRESETS)}, or write one"
    )


def _send_nothing(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return passed_on(bucket)


def _register_torch_hook(model: DistributedDataParallel, name: str, group: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "torch-fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif name == "torch-bf16":
        model.register_comm_hook(group, default_hooks.bf16_compress_hook)
    else:
        rank = int(name.partition(":")[2])
        # Its own default is to start after 1,000 steps; 2 is the least it allows with error feedback.
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
