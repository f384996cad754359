"""What arXiv 2312.02493 printed: its table of winners and its two network schedules, and how they are scaled here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

WAYS = ("gather", "ring", "tree")
SAID = {"gather": "all-gather", "ring": "shared, ring", "tree": "shared, tree"}
WORKERS = 8
STEP_MS = 28.0  # what Table IV leaves of a step of ResNet50 beside the formula: computing, compressing, reading

# The last model is printed as a ViT, but its times are those of 132.9 M parameters (VGG-11), and its code has another.
SIZES = {"ResNet18": 11_689_512, "ResNet50": 25_557_032, "AlexNet": 61_100_840, "ViT": 132_863_336}
SIZE_IN_CODE = {**SIZES, "ViT": 304_326_632}
RATES = (10.0, 5.0, 1.0)  # Gbit/s

# Table VI: milliseconds of all-gather, ring and tree at 10, 5 and 1 Gbit/s; 8 workers, 1 ms.
WINNERS = {
    ("ResNet18", 0.1): ((54, 35, 43.2), (107.76, 52.5, 76.3), (526.3, 194.7, 345.6)),
    ("ResNet18", 0.01): ((7.66, 18.1, 12.2), (13.83, 20.8, 16.1), (51.93, 34.1, 41.9)),
    ("ResNet18", 0.001): ((3.28, 16.7, 9), (4.25, 17.9, 10.1), (8.86, 19.5, 12.8)),
    ("ResNet50", 0.1): ((115.1, 52.9, 83.4), (232, 94.7, 156.2), (1148, 405.5, 745)),
    ("ResNet50", 0.01): ((14.35, 20.3, 15.9), (28.1, 26.1, 24.2), (126.5, 58.8, 83.7)),
    ("ResNet50", 0.001): ((4.65, 18.1, 10), (5.3, 17.8, 10.5), (14.35, 21, 16.1)),
    ("AlexNet", 0.1): ((271.8, 106.8, 180.4), (544.5, 200.4, 354.8), (2718.7, 964.4, 1778)),
    ("AlexNet", 0.01): ((32.73, 25.2, 25.8), (61.75, 34.8, 42.6), (282.7, 111.8, 186.8)),
    ("AlexNet", 0.001): ((6, 18.6, 11.1), (8.92, 19.3, 13.1), (31.33, 27, 27.3)),
    ("ViT", 0.1): ((592.77, 238.6, 401.2), (1206, 424.3, 779.1), (5973, 2047, 3852)),
    ("ViT", 0.01): ((68.48, 36.2, 46.2), (127.45, 58, 86.2), (601.8, 222.8, 385.2)),
    ("ViT", 0.001): ((9.15, 19.2, 12.9), (15.3, 21.4, 16.9), (59.68, 36.7, 44.4)),
}


class Cell(NamedTuple):
    """One cell of Table VI."""

    model: str
    ratio: float
    gigabits: float
    times: tuple[float, ...]

    @property
    def winner(self) -> str:
        return WAYS[self.times.index(min(self.times))]


def cells() -> Iterator[Cell]:
    for (model, ratio), rows in WINNERS.items():
        for gigabits, row in zip(RATES, rows, strict=True):
            yield Cell(model, ratio, gigabits, row)


class Phase(NamedTuple):
    """A network of a schedule, and its share of the training."""

    milliseconds: float
    gigabits: float
    share: float


_UP = ((1, 25), (2, 20), (4, 15), (8, 10), (16, 5), (32, 1))
SCHEDULES = {
    "C1": tuple(Phase(a, b, share) for a, b, share in ((1, 25, 0.24), (1, 1, 0.24), (50, 1, 0.24), (50, 25, 0.28))),
    "C2": tuple(Phase(a, b, 1 / 12) for a, b in (*_UP, *reversed(_UP))),
}

# Here a gradient is 4.5 MB and not 102 MB, and a step that sends nothing takes about 26 ms on four workers that share
# two cores: rates are divided by 25, which leaves a slow network as slow, beside the computing, as the published one
# was, and delays by 5.
RATE_SCALE, DELAY_SCALE = 25.0, 5.0


def scaled(phase: Phase) -> str:
    """The network of a phase as it is written for the emulator.

    >>> scaled(Phase(50, 1, 0.24))
    '40mbit,10ms'
    """
    return f"{1e3 * phase.gigabits / RATE_SCALE:g}mbit,{phase.milliseconds / DELAY_SCALE:g}ms"


def phase_at(schedule: str, share: float) -> int:
    """Which phase runs after this share of the steps.

    >>> phase_at("C1", 0.0), phase_at("C1", 0.5), phase_at("C1", 1.0)
    (0, 2, 3)
    """
    done = 0.0
    for number, phase in enumerate(SCHEDULES[schedule]):
        done += phase.share
        if share < done - 1e-9:
            return number
    return len(SCHEDULES[schedule]) - 1
