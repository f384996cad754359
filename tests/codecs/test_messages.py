"""Messages of every codec: exact size, faithful round trip, and bytes that are no message end in `MessageError`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire import Draw, MessageError, ThinwireError, kernels
from thinwire.codecs import Codec
from thinwire.codecs.frames import HEADER, HEADER_BYTES, blank_frame, close_frame, padded
from thinwire.codecs.indices import INDEX_CODES
from thinwire.codecs.sparse import SparseCodec

Shape = tuple[int, ...] | None
Case = tuple[Codec, Shape]

DENSE: list[Codec] = [
    tw.codecs.fp32(),
    tw.codecs.fp16(),
    tw.codecs.bf16(),
    tw.codecs.fp8(),
    tw.codecs.fp8(0),
    *(tw.codecs.qsgd(bits, block=64 * (bits % 2)) for bits in range(1, 9)),
    tw.codecs.terngrad(),
    tw.codecs.terngrad(64),
    tw.codecs.natural(),
    *(tw.codecs.min_max(bits, block=64 * (bits % 3)) for bits in (2, 3, 5, 8)),
    *(tw.codecs.abs_max(bits) for bits in (2, 4, 7)),
    tw.codecs.sign(),
    tw.codecs.sign(64),
    tw.codecs.global_qsgd(),
    tw.codecs.global_qsgd(3, norm="l2", block=64),
    tw.codecs.global_qsgd(dither="exponential"),
    tw.codecs.global_qsgd(4, dither="exponential", norm="l2", block=64),
    *(tw.codecs.rotated(bits) for bits in (1, 2, 3, 4)),
    tw.codecs.low_rank(2),
    tw.codecs.bin_mean(2),
]
SPARSE: list[SparseCodec] = [
    *(tw.codecs.top_k(0.1, indices=code) for code in INDEX_CODES),
    tw.codecs.top_k(0.2, values=tw.codecs.bf16()),
    tw.codecs.top_k(0.2, values=tw.codecs.abs_max(4), indices="elias_fano"),
    tw.codecs.gaussian_k(0.1, values=tw.codecs.bf16(), indices="u16"),
    tw.codecs.dgc_k(0.1, values=tw.codecs.qsgd(4)),
    tw.codecs.trimmed_k(0.3, values=tw.codecs.fp16(), indices="packed"),
    tw.codecs.threshold_k(0.1),
    tw.codecs.threshold_k(0.1, values=tw.codecs.bf16(), indices="bitmap"),
    tw.codecs.threshold_k(0.1, values=tw.codecs.abs_max(4), indices="packed"),
    tw.codecs.chunked_top_k(0.1, chunk=64),
    tw.codecs.chunked_top_k(1 / 64, values=tw.codecs.bin_mean(2)),
    tw.codecs.random_k(0.1),
    tw.codecs.random_k(0.2, scaled=False, shared=False, values=tw.codecs.bf16()),
    tw.codecs.random_k(0.2, values=tw.codecs.natural()),
]
MATRICES: list[Codec] = [
    tw.codecs.low_rank(1),
    tw.codecs.low_rank(1, factors=tw.codecs.bf16()),
    tw.codecs.low_rank(2, iterations=2),
]
CODECS: list[Codec] = [*DENSE, *SPARSE]
# Every codec on a flat tensor of 41 elements, and low_rank on a matrix of 5 x 8, which it really factors.
CASES: list[Case] = [*((codec, None) for codec in CODECS), *((codec, (5, 8)) for codec in MATRICES)]
SIZES = (0, 1, 2, 63, 64, 65, 127, 1000, 4097)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec())
by_case = pytest.mark.parametrize(("codec", "shape"), CASES, ids=lambda part: getattr(part, "spec", lambda: part)())


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(shape: int | tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def noise(size: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator(seed))


def small(codec: Codec, shape: Shape) -> Tensor:
    """A valid message of about forty elements."""
    return codec.encode(gaussian(shape or 41), draw=Draw(seed=5, step=3))


def framed(codec: Codec, body: Tensor, numel: int, shape: Shape = None) -> Tensor:
    """A valid header around any body: what a hostile sender could make."""
    message, place = blank_frame(codec, numel, shape, body.device)
    place.copy_(body)
    return close_frame(codec, message, place, numel, Draw().key())


def forged(codec: Codec, *, numel: int, body_bytes: int, size: int | None = None) -> Tensor:
    """A header that says whatever one likes, over zeros; its checksum is right."""
    header = HEADER.pack(b"tw01", codec.fingerprint(), numel, 7, 0, body_bytes % (1 << 32))
    message = torch.zeros(HEADER_BYTES + padded(body_bytes) if size is None else size, dtype=torch.uint8)
    message[:HEADER_BYTES] = torch.tensor(list(header), dtype=torch.uint8)
    checksum = kernels.checksum(message).to_bytes(4, "little")
    message[24:28] = torch.tensor(list(checksum), dtype=torch.uint8)
    return message


def same(a: Tensor, b: Tensor) -> bool:
    """Equal where both are numbers, and NaN in the same places."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def assert_refused(codec: Codec, message: Tensor, shape: Shape) -> None:
    """By every door: decode, add (which must leave `out` as it was) and, where there is one, decode_sparse."""
    numel = 41 if shape is None else math.prod(shape)
    out = torch.ones(numel)
    with pytest.raises(MessageError):
        codec.decode(message, shape=shape)
    with pytest.raises(MessageError):
        codec.add(message, out, shape=shape)
    assert torch.equal(out, torch.ones(numel))
    if isinstance(codec, SparseCodec):
        with pytest.raises(MessageError):
            codec.decode_sparse(message)


