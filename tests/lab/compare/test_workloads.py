"""Data by seed, dealt to ranks, never mixed with what is held out; golden losses; image files good and bad."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from thinwire.errors import OptionError
from thinwire.lab.compare.images import read_images
from thinwire.lab.compare.workloads import WORKLOADS, GptOnSources, Workload, sources, workload

GOLDEN_TEXT = "ea2e55fd"  # of the standard library with which the losses of gpt were written down
GOLDEN = {"gpt": (3.6565, 3.1388), "mlp": (2.2598, 1.6814)}  # after 8 and 24 steps, two ranks' data, seed 3


def write_idx(folder: Path, *, train: int = 200, held_out: int = 40, zipped: bool = False) -> None:
    draw = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", held_out)):
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        images = draw.integers(0, 50, (count, 28, 28), dtype=np.uint8) + 20 * labels[:, None, None]
        contents = {
            f"{part}-images-idx3-ubyte": struct.pack(">4i", 2051, count, 28, 28) + images.tobytes(),
            f"{part}-labels-idx1-ubyte": struct.pack(">2i", 2049, count) + labels.tobytes(),
        }
        for name, content in contents.items():
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


def write_cifar(folder: Path, *, binary: bool) -> None:
    draw = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels, pixels = draw.integers(0, 10, 30), draw.integers(0, 256, (30, 3072), dtype=np.uint8)
        if binary:
            records = np.concatenate([labels[:, None].astype(np.uint8), pixels], axis=1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        else:
            (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=2))


# -------------------------------------------------------------------------------------------------------- all of them


@pytest.fixture(params=WORKLOADS)
def work(request: pytest.FixtureRequest, tmp_path: Path) -> Workload:
    write_idx(tmp_path)
    return workload(request.param, data=str(tmp_path) if request.param == "cnn" else None)


def test_the_same_seed_gives_the_same_run(work: Workload) -> None:
    for one, other in zip(work.model(seed=5).parameters(), work.model(seed=5).parameters(), strict=True):
        assert torch.equal(one, other)
    first = work.batch(7, seed=5, rank=1, world_size=3)
    again = work.batch(7, seed=5, rank=1, world_size=3)
    others = work.batch(7, seed=6, rank=1, world_size=3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], others[0])


def test_ranks_get_different_examples_and_an_epoch_has_each_once(
    work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    def noted(which: torch.Tensor, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        numbers.extend(which.tolist())
        return which, which

    monkeypatch.setattr(work, "examples", noted)
    world_size, size = 3, work.batch_per_worker
    whole = work.count() // size * size
    for step in range(min(whole // size // world_size, 200)):
        for rank in range(world_size):
            work.batch(step, seed=1, rank=rank, world_size=world_size)
    assert len(set(numbers)) == len(numbers)
    assert len(numbers) == min(whole // size // world_size, 200) * world_size * size
    numbers.clear()
    shares = [list(work.held_out(rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert len(set(numbers)) == len(numbers) > 0
    assert len({sum(len(batch[0]) for batch in share) for share in shares}) == 1


def train(work: Workload, steps: int) -> list[float]:
    """Held-out losses after 8 and 24 steps with two ranks' data, as one process sees it."""
    model = work.model(seed=3)
    optimizer = work.optimizer(model)
    full, losses = optimizer.param_groups[0]["lr"], []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = full * work.rate(step)
        optimizer.zero_grad()
        for rank in range(2):
            (model(*work.batch(step, seed=3, rank=rank, world_size=2)) / 2).backward()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        if step + 1 in (8, 24):
            with torch.no_grad():
                shares = [float(model(*batch)) for batch in work.held_out(rank=0, world_size=1)]
            losses.append(sum(shares) / len(shares))
    return losses


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_losses(name: str) -> None:
    if name == "gpt" and hashlib.blake2s(sources(held_out=False), digest_size=4).hexdigest() != GOLDEN_TEXT:
        pytest.skip("this Python's standard library is not the text with which the losses were written down")
    assert train(workload(name), 24) == pytest.approx(GOLDEN[name], abs=2e-3)


