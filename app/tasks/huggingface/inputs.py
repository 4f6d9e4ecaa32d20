"""What a person gives a model of the library (images, texts, questions) and what it answers; kept with it in MLflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.models.prediction import Preprocessor, classes_table, texts_of
from app.tasks.language import NEW_TOKENS, TextInput
from app.tasks.vision import ImageInput


@dataclass
class FittedImages(ImageInput):
    channels: int
    sides: tuple[int, int] | None

    def __call__(self, given: Any) -> dict[str, Any]:
        return {"pixel_values": fitted(self.standardised(given), self.channels, self.sides)}

    def for_transformers(self) -> dict[str, Any]:
        """As its image processors read it, which bring pixels to 0 … 1 first."""
        height, width = self.sides or self.example.shape[1:3]
        whole = 255.0 if self.example.dtype.kind in "ui" else 1.0
        mean, std = ((each.flatten() / whole).expand(self.channels).tolist() for each in (self.mean, self.std))
        sizes = {"do_resize": True, "size": {"height": height, "width": width}, "resample": 2}
        pixels = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
        return {"image_processor_type": "ViTImageProcessor", **sizes, **pixels, "image_mean": mean, "image_std": std}


def fitted(images: Tensor, channels: int, sides: tuple[int, int] | None) -> Tensor:
    if sides and tuple(images.shape[2:]) != sides:
        images = F.interpolate(images, sides, mode="bilinear", antialias=True)
    return images.expand(-1, channels, -1, -1) if images.shape[1] == 1 < channels else images


@dataclass
class TextsInput(Preprocessor):
    """Texts to classify; tokenizer: the library's."""

    tokenizer: Any
    longest: int
    classes: list[str]
    keywords: dict[str, Any]

    @property
    def example(self) -> Any:
        import pandas

        return pandas.DataFrame({"text": ["a text"]})

    def __call__(self, given: Any) -> dict[str, Any]:
        how = {"padding": True, "truncation": True, "max_length": self.longest, "return_tensors": "pt"}
        found = self.tokenizer(texts_of(given), **how)
        return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], **self.keywords}

    def read(self, output: Any) -> Any:
        return classes_table("label", self.classes, output)


@dataclass
class ChatInput(TextInput):
    """Questions, which the model answers. tokenizer: the library's, with a chat template."""

    @property
    def example(self) -> Any:
        import pandas

        return pandas.DataFrame({"text": ["What is a list?"]})

    def encode(self, text: str) -> Tensor:
        """(1, tokens): the text as a user's message, and what comes before the answer."""
        asked = [{"role": "user", "content": text}]
        how = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return self.tokenizer.apply_chat_template(asked, **how)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def predict(self, model: nn.Module, given: Any) -> Any:
        import pandas

        return pandas.DataFrame(
            {"text": [self._continuation(model, text).partition(self.end)[0] for text in texts_of(given)]}
        )


@dataclass
class PairsInput(TextsInput):
    """Texts, of which the model makes others."""

    start: int = 0  # the decoder's first token
    end: ClassVar[str] = ""  # its last one is no text

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def __call__(self, given: Any) -> dict[str, Any]:
        found = super().__call__(given)
        return {**found, "decoder_input_ids": torch.full((len(found["input_ids"]), 1), self.start)}

    def predict(self, model: nn.Module, given: Any) -> Any:
        import pandas

        inputs = super().__call__(given) | {"max_new_tokens": NEW_TOKENS, "do_sample": False, "use_cache": True}
        inputs |= {"decoder_start_token_id": self.start, "eos_token_id": self.tokenizer.eos_token_id}
        device = next(model.parameters()).device
        made = model.generate(  # type: ignore[operator]
            **{name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        )
        return pandas.DataFrame({"text": self.tokenizer.batch_decode(made, skip_special_tokens=True)})
