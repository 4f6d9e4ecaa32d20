"""Text as files of tokens.

A text is tokenised once and the tokens are cached under a hash of the text. A corpus may be far
larger than memory, so that a few windows are read at a time, by pread: the pages of a mapping
(np.memmap) count as resident memory, and the process ends with SIGBUS if the file becomes
unreadable.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

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
BYTES = "bytes"  # instead of a tokenizer: each byte of the files is one of 256 tokens
CHUNK = 1 << 20  # bytes or characters to read at once
SUFFIXES = (".bin", ".npy")
TOKEN_DTYPES = ("uint8", "uint16", "uint32")
CHECK_AT_ONCE = 1 << 20
"""Tokens at either end of a file to check before training; the others are checked when read."""


def read_tokens(
    data: str | Sequence[str],
    *,
    tokenizer: str,
    token_dtype: str,
    vocab_size: int | None,
    text: str = "text",
) -> tuple[list[TokenFile], int, float | None]:
    """The tokens of text files, token files or a data set.

    Args:
        data: Text or token files, or a data set (sets.py).
        tokenizer: `BYTES` or the path of a tokenizer.json.
        token_dtype: The number type in .bin token files.
        vocab_size: The size of the vocabulary, which token files need.
        text: The column of a data set that has the texts.

    Returns:
        (token files, the least size of the vocabulary, bytes of text per token if known)

    Raises:
        UserError: The data cannot be read, or a token at the beginning or the end of a token file
            is outside the vocabulary.
    """
    if is_dataset(data):
        return _dataset_tokens(data, tokenizer, text)
    paths = find_files(data)
    # A pattern such as data/* may match the files of a data set.
    dataset_files = [path for path in paths if is_dataset(str(path))]
    if dataset_files and len(dataset_files) == len(paths):
        return _dataset_tokens([str(path) for path in paths], tokenizer, text)
    if dataset_files:
        plain = next(path for path in paths if path not in dataset_files)
        raise UserError(
            f"task_args.data mixes data sets ({dataset_files[0]}) with text ({plain}); "
            "give one kind"
        )
    token_files = [path for path in paths if path.suffix in SUFFIXES]
    if not token_files:
        file, size, text_bytes = tokenise(paths, tokenizer)
        return [file], size, text_bytes / file.length
    if len(token_files) < len(paths):
        plain = next(path for path in paths if path not in token_files)
        raise UserError(
            f"task_args.data mixes token files ({token_files[0]}) with text ({plain}); "
            "give one kind"
        )
    if vocab_size is None:
        raise UserError(
            f"task_args.vocab_size is needed with a token file such as {token_files[0]}; write it"
        )
    files = [open_tokens(path, token_dtype) for path in token_files]
    for file in files:
        length = min(CHECK_AT_ONCE, file.length)
        ends = file.windows([0, file.length - length], length)
        check_tokens(ends, vocab_size, file.path)
    return files, 1, None


def _dataset_tokens(
    data: str | Sequence[str], tokenizer: str, text: str
) -> tuple[list[TokenFile], int, float | None]:
    """As `read_tokens` for a data set."""
    texts = documents(data, text)
    encode, size = encoder(tokenizer)
    key = hashlib.sha256(f"documents {files_key(data)} {text}".encode()).hexdigest()[:16]
    if tokenizer == BYTES:
        chunks = (np.frombuffer(f"{each}\n".encode(), np.uint8) for each in texts)
        return [_cached_tokens(chunks, key=key, vocab_size=size, source=str(data))], size, 1.0
    key += identity(existing(tokenizer, "task_args.tokenizer"))
    encoded = (encode(each) for each in texts)
    return [_cached_tokens(encoded, key=key, vocab_size=size, source=str(data))], size, None


# --- text to tokens -------------------------------------------------------------------------------


def find_files(data: str | Sequence[str]) -> list[Path]:
    """The files of a corpus.

    Args:
        data: `PYTHON` for the built-in corpus, or paths and globs, in order.

    Raises:
        MissingData: A path does not exist, or a glob matches nothing.
        UserError: A path is a folder, or `data` is not paths and globs.
    """
    if data == PYTHON:
        return _python_library()
    names = [data] if isinstance(data, str) else list(data)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(
            f"task_args.data is {data!r}; write a path or glob, a list of them, or {PYTHON}"
        )
    corpus: list[Path] = []
    for name in names:
        if glob.has_magic(name):
            matches = map(Path, sorted(glob.glob(os.path.expanduser(name), recursive=True)))
            files = [path for path in matches if path.is_file()]
            if not files:
                raise MissingData(
                    f"task_args.data: no file matches {name!r} (looked in {Path.cwd()}); "
                    "write another path or glob"
                )
        else:
            files = [existing(name, "task_args.data")]
            if files[0].is_dir():
                pattern = f"{name.rstrip('/')}/**/*.txt"
                raise UserError(
                    f"task_args.data: {name!r} is a folder; write a glob such as {pattern}"
                )
        corpus += files
    return corpus


def _python_library() -> list[Path]:
    """The *.py files of Python's standard library without its tests, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def tokenise(files: Sequence[Path], tokenizer: str = BYTES) -> tuple[TokenFile, int, int]:
    """Tokenise text files, unless their tokens are in the cache.

    Args:
        files: The text files, in order.
        tokenizer: `BYTES` or the path of a Hugging Face tokenizers file (tokenizer.json).

    Returns:
        (the tokens of all files in one file, size of the vocabulary, bytes of text in UTF-8)

    Raises:
        UserError: A file cannot be read, or there is no text in the files.
    """
    if tokenizer == BYTES:
        vocab_size = 256
        key = identity(*files)
        chunks = _byte_chunks(files)
    else:
        path = existing(tokenizer, "task_args.tokenizer")
        model = load_tokenizer(path)
        vocab_size = model.get_vocab_size()
        key = identity(*files, path)
        chunks = _encoded_chunks(files, model)
    if not all(file_format(file).is_plain for file in files):
        key += "-decoded"
    source = f"{files[0]} and {len(files) - 1} other files" if len(files) > 1 else str(files[0])
    token_file = _cached_tokens(chunks, key=key, vocab_size=vocab_size, source=source)
    return token_file, vocab_size, sum(map(utf8_size, files))


