"""Decentralised contenders of `compare` by name: `dcd:4@ring` is DCD-PSGD with 4 bits on a ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...comm.network import Network
from ...comm.peers import PeerTransport
from ...errors import OptionError
from ...gossip import ALGORITHMS, decentralize
from ...gossip.absolute import gossip_codec
from ...gossip.topology import named_topology

_ABOUT = {
    "allreduce": "Gradients averaged over all ranks in every step, in float32: the centralised baseline.",
    "dpsgd": "Every rank averages its model with its neighbours', in float32.",
    "naive": "Every rank averages its model with its neighbours' quantised ones: fails at few bits.",
    "dcd": "Neighbours exchange compressed differences of their models.",
    "ecd": "Neighbours exchange compressed extrapolations of their models.",
    "choco": "Neighbours exchange compressed differences and apply a part of what they receive.",
    "auto": "dcd, or choco if the noise of the codec is too large for the topology.",
}
_USUAL = {"dpsgd": "fp32", "allreduce": "fp32", "ecd": "8"}


@dataclass(frozen=True)
class Gossip:
    """An algorithm, its codec and its topology.

    >>> Gossip.named("dcd:4@ring")
    Gossip(algorithm='dcd', codec='min_max:4,block=512', topology='ring')
    >>> Gossip.named("choco:sign@torus").codec, Gossip.named("ecd:8@ring").codec, Gossip.named("two-shot-4")
    ('sign:512', 'absolute:8,step=0.02', None)
    """

    algorithm: str
    codec: str
    topology: str

    @classmethod
    def named(cls, name: str) -> Gossip | None:
        """None if this is not the name of an algorithm."""
        text, _, topology = name.partition("@")
        algorithm, _, codec = text.partition(":")
        if not topology and algorithm != "allreduce":
            return None
        if algorithm not in ALGORITHMS:
            raise OptionError(f"there is no algorithm {algorithm}: choose {', '.join(ALGORITHMS)}")
        found = cls(algorithm, _codec(algorithm, codec or _USUAL.get(algorithm, "4")), topology or "ring")
        gossip_codec(found.codec)
        named_topology(found.topology)
        return found

    @property
    def spelled(self) -> str:
        if self.algorithm == "allreduce":
            return "decentralize(algorithm='allreduce')"
        return f"decentralize(algorithm='{self.algorithm}', codec='{self.codec}', topology={self.topology}())"

    @property
    def about(self) -> str:
        return _ABOUT[self.algorithm]

    def join(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, *, transport: PeerTransport, network: Network, seed: int
    ) -> Any:
        """The decentralised optimizer of this rank."""
        return decentralize(
            net,
            optimizer,
            algorithm=self.algorithm,
            codec=self.codec,
            topology=named_topology(self.topology),
            transport=transport,
            network=network,
            seed=seed,
        )


def _codec(algorithm: str, text: str) -> str:
    if text.isdigit():
        return f"absolute:{text},step=0.02" if algorithm == "ecd" else f"min_max:{text},block=512"
    return "sign:512" if text == "sign" else text


def gossip_names(algorithms: tuple[str, ...], *, topology: str, codec: str | None) -> tuple[str, ...]:
    """Names of contenders. An algorithm without a codec of its own gets the given one.

    >>> gossip_names(("allreduce", "dcd", "choco:sign"), topology="ring", codec="min_max:8,block=512")
    ('allreduce', 'dcd:min_max:8,block=512@ring', 'choco:sign@ring')
    """
    names = []
    for one in algorithms:
        algorithm, _, own = one.partition(":")
        chosen = own or ("" if codec is None or algorithm in ("dpsgd", "allreduce") else codec)
        name = f"{algorithm}:{chosen}" if chosen else algorithm
        names.append(name if algorithm == "allreduce" else f"{name}@{topology}")
    return tuple(names)
