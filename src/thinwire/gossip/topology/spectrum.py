"""What the eigenvalues of a mixing matrix say: the speed of averaging, and the noise that DCD-PSGD tolerates.

Noise means |C(z) - z|^2 / |z|^2 of a codec C, alpha squared in the papers. Let the noise of all ranks be independent.
Then the energy that rank j adds returns to rank i with the factor

    T_ij = sum over eigenvalues a, b of (1-a)(1-b)/(1-ab) u_ai u_aj u_bi u_bj

and the ranks drift apart in mean square if alpha squared exceeds 1 / (the largest eigenvalue of T). For a
vertex-transitive graph of n ranks this is n / sum (1-a)/(1+a).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_EXACT = 96  # ranks up to which T is computed for irregular graphs: that takes n^4 multiplications


def spectral_gap(matrices: Sequence[Tensor]) -> float:
    """1 - the norm of the product of these matrices away from the mean.

    >>> spectral_gap([torch.full((2, 2), 0.5, dtype=torch.float64)])
    1.0
    """
    product = functools.reduce(torch.matmul, matrices)
    apart = product - 1.0 / len(product)
    return 1.0 - round(float(torch.linalg.matrix_norm(apart, 2)), 12)


def published_noise_limit(matrix: Tensor) -> float:
    """(1 - rho)^2 / (4 mu^2) of Tang et al. 2018, arXiv 1803.06443, theorem 1.

    >>> published_noise_limit(torch.full((2, 2), 0.5, dtype=torch.float64))
    0.25
    """
    values = _eigenvalues(matrix)
    if len(values) == 0:
        return math.inf
    rho, mu = float(values.abs().max()), float((values - 1).abs().max())
    return (1 - rho) ** 2 / (4 * mu**2)


def noise_limit(matrix: Tensor, *, vertex_transitive: bool) -> float:
    """The noise above which ranks drift apart. The formula for vertex-transitive graphs serves all large graphs.

    >>> round(noise_limit(torch.full((4, 4), 0.25, dtype=torch.float64), vertex_transitive=True), 3)
    1.333
    """
    if len(matrix) == 1:
        return math.inf
    if vertex_transitive or len(matrix) > _EXACT:
        values = _eigenvalues(matrix)
        return len(matrix) / float(((1 - values) / (1 + values)).sum())
    return _irregular_limit(matrix)


def _eigenvalues(matrix: Tensor) -> Tensor:
    """All but the eigenvalue 1 of the mean."""
    values: Tensor = torch.linalg.eigvalsh(matrix)
    return values[:-1]


def _irregular_limit(matrix: Tensor) -> float:
    values, vectors = torch.linalg.eigh(matrix)
    a, u = values[:-1], vectors[:, :-1]
    kernel = torch.outer(1 - a, 1 - a) / (1 - torch.outer(a, a))
    rows = []
    for i in range(len(matrix)):
        weighted = u * u[i]  # [j, a]: u_aj u_ai
        rows.append(torch.einsum("ja,ab,jb->j", weighted, kernel, weighted))
    return 1.0 / float(torch.linalg.eigvals(torch.stack(rows)).abs().max())
