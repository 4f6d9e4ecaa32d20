"""Token files: one long row of token numbers on disk, read a few windows at a time.

A corpus may be far larger than memory. Windows are read with pread instead of a mapping (np.memmap), whose pages pile
up in the process's resident memory, and which ends the process with SIGBUS where the file becomes unreadable.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from app.errors import UserError

SUFFIXES = (".bin", ".npy")
TOKEN_DTYPES = ("uint8", "uint16", "uint32")
CHECK_AT_ONCE = 1 << 20  # tokens at either end of a file that are checked before training; the rest when read


@dataclass(frozen=True)
class TokenFile:
    """`length` tokens of type `dtype` (a NumPy name), from byte `offset` of the file on."""

    path: Path
    dtype: str
    length: int
    offset: int = 0

    def windows(self, starts: Sequence[int], length: int) -> npt.NDArray[np.int64]:
        """(len(starts), length): `length` tokens from each start on."""
        width = np.dtype(self.dtype).itemsize
        rows = np.empty((len(starts), length), dtype=np.int64)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            for row, start in zip(rows, starts, strict=True):
                content = os.pread(descriptor, length * width, self.offset + int(start) * width)
                if len(content) < length * width:
                    raise UserError(f"{self.path} became shorter while it was read; keep it as it is during a run")
                row[:] = np.frombuffer(content, self.dtype)
        finally:
            os.close(descriptor)
        return rows


def open_tokens(path: Path, dtype: str = "uint16") -> TokenFile:
    """A .npy file of one dimension, or a .bin file of bare numbers of type `dtype`."""
    size = path.stat().st_size
    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # damaged headers raise many kinds
            raise UserError(f"{path} cannot be read as a .npy file: {str(error).splitlines()[0]}") from error
        if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.kind not in "ui":
            raise UserError(f"{path} must hold one row of whole numbers, not {array.dtype} of shape {array.shape}")
        file = TokenFile(path, array.dtype.str, len(array), array.offset)
    else:
        width = np.dtype(dtype).itemsize
        if size % width:
            raise UserError(
                f"{path} has {size} bytes, not a multiple of {width} as {dtype} has; write task_args.token_dtype "
                f"({', '.join(TOKEN_DTYPES)}), or make the file anew"
            )
        file = TokenFile(path, dtype, size // width)
    if file.length == 0:
        raise UserError(f"{path} holds no tokens; give a file with some")
    return file


class TokenWindows(Dataset[Any]):
    """Samples (tokens 0 … T-1, tokens 1 … T) of T = `sequence_length`, one after another through the files.

    A window never spans two files. A token outside the vocabulary raises UserError with its place.
    """

    def __init__(self, files: Sequence[TokenFile], sequence_length: int, vocab_size: int) -> None:
        self.files, self.sequence_length, self.vocab_size = list(files), sequence_length, vocab_size
        # The last token of a window is a target only, and the first input of the next window.
        per_file = [max(file.length - 1, 0) // sequence_length for file in files]
        self._ends = np.cumsum(per_file)
        self.begin, self.end = 0, int(self._ends[-1])

    def part(self, begin: int, end: int) -> TokenWindows:
        """Windows begin … end - 1 as a data set of their own."""
        part = TokenWindows(self.files, self.sequence_length, self.vocab_size)
        part.begin, part.end = begin, end
        return part

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (len(indices), sequence_length) int64."""
        windows = np.asarray(indices, dtype=np.int64) + self.begin
        which = np.searchsorted(self._ends, windows, side="right")
        rows = np.empty((len(windows), self.sequence_length + 1), dtype=np.int64)
        for number in np.unique(which):
            file = self.files[number]
            mine = np.flatnonzero(which == number)
            first = self._ends[number - 1] if number else 0
            starts = (windows[mine] - first) * self.sequence_length
            rows[mine] = file.windows(starts.tolist(), rows.shape[1])
            check_tokens(rows[mine], self.vocab_size, file.path)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def check_ends(file: TokenFile, vocab_size: int) -> None:
    """Raise UserError if a token at the beginning or end of the file is outside the vocabulary."""
    some = min(CHECK_AT_ONCE, file.length)
    check_tokens(file.windows([0, file.length - some], some), vocab_size, file.path)


def check_tokens(tokens: npt.NDArray[np.int64], vocab_size: int, path: Path) -> None:
    """Raise UserError if a token is outside the vocabulary."""
    if tokens.size and (tokens.max() >= vocab_size or tokens.min() < 0):
        wrong = tokens.max() if tokens.max() >= vocab_size else tokens.min()
        raise UserError(
            f"{path} holds token {wrong}, but vocab_size is {vocab_size}; write the tokenizer's vocab_size, or the "
            "file's own number type as task_args.token_dtype"
        )
