"""The Triton kernels compile for a GPU that is not there, without the instructions that would change the bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

gpu_encode = pytest.importorskip("thinwire.kernels.gpu_encode", exc_type=ImportError)
gpu_quantize = pytest.importorskip("thinwire.kernels.gpu_quantize", exc_type=ImportError)
gpu_select = pytest.importorskip("thinwire.kernels.gpu_select", exc_type=ImportError)

# What the interpreter accepts may still not compile. Triton can compile for a GPU that is not there: compile what would
# be launched, with the options it would be launched with, and look for fused or approximate arithmetic.
COMPILE = """
import functools, re, sys, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction, mangle_type
from thinwire.rng import Key
from thinwire.kernels import gpu

def record(kernel, *args, **constants):
    options = {name: constants.pop(name) for name in constants.keys() - set(kernel.arg_names)}
    signature = dict(zip(kernel.arg_names, map(mangle_type, args))) | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    ptx = compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options).asm["ptx"]
    found = re.findall(r"fma[.]|[.]ftz|[.]approx|div[.]full", ptx)
    print("compiled", kernel.__name__, *found)

JITFunction.__getitem__ = lambda kernel, grid: functools.partial(record, kernel)
torch.empty = torch.ones  # nothing runs, so the counts that size a selection have to be something
key, x, one = Key(1, 2), torch.ones(3000), torch.ones(1)
codes = torch.ones(3008, dtype=torch.uint8)
gpu.random_bits(3000, key)
gpu.pack(codes, bits=7)
gpu.unpack(codes, 3000, bits=7)
gpu.quantize(x, one, one, bits=7, top=100, offset=50, block=0, key=key)
gpu.dequantize_add(x, codes, one, one, bits=7, offset=50, block=0)
gpu.exponential_encode(x, one, top=127, block=0, key=key)
gpu.exponential_decode_add(x, codes[:3000], one, top=127, block=0)
gpu.exponential_add(codes, codes, top=127, key=key)
gpu.block_abs_max(x, block=0)
gpu.block_min_max(x, block=64)
gpu.block_square_sum(x, block=192)
gpu.rotate(x, key=key)
gpu.codebook_encode(x, one, x[:15], bits=4, block=0)
gpu.codebook_decode(codes, 3000, one, x[:16], bits=4, block=0)
gpu.select(x, 0.5, capacity=10)
gpu.select_ef(x, x, 0.5, capacity=10, decay=0.9)
gpu.threshold_count(x, 0.5)
gpu.scatter_add(x, torch.arange(3000, dtype=torch.int32), x)
gpu.moments(x)
gpu.checksum(codes)
gpu.hash64(x)
for block in (64, 192, 8192, 0):
    steps = torch.ones(-(-3000 // (block or 3000)))
    gpu.abs_max_encode(x, steps, torch.ones(3008, dtype=torch.uint8), levels=127, bits=8, block=block, key=key)
for numel in (2048, 1024 + 64, 2048 + 512):
    scale, packed = torch.ones(-(-numel // 1024)), torch.ones(numel // 8 * 3, dtype=torch.uint8)
    tables = {"keys": (key, key), "codebook": x[:8], "bits": 3}
    gpu.rotated_encode(torch.ones(numel), scale, packed, boundaries=x[:7], **tables)
    for fresh in (False, True):
        gpu.rotated_add(packed, scale, torch.ones(numel), fresh=fresh, **tables)
"""


# Selection asks for its one fused operation: the sum that torch.add(gradient, memory, alpha=decay) rounds once.
ASKED_FOR = {"select_kernel": {"fma."}}


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_compiles_for_a_gpu_without_fused_or_approximate_arithmetic(capability: str, tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, capability]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("compiled")]
    modules = (gpu_encode, gpu_quantize, gpu_select)
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert {name for _, name, *_ in lines} == kernels
    unwanted = [line for line in lines if not set(line[2:]) <= ASKED_FOR.get(line[1], set())]
    assert unwanted == []
    assert any("fma." in line for line in lines)
