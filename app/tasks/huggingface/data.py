"""The data of each kind of model, what it decides about the configuration, and tokenizers.

The data, loss and metrics of each kind are those of another task, of which only the model is not
used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from app.data.files import existing
from app.data.loader import fetch
from app.data.order import Indices, held_out, hold_out
from app.data.tables import column_of, read_table
from app.data.text import BYTES, SUFFIXES, find_files, load_tokenizer
from app.errors import UserError
from app.tasks.huggingface.conversations import CHATML, Conversations, TextPairs
from app.tasks.huggingface.model import ModelSource, library
from app.tasks.huggingface.preferences import PreferenceLoss, Preferences
from app.tasks.language import LanguageModelling
from app.tasks.parts import Classification
from app.tasks.vision import ImageClassification

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

Derived = dict[str, Any]
"""Keys of the model's configuration that follow from the data."""
TextBatch = tuple[tuple[Tensor, Tensor], Tensor]
"""A batch: tokens (B, T) and their mask (B, T), which is 1 where there is text; and labels (B,)."""
PADDING_TOKENS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "<|end_of_text|>", "</s>")
"""Tokens that can serve as padding, the best first."""
DEFAULT_EVAL_FRACTION = 0.1
LENGTH_MULTIPLE = 8  # of lengths: matrix units are faster with it, and fewer shapes occur


# --- the data of each kind ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
    """What the data of a model of texts depends on.

    Args:
        source: The model.
        base: Its configuration so far.
        vocab_size: The size of its vocabulary if that is decided; None if the data decides it.
        tokenizer_path: `bytes` or the path of a tokenizers file.
        tokenizer: The library's tokenizer for it.
        sequence_length: How many tokens a sample has, or at most.
        eval_samples: How many samples are held out; None means the default.
    """

    source: ModelSource
    base: PreTrainedConfig
    vocab_size: int | None
    tokenizer_path: str
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int
    eval_samples: int | None


def running_text(
    settings: TextSettings, data: Any, *, token_dtype: str | None
) -> tuple[LanguageModelling, Derived]:
    """The data of a causal language model.

    Args:
        settings: What the data depends on.
        data: `task_args.data`.
        token_dtype: The number type in .bin token files; None means the default.

    Raises:
        UserError: The data cannot be read, or does not fit the model.
    """
    source = settings.source
    has_token_files = any(path.suffix in SUFFIXES for path in find_files(data))
    if has_token_files and settings.vocab_size is None:
        raise UserError(
            "task_args.config.vocab_size is needed with token files; write the tokenizer's"
        )
    task = LanguageModelling(
        data=data,
        tokenizer=settings.tokenizer_path,
        token_dtype="uint16" if token_dtype is None else token_dtype,
        vocab_size=settings.vocab_size if has_token_files else None,
        sequence_length=settings.sequence_length,
        eval_samples=settings.eval_samples,
        # Its model is not used.
        d_model=2,
        n_layers=1,
        n_heads=1,
    )
    derived: Derived = {}
    if settings.vocab_size is None:
        derived["vocab_size"] = task.vocab_size
    derived |= _causal_keys(source.base)
    return task, derived | _fit_vocabulary(settings, task.vocab_size, derived)


def labelled_text(
    settings: TextSettings, data: Any, *, text: str | None, label: str | None
) -> tuple[LabelledText, Derived]:
    """The data of a classifier of texts.

    Args:
        settings: What the data depends on; the tokenizer has padding.
        data: `task_args.data`.
        text: The column of the texts; None means the default.
        label: The column of the labels; None means the default.

    Raises:
        UserError: The data cannot be read, or does not fit the model.
    """
    tokenizer = settings.tokenizer
    task = LabelledText(
        data=data,
        text="text" if text is None else text,
        label="label" if label is None else label,
        tokenizer=tokenizer,
        longest=settings.sequence_length,
        eval_samples=settings.eval_samples,
    )
    derived = {**_labels(task.classes), "pad_token_id": tokenizer.pad_token_id}
    if settings.vocab_size is None:
        derived["vocab_size"] = len(tokenizer)
    return task, derived | _fit_vocabulary(settings, len(tokenizer), derived)


def instructions(settings: TextSettings, data: Any) -> tuple[Conversations, Derived]:
    """The data of a causal language model that answers.

    Args:
        settings: What the data depends on; the tokenizer has a chat template.
        data: `task_args.data`.

    Raises:
        UserError: The data cannot be read, or does not fit the model.
    """
    tokenizer = settings.tokenizer
    task = Conversations(
        data=data,
        tokenizer=tokenizer,
        sequence_length=settings.sequence_length,
        eval_samples=settings.eval_samples,
    )
    return task, _answering_keys(settings)


