"""Answers to questions about pictures, by a model of both (LLaVA, Liu et al. 2023, 2304.08485).

A vision tower encodes the patches of a picture as vectors, a projector maps these to the width of a
language model, and there they replace as many placeholder tokens of the text:

    <image> × patches, the question, the answer        the loss is over the answer's tokens alone

So the number of a picture's tokens follows from the model. Layers of the tower whose outputs the
model does not read (LLaVA reads the last but one) have no gradient and are not trained.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.open_text import json_rows
from app.data.order import Indices, held_out, hold_out
from app.data.pictures import read_picture
from app.data.text import find_files
from app.errors import UserError
from app.models.prediction import Preprocessor
from app.tasks.base import EvaluationLog
from app.tasks.huggingface.conversations import (
    IGNORED,
    AnswerBatch,
    Answers,
    Conversation,
    answer_spans,
    end_of_answer,
)
from app.tasks.huggingface.image_text import squares_config, statistics_of
from app.tasks.huggingface.inputs import PictureQuestionsInput, squares
from app.tasks.huggingface.kind import Kind, Settings, vocabulary_keys
from app.tasks.huggingface.masked import token_metrics
from app.tasks.huggingface.model import ModelSource, library
from app.tasks.huggingface.tokenizer import LENGTH_MULTIPLE, chat_tokenizer
from app.tasks.language import SAMPLE_TOKENS, end_tokens, sample_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_EVAL_FRACTION = 0.1
IMAGE = "<image>"
"""Where a message has its picture."""
EXAMPLE = (
    '{"image": "pictures/1.jpg", "messages": [{"role": "user", "content": "<image>\\nWhat is it?"},'
    ' {"role": "assistant", "content": "…"}]}'
)
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
"""Of LLaVA's own data, by what they are called elsewhere."""
UNCHECKED = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""Switches off the library's comparison of pictures and their tokens, for which the host would wait
for the GPU in every forward, and which has no answer without values. `_checked_tokens` compares
them once."""


@dataclass(frozen=True)
class Asked:
    """A conversation about a picture.

    Args:
        conversation: The conversation; one message has `<image>`.
        path: The file of the picture.
    """

    conversation: Conversation
    path: Path


class PicturesToText(Kind, Answers):
    """The assistant's messages in conversations about a picture."""

    name = "image_text_to_text"
    model_class = "AutoModelForImageTextToText"
    table = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
    options = ("tokenizer", "sequence_length")
    default_length = 2048
    text_key = "text_config"
    reads_files = True

    def __init__(self, settings: Settings) -> None:
        os.environ[UNCHECKED] = "1"
        base = settings.base
        self.tokens_of_picture = _tokens_of_picture(base)
        asked = list(_read(settings.data))
        if len(asked) < 2:
            raise UserError(f"{settings.data} has {len(asked)} conversations; write two or more")
        self.tokenizer = settings.tokenizer
        self.image_token = _image_token(settings)
        self.longest = settings.sequence_length
        self.side = int(base.vision_config.image_size)
        self.mean, self.std = statistics_of(settings.source.folder)
        self.template_takes_parts = _takes_parts(self.tokenizer, self.image_token)
        count = held_out(len(asked), settings.eval_samples, DEFAULT_EVAL_FRACTION)
        train_index, eval_index = hold_out(len(asked), count)

        def part(indices: Indices) -> AskedOfPictures:
            return AskedOfPictures([asked[index] for index in indices], self)

        self._train = part(train_index)
        self._eval = part(eval_index) if count else None
        special_tokens = {
            "pad_token_id": self.tokenizer.pad_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
        }
        of_texts = replace(settings, base=base.text_config)
        self.config_keys = {"text_config": vocabulary_keys(of_texts, special_tokens)}
        if settings.source.folder is None:
            self.config_keys |= {
                "image_token_index": self.tokenizer.convert_tokens_to_ids(self.image_token),
                "image_seq_length": self.tokens_of_picture,
            }
        self._config: Any = base

    @staticmethod
    def open_tokenizer(source: ModelSource, path: str) -> Any:
        """The library's tokenizer with padding, a chat template and, for new models, `<image>`."""
        tokenizer = chat_tokenizer(source, path)
        if source.folder is None:
            tokenizer.add_tokens([IMAGE], special_tokens=True)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def prepare(self, structure: Any, *, attends_fully: bool) -> None:
        """Check how many tokens the model makes of a picture, and which layers it does not read."""
        self._config = structure.config
        pixels = torch.zeros((1, 3, self.side, self.side), device="meta")
        (features,) = structure.get_image_features(pixel_values=pixels).pooler_output
        if len(features) != self.tokens_of_picture:
            raise UserError(
                f"{structure.config.model_type} makes {len(features)} tokens of a picture of "
                f"{self.side}×{self.side}, but its configuration says {self.tokens_of_picture} "
                "(image_size, patch_size, vision_feature_select_strategy); write a model such as "
                "llava"
            )
        tower = [
            (name, parameter)
            for name, parameter in structure.named_parameters()
            if "vision" in name and parameter.requires_grad and parameter.is_floating_point()
        ]
        if not tower or not features.requires_grad:
            return
        gradients = torch.autograd.grad(
            features.sum(), [parameter for _, parameter in tower], allow_unused=True
        )
        unread = [
            name for (name, _), gradient in zip(tower, gradients, strict=True) if gradient is None
        ]
        self.untrained = tuple(sorted({name.rpartition(".")[0] for name in unread}))

    def metrics(self, model: nn.Module, batch: AnswerBatch) -> dict[str, Tensor]:
        """The loss and the accuracy of each token, after the right ones before it."""
        inputs, targets_BT = batch
        return token_metrics(model(inputs), targets_BT)

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Pictures, and questions about them."""
        return PictureQuestionsInput(
            tokenizer=self.tokenizer,
            longest=self.longest,
            image_token=self.image_token,
            tokens_of_picture=self.tokens_of_picture,
            takes_parts=self.template_takes_parts,
            end=end_of_answer(self.tokenizer, as_parts=self.template_takes_parts),
            side=self.side,
            mean=self.mean,
            std=self.std,
            keywords=dict(self.keywords),
        )

    def write_files(self, folder: Path) -> None:
        """Write the library's processor."""
        processor = library().LlavaProcessor(
            image_processor=library().CLIPImageProcessor(
                **squares_config(self.side, self.mean, self.std)
            ),
            tokenizer=self.tokenizer,
            patch_size=self._config.vision_config.patch_size,
            num_additional_image_tokens=_class_tokens(self._config),
            vision_feature_select_strategy=self._config.vision_feature_select_strategy,
            image_token=self.image_token,
            chat_template=self.tokenizer.chat_template,
        )
        processor.save_pretrained(folder)

    def log_example(self, task: Any, model: nn.Module, log: EvaluationLog) -> None:
        """Log the answer to a held-out question."""
        if self._eval is None:
            return
        inputs, targets_T = self._eval[0]
        first = int((targets_T != IGNORED).nonzero()[0])
        learnt_T = targets_T[first:]
        wanted_T = learnt_T[: int((learnt_T != IGNORED).cumprod(0).sum())]

        question_T = inputs["input_ids"][: first + 1]
        image_id = self.tokenizer.convert_tokens_to_ids(self.image_token)

        def arguments(tokens_1T: Tensor) -> dict[str, Any]:
            # A model may write the token of a picture, of which there is only one.
            is_written_1T = torch.arange(tokens_1T.size(1)) > first
            is_other_1T = is_written_1T & (tokens_1T == image_id)
            tokens_1T = tokens_1T.masked_fill(is_other_1T, self.tokenizer.pad_token_id)
            return task.arguments(
                {
                    "input_ids": tokens_1T,
                    "attention_mask": torch.ones_like(tokens_1T),
                    "pixel_values": inputs["pixel_values"][None],
                }
            )

        ends = end_tokens(model) | {self.tokenizer.eos_token_id}
        written_T = sample_tokens(
            model, arguments, question_T, length=len(question_T) + SAMPLE_TOKENS, ends=ends
        )
        texts = {
            "asked": question_T[question_T != image_id],
            "written": written_T,
            "wanted": wanted_T,
        }
        lines = [f"{name}: {self.tokenizer.decode(tokens)}" for name, tokens in texts.items()]
        log("answer", "\n".join(lines))


