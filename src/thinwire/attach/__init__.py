"""`attach` puts a recipe into every step of a training program, `local_steps` into every round of several steps."""

from .ddp import attach
from .link import Link
from .local.link import LocalSteps
from .local.presets import LOCAL_PRESETS
from .local_steps import local_steps

__all__ = ["LOCAL_PRESETS", "Link", "LocalSteps", "attach", "local_steps"]