def _answering_keys(settings: TextSettings) -> Derived:
    """The keys of a model that answers, which its tokenizer decides."""
    special_tokens = {
        "pad_token_id": settings.tokenizer.pad_token_id,
        "eos_token_id": settings.tokenizer.eos_token_id,
    }
    return _causal_keys(settings.base) | _vocabulary_keys(settings, special_tokens)


def preferences(
    settings: TextSettings, data: Any, loss: PreferenceLoss
) -> tuple[Preferences, Derived]:
    """The data of a causal language model that learns which of two answers is better.

    Args:
        settings: What the data depends on; the tokenizer has a chat template and an end of text.
        data: `task_args.data`.
        loss: The loss of a pair.

    Raises:
        UserError: The data cannot be read, or does not fit the model.
    """
    tokenizer = settings.tokenizer
    task = Preferences(
        data=data,
        tokenizer=tokenizer,
        longest=settings.sequence_length,
        loss=loss,
        eval_samples=settings.eval_samples,
    )
    return task, _answering_keys(settings)


def text_pairs(
    settings: TextSettings, data: Any, *, text: str | None, label: str | None
) -> tuple[TextPairs, Derived]:
    """The data of a model with an encoder and a decoder.

    Args:
        settings: What the data depends on; the tokenizer has padding and an end of text.
        data: `task_args.data`.
        text: The column of the given texts; None means the default.
        label: The column of the texts to make; None means the default.

    Raises:
        UserError: The data cannot be read, or does not fit the model.
    """
    tokenizer = settings.tokenizer
    special_tokens = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    start = getattr(settings.base, "decoder_start_token_id", None)
    if settings.source.folder is None or start is None:
        start = tokenizer.pad_token_id
        special_tokens["decoder_start_token_id"] = start
    task = TextPairs(
        data=data,
        text="text" if text is None else text,
        label="target" if label is None else label,
        tokenizer=tokenizer,
        longest=settings.sequence_length,
        start=start,
        eval_samples=settings.eval_samples,
    )
    return task, _vocabulary_keys(settings, special_tokens)


def images(
    source: ModelSource, data: Any, *, augment_shift: int | None, eval_samples: int | None
) -> tuple[ImageClassification, Derived]:
    """The data of a classifier of images.

    Args:
        source: The model.
        data: `task_args.data`.
        augment_shift: By how many pixels images are moved at random; None means the default.
        eval_samples: How many images are held out; None means the default.

    Raises:
        UserError: The data cannot be read.
    """
    task = ImageClassification(
        data=data,
        augment_shift=0 if augment_shift is None else augment_shift,
        eval_samples=eval_samples,
        # Its model is not used.
        model="mlp",
        model_args={"hidden": []},
    )
    derived = _labels([str(number) for number in range(task.classes)])
    if source.folder is None:
        batch_images, _ = fetch(task.train_data(), [(0, 0)])
        _, channels, height, width = batch_images.shape
        derived["image_size"] = height if height == width else [height, width]
        derived["num_channels"] = channels
    return task, derived


# --- what the data decides ---


def _causal_keys(base: PreTrainedConfig) -> Derived:
    """The keys without which models that can be encoders too look at a text in both directions."""
    declared = base.to_dict()
    return {key: True for key in ("is_decoder", "causal") if key in declared}


