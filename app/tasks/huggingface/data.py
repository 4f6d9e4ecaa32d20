"""The data that each kind of model learns from, what it decides about the model's configuration, and tokenizers.

Data, loss and metrics are those of a task of its own, of which only the model is not used.
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
from app.data.order import held_out, hold_out
from app.data.tables import column_of, read_table
from app.data.text import BYTES, SUFFIXES, find_files, load_tokenizer
from app.errors import UserError
from app.tasks.huggingface.conversations import CHATML, Conversations, TextPairs
from app.tasks.huggingface.model import Found, library
from app.tasks.language import LanguageModelling
from app.tasks.parts import Classification, InParts
from app.tasks.vision import ImageClassification

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Derived = dict[str, Any]
"""Keys of the model's configuration that follow from the data."""
PADDING = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "<|end_of_text|>", "</s>")  # or what can serve, best first
DEFAULT_EVAL_FRACTION = 0.1
ROUND_TO = 8  # lengths are multiples of this: matrix units like it, and fewer shapes occur


def running_text(
    found: Found, base: Any, own_size: int | None, *, data: Any, tokenizer: str, **more: Any
) -> tuple[InParts, Derived]:
    """For a causal language model. base: its configuration so far; own_size: its vocabulary's, if that is settled."""
    of_tokens = any(path.suffix in SUFFIXES for path in find_files(data))
    if of_tokens and own_size is None:
        raise UserError("task_args.config.vocab_size is needed with token files; write the tokenizer's")
    size = own_size if of_tokens else None
    task = LanguageModelling(data=data, tokenizer=tokenizer, vocab_size=size, d_model=2, n_layers=1, n_heads=1, **more)
    derived: Derived = {} if own_size is not None else {"vocab_size": task.vocab_size}
    # Models that can be either look at a text from both sides unless told not to.
    derived |= {key: True for key in ("is_decoder", "causal") if key in found.base.to_dict()}
    return task, derived | _fitting_vocabulary(found, base, task.vocab_size, derived)


def labelled_text(
    found: Found, base: Any, own_size: int | None, *, tokenizer: Any, sequence_length: int, **more: Any
) -> tuple[InParts, Derived]:
    """For a classifier of texts; tokenizer: the library's, with padding."""
    task = LabelledText(tokenizer=tokenizer, longest=sequence_length, **more)
    derived = {**_labels(task.classes), "pad_token_id": tokenizer.pad_token_id}
    if own_size is None:
        derived["vocab_size"] = len(tokenizer)
    return task, derived | _fitting_vocabulary(found, base, len(tokenizer), derived)


def instructions(
    found: Found, base: Any, own_size: int | None, *, tokenizer: Any, **more: Any
) -> tuple[InParts, Derived]:
    """For a causal language model that answers; tokenizer: of `chat_tokenizer`."""
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return Conversations(tokenizer=tokenizer, **more), _special(found, base, own_size, tokenizer, special)


def text_pairs(
    found: Found, base: Any, own_size: int | None, *, tokenizer: Any, sequence_length: int, **more: Any
) -> tuple[InParts, Derived]:
    """For an encoder and a decoder; tokenizer: the library's, with padding and an end."""
    pad, start = tokenizer.pad_token_id, getattr(base, "decoder_start_token_id", None)
    special = {"pad_token_id": pad, "eos_token_id": tokenizer.eos_token_id}
    if found.folder is None or start is None:
        special["decoder_start_token_id"] = start = pad
    task = TextPairs(tokenizer=tokenizer, longest=sequence_length, start=start, **more)
    return task, _special(found, base, own_size, tokenizer, special)


def _special(found: Found, base: Any, own_size: int | None, tokenizer: Any, special: Derived) -> Derived:
    derived = special if found.folder is None else {}
    if own_size is None:
        derived = derived | {"vocab_size": len(tokenizer)}
    return derived | _fitting_vocabulary(found, base, len(tokenizer), derived)


def images(found: Found, **more: Any) -> tuple[InParts, Derived]:
    """For a classifier of images."""
    task = ImageClassification(model="mlp", model_args={"hidden": []}, **more)
    derived = _labels([str(number) for number in range(task.classes)])
    if found.folder is None:
        channels, height, width = fetch(task.train_data(), [(0, 0)])[0].shape[1:]
        derived |= {"image_size": height if height == width else [height, width], "num_channels": channels}
    return task, derived


