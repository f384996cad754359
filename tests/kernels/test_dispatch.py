"""Which body runs: numba where it is, plain torch where it is not, with the same messages and one line in the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from thinwire import kernels
from thinwire.kernels import reference
from thinwire.rng import Draw

# Put before a script, this makes `import numba` fail as on a machine without it, and slowly, as a search on disk is.
WITHOUT_NUMBA = """
import sys, time

class NoNumba:
    def find_spec(self, name, path=None, target=None):
        if name == "numba" or name.startswith("numba."):
            time.sleep(0.02)
            raise ImportError("numba is not installed here")

sys.meta_path.insert(0, NoNumba())
"""

COLLECT_LOG = """
import logging

class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines = []

    def emit(self, record):
        if record.name.startswith("thinwire"):
            self.lines.append([record.name, record.levelname, record.getMessage()])

lines = Lines()
logging.getLogger().addHandler(lines)
logging.getLogger("thinwire").setLevel(logging.DEBUG)
"""

RUN_CODECS = """
import hashlib, json, torch
from thinwire import codecs as c, kernels
from thinwire.rng import Draw
from thinwire.codecs.indices import INDEX_CODES

every = [
    c.fp32(), c.fp16(), c.bf16(), c.fp8(), *(c.qsgd(bits, block=64 * (bits % 2)) for bits in range(1, 9)),
    c.terngrad(), c.natural(), *(c.min_max(bits) for bits in range(2, 9)), *(c.abs_max(bits) for bits in (2, 5, 8)),
    c.sign(), c.sign(64), *(c.global_qsgd(4, dither=dither, norm=norm) for dither in ("linear", "exponential")
    for norm in ("l2", "linf")), *(c.rotated(bits) for bits in (1, 2, 3, 4)), c.low_rank(2),
    *(c.top_k(0.05, indices=code, values=c.bf16()) for code in INDEX_CODES),
    c.gaussian_k(0.05), c.dgc_k(0.05), c.trimmed_k(0.05, values=c.abs_max(4)), c.threshold_k(0.05),
    c.random_k(0.05), c.random_k(0.05, scaled=False, shared=False, values=c.qsgd(3)),
]

def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]

found = {}
for codec in every:
    for numel in (0, 1, 65, 3000):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        draw = Draw(seed=3, step=2, stream="w", rank=1)
        message = codec.encode(x, draw=draw)
        residual, state, parts = x * 0.5, codec.new_state(), [message, codec.decode(message)]
        for _ in range(3):
            rest = x.clone()
            parts.append(codec.encode_compensated(rest, residual, decay=0.9, draw=draw, state=state))
            parts.append(residual := rest)
        found[f"{codec.spec()} {numel}"] = [digest(part) for part in parts]
"""


def run(*parts: str, env: dict[str, str] | None = None) -> Any:
    """What a fresh process prints as JSON in its last line."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(parts)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# -------------------------------------------------------------------------------------------------------- without numba


def test_without_numba_the_messages_are_the_same_and_the_log_says_it_once() -> None:
    report = "print(json.dumps([found, lines.lines, kernels.body_for('cpu').__name__]))"
    plain, plain_log, plain_body = run(WITHOUT_NUMBA, COLLECT_LOG, RUN_CODECS, report)
    compiled, compiled_log, compiled_body = run(COLLECT_LOG, RUN_CODECS, report)
    assert (plain_body, compiled_body) == ("thinwire.kernels.reference", "thinwire.kernels.cpu")
    assert len(plain) > 150
    assert {name: digests for name, digests in plain.items() if digests != compiled[name]} == {}
    assert plain.keys() == compiled.keys()
    assert compiled_log == []
    [[name, level, message]] = plain_log
    assert (name, level) == ("thinwire.kernels", "WARNING")
    assert "numba" in message
    assert "\n" not in message


