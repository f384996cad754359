"""An optimizer around an optimizer: to schedulers and to GradScaler it looks like the one inside."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OptionError


class Wrapped(torch.optim.Optimizer):
    """Parameters, groups and state are those of `base`; only what a step does is different."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base  # and not super().__init__, which would make groups of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.base.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise OptionError("parameters cannot be added to a decentralised optimizer: give all to the optimizer first")