def _labels(classes: list[str]) -> Derived:
    """The keys of a classifier's classes."""
    return {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def _vocabulary_keys(settings: TextSettings, special_tokens: Derived) -> Derived:
    """The keys of a vocabulary that is the tokenizer's.

    Args:
        settings: The model, its vocabulary and its tokenizer.
        special_tokens: The keys of special tokens, for a model without weights.

    Raises:
        UserError: The model has fewer tokens than the tokenizer.
    """
    tokens = len(settings.tokenizer)
    derived = dict(special_tokens) if settings.source.folder is None else {}
    if settings.vocab_size is None:
        derived["vocab_size"] = tokens
    return derived | _fit_vocabulary(settings, tokens, derived)


def _fit_vocabulary(settings: TextSettings, tokens: int, derived: Derived) -> Derived:
    """Keys for special tokens that the vocabulary of a model without weights does not have.

    They are set to none, or for padding that must be there to the last token.

    Args:
        settings: The model and its configuration.
        tokens: The size of the tokenizer's vocabulary.
        derived: What the data decides so far.

    Raises:
        UserError: The model has fewer tokens than the tokenizer.
    """
    base = settings.base
    vocab_size = derived.get("vocab_size", base.vocab_size)
    if vocab_size < tokens:
        raise UserError(
            f"the model's vocab_size is {vocab_size}, but the tokenizer has {tokens} tokens; "
            f"write task_args.config.vocab_size={tokens} or more, "
            "or the model's own tokenizer as task_args.tokenizer"
        )
    if settings.source.folder is not None:
        return {}
    fields_of_ints = {
        field.name for field in dataclasses.fields(base) if "None" not in str(field.type)
    }
    changed: Derived = {}
    for key in base.to_dict():
        if not key.endswith("_token_id") or key in derived:
            continue
        token = getattr(base, key)
        if not isinstance(token, int) or token < vocab_size:
            continue
        if key not in fields_of_ints:
            changed[key] = None
        elif key == "pad_token_id":
            changed[key] = vocab_size - 1
    return changed


# --- tokenizers ---


def choose_tokenizer(source: ModelSource, written: str | None, *, pretrained: bool) -> str:
    """The tokenizer that is written, else the model folder's own, else bytes.

    Args:
        source: The model.
        written: `task_args.tokenizer`.
        pretrained: Whether training starts from the folder's weights.

    Returns:
        `bytes`, or the path of a tokenizers file.

    Raises:
        UserError: The file is missing, or it is not known what the weights' tokens mean.
    """
    if written is not None:
        return BYTES if written == BYTES else str(existing(written, "task_args.tokenizer"))
    if source.tokenizer is not None:
        return str(source.tokenizer)
    if pretrained:
        raise UserError(
            f"task_args.tokenizer: {source.folder} has weights but no tokenizer.json; "
            "write the path of the one that they were trained with"
        )
    return BYTES


def open_tokenizer(source: ModelSource, path: str, *, padded: bool) -> PreTrainedTokenizerFast:
    """The library's tokenizer.

    Args:
        source: The model.
        path: What `choose_tokenizer` returned.
        padded: Whether it needs a token for padding.

    Raises:
        UserError: The file cannot be read.
    """
    tokenizer_class = library().PreTrainedTokenizerFast
    if path == BYTES:
        tokenizer = tokenizer_class(
            tokenizer_object=byte_tokenizer(padded=padded), clean_up_tokenization_spaces=False
        )
    elif source.folder is not None and path == str(source.tokenizer):
        tokenizer = tokenizer_class.from_pretrained(source.folder)
    else:
        load_tokenizer(Path(path))  # for its clear error if the file is damaged
        tokenizer = tokenizer_class(tokenizer_file=path)
    _set_padding(tokenizer, source, padded=padded)
    return tokenizer


def _set_padding(tokenizer: PreTrainedTokenizerFast, source: ModelSource, *, padded: bool) -> None:
    tokenizer.padding_side = "right"
    if padded and source.folder is not None and isinstance(source.base.pad_token_id, int):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(source.base.pad_token_id)
        return
    if tokenizer.pad_token is not None:
        return
    vocabulary = tokenizer.get_vocab()
    usable = [token for token in PADDING_TOKENS if token in vocabulary]
    if usable:
        tokenizer.pad_token = usable[0]
    elif padded:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})


