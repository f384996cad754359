"""What each codec makes of one gradient: bytes, error, and the error it promised.

python examples/compress_one_tensor.py [elements]
"""

import sys

import torch

import thinwire as tw

CODECS = [
    tw.codecs.bf16(),
    tw.codecs.fp8(),
    tw.codecs.abs_max(4),
    tw.codecs.qsgd(4, block=128),
    tw.codecs.rotated(3),
    tw.codecs.rotated(2),
    tw.codecs.top_k(0.01, values=tw.codecs.bf16()),
    tw.codecs.random_k(0.01),
]


def main(numel: int) -> None:
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    draw = tw.Draw(seed=0, step=0, stream="weight", rank=0)  # names the random numbers, so that a run repeats
    print(f"{'codec':24}{'bytes':>12}{'x fewer':>10}{'error':>12}{'promised':>12}")
    for codec in CODECS:
        message = codec.encode(gradient, draw=draw)
        assert message.numel() == codec.wire_bytes(numel)  # exact, and known before running
        restored = codec.decode(message, shape=tuple(gradient.shape))
        error = float((restored - gradient).square().sum() / gradient.square().sum())
        promised = codec.omega(numel) if codec.unbiased else 1 - codec.delta(numel)
        fewer = 4 * numel / message.numel()
        print(f"{codec.spec():24}{message.numel():>12,}{fewer:>10.1f}{error:>12.3g}{promised:>12.3g}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
