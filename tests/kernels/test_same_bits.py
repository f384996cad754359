"""The numba and the Triton body give the bits of the definition; Triton runs in its interpreter."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.errors import MessageError, OptionError
from thinwire.kernels import packed_bytes, reference
from thinwire.rng import Key

cpu = pytest.importorskip("thinwire.kernels.cpu", exc_type=ImportError)
gpu = pytest.importorskip("thinwire.kernels.gpu", exc_type=ImportError)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BODIES = ((cpu, "cpu"), (gpu, "cpu" if INTERPRETED else "cuda"))
INTERPRETABLE = 25_000  # elements; beyond that the interpreter is too slow
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy in the interpreter reports inf - inf and such

SIZES = (0, 1, 63, 64, 65, 1000, 1025, 3001)
LARGE = (2048, 2049, 4096 + 63, 20_000, 100_003)  # the tile of a Triton program is 2048
BLOCKS = (0, 64, 1024)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TINY = (0.0, -0.0, 1e-45, -1e-45, 1e-40, -1.1754944e-38, 1.1754944e-38)
BIG = (1.0, -1.0, 65504.0, -3e38, 3.4028235e38)
ODD = (float("inf"), float("-inf"), float("nan"))

few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 2**31)
sizes = st.sampled_from(SIZES)
blocks = st.sampled_from(BLOCKS)
dtypes = st.sampled_from(DTYPES)
words = st.integers(0, 2**32 - 1)
keys = st.builds(Key, words, words)
specials = st.sampled_from((TINY, TINY + BIG, TINY + BIG + ODD))


def mixed(numel: int, seed: int, special: tuple[float, ...] = TINY, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of many magnitudes, a fifth of them replaced by special values."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=draw) * 10.0 ** torch.randint(-3, 3, (numel,), generator=draw)
    values = torch.tensor(special)[torch.randint(len(special), (numel,), generator=draw)]
    return torch.where(torch.rand(numel, generator=draw) < 0.2, values, x).to(dtype)


def scales(numel: int, block: int, seed: int, special: tuple[float, ...]) -> Tensor:
    """One non-negative number per block."""
    return mixed(reference.blocks_of(numel, block), seed + 1, special).abs()


def random_codes(numel: int, bits: int, seed: int) -> Tensor:
    return torch.randint(1 << bits, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def assert_same(expected: Any, found: Any) -> None:
    """Equal types, shapes and bits; NaN matches any NaN."""
    if isinstance(expected, tuple):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        found = found.cpu()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        if expected.is_floating_point():
            assert torch.equal(expected.isnan(), found.isnan())
            expected, found = (
                expected.nan_to_num(0.0, torch.inf, -torch.inf),
                found.nan_to_num(0.0, torch.inf, -torch.inf),
            )
            assert torch.equal(expected.signbit(), found.signbit())
        assert torch.equal(expected, found)
    else:
        assert (type(found), found) == (type(expected), expected)


def check(name: str, *args: Any, **options: Any) -> Any:
    """Call all bodies on copies; results, and arguments changed in place, must agree. Returns the definition's."""
    ours = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    expected = getattr(reference, name)(*ours, **options)
    for body, device in BODIES if args[0].numel() <= INTERPRETABLE else BODIES[:1]:
        theirs = [arg.clone().to(device) if isinstance(arg, Tensor) else arg for arg in args]
        assert_same(expected, getattr(body, name)(*theirs, **options))
        assert_same(tuple(ours), tuple(theirs))
    return expected


def test_the_interpreter_is_on() -> None:
    kernel = gpu.gpu_quantize.pack_kernel
    interpreted = type(kernel).__name__ == "InterpretedFunction"
    assert interpreted == INTERPRETED, "triton was imported before conftest.py chose the interpreter"


def test_signatures_are_those_of_the_definition() -> None:
    for name, function in inspect.getmembers(reference, inspect.isfunction):
        if not name.startswith("_") and function.__module__ == reference.__name__:
            for body, _ in BODIES:
                assert inspect.signature(getattr(body, name)) == inspect.signature(function), name


@few
@given(sizes, keys)
def test_random_bits(numel: int, key: Key) -> None:
    for body, device in BODIES:
        assert_same(reference.random_bits(numel, key), body.random_bits(numel, key, device=device))


@pytest.mark.parametrize("bits", range(1, 9))
@settings(max_examples=4, deadline=None)
@given(sizes, seeds)
def test_pack_and_unpack(bits: int, numel: int, seed: int) -> None:
    codes = random_codes(numel, bits, seed)
    packed = check("pack", codes, bits=bits)
    assert_same(codes, check("unpack", packed, numel, bits=bits))