def test_without_numba_several_threads_log_once_too() -> None:
    """Lanes start at the same time, and each is the first to ask for a kernel."""
    script = """
import json, threading, torch
from thinwire import kernels

start = threading.Barrier(8)
answers = []

def lane():
    start.wait()
    answers.append(kernels.all_finite(torch.ones(10)))

lanes = [threading.Thread(target=lane) for _ in range(8)]
for thread in lanes: thread.start()
for thread in lanes: thread.join()
print(json.dumps([answers, len(lines.lines)]))
"""
    answers, logged = run(WITHOUT_NUMBA, COLLECT_LOG, script)
    assert answers == [True] * 8
    assert logged == 1


def test_without_numba_the_log_reaches_standard_error_as_one_line() -> None:
    encode = "import torch\nfrom thinwire.codecs import qsgd\nfor _ in range(3): qsgd(4).encode(torch.ones(100))"
    script = f"{WITHOUT_NUMBA}\n{encode}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "numba" in done.stderr


# ----------------------------------------------------------------------------------------------------- choosing a body


def test_each_device_has_its_body() -> None:
    assert kernels.body_for("cpu").__name__ == "thinwire.kernels.cpu"
    assert kernels.body_for("meta") is reference
    assert kernels.body_for("some future device") is reference


def test_every_name_leads_to_the_body_of_its_tensor() -> None:
    """Each kernel is called through the public name and runs in numba; the reference agrees on a small tensor."""
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert kernels.block_abs_max(x, block=64).equal(reference.block_abs_max(x, block=64))
    body = kernels.body_for("cpu")
    own = [name for name, value in vars(reference).items() if getattr(value, "__module__", "") == reference.__name__]
    dispatched = [name for name in own if not name.startswith("_")]
    assert set(dispatched) <= set(kernels.__all__)
    dispatched.remove("random_bits")  # drawn in small numbers: one body serves all devices
    assert len(dispatched) >= 20
    for name in dispatched:
        assert callable(getattr(body, name))
        assert getattr(body, name) is not getattr(reference, name)
        assert getattr(kernels, name).__wrapped__ is getattr(reference, name)


def test_numba_is_imported_by_the_first_kernel_and_not_before() -> None:
    script = """
import json, sys
import torch
import thinwire as tw
recipe = tw.parse("ef|threshold_k:0.01|bf16|all_gather")
from thinwire.codecs import bf16, qsgd, top_k
facts = [recipe.wire_bytes(10**6), str(recipe), qsgd(4).omega(100), top_k(0.01).delta(1000)]
from thinwire.memory import error_feedback
memory = error_feedback().start()
before = [name for name in ("numba", "llvmlite", "triton") if name in sys.modules]
bf16().encode(torch.ones(3))
print(json.dumps([before, "numba" in sys.modules, "triton" in sys.modules]))
"""
    assert run(script) == [[], True, False]


# -------------------------------------------------------------------------------------------------------- compiled once


def dispatchers() -> Iterator[tuple[str, Any]]:
    """Every compiled function of the numba body."""
    from numba.core.dispatcher import Dispatcher

    from thinwire.kernels import cpu_compile, cpu_hash, cpu_quantize, cpu_rotated, cpu_rows, cpu_select

    for module in (cpu_compile, cpu_hash, cpu_quantize, cpu_rotated, cpu_rows, cpu_select):
        for name, value in vars(module).items():
            if isinstance(value, Dispatcher):
                yield f"{module.__name__}.{name}", value


def test_every_loop_releases_the_gil_and_is_cached() -> None:
    found = dict(dispatchers())
    assert len(found) >= 35
    for name, dispatcher in found.items():
        assert dispatcher.targetoptions.get("nogil"), name
        assert type(dispatcher._cache).__name__ != "NullCache", name


