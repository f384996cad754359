"""Naive quantised D-PSGD: neighbours average quantised models. Kept to show that it fails."""

from __future__ import annotations

from typing import ClassVar

from .dpsgd import Dpsgd


class Naive(Dpsgd):
    """x_i <- W_ii x_i + sum_j W_ij C(x_j) + update(x_i).

    The noise is a share of the model itself and not of its change: it never becomes less, and at few bits a model
    cannot get closer to its optimum than that.
    Reference: the motivating example of Tang et al. 2018, arXiv 1803.06443, section 4.
    """

    name: ClassVar[str] = "naive"
