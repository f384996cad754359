"""What a model brings to local steps: its trained parameters as local shards, its buffers, its inner optimizers.

DTensors (FSDP2, HSDP) are taken by their local shard: every rank meets the ranks that hold the same shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ... import kernels
from ...comm.network import Network
from ...errors import AttachError
from ..link import Link

_SHARDS = "group=mesh['replicate'].get_group(), the ranks that hold the same shard"


class ModelTensors:
    """Parameters and buffers by name, live; they are read and written without autograd."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.model = unwrapped(model)
        self.optimizers = list(optimizers)
        inside = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        named = dict(inside.named_parameters())
        if strange := held - {id(parameter) for parameter in named.values()}:
            raise AttachError(
                f"the optimizer trains {len(strange)} parameters that are not the model's: "
                "give the model that they belong to"
            )
        self.own = {name: p for name, p in named.items() if p.requires_grad and id(p) in held}
        if not self.own:
            raise AttachError("the optimizer trains no parameter of the model: give the optimizer of this model")
        self._buffers = {name: b for name, b in inside.named_buffers() if b.is_floating_point()}
        self._inside = inside

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trained ones, as local shards that share their memory."""
        return {name: _local(parameter) for name, parameter in self.own.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Those with floating-point values; a module may have replaced them."""
        now = dict(self._inside.named_buffers())
        return {name: _local(now.get(name, buffer)) for name, buffer in self._buffers.items()}

    def state_of(self, keys: Collection[str]) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
        """(parameter, key, its state) of every inner optimizer state with such a key; None before the first step."""
        for optimizer in self.optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in self.own.items():
                if id(parameter) in held:
                    state = optimizer.state.get(parameter)
                    for key in keys:
                        if state is None or key in state:
                            yield name, key, state

    def all_finite(self) -> bool:
        """Whether this rank's parameters and buffers are."""
        tensors = [*self.parameters.values(), *self.buffers.values()]
        return all(kernels.all_finite(tensor.reshape(-1).to(torch.float32)) for tensor in tensors)

    def clear_state(self) -> None:
        """Set values of the inner optimizer's state that are not finite to 0: they would spoil every later step."""
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        _local(value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _local(tensor: Tensor) -> Tensor:
    """The memory of a tensor, or of the local shard of a DTensor."""
    tensor = tensor.detach()
    shard = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard.detach()


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """What torch.compile was given."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, torch.nn.Module):
        raise AttachError(f"local_steps needs a torch.nn.Module, not {type(model).__name__}")
    return inner


def inner_optimizers(given: object) -> list[torch.optim.Optimizer]:
    """One optimizer or several, without the wrappers of frameworks around them."""
    found = []
    for one in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(one, torch.optim.Optimizer) or not hasattr(one, "_optimizer_step_post_hooks"):
            one = getattr(one, "optimizer", one)
        if not isinstance(one, torch.optim.Optimizer):
            raise AttachError(f"local_steps needs a torch.optim.Optimizer, or a list of them, not {type(one).__name__}")
        found.append(one)
    if not found:
        raise AttachError("local_steps needs the optimizer that trains the model")
    return found


# ------------------------------------------------------------------------------------------------- who is in a group


def group_of(model: torch.nn.Module, group: object) -> object:
    """The group of the outer rounds: as given, or that of a DDP model; sharded models must say."""
    if group is not None:
        return group
    if isinstance(model, DistributedDataParallel):
        return model.process_group
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise AttachError(f"the model is sharded, so say which ranks average what they hold: {_SHARDS}")
    return None


def check_shards(model: torch.nn.Module, network: Network) -> None:
    """Refuse a group that reaches across the shards of a model: its ranks hold different elements."""
    outer = ranks_of(network)
    if outer is None:
        return
    for name, parameter in model.named_parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        if len(outer & set(mesh.mesh.flatten().tolist())) > 1:
            raise AttachError(
                f"{name} lies on a mesh with other ranks of the group, so they hold different shards or average "
                f"already: call fully_shard with the shard dimension alone, mesh['shard'], and give {_SHARDS}"
            )


def ranks_of(network: Network) -> set[int] | None:
    """Their numbers in the default group; None for ranks in one process."""
    group = getattr(network, "group", None)
    return None if group is None else set(dist.get_process_group_ranks(group))


class QuietDdp:
    """Keeps a DDP model from averaging gradients inside a round, as `no_sync` does, until `restore`.

    A DDP model over other ranks, such as those of one node, goes on averaging in every step.
    """

    def __init__(self, model: torch.nn.Module, network: Network) -> None:
        self._ddp: Any = None
        if not isinstance(model, DistributedDataParallel):
            return
        if any(isinstance(state, Link) for _, state in getattr(model, "_comm_hooks", ())):
            raise AttachError(
                "thinwire.attach compresses the gradients of this DDP model in every step, and local_steps sends none: "
                "use one of them"
            )
        outer, inner = ranks_of(network), set(dist.get_process_group_ranks(model.process_group))
        if outer is not None and len(outer & inner) == 1 and len(inner) > 1:
            return
        if outer is not None and not inner <= outer and len(outer & inner) > 1:
            raise AttachError(
                f"DDP averages over ranks {sorted(inner)} and the group of local_steps has {sorted(outer)}: "
                "give a group with the same ranks, or with one rank of each DDP group"
            )
        self._ddp, self._before = model, model.require_backward_grad_sync
        model.require_backward_grad_sync = False
        model.require_forward_param_sync = False  # buffers of rank 0 would be broadcast before a forward pass

    def restore(self) -> None:
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = self._before
            self._ddp.require_forward_param_sync = True
            self._ddp = None


# ----------------------------------------------------------------------------------------------------- the same start


def check_same_start(tensors: Mapping[str, Tensor], network: Network) -> None:
    """Raise on all ranks if any of them starts from other values."""
    named = list(tensors.items())
    mine = torch.stack([kernels.hash64(tensor.contiguous().view(-1)).view(()) for _, tensor in named])
    rows = network.all_gather(mine.to(network.device))
    differs = (rows != rows[0]).nonzero()
    if len(differs):
        rank, place = differs[0].tolist()
        raise AttachError(
            f"rank {rank} starts from another value of {named[place][0]} than rank 0: seed all ranks alike or load "
            "the same checkpoint, then call local_steps"
        )
