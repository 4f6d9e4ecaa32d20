"""Text as token files: found, tokenised once, kept in the cache by its content, read a few windows at a time.

A corpus may be far larger than memory. Windows are read with pread instead of a mapping (np.memmap), whose pages pile
up in the process's resident memory, and which ends the process with SIGBUS where the file becomes unreadable.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from app.data.files import cached, existing, identity
from app.data.open_text import file_format, open_text, open_utf8, utf8_size
from app.data.sets import documents, files_key, is_dataset
from app.errors import MissingData, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PYTHON = "python"  # the built-in corpus: the source of Python's own library
BYTES = "bytes"  # instead of a tokenizer: every byte of the files is a token, of 256
CHUNK = 1 << 20  # bytes or characters that are read at once
SUFFIXES = (".bin", ".npy")
TOKEN_DTYPES = ("uint8", "uint16", "uint32")
CHECK_AT_ONCE = 1 << 20  # tokens at either end of a file that are checked before training; the rest when read


def read_tokens(
    data: str | Sequence[str], tokenizer: str, token_dtype: str, vocab_size: int | None, text: str = "text"
) -> tuple[list[TokenFile], int, float | None]:
    """(token files, the least size of the vocabulary, bytes of text per token if known) of text or token files, or of
    the column `text` of a data set (sets.py).

    Raises UserError, also if a token at the beginning or end of a token file is outside the vocabulary.
    """
    if is_dataset(data):
        rows = documents(data, text)
        encode, size = encoder(tokenizer)
        key = hashlib.sha256(f"documents {files_key(data)} {text}".encode()).hexdigest()[:16]
        if tokenizer == BYTES:
            kept = _kept(key, size, (np.frombuffer(f"{row}\n".encode(), np.uint8) for row in rows), str(data))
            return [kept], size, 1.0
        key += identity(existing(tokenizer, "task_args.tokenizer"))
        return [_kept(key, size, (encode(row) for row in rows), str(data))], size, None
    paths = find_files(data)
    of_data_sets = [path for path in paths if is_dataset(str(path))]  # which a pattern's own end does not tell
    if of_data_sets and len(of_data_sets) == len(paths):
        return read_tokens([str(path) for path in paths], tokenizer, token_dtype, vocab_size, text)
    if of_data_sets:
        plain = next(path for path in paths if path not in of_data_sets)
        raise UserError(f"task_args.data mixes data sets ({of_data_sets[0]}) with text ({plain}); give one kind")
    made_of_tokens = [path for path in paths if path.suffix in SUFFIXES]
    if not made_of_tokens:
        file, size, text_bytes = tokenise(paths, tokenizer)
        return [file], size, text_bytes / file.length
    if len(made_of_tokens) < len(paths):
        plain = next(path for path in paths if path not in made_of_tokens)
        raise UserError(f"task_args.data mixes token files ({made_of_tokens[0]}) with text ({plain}); give one kind")
    if vocab_size is None:
        raise UserError(f"task_args.vocab_size is needed with a token file such as {made_of_tokens[0]}; write it")
    files = [open_tokens(path, token_dtype) for path in made_of_tokens]
    for file in files:
        some = min(CHECK_AT_ONCE, file.length)
        check_tokens(file.windows([0, file.length - some], some), vocab_size, file.path)
    return files, 1, None


# --- text to tokens -------------------------------------------------------------------------------


def find_files(data: str | Sequence[str]) -> list[Path]:
    """The files that `data` names: the built-in corpus, or paths and globs in the order given."""
    if data == PYTHON:
        return _python_library()
    names = [data] if isinstance(data, str) else list(data)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"task_args.data is {data!r}; write a path or glob, a list of them, or {PYTHON}")
    found: list[Path] = []
    for name in names:
        if glob.has_magic(name):
            matches = map(Path, sorted(glob.glob(os.path.expanduser(name), recursive=True)))
            files = [path for path in matches if path.is_file()]
            if not files:
                raise MissingData(
                    f"task_args.data: no file matches {name!r} (looked in {Path.cwd()}); write another path or glob"
                )
        else:
            files = [existing(name, "task_args.data")]
            if files[0].is_dir():
                pattern = f"{name.rstrip('/')}/**/*.txt"
                raise UserError(f"task_args.data: {name!r} is a folder; write a glob such as {pattern}")
        found += files
    return found


def _python_library() -> list[Path]:
    """The *.py files of Python's standard library in the order of their names, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]  # site-packages is many times as large
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def tokenise(files: Sequence[Path], tokenizer: str = BYTES) -> tuple[TokenFile, int, int]:
    """(the files' tokens one after another, size of the vocabulary, bytes of text in UTF-8).

    The tokens are kept in the cache under a hash of the files' contents and the tokenizer, and made only if they are
    not there. `tokenizer` is "bytes" or the path of a Hugging Face tokenizers file (tokenizer.json).
    """
    if tokenizer == BYTES:
        vocab_size, key = 256, identity(*files)
        chunks = _byte_chunks(files)
    else:
        path = existing(tokenizer, "task_args.tokenizer")
        model = load_tokenizer(path)
        vocab_size, key = model.get_vocab_size(), identity(*files, path)
        chunks = _encoded_chunks(files, model)
    if not all(file_format(file).is_plain for file in files):
        key += "-decoded"
    others = f" and {len(files) - 1} other files" if len(files) > 1 else ""
    return _kept(key, vocab_size, chunks, f"{files[0]}{others}"), vocab_size, sum(map(utf8_size, files))


