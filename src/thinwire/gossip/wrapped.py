"""An optimizer around another one; schedulers and GradScaler see the inner one's groups and state."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OptionError


class Wrapped(torch.optim.Optimizer):
    """Parameters, groups and state are those of `base`. Subclasses define `step`."""

    # GradScaler skips step() where a gradient is not finite. Then this rank would miss a round, and its neighbours
    # would wait for it. With this flag GradScaler calls step() always and leaves unscaling to it.
    _step_supports_amp_scaling = True

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base  # no super().__init__(): it would create a second set of groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base.defaults

    def _unscale(self) -> bool:
        """Divide the gradients by GradScaler's factor, if it is at work. False if it found one that is not finite."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            inverse = scale.double().reciprocal().float()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))
        return found is None or not bool(found)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise OptionError(
            "parameters cannot be added to a decentralised optimizer: give all of them to the inner optimizer first"
        )
