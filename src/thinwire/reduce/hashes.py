"""Ranks compare hashes of their means, and raise if a flipped bit or a bug made replicas differ.

Inside a collective bytes travel without a checksum. A hash of the reduced tensors covers all that parts replicas:
messages, exact elements, positions, sums that the network made. In an all-to-all, one rank reads a message and all get
the sum: damage parts nobody. So ranks also compare the sums of all words that they sent to each other and received.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .. import kernels
from ..comm import streams
from ..comm.network import Network
from ..errors import ExchangeError
from .deferred import Deferred
from .step import Step, Work

_WEIGHTS = "~"  # begins the names of weights, which come after those of means
_ABSENT = -(1 << 63)  # in place of a hash: this rank holds nothing to compare


def gathered(step: Step, networks: Sequence[Network]) -> Tensor:
    """What all ranks have, a row each: hashes in the order of names, and what `_sums` splits off."""
    mine = [step.hashes[name].view(1) for name in sorted(step.hashes)]
    # Each times a number of its own: what damages the same bit in every lane must not cancel out.
    sums = [network.take_message_sums() * (1 + (number << 20)) for number, network in enumerate(networks)]
    return networks[0].all_gather(torch.cat([*mine, torch.stack(sums).sum(dim=0).view(-1)]))


def _sums(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The hashes, and the sums of words: row, direction (0 for sent), and to or from whom."""
    ranks = len(rows)
    return rows[:, : -2 * ranks], rows[:, -2 * ranks :].view(ranks, 2, ranks)


def check(step: Step, rows: Tensor, network: Network) -> None:
    """Raise on every rank if anything differs on any rank, with the step, the tensor and the ranks in the minority."""
    rows, sums = _sums(rows)
    if (place := _first_difference(rows)) is None:
        _check_sums(step.number, sums)
        return
    name, seen = sorted(step.hashes)[place], [int(value) for value in rows[:, place].tolist()]
    if name.startswith(_WEIGHTS):
        raise ExchangeError(said(step.number, name, seen))
    work = step.works[name]
    where = str(work.bucket)
    if len(work.outputs) > 1:  # all ranks come here, so that they can look closer
        where, seen = _parameter(work, network) or (where, seen)
    raise ExchangeError(said(step.number, where, seen))


def _parameter(work: Work, network: Network) -> tuple[str, list[int]] | None:
    """Which parameter of a bucket differs."""
    names = list(work.outputs)
    mine = torch.stack([kernels.hash64(work.outputs[name].contiguous()).view(()) for name in names])
    rows = network.all_gather(mine)
    place = _first_difference(rows)
    return None if place is None else (f"{names[place]} in {work.bucket}", rows[:, place].tolist())


def _check_sums(step: int, sums: Tensor) -> None:
    wrong = (sums[:, 0] != sums[:, 1].T).nonzero()
    if len(wrong):
        sender, receiver = wrong[0].tolist()
        raise ExchangeError(
            f"rank {receiver} received other bytes than rank {sender} sent, in step {step} or since the last check "
            "before it: restart from a checkpoint"
        )


def _first_difference(rows: Tensor) -> int | None:
    there = rows != _ABSENT
    first = rows.gather(0, there.int().argmax(dim=0, keepdim=True))
    differs = (there & (rows != first)).any(dim=0)
    return int(differs.int().argmax()) if bool(differs.any()) else None


def said(step: int, where: str, seen: Sequence[int]) -> str:
    """The error in words.

    >>> said(7, "w", [3, 3, 4])
    'the ranks hold different means of w in step 7: rank 2 differs from the other 2. A message was damaged, ...'
    """
    counts = Counter(value for value in seen if value != _ABSENT)
    (common, count), *others = counts.most_common()
    minority = [rank for rank, value in enumerate(seen) if value not in (common, _ABSENT)]
    if others and others[0][1] == count:
        parted = "no majority: " + " against ".join(
            "rank " + ", ".join(str(rank) for rank, value in enumerate(seen) if value == one) for one in counts
        )
    else:
        ranks = f"rank{'s' if len(minority) > 1 else ''} {', '.join(map(str, minority))}"
        parted = f"{ranks} differ{'' if len(minority) > 1 else 's'} from the other {count}"
    if where.startswith(_WEIGHTS):
        return (
            f"the ranks hold different weights of {where[1:]} in step {step}: {parted}. A message was damaged since "
            "the last check, or ranks update weights differently: restart from a checkpoint, or pass check_every=0"
        )
    return (
        f"the ranks hold different means of {where} in step {step}: {parted}. A message was damaged, or a codec "
        "decodes differently on some ranks: restart from a checkpoint"
    )


class HashCheck:
    """Compares means of all ranks every N steps; on a device, what ranks said is looked at when it has come.

    `weights` gives tensors that must be the same on all ranks too: they show what went wrong since the last check.
    `absent` says whether those of this rank do not count. `paused` says whether ranks cannot be compared now; the same
    on all of them.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.deferred = Deferred()
        self.weights: Callable[[], Mapping[str, Tensor]] = dict
        self.absent: Callable[[], bool] = bool
        self.paused: Callable[[], bool] = bool

    def wanted(self, step: int, network: Network) -> bool:
        return network.world_size > 1 and self.every > 0 and step % self.every == 0 and not self.paused()

    def run(self, step: Step, networks: Sequence[Network]) -> None:
        """After a step: raise on all ranks if means differ, or if messages changed on their way."""
        self.deferred.run()
        if not step.checks:
            return
        if step.device is None:
            self._hash_rest(step)
            if step.hashes:
                check(step, gathered(step, networks), networks[0])
            return
        now = streams.active().record(step.device)
        with streams.active().side(step.device):
            streams.active().wait(now, step.device)
            self._hash_rest(step)
            if step.hashes:
                where = {name: str(work.bucket) for name, work in step.works.items()}
                later = functools.partial(_check_rows, step.number, where, sorted(step.hashes))
                self.deferred.add(gathered(step, networks), step.device, later)
            done = streams.active().record(step.device)
        streams.active().wait(done, step.device)  # before the next step overwrites what is read here

    def _hash_rest(self, step: Step) -> None:
        """Of what was summed as it is, and of weights; jobs have hashed their own means."""
        rest: dict[str, Mapping[str, Tensor]] = {
            name: work.outputs for name, work in step.works.items() if name not in step.hashes and not work.sharded
        }
        weights = {f"{_WEIGHTS}{name}": {name: tensor.detach()} for name, tensor in self.weights().items()}
        if self.absent():
            step.hashes |= dict.fromkeys(weights, torch.full((), _ABSENT, dtype=torch.int64, device=step.device))
        else:
            rest |= weights
        for name, tensors in rest.items():
            if not any(tensor.is_sparse for tensor in tensors.values()):
                for tensor in tensors.values() if step.device is not None else ():
                    streams.active().use(tensor)
                step.hashes[name] = _of(tensors)


def _of(tensors: Mapping[str, Tensor]) -> Tensor:
    """Of several tensors together."""
    return torch.stack([kernels.hash64(tensor.contiguous().view(-1)).view(()) for tensor in tensors.values()]).sum()


def _check_rows(number: int, where: Mapping[str, str], names: Sequence[str], rows: Tensor) -> None:
    rows, sums = _sums(rows)
    if (place := _first_difference(rows)) is not None:
        raise ExchangeError(said(number, where.get(names[place], names[place]), rows[:, place].tolist()))
    _check_sums(number, sums)
