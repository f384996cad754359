"""Mixing matrices are what averaging needs, and the noise limit is where simulated ranks begin to drift apart."""

from __future__ import annotations

import math

import networkx  # type: ignore[import-untyped]
import pytest
import torch

from thinwire.codecs import min_max, qsgd, sign
from thinwire.errors import OptionError
from thinwire.gossip.topology import TOPOLOGIES, Topology, from_graph, named_topology, reachable, ring, star

SIZES = range(1, 34)


@pytest.mark.parametrize("weights", ["metropolis", "uniform"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_mixing_matrices_are_symmetric_and_doubly_stochastic(name: str, weights: str) -> None:
    for ranks in SIZES:
        topology = TOPOLOGIES[name](ranks, weights=weights)  # type: ignore[arg-type]
        for turn in range(topology.period):
            matrix = topology.matrix(turn)
            assert torch.equal(matrix, matrix.T)
            assert torch.allclose(matrix.sum(1), torch.ones(ranks, dtype=torch.float64), atol=1e-12)
            assert matrix.min() >= 0
            assert matrix.diagonal().min() > 0
            for rank in range(ranks):
                peers = topology.neighbours(rank, turn)
                assert rank not in peers
                assert list(peers) == sorted(peers)
                assert all(rank in topology.neighbours(peer, turn) for peer in peers)
                assert {*peers, rank} == set(matrix[rank].nonzero().flatten().tolist())


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_repeated_averaging_reaches_the_mean_as_fast_as_the_gap_says(name: str) -> None:
    for ranks in (1, 2, 3, 7, 8, 16):
        topology = TOPOLOGIES[name](ranks)
        gap = topology.spectral_gap()
        assert 0 < gap <= 1
        x = torch.randn(ranks, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(ranks))
        mean, apart = x.mean(0), (x - x.mean(0)).norm()
        for turn in range(topology.period):
            x = topology.matrix(turn) @ x
        assert torch.allclose(x.mean(0), mean)
        assert (x - mean).norm() <= (1 - gap + 1e-9) * apart
        assert len(reachable(topology, range(ranks), 0)) == ranks


@pytest.mark.parametrize(("name", "ranks", "limit", "published"), [
    ("ring", 8, 1.366, 0.0054), ("ring", 16, 1.366, 0.00036), ("ring", 64, 1.366, 0.0012**2),
    ("torus", 16, 1.067, 0.0156), ("torus", 64, 1.087, 0.037**2), ("exponential", 16, 1.087, 0.039),
    ("exponential", 64, 1.040, 0.015), ("complete", 8, 1.143, 0.25),
])  # fmt: skip
def test_noise_limits_that_are_known(name: str, ranks: int, limit: float, published: float) -> None:
    topology = TOPOLOGIES[name](ranks)
    assert topology.noise_limit() == pytest.approx(limit, abs=6e-4)
    assert topology.published_noise_limit() == pytest.approx(published, rel=0.1)


def _growth(topology: Topology, noise: float, *, steps: int = 400, paths: int = 600) -> float:
    """How the mean-square distance to the mean changes in a step of DCD without gradients, over many paths.

    The noise of a rank is a random sign vector of exactly `noise` times the energy of its difference.
    """
    generator = torch.Generator().manual_seed(0)
    matrix = topology.matrix()
    x = torch.randn(paths, topology.size, dtype=torch.float64, generator=generator)
    logs = []
    for _ in range(steps):
        x = x - x.mean(1, keepdim=True)
        size = x.square().mean()
        x = x / size.sqrt()
        z = x @ (matrix - torch.eye(topology.size, dtype=torch.float64))
        flips = torch.randint(0, 2, z.shape, generator=generator).double() * 2 - 1
        x = x + z + math.sqrt(noise) * z.abs() * flips
        apart = x - x.mean(1, keepdim=True)
        logs.append(apart.square().mean().log())
    return float(torch.stack(logs[steps // 2 :]).mean())


def _expected_growth(topology: Topology, noise: float) -> float:
    """The same without sampling: the covariance between the ranks, step by step."""
    matrix = topology.matrix()
    ranks = topology.size
    away = torch.eye(ranks, dtype=torch.float64) - 1 / ranks
    covariance, growth = away.clone(), 1.0
    for _ in range(300):
        difference = matrix - torch.eye(ranks, dtype=torch.float64)
        energy = (difference @ covariance @ difference.T).diagonal()
        covariance = away @ (matrix @ covariance @ matrix.T + noise * torch.diag(energy)) @ away
        growth = float(covariance.trace())
        covariance /= growth
    return growth


@pytest.mark.parametrize("topology", [
    ring(8), ring(16), TOPOLOGIES["torus"](12), TOPOLOGIES["exponential"](9), TOPOLOGIES["complete"](5), star(8),
    from_graph(networkx.path_graph(6)), from_graph(networkx.barbell_graph(4, 2)),
], ids=str)  # fmt: skip
def test_ranks_drift_apart_above_the_noise_limit_and_not_below(topology: Topology) -> None:
    limit = topology.noise_limit()
    before = torch.trace(torch.eye(topology.size) - 1 / topology.size)
    assert before > 0
    assert _expected_growth(topology, 0.97 * limit) < 1 < _expected_growth(topology, 1.03 * limit)


def test_sampled_paths_agree_with_the_limit() -> None:
    topology = ring(8)
    assert _growth(topology, 0.7 * topology.noise_limit()) < 0
    assert _growth(topology, 2.5 * topology.noise_limit()) > 0


def test_codecs_that_a_topology_allows() -> None:
    assert ring(8).allows(min_max(4, block=64))
    assert not ring(8).allows(qsgd(2))
    assert not ring(8).allows(sign())  # biased: no limit is known
    assert ring(1).noise_limit() == math.inf


def test_mistakes_are_told() -> None:
    with pytest.raises(OptionError, match="made for 8 ranks"):
        ring(8).of(4)
    with pytest.raises(OptionError, match=r"ring\(8\)"):
        ring().neighbours(0)
    with pytest.raises(OptionError, match="1 rank or more"):
        ring(0)
    with pytest.raises(OptionError, match="choose metropolis or uniform"):
        ring(8, weights="equal")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="there is no topology rings"):
        named_topology("rings")
    with pytest.raises(OptionError, match="not connected"):
        from_graph(networkx.empty_graph(3))
    with pytest.raises(OptionError, match="both directions"):
        from_graph(networkx.path_graph(3, create_using=networkx.DiGraph))
    with pytest.raises(OptionError, match="the ranks 0, 1, 2"):
        from_graph(networkx.relabel_nodes(networkx.path_graph(2), {0: 5}))
    with pytest.raises(OptionError, match="change with the rounds"):
        TOPOLOGIES["one_peer_exponential"](8).noise_limit()
