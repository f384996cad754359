"""What top-k leaves out: against brute force, and against the bounds where they apply and where they do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import Draw, OptionError, theory
from thinwire.codecs import random_k, top_k
from thinwire.lab.study.bounds import DENSITIES, contraction


def brute(u: Tensor, k: int) -> float:
    squares = u.double().square().sort(descending=True).values
    return float(squares[k:].sum() / squares.sum())


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["normal", "laplace", "ties", "zeros"]),
    st.sampled_from([5, 100, 1234, 40_000]),
)
@settings(max_examples=12, deadline=None)
def test_what_is_left_is_that_of_a_sort_and_of_the_codec(seed: int, kind: str, numel: int) -> None:
    u = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if kind == "laplace":
        u = u * u.abs()
    elif kind == "ties":
        u = u.round()
    elif kind == "zeros":
        u[numel // 3 :] = 0
    for row in contraction(u):
        k = row["k"]
        assert k == top_k(row["density"]).k(numel)
        assert row["top_k"] == pytest.approx(brute(u, k), abs=1e-6)
        codec = top_k(row["density"])
        sent = codec.decode(codec.encode(u))
        assert row["top_k"] == pytest.approx(float((u - sent).square().sum() / u.square().sum()), abs=1e-5)
        assert row["delta"]["top_k"] == 1 - row["top_k"]
        assert row["classic"] == 1 - theory.top_k(numel, k)
        assert row["bell"] == pytest.approx((1 - k / numel) ** 2)
        assert row["holds"]["classic"]  # for any u


@pytest.mark.parametrize("name", ["normal", "laplace", "t3", "uniform", "spike"])
def test_the_bell_bound_holds_where_the_density_of_sizes_falls(name: str) -> None:
    r = np.random.default_rng(0)
    made = {
        "normal": r.normal(size=100_000),
        "laplace": r.laplace(size=100_000),
        "t3": r.standard_t(3, 100_000),
        "uniform": r.uniform(-1, 1, 100_000),
        "spike": np.where(r.random(100_000) < 0.7, 0.0, r.normal(size=100_000)),
    }
    rows = contraction(torch.from_numpy(made[name]))
    assert [row["density"] for row in rows] == list(DENSITIES)
    for row in rows:
        assert row["holds"]["bell"]
        assert row["top_k"] <= row["bell"]
        assert row["delta"]["top_k"] >= row["delta"]["bell"] >= row["delta"]["classic"]


def test_it_fails_where_all_sizes_are_alike_and_the_classic_bound_is_met_exactly() -> None:
    signs = torch.randint(2, (10_000,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    for row in contraction(3.0 * signs):
        assert row["top_k"] == pytest.approx(row["classic"], abs=1e-9)
        assert row["holds"] == {"classic": True, "bell": False}


def test_it_fails_for_a_ring_of_sizes() -> None:
    u = 1.0 + 0.1 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert not any(row["holds"]["bell"] for row in contraction(u))


def test_random_k_is_the_codec_and_its_mean_is_the_expectation() -> None:
    u = torch.randn(5000, generator=torch.Generator().manual_seed(1)).exp()
    row = contraction(u, [0.1], draw=Draw(seed=7, step=2, stream="w"), draws=400)[0]
    assert row["random_k_expected"] == 1 - 500 / 5000
    assert row["random_k"] == pytest.approx(row["random_k_expected"], abs=0.003)
    assert row["random_k_least"] < row["random_k"] < row["random_k_most"]
    codec = random_k(0.1, scaled=False, shared=False)
    draw = Draw(seed=7, step=2, stream="w/random_k", rank=0)
    sent = codec.decode(codec.encode(u, draw=draw))
    one = contraction(u, [0.1], draw=Draw(seed=7, step=2, stream="w"), draws=1)[0]
    assert one["random_k"] == pytest.approx(float((u - sent).square().sum() / u.square().sum()), abs=1e-6)


def test_densities_that_keep_nothing_are_left_out_and_others_refused() -> None:
    assert [row["density"] for row in contraction(torch.ones(20), [0.5, 0.001, 0.05])] == [0.05, 0.5]
    assert contraction(torch.zeros(100)) == []
    for bad in ([], [0.0], [1.0], [-0.1, 0.5]):
        with pytest.raises(OptionError, match="densities"):
            contraction(torch.ones(10), bad)
