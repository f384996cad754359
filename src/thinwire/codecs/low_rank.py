"""Low rank: a matrix as the product of two thin factors, found by one warm-started power iteration (PowerSGD)."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from .. import kernels
from ..rng import Draw, Key
from .base import Codec, Shape, State
from .cast import Bf16, Fp16, Fp32

_START = 0x51  # the purpose of the key that draws the first right factor


@dataclasses.dataclass(frozen=True, repr=False)
class LowRank(Codec):
    """P Q^T of rank `rank` for tensors of two and more dimensions (Vogels et al. 2019, arXiv 1905.13727).

    The tensor is seen as a matrix M of shape[0] rows. Q is what the last step left, P = orthonormal(M Q), Q = M^T P,
    and P, Q travel. Where the factors would not be smaller (vectors, small matrices) the values travel as they are.
    Both go through the codec `factors`, which follows in a recipe: `low_rank:4|bf16`.

    What is guaranteed: P P^T is a projection, so the error never exceeds |x| (delta >= 0). On a matrix that stays the
    same, the iteration approaches the best approximation of that rank, whose delta is `theory.low_rank`; on changing
    gradients it lags. So use error feedback. Non-finite input decodes to NaN and leaves the state as it was.

    Factors are linear: an exchange averages P = `left(x)` over the ranks, makes it `orthonormal`, averages
    Q = `right(x, p)`, calls `warm` and gets the mean from `restore`. That needs the same Q on all ranks, hence the
    first one is drawn without the rank. `iterations` above 1 repeat both rounds.

    >>> import torch
    >>> matrix = torch.outer(torch.arange(1.0, 33.0), torch.arange(1.0, 17.0))
    >>> codec = LowRank(1)
    >>> message = codec.encode(matrix)
    >>> torch.allclose(codec.decode(message, shape=(32, 16)), matrix, rtol=1e-5)
    True
    >>> message.numel() - 32 == 4 * (32 + 16) == codec.body_bytes(512, shape=(32, 16))
    True
    """

    name = "low_rank"
    linear = True
    needs_shape = True

    rank: int = 4
    iterations: int = dataclasses.field(default=1, kw_only=True)
    factors: Codec = dataclasses.field(default=Fp32(), kw_only=True, metadata={"inner": True})

    def __post_init__(self) -> None:
        for option, value in (("rank", self.rank), ("iterations", self.iterations)):
            self._require(isinstance(value, int) and value >= 1, f"{option} must be 1 or more, got {value}")
        self._require(
            isinstance(self.factors, (Fp32, Fp16, Bf16)),
            f"its factors are added across ranks, which {self.factors.name} does not allow: use fp32, bf16 or fp16",
        )

    # ------------------------------------------------------------------------------------------------ facts

    def pays(self, shape: Shape | None) -> bool:
        """Whether the factors of such a tensor are smaller than the tensor."""
        if shape is None or len(shape) < 2 or math.prod(shape) == 0:
            return False
        rows, columns = sides(shape)
        return self.rank * (rows + columns) < rows * columns

    def body_bytes(self, numel: int, *, shape: Shape | None = None) -> int:
        return self.factors.body_bytes(self._values(numel, shape))

    def _values(self, numel: int, shape: Shape | None) -> int:
        """How many numbers travel."""
        return self.rank * sum(sides(shape)) if shape is not None and self.pays(shape) else numel

    def delta(self, numel: int, *, shape: Shape | None = None) -> float | None:
        """0 for a matrix (a projection adds no error, and one iteration promises no more), else that of `factors`."""
        if self.pays(shape):
            return 0.0
        return 1.0 if self.factors.unbiased else self.factors.delta(numel)

    # ------------------------------------------------------------------------------------------ the iteration

    def left(self, x: Tensor, *, state: State, draw: Draw) -> Tensor:
        """First round: M Q, to be averaged over the ranks."""
        matrix = _matrix(x)
        return matrix @ self._right_factor(matrix, state, dataclasses.replace(draw, rank=0).key())

    @staticmethod
    def orthonormal(p: Tensor) -> Tensor:
        """An orthonormal basis that contains the columns of `p`, also where they are zero or dependent."""
        if not torch.isfinite(p).all():
            return torch.full_like(p, math.nan)
        largest = p.abs().max()
        basis, _ = torch.linalg.qr(p / largest if largest > 0 else p)
        return torch.as_tensor(basis)

    @staticmethod
    def right(x: Tensor, p: Tensor) -> Tensor:
        """Second round: M^T P for an orthonormal P, to be averaged over the ranks."""
        return _matrix(x).T @ p

    @staticmethod
    def warm(state: State, q: Tensor) -> None:
        """Start the next step from this right factor, unless it is zero (an unused parameter) or not finite."""
        if q.any() and torch.isfinite(q).all():
            state["q"] = q.clone()

    @staticmethod
    def restore(p: Tensor, q: Tensor, shape: Shape) -> Tensor:
        """P Q^T in the tensor's own shape."""
        return (p @ q.T).view(shape)

    def _right_factor(self, matrix: Tensor, state: State, key: Key) -> Tensor:
        """Q with columns of length one; what is missing or zero is drawn, because a column of zeros would stay so."""
        shape = (matrix.shape[1], self.rank)
        q = state.get("q")
        if q is None or q.shape != shape:
            q = torch.zeros(shape)
        q = q.to(matrix.device)
        if not q.any(dim=0).all():
            bits = kernels.random_bits(q.numel(), key.fold(_START), device=matrix.device) >> 8
            q = torch.where(q.any(dim=0), q, (bits.to(torch.float32) / 2.0**24 - 0.5).view(shape))
        return _unit_columns(q)

    # --------------------------------------------------------------------------------------------- messages

    def _pack(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        shape = tuple(x.shape)
        values = self._factored(x, key, state) if self.pays(shape) else x.reshape(-1)
        self.factors._pack(values, body, key, {})

    def _factored(self, x: Tensor, key: Key, state: State) -> Tensor:
        """P and Q one after the other, flat."""
        if not kernels.all_finite(x):
            return torch.full((self._values(x.numel(), tuple(x.shape)),), math.nan, device=x.device)
        matrix = _matrix(x)
        q = self._right_factor(matrix, state, key)
        for _ in range(self.iterations):
            p = self.orthonormal(matrix @ q)
            right = self.right(x, p)
            q = _unit_columns(right)
        self.warm(state, right)
        return torch.cat((p.reshape(-1), right.reshape(-1)))

    def _add(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        if not self.pays(shape):
            self.factors._add(body, out, key, (out.numel(),))
            return
        values = torch.zeros(self._values(out.numel(), shape), dtype=torch.float32, device=out.device)
        self.factors._add(body, values, key, (values.numel(),))
        rows, columns = sides(shape)
        p, q = values[: rows * self.rank].view(rows, -1), values[rows * self.rank :].view(columns, -1)
        out += self.restore(p, q, (out.numel(),))


def sides(shape: Shape) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor is seen as.

    >>> sides((8, 3, 5, 5))
    (8, 75)
    """
    return shape[0], math.prod(shape[1:])


def _unit_columns(q: Tensor) -> Tensor:
    """Columns of length one, which keeps M Q from leaving float32; columns of zeros stay."""
    wide = q.to(torch.float64)
    lengths = torch.linalg.vector_norm(wide, dim=0)
    return torch.where(lengths > 0, wide / lengths, 0.0).to(torch.float32)


def _matrix(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32).reshape(x.shape[0], -1)


low_rank = LowRank
