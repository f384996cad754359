"""Low rank: a matrix as the product of two thin factors, found by one warm-started power iteration (PowerSGD)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import kernels
from ..comm import streams
from ..recipe.registry import register
from ..rng import Draw, Key
from .base import Codec, Rounds, Shape, State
from .cast import Fp32
from .stages import Round, RoundCost, Trials, Work

if TYPE_CHECKING:
    from ..exchange.request import Request

_START = 0x51  # the purpose of the key that draws the first right factor


@register
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
    examples = ("low_rank:4", "low_rank:2,iterations=2")
    needs_shape = True
    whole_tensors = True

    rank: int = 4
    iterations: int = dataclasses.field(default=1, kw_only=True)
    factors: Codec = dataclasses.field(default=Fp32(), kw_only=True, metadata={"inner": True})

    def __post_init__(self) -> None:
        for option, value in (("rank", self.rank), ("iterations", self.iterations)):
            self._require(isinstance(value, int) and value >= 1, f"{option} must be 1 or more, got {value}")
        self._require(
            self._can_be_a_factor(self.factors),
            f"its factors are added across ranks, which {self.factors.name} does not allow: use fp32, bf16 or fp16",
        )

    # ------------------------------------------------------------------------------------------------ facts

    @property
    def sum_dtype(self) -> torch.dtype | None:  # type: ignore[override]  # the base declares it for the class
        return self.factors.sum_dtype

    @staticmethod
    def _can_be_a_factor(inner: Codec) -> bool:
        floats = inner.sum_dtype is not None and inner.sum_dtype.is_floating_point
        return floats and not inner.sparse and not inner.needs_shape

    def accepts_inner(self, inner: Codec) -> str | None:
        if inner.sum_dtype in (torch.float32, torch.float16, torch.bfloat16) and not (
            inner.sparse or inner.needs_shape
        ):
            return None
        return f"{inner.name} cannot write the factors of low_rank, which ranks add: write {self.text()}|bf16"

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
        finite, largest = torch.isfinite(p).all(), p.abs().max()
        if not streams.resident(p.device):
            if not finite:
                return torch.full_like(p, math.nan)
            return torch.as_tensor(torch.linalg.qr(p / largest if largest > 0 else p)[0])
        scaled = torch.where(finite, p / torch.where(largest > 0, largest, 1.0), 0.0)
        return torch.where(finite, torch.linalg.qr(scaled)[0], math.nan)

    @staticmethod
    def right(x: Tensor, p: Tensor) -> Tensor:
        """Second round: M^T P for an orthonormal P, to be averaged over the ranks."""
        return _matrix(x).T @ p

    @staticmethod
    def warm(state: State, q: Tensor) -> None:
        """Start the next step from this right factor, unless it is zero (an unused parameter) or not finite."""
        if streams.resident(q.device):
            old = state.get("q")
            state["q"] = torch.where(q.any() & torch.isfinite(q).all(), q, torch.zeros_like(q) if old is None else old)
        elif q.any() and torch.isfinite(q).all():
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
            q = torch.zeros(shape, device=matrix.device)
        q = q.to(matrix.device)
        if streams.resident(q.device) or not q.any(dim=0).all():
            bits = kernels.random_bits(q.numel(), key.fold(_START), device=matrix.device) >> 8
            q = torch.where(q.any(dim=0), q, (bits.to(torch.float32) / 2.0**24 - 0.5).view(shape))
        return _unit_columns(q)

    # ------------------------------------------------------------------------------------------ sums over ranks

    def rounds(self, request: Request, ranks: int) -> Rounds:
        """The left factors of all matrices in one message, then the right ones; what does not pay travels whole."""
        share, u, out = 1.0 / ranks, request.u, request.blank()
        matrices = [part for part in request.parts if self.pays(part.shape)]
        whole = [part for part in request.parts if not self.pays(part.shape)]
        xs = [part.of(u).view(part.shape) for part in matrices]
        states = [request.state.setdefault(part.name, self.new_state()) for part in matrices]
        draws = [dataclasses.replace(request.draw, stream=part.name) for part in matrices]
        plain = torch.cat([part.of(u) for part in whole]) * share if whole else None
        if not matrices and plain is not None:
            plain = yield Round(plain)
        ps: list[Tensor] = []
        qs: list[Tensor] = []
        for _ in range(self.iterations if matrices else 0):
            lefts = [self.left(x, state=s, draw=d) * share for x, s, d in zip(xs, states, draws, strict=True)]
            first = self._round(lefts, beside=plain if not ps else None)
            averaged = self._split((yield first), lefts)
            plain = plain if ps else first.beside
            ps = [self.orthonormal(p) for p in averaged]
            rights = [self.right(x, p) * share for x, p in zip(xs, ps, strict=True)]
            qs = self._split((yield self._round(rights)), rights)
            for state, q in zip(states, qs, strict=True):
                self.warm(state, q)
        for part, p, q in zip(matrices, ps, qs, strict=True):
            # A NaN anywhere makes the whole mean NaN: P or Q has no finite column then.
            part.of(out).view(part.shape).copy_(self.restore(p, q, part.shape))
        place = 0
        for part in whole:
            assert plain is not None
            size = part.stop - part.start
            part.of(out).copy_(plain[place : place + size])
            place += size
        if request.remembers:  # if a rank is not finite, the step leaves no trace
            u -= out
            for part in whole:
                part.of(u).zero_()  # sent as it was
        return out if request.shard is None else out[request.shard], None

    def _round(self, shares: Sequence[Tensor], *, beside: Tensor | None = None) -> Round:
        """The factors of many matrices as one message."""
        flat = torch.cat([share.reshape(-1) for share in shares])
        return Round(flat if self.factors.lossless else self.factors.to_sum(flat), beside=beside)

    def _split(self, total: Tensor, shares: Sequence[Tensor]) -> list[Tensor]:
        """The factors out of their sum."""
        sums = torch.split(self.factors.from_sum(total), [share.numel() for share in shares])
        return [one.view(share.shape) for one, share in zip(sums, shares, strict=True)]

    def round_costs(self, numel: int, ranks: int, shapes: Sequence[Shape]) -> list[Work | RoundCost]:
        assert self.sum_dtype is not None
        itemsize, narrow = self.sum_dtype.itemsize, self.sum_dtype != torch.float32
        factored = [sides(shape) for shape in shapes if self.pays(shape)]
        whole = sum(math.prod(shape) for shape in shapes if not self.pays(shape))
        elements, count = sum(rows * columns for rows, columns in factored), max(1, len(factored))
        left, right = (itemsize * self.rank * sum(pair[side] for pair in factored) for side in (0, 1))
        costs: list[Work | RoundCost] = [Work("pass", 2 * (elements + whole))]
        if whole and not factored:
            costs.append(RoundCost(4 * whole, "whole", plain=True))
        for iteration in range(self.iterations if factored else 0):
            beside = 4 * whole if iteration == 0 else 0
            costs.append(Work("left", elements, self, count))
            costs.append(RoundCost(left, f"left{iteration}", plain=not narrow, beside=beside))
            costs.append(Work("right", elements, self, count))
            costs.append(RoundCost(right, f"right{iteration}", plain=not narrow))
        return [*costs, Work("put", elements, self, count), Work("pass", 2 * (elements + whole))]

    def trials(self, given: Sequence[Tensor], draw: Draw) -> Trials:
        numel, state = given[0].numel(), self.new_state()
        matrix = given[0].view(1 << (numel.bit_length() // 2), -1)  # nearly square
        p = self.orthonormal(self.left(matrix, state=state, draw=draw))
        q = self.right(matrix, p)
        self.warm(state, q)
        return {
            "left": (lambda: self.orthonormal(self.left(matrix, state=state, draw=draw)), numel),
            "right": (lambda: self.right(matrix, p), numel),
            "put": (lambda: self.restore(p, q, tuple(matrix.shape)), numel),
        }

    # --------------------------------------------------------------------------------------------- messages

    def write(self, x: Tensor, body: Tensor, key: Key, state: State) -> None:
        shape = tuple(x.shape)
        values = self._factored(x, key, state) if self.pays(shape) else x.reshape(-1)
        self.factors.write(values, body, key, {})

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

    def add_body(self, body: Tensor, out: Tensor, key: Key, shape: Shape) -> None:
        if not self.pays(shape):
            self.factors.add_body(body, out, key, (out.numel(),))
            return
        values = torch.zeros(self._values(out.numel(), shape), dtype=torch.float32, device=out.device)
        self.factors.add_body(body, values, key, (values.numel(),))
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
