"""The parameters of a DDP model by name, which of them are special, and the models that are refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import AttachError, OptionError
from ..reduce import Reducer
from ..reduce.buckets import Exempt, Parameter
from .copies import Detached


class Scaler(Protocol):
    """What is asked of a GradScaler."""

    def get_scale(self) -> float: ...


PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp = "python_reducer" calls hooks for single gradients and ignores their result: '
    "set it to True, or leave it as it was, before building the DDP model"
)
OVERFLOW = (
    "a gradient was not finite in step %d; residuals stay as they were. If a GradScaler changes its scale, "
    "give it to attach(..., scaler=scaler), so that they follow"
)
CHANGED = "some were frozen or unfrozen after DDP was built: set requires_grad first, then wrap the model and attach"
_ONE_HOOK = "a DDP model takes one communication hook only, and "
_ATTACHED = f"{_ONE_HOOK}thinwire is attached: use link.set_recipe to change the recipe"
ANOTHER_HOOK = f"{_ONE_HOOK}it has one: build the model anew without it"


def checked_model(model: torch.nn.Module, link: type) -> DistributedDataParallel:
    """The DDP model inside `model`, if a hook can be put into it; `link` is the type of our own."""
    ddp = getattr(model, "_orig_mod", model)  # of torch.compile(ddp)
    if not isinstance(ddp, DistributedDataParallel):
        raise AttachError(
            f"attach needs a DistributedDataParallel model, not {type(model).__name__}: "
            "wrap it first, DistributedDataParallel(model)"
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise AttachError(PYTHON_REDUCER)
    if getattr(ddp, "mixed_precision", None) is not None:
        raise AttachError(
            "DistributedDataParallel(mixed_precision=...) uses the only communication hook itself: "
            "use torch.autocast instead"
        )
    hooks = getattr(ddp, "_comm_hooks", [])
    hooks[:] = [hook for hook in hooks if not isinstance(hook[1], Detached)]  # a copied model has no hook
    if hooks:
        raise AttachError(_ATTACHED if isinstance(hooks[0][1], link) else ANOTHER_HOOK)
    return ddp


def trained(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters that DDP reduces, by name in the model, without `module.` in front.

    They are found as DDP finds them: a parameter of the root module is `.name` to its list of ignored ones.
    """
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for module_name, module in ddp.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}"
            if parameter.requires_grad and full not in ignored and id(parameter) not in seen:
                seen.add(id(parameter))
                found[full.removeprefix(".")] = parameter
    return found


def check_unchanged(ddp: DistributedDataParallel, found: Mapping[str, Tensor]) -> None:
    """Refuse a model whose parameters were frozen or unfrozen since DDP was built: DDP reduces those of then.

    Torch tells how many there were and how many bytes they had, not which. What that does not show, the first backward
    pass does.
    """
    told = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    tensors, size = told.get("num_parameter_tensors"), told.get("total_parameter_size_bytes")
    here = sum(parameter.numel() * parameter.element_size() for parameter in found.values())
    if tensors is not None and (tensors, size) != (len(found), here):
        raise AttachError(f"DDP reduces {tensors} parameters, and {len(found)} require a gradient now: {CHANGED}")


def known_parameters(ddp: DistributedDataParallel, exempt: Exempt | Collection[str]) -> list[Parameter]:
    """What the layout needs to know of each."""
    found = trained(ddp)
    check_unchanged(ddp, found)
    exempts = exempt_of(exempt, found)
    tables = [m for m in ddp.module.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)]
    embeddings = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    sparse = {id(parameter) for table in tables if table.sparse for parameter in table.parameters(recurse=False)}
    return [
        Parameter.of(name, p, exempts, sparse=id(p) in sparse, embedding=id(p) in embeddings)
        for name, p in found.items()
    ]


def exempt_of(exempt: Exempt | Collection[str], found: Collection[str]) -> Exempt:
    if callable(exempt):
        return exempt
    names = {exempt} if isinstance(exempt, str) else set(exempt)
    if unknown := names - set(found):
        raise OptionError(f"exempt names {min(unknown)}, which the model does not train: it has {', '.join(found)}")
    return lambda name, parameter: name in names


class ForwardHook:
    """Tells the policy of a reducer that forward begins or ends.

    It holds the reducer weakly: a hook of the model must not keep it alive. A copy of a model copies its hooks, and
    those tell nobody.
    """

    def __init__(self, moment: str, reducer: Reducer | None = None) -> None:
        self._moment = moment
        self._reducer: Callable[[], Reducer | None] = (lambda: None) if reducer is None else weakref.ref(reducer)

    def __call__(self, *_: object) -> None:
        found = self._reducer()
        getattr(found and found.policy, self._moment, lambda: None)()

    def __deepcopy__(self, memo: object) -> ForwardHook:
        return ForwardHook(self._moment)

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[str]]:
        return ForwardHook, (self._moment,)


def time_forward(ddp: DistributedDataParallel, reducer: Reducer) -> None:
    """Tell a policy when forward begins and ends."""
    if hasattr(reducer.policy, "forward_begins"):
        ddp.register_forward_pre_hook(ForwardHook("forward_begins", reducer))
        ddp.register_forward_hook(ForwardHook("forward_ends", reducer))


def weights_of(model: Callable[[], DistributedDataParallel | None]) -> Callable[[], dict[str, Tensor]]:
    """What tells the trained weights of a model that may be gone; `model` is a weak reference."""

    def weights() -> dict[str, Tensor]:
        ddp = model()
        return {} if ddp is None else trained(ddp)

    return weights


def orders_differ(model: Callable[[], DistributedDataParallel | None]) -> Callable[[], bool]:
    """What tells whether messages at the end of a step could meet others on the ranks of this model.

    Under `join()` DDP tells which parameters are unused after such messages on ranks that ran out of data, and before
    them on the others.
    """

    def differ() -> bool:
        ddp = model()
        return ddp is not None and bool(ddp.find_unused_parameters) and _joins(ddp)

    return differ


def _joins(ddp: DistributedDataParallel) -> bool:
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))
