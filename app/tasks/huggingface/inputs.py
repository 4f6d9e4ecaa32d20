"""Preprocessors of the library's models: from images, texts or questions to answers.

MLflow keeps them with a model. The names of their fields are part of what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.models.prediction import (
    Preprocessor,
    call_model,
    classes_table,
    logits_of,
    texts_of,
)
from app.tasks.huggingface.spans import best_spans, windows_of
from app.tasks.language import PREDICTED_TOKENS, TextInput
from app.tasks.vision import ImageInput

if TYPE_CHECKING:
    from pandas import DataFrame

SMALLEST_VARIANCE = 1e-7  # added to that of a recording, as the library's Wav2Vec2 does


# --- calls of the library -------------------------------------------------------------------------


def encoded_texts(tokenizer: Any, texts: Any, longest: int) -> dict[str, Tensor]:
    """A model's arguments for texts, padded to the longest of them.

    Args:
        tokenizer: The library's tokenizer.
        texts: As `texts_of` takes them.
        longest: How many tokens of a text are used.
    """
    encoded = tokenizer(
        texts_of(texts),
        padding=True,
        truncation=True,
        max_length=longest,
        return_tensors="pt",
    )
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def generate(
    model: nn.Module,
    arguments: Mapping[str, Any],
    *,
    max_new_tokens: int = PREDICTED_TOKENS,
    **options: Any,
) -> Tensor:
    """The most probable tokens that a model of the library generates, (B, tokens).

    Args:
        model: The model.
        arguments: Of the model; tensors are moved to its device.
        max_new_tokens: How many tokens it generates at most.
        options: Further ones of the library's `generate`.
    """
    device = next(model.parameters()).device
    on_device = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    return model.generate(  # type: ignore[operator]
        **on_device, max_new_tokens=max_new_tokens, do_sample=False, **options
    )


# --- texts ----------------------------------------------------------------------------------------


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
        return {**encoded_texts(self.tokenizer, texts, self.longest), **self.keywords}

    def read(self, output: Any) -> DataFrame:
        """Each text's most probable class."""
        return classes_table("label", self.classes, output)


@dataclass(kw_only=True)
class FillInput(TextsInput):
    """Texts with mask tokens, in whose place the model puts the most probable tokens."""

    classes: list[str] = field(default_factory=list)

    @property
    def example(self) -> DataFrame:
        """A table of texts with one row."""
        import pandas

        return pandas.DataFrame({"text": [f"a {self.tokenizer.mask_token} text"]})

    def predict(self, model: nn.Module, texts: Any) -> DataFrame:
        """Each text with its masks filled."""
        import pandas

        arguments = self(texts)
        tokens_BT = arguments["input_ids"]
        logits_BTV = logits_of(call_model(model, arguments))
        filled_BT = torch.where(
            tokens_BT == self.tokenizer.mask_token_id, logits_BTV.argmax(-1).cpu(), tokens_BT
        )
        filled = self.tokenizer.batch_decode(filled_BT, skip_special_tokens=True)
        return pandas.DataFrame({"text": filled})


@dataclass(kw_only=True)
class WordsInput(TextsInput):
    """Texts, each of whose words gets a class."""

    def predict(self, model: nn.Module, texts: Any) -> DataFrame:
        """The words of each text, which white space separates, and their classes.

        Words beyond the length have none.
        """
        import pandas

        sentences = [text.split() for text in texts_of(texts)]
        joined = [" ".join(words) for words in sentences]
        logits_BTC = logits_of(call_model(model, self(joined)))
        spans = self.tokenizer(
            joined, truncation=True, max_length=self.longest, return_offsets_mapping=True
        )["offset_mapping"]
        labels = []
        for words, spans_T, classes_T in zip(
            sentences, spans, logits_BTC.argmax(-1).tolist(), strict=True
        ):
            first = [token for token in first_tokens(spans_T, words) if token is not None]
            labels.append([self.classes[classes_T[token]] for token in first])
        return pandas.DataFrame({"words": sentences, "labels": labels})


def first_tokens(spans: Sequence[Sequence[int]], words: Sequence[str]) -> list[int | None]:
    """Which token of a sentence each word begins with; None if it begins beyond the tokens.

    Args:
        spans: The first character of each token and the one after its last. Marks and padding,
            which are no part of the sentence, have empty ones.
        words: The words, between which the sentence has a space.
    """
    first: list[int | None] = []
    begin = 0
    token = 0
    for word in words:
        end = begin + len(word)
        # A token may begin with the space before its word.
        while token < len(spans) and spans[token][1] <= begin:
            token += 1
        is_of_word = token < len(spans) and spans[token][0] < end
        first.append(token if is_of_word else None)
        begin = end + 1
    return first


