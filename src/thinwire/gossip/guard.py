"""Watches the compression noise of DCD, which has a limit that depends on the topology."""

from __future__ import annotations

import logging
import math

from .topology import Topology

_log = logging.getLogger(__name__)
_MEMORY = 20  # steps over which noise is averaged
_LEAST = 3  # steps before anything is said


class Guard:
    """Averages |C(z) - z|^2 / |z|^2 over about 20 steps and compares it with the topology's limit.

    >>> from thinwire.gossip.topology import ring
    >>> guard = Guard(ring(8))
    >>> [guard.exceeded(noise) for noise in [0.5] * 30] == [False] * 30
    True
    >>> any(guard.exceeded(9.0) for _ in range(20))
    True
    """

    def __init__(self, topology: Topology) -> None:
        self.limit = topology.noise_limit() if topology.static else math.inf
        self.noise: float | None = None
        self._steps = 0
        self._topology = str(topology)
        self._warned = False

    def exceeded(self, noise: float) -> bool:
        """Whether the mean noise, this step's included, is above the limit: the further, the fewer steps prove it."""
        self._steps += 1
        self.noise = noise if self.noise is None else self.noise + (noise - self.noise) / min(self._steps, _MEMORY)
        if self.noise <= self.limit:
            return False
        return self._steps >= max(_LEAST, _MEMORY * (self.limit / self.noise) ** 2)

    def warn(self, codec: str) -> None:
        """Say it once, with what helps."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s leaves %.2f of what dcd sends as noise, and %s bears %.2f: ranks will drift apart. Use more bits, "
                "a smaller block, or algorithm='choco' ('auto' changes to it by itself)",
                codec,
                self.noise,
                self._topology,
                self.limit,
            )
