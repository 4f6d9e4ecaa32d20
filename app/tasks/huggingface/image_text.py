"""Images and texts in one space (CLIP, Radford et al. 2021, 2103.00020).

The model makes a vector of length 1 of each picture and of each text. With s the learnt scale, the
logits of picture i and text j of a batch are s·xᵢ·yⱼ, and the loss is the mean of the cross entropy
over the texts for each picture and over the pictures for each text, of which the right one is its
own. So the samples of a batch meet in the loss, and the vectors of all workers and micro-batches
are gathered (app/tasks/README.md): it is the loss of the global batch on every layout.

An evaluation compares the samples of one batch of train.eval_batch_size. The accuracies say for how
many pictures (or texts) the nearest text (or picture) is their own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.order import Indices, held_out, hold_out
from app.data.pictures import read_picture
from app.errors import UserError
from app.models.prediction import Preprocessor
from app.tasks.huggingface.inputs import ImagesAndTextsInput, squares
from app.tasks.huggingface.kind import Kind, Settings, vocabulary_keys
from app.tasks.huggingface.listed import Listed, read_listed, require_texts
from app.tasks.huggingface.model import ModelSource
from app.tasks.huggingface.tokenizer import encoder_tokenizer, longest_text, padded_encoding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_EVAL_FRACTION = 0.1
EXAMPLE = '{"image": "pictures/1.jpg", "text": "what it shows"}'
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Of the pictures that CLIP was trained on."""

PictureBatch = tuple[dict[str, Tensor], Tensor]
"""`pixel_values` (N, 3, side, side), `input_ids` and `attention_mask` (N, T); and no targets."""
Vectors = tuple[Tensor, Tensor, Tensor]
"""Of the pictures (N, D) and of the texts (N, D), and the scale."""


class ImageText(Kind):
    """Which text belongs to which picture."""

    name = "image_text"
    model_class = "AutoModelForZeroShotImageClassification"
    table = "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES"
    options = ("tokenizer", "sequence_length", "text")
    default_length = 77
    text_key = "text_config"
    gathers = True
    reads_files = True

    def __init__(self, settings: Settings, *, text: str = "text") -> None:
        base = settings.base
        if not hasattr(base, "logit_scale_init_value"):
            raise UserError(
                f"{base.model_type} does not compare pictures and texts by a scale alone, as clip "
                "does, which kind: image_text needs; write a model such as clip"
            )
        pairs = read_listed(settings.data, file_key="image", text_key=text, example=EXAMPLE)
        require_texts(pairs, text)
        self.tokenizer = settings.tokenizer
        self.longest = settings.sequence_length
        positions = base.text_config.max_position_embeddings
        if self.longest > positions:
            raise UserError(
                f"task_args.sequence_length is {self.longest}, but the model has {positions} "
                f"positions; write at most {positions}"
            )
        self.side = int(base.vision_config.image_size)
        self.mean, self.std = statistics_of(settings.source.folder)
        count = held_out(len(pairs), settings.eval_samples, DEFAULT_EVAL_FRACTION)
        train_index, eval_index = hold_out(len(pairs), count)

        def part(indices: Indices) -> PicturesAndTexts:
            return PicturesAndTexts([pairs[index] for index in indices], self)

        self._train = part(train_index)
        self._eval = part(eval_index) if count else None
        # The model reads a text's vector at its end.
        special_tokens = {
            "pad_token_id": self.tokenizer.pad_token_id,
            "bos_token_id": self.tokenizer.cls_token_id,
            "eos_token_id": self.tokenizer.sep_token_id,
        }
        of_texts = replace(settings, base=base.text_config)
        self.config_keys = {"text_config": vocabulary_keys(of_texts, special_tokens)}

    @staticmethod
    def open_tokenizer(source: ModelSource, path: str) -> Any:
        """The library's tokenizer, with the marks of an encoder."""
        return encoder_tokenizer(source, path)

    @classmethod
    def is_architecture(cls, name: str) -> bool:
        """Whether a class of the library, such as CLIPModel, is a model of this kind."""
        return name.endswith("Model")

    def answer(self, output: Any) -> Vectors:
        """The vectors of pictures and texts, and the scale of their products.

        The scale is a parameter, which only the model may read, because a strategy may shard it. So
        it is computed from the output: the logits are the products times the scale, and its
        least-squares estimate is Σ logits·products / Σ products².
        """
        products = output.image_embeds.float() @ output.text_embeds.float().t()
        logits = output.logits_per_image.float()
        scale = (logits * products).sum() / products.square().sum()
        return output.image_embeds.float(), output.text_embeds.float(), scale

    def loss(self, model: nn.Module, batch: PictureBatch) -> Tensor:
        """The loss of the global batch."""
        inputs, _ = batch
        loss, _, _ = self._compared(model(inputs))
        return loss

    def metrics(self, model: nn.Module, batch: PictureBatch) -> dict[str, Tensor]:
        """The loss of the batch, and the shares of samples whose own text or picture is nearest."""
        inputs, _ = batch
        loss, logits, partners = self._compared(model(inputs))
        return {
            "loss": loss,
            "text_accuracy": (logits.argmax(1) == partners).float().mean(),
            "image_accuracy": (logits.argmax(0) == partners).float().mean(),
        }

    def _compared(self, vectors: Vectors) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the logits of pictures and texts, and the number of each one's partner."""
        images, texts, scale = vectors
        logits = scale * self.gather(images) @ self.gather(texts).t()
        partners = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, partners) + F.cross_entropy(logits.t(), partners)) / 2
        return loss, logits, partners

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Pictures and texts to compare."""
        return ImagesAndTextsInput(
            tokenizer=self.tokenizer,
            longest=self.longest,
            side=self.side,
            mean=self.mean,
            std=self.std,
            keywords=dict(self.keywords),
        )

    def write_files(self, folder: Path) -> None:
        """Write how pictures are prepared, as the library's processors read it."""
        config = {
            "image_processor_type": "CLIPImageProcessor",
            **squares_config(self.side, self.mean, self.std),
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(config, indent=1))


