"""What is special about chunked Top-k and bin means: positions within chunks, codebooks, and damaged messages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from support.inputs import NAN, gaussian
from thinwire.codecs import bin_mean, chunked_top_k
from thinwire.rng import Draw


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 4095, 4096, 4097, 20_000])
@pytest.mark.parametrize(("ratio", "chunk"), [(0.015625, 4096), (0.1, 64), (1.0, 64), (0.001, 1024)])
def test_every_chunk_keeps_its_largest(numel: int, ratio: float, chunk: int) -> None:
    codec, x = chunked_top_k(ratio, chunk=chunk), gaussian(numel)
    sent = codec.decode(codec.encode(x))
    for first in range(0, numel, chunk):
        part, kept = x[first : first + chunk], sent[first : first + chunk]
        k = max(1, round(ratio * len(part)))
        assert int(kept.count_nonzero()) == k
        assert torch.equal(kept[kept != 0], part[kept != 0])
        assert float(part[kept == 0].abs().max() if k < len(part) else 0.0) <= float(part[kept != 0].abs().min())


def test_sparseloco_sends_the_bits_that_it_says() -> None:
    """64 of 4096 with 12 bits of position and 2 of value, and a codebook of 16 bytes for each 1024 values."""
    codec = tw.parse("ef:0.95|chunked_top_k:0.015625|bin_mean:2|all_gather").codec
    numel = 64 * 4096
    kept = 64 * 64
    assert codec.body_bytes(numel) == kept * 14 // 8 + kept // 1024 * 16
    assert 8 * codec.body_bytes(numel) / numel < 0.221


def test_values_that_are_not_finite_are_told_and_nothing_else() -> None:
    codec = chunked_top_k(0.1, chunk=64)
    for value in (NAN, math.inf, -math.inf):
        x = gaussian(300)
        x[[70, 299]] = value
        sent = codec.decode(codec.encode(x))
        assert sent.isnan().nonzero().view(-1).tolist() == [70, 299]
        assert not sent[sent.isfinite()].any()


def test_positions_from_damaged_bytes_are_refused() -> None:
    codec, x = chunked_top_k(0.1, chunk=64), gaussian(200)
    body = torch.zeros(codec.body_bytes(200), dtype=torch.uint8)
    codec.write(x, body, Draw().key(), codec.new_state())
    body[0], body[1] = body[1].clone(), body[0].clone()
    with pytest.raises(tw.MessageError, match="do not increase"):
        codec.positions_and_values(body, 200, Draw().key())


def test_packed_positions_are_those_that_are_sent() -> None:
    codec, x = chunked_top_k(0.05, chunk=256), gaussian(1000)
    found = codec.unpack_positions(codec.pack_positions(x), 1000)
    assert torch.equal(found, codec.decode_sparse(codec.encode(x))[0])


@pytest.mark.parametrize(
    ("options", "says"),
    [({"chunk": 100}, "a power of two"), ({"chunk": 32}, "64 to 65536"), ({"chunk": 1 << 17}, "64 to 65536")],
)
def test_chunks_of_other_lengths_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(tw.OptionError, match=says):
        chunked_top_k(0.1, **options)


# -------------------------------------------------------------------------------------------------------- bin means


def squares(x: Tensor) -> float:
    return float(x.double().square().sum())


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("block", [0, 64, 1024])
def test_each_bin_sends_its_mean(bits: int, block: int) -> None:
    codec, x = bin_mean(bits, block=block), gaussian(3000, 5) * 3 + 0.5
    sent = codec.decode(codec.encode(x))
    for part, kept in zip(torch.split(x, block or 3000), torch.split(sent, block or 3000), strict=True):
        values = sorted(set(kept.tolist()))
        assert len(values) <= 1 << bits
        for value in values:
            mean = float(part[kept == value].double().mean())
            assert value == pytest.approx(mean, rel=1e-6, abs=1e-7)
    lost = squares(x - sent)
    assert lost == pytest.approx(squares(x) - squares(sent), rel=1e-3)  # a projection
    assert lost < {2: 0.25, 3: 0.06, 4: 0.02}[bits] * squares(x - x.mean())


def test_few_different_values_are_exact() -> None:
    x = torch.tensor([-1.0, 1.0, 1.0, -1.0]).repeat(64)
    for block in (0, 64):
        assert torch.equal(bin_mean(2, block=block).decode(bin_mean(2, block=block).encode(x)), x)


def test_one_bad_element_spoils_its_block_alone() -> None:
    x = gaussian(256)
    x[100] = math.inf
    sent = bin_mean(2, block=64).decode(bin_mean(2, block=64).encode(x))
    assert sent.isnan().nonzero().view(-1).tolist() == list(range(64, 128))


# ------------------------------------------------------------------------------------------------- the median norm


@pytest.mark.parametrize("word", ["fp32", "top_k:1.0", "low_rank:8"])
def test_one_rank_cannot_dominate_the_mean(word: str) -> None:
    group = tw.LocalGroup(tw.parse(f"{word}|all_gather:median"), 3)
    given = [gaussian(64, seed).view(8, 8) for seed in range(3)]
    norms = [float(x.norm()) for x in given]
    middle = sorted(norms)[1]
    loud = [given[0], given[1], given[2] * 1e6]
    expected = sum(x * min(1.0, middle / norm) for x, norm in zip(given, norms, strict=True)) / 3
    torch.testing.assert_close(group.mean(given, 0), expected, rtol=1e-4, atol=1e-5)
    assert float(group.mean(loud, 1).norm()) <= sorted([norms[0], norms[1], norms[2] * 1e6])[1] * 1.001


def test_messages_of_equal_norm_are_as_without_clipping() -> None:
    one, other = (
        tw.LocalGroup(tw.parse(f"top_k:0.5|{exchange}"), 2) for exchange in ("all_gather:median", "all_gather")
    )
    x = gaussian(100)
    torch.testing.assert_close(one.mean([x, -x.flip(0)], 0), other.mean([x, -x.flip(0)], 0))


def test_clipping_needs_whole_messages() -> None:
    from thinwire.comm.local import LocalNetwork

    reducer = tw.Reducer("top_k:0.5|all_gather:median", group=LocalNetwork.alone())
    with pytest.raises(tw.ExchangeError, match="whole messages only"):
        reducer.reduce_scatter("w", gaussian(10))