# --- the model ---


def _class_tokens(config: Any) -> int:
    """How many vectors the tower makes besides those of patches: CLIP's of the whole picture."""
    return int(config.vision_config.model_type == "clip_vision_model")


def _tokens_of_picture(config: Any) -> int:
    """How many tokens a picture has.

    Raises:
        UserError: That does not follow from the configuration.
    """
    strategy = getattr(config, "vision_feature_select_strategy", None)
    vision = getattr(config, "vision_config", None)
    side = getattr(vision, "image_size", None)
    patch = getattr(vision, "patch_size", None)
    if strategy is None or not isinstance(side, int) or not isinstance(patch, int):
        raise UserError(
            f"{config.model_type} does not make a fixed number of tokens of a picture, as llava "
            "does, which kind: image_text_to_text needs; write a model such as llava"
        )
    return (side // patch) ** 2 + _class_tokens(config) - (strategy == "default")


def _image_token(settings: Settings) -> str:
    """The token in whose places the vectors of a picture are put.

    Raises:
        UserError: The tokenizer does not have the one of the configuration.
    """
    if settings.source.folder is None:
        return IMAGE
    number = settings.base.image_token_id
    token = settings.tokenizer.convert_ids_to_tokens(number)
    if token is None or token not in settings.tokenizer.all_special_tokens + list(
        settings.tokenizer.get_added_vocab()
    ):
        raise UserError(
            f"the model's image_token_index is {number}, which is not a special token of the "
            "tokenizer; write the model's own tokenizer as task_args.tokenizer"
        )
    return str(token)


# --- the data ---


def _read(data: Any) -> Iterator[Asked]:
    """Conversations about pictures, in the order of their lines.

    Raises:
        UserError: A line is something else.
    """
    for file in find_files(data):
        for place, row in json_rows(file):
            yield _asked(row, place, file.parent)


def _asked(row: Any, place: str, folder: Path) -> Asked:
    error = UserError(
        f"{place} is not a conversation about a picture; write lines such as {EXAMPLE}"
    )
    if not isinstance(row, dict):
        raise error
    images = row.get("images", row.get("image", row.get("file_name")))
    images = [images] if isinstance(images, str) else images
    messages = _messages(row)
    if messages is None:
        raise error
    texts: list[dict[str, str]] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise error
        text, paths = _text_and_paths(message.get("content"))
        if text is None:
            raise error
        images = [*(images or []), *paths]
        texts.append({"role": message["role"], "content": text})
    if not isinstance(images, list) or not all(isinstance(each, str) and each for each in images):
        raise error
    if len(images) != 1:
        raise UserError(f"{place} has {len(images)} pictures; write one for each conversation")
    first_of_user = next((text for text in texts if text["role"] == "user"), None)
    if first_of_user is None or not any(text["role"] == "assistant" for text in texts):
        raise error
    marks = sum(text["content"].count(IMAGE) for text in texts)
    if marks == 0:
        first_of_user["content"] = f"{IMAGE}\n{first_of_user['content']}"
    elif marks > 1:
        raise UserError(f"{place} has {marks} times {IMAGE}, but one picture; write it once")
    if IMAGE in "".join(text["content"] for text in texts if text["role"] == "assistant"):
        raise UserError(f"{place} has {IMAGE} in an answer; write it into a question")
    return Asked(Conversation(place, texts), folder / Path(images[0]).expanduser())  # type: ignore[arg-type]


def _messages(row: dict[str, Any]) -> list[Any] | None:
    """The messages of a line, in the form of `messages`; None if it has none."""
    if isinstance(row.get("messages"), list):
        return row["messages"]
    if isinstance(row.get("conversations"), list):  # LLaVA's own form
        return [
            {
                "role": ROLES.get(str(turn.get("from")), turn.get("from")),
                "content": turn.get("value"),
            }
            for turn in row["conversations"]
            if isinstance(turn, dict)
        ]
    prompt = row.get("prompt", row.get("question"))
    if isinstance(prompt, str) and isinstance(row.get("answer"), str):
        return [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": row["answer"]},
        ]
    return None


def _text_and_paths(content: Any) -> tuple[str | None, list[str]]:
    """The text of a message, with a mark in place of a picture, and the pictures that it names."""
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        return None, []
    texts: list[str] = []
    paths: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") == "image":
            texts.append(IMAGE)
            path = part.get("image", part.get("path", part.get("url")))
            paths += [path] if isinstance(path, str) else []
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            return None, []
    return "".join(texts), paths


def _takes_parts(tokenizer: Any, image_token: str) -> bool:
    """Whether a chat template takes the parts of a message, as those of processors do."""
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts_of(f"{IMAGE}\nWhat?")}], tokenize=False
        )
    except Exception:  # a template may raise anything
        return False
    return text.count(image_token) == 1 and "What?" in text and "'type'" not in text