def squares_config(side: int, mean: Tensor, std: Tensor) -> dict[str, Any]:
    """The configuration of the library's CLIPImageProcessor for what `squares` does.

    Args:
        side: Pixels of a side of the pictures that the model takes.
        mean: The mean of each channel, (3, 1, 1), of numbers from 0 to 1.
        std: Their deviation.
    """
    return {
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": side},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean.flatten().tolist(),
        "image_std": std.flatten().tolist(),
    }


def statistics_of(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, (3, 1, 1): what the folder says, else CLIP's.

    Args:
        folder: The folder of a model; None for a new one.
    """
    file = None if folder is None else folder / "preprocessor_config.json"
    config = json.loads(file.read_text()) if file is not None and file.is_file() else {}
    values = config.get("image_mean", MEAN), config.get("image_std", STD)
    mean, std = (torch.tensor(each, dtype=torch.float32).view(3, 1, 1) for each in values)
    return mean, std


class PicturesAndTexts(Dataset[Any]):
    """Pictures with their texts, read when they are fetched.

    Args:
        pairs: The files of pictures, and their texts.
        kind: Says how they are prepared.

    Attributes:
        longest_sample: The number of the longest text.
    """

    def __init__(self, pairs: list[Listed], kind: ImageText) -> None:
        self.pairs = pairs
        self.tokenizer = kind.tokenizer
        self.longest = kind.longest
        self.side = kind.side
        self.mean = kind.mean
        self.std = kind.std
        texts = [pair.text for pair in pairs]
        self.longest_sample = longest_text(texts, kind.tokenizer, limit=kind.longest)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> PictureBatch:
        inputs, nothing = self.__getitems__([index])
        return {name: value[0] for name, value in inputs.items()}, nothing[0]

    def __getitems__(self, indices: Sequence[int]) -> PictureBatch:
        chosen = [self.pairs[index] for index in indices]
        encoded = padded_encoding(
            self.tokenizer, [pair.text for pair in chosen], longest=self.longest
        )
        pictures = [read_picture(pair.path, pair.place) for pair in chosen]
        inputs = {
            "pixel_values": squares(pictures, self.side, self.mean, self.std),
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
        }
        return inputs, torch.zeros(len(chosen))