# -------------------------------------------------------------------------------------------- round trip and size


def test_the_list_holds_every_codec() -> None:
    made = {type(codec) for codec, _ in CASES}
    public = {getattr(tw.codecs, name) for name in tw.codecs.__all__ if isinstance(getattr(tw.codecs, name), type)}
    assert {kind for kind in public if issubclass(kind, Codec) and kind is not Codec} <= made
    specs = [codec.spec() for codec in CODECS]
    assert len(set(specs)) == len(specs)
    assert len({codec.fingerprint() for codec in CODECS}) == len(specs)


@by_codec
@pytest.mark.parametrize("numel", SIZES)
def test_wire_bytes_are_the_real_size_for_any_dtype(codec: Codec, numel: int) -> None:
    for dtype in DTYPES:
        x = gaussian(numel).to(dtype)
        message = codec.encode(x, draw=Draw(step=1))
        assert message.dtype == torch.uint8
        assert message.dim() == 1
        assert message.numel() == codec.wire_bytes(numel)
        assert message.numel() == HEADER_BYTES + padded(codec.body_bytes(numel))
        decoded = codec.decode(message, numel=numel)
        assert decoded.dtype == torch.float32
        assert decoded.shape == (numel,)
        assert torch.equal(message, codec.encode(x.to(torch.float32), draw=Draw(step=1)))


