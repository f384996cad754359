"""Sparsifiers against brute force: what is kept, what is remembered, and what happens to unusual numbers."""

import math
from collections.abc import Callable
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from thinwire import theory
from thinwire.codecs import bf16, dgc_k, fp16, fp32, gaussian_k, natural, qsgd, random_k, sparsify, top_k, trimmed_k
from thinwire.codecs.base import Codec
from thinwire.codecs.frames import blank_frame, close_frame
from thinwire.codecs.indices import INDEX_CODES
from thinwire.codecs.select import largest, sampled_threshold
from thinwire.codecs.sparse import SparseCodec, Sparsifier
from thinwire.codecs.sparsify import GaussianK, RandomK, random_positions
from thinwire.errors import MessageError, OptionError
from thinwire.exchange import all_reduce
from thinwire.exchange.request import Part, Request
from thinwire.memory import error_feedback
from thinwire.rng import Draw

Make = Callable[..., Sparsifier]
SELECTORS: list[Make] = [top_k, gaussian_k, dgc_k, trimmed_k]
ALL: list[Callable[..., SparseCodec]] = [*SELECTORS, random_k]
EXACT: list[Make] = [top_k, trimmed_k]


def reframed(codec: Codec, body: Tensor, numel: int) -> Tensor:
    """A message with a valid header around any body: what a hostile sender could make."""
    message, place = blank_frame(codec, numel, None, body.device)
    place.copy_(body[: place.numel()])
    return close_frame(codec, message, place, numel, Draw().key())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=generator(seed))


def laplace(numel: int, seed: int = 0) -> Tensor:
    uniform = torch.rand(numel, generator=generator(seed)) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.4999999))


def student_t(numel: int, seed: int = 0) -> Tensor:
    squares = torch.randn(3, numel, generator=generator(seed + 1)).square().sum(0)
    return gaussian(numel, seed) / (squares / 3).sqrt()


def uniform(numel: int, seed: int = 0) -> Tensor:
    return torch.rand(numel, generator=generator(seed)) * 2 - 1


def equal_magnitudes(numel: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2, (numel,), generator=generator(seed)) * 2.0 - 1.0


def few_levels(numel: int, seed: int = 0) -> Tensor:
    return torch.randint(-3, 4, (numel,), generator=generator(seed)).float()


def mostly_zero(numel: int, seed: int = 0) -> Tensor:
    return gaussian(numel, seed) * (torch.rand(numel, generator=generator(seed + 1)) < 0.003)


def shifted(numel: int, seed: int = 0) -> Tensor:
    return gaussian(numel, seed) - 3.0


BELLS = [gaussian, laplace, student_t, uniform]
DATA = [*BELLS, equal_magnitudes, few_levels, mostly_zero, shifted]


def largest_by_sorting(x: Tensor, k: int) -> Tensor:
    """Positions of the k largest magnitudes, of equal ones the first: a stable sort."""
    return x.abs().sort(descending=True, stable=True).indices[:k].sort().values.to(torch.int32)


def energy(x: Tensor) -> float:
    return float(x.double().square().sum())