# --- questions about contexts ---------------------------------------------------------------------


@dataclass(kw_only=True)
class QuestionsInput(Preprocessor):
    """Tables of questions and contexts, in which the model finds the answers.

    Args:
        tokenizer: The library's tokenizer.
        longest: Tokens of a window at most.
        stride: Tokens of a context that neighbouring windows share.
        may_lack_answer: Whether a context may not have the answer.
        names: The arguments that the model takes.
        keywords: Further arguments of the model.
    """

    tokenizer: Any
    longest: int
    stride: int
    may_lack_answer: bool
    names: list[str]
    keywords: dict[str, Any]

    @property
    def example(self) -> DataFrame:
        """A table with one row."""
        import pandas

        return pandas.DataFrame({"question": ["Who sleeps?"], "context": ["Ada sleeps."]})

    def __call__(self, table: Any) -> dict[str, Any]:
        """The model's arguments for the windows of a table's first row."""
        arguments, _ = self._windows(str(table["question"].iloc[0]), str(table["context"].iloc[0]))
        return arguments

    def predict(self, model: nn.Module, table: Any) -> DataFrame:
        """The answer to each question; "" where the context does not have one."""
        import pandas

        rows = zip(table["question"], table["context"], strict=True)
        answers = [self._answer(model, str(question), str(context)) for question, context in rows]
        return pandas.DataFrame({"answer": answers})

    def _answer(self, model: nn.Module, question: str, context: str) -> str:
        arguments, spans_WT = self._windows(question, context)
        output = call_model(model, arguments)
        logits_WT2 = torch.stack([output.start_logits, output.end_logits], -1).float().cpu()
        is_context_WT = torch.tensor([[begin >= 0 for begin, _ in spans] for spans in spans_WT])
        best = best_spans(logits_WT2[None], is_context_WT[None])
        if self.may_lack_answer and best.margin.item() < 0:
            return ""
        spans_T = spans_WT[int(best.window)]
        begin, _ = spans_T[int(best.first)]
        _, end = spans_T[int(best.last)]
        return context[begin:end]

    def _windows(
        self, question: str, context: str
    ) -> tuple[dict[str, Any], list[list[tuple[int, int]]]]:
        """The model's arguments for the windows of a question, and the spans of their tokens."""
        windows = windows_of(
            self.tokenizer, [question], [context], longest=self.longest, stride=self.stride
        )
        length = max(len(window.ids) for window in windows)

        def padded(rows: list[list[int]], value: int) -> Tensor:
            return torch.tensor([row + [value] * (length - len(row)) for row in rows])

        inputs = {
            "input_ids": padded([window.ids for window in windows], self.tokenizer.pad_token_id),
            "attention_mask": padded([[1] * len(window.ids) for window in windows], 0),
            "token_type_ids": padded([window.types for window in windows], 0),
        }
        arguments = {name: inputs[name] for name in self.names}
        spans = [window.spans + [(-1, -1)] * (length - len(window.ids)) for window in windows]
        return {**arguments, **self.keywords}, spans