@pytest.mark.parametrize("bits", range(1, 9))
@settings(max_examples=8, deadline=None)
@given(sizes, seeds, blocks, dtypes, keys, specials, st.data())
def test_quantize(
    bits: int, numel: int, seed: int, block: int, dtype: torch.dtype, key: Key, special: tuple[float, ...], data: Any
) -> None:
    top = data.draw(st.integers(1, (1 << bits) - 1))
    offset = data.draw(st.integers(0, top))
    low, step = mixed(reference.blocks_of(numel, block), seed), scales(numel, block, seed, special)
    x = mixed(numel, seed, special, dtype)
    packed = check("quantize", x, low, step, bits=bits, top=top, offset=offset, block=block, key=key)
    check("dequantize_add", mixed(numel, seed, TINY), packed, low, step, bits=bits, offset=offset, block=block)


@few
@given(sizes, seeds, blocks, dtypes, keys, specials, st.integers(1, 127))
def test_exponential(
    numel: int, seed: int, block: int, dtype: torch.dtype, key: Key, special: tuple[float, ...], top: int
) -> None:
    scale = scales(numel, block, seed, special)
    x = mixed(numel, seed, special, dtype)
    codes = check("exponential_encode", x, scale, top=top, block=block, key=key)
    check("exponential_decode_add", mixed(numel, seed, TINY), codes, scale, top=top, block=block)
    check("exponential_add", codes, random_codes(numel, 8, seed), top=top, key=key)


def test_exponential_add_of_every_pair() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for left in every.chunk(4):  # 16,384 pairs each, which the interpreter still takes
        check("exponential_add", left.repeat(256), every.repeat_interleave(64), top=100, key=Key(7, 2**32 - 1))


@pytest.mark.parametrize("random", [0, 1, 2])
def test_exponential_add_at_the_smallest_random_numbers(random: int) -> None:
    """A gap of 32 rounds only if the random number is 0: solve the hash for the key that draws it at position 0."""
    wanted = random * pow(reference.MIX_2, -1, 1 << 32)
    key = Key(0, wanted & 0xFFFFFFFF)  # the position 0 and k0 = 0 hash to 0 before k1 comes in
    assert int(reference.random_bits(1, key)) == random
    for gap in (31, 32, 33, 34, 90):
        for sign in (0, 128):
            small = torch.tensor([1 + sign], dtype=torch.uint8)
            check("exponential_add", torch.tensor([1 + gap], dtype=torch.uint8), small, top=120, key=key)


@few
@given(sizes, seeds, st.sampled_from((0, 64, 192, 1024, 3008)), dtypes, specials)
def test_block_scales(numel: int, seed: int, block: int, dtype: torch.dtype, special: tuple[float, ...]) -> None:
    x = mixed(numel, seed, special, dtype)
    check("block_abs_max", x, block=block)
    check("block_min_max", x, block=block)
    expected = reference.block_square_sum(x, block=block)
    for body, device in BODIES:
        found = body.block_square_sum(x.to(device), block=block).cpu()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.allclose(found, expected, rtol=1e-6, atol=0.0, equal_nan=True)


@few
@given(st.sampled_from((*SIZES, 100, 200, 500)), seeds, dtypes, keys, specials)
def test_rotation(numel: int, seed: int, dtype: torch.dtype, key: Key, special: tuple[float, ...]) -> None:
    x = mixed(numel, seed, special, dtype)
    rotated = check("rotate", x, key=key)
    check("unrotate", rotated, numel, key=key)
    for body, device in ((reference, "cpu"), *BODIES):  # in place
        z = rotated.to(device, copy=True)
        assert body.rotate(z, key=key, out=z) is z
        assert_same(reference.rotate(rotated, key=key), z)
        assert_same(
            rotated if numel == 0 else reference.unrotate(z.cpu(), z.numel(), key=key),
            body.unrotate(z, z.numel(), key=key, out=z),
        )


@few
@given(st.sampled_from((*SIZES, 100, 200, 5000)), seeds, dtypes, keys, specials, st.sampled_from((1, 2, 3, 4)))
def test_rotated(numel: int, seed: int, dtype: torch.dtype, key: Key, special: tuple[float, ...], bits: int) -> None:
    """Two rotations, codewords and scales at once; blocks of zeros and blocks that are not finite among them."""
    x = mixed(numel, seed, special, dtype)
    x[1024:2048] = 0.0
    boundaries, codebook = (torch.linspace(-2, 2, (1 << bits) - end) for end in (1, 0))
    options: dict[str, Any] = {"keys": (key, key.fold(1)), "codebook": codebook, "bits": bits}
    scale = torch.empty(reference.blocks_of(numel, 1024))
    codes = torch.empty(packed_bytes(reference.rotated_numel(numel), bits), dtype=torch.uint8)
    made = []
    for body in (reference, *(body for body, _ in BODIES)):
        scale, codes = torch.full_like(scale, 7.0), torch.zeros_like(codes)
        body.rotated_encode(x, scale, codes, boundaries=boundaries, **options)
        out = mixed(numel, seed + 1)
        body.rotated_add(codes, scale, out, **options)
        put = mixed(numel, seed + 2)
        body.rotated_add(codes, scale, put, fresh=True, **options)
        onto_zeros = torch.zeros(numel)
        body.rotated_add(codes, scale, onto_zeros, **options)
        assert_same(onto_zeros, put)
        made.append((scale, codes, out))
    for found in made[1:]:
        assert_same(made[0], found)