def compensated(codec: Codec, gradient: Tensor, residual: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    """(message, what was to be sent, what is left of it)."""
    original = residual + gradient
    rest, before = gradient.to(torch.float32, copy=True), residual.clone()
    message = codec.encode_compensated(rest, residual, **options)  # type: ignore[arg-type]
    assert torch.equal(residual, before)
    return message, original, rest


def kept_by_a_memory(codec: Codec, gradient: Tensor, residual: Tensor) -> Tensor:
    """What error feedback remembers after one more message."""
    memory = error_feedback().start()
    memory.put("w", {"residual": residual.clone()})
    memory.encode(codec, gradient, name="w")
    return memory.residual("w")


# ------------------------------------------------------------------------------------------------- what is selected


@pytest.mark.parametrize("make", EXACT)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("numel", [1, 2, 65, 4097, 100_003])
def test_exact_selectors_agree_with_sorting(make: Make, data: Callable[..., Tensor], numel: int) -> None:
    x = data(numel)
    for ratio in (0.001, 0.01, 0.3, 1.0):
        codec = make(ratio)
        indices, values = codec.decode_sparse(codec.encode(x))
        expected = largest_by_sorting(x, codec.k(numel))
        assert torch.equal(indices, expected)
        assert torch.equal(values, x[expected.long()])


def test_the_sampled_way_to_the_largest_is_exact_on_misleading_samples() -> None:
    x = gaussian(200_000)
    x[::63] *= 1000.0  # exactly what is sampled
    assert torch.equal(largest(x, 500).indices, largest_by_sorting(x, 500))
    x = gaussian(200_000)
    x[::63] = 0.0
    assert torch.equal(largest(x, 500).indices, largest_by_sorting(x, 500))


def published_gaussian_k(x: Tensor, ratio: float, k: int) -> Tensor:
    """The positions of section 1.1: mean, unbiased std, two-sided quantile, three evaluations, the last one counts."""
    wide = x.double()
    threshold = float(wide.mean() - NormalDist().inv_cdf(ratio / 2) * wide.std())
    for _ in range(3):
        found = (x.abs() > torch.tensor(threshold, dtype=torch.float32)).nonzero().view(-1)
        if found.numel() < 2 * k / 3:
            threshold *= 0.5
        elif found.numel() > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return found


@pytest.mark.parametrize("data", [*BELLS, equal_magnitudes])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.05])
def test_gaussian_k_is_the_published_rule_within_its_capacity(data: Callable[..., Tensor], ratio: float) -> None:
    x = data(60_000)
    codec = gaussian_k(ratio)
    indices, values = codec.decode_sparse(codec.encode(x))
    published = published_gaussian_k(x, ratio, codec.k(x.numel()))
    if published.numel() <= codec.capacity(x.numel()):
        assert torch.equal(indices.long(), published)
    else:
        best = largest_by_sorting(x[published], codec.capacity(x.numel()))
        assert torch.equal(indices.long(), published[best.long()])
    assert torch.equal(values, x[indices.long()])


def test_gaussian_k_counts_its_passes() -> None:
    codec = GaussianK(0.01)
    state = codec.new_state()
    codec.encode(gaussian(50_000), state=state)
    assert state["passes"] == 1
    codec.encode(uniform(50_000), state=state)
    assert state["passes"] == 4


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("numel", [1, 65, 4097, 100_003])
def test_dgc_k_keeps_the_largest_and_nearly_k_of_them(data: Callable[..., Tensor], numel: int) -> None:
    x = data(numel)
    for ratio in (0.001, 0.01, 0.3):
        for step in range(3):
            codec = dgc_k(ratio)
            indices, values = codec.decode_sparse(codec.encode(x, draw=Draw(step=step)))
            k = codec.k(numel)
            assert indices.numel() <= k
            assert indices.numel() >= min(0.8 * k, int(x.count_nonzero()))
            assert torch.equal(indices, largest_by_sorting(x, indices.numel()))
            assert torch.equal(values, x[indices.long()])


def test_dgc_k_falls_back_to_the_exact_choice_when_the_sample_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsify, "sampled_threshold", lambda *_, **__: 1e30)
    x = gaussian(10_000)
    indices, _ = dgc_k(0.01).decode_sparse(dgc_k(0.01).encode(x))
    assert torch.equal(indices, largest_by_sorting(x, 100))


def test_sampled_threshold_is_exceeded_by_about_k() -> None:
    x = laplace(500_000)
    count = int((x.abs() > sampled_threshold(x, 5000, stride=17, start=3)).sum())
    assert 4000 < count < 6000
    assert int((equal_magnitudes(1000).abs() > sampled_threshold(equal_magnitudes(1000), 10, stride=3)).sum()) == 1000


# ------------------------------------------------------------------------------------------------------------ facts


@pytest.mark.parametrize("make", SELECTORS)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("values", [fp32(), bf16(), natural()])
def test_contraction_holds_for_any_data(make: Make, data: Callable[..., Tensor], values: Codec) -> None:
    for numel in (1, 64, 20_011):
        x = data(numel)
        for ratio in (0.01, 0.25):
            codec = make(ratio, values=values)
            delta = codec.delta(numel)
            assert delta is not None
            error = energy(codec.decode(codec.encode(x)) - x)
            assert error <= (1 - delta) * energy(x) * (1 + 1e-6)


