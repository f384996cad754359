"""An optimizer around another one; schedulers and GradScaler see the inner one's groups and state."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OptionError


class Wrapped(torch.optim.Optimizer):
    """Parameters, groups and state are those of `base`. Subclasses define `step`."""

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise OptionError(
            "parameters cannot be added to a decentralised optimizer: give all of them to the inner optimizer first"
        )
