"""Semantic segmentation: a class for each pixel of a picture (SegFormer, 2105.15203).

The model's logits are brought to the size of the mask. The loss and the accuracy are means over the
pixels that have a class. With all pixels of the held-out data taken together,

    IoU of a class = pixels that are it and are found as it / pixels that are it or are found as it

and the mean is over the classes that occur in either (Everingham et al. 2015, PASCAL VOC).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.files import existing
from app.data.images import PICTURES
from app.data.order import Indices, held_out, hold_out
from app.data.pictures import read_picture
from app.errors import UserError
from app.models.prediction import Preprocessor
from app.tasks.huggingface.inputs import PicturesInput, stretched
from app.tasks.huggingface.kind import Kind, Settings, label_keys
from app.tasks.huggingface.listed import Listed, read_listed
from app.tasks.parts import whole_number

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_EVAL_FRACTION = 0.1
EXAMPLE = '{"image": "images/1.jpg", "mask": "masks/1.png"}'
NO_CLASS = 255
"""The number of a pixel in a mask that has no class, as in most data sets."""
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of ImageNet's pictures."""
DEFAULT_SIDE = 512

MaskBatch = tuple[dict[str, Tensor], Tensor]
"""`pixel_values` (N, 3, side, side), and masks (N, side, side) of classes or NO_CLASS."""


class SemanticSegmentation(Kind):
    """The class of each pixel."""

    name = "semantic_segmentation"
    model_class = "AutoModelForSemanticSegmentation"
    table = "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES"
    options = ("image_size",)
    may_have_new_head = True
    has_classes = True
    unit = "pixels"
    reads_files = True

    def __init__(self, settings: Settings, *, image_size: int | None = None) -> None:
        pairs = _pairs(settings.data)
        self.side = _side(settings, image_size)
        classes = _classes(pairs)
        self.classes = [str(number) for number in range(classes)]
        self.mean = torch.tensor(MEAN).view(3, 1, 1)
        self.std = torch.tensor(STD).view(3, 1, 1)
        count = held_out(len(pairs), settings.eval_samples, DEFAULT_EVAL_FRACTION)
        train_index, eval_index = hold_out(len(pairs), count)

        def part(indices: Indices) -> Masks:
            return Masks([pairs[index] for index in indices], self)

        self._train = part(train_index)
        self._eval = part(eval_index) if count else None
        self.config_keys = label_keys(self.classes)
        if settings.source.folder is None:
            self.config_keys["image_size"] = self.side

    def items(self, batch: MaskBatch) -> Tensor:
        """The pixels that have a class."""
        _, masks_NHW = batch
        return (masks_NHW != NO_CLASS).sum()

    def loss(self, model: nn.Module, batch: MaskBatch) -> Tensor:
        """The mean cross entropy of the pixels that have a class."""
        inputs, masks_NHW = batch
        return self._loss(_in_size(model(inputs), masks_NHW), masks_NHW)

    def _loss(self, logits_NCHW: Tensor, masks_NHW: Tensor) -> Tensor:
        total = F.cross_entropy(logits_NCHW, masks_NHW, ignore_index=NO_CLASS, reduction="sum")
        return total / (masks_NHW != NO_CLASS).sum().clamp(min=1)

    def metrics(self, model: nn.Module, batch: MaskBatch) -> dict[str, Tensor]:
        """The loss, the accuracy, and the pixels of each class for each pixel."""
        inputs, masks_NHW = batch
        logits_NCHW = _in_size(model(inputs), masks_NHW)
        has_class = masks_NHW != NO_CLASS
        pixels = has_class.sum().clamp(min=1)
        predicted = logits_NCHW.argmax(1)[has_class]
        labelled = masks_NHW[has_class]
        count = len(self.classes)
        intersection = torch.bincount(labelled[predicted == labelled], minlength=count)
        of_labels = torch.bincount(labelled, minlength=count)
        of_predictions = torch.bincount(predicted, minlength=count)
        union = of_labels + of_predictions - intersection
        counts = {
            f"_{name}_{number}": values[number] / pixels
            for name, values in (("intersection", intersection), ("union", union))
            for number in range(count)
        }
        return {
            "loss": self._loss(logits_NCHW, masks_NHW),
            "accuracy": intersection.sum() / pixels,
            **counts,
        }

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """The mean IoU of the classes that occur."""
        pairs = [
            (means[f"_intersection_{number}"], means[f"_union_{number}"])
            for number in range(len(self.classes))
        ]
        each = [intersection / union for intersection, union in pairs if union]
        return {"mean_iou": sum(each) / len(each) if each else 0.0}

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Pictures whose pixels get a class."""
        return PicturesInput(side=self.side, mean=self.mean, std=self.std)

    def write_files(self, folder: Path) -> None:
        """Write how pictures are prepared, as the library's processors read it."""
        config = {
            "image_processor_type": "SegformerImageProcessor",
            "do_resize": True,
            "size": {"height": self.side, "width": self.side},
            "resample": 2,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(MEAN),
            "image_std": list(STD),
            "do_reduce_labels": False,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(config, indent=1))


