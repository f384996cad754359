"""A model as one flat float32 tensor and back: its parameters, and its floating-point buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..errors import OptionError


class Flat:
    """Several tensors, read and written as one flat tensor.

    >>> weights = [torch.ones(2, 2), torch.zeros(3)]
    >>> flat = Flat(weights)
    >>> flat.write(torch.arange(7.0))
    >>> weights[1], flat.read()
    (tensor([4., 5., 6.]), tensor([0., 1., 2., 3., 4., 5., 6.]))
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self.numel = sum(tensor.numel() for tensor in self._tensors)

    def read(self) -> Tensor:
        if not self._tensors:
            return torch.empty(0)
        return torch.cat([tensor.detach().reshape(-1).to(torch.float32) for tensor in self._tensors])

    def write(self, flat: Tensor) -> None:
        at = 0
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
                at += tensor.numel()


def trained(model: nn.Module, groups: Iterable[dict[str, object]]) -> dict[str, nn.Parameter]:
    """The parameters of the model that the optimizer updates, by name; an error if it updates others."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, nn.Parameter] = {}
    for group in groups:
        for parameter in group["params"]:  # type: ignore[attr-defined]
            if id(parameter) not in names:
                raise OptionError(
                    "the optimizer has parameters that are not in the model: make it from model.parameters()"
                )
            found[names[id(parameter)]] = parameter
    for name, parameter in found.items():
        if not parameter.is_floating_point() or parameter.is_sparse:
            raise OptionError(f"{name} is not a dense tensor of floating-point numbers: leave it out of the optimizer")
    ordered = {name: found[name] for name, _ in model.named_parameters() if name in found}
    if not ordered:
        raise OptionError("there is nothing to train: the optimizer has no parameters")
    return ordered


def statistics(model: nn.Module) -> list[Tensor]:
    """The floating-point buffers that are saved with the model, such as the statistics of batch norm."""
    saved = model.state_dict(keep_vars=True).keys()
    return [buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()]
