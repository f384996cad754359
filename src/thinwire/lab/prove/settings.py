"""What `thinwire prove` is asked for: the options, checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import OptionError
from ...recipe.compose import parse
from ...recipe.presets import PRESETS

# Layers and width of the model that the benchmark trains; 64 channels a head.
MODELS = {"tiny": (2, 128), "small": (4, 256), "medium": (8, 512), "large": (12, 768), "huge": (24, 1024)}
BENCHMARKED = ("dense", "bf16", "global-qsgd-8", "two-shot-4", "two-shot-1", "threshold-k")
BENCHMARKED_QUICKLY = ("dense", "two-shot-4", "threshold-k")
MOST_PROCESSES = 64
LAP = 5  # steps between two turns in the benchmark


@dataclass(frozen=True)
class Settings:
    """Options of a proof. Bad values raise OptionError or RecipeError.

    >>> Settings(model="giant")
    Traceback (most recent call last):
    thinwire.errors.OptionError: there is no model giant: choose tiny, small, medium, large or huge
    """

    quick: bool = False
    steps: int | None = None  # of each contender in the benchmark
    model: str | None = None
    recipes: tuple[str, ...] = ()
    processes: int | None = None
    interpret: bool = False  # Triton kernels in Triton's interpreter, on the CPU
    timeout: float = 300.0  # seconds without a sign of life

    def __post_init__(self) -> None:
        if self.model is not None and self.model not in MODELS:
            *most, last = MODELS
            raise OptionError(f"there is no model {self.model}: choose {', '.join(most)} or {last}")
        if self.steps is not None and self.steps < 2 * LAP:
            raise OptionError(f"--steps is {2 * LAP} or more, because contenders take turns, not {self.steps}")
        if self.processes is not None and not 2 <= self.processes <= MOST_PROCESSES:
            raise OptionError(f"--processes is from 2 to {MOST_PROCESSES}, not {self.processes}")
        if not 10 <= self.timeout <= 86_400:
            raise OptionError(f"--timeout is from 10 to 86400 seconds, not {self.timeout:g}")
        if len(set(self.recipes)) < len(self.recipes):
            raise OptionError("a recipe is named twice in --recipes: name each once")
        for name in self.recipes:
            parse(name)

    @property
    def contract_recipes(self) -> tuple[str, ...]:
        """The recipes whose DDP contract is checked: every preset unless some were named."""
        return self.recipes or tuple(PRESETS)

    @property
    def benchmark_recipes(self) -> tuple[str, ...]:
        """The recipes in the benchmark, beside plain DDP and torch's bf16 hook."""
        return self.recipes or (BENCHMARKED_QUICKLY if self.quick else BENCHMARKED)

    def processes_on(self, gpus: int) -> int:
        """How many processes: one a GPU with NCCL (at most eight unless asked), two on CPUs."""
        if gpus < 2:
            return self.processes or 2
        if self.processes is not None and self.processes > gpus:
            raise OptionError(f"--processes is {gpus} or less here: NCCL needs a GPU for each, not {self.processes}")
        return self.processes or min(gpus, 8)

    def model_on(self, device: str, *, gigabytes: float = 0.0) -> str:
        """The benchmark's model: large on GPUs that hold one for every contender, small on CPUs."""
        if self.model is not None:
            return self.model
        if device == "cpu":
            return "tiny" if self.quick else "small"
        return "large" if gigabytes >= 20 and not self.quick else "medium"

    def steps_on(self, device: str) -> int:
        """Steps of each contender, in whole laps."""
        steps = self.steps or (20 if self.quick else 60 if device == "cpu" else 100)
        return steps // LAP * LAP
