"""Texts with a label each, as the data of a classifier that somebody else brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from app.data.split import hold_out
from app.data.tables import Column, read_table
from app.errors import UserError
from app.tasks.arguments import held_out, nearest
from app.tasks.parts import Classification

DEFAULT_EVAL_FRACTION = 0.1
ROUND_TO = 8
"""Lengths are rounded up to a multiple of this: matrix units like it, and fewer shapes occur."""


@dataclass(frozen=True)
class Encoding:
    """How a text becomes numbers: `encode` gives those of one text, special ones included; `padding` fills up."""

    encode: Callable[[str], list[int]]
    vocab_size: int
    padding: int


def byte_numbers(text: str) -> list[int]:
    """Each byte plus one; 0 is for padding."""
    return [byte + 1 for byte in text.encode()]


BYTE_ENCODING = Encoding(byte_numbers, vocab_size=257, padding=0)


class LabelledText(Classification):
    """Which class a text belongs to; without a model.

    data: a .csv (.gz too) or .parquet file. text, label: its columns. Rows without a text or a label are left out.
    longest: tokens of a text that are used.
    eval_samples or eval_fraction: texts held out, class by class and always the same (default: a tenth).

    A batch is ((tokens (B, T), mask (B, T): 1 where there is text), labels (B,)), as long as its longest text.
    """

    def __init__(
        self,
        *,
        data: str,
        text: str,
        label: str,
        encoding: Encoding,
        longest: int,
        eval_samples: int | None,
        eval_fraction: float | None,
    ) -> None:
        if not isinstance(data, str):
            raise UserError(f"task_args.data is {data!r}; write the path of a .csv or .parquet file.")
        columns, _ = read_table(data)
        texts, labels = _column("text", text, columns, data), _column("label", label, columns, data)
        if texts.numeric:
            raise UserError(f"task_args.text: column {text!r} of {data} holds numbers; name the column of the texts.")
        filled = np.array([bool(value and value.strip()) for value in texts.values], dtype=bool)
        at = np.flatnonzero(filled & ~labels.missing())
        if len(at) < 2:
            raise UserError(f"{data} has {len(at)} rows with a text and a label; at least two are needed.")
        self.classes, numbers = _classes(labels, at, data)
        count = held_out(len(at), eval_fraction, eval_samples, DEFAULT_EVAL_FRACTION)
        train, held = hold_out(len(at), count, numbers)
        rows = texts.values[at]
        self._train = Texts(list(rows[train]), numbers[train], encoding, longest)
        self._eval = Texts(list(rows[held]), numbers[held], encoding, longest) if count else None
        self._source = data

    def describe(self) -> str:
        held = 0 if self._eval is None else len(self._eval)
        return (
            f"{self._source}: {len(self._train) + held:,} texts in {len(self.classes)} classes, "
            f"{len(self._train):,} to train on"
        )


class Texts(Dataset[Any]):
    """Texts and their labels, encoded when asked for."""

    def __init__(self, texts: list[str], labels: Any, encoding: Encoding, longest: int) -> None:
        self.texts, self.labels = texts, torch.from_numpy(labels)
        self.encoding, self.longest = encoding, longest

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        (tokens, mask), labels = self.__getitems__([index])
        return (tokens[0], mask[0]), labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        rows = [self.encoding.encode(self.texts[index])[: self.longest] for index in indices]
        length = min(self.longest, -(-max(map(len, rows)) // ROUND_TO) * ROUND_TO)
        tokens = torch.full((len(rows), length), self.encoding.padding, dtype=torch.int64)
        mask = torch.zeros((len(rows), length), dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.as_tensor(row)
            mask[i, : len(row)] = 1
        return (tokens, mask), self.labels[torch.as_tensor(indices)]


def _column(key: str, name: str, columns: dict[str, Column], data: str) -> Column:
    if name not in columns:
        raise UserError(
            f"task_args.{key}: {data} has no column {name!r}{nearest(name, columns)}; it has {', '.join(columns)}."
        )
    return columns[name]


def _classes(labels: Column, at: Any, data: str) -> tuple[list[str], Any]:
    """(names of the classes in order, int64 class of each row)."""
    values = labels.values[at]
    if labels.numeric and (values != np.floor(values)).any():
        raise UserError(
            f"task_args.label: column {labels.name!r} of {data} holds fractions; name the column of classes."
        )
    found, codes = np.unique(values if labels.numeric else values.astype(str), return_inverse=True)
    if len(found) < 2:
        raise UserError(f"task_args.label: column {labels.name!r} of {data} has one value only; give at least two.")
    return [f"{each:g}" if labels.numeric else str(each) for each in found], codes.astype(np.int64)
