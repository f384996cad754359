"""What the codec tests share: hard inputs, independent random bits, and statistics that do not depend on luck."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.rng import Draw, Key

SIZES = (0, 1, 2, 63, 64, 65, 1000, 4097)
INF, NAN = math.inf, math.nan
MASK = 0xFFFFFFFF


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def hard_inputs(numel: int) -> dict[str, Tensor]:
    """Inputs that are the worst for one quantiser or another."""
    one_hot = torch.zeros(numel)
    one_hot[numel // 3] = -3.0
    one_and_dust = torch.full((numel,), 1e-3)
    one_and_dust[0] = 1.0
    # One element at 1 and the rest at a: TernGrad's worst case, near that of every scaled quantiser.
    worst_ternary = torch.full((numel,), 1 / (1 + math.sqrt(numel)))
    worst_ternary[-1] = 1.0
    return {
        "gaussian": gaussian(numel),
        "one_hot": one_hot,
        "one_and_dust": one_and_dust,
        "constant": torch.full((numel,), 0.7),
        "two_ends": torch.where(torch.arange(numel) % 2 == 0, 1.0, -1.0) * 0.3,
        "heavy_tail": gaussian(numel, 1) / gaussian(numel, 2).abs().clamp(min=1e-3),
        "worst_ternary": worst_ternary,
        "tiny": gaussian(numel, 3) * 1e-20,
        "large": gaussian(numel, 4) * 1e15,
    }


def random_word(position: int, key: Key) -> int:
    """32 random bits, written out once more with Python integers: what `kernels.random_bits` must give."""
    h = (position + key.k0) & MASK
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & MASK
    return ((h ^ (h >> 15) ^ key.k1) * 0x846CA68B) & MASK


def dither(position: int, key: Key) -> float:
    """A number in [0, 1) with 23 bits."""
    return (random_word(position, key) >> 9) / 2**23


def through(codec: Codec, x: Tensor, seed: int = 0) -> Tensor:
    return codec.decode(codec.encode(x, draw=Draw(seed=seed)))


def repeated(codec: Codec, x: Tensor, count: int, seed: int = 0) -> Tensor:
    """`count` independent decodings of `x`, in one message: `x` fills a block of the codec exactly."""
    return through(codec, x.repeat(count), seed).view(count, x.numel())


def assert_unbiased(samples: Tensor, x: Tensor) -> None:
    """The mean of the samples is `x`: no element is off by more than six standard errors.

    An element that rounds up once in a thousand times may never do so in the sample, which then shows no spread; a
    dozen such events are granted to each element (none of 12 expected ones happens with probability 6e-6).
    """
    wide, count = samples.double(), samples.shape[0]
    spread = wide.std(dim=0) / math.sqrt(count)
    jump = torch.maximum((wide.amax(dim=0) - wide.amin(dim=0)).max(), x.double().abs())
    rounding = 1e-6 * x.double().abs().max()
    off = (wide.mean(dim=0) - x.double()).abs()
    granted = 6 * spread + 12 / count * jump + rounding
    assert bool((off <= granted).all()), f"off by up to {float((off / granted).max()):.1f} times what chance explains"


def error_over_norm(samples: Tensor, x: Tensor) -> tuple[float, float]:
    """Mean of |C(x) - x|^2 / |x|^2 over the samples and its standard error."""
    each = (samples.double() - x.double()).square().sum(dim=1) / x.double().square().sum()
    return float(each.mean()), float(each.std()) / math.sqrt(len(each))


def assert_error_within(samples: Tensor, x: Tensor, bound: float | None) -> None:
    assert bound is not None
    mean, standard_error = error_over_norm(samples, x)
    assert mean <= bound + 4 * standard_error + 1e-12, f"{mean} exceeds the stated {bound}"


def assert_sizes(codec: Codec) -> None:
    """The stated size is the real one, and every size makes the round trip."""
    for numel in SIZES:
        message = codec.encode(gaussian(numel))
        assert message.numel() == codec.wire_bytes(numel), (codec, numel)
        assert codec.decode(message).shape == (numel,)
        assert codec.wire_bytes(numel) >= 32 + codec.body_bytes(numel)
