"""Texts for a model: which tokenizer makes them numbers, and labelled texts as the data of a classifier."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from app.data.files import existing
from app.data.split import held_out, hold_out
from app.data.tables import column_of, read_table
from app.data.text import BYTES, load_tokenizer
from app.errors import UserError
from app.tasks.huggingface.find import Found, library
from app.tasks.parts import Classification

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PADDING = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "<|end_of_text|>", "</s>")  # or what can serve, best first
DEFAULT_EVAL_FRACTION = 0.1
ROUND_TO = 8  # lengths are multiples of this: matrix units like it, and fewer shapes occur


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


def write_tokenizer(folder: Path, found: Found, tokenizer: Any) -> None:
    """Puts into `folder` what AutoTokenizer needs to read text as the training did."""
    tokenizer.save_pretrained(folder)
    if found.folder is not None and (found.folder / "generation_config.json").is_file():
        shutil.copyfile(found.folder / "generation_config.json", folder / "generation_config.json")


def byte_tokenizer(padded: bool) -> Tokenizer:
    """A tokenizers file's equal of `bytes`: byte-pair encoding (Sennrich et al. 2016) that has learnt no pair.

    padded: every byte plus one, 0 being padding.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: byte + padded for byte, letter in enumerate(_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | ({"<pad>": 0} if padded else {}), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>"] if padded else [])
    return tokenizer


def _letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: itself where it can be seen, else one from 256
    on (GPT-2, Radford et al. 2019)."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]


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
        eval_fraction: float | None,
    ) -> None:
        if not isinstance(data, str):
            raise UserError(f"task_args.data is {data!r}; write the path of a .csv or .parquet file")
        columns, _ = read_table(data)
        texts = column_of(columns, text, "task_args.text", data)
        labels = column_of(columns, label, "task_args.label", data)
        if texts.numeric:
            raise UserError(f"task_args.text: column {text!r} of {data} holds numbers; name the column of the texts")
        filled = np.array([bool(value and value.strip()) for value in texts.values], dtype=bool)
        at = np.flatnonzero(filled & ~labels.missing())
        if len(at) < 2:
            raise UserError(f"{data} has {len(at)} rows with a text and a label; at least two are needed")
        self.classes, numbers = labels.classes(at, data)
        count = held_out(len(at), eval_fraction, eval_samples, DEFAULT_EVAL_FRACTION)
        train, held = hold_out(len(at), count, numbers)
        self._train = Texts(list(texts.values[at][train]), numbers[train], tokenizer, longest)
        self._eval = Texts(list(texts.values[at][held]), numbers[held], tokenizer, longest) if count else None
        self._source = data

    def describe(self) -> str:
        train, held = self.sizes()
        return f"{self._source}: {train + held:,} texts in {len(self.classes)} classes, {train:,} to train on"


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