# --- texts for texts ------------------------------------------------------------------------------


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

        tokens = generate(
            model,
            {**super().__call__(texts), "use_cache": True},
            decoder_start_token_id=self.start,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        answers = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return pandas.DataFrame({"text": answers})


# --- recordings -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class RecordingsInput(Preprocessor):
    """Recordings, as numbers from -1 to 1.

    Args:
        tokenizer: The library's, for the text.
        rate: How many samples a second has.
        keywords: Further arguments of the model.
    """

    tokenizer: Any
    rate: int
    keywords: dict[str, Any]

    @property
    def example(self) -> Any:
        """One recording of a second, (1, samples)."""
        return np.zeros((1, self.rate), np.float32)

    def _rows(self, recordings: Any) -> list[Any]:
        """The samples of each recording."""
        return [np.asarray(recording, np.float32) for recording in recordings]


@dataclass(kw_only=True)
class SoundInput(RecordingsInput):
    """Recordings, of which the model reads the text, character by character.

    Args:
        has_mask: Whether the model takes a mask of the samples that are not padding.
    """

    has_mask: bool

    def __call__(self, recordings: Any) -> dict[str, Any]:
        """The model's arguments for recordings from -1 to 1."""
        rows = self._rows(recordings)
        return {**standardised_sound(rows, has_mask=self.has_mask), **self.keywords}

    def read(self, output: Any) -> DataFrame:
        """The text of each recording."""
        import pandas

        texts = self.tokenizer.batch_decode(logits_of(output).argmax(-1))
        return pandas.DataFrame({"text": texts})


@dataclass(kw_only=True)
class SpectrogramInput(RecordingsInput):
    """Recordings, which a model with an encoder and a decoder writes down.

    Args:
        extractor: The library's extractor of spectrograms.
        start: The decoder's first token.
        longest: How many tokens of a text the model can take.
    """

    extractor: Any
    start: int
    longest: int

    def __call__(self, recordings: Any) -> dict[str, Any]:
        """The model's arguments for recordings from -1 to 1, with the decoder at its start."""
        rows = self._rows(recordings)
        features = self.extractor(rows, sampling_rate=self.rate, return_tensors="pt")
        return {
            "input_features": features["input_features"],
            "decoder_input_ids": torch.full((len(rows), 1), self.start),
            **self.keywords,
        }

    def predict(self, model: nn.Module, recordings: Any) -> DataFrame:
        """The most probable text of each recording."""
        import pandas

        tokens = generate(
            model,
            {"input_features": self(recordings)["input_features"]},
            max_new_tokens=min(PREDICTED_TOKENS, self.longest // 2),
            decoder_start_token_id=self.start,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return pandas.DataFrame({"text": texts})


def standardised_sound(
    recordings: Sequence[Any], *, padded: int | None = None, has_mask: bool
) -> dict[str, Tensor]:
    """Recordings as a model takes them: each with mean 0 and deviation 1, then padded by zeros.

    Args:
        recordings: Arrays of float32 (samples,).
        padded: The length of a row; None: that of the longest recording.
        has_mask: Whether the model takes a mask of the samples that are not padding.

    Returns:
        `input_values` (B, S), and if it is wanted `attention_mask` (B, S).
    """
    length = padded or max(len(recording) for recording in recordings)
    values = np.zeros((len(recordings), length), np.float32)
    mask = np.zeros(values.shape, np.int64)
    for row, recording in enumerate(recordings):
        deviation = np.sqrt(recording.var() + SMALLEST_VARIANCE)
        values[row, : len(recording)] = (recording - recording.mean()) / deviation
        mask[row, : len(recording)] = 1
    inputs = {"input_values": torch.from_numpy(values)}
    return {**inputs, "attention_mask": torch.from_numpy(mask)} if has_mask else inputs


# --- images ---------------------------------------------------------------------------------------


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


def sides_of(config: Any) -> tuple[int, int] | None:
    """Height and width of the images that a model is made for; None if it takes any.

    Args:
        config: The model's configuration.
    """
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return size, size
    if isinstance(size, (list, tuple)) and len(size) == 2:
        height, width = size
        return int(height), int(width)
    return None


# --- pictures -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class PicturesInput(Preprocessor):
    """Pictures, each of whose pixels gets a class.

    Args:
        side: Pixels of a side of the pictures that the model takes.
        mean: The mean of each channel, (3, 1, 1), of numbers from 0 to 1.
        std: Their deviation.
    """

    side: int
    mean: Tensor
    std: Tensor

    @property
    def example(self) -> Any:
        """One picture, (1, height, width, 3) from 0 to 255."""
        return np.zeros((1, self.side, self.side, 3), np.uint8)

    def __call__(self, pictures: Any) -> dict[str, Any]:
        """The model's arguments for pictures (n, height, width, 3) from 0 to 255."""
        from PIL import Image

        opened = [Image.fromarray(np.asarray(picture, np.uint8)) for picture in pictures]
        return {"pixel_values": stretched(opened, self.side, self.mean, self.std)}

    def read(self, output: Any) -> Any:
        """The class of each pixel, (n, side, side)."""
        size = (self.side, self.side)
        logits = F.interpolate(logits_of(output).float(), size=size, mode="bilinear")
        return logits.argmax(1).cpu().numpy()


@dataclass(kw_only=True)
class ImagesAndTextsInput(Preprocessor):
    """Tables of pictures and texts, of which the model says how well they fit.

    Args:
        tokenizer: The library's tokenizer.
        longest: How many tokens of a text are used.
        side: Pixels of a side of the pictures that the model takes.
        mean: The mean of each channel, (3, 1, 1), of numbers from 0 to 1.
        std: Their deviation.
        keywords: Further arguments of the model.
    """

    tokenizer: Any
    longest: int
    side: int
    mean: Tensor
    std: Tensor
    keywords: dict[str, Any]

    @property
    def example(self) -> DataFrame:
        """A table with one row: the path of a picture, and a text."""
        import pandas

        return pandas.DataFrame({"image": [""], "text": ["a text"]})

    def __call__(self, table: Any) -> dict[str, Any]:
        """The model's arguments for a table of paths and texts; no path is a black picture."""
        pictures = [picture_or_black(path) for path in table["image"]]
        return {
            **encoded_texts(self.tokenizer, table[["text"]], self.longest),
            "pixel_values": squares(pictures, self.side, self.mean, self.std),
            **self.keywords,
        }

    def read(self, output: Any) -> DataFrame:
        """For each picture the number of the text that fits best, and its probability."""
        import pandas

        probability, text = output.logits_per_image.float().softmax(-1).max(-1)
        return pandas.DataFrame(
            {"best_text": text.cpu().numpy(), "probability": probability.cpu().numpy()}
        )


@dataclass(kw_only=True)
class PictureQuestionsInput(Preprocessor):
    """Tables of pictures and questions, which the model answers.

    Args:
        tokenizer: The library's tokenizer, with a chat template.
        longest: How many tokens the model can take.
        image_token: The token in whose places a picture is put.
        tokens_of_picture: How many of them a picture has.
        takes_parts: Whether the chat template takes the parts of a message.
        end: What comes after an answer.
        side: Pixels of a side of the pictures that the model takes.
        mean: The mean of each channel, (3, 1, 1), of numbers from 0 to 1.
        std: Their deviation.
        keywords: Further arguments of the model.
    """

    tokenizer: Any
    longest: int
    image_token: str
    tokens_of_picture: int
    takes_parts: bool
    end: str
    side: int
    mean: Tensor
    std: Tensor
    keywords: dict[str, Any]

    @property
    def example(self) -> DataFrame:
        """A table with one row: the path of a picture, and a question."""
        import pandas

        return pandas.DataFrame({"image": [""], "text": ["What is it?"]})

    def __call__(self, table: Any) -> dict[str, Any]:
        """The model's arguments for a table's first row; no path is a black picture."""
        return self._arguments(table["image"].iloc[0], str(table["text"].iloc[0]))

    def predict(self, model: nn.Module, table: Any) -> DataFrame:
        """The answer to each question."""
        import pandas

        answers = []
        for path, question in zip(table["image"], table["text"], strict=True):
            arguments = self._arguments(path, str(question))
            length = arguments["input_ids"].size(1)
            tokens = generate(
                model,
                {**arguments, "use_cache": True},
                suppress_tokens=[self.tokenizer.convert_tokens_to_ids(self.image_token)],
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            answer = self.tokenizer.decode(tokens[0, length:])
            answers.append(answer.partition(self.end)[0] if self.end else answer)
        return pandas.DataFrame({"text": answers})

    def text(self, question: str) -> str:
        """A user's question about a picture and what comes before the answer, as text."""
        content: Any = f"{self.image_token}\n{question}"
        if self.takes_parts:
            content = [{"type": "image"}, {"type": "text", "text": question}]
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    def _arguments(self, path: str, question: str) -> dict[str, Any]:
        picture = self.image_token * self.tokens_of_picture
        text = self.text(question).replace(self.image_token, picture, 1)
        encoded = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "pixel_values": squares([picture_or_black(path)], self.side, self.mean, self.std),
            **self.keywords,
        }


def picture_or_black(path: str) -> Any:
    """The picture of a file; a black one if the path is empty."""
    from PIL import Image

    return Image.open(path) if path else Image.new("RGB", (1, 1))


def squares(pictures: Sequence[Any], side: int, mean: Tensor, std: Tensor) -> Tensor:
    """The squares in the middle of pictures, as a model takes them: (n, 3, side, side).

    Args:
        pictures: Pictures of pillow, of any size.
        side: The pixels of a side; the shorter side of a picture is brought to it.
        mean: The mean of each channel, (3, 1, 1), of numbers from 0 to 1.
        std: Their deviation.
    """
    from PIL import Image

    square_pictures = []
    for picture in pictures:
        width, height = picture.size
        scale = side / min(width, height)
        size = (max(side, round(width * scale)), max(side, round(height * scale)))
        resized = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
        left = (size[0] - side) // 2
        top = (size[1] - side) // 2
        square_pictures.append(resized.crop((left, top, left + side, top + side)))
    return (pixels(square_pictures) - mean) / std


def stretched(pictures: Sequence[Any], side: int, mean: Tensor, std: Tensor) -> Tensor:
    """Pictures as squares, as a model takes them: (n, 3, side, side).

    Args:
        pictures: Pictures of pillow, of any size.
        side: The pixels of a side, to which both sides of a picture are brought.
        mean: The mean of each channel, (3, 1, 1), of numbers from 0 to 1.
        std: Their deviation.
    """
    from PIL import Image

    square_pictures = [
        picture.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
        for picture in pictures
    ]
    return (pixels(square_pictures) - mean) / std


def pixels(pictures: Sequence[Any]) -> Tensor:
    """The numbers of pictures of one size, from 0 to 1: (n, 3, height, width).

    Args:
        pictures: RGB pictures of pillow.
    """
    rows = [torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures]
    return torch.stack(rows).float() / 255