CACHE_STATISTICS = """
import json, torch
from thinwire import kernels
from thinwire.rng import Draw
x = torch.randn(300)
kernels.checksum(x.view(torch.uint8)), kernels.all_finite(x), kernels.moments(x), kernels.block_abs_max(x, block=64)
kernels.select(x, 1.0, capacity=300), kernels.scatter_add(x, torch.tensor([1], dtype=torch.int32), torch.ones(1))
from thinwire.kernels import cpu_select
names = ["checksum", "all_finite", "moments", "block_abs_max", "select", "scatter_add"]
stats = {name: getattr(cpu_select, name).stats for name in names}
signatures = {name: len(getattr(cpu_select, name).signatures) for name in names}
print(json.dumps({name: [sum(s.cache_hits.values()), sum(s.cache_misses.values()), signatures[name]]
                  for name, s in stats.items()}))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    first = run(CACHE_STATISTICS, env=cache)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb[ci]")}
    second = run(CACHE_STATISTICS, env=cache)
    assert first == {name: [0, 1, 1] for name in first}
    assert second == {name: [1, 0, 1] for name in first}
    assert len(files) >= 2 * len(first)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb[ci]")} == files


def test_one_machine_code_for_all_ways_to_call() -> None:
    """Other sizes, dtypes, layouts and keys must not compile again: a step would stall for seconds."""
    from thinwire.kernels import cpu_hash, cpu_quantize, cpu_select

    def use(x: torch.Tensor, step: int) -> None:
        scale = torch.ones(1)
        key = Draw(step=step).key()
        for bits in (2, 8):
            packed = kernels.quantize(x, 0 * scale, scale, bits=bits, top=2, offset=1, block=0, key=key)
            kernels.dequantize_add(torch.zeros(x.numel()), packed, 0 * scale, scale, bits=bits, offset=1, block=0)
        memory = torch.zeros(x.numel())
        found = kernels.select_ef(memory, x, 0.5 + step, capacity=x.numel())
        kernels.keep_largest(found.values, found.indices, k=3, threshold=0.5 + step, memory=memory)
        kernels.keep_largest(found.values, found.indices, k=3, threshold=0.5 + step)
        kernels.scatter_add(memory, found.indices, found.values)
        kernels.select_ef(memory, x, 0.5, capacity=step, out=torch.zeros(x.numel()), decay=0.5 + step)
        kernels.threshold_count(x, 0.1)
        kernels.hash64(x)
        kernels.checksum(torch.zeros(4 * (1 + step), dtype=torch.uint8))

    loops = [
        cpu_hash.hash64,
        *(cpu_quantize.quantize, cpu_quantize.dequantize_add),
        *(getattr(cpu_select, name) for name in ("select_ef", "keep_largest", "scatter_add", "checksum")),
    ]
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    use(x, 0)
    before = [len(loop.signatures) for loop in loops]
    for step, other in enumerate([x[:77], x.half(), x.bfloat16(), x.double(), x[::2], x.view(10, 100).t().reshape(-1)]):
        use(other, step)
    inside = torch.zeros(4003, dtype=torch.uint8)[3:]  # words that are not aligned
    kernels.checksum(inside[:40])
    kernels.hash64(inside[:41])
    assert [len(loop.signatures) for loop in loops] == before


# ------------------------------------------------------------------------------------------------------------------ GIL


def test_other_threads_run_while_a_kernel_does() -> None:
    """A thread that asks for the GIL never gets it here unless the holder lets go: so whatever this thread does between
    the kernel's start and its end, it does while the kernel runs. Without releasing, that would be nothing, always.
    """
    x = torch.zeros(1 << 22)
    memory = torch.zeros_like(x)
    loops: dict[str, Callable[[], object]] = {
        "moments": lambda: kernels.moments(x),
        "select_ef": lambda: kernels.select_ef(memory, x, 1.0, capacity=1),
        "rotate": lambda: kernels.rotate(x, key=Draw().key()),
    }
    patience = sys.getswitchinterval()
    for name, loop in loops.items():
        loop()  # compiled before the measurement
        seen_running = 0
        try:
            sys.setswitchinterval(1000.0)
            for attempt in range(60):
                finished: list[bool] = []

                def work(finished: list[bool] = finished, repeats: int = 1 + attempt, loop: Any = loop) -> None:
                    for _ in range(repeats):
                        loop()
                    finished.append(True)

                thread = threading.Thread(target=work)
                thread.start()
                seen_running += not finished
                thread.join()
                if seen_running:
                    break
        finally:
            sys.setswitchinterval(patience)
        assert seen_running, name
