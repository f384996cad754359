"""Rounds over the network: gathers the reports of all ranks while the optimizer runs, and broadcasts decisions."""

from __future__ import annotations

import time
import zlib
from collections import deque

import torch

from ..comm.communicator import Communicator
from ..comm.network import Network, Pending
from ..errors import ExchangeError
from .agreement import Agreement, Decision
from .alarm import Alarm
from .reports import RankReport, check_reports

_LAST_SECONDS = 5.0  # that the end of a program waits for a round
_LATENCIES = 3  # rounds whose shortest time is the latency


class Rounds:
    """One rank's side of the rounds. All ranks make the same calls in the same order.

    They have a group of their own where others send over the first one too: in the step of a rank that ran out of data,
    DDP sends its own messages after a round, and on other ranks before it.

    A round starts after one step and is finished before the next, so it delays a step only on a link with a very long
    latency.
    """

    def __init__(self, network: Network, first: Decision) -> None:
        self._network = network.control()
        self._owns = self._network is not network
        self._network.spans = self._network.spans or []
        self.agreement, self._alarm = Agreement(first), Alarm()
        self._pending: Pending | None = None
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)

    def restart(self, first: Decision, *, due: int = 0) -> None:
        """Finish a round that is under way, and begin anew with this decision; the first step with a round is `due`."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self.agreement, self._alarm = Agreement(first, due=due), Alarm()

    @property
    def started(self) -> bool:
        return self._pending is not None

    @property
    def latency(self) -> float:
        """The shortest of the last rounds in seconds; 0 before the first."""
        return min(self._latencies) if self._latencies else 0.0

    def start(self, report: RankReport) -> None:
        self._pending = self._network.start_all_gather(self._signed(report.numbers()))

    def finish(self) -> tuple[list[RankReport], bool]:
        """Wait for the reports of all ranks. The flag says whether all of them should hurry."""
        pending, self._pending = self._pending, None
        assert pending is not None
        reports = [RankReport.from_numbers(_checked(row)) for row in pending.wait()]
        spans = self._network.take_spans()
        if spans:  # the round itself began last
            begin, end = spans[-1]
            self._latencies.append(end - begin)
        check_reports(reports, number=self.agreement.round)
        exchange = [report.measured.last_exchange for report in reports]
        return reports, self._alarm.update(exchange, step=max(report.measured.seconds for report in reports))

    def give_up(self) -> None:
        """No more rounds. A message under way would end the program with an abort, so it gets a moment to arrive."""
        pending, self._pending = self._pending, None
        end = time.monotonic() + _LAST_SECONDS
        while pending is not None and not pending.done():
            if time.monotonic() > end:
                pending.abandon()  # closing would wait for its timeout
                break
            time.sleep(0.005)
        if self._owns and isinstance(self._network, Communicator):
            self._network.close()

    def broadcast(self, decision: Decision) -> Decision:
        """The decision of rank 0, in a message of its own."""
        numbers = self._network.broadcast(self._signed(decision.numbers()), source=0)
        self._network.take_spans()
        return Decision.from_numbers(_checked(numbers))

    def largest(self, value: float) -> float:
        """The maximum over the ranks."""
        return float(self._network.all_reduce(self._tensor([value]), op="max"))

    def _signed(self, numbers: list[float]) -> torch.Tensor:
        """With a checksum: a rank that read another decision than the others would wait for them in vain."""
        return self._tensor([*numbers, _checksum(self._tensor(numbers))])

    def _tensor(self, numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=self._network.device)


def _checksum(numbers: torch.Tensor) -> float:
    return float(zlib.crc32(numbers.numpy(force=True).tobytes()))


def _checked(row: torch.Tensor) -> list[float]:
    """The numbers of a report or a decision, without their checksum."""
    if float(row[-1]) != _checksum(row[:-1]):
        raise ExchangeError("a report of auto was damaged on its way: restart all ranks from a checkpoint")
    found: list[float] = row[:-1].tolist()
    return found