def chat_tokenizer(source: ModelSource, path: str) -> PreTrainedTokenizerFast:
    """The library's tokenizer with a chat template: its own, else ChatML.

    For a model without weights the marks of ChatML are tokens.

    Args:
        source: The model.
        path: What `choose_tokenizer` returned.
    """
    tokenizer = open_tokenizer(source, path, padded=source.folder is None)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHATML
        if source.folder is None:
            tokenizer.add_special_tokens(
                {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
            )
    return tokenizer


def pair_tokenizer(source: ModelSource, path: str) -> PreTrainedTokenizerFast:
    """The library's tokenizer with padding and a token that ends a text.

    Args:
        source: The model.
        path: What `choose_tokenizer` returned.
    """
    tokenizer = open_tokenizer(source, path, padded=True)
    _set_end(tokenizer, source)
    return tokenizer


def preference_tokenizer(source: ModelSource, path: str) -> PreTrainedTokenizerFast:
    """The library's tokenizer with a chat template and a token that ends a text.

    Args:
        source: The model.
        path: What `choose_tokenizer` returned.
    """
    tokenizer = chat_tokenizer(source, path)
    _set_end(tokenizer, source)
    return tokenizer


def _set_end(tokenizer: PreTrainedTokenizerFast, source: ModelSource) -> None:
    if tokenizer.eos_token is None:
        end_id = source.base.eos_token_id if source.folder is not None else None
        end = "</s>" if end_id is None else tokenizer.convert_ids_to_tokens(end_id)
        tokenizer.add_special_tokens({"eos_token": end})


def byte_tokenizer(*, padded: bool) -> Tokenizer:
    """The equal of `bytes` as a tokenizers file: byte-pair encoding without any pairs.

    (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909.)

    Args:
        padded: Whether token 0 is padding, and the token of a byte is the byte plus 1.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The library writes bytes as letters, as GPT-2 does: a printable byte as itself, any other as
    # one of the letters from 256 on, in order (Radford et al. 2019).
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    unprintable = iter([letter for letter in letters if ord(letter) > 255])
    first_id = 1 if padded else 0
    vocabulary = {"<pad>": 0} if padded else {}
    for byte in range(256):
        letter = chr(byte) if chr(byte) in letters else next(unprintable)
        vocabulary[letter] = first_id + byte
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>"] if padded else [])
    return tokenizer


# --- texts and their labels ---


class LabelledText(Classification):
    """Which class a text belongs to. This class has no model of its own.

    Args:
        data: A .csv (.gz too) or .parquet file.
        text: The column of the texts. Rows without a text or a label are left out.
        label: The column of the labels.
        tokenizer: The library's tokenizer, with padding.
        longest: How many tokens of a text are used.
        eval_samples: How many texts are held out; None means the default.

    Raises:
        UserError: The data cannot be read, or has fewer than two rows.
    """

    def __init__(
        self,
        *,
        data: str,
        text: str = "text",
        label: str = "label",
        tokenizer: PreTrainedTokenizerFast,
        longest: int,
        eval_samples: int | None,
    ) -> None:
        if not isinstance(data, str):
            raise UserError(
                f"task_args.data is {data!r}; write the path of a .csv or .parquet file"
            )
        columns, _ = read_table(data)
        texts = column_of(columns, text, key="task_args.text", source=data)
        labels = column_of(columns, label, key="task_args.label", source=data)
        if texts.numeric:
            raise UserError(
                f"task_args.text: column {text!r} of {data} holds numbers; "
                "name the column of the texts"
            )
        has_text = np.array([bool(value and value.strip()) for value in texts.values], dtype=bool)
        rows = np.flatnonzero(has_text & ~labels.missing())
        if len(rows) < 2:
            raise UserError(
                f"{data} has {len(rows)} rows with a text and a label; at least two are needed"
            )
        self.classes, class_numbers = labels.classes(rows, data)
        count = held_out(len(rows), eval_samples, DEFAULT_EVAL_FRACTION)
        train_index, eval_index = hold_out(len(rows), count, class_numbers)

        def data_set(index: Indices) -> Texts:
            return Texts(
                list(texts.values[rows[index]]),
                torch.from_numpy(class_numbers[index]),
                tokenizer=tokenizer,
                longest=longest,
            )

        self._train = data_set(train_index)
        self._eval = data_set(eval_index) if count else None


class Texts(Dataset[Any]):
    """Texts and their labels, tokenised when they are fetched. A batch is as long as its longest.

    Args:
        texts: The texts.
        labels: The class of each, int64 (n,).
        tokenizer: The library's tokenizer, with padding.
        longest: How many tokens of a text are used.
    """

    def __init__(
        self,
        texts: list[str],
        labels: Tensor,
        *,
        tokenizer: PreTrainedTokenizerFast,
        longest: int,
    ) -> None:
        self.texts = texts
        self.labels = labels
        self.tokenizer = tokenizer
        self.longest = longest

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> TextBatch:
        (tokens_BT, mask_BT), labels_B = self.__getitems__([index])
        return (tokens_BT[0], mask_BT[0]), labels_B[0]

    def __getitems__(self, indices: Sequence[int]) -> TextBatch:
        can_round_up = self.longest % LENGTH_MULTIPLE == 0
        encoded = self.tokenizer(
            [self.texts[index] for index in indices],
            padding=True,
            truncation=True,
            max_length=self.longest,
            pad_to_multiple_of=LENGTH_MULTIPLE if can_round_up else None,
            return_tensors="pt",
        )
        labels_B = self.labels[torch.as_tensor(indices)]
        return (encoded["input_ids"], encoded["attention_mask"]), labels_B