@few
@given(sizes, seeds, blocks, dtypes, keys, specials, st.integers(2, 8))
def test_abs_max(
    numel: int, seed: int, block: int, dtype: torch.dtype, key: Key, special: tuple[float, ...], bits: int
) -> None:
    """Steps and codes at once; blocks of zeros and blocks that are not finite among them."""
    x = mixed(numel, seed, special, dtype)
    x[64:192] = 0.0
    options: dict[str, Any] = {"levels": (1 << (bits - 1)) - 1, "bits": bits, "block": block, "key": key}
    made = []
    for body in (reference, *(body for body, _ in BODIES)):
        step = torch.full((reference.blocks_of(numel, block),), 7.0)
        codes = torch.zeros(packed_bytes(numel, bits), dtype=torch.uint8)
        body.abs_max_encode(x, step, codes, **options)
        made.append((step, codes))
    for found in made[1:]:
        assert_same(made[0], found)


@few
@given(sizes, seeds, blocks, dtypes, specials, st.integers(1, 8))
def test_codebook(numel: int, seed: int, block: int, dtype: torch.dtype, special: tuple[float, ...], bits: int) -> None:
    scale = scales(numel, block, seed, special)
    boundaries = mixed((1 << bits) - 1, seed, BIG).sort().values
    packed = check("codebook_encode", mixed(numel, seed, special, dtype), scale, boundaries, bits=bits, block=block)
    check("codebook_decode", packed, numel, scale, mixed(1 << bits, seed), bits=bits, block=block)


thresholds = st.sampled_from((0.0, 1e-42, 0.5, 65504.0, 3.4e38))


@few
@given(sizes, seeds, dtypes, specials, thresholds, st.sampled_from((0, 1, 10, 700, 10_000)))
def test_selection(
    numel: int, seed: int, dtype: torch.dtype, special: tuple[float, ...], threshold: float, capacity: int
) -> None:
    x = mixed(numel, seed, special, dtype)
    check("threshold_count", x, threshold)
    check("select", x, threshold, capacity=capacity)
    memory = mixed(numel, seed + 1)
    chosen = check("select_ef", memory, x, threshold, capacity=capacity)
    check("scatter_add", memory, chosen.indices.flip(0), chosen.values)


@few
@given(sizes, seeds, st.sampled_from((TINY, TINY + BIG)), thresholds, st.integers(1, 900))
def test_keep_largest(numel: int, seed: int, special: tuple[float, ...], threshold: float, k: int) -> None:
    x = mixed(numel, seed, special)
    found = reference.select(x, threshold, capacity=numel)
    results = []
    for body, device in ((reference, "cpu"), *BODIES):
        memory = torch.zeros(numel, device=device)
        candidates = (found.values.to(device), found.indices.to(device))
        kept = body.keep_largest(*candidates, k=k, threshold=threshold, memory=memory)
        results.append((kept[0].cpu(), kept[1].cpu(), kept[2], memory.cpu()))
    for other in results[1:]:
        assert_same(results[0], other)
    values, indices, cut, memory = results[0]
    assert values.numel() == min(k, found.values.numel())
    whole = memory.clone()
    whole[indices.long()] += values
    expected = torch.zeros(numel)
    expected[found.indices.long()] = found.values
    assert torch.equal(whole, expected)  # what is not kept is back in the memory
    if 0 < values.numel() < found.values.numel():
        assert float(values.abs().min()) >= cut
        # 31 steps above the cut are ties; below the smallest normal number a step is always 2^-149.
        assert float(memory.abs().max()) <= max(cut * (1 + 2**-16), cut + 31 * 2.0**-149)


