"""The workloads of `thinwire compare`: data without a download, dealt to ranks by seed, and a model for each."""

from __future__ import annotations

import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ...errors import OptionError
from .images import Images, read_images
from .models import Cnn, Gpt, Mlp

Batch = tuple[Tensor, Tensor]
_HELD_OUT_EVERY = 20  # modules of the standard library
_DIGITS = {  # seven segments: top, top left, top right, middle, bottom left, bottom right, bottom
    0: "1110111",
    1: "0010010",
    2: "1011101",
    3: "1011011",
    4: "0111010",
    5: "1101011",
    6: "1101111",
    7: "1010010",
    8: "1111111",
    9: "1111011",
}


class Workload(ABC):
    """A model and its data. The same seed gives the same weights and the same batches, on every machine.

    >>> mlp = workload("mlp")
    >>> inputs, targets = mlp.batch(0, seed=0, rank=1, world_size=2)
    >>> tuple(inputs.shape), mlp.model(seed=0)(inputs, targets).shape
    ((64, 64), torch.Size([]))
    """

    name: str
    about: str
    optimizer_text: str
    batch_per_worker: int
    warm_up = 10  # steps over which the learning rate rises
    held_out_batches = 4  # of a rank, for the loss
    accuracy_batches = 4  # of a rank, for the accuracy
    skew = 0.0  # share of the examples that are dealt by kind and not at random
    clip: float | None = None

    @abstractmethod
    def model(self, *, seed: int) -> nn.Module:
        """The model with the weights of this seed. Called with inputs and targets, it returns the mean loss."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer: ...

    @abstractmethod
    def examples(self, which: Tensor, *, held_out: bool = False) -> Batch:
        """Inputs and targets by number."""

    @abstractmethod
    def count(self, *, held_out: bool = False) -> int: ...

    def batch(self, step: int, *, seed: int, rank: int, world_size: int) -> Batch:
        """This rank's examples. All examples are shuffled once an epoch and dealt out, so no two ranks share one.

        With a skew, every rank has its own examples, mostly of a few kinds, and shuffles those.
        """
        size = self.batch_per_worker
        if self.skew:
            mine = self._shard(rank, world_size)
            epoch, place = divmod(step * size, len(mine) // size * size)
            return self.examples(mine[_shuffled(len(mine), seed + rank, epoch)[place : place + size]])
        first = (step * world_size + rank) * size
        epoch, place = divmod(first, self.count() // size * size)
        return self.examples(_shuffled(self.count(), seed, epoch)[place : place + size])

    def kinds(self) -> Tensor:
        """The kind of every example, as a number. In text, the place is the kind: neighbours are alike."""
        return torch.arange(self.count())

    def _shard(self, rank: int, world_size: int) -> Tensor:
        """The numbers of the examples that only this rank has."""
        order = _shuffled(self.count(), 0, 0)
        by_kind = order[: int(self.skew * len(order))]
        by_kind = by_kind[torch.argsort(self.kinds()[by_kind], stable=True)]
        size = len(by_kind) // world_size
        return torch.cat(
            [by_kind[rank * size : (rank + 1) * size], order[int(self.skew * len(order)) :][rank::world_size]]
        )

    def correct(self, net: nn.Module, batch: Batch) -> int | None:
        """How many of a batch the model gets right; None if the workload has no accuracy."""
        return None

    def held_out(self, *, rank: int, world_size: int, batches: int | None = None) -> Iterator[Batch]:
        """This rank's share of the examples that are never trained on; the first are the same for any number."""
        count, size = self.count(held_out=True), self.batch_per_worker
        chosen = _shuffled(count, 0, 0)[
            : min(count // world_size, (batches or self.held_out_batches) * size) * world_size
        ]
        for part in torch.split(chosen[rank::world_size], size):
            yield self.examples(part, held_out=True)

    def rate(self, step: int) -> float:
        """The learning rate of a step, as a share of the full one."""
        return min(1.0, (step + 1) / self.warm_up)


@lru_cache(maxsize=8)
def _shuffled(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed((seed << 20) + epoch))


# ---------------------------------------------------------------------------------------------------------- text


class GptOnSources(Workload):
    """Next-byte prediction on the sources of Python's own standard library."""

    name = "gpt"
    about = "a byte-level transformer of 3.2 M parameters on the sources of Python's standard library"
    optimizer_text = "fused AdamW, lr 1e-3, betas 0.9 and 0.95, weight decay 0.1, gradients clipped to norm 1"
    batch_per_worker = 2
    context = 64
    clip = 1.0

    def __init__(self, data: str | None = None) -> None:
        self._text = {held_out: _as_tensor(sources(held_out=held_out)) for held_out in (False, True)}

    def model(self, *, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Gpt(context=self.context)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # Fused: the unfused one takes twice as long for a gradient that is mostly zeros as for a dense one (on CPU).
        return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def count(self, *, held_out: bool = False) -> int:
        return (len(self._text[held_out]) - 1) // self.context

    def examples(self, which: Tensor, *, held_out: bool = False) -> Batch:
        sequences = self._text[held_out][which[:, None] * self.context + torch.arange(self.context + 1)].long()
        return sequences[:, :-1], sequences[:, 1:]


def sources(*, held_out: bool) -> bytes:
    """The modules at the top of the standard library, by name; every twentieth is held out.

    >>> b"import" in sources(held_out=True)
    True
    """
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    wanted = [path for number, path in enumerate(modules) if (number % _HELD_OUT_EVERY == 0) == held_out]
    text = b"".join(path.read_bytes() for path in wanted)
    if len(text) < 100_000:
        raise OptionError("this Python has no sources of its standard library: choose another --workload, such as mlp")
    return text


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# -------------------------------------------------------------------------------------------------------- images


class _OnImages(Workload):
    optimizer_text = "SGD, lr 0.1, momentum 0.9"
    batch_per_worker = 64
    accuracy_batches = 160

    def __init__(self, images: Images) -> None:
        self.images = images

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def count(self, *, held_out: bool = False) -> int:
        return len(self.images.held_out if held_out else self.images.train)

    def kinds(self) -> Tensor:
        return self.images.train_classes

    def correct(self, net: nn.Module, batch: Batch) -> int | None:
        logits: Tensor = net.logits(batch[0])  # type: ignore[operator]
        return int((logits.argmax(1) == batch[1]).sum())

    def examples(self, which: Tensor, *, held_out: bool = False) -> Batch:
        if held_out:
            return self.images.held_out[which], self.images.held_out_classes[which]
        return self.images.train[which], self.images.train_classes[which]


class MlpOnDigits(_OnImages):
    """A wide network on digits of 8 x 8 pixels that are drawn here."""

    name = "mlp"
    about = "a wide perceptron of 1.1 M parameters on digits of 8 x 8 pixels, drawn by seed with noise and shifts"

    def __init__(self, data: str | None = None) -> None:
        super().__init__(drawn_digits())

    def model(self, *, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Mlp(64)


class SmallMlpOnDigits(MlpOnDigits):
    """The same with 100 k parameters: for many workers in one process."""

    name = "mlp-100k"
    about = "a perceptron of 99,690 parameters on digits of 8 x 8 pixels, drawn by seed with noise and shifts"
    batch_per_worker = 16

    def model(self, *, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Mlp(64, width=280)


class CnnOnImages(_OnImages):
    """A small convolutional network on Fashion-MNIST or CIFAR-10."""

    name = "cnn"
    about = "a convolutional network of 0.3 to 0.6 M parameters on Fashion-MNIST or CIFAR-10"

    def __init__(self, data: str | None = None) -> None:
        if data is None:
            raise OptionError("workload cnn reads Fashion-MNIST or CIFAR-10 from a folder: give it with --data")
        super().__init__(read_images(data))
        if self.count() < self.batch_per_worker or not self.count(held_out=True):
            raise OptionError(f"{data} has only {self.count()} images: give --data at least {self.batch_per_worker}")

    def model(self, *, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        _, channels, side, _ = self.images.train.shape
        return Cnn(channels, side)


def drawn_digits(count: int = 10_000, *, held_out: int = 1_000) -> Images:
    """Digits of seven segments, each with its own strength, shifted by up to one pixel, with noise.

    >>> tuple(drawn_digits(100, held_out=10).train.shape)
    (100, 64)
    """
    generator = torch.Generator().manual_seed(0)
    total = count + held_out
    classes = torch.randint(10, (total,), generator=generator)
    lit = torch.tensor([[float(bit) for bit in _DIGITS[digit]] for digit in range(10)])
    segments = torch.zeros(7, 8, 8)
    for number, (rows, columns) in enumerate(
        [((1, 2), (2, 6)), ((1, 4), (2, 3)), ((1, 4), (5, 6)), ((3, 4), (2, 6)), ((4, 7), (2, 3)), ((4, 7), (5, 6)),
         ((6, 7), (2, 6))]
    ):  # fmt: skip
        segments[number, slice(*rows), slice(*columns)] = 1.0
    strength = 0.5 + torch.rand(total, 7, generator=generator)
    pictures = torch.einsum("ns,sij->nij", lit[classes] * strength, segments)
    shift = torch.randint(-1, 2, (total, 2), generator=generator)
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            chosen = (shift[:, 0] == down) & (shift[:, 1] == right)
            pictures[chosen] = pictures[chosen].roll((down, right), (1, 2))
    pictures = (pictures + 0.6 * torch.randn(total, 8, 8, generator=generator)).flatten(1)
    return Images(pictures[:count], classes[:count], pictures[count:], classes[count:])


# ---------------------------------------------------------------------------------------------------------- names

WORKLOADS: Mapping[str, Callable[[str | None], Workload]] = MappingProxyType(
    {kind.name: kind for kind in (GptOnSources, MlpOnDigits, SmallMlpOnDigits, CnnOnImages)}
)


def workload(name: str, *, data: str | None = None, skew: float = 0.0) -> Workload:
    """A workload by name, with its data loaded.

    `skew` goes from 0, where every rank has examples of all kinds, to 1, where every rank has its own kinds.

    >>> workload("gtp")
    Traceback (most recent call last):
    thinwire.errors.OptionError: there is no workload gtp: choose gpt, mlp, mlp-100k or cnn
    """
    if name not in WORKLOADS:
        *names, last = WORKLOADS
        raise OptionError(f"there is no workload {name}: choose {', '.join(names)} or {last}")
    if not 0 <= skew <= 1:
        raise OptionError(f"--skew is from 0 to 1, not {skew}")
    found = WORKLOADS[name](data)
    found.skew = skew
    return found
