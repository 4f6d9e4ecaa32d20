"""Texts and their classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from app.data.order import Indices, held_out, hold_out
from app.data.tables import column_of, read_table
from app.errors import UserError
from app.tasks.huggingface.tokenizer import longest_text, padded_encoding
from app.tasks.parts import Classification

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TextBatch = tuple[tuple[Tensor, Tensor], Tensor]
"""A batch: tokens (B, T) and their mask (B, T), which is 1 where there is text; and labels (B,)."""
DEFAULT_EVAL_FRACTION = 0.1


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

    Attributes:
        longest_sample: The number of the text with the most tokens.
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
        self.longest_sample = longest_text(texts, tokenizer, limit=longest)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> TextBatch:
        (tokens_BT, mask_BT), labels_B = self.__getitems__([index])
        return (tokens_BT[0], mask_BT[0]), labels_B[0]

    def __getitems__(self, indices: Sequence[int]) -> TextBatch:
        texts = [self.texts[index] for index in indices]
        encoded = padded_encoding(self.tokenizer, texts, longest=self.longest)
        labels_B = self.labels[torch.as_tensor(indices)]
        return (encoded["input_ids"], encoded["attention_mask"]), labels_B
