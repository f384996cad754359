"""Memories keep residuals by parameter name. Lower-case names build them: `error_feedback(0.9)`."""

from .base import Memory, RunningMemory
from .error_feedback import ErrorFeedback, ErrorFeedbackMemory, error_feedback
from .momentum import MomentumCorrection, MomentumMemory, momentum_correction

__all__ = [
    "ErrorFeedback",
    "ErrorFeedbackMemory",
    "Memory",
    "MomentumCorrection",
    "MomentumMemory",
    "RunningMemory",
    "error_feedback",
    "momentum_correction",
]