@pytest.mark.parametrize("make", EXACT)
@pytest.mark.parametrize("data", BELLS)
def test_contraction_is_squared_on_bell_shaped_data(make: Make, data: Callable[..., Tensor]) -> None:
    x = data(50_000)
    for ratio in (0.001, 0.01, 0.05, 0.3):
        codec = make(ratio)
        bound = 1 - theory.top_k_bell(x.numel(), codec.k(x.numel()))
        assert bound == pytest.approx((1 - codec.k(x.numel()) / x.numel()) ** 2)
        assert energy(codec.decode(codec.encode(x)) - x) <= bound * energy(x)


def test_the_squared_contraction_needs_a_bell() -> None:
    x = equal_magnitudes(10_000)
    error = energy(top_k(0.1).decode(top_k(0.1).encode(x)) - x) / energy(x)
    assert error == pytest.approx(0.9)


def test_facts_combine_selection_and_values() -> None:
    assert top_k(0.01).delta(1000) == pytest.approx(0.01)
    assert top_k(0.01, values=bf16()).delta(1000) == pytest.approx(0.01 * theory.rounding(7))
    assert top_k(0.01, values=natural()).delta(1000) == pytest.approx(0.01 * 7 / 8)
    assert top_k(0.5, values=qsgd(1)).delta(1000) is None  # a random sign of 500 values has omega 499
    assert gaussian_k(0.01).delta(1000) == 0.0
    assert dgc_k(0.01).delta(1000) == pytest.approx(0.008)
    assert random_k(0.01).omega(1000) == pytest.approx(99)
    assert random_k(0.01, values=natural()).omega(1000) == pytest.approx(100 * 9 / 8 - 1)
    assert random_k(0.01, values=bf16()).omega(1000) is None
    assert random_k(0.01).delta(1000) is None
    assert random_k(0.01, scaled=False).delta(1000) == pytest.approx(0.01)
    assert all(make(0.1).sparse and not make(0.1).unbiased and make(0.1).sum_dtype is None for make in SELECTORS)
    assert random_k(0.1).sparse
    assert [random_k(0.1, scaled=s).unbiased for s in (True, False)] == [True, False]
    assert [random_k(0.1, shared=s).sum_dtype for s in (True, False)] == [torch.float32, None]
    assert random_k(0.1, values=bf16()).sum_dtype == torch.bfloat16
    assert random_k(0.1, values=natural()).sum_dtype is None


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("numel", [1, 2, 63, 64, 65, 1000, 4097, 100_003])
def test_wire_bytes_are_the_real_size(make: Callable[..., SparseCodec], numel: int) -> None:
    x = gaussian(numel)
    for ratio in (0.001, 0.01, 0.1, 0.5, 1.0):
        for values in (fp32(), bf16(), qsgd(3)):
            codec = make(ratio, values=values)
            message = codec.encode(x)
            assert message.numel() == codec.wire_bytes(numel)
            assert codec.encode_compensated(x.clone(), torch.zeros(numel)).numel() == codec.wire_bytes(numel)


@pytest.mark.parametrize("code", INDEX_CODES)
def test_every_index_code_carries_the_same(code: str) -> None:
    x = gaussian(70_001)
    codec = top_k(0.01, indices=code)
    message = codec.encode(x)
    assert message.numel() == codec.wire_bytes(x.numel())
    assert torch.equal(codec.decode(message), top_k(0.01).decode(top_k(0.01).encode(x)))