@pytest.mark.parametrize("codec", MATRICES, ids=lambda codec: codec.spec())
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 8), (64, 63), (16, 4, 3, 3), (0, 7), (7, 0), ()])
def test_sizes_of_matrices(codec: Codec, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        message = codec.encode(gaussian(shape).to(dtype))
        assert message.numel() == codec.wire_bytes(math.prod(shape), shape=shape)
        assert codec.decode(message, shape=shape).shape == shape


@by_codec
def test_a_tensor_comes_back_as_well_as_its_codec_promises(codec: Codec) -> None:
    """Deterministic here: unbiased codecs average out over draws, the others contract."""
    x, draws = gaussian(1000), 30
    total = torch.zeros(1000)
    for step in range(draws):
        codec.add(codec.encode(x, draw=Draw(step=step)), total)
    error = float((total / draws - x).square().sum() / x.square().sum())
    if codec.unbiased:
        omega = codec.omega(1000)
        assert omega is not None
        assert error <= 1.2 * omega / draws + 1e-3 + (3e-3 if codec.name == "rotated" else 0)
    else:
        delta = codec.delta(1000)
        assert delta is not None
        assert error <= 1 - delta + 1e-6


@pytest.mark.parametrize(
    "codec", [c for c in CODECS if not isinstance(c, tw.codecs.low_rank)], ids=lambda codec: codec.spec()
)
def test_layout_gradient_and_shape_of_the_input_do_not_matter(codec: Codec) -> None:
    """But to low_rank, which factors matrices: test_low_rank.py."""
    x, draw = gaussian((26, 50)), Draw(step=2, stream="w")
    flat = codec.encode(x.reshape(-1).clone(), draw=draw)
    variants = {
        "2-D": x,
        "needs gradient": x.clone().requires_grad_(),
        "result of autograd": x.clone().requires_grad_() * 1.0,
        "non-contiguous": torch.stack([x, -x], dim=-1)[..., 0],
        "column-major": x.t().contiguous().t(),
        "every third": x.reshape(-1).repeat_interleave(3)[::3],
        "4-D, channels last": x.view(2, 13, 5, 10).to(memory_format=torch.channels_last),
    }
    for name, variant in variants.items():
        before = variant.detach().clone()
        assert torch.equal(codec.encode(variant, draw=draw), flat), name
        assert torch.equal(variant.detach(), before), name
    decoded = codec.decode(flat, shape=(26, 50))
    assert decoded.shape == (26, 50)
    assert not decoded.requires_grad
    assert torch.equal(decoded.view(-1), codec.decode(flat))


@by_case
def test_adding_a_message_is_decoding_and_adding(codec: Codec, shape: Shape) -> None:
    for numel in [math.prod(shape)] if shape else [1, 63, 64, 65, 1000]:
        x = gaussian(shape or numel)
        message = codec.encode(x, draw=Draw(step=4))
        before = gaussian(math.prod(x.shape), seed=1)
        decoded = codec.decode(message, shape=shape).view(-1)
        out = before.clone()
        codec.add(message, out, shape=shape)
        assert torch.equal(out, before + decoded)
        gaps = torch.zeros(2 * before.numel())[::2]
        gaps.copy_(before)
        codec.add(message, gaps, shape=shape)
        assert torch.equal(gaps, out)


@by_case
def test_a_message_may_lie_anywhere_in_a_buffer(codec: Codec, shape: Shape) -> None:
    message = small(codec, shape)
    expected = codec.decode(message, shape=shape)
    raw = bytes(message.tolist())
    for ahead in range(4):
        buffer = bytearray(ahead + 4) + raw
        for start in range(ahead + 5):  # bytes skipped by the buffer's owner, the rest by a slice
            inside = torch.frombuffer(buffer, dtype=torch.uint8, offset=start)[ahead + 4 - start :]
            assert same(codec.decode(inside, shape=shape), expected)
    scattered = torch.stack([message, message], dim=1)[:, 0]
    assert not scattered.is_contiguous()
    assert same(codec.decode(scattered, shape=shape), expected)


@by_case
def test_reading_leaves_the_message_as_it_was(codec: Codec, shape: Shape) -> None:
    message = small(codec, shape)
    before = message.clone()
    first = codec.decode(message, shape=shape)
    assert same(codec.decode(message, shape=shape), first)
    assert torch.equal(message, before)


# -------------------------------------------------------------------------------------------- bytes that are damaged


@by_case
def test_random_bytes_are_refused(codec: Codec, shape: Shape) -> None:
    right = codec.wire_bytes(41 if shape is None else math.prod(shape), shape=shape)
    lengths = [*range(0, 72, 3), right, *(int(n) for n in torch.randint(0, 2000, (40,), generator=generator(1)))]
    for seed, length in enumerate(lengths):
        message = noise(length, seed)
        assert_refused(codec, message, shape)
        if length >= 8:  # past the magic number and the fingerprint
            message[:4] = torch.tensor(list(b"tw01"), dtype=torch.uint8)
            message[4:8] = torch.tensor(list(codec.fingerprint().to_bytes(4, "little")), dtype=torch.uint8)
            assert_refused(codec, message, shape)


@by_case
def test_every_cut_and_every_appendix_is_refused(codec: Codec, shape: Shape) -> None:
    message = small(codec, shape)
    for length in range(message.numel()):
        assert_refused(codec, message[:length], shape)
    for extra in (1, 2, 3, 4, 5, 8, 64, 1000):
        for tail in (torch.zeros(extra, dtype=torch.uint8), noise(extra, extra)):
            assert_refused(codec, torch.cat([message, tail]), shape)
    for start in (1, 2, 3, 4, 8, 32):
        assert_refused(codec, message[start:], shape)
    assert_refused(codec, torch.cat([message, message]), shape)


@by_case
def test_every_flipped_bit_is_refused(codec: Codec, shape: Shape) -> None:
    message = small(codec, shape)
    for byte in range(message.numel()):
        for bit in range(8):
            message[byte] ^= 1 << bit
            with pytest.raises(MessageError):
                codec.decode(message, shape=shape)
            message[byte] ^= 1 << bit
    codec.decode(message, shape=shape)


@by_case
def test_a_changed_word_is_refused(codec: Codec, shape: Shape) -> None:
    """Any change within four aligned bytes, which is more than a single bit."""
    message = small(codec, shape)
    for word in range(0, message.numel(), 4):
        damaged = message.clone()
        damaged[word : word + 4] = noise(4, word)
        if not torch.equal(damaged, message):
            assert_refused(codec, damaged, shape)


@pytest.mark.parametrize(
    "codec",
    [tw.codecs.fp32(), tw.codecs.bf16(), tw.codecs.qsgd(4), tw.codecs.top_k(0.2), tw.codecs.rotated(3)],
    ids=lambda codec: codec.spec(),
)
def test_two_flipped_bits_and_exchanged_words_are_refused(codec: Codec) -> None:
    """Damage in two places must not cancel out: the same bit of two words, any two bits, one word for another."""
    message = codec.encode(gaussian(200))
    words = message.numel() // 4
    chance = generator(2)
    for bit in range(32):
        for _ in range(8):
            first, second = torch.randperm(words, generator=chance)[:2].tolist()
            damaged = message.clone()
            for word in (first, second):
                damaged[4 * word + bit // 8] ^= 1 << (bit % 8)
            with pytest.raises(MessageError):
                codec.decode(damaged)
    for _ in range(300):
        damaged = message.clone()
        for place in torch.randperm(8 * message.numel(), generator=chance)[:2].tolist():
            damaged[place // 8] ^= 1 << (place % 8)
        with pytest.raises(MessageError):
            codec.decode(damaged)
    as_words = message.view(torch.int32)
    for _ in range(300):
        first, second = torch.randperm(words, generator=chance)[:2].tolist()
        exchanged = as_words.clone()
        exchanged[first], exchanged[second] = as_words[second], as_words[first]
        if not torch.equal(exchanged, as_words):
            with pytest.raises(MessageError):
                codec.decode(exchanged.view(torch.uint8))


def test_numbers_that_differ_in_sign_only_cannot_change_places() -> None:
    codec = tw.codecs.fp32()
    x = torch.ones(64)
    x[::2] = -1.0
    message = codec.encode(x)
    for place in range(63):
        y = x.clone()
        y[place], y[place + 1] = x[place + 1], x[place]
        damaged = message.clone()
        damaged[HEADER_BYTES:] = y.view(torch.uint8)
        with pytest.raises(MessageError):
            codec.decode(damaged)


def test_messages_of_another_codec_are_refused() -> None:
    messages = [(codec, codec.encode(gaussian(41))) for codec in CODECS]
    for reader in CODECS:
        for writer, message in messages:
            if reader is not writer:
                with pytest.raises(MessageError, match="same recipe"):
                    reader.decode(message)


def test_the_same_codec_built_twice_reads_its_messages() -> None:
    for spec in ("top_k:0.1|bf16", "qsgd:4,block=64", "random_k:0.5,scaled=False"):
        first, second = (tw.parse(f"{spec}|all_gather").codec for _ in range(2))
        assert first is not None
        assert second is not None
        x = gaussian(41)
        assert torch.equal(second.decode(first.encode(x)), first.decode(first.encode(x)))
    assert torch.equal(tw.codecs.top_k(1).decode(tw.codecs.top_k(1.0).encode(gaussian(9))), gaussian(9))


def test_what_is_no_flat_uint8_tensor_is_refused() -> None:
    for codec in CODECS:
        message = codec.encode(gaussian(41))
        for wrong in (message.view(torch.int8), message.float(), message.view(1, -1), message.view(-1, 4), message[0]):
            assert_refused(codec, wrong, None)


# --------------------------------------------------------------------------------------------------- forged messages


@by_case
def test_a_length_that_was_not_expected_is_refused(codec: Codec, shape: Shape) -> None:
    """Valid messages of other lengths, told what to expect."""
    for numel in (0, 1, 40, 42, 5000):
        message = codec.encode(gaussian(numel))
        with pytest.raises(MessageError):
            codec.decode(message, numel=41)
        with pytest.raises(MessageError):
            codec.decode(message, shape=shape or (41,))
        out = torch.ones(41 if shape is None else math.prod(shape))
        with pytest.raises(MessageError):
            codec.add(message, out, shape=shape)
        assert bool((out == 1).all())


@by_case
def test_forged_headers_are_refused_before_anything_is_allocated(codec: Codec, shape: Shape) -> None:
    """Were it not so, 2**39 elements would be two terabytes, which no machine here can give."""
    expected = 41 if shape is None else math.prod(shape)
    right = codec.body_bytes(expected, shape=shape)
    for numel in (0, 1, expected - 1, expected + 1, 2**16, 2**31 - 1, 2**31, 2**32, 2**39, 2**40, 2**63, 2**64 - 1):
        stated = codec.body_bytes(numel) if numel < 2**40 else right
        claims = {right, 0, 4, stated % (1 << 32)}
        for body_bytes in claims:
            for size in {HEADER_BYTES, HEADER_BYTES + padded(right), HEADER_BYTES + padded(min(body_bytes, 4096))}:
                message = forged(codec, numel=numel, body_bytes=body_bytes, size=size)
                for told in ({"numel": expected}, {"shape": shape or (expected,)}):
                    with pytest.raises(MessageError):
                        codec.decode(message, **told)
                with pytest.raises(MessageError):
                    codec.add(message, torch.ones(expected), shape=shape)
    for body_bytes in (0, right - 1, right + 1, right + 4, 2**32 - 1):
        for size in {HEADER_BYTES + padded(right), HEADER_BYTES + padded(min(body_bytes, 4096))}:
            assert_refused(codec, forged(codec, numel=expected, body_bytes=body_bytes, size=size), shape)


TINY_SHARES = [
    *(tw.codecs.top_k(1e-9, indices=code) for code in ("auto", "int32", "packed", "elias_fano", "u16")),
    tw.codecs.threshold_k(1e-9),
    tw.codecs.random_k(1e-9),
]


@pytest.mark.parametrize("codec", TINY_SHARES, ids=lambda codec: codec.spec())
@pytest.mark.parametrize("numel", [2**31, 2**32, 2**33 + 5, 2**39])
def test_more_elements_than_positions_can_name_are_refused(codec: SparseCodec, numel: int) -> None:
    """A few bytes may claim billions of elements here, and positions are int32."""
    body = torch.zeros(codec.body_bytes(numel), dtype=torch.uint8)
    for count in (0, 1, 2):
        if codec.chooses:
            body[0] = count
        message = framed(codec, body, numel)
        with pytest.raises(MessageError):
            codec.decode_sparse(message)
        with pytest.raises(MessageError):
            codec.decode(message)


def bodies(codec: Codec, numel: int, shape: Shape, seed: int) -> Tensor:
    """Random bytes; or a true body with some bytes changed, or with a believable count, to reach further inside."""
    size = codec.body_bytes(numel, shape=shape)
    body = noise(size, seed)
    if seed % 3 == 1:
        body = codec.encode(gaussian(shape or numel, seed))[HEADER_BYTES : HEADER_BYTES + size].clone()
        for place in torch.randint(0, max(size, 1), (1 + seed % 5,), generator=generator(seed)):
            if size:
                body[place] = int(noise(1, seed + int(place)))
    elif seed % 3 == 2 and isinstance(codec, SparseCodec) and codec.chooses:
        body[:4] = torch.tensor(list((seed % (codec.capacity(numel) + 2)).to_bytes(4, "little")), dtype=torch.uint8)
    return body


@by_case
def test_any_body_in_a_valid_frame_is_refused_or_decoded(codec: Codec, shape: Shape) -> None:
    sizes = (math.prod(shape),) if shape else (1, 41, 64, 200, 1300)
    for seed in range(90):
        numel = sizes[seed % len(sizes)]
        message = framed(codec, bodies(codec, numel, shape, seed), numel, shape)
        # A margin of ones on either side shows whether a kernel wrote beyond its tensor.
        room = torch.ones(numel + 512)
        out = room[256 : 256 + numel]
        try:
            codec.add(message, out, shape=shape)
        except ThinwireError:
            with pytest.raises(ThinwireError):
                codec.decode(message, shape=shape)
        else:
            decoded = codec.decode(message, shape=shape, numel=numel if shape is None else None)
            assert decoded.numel() == numel
            assert same(out, decoded.view(-1) + 1.0)
        assert bool((room[:256] == 1).all())
        assert bool((room[256 + numel :] == 1).all())


@pytest.mark.parametrize("codec", SPARSE, ids=lambda codec: codec.spec())
def test_positions_of_any_body_are_in_range_and_increase(codec: SparseCodec) -> None:
    accepted = 0
    for seed in range(200):
        numel = (41, 300, 70_000)[seed % 3]
        if numel > 1000 and seed > 60:
            continue
        message = framed(codec, bodies(codec, numel, None, seed), numel)
        try:
            indices, values = codec.decode_sparse(message)
        except ThinwireError:
            continue
        accepted += 1
        assert indices.dtype == torch.int32
        assert values.dtype == torch.float32
        assert indices.numel() == values.numel() <= codec.capacity(numel)
        assert indices.numel() == 0 or (int(indices[0]) >= 0 and int(indices[-1]) < numel)
        assert bool((indices[1:] > indices[:-1]).all())
    assert accepted > 0


@pytest.mark.parametrize(
    "codec", [c for c in SPARSE if not isinstance(c, tw.codecs.random_k)], ids=lambda codec: codec.spec()
)
def test_a_count_beyond_the_capacity_is_refused(codec: SparseCodec) -> None:
    numel = 300
    size = codec.body_bytes(numel)
    body = codec.encode(gaussian(numel))[HEADER_BYTES : HEADER_BYTES + size].clone()
    for count in (codec.capacity(numel) + 1, numel, numel + 1, 2**31 - 1, 2**31, 2**32 - 1):
        body[:4] = torch.tensor(list(count.to_bytes(4, "little")), dtype=torch.uint8)
        with pytest.raises(MessageError):
            codec.decode(framed(codec, body, numel))
