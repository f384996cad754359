"""The settings of a simulation, checked before anything runs, and the compression overhead of its workers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ...codecs.base import Codec
from ...codecs.stages import Work
from ...errors import OptionError
from ...gossip.absolute import gossip_codec
from ...gossip.message import gossip_message_bytes
from ...gossip.topology import Topology, named_topology
from ...predict.devices import Device, this_machine
from ...recipe.compose import Recipe, parse
from ..compare.gossips import Gossip, gossip_names
from .links import Links
from .pace import Pace

_PASSES = 6  # over the model in a step of gossip, beside the codec: update, mixing, copies


@dataclass(frozen=True)
class Settings:
    """A simulation: workers, network, algorithms, steps."""

    workers: int = 64
    algorithms: tuple[str, ...] = ("dcd",)
    recipes: tuple[str, ...] = ()
    topology: str = "exponential"
    codec: str | None = None
    network: str = "home-1000"
    steps: int = 200
    cost_only: bool = False
    workload: str = "mlp-100k"
    data: str | None = None
    skew: float = 0.0
    parameters: int | None = None
    compute_ms: float = 100.0
    straggle: float | None = None
    uneven: float | None = None
    loss: float = 0.0
    churn: str | None = None
    deadline: float | None = None
    device: str = "a100"
    cores: float = 1.0
    bucket_mb: float = 25.0
    compute: str = "auto"
    lap: int | None = None
    growth: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise OptionError(f"--steps is 1 or more, not {self.steps}")
        if self.lap is not None and self.lap < 1:
            raise OptionError(f"--lap is a number of steps, 1 or more, not {self.lap}")
        if not self.algorithms and not self.recipes:
            raise OptionError("there is nothing to simulate: give --algorithm dcd, or --recipe two-shot-2")
        if self.parameters is not None and (self.parameters < 1 or not self.cost_only):
            raise OptionError("--parameters, 1 or more, is for --cost-only: otherwise the model decides")
        if not self.cores > 0 or not self.bucket_mb > 0:
            raise OptionError("--cores and --bucket-mb are above 0")
        if self.cost_only and (self.loss or self.churn):
            raise OptionError("--cost-only simulates neither loss nor absences: leave --cost-only out")
        if (self.loss or self.churn) and self.deadline is None:
            raise OptionError(
                "lost messages and absences need a --deadline: the seconds after which nobody waits any longer"
            )
        if self.churn is not None and self.recipes:
            raise OptionError("recipes need all workers in every step: give --churn with --algorithm only")
        if self.deadline is not None and not self.deadline > 0:
            raise OptionError(f"--deadline is a number of seconds above 0, not {self.deadline}")
        self.links  # noqa: B018 (an unknown network is an error of now)
        self.pace  # noqa: B018
        for name in self.names:
            self.way(name)

    # ------------------------------------------------------------------------------------------------- what is meant

    @property
    def names(self) -> tuple[str, ...]:
        """One for each row."""
        return gossip_names(self.algorithms, topology=self.topology, codec=self.codec) + self.recipes

    def way(self, name: str) -> Gossip | Recipe:
        """The algorithm or the recipe of a row."""
        found = Gossip.named(name)
        if found is not None and found.algorithm != "allreduce":
            self.graph(found)
            return found
        return parse("dense" if name in ("allreduce", "ddp") else name)

    def graph(self, gossip: Gossip) -> Topology:
        return named_topology(gossip.topology).of(self.workers)

    @property
    def links(self) -> Links:
        return Links.named(self.network, workers=self.workers, seed=self.seed).with_loss(self.loss)

    @property
    def pace(self) -> Pace:
        links = self.links
        return Pace(
            self.compute_ms / 1e3,
            straggle=links.straggle if self.straggle is None else self.straggle,
            uneven=links.uneven if self.uneven is None else self.uneven,
            seed=self.seed,
        )

    @property
    def evaluated_every(self) -> int:
        return self.lap or max(1, self.steps // 20)

    def of(self, workers: int, *, steps: int) -> Settings:
        """The same for another number of workers, without training."""
        return replace(self, workers=workers, steps=steps, cost_only=True, loss=0.0, churn=None)

    def told(self) -> dict[str, Any]:
        return asdict(self) | {"algorithms": list(self.algorithms), "recipes": list(self.recipes)}


class Coding:
    """Compression overhead in seconds, on a device of which a worker has `cores` cores."""

    def __init__(self, settings: Settings, codecs: list[Codec]) -> None:
        device = this_machine(codecs) if settings.device == "this" else Device.named(settings.device)
        self._device, self._cores = device, min(1.0, settings.cores)

    def seconds(self, work: list[Work]) -> float:
        return sum(self._device.seconds(one) for one in work) / self._cores

    def messages(self, codec: Codec, numel: int, neighbours: int) -> float:
        """One message encoded, one decoded from each neighbour, and the passes of the step itself."""
        work = [Work("hook", 1), Work("encode", numel, codec), Work("pass", _PASSES * numel)]
        return self.seconds(work + [Work("add", numel, codec)] * neighbours)


def message_size(gossip: Gossip, numel: int, *, buffers: int = 0) -> int:
    """Bytes of one gossip message."""
    return gossip_message_bytes(gossip_codec(gossip.codec).wire_bytes(numel), buffers=buffers)