def _labels(classes: list[str]) -> Derived:
    """A classifier's classes and their names."""
    return {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def _fitting_vocabulary(found: Found, base: Any, needed: int, derived: Derived) -> Derived:
    """Special tokens that a new model's vocabulary has not, set to none; to its last one where there must be padding.

    Raises UserError if the model has fewer tokens than the tokenizer.
    """
    size = derived.get("vocab_size", base.vocab_size)
    if size < needed:
        raise UserError(
            f"the model's vocab_size is {size}, but the tokenizer has {needed} tokens; write "
            f"task_args.config.vocab_size={needed} or more, or the model's own tokenizer as task_args.tokenizer"
        )
    if found.folder is not None:
        return {}
    special = [key for key in base.to_dict() if key.endswith("_token_id") and key not in derived]
    beyond = [key for key in special if isinstance(number := getattr(base, key), int) and number >= size]
    required = {field.name for field in dataclasses.fields(base) if "None" not in str(field.type)}
    none: Derived = {key: None for key in beyond if key not in required}
    return none | ({"pad_token_id": size - 1} if "pad_token_id" in beyond and "pad_token_id" in required else {})


# --- text ---------------------------------------------------------------------------------------------------------


def chosen_tokenizer(found: Found, written: str | None, weights: bool) -> str:
    """`bytes`, or the path of a tokenizers file: what is written, else the model folder's own, else bytes.

    Raises UserError where learnt weights would meet another's tokens unasked.
    """
    if written is not None:
        return BYTES if written == BYTES else str(existing(written, "task_args.tokenizer"))
    if found.tokenizer is not None:
        return str(found.tokenizer)
    if weights:
        raise UserError(
            f"task_args.tokenizer: {found.folder} has weights but no tokenizer.json; write the path of the one that "
            "they were trained with"
        )
    return BYTES


def tokenizer_of(found: Found, chosen: str, *, padded: bool) -> Any:
    """The library's tokenizer for what `chosen_tokenizer` gave; padded: with a token that fills up shorter texts."""
    fast = library().PreTrainedTokenizerFast
    if chosen == BYTES:
        tokenizer = fast(tokenizer_object=byte_tokenizer(padded), clean_up_tokenization_spaces=False)
    elif found.folder is not None and chosen == str(found.tokenizer):
        tokenizer = fast.from_pretrained(found.folder)
    else:
        load_tokenizer(Path(chosen))  # says in a sentence what is wrong with the file
        tokenizer = fast(tokenizer_file=chosen)
    if padded and found.folder is not None and isinstance(found.base.pad_token_id, int):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(found.base.pad_token_id)
    elif tokenizer.pad_token is None:
        known = [name for name in PADDING if name in tokenizer.get_vocab()]
        if known:
            tokenizer.pad_token = known[0]
        elif padded:
            tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.padding_side = "right"
    return tokenizer


def chat_tokenizer(found: Found, chosen: str) -> Any:
    """The library's tokenizer with a chat template: its own, else ChatML, whose marks are tokens of a new model."""
    tokenizer = tokenizer_of(found, chosen, padded=found.folder is None)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHATML
        if found.folder is None:
            tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    return tokenizer


def pair_tokenizer(found: Found, chosen: str) -> Any:
    """The library's tokenizer with padding and a token that ends a text."""
    tokenizer = tokenizer_of(found, chosen, padded=True)
    if tokenizer.eos_token is None:
        known = found.base.eos_token_id if found.folder is not None else None
        end = "</s>" if known is None else tokenizer.convert_ids_to_tokens(known)
        tokenizer.add_special_tokens({"eos_token": end})
    return tokenizer


def byte_tokenizer(padded: bool) -> Tokenizer:
    """A tokenizers file's equal of `bytes`: byte-pair encoding (Sennrich et al. 2016) that has learnt no pair.

    padded: every byte plus one, 0 being padding.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # the letter of a byte: itself where it can be seen, else one from 256 on (GPT-2, Radford et al. 2019)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    unseen = (letter for letter in alphabet if ord(letter) > 255)
    vocabulary = {chr(b) if chr(b) in alphabet else next(unseen): b + padded for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | ({"<pad>": 0} if padded else {}), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>"] if padded else [])
    return tokenizer


class LabelledText(Classification):
    """Which class a text belongs to; without a model.

    data: a .csv (.gz too) or .parquet file. text, label: its columns. Rows without a text or a label are left out.
    tokenizer: one of the library's, with padding. longest: tokens of a text that are used.

    A batch is ((tokens (B, T), mask (B, T): 1 where there is text), labels (B,)), as long as its longest text.
    """

    def __init__(
        self,
        *,
        data: str,
        text: str = "text",
        label: str = "label",
        tokenizer: Any,
        longest: int,
        eval_samples: int | None,
    ) -> None:
        if not isinstance(data, str):
            raise UserError(f"task_args.data is {data!r}; write the path of a .csv or .parquet file")
        columns, _ = read_table(data)
        texts = column_of(columns, text, key="task_args.text", source=data)
        labels = column_of(columns, label, key="task_args.label", source=data)
        if texts.numeric:
            raise UserError(f"task_args.text: column {text!r} of {data} holds numbers; name the column of the texts")
        filled = np.array([bool(value and value.strip()) for value in texts.values], dtype=bool)
        at = np.flatnonzero(filled & ~labels.missing())
        if len(at) < 2:
            raise UserError(f"{data} has {len(at)} rows with a text and a label; at least two are needed")
        self.classes, numbers = labels.classes(at, data)
        count = held_out(len(at), eval_samples, DEFAULT_EVAL_FRACTION)
        train, held = hold_out(len(at), count, numbers)
        self._train = Texts(list(texts.values[at][train]), numbers[train], tokenizer, longest)
        self._eval = Texts(list(texts.values[at][held]), numbers[held], tokenizer, longest) if count else None


class Texts(Dataset[Any]):
    """Texts and their labels, encoded when asked for."""

    def __init__(self, texts: list[str], labels: Any, tokenizer: Any, longest: int) -> None:
        self.texts, self.labels, self.tokenizer, self.longest = texts, torch.from_numpy(labels), tokenizer, longest

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        (tokens, mask), labels = self.__getitems__([index])
        return (tokens[0], mask[0]), labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        found = self.tokenizer(
            [self.texts[index] for index in indices],
            padding=True,
            truncation=True,
            max_length=self.longest,
            pad_to_multiple_of=ROUND_TO if self.longest % ROUND_TO == 0 else None,
            return_tensors="pt",
        )
        return (found["input_ids"], found["attention_mask"]), self.labels[torch.as_tensor(indices)]
