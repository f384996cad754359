"""Compares the compression noise of DCD with the limit that the topology sets."""

from __future__ import annotations

import logging
import math

from .topology import Topology

_log = logging.getLogger(__name__)
_WINDOW = 20  # steps over which noise is averaged
_LEAST = 3  # steps before the limit can count as exceeded


class NoiseMonitor:
    """Averages |C(z) - z|^2 / |z|^2 over about 20 steps and compares it with the topology's limit.

    >>> from thinwire.gossip.topology import ring
    >>> monitor = NoiseMonitor(ring(8))
    >>> [monitor.exceeded(noise) for noise in [0.5] * 30] == [False] * 30
    True
    >>> any(monitor.exceeded(9.0) for _ in range(20))
    True
    """

    def __init__(self, topology: Topology) -> None:
        self.limit = topology.noise_limit() if topology.static else math.inf
        self.noise: float | None = None
        self._steps = 0
        self._topology = str(topology)
        self._warned = False

    def exceeded(self, noise: float) -> bool:
        """Whether the mean noise, this step included, exceeds the limit. A larger excess needs fewer steps."""
        self._steps += 1
        self.noise = noise if self.noise is None else self.noise + (noise - self.noise) / min(self._steps, _WINDOW)
        if self.noise <= self.limit:
            return False
        return self._steps >= max(_LEAST, _WINDOW * (self.limit / self.noise) ** 2)

    def warn(self, codec: str) -> None:
        """Log one warning that names the remedies."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "the compression noise of dcd with %s is %.2f, and the limit of %s is %.2f: ranks will drift apart. "
                "Use more bits, a smaller block, or algorithm='choco' ('auto' switches to it)",
                codec,
                self.noise,
                self._topology,
                self.limit,
            )