def parts_of(content: str) -> list[dict[str, str]]:
    """A message's content as parts, of which the picture is the first."""
    text = content.replace(IMAGE, "", 1).strip("\n") if IMAGE in content else content
    parts = [{"type": "image"}] if IMAGE in content else []
    return [*parts, {"type": "text", "text": text}]


def with_pictures(ids: Sequence[int], image_id: int, count: int) -> tuple[list[int], list[int]]:
    """Tokens with as many of a picture as it has vectors.

    Args:
        ids: Tokens with one for each picture.
        image_id: The token of a picture.
        count: How many a picture has.

    Returns:
        The tokens, and for each the number of the one that it was.
    """
    tokens: list[int] = []
    sources: list[int] = []
    for number, each in enumerate(ids):
        times = count if each == image_id else 1
        tokens += [each] * times
        sources += [number] * times
    return tokens, sources


class AskedOfPictures(Dataset[Any]):
    """Conversations about pictures, read and tokenised when they are fetched.

    A batch is as long as its longest conversation.

    Args:
        asked: The conversations.
        kind: Says how they are prepared.

    Attributes:
        longest_sample: The number of the conversation with the most tokens.
    """

    def __init__(self, asked: list[Asked], kind: PicturesToText) -> None:
        self.asked = asked
        self.tokenizer = kind.tokenizer
        self.image_token = kind.image_token
        self.count = kind.tokens_of_picture
        self.takes_parts = kind.template_takes_parts
        self.longest = kind.longest
        self.side = kind.side
        self.mean = kind.mean
        self.std = kind.std
        by_characters = sorted(range(len(asked)), key=lambda number: -self._characters(number))
        self.longest_sample = max(
            by_characters[:16], key=lambda number: len(self._encode(asked[number])[0]), default=0
        )

    def _characters(self, number: int) -> int:
        messages = self.asked[number].conversation.messages
        return sum(len(message["content"]) for message in messages)

    def __len__(self) -> int:
        return len(self.asked)

    def __getitem__(self, index: int) -> AnswerBatch:
        inputs, targets_BT = self.__getitems__([index])
        return {name: value[0] for name, value in inputs.items()}, targets_BT[0]

    def __getitems__(self, indices: Sequence[int]) -> AnswerBatch:
        chosen = [self.asked[index] for index in indices]
        rows = [self._encode(each) for each in chosen]
        length = max(len(tokens) for tokens, _ in rows)
        length += -length % LENGTH_MULTIPLE
        tokens_BT = torch.full((len(rows), length), self.tokenizer.pad_token_id)
        mask_BT = torch.zeros((len(rows), length), dtype=torch.int64)
        targets_BT = torch.full((len(rows), length), IGNORED)
        for row, (tokens, targets) in enumerate(rows):
            tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
            mask_BT[row, : len(tokens)] = 1
            targets_BT[row, : len(tokens)] = torch.tensor(targets)
        pictures = [read_picture(each.path, each.conversation.place) for each in chosen]
        inputs = {
            "input_ids": tokens_BT,
            "attention_mask": mask_BT,
            "pixel_values": squares(pictures, self.side, self.mean, self.std),
        }
        return inputs, targets_BT

    def _encode(self, asked: Asked) -> tuple[list[int], list[int]]:
        """The tokens of a conversation, and the target of each: the next token of an answer.

        Raises:
            UserError: The picture, or every answer, comes after as many tokens as are used.
        """
        place = asked.conversation.place
        messages: list[Any] = list(asked.conversation.messages)
        if self.takes_parts:
            messages = [
                {**message, "content": parts_of(message["content"])} for message in messages
            ]
        else:
            messages = [
                {**message, "content": message["content"].replace(IMAGE, self.image_token)}
                for message in messages
            ]
        text, spans = answer_spans(self.tokenizer, Conversation(place, messages))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        image_id = self.tokenizer.convert_tokens_to_ids(self.image_token)
        tokens, sources = with_pictures(encoded["input_ids"], image_id, self.count)
        tokens = tokens[: self.longest]
        if tokens.count(image_id) != self.count:
            raise UserError(
                f"{place}: the picture's {self.count} tokens are not all among the first "
                f"{self.longest}; write a larger task_args.sequence_length"
            )
        is_learnt = [
            any(begin <= offset < end for begin, end in spans)
            for offset, _ in encoded["offset_mapping"]
        ]
        learnt = [token if is_learnt[source] else IGNORED for token, source in zip(tokens, sources)]
        targets = [*learnt[1:], IGNORED]
        if all(target == IGNORED for target in targets):
            raise UserError(
                f"{place}: no answer begins in the first {self.longest} tokens; "
                "write a larger task_args.sequence_length"
            )
        return tokens, targets
