"""Preprocessors of the library's models: from images, texts or questions to answers.

MLflow keeps them with a model. The names of their fields are part of what is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.models.prediction import Preprocessor, classes_table, texts_of
from app.tasks.language import PREDICTED_TOKENS, TextInput
from app.tasks.vision import ImageInput

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(kw_only=True)
class FittedImages(ImageInput):
    """Images, resized to what the model was made for.

    Args:
        channels: The model's number of channels.
        sides: The model's height and width; None if it takes any size.
    """

    channels: int
    sides: tuple[int, int] | None

    def __call__(self, images: Any) -> dict[str, Any]:
        """The model's arguments for images as `ImageInput.standardised` takes them."""
        return {"pixel_values": fitted(self.standardised(images), self.channels, self.sides)}

    def for_transformers(self) -> dict[str, Any]:
        """The configuration of the library's image processor for the same preprocessing."""
        height, width = self.sides or self.example.shape[1:3]
        # The library's processor brings pixels to 0 … 1 first. Ours does not.
        is_integer = self.example.dtype.kind in "ui"
        scale = 255.0 if is_integer else 1.0
        return {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": height, "width": width},
            "resample": 2,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self._per_channel(self.mean / scale),
            "image_std": self._per_channel(self.std / scale),
        }

    def _per_channel(self, values: Tensor) -> list[float]:
        return values.flatten().expand(self.channels).tolist()


def fitted(images: Tensor, channels: int, sides: tuple[int, int] | None) -> Tensor:
    """Images in the size and with the channels of a model.

    Args:
        images: (n, channels, height, width).
        channels: The model's number of channels; grey images are repeated.
        sides: The model's height and width; None if it takes any size.
    """
    if sides and tuple(images.shape[2:]) != sides:
        images = F.interpolate(images, sides, mode="bilinear", antialias=True)
    if images.shape[1] == 1 and channels > 1:
        images = images.expand(-1, channels, -1, -1)
    return images


@dataclass(kw_only=True)
class TextsInput(Preprocessor):
    """Texts to classify.

    Args:
        tokenizer: The library's tokenizer.
        longest: How many tokens of a text are used.
        classes: The names of the classes.
        keywords: Further arguments of the model.
    """

    tokenizer: Any
    longest: int
    classes: list[str]
    keywords: dict[str, Any]

    @property
    def example(self) -> DataFrame:
        """A table of texts with one row."""
        import pandas

        return pandas.DataFrame({"text": ["a text"]})

    def __call__(self, texts: Any) -> dict[str, Any]:
        """The model's arguments for texts."""
        encoded = self.tokenizer(
            texts_of(texts),
            padding=True,
            truncation=True,
            max_length=self.longest,
            return_tensors="pt",
        )
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            **self.keywords,
        }

    def read(self, output: Any) -> DataFrame:
        """Each text's most probable class."""
        return classes_table("label", self.classes, output)


@dataclass(kw_only=True)
class ChatInput(TextInput):
    """Questions, which the model answers. Its tokenizer is the library's, with a chat template."""

    @property
    def example(self) -> DataFrame:
        """A table of questions with one row."""
        import pandas

        return pandas.DataFrame({"text": ["What is a list?"]})

    def encode(self, text: str) -> Tensor:
        """The tokens of a user's message and of what comes before the answer, (1, tokens)."""
        encoded = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        return encoded["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(ids)

    def predict(self, model: nn.Module, texts: Any) -> DataFrame:
        """The answer to each question."""
        import pandas

        answers = []
        for question in texts_of(texts):
            answer, _, _ = self._continuation(model, question).partition(self.end)
            answers.append(answer)
        return pandas.DataFrame({"text": answers})


@dataclass(kw_only=True)
class PromptInput(ChatInput):
    """Prompts as they are written, which the model answers."""

    def encode(self, text: str) -> Tensor:
        """The tokens of a prompt, (1, tokens)."""
        ids = self.tokenizer(text)["input_ids"]
        return torch.tensor([ids or [0]])


@dataclass(kw_only=True)
class PairsInput(TextsInput):
    """Texts, from which a model with an encoder and a decoder makes other texts.

    Args:
        start: The decoder's first token.
    """

    start: int = 0
    end: ClassVar[str] = ""
    """What comes after the text that is asked for: nothing, since special tokens have no text."""

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, without special ones."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def __call__(self, texts: Any) -> dict[str, Any]:
        """The model's arguments for texts, with the decoder at its first token."""
        arguments = super().__call__(texts)
        count = len(arguments["input_ids"])
        return {**arguments, "decoder_input_ids": torch.full((count, 1), self.start)}

    def predict(self, model: nn.Module, texts: Any) -> DataFrame:
        """The most probable text for each text."""
        import pandas

        device = next(model.parameters()).device
        arguments = {
            **super().__call__(texts),
            "max_new_tokens": PREDICTED_TOKENS,
            "do_sample": False,
            "use_cache": True,
            "decoder_start_token_id": self.start,
            "eos_token_id": self.tokenizer.eos_token_id,
        }
        on_device = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        tokens = model.generate(**on_device)  # type: ignore[operator]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return pandas.DataFrame({"text": texts})