def test_the_gpt_is_as_large_as_it_says_and_no_module_is_in_both_texts() -> None:
    model = GptOnSources().model(seed=0)
    assert 3.0e6 < sum(p.numel() for p in model.parameters()) < 3.4e6
    train_text, held_out = sources(held_out=False), sources(held_out=True)
    assert 10 * len(held_out) < len(train_text)
    assert held_out[5000:6000] not in train_text


# ------------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("zipped", [False, True])
def test_fashion_mnist_in_its_own_format(tmp_path: Path, zipped: bool) -> None:
    folder = tmp_path / "fashion"
    folder.mkdir()
    write_idx(folder, zipped=zipped)
    for given in (folder, tmp_path):  # the folder above will do
        images = read_images(given)
        assert images.train.shape == (200, 1, 28, 28)
        assert images.held_out_classes.shape == (40,)
        assert -1.0 <= float(images.train.min()) < float(images.train.max()) <= 1.0


@pytest.mark.parametrize("binary", [False, True])
def test_cifar_in_both_formats(tmp_path: Path, binary: bool) -> None:
    write_cifar(tmp_path, binary=binary)
    images = read_images(tmp_path)
    assert images.train.shape == (150, 3, 32, 32)
    assert images.train_classes.dtype == torch.int64
    work = workload("cnn", data=str(tmp_path))
    assert work.model(seed=0)(*work.batch(0, seed=0, rank=0, world_size=1)).isfinite()


def test_both_formats_of_cifar_hold_the_same(tmp_path: Path) -> None:
    for binary in (False, True):
        (tmp_path / str(binary)).mkdir()
        write_cifar(tmp_path / str(binary), binary=binary)
    one, other = read_images(tmp_path / "False"), read_images(tmp_path / "True")
    assert torch.equal(one.train, other.train)
    assert torch.equal(one.held_out_classes, other.held_out_classes)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("it ran",)


def damages() -> dict[str, tuple[str, bytes]]:
    return {
        "cut": ("train-images-idx3-ubyte", struct.pack(">4i", 2051, 200, 28, 28) + b"\0" * 100),
        "other": ("train-images-idx3-ubyte", b"<html>not found</html>"),
        "empty": ("t10k-labels-idx1-ubyte", b""),
        "labels": ("train-labels-idx1-ubyte", struct.pack(">2i", 2049, 200) + b"\x63" * 200),
        "fewer": ("train-labels-idx1-ubyte", struct.pack(">2i", 2049, 3) + b"\1" * 3),
    }


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    write_idx(tmp_path)
    name, content = damages()[damage]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=f"{name} is damaged .*fetch it again"):
        read_images(tmp_path)


def test_a_pickle_cannot_import_a_module_of_numpy(tmp_path: Path) -> None:
    """Importing is enough: some modules do things then."""
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / name).write_bytes(b"cnumpy.f2py.__main__\ndtype\n.")
    with pytest.raises(OptionError, match=r"it asks for numpy\.f2py\.__main__\.dtype"):
        read_images(tmp_path)
    assert "numpy.f2py.__main__" not in sys.modules


@pytest.mark.parametrize("content", [pickle.dumps(Evil()), b"\x80\x04junk", pickle.dumps({b"data": 1})])
def test_a_pickle_cannot_run_anything(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    write_cifar(tmp_path, binary=False)
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(OptionError, match="data_batch_2 is damaged"):
        read_images(tmp_path)
    assert capsys.readouterr().out == ""


def test_missing_folders_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"there is no data folder .*nowhere"):
        read_images(tmp_path / "nowhere")
    with pytest.raises(OptionError, match="holds neither Fashion-MNIST"):
        read_images(tmp_path)
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(OptionError, match="has no t10k-labels file"):
        read_images(tmp_path)
    with pytest.raises(OptionError, match="give it with --data"):
        workload("cnn")
    write_idx(tmp_path, train=5)
    with pytest.raises(OptionError, match="has only 5 images"):
        workload("cnn", data=str(tmp_path))
