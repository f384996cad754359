"""The errors thinwire raises. Each says in one sentence what to write instead."""

import traceback


class ThinwireError(Exception):
    """Base of every error thinwire raises on purpose.

    >>> issubclass(RecipeError, ThinwireError) and issubclass(RecipeError, ValueError)
    True
    """


class OptionError(ThinwireError, ValueError):
    """An option of a codec, memory or exchange has a value that cannot work."""


class RecipeError(ThinwireError, ValueError):
    """A recipe makes no sense; raised when it is composed, never while training."""


class MessageError(ThinwireError, ValueError):
    """Bytes that are not the message they should be: cut short, damaged, or made by another codec."""


class StateError(ThinwireError, RuntimeError):
    """A saved state does not fit the object it is loaded into."""


class ExchangeError(ThinwireError, RuntimeError):
    """An exchange with the other ranks failed: one of them died, hangs, or does something else."""


class AttachError(ThinwireError, RuntimeError):
    """thinwire cannot be put into this training program as it is."""


class EmulationError(ThinwireError, RuntimeError):
    """The slow network that was asked for cannot be made on this machine, or is not what was asked for."""


def release(failure: BaseException | None) -> None:
    """Whoever keeps an exception keeps the variables of its frames, and with them the sockets of a collective."""
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__cause__ or failure.__context__