def encoder(tokenizer: str) -> tuple[Callable[[str], list[int]], int]:
    """(what makes tokens of a document, which ends in a line's end; size of the vocabulary)"""
    if tokenizer == BYTES:
        return lambda text: list(f"{text}\n".encode()), 256
    model = load_tokenizer(existing(tokenizer, "task_args.tokenizer"))
    return lambda text: model.encode(f"{text}\n", add_special_tokens=False).ids, model.get_vocab_size()


def _kept(key: str, vocab_size: int, chunks: Iterator[Any], source: str) -> TokenFile:
    """The tokens in the cache, made if they are not there."""
    dtype = "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"

    def make(path: Path) -> None:
        with open(path, "wb") as out:
            for chunk in chunks:
                out.write(np.asarray(chunk, dtype=dtype).tobytes())

    made = cached(f"tokens-{key}.{dtype}.bin", make)
    length = made.stat().st_size // np.dtype(dtype).itemsize
    if length == 0:
        raise UserError(f"task_args.data: there is no text in {source}; give files with text")
    return TokenFile(made, dtype, length)


def _byte_chunks(files: Sequence[Path]) -> Iterator[Any]:
    """Each file's bytes; what is compressed or UTF-16 is made plain, what is no text at all is left as it is."""
    for file in files:
        with open_utf8(file, any_bytes=True) as source:
            while chunk := source.read(CHUNK):
                yield np.frombuffer(chunk, dtype=np.uint8)


def _encoded_chunks(files: Sequence[Path], tokenizer: Tokenizer) -> Iterator[Any]:
    """Each file's tokens, a piece at a time. Raises UserError: a file is not UTF-8."""
    for file in files:
        with open_text(file) as source:
            for piece in _pieces(source):
                yield tokenizer.encode(piece, add_special_tokens=False).ids


def _pieces(source: Any) -> Iterator[str]:
    """About CHUNK characters at a time, cut at the end of a line where there is one, so that no word is cut."""
    left = ""
    while chunk := source.read(CHUNK):
        left += chunk
        end = left.rfind("\n") + 1 or left.rfind(" ") + 1
        if end:
            yield left[:end]
            left = left[end:]
    if left:
        yield left


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a Hugging Face tokenizers file. Raises UserError."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"task_args.tokenizer: {path} is not a Hugging Face tokenizers file ({str(error).splitlines()[0]}); "
            f"write {BYTES} or the path of a tokenizer.json"
        ) from error


# --- token files ----------------------------------------------------------------------------------


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


def check_tokens(tokens: npt.NDArray[np.int64], vocab_size: int, path: Path) -> None:
    """Raise UserError if a token is outside the vocabulary."""
    if tokens.size and (tokens.max() >= vocab_size or tokens.min() < 0):
        wrong = tokens.max() if tokens.max() >= vocab_size else tokens.min()
        raise UserError(
            f"{path} holds token {wrong}, but vocab_size is {vocab_size}; write the tokenizer's vocab_size, or the "
            "file's own number type as task_args.token_dtype"
        )
