"""Naive quantised D-PSGD: neighbours average quantised models. It is here to show that it fails."""

from __future__ import annotations

from typing import ClassVar

from .dpsgd import Dpsgd


class Naive(Dpsgd):
    """x_i <- W_ii x_i + sum_j W_ij C(x_j) + update(x_i).

    The noise is proportional to the model, not to its change. It never decreases, and at few bits it bounds the
    distance to the optimum from below.
    Reference: the motivating example of Tang et al. 2018, arXiv 1803.06443, section 4.
    """

    name: ClassVar[str] = "naive"