def encoder(tokenizer: str) -> tuple[Callable[[str], list[int]], int]:
    """The encoder of documents, which adds a line end to each.

    Args:
        tokenizer: `BYTES` or the path of a tokenizer.json.

    Returns:
        (a function from a text to its tokens, size of the vocabulary)
    """
    if tokenizer == BYTES:
        return lambda text: list(f"{text}\n".encode()), 256
    model = load_tokenizer(existing(tokenizer, "task_args.tokenizer"))

    def encode(text: str) -> list[int]:
        return model.encode(f"{text}\n", add_special_tokens=False).ids

    return encode, model.get_vocab_size()


def _cached_tokens(chunks: Iterator[Any], *, key: str, vocab_size: int, source: str) -> TokenFile:
    """The tokens in the cache, which are computed only if they are not there."""
    dtype = "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"

    def make(path: Path) -> None:
        with open(path, "wb") as out:
            for chunk in chunks:
                out.write(np.asarray(chunk, dtype=dtype).tobytes())

    path = cached(f"tokens-{key}.{dtype}.bin", make)
    length = path.stat().st_size // np.dtype(dtype).itemsize
    if length == 0:
        raise UserError(f"task_args.data: there is no text in {source}; give files with text")
    return TokenFile(path, dtype, length)


def _byte_chunks(files: Sequence[Path]) -> Iterator[Any]:
    """Each file's bytes, decompressed, and converted to UTF-8 from UTF-16 or UTF-32."""
    for file in files:
        with open_utf8(file, any_bytes=True) as source:
            while chunk := source.read(CHUNK):
                yield np.frombuffer(chunk, dtype=np.uint8)


def _encoded_chunks(files: Sequence[Path], tokenizer: Tokenizer) -> Iterator[Any]:
    """Each file's tokens, a piece at a time; raises UserError if a file is not UTF-8."""
    for file in files:
        with open_text(file) as source:
            for piece in _pieces(source):
                yield tokenizer.encode(piece, add_special_tokens=False).ids


def _pieces(source: TextIO) -> Iterator[str]:
    """About CHUNK characters at a time, up to the end of a line or else of a word."""
    pending = ""
    while chunk := source.read(CHUNK):
        pending += chunk
        end = pending.rfind("\n") + 1 or pending.rfind(" ") + 1
        if end:
            yield pending[:end]
            pending = pending[end:]
    if pending:
        yield pending


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a Hugging Face tokenizers file.

    Raises:
        UserError: The file is not one.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"task_args.tokenizer: {path} is not a Hugging Face tokenizers file "
            f"({str(error).splitlines()[0]}); write {BYTES} or the path of a tokenizer.json"
        ) from error