@few
@given(sizes, seeds, dtypes, specials)
def test_moments(numel: int, seed: int, dtype: torch.dtype, special: tuple[float, ...]) -> None:
    x = mixed(numel, seed, special, dtype)
    check("all_finite", x)
    expected = reference.moments(x)
    room = 1e-6 * float(x.to(torch.float64).abs().nan_to_num(0.0, 0.0).sum())  # a sum may cancel
    for body, device in BODIES:
        found = body.moments(x.to(device))
        assert found.squares == pytest.approx(expected.squares, rel=1e-6, abs=0.0, nan_ok=True)
        assert found.max_abs == pytest.approx(expected.max_abs, rel=0.0, abs=0.0, nan_ok=True)
        assert found.total == pytest.approx(expected.total, rel=0.0, abs=room, nan_ok=True)


@few
@given(sizes, seeds)
def test_checksum(words: int, seed: int) -> None:
    check("checksum", random_codes(4 * words, 8, seed))


@pytest.mark.parametrize("numel", LARGE)
def test_larger_tensors(numel: int) -> None:
    x, key = mixed(numel, numel), Key(2**32 - 5, 2**31)
    for block in BLOCKS:
        low, step = mixed(reference.blocks_of(numel, block), 1), scales(numel, block, 2, TINY)
        packed = check("quantize", x, low, step, bits=7, top=126, offset=63, block=block, key=key)
        check("dequantize_add", x, packed, low, step, bits=7, offset=63, block=block)
        check("block_min_max", x, block=block)
        codes = check("exponential_encode", x, step, top=30, block=block, key=key)
        check("exponential_decode_add", x, codes, step, top=30, block=block)
    check("unrotate", check("rotate", x, key=key), numel, key=key)
    for capacity in (0, numel // 4, numel):
        chosen = check("select_ef", x, x, 0.01, capacity=capacity)
        check("scatter_add", x, chosen.indices, chosen.values)
    assert cpu.moments(x).squares == pytest.approx(reference.moments(x).squares, rel=1e-6)
    check("checksum", random_codes(4 * numel, 8, 3))


def test_tensors_with_gaps_or_another_dtype() -> None:
    """Inputs are reshaped and converted as in the definition, and so is what is changed in place."""
    key, step, low = Key(1, 2), torch.full((1,), 0.25), torch.zeros(1)
    x = mixed(300, 1, dtype=torch.bfloat16).view(20, 15).t()
    packed = check("quantize", x, low, step, bits=4, top=15, offset=7, block=0, key=key)
    chosen = check("select", x, 0.1, capacity=20)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        results = []
        for body, device in ((reference, "cpu"), *BODIES):
            out = torch.ones(600, dtype=dtype)[::2].to(device)
            body.dequantize_add(out, packed.to(device), low.to(device), step.to(device), bits=4, offset=7, block=0)
            body.scatter_add(out, chosen.indices.to(device), chosen.values.to(device, dtype))
            body.select_ef(out, x.to(device), 1.0, capacity=30)
            results.append(out.cpu())
        assert_same(results[0], results[1])
        assert_same(results[0], results[2])


@pytest.mark.parametrize(("body", "device"), BODIES)
def test_buffers_too_short_for_a_kernel_are_refused(body: Any, device: str) -> None:
    x, one = torch.zeros(65, device=device), torch.ones(1, device=device)
    with pytest.raises(MessageError):
        body.unpack(torch.zeros(15, dtype=torch.uint8, device=device), 65, bits=1)
    with pytest.raises(OptionError):
        body.quantize(x, one, one, bits=1, top=1, offset=0, block=64, key=Key(0, 0))
    with pytest.raises(OptionError):
        body.exponential_encode(x, one, top=7, block=96, key=Key(0, 0))
    with pytest.raises(OptionError):
        body.pack(torch.zeros(8, dtype=torch.uint8, device=device), bits=9)
    with pytest.raises(OptionError):
        body.select_ef(x, one, 0.5, capacity=1)
    with pytest.raises(OptionError):
        body.unrotate(x, 65, key=Key(0, 0))


def test_quantize_writes_where_it_is_told() -> None:
    x, one, zero = mixed(1000, 1), torch.ones(1), torch.zeros(1)
    options: dict[str, Any] = {"bits": 4, "top": 14, "offset": 7, "block": 0, "key": Key(1, 2)}
    expected = reference.quantize(x, zero, one, **options)
    for body, device in ((reference, "cpu"), *BODIES):
        out = torch.zeros_like(expected, device=device)
        given_back = body.quantize(x.to(device), zero.to(device), one.to(device), **options, out=out)
        assert given_back.data_ptr() == out.data_ptr()
        assert_same(expected, out)
    with pytest.raises(OptionError):
        cpu.quantize(x, zero, one, **options, out=torch.zeros(3, dtype=torch.uint8))


def test_a_position_outside_is_refused() -> None:
    for position in (-1, 10):
        with pytest.raises(OptionError):
            cpu.scatter_add(torch.zeros(10), torch.tensor([position], dtype=torch.int32), torch.ones(1))
