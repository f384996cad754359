"""Reads Fashion-MNIST and CIFAR-10 from a folder in their published formats, and checks the files."""

from __future__ import annotations

import gzip
import pickle
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import OptionError

_IDX_IMAGES, _IDX_LABELS = 2051, 2049  # the magic numbers: unsigned bytes in three dimensions, in one
_CIFAR_SIDE, _CIFAR_BYTES = 32, 3 * 32 * 32


@dataclass(frozen=True)
class Images:
    """Images as float32 in [-1, 1], `(count, channels, side, side)`, and their classes."""

    train: Tensor
    train_classes: Tensor
    held_out: Tensor
    held_out_classes: Tensor


def read_images(folder: str | Path) -> Images:
    """Whichever of the two data sets is in the folder, or one folder below it."""
    root = Path(folder)
    if not root.is_dir():
        raise OptionError(f"there is no data folder {folder}: give --data a folder with Fashion-MNIST or CIFAR-10")
    for place in (root, *sorted(path for path in root.iterdir() if path.is_dir())):
        if _idx(place, "train-images") is not None:
            return Images(*_read_idx(place, "train"), *_read_idx(place, "t10k"))
        if (place / "data_batch_1.bin").is_file():
            return _cifar(place, ".bin", _read_cifar_binary)
        if (place / "data_batch_1").is_file():
            return _cifar(place, "", _read_cifar_pickle)
    raise OptionError(
        f"{folder} holds neither Fashion-MNIST (train-images-idx3-ubyte, may end in .gz) nor CIFAR-10 (data_batch_1 or "
        "data_batch_1.bin): give --data a folder that does"
    )


def _damaged(path: Path, why: str) -> OptionError:
    return OptionError(f"{path} is damaged ({why}): fetch it again")


def _scaled(pixels: Any) -> Tensor:
    return torch.from_numpy(pixels.astype(np.float32)).div_(127.5).sub_(1.0)


# ----------------------------------------------------------------------------------------------------------- IDX


def _idx(folder: Path, stem: str) -> Path | None:
    kind = "idx3" if stem.endswith("images") else "idx1"
    names = (f"{stem}-{kind}-ubyte", f"{stem}-{kind}-ubyte.gz", f"{stem}.{kind}-ubyte")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_idx(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    arrays = []
    for stem, magic, dimensions in ((f"{part}-images", _IDX_IMAGES, 3), (f"{part}-labels", _IDX_LABELS, 1)):
        path = _idx(folder, stem)
        if path is None:
            raise OptionError(f"{folder} has no {stem} file: give --data a folder with all four files")
        try:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        except (OSError, EOFError, zlib.error) as problem:
            raise _damaged(path, str(problem)) from None
        head = 4 * (1 + dimensions)
        if len(content) < head or struct.unpack(">i", content[:4])[0] != magic:
            raise _damaged(path, "it does not begin as an IDX file")
        shape = struct.unpack(f">{dimensions}i", content[4:head])
        if min(shape) < 1 or len(content) - head != np.prod(shape, dtype=np.int64):
            raise _damaged(path, f"{len(content) - head} bytes for shape {shape}")
        arrays.append((path, np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)))
    (path, images), (labels_path, labels) = arrays
    if len(images) != len(labels) or labels.max() > 9:
        raise _damaged(labels_path, f"{len(labels)} labels up to {labels.max()} for {len(images)} images")
    if images.shape[1] != images.shape[2] or images.shape[1] < 8:
        raise _damaged(path, f"images of {images.shape[1]} x {images.shape[2]} pixels")
    return _scaled(images)[:, None], torch.from_numpy(labels.astype(np.int64))


# ------------------------------------------------------------------------------------------------------ CIFAR-10


def _cifar(folder: Path, ending: str, read: Any) -> Images:
    train = []
    for number in range(1, 6):
        path = folder / f"data_batch_{number}{ending}"
        if path.is_file():  # fewer than five will do
            train.append(_checked(path, *read(path)))
    path = folder / f"test_batch{ending}"
    if not path.is_file():
        raise OptionError(f"{folder} has no {path.name}: give --data a folder with the whole data set")
    images, classes = zip(*train, strict=True)
    return Images(torch.cat(images), torch.cat(classes), *_checked(path, *read(path)))


def _checked(path: Path, pixels: Any, labels: Any) -> tuple[Tensor, Tensor]:
    if pixels.ndim != 2 or pixels.shape[1] != _CIFAR_BYTES or len(pixels) != len(labels) or not len(labels):
        raise _damaged(path, f"pixels of shape {pixels.shape} for {len(labels)} labels")
    if labels.min() < 0 or labels.max() > 9:
        raise _damaged(path, f"labels from {labels.min()} to {labels.max()}")
    side = _CIFAR_SIDE
    return _scaled(pixels.reshape(-1, 3, side, side)), torch.from_numpy(labels.astype(np.int64))


def _read_cifar_binary(path: Path) -> tuple[Any, Any]:
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if len(content) % (_CIFAR_BYTES + 1):
        raise _damaged(path, f"{len(content)} bytes are no whole number of records")
    records = content.reshape(-1, _CIFAR_BYTES + 1)
    return records[:, 1:], records[:, 0]


# Whole names: a module is imported before anything in it is looked for, and some of numpy's do things then.
_OF_NUMPY = {
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}


class _Arrays(pickle.Unpickler):
    """Loads NumPy arrays and plain containers, and refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("numpy.core", "numpy._core"), name) in _OF_NUMPY:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _read_cifar_pickle(path: Path) -> tuple[Any, Any]:
    try:
        with path.open("rb") as file:
            content = _Arrays(file, encoding="bytes").load()
        found = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        return np.asarray(found["data"], dtype=np.uint8), np.asarray(found["labels"], dtype=np.int64)
    except Exception as problem:  # of many types, whatever the unpickler met
        raise _damaged(path, repr(problem)) from None