def _in_size(logits_NChw: Tensor, masks_NHW: Tensor) -> Tensor:
    """Logits (N, classes, h, w) in the size of masks."""
    return F.interpolate(
        logits_NChw.float(), size=masks_NHW.shape[-2:], mode="bilinear", align_corners=False
    )


def _side(settings: Settings, written: int | None) -> int:
    """The side of the squares that pictures become: as written, else the model's, else the usual.

    Args:
        settings: The model.
        written: `task_args.image_size`.
    """
    if written is not None:
        return whole_number("image_size", written)
    size = getattr(settings.base, "image_size", None)
    return size if isinstance(size, int) else DEFAULT_SIDE


# --- reading --------------------------------------------------------------------------------------


def _pairs(data: Any) -> list[Listed]:
    """Pictures and their masks: what JSON lines name, or two folders of files of the same names.

    Raises:
        UserError: There are none, or a picture has no mask.
    """
    folder = existing(data, "task_args.data") if isinstance(data, str) and "*" not in data else None
    if folder is None or not folder.is_dir():
        listed = read_listed(data, file_key="image", text_key="mask", example=EXAMPLE)
        return [replace(each, text=str(each.folder / each.text)) for each in listed]
    masks = {path.stem: path for path in sorted((folder / "masks").glob("*.png"))}
    pairs = []
    for path in sorted((folder / "images").glob("*")):
        if path.suffix.lower() not in PICTURES:
            continue
        if path.stem not in masks:
            raise UserError(f"{path} has no mask {folder / 'masks' / path.stem}.png; write one")
        pairs.append(Listed(str(path), path, str(masks[path.stem]), folder))
    if len(pairs) < 2:
        raise UserError(
            f"{folder} has {len(pairs)} pictures in images/ with masks in masks/; "
            "at least two are needed"
        )
    return pairs


def _mask(pair: Listed) -> npt.NDArray[np.uint8]:
    """The classes of the pixels of a picture.

    Raises:
        UserError: The file is no mask of the picture.
    """
    mask = read_picture(Path(pair.text), pair.place)
    if mask.mode not in ("L", "P", "1"):
        raise UserError(
            f"{pair.place}: {pair.text} has {mask.mode} pixels; a mask has one number for each "
            "pixel, its class (255: none), as grey or palette .png files have"
        )
    return np.array(mask, dtype=np.uint8)


def _classes(pairs: Sequence[Listed]) -> int:
    """The number of classes: the largest number in a mask, plus one."""
    largest = -1
    for pair in pairs:
        numbers = _mask(pair)
        numbers = numbers[numbers != NO_CLASS]
        largest = max(largest, int(numbers.max(initial=0)))
    if largest < 1:
        raise UserError(f"{pairs[0].text} and the other masks have one class only: write more")
    return largest + 1


class Masks(Dataset[Any]):
    """Pictures with their masks, read when they are fetched.

    Args:
        pairs: The files of pictures, and those of masks.
        kind: Says how they are prepared.
    """

    def __init__(self, pairs: list[Listed], kind: SemanticSegmentation) -> None:
        self.pairs = pairs
        self.side = kind.side
        self.mean = kind.mean
        self.std = kind.std

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> MaskBatch:
        inputs, masks_NHW = self.__getitems__([index])
        return {name: value[0] for name, value in inputs.items()}, masks_NHW[0]

    def __getitems__(self, indices: Sequence[int]) -> MaskBatch:
        from PIL import Image

        chosen = [self.pairs[index] for index in indices]
        pictures = [read_picture(pair.path, pair.place) for pair in chosen]
        masks = [
            np.array(
                Image.fromarray(_mask(pair)).resize(
                    (self.side, self.side), Image.Resampling.NEAREST
                )
            )
            for pair in chosen
        ]
        inputs = {"pixel_values": stretched(pictures, self.side, self.mean, self.std)}
        return inputs, torch.from_numpy(np.stack(masks)).long()