# --- token files ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens.

    Args:
        path: The file.
        dtype: NumPy's name for the tokens' number type.
        length: The number of tokens.
        offset: The first token's place in the file, in bytes.
    """

    path: Path
    dtype: str
    length: int
    offset: int = 0

    def windows(self, starts: Sequence[int], length: int) -> npt.NDArray[np.int64]:
        """`length` tokens from each start: (len(starts), length)."""
        width = np.dtype(self.dtype).itemsize
        rows = np.empty((len(starts), length), dtype=np.int64)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            for row, start in zip(rows, starts, strict=True):
                content = os.pread(descriptor, length * width, self.offset + int(start) * width)
                if len(content) < length * width:
                    raise UserError(
                        f"{self.path} became shorter while it was read; "
                        "do not change it during a run"
                    )
                row[:] = np.frombuffer(content, self.dtype)
        finally:
            os.close(descriptor)
        return rows


def open_tokens(path: Path, dtype: str = "uint16") -> TokenFile:
    """Open a file of tokens.

    Args:
        path: A .npy file of one dimension, or a .bin file of bare numbers.
        dtype: The number type in a .bin file.

    Raises:
        UserError: The file is damaged, empty, or not of one dimension.
    """
    size = path.stat().st_size
    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # a damaged header raises errors of many types
            raise UserError(
                f"{path} cannot be read as a .npy file: {str(error).splitlines()[0]}"
            ) from error
        if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.kind not in "ui":
            raise UserError(
                f"{path} must hold one row of whole numbers, "
                f"not {array.dtype} of shape {array.shape}"
            )
        file = TokenFile(path, dtype=array.dtype.str, length=len(array), offset=array.offset)
    else:
        width = np.dtype(dtype).itemsize
        if size % width:
            raise UserError(
                f"{path} has {size} bytes, not a multiple of {width} as {dtype} has; "
                f"write task_args.token_dtype ({', '.join(TOKEN_DTYPES)}), or make the file anew"
            )
        file = TokenFile(path, dtype, size // width)
    if file.length == 0:
        raise UserError(f"{path} holds no tokens; give a file with some")
    return file


class TokenWindows(Dataset[Any]):
    """Consecutive windows of files as samples: (tokens 0 … T-1, tokens 1 … T).

    A window never spans two files.

    Args:
        files: The files of tokens, in order.
        sequence_length: T.
        vocab_size: A sample with a token that is not below this raises UserError.
    """

    def __init__(self, files: Sequence[TokenFile], sequence_length: int, vocab_size: int) -> None:
        self.files = list(files)
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        # The last token of a window is a target only, and the first input of the next window.
        windows_per_file = [max(file.length - 1, 0) // sequence_length for file in files]
        self._ends = np.cumsum(windows_per_file)
        self.begin = 0
        self.end = int(self._ends[-1])

    def part(self, begin: int, end: int) -> TokenWindows:
        """Windows begin … end - 1 as another data set."""
        part = TokenWindows(self.files, self.sequence_length, self.vocab_size)
        part.begin = begin
        part.end = end
        return part

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (len(indices), sequence_length) int64."""
        windows = np.asarray(indices, dtype=np.int64) + self.begin
        file_numbers = np.searchsorted(self._ends, windows, side="right")
        rows = np.empty((len(windows), self.sequence_length + 1), dtype=np.int64)
        for number in np.unique(file_numbers):
            file = self.files[number]
            file_rows = np.flatnonzero(file_numbers == number)
            first_window = self._ends[number - 1] if number else 0
            starts = (windows[file_rows] - first_window) * self.sequence_length
            rows[file_rows] = file.windows(starts.tolist(), rows.shape[1])
            check_tokens(rows[file_rows], self.vocab_size, file.path)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def check_tokens(tokens: npt.NDArray[np.int64], vocab_size: int, path: Path) -> None:
    """Raise UserError if a token is outside the vocabulary."""
    if tokens.size and (tokens.max() >= vocab_size or tokens.min() < 0):
        wrong = tokens.max() if tokens.max() >= vocab_size else tokens.min()
        raise UserError(
            f"{path} holds token {wrong}, but vocab_size is {vocab_size}; "
            "write the tokenizer's vocab_size, or the file's number type as task_args.token_dtype"
        )