def test_the_recipe_words() -> None:
    assert top_k(0.01, values=bf16()).spec() == "top_k:0.01|bf16"
    assert trimmed_k(0.01, eps=0.1, indices="u16").text() == "trimmed_k:0.01,indices=u16,eps=0.1"
    assert repr(random_k(0.1, scaled=False)) == "random_k(0.1, scaled=False)"


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("make", SELECTORS)
@pytest.mark.parametrize("values", [fp32(), bf16(), fp16()])
@pytest.mark.parametrize("data", [laplace, equal_magnitudes, mostly_zero])
def test_original_is_sent_plus_remembered(make: Make, values: Codec, data: Callable[..., Tensor]) -> None:
    codec = make(0.01, values=values)
    memory = torch.zeros(40_009)
    state = codec.new_state()
    for step in range(6):
        draw = Draw(step=step)
        expected = codec.encode(memory + data(40_009, step), draw=draw)
        message, original, memory = compensated(codec, data(40_009, step), memory, draw=draw, state=state)
        assert torch.equal(message, expected)
        assert torch.equal(codec.decode(message) + memory, original)


@pytest.mark.parametrize("make", SELECTORS)
def test_nearly_nothing_is_lost_with_quantised_values(make: Make) -> None:
    codec = make(0.05, values=qsgd(4, block=64))
    message, original, memory = compensated(codec, laplace(5000), laplace(5000, 1), draw=Draw(step=3))
    assert torch.equal(message, codec.encode(original, draw=Draw(step=3)))
    assert torch.allclose(codec.decode(message) + memory, original, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("values", [fp32(), bf16()])
def test_random_k_remembers_what_it_did_not_send(scaled: bool, values: Codec) -> None:
    codec = random_k(0.1, scaled=scaled, values=values)
    message, original, memory = compensated(codec, gaussian(5000), gaussian(5000, 1), draw=Draw(step=3, rank=2))
    assert torch.equal(message, codec.encode(original, draw=Draw(step=3)))
    if scaled:
        assert torch.allclose(codec.decode(message) + memory, original, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(codec.decode(message) + memory, original)


@pytest.mark.parametrize("make", ALL)
def test_shapes_layouts_and_dtypes(make: Callable[..., SparseCodec]) -> None:
    codec = make(0.1, values=bf16())
    gradient = gaussian(2 * 3 * 8 * 5).view(2, 3, 8, 5).to(torch.bfloat16).to(memory_format=torch.channels_last)
    memory = gaussian(240, 1).view(2, 3, 8, 5).to(memory_format=torch.channels_last)
    message, original, kept = compensated(codec, gradient, memory)
    assert torch.equal(message, codec.encode(original))
    sent = codec.decode(message, shape=(2, 3, 8, 5))
    assert torch.allclose(sent + kept, original, rtol=1e-5, atol=1e-5)
    empty = torch.zeros(0)
    assert codec.decode(codec.encode(empty)).shape == (0,)
    assert codec.encode_compensated(empty, empty.clone()).numel() == codec.wire_bytes(0)
    assert [part.numel() for part in codec.decode_sparse(codec.encode(empty))] == [0, 0]


# -------------------------------------------------------------------------------------------------- unusual numbers


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("numel", [1, 2, 1000])
def test_zeros_and_constants(make: Callable[..., SparseCodec], numel: int) -> None:
    zeros = torch.zeros(numel)
    assert torch.equal(make(0.1).decode(make(0.1).encode(zeros)), zeros)
    for constant in (2.5, -2.5):
        codec = make(0.1) if make is not random_k else make(0.1, scaled=False)
        decoded = codec.decode(codec.encode(torch.full((numel,), constant)))
        sent = int(decoded.count_nonzero())
        assert 1 <= sent <= codec.capacity(numel)
        assert float(decoded.sum()) == sent * constant


@pytest.mark.parametrize("make", SELECTORS)
def test_denormals_are_kept_and_remembered(make: Make) -> None:
    x = gaussian(3000) * 1e-42
    assert x.count_nonzero() > 1000
    message, original, memory = compensated(make(0.05), x, torch.zeros(3000))
    assert torch.equal(make(0.05).decode(message) + memory, original)
    if make in EXACT:
        assert torch.equal(make(0.05).decode_sparse(message)[0], largest_by_sorting(x, 150))


@pytest.mark.parametrize("make", SELECTORS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("values", [fp32(), fp16(), bf16(), qsgd(4), natural()])
@pytest.mark.parametrize("numel", [1, 500, 70_001])
def test_non_finite_elements_travel(make: Make, value: float, values: Codec, numel: int) -> None:
    codec = make(0.01, values=values)
    for bad in ([0], [numel - 1], list(range(numel // 2, numel))):
        x = gaussian(numel)
        x[bad] = value
        indices, sent = codec.decode_sparse(codec.encode(x))
        assert indices.tolist() == bad[: codec.capacity(numel)]
        assert bool(sent.isnan().all())
        residual = gaussian(numel, 1)
        message, _, _ = compensated(codec, x, residual)
        assert codec.decode_sparse(message)[0].tolist() == indices.tolist()
        assert torch.equal(kept_by_a_memory(codec, x, residual), residual)


def test_a_sum_that_overflows_is_sent_and_leaves_the_memory_as_it_was() -> None:
    huge = torch.full((100,), 3e38)
    for make in SELECTORS:
        message, _, _ = compensated(make(0.1), huge, huge)
        assert bool(make(0.1).decode(message).isnan().any())
        assert torch.equal(kept_by_a_memory(make(0.1), huge, huge), huge)


def test_huge_finite_elements_are_sent_as_they_are() -> None:
    x = gaussian(1000) * 1e37
    for make in ALL:
        codec = make(0.01) if make is not random_k else make(0.01, scaled=False)
        message, original, memory = compensated(codec, x, torch.zeros(1000))
        assert torch.equal(codec.decode(message) + memory, original)


def test_random_k_sends_nan_for_a_non_finite_element_it_does_not_keep() -> None:
    x = gaussian(1000)
    codec = random_k(0.01)
    kept, _ = codec.decode_sparse(codec.encode(x))
    x[next(i for i in range(1000) if i not in kept.tolist())] = math.inf
    assert bool(codec.decode_sparse(codec.encode(x))[1].isnan().all())
    assert bool(next(codec.rounds(request_of(x, Draw()), 1)).tensor.isnan().all())
    residual = gaussian(1000, 1)
    assert torch.equal(kept_by_a_memory(codec, x, residual), residual)


# ----------------------------------------------------------------------------------------------------------- random


@pytest.mark.parametrize(("numel", "k"), [(10, 3), (50, 25), (4096, 400), (4097, 400), (5000, 100), (9000, 3000)])
def test_random_positions_are_distinct_and_even(numel: int, k: int) -> None:
    draws = 400
    hits = torch.zeros(numel)
    for step in range(draws):
        positions = random_positions(numel, k, Draw(step=step).key())
        assert positions.dtype == torch.int32
        assert positions.numel() == k
        assert bool((positions[1:] > positions[:-1]).all())
        assert positions[0] >= 0
        assert positions[-1] < numel
        hits[positions.long()] += 1
    share = k / numel
    # Each hit count is binomial; the sum of their squared deviations in units of the variance is about numel.
    chi_square = float(((hits - draws * share) ** 2).sum()) / (draws * share * (1 - share))
    assert abs(chi_square - numel) < 6 * math.sqrt(2 * numel) + 6


def test_random_positions_are_pairwise_independent() -> None:
    numel, k, draws = 5000, 2500, 300
    kept = torch.zeros(draws, numel)
    for step in range(draws):
        kept[step, random_positions(numel, k, Draw(step=step).key()).long()] = 1.0
    centred = kept - 0.5
    for lag in (1, 2, 64, 4096 - 2048, 904):
        correlation = float((centred[:, :-lag] * centred[:, lag:]).mean()) / 0.25
        assert abs(correlation) < 0.006  # five standard deviations


@pytest.mark.parametrize("numel", [64, 5000])
def test_random_k_is_unbiased_with_the_stated_variance(numel: int) -> None:
    codec, x, draws = random_k(0.25), laplace(numel), 300
    decoded = torch.stack([codec.decode(codec.encode(x, draw=Draw(step=step))) for step in range(draws)])
    omega = codec.omega(numel)
    assert omega is not None
    assert omega == pytest.approx(3)
    variance = (decoded - x).square().sum(1).mean() / x.square().sum()
    assert float(variance) == pytest.approx(omega, rel=0.05)
    deviation = (decoded.mean(0) - x).abs() / (x.abs() * math.sqrt(omega / draws)).clamp(min=1e-9)
    assert float(deviation.max()) < 6
    unscaled = random_k(0.25, scaled=False)
    error = sum(energy(unscaled.decode(unscaled.encode(x, draw=Draw(step=i))) - x) for i in range(100)) / 100
    assert error / energy(x) == pytest.approx(0.75, rel=0.1)


def request_of(x: Tensor, draw: Draw) -> Request:
    return Request(x.clone(), x[:0], [Part("w", tuple(x.shape), 0, x.numel())], draw, {})


def test_ranks_share_positions_and_sums_equal_sums_of_messages() -> None:
    n = 4  # shares of a power of two ranks are rounded as the values themselves
    for values in (fp32(), bf16()):
        codec = RandomK(0.1, values=values)
        ranks = [(gaussian(3000, rank), Draw(step=5, stream="w", rank=rank)) for rank in range(n)]
        messages = [codec.encode(x, draw=draw) for x, draw in ranks]
        positions = [codec.decode_sparse(message)[0] for message in messages]
        assert all(torch.equal(p, positions[0]) for p in positions)
        rounds = [codec.rounds(request_of(x, draw), n) for x, draw in ranks]
        sent = [next(one).tensor for one in rounds]
        assert all(share.dtype == codec.sum_dtype and share.numel() == codec.k(3000) for share in sent)
        total = torch.stack([share.to(torch.float32) for share in sent]).sum(0)
        for one in rounds:
            with pytest.raises(StopIteration) as end:
                one.send(total)
            mean, finite = end.value.value
            assert finite is True
            assert torch.allclose(n * mean, torch.stack([codec.decode(message) for message in messages]).sum(0))
    alone = RandomK(0.1, shared=False)
    first, second = (alone.decode_sparse(alone.encode(x, draw=draw))[0] for x, draw in ranks[:2])
    assert not torch.equal(first, second)
    assert alone.sum_dtype is None
    assert all_reduce().accepts(alone) == alone.not_summable()
    assert "write random_k:0.1, or use all_gather" in alone.not_summable()


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("make", ALL)
def test_bad_options_are_refused_when_built(make: Callable[..., SparseCodec]) -> None:
    for ratio in (0.0, -0.1, 1.5, math.nan, "0.1"):
        with pytest.raises(OptionError, match="ratio"):
            make(ratio)
    with pytest.raises(OptionError, match="lower the ratio"):
        make(0.1, values=top_k(0.1))


def test_bad_index_codes_and_steps_are_refused() -> None:
    with pytest.raises(OptionError, match="auto, int32"):
        top_k(0.1, indices="golomb")
    for eps in (0.0, 1.0, 1e-9):
        with pytest.raises(OptionError, match=r"use 0\.2"):
            trimmed_k(0.1, eps=eps)


@pytest.mark.parametrize("make", ALL)
def test_damaged_bodies_are_refused_or_sparse(make: Callable[..., SparseCodec]) -> None:
    codec = make(0.02)
    numel = 3000
    size = codec.body_bytes(numel)
    assert size < 2**12
    for seed in range(60):
        body = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator(seed))
        if make is not random_k and seed % 2:  # a believable count, so that the positions are reached
            body[:4] = torch.tensor([seed % codec.capacity(numel), 0, 0, 0], dtype=torch.uint8)
        try:
            decoded = codec.decode(reframed(codec, body, numel))
        except MessageError:
            continue
        assert int((decoded != 0).sum()) <= codec.capacity(numel)


def test_more_values_than_fit_are_refused() -> None:
    codec = top_k(0.01)
    body = codec.encode(gaussian(1000))[32:].clone()
    body[0] = 11
    with pytest.raises(MessageError, match="at most 10"):
        codec.decode(reframed(codec, body, 1000))
    with pytest.raises(MessageError, match="cut short"):
        codec.decode(codec.encode(gaussian(1000))[:-4])


def test_sparse_decoding_refuses_another_length() -> None:
    codec = top_k(0.1)
    message = codec.encode(gaussian(100))
    assert codec.decode_sparse(message, numel=100)[0].numel() == 10
    with pytest.raises(MessageError, match="not the 99"):
        codec.decode_sparse(message, numel=99)
