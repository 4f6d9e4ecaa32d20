"""Text made into a token file: found, tokenised once, kept in the cache by its content."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.data.files import cached, digest, existing
from app.data.tokens import TokenFile
from app.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PYTHON = "python"  # the built-in corpus: the source of Python's own library
BYTES = "bytes"  # instead of a tokenizer: every byte of the files is a token, of 256
CHUNK = 1 << 20  # bytes or characters that are read at once


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
                raise UserError(
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
    files = [path for path in root.rglob("*.py") if left_out.isdisjoint(path.relative_to(root).parts[:-1])]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def tokenise(files: Sequence[Path], tokenizer: str = BYTES) -> tuple[TokenFile, int, int]:
    """(the files' tokens one after another, size of the vocabulary, bytes of text).

    The tokens are kept in the cache under a hash of the files' contents and the tokenizer, and made only if
    they are not there. `tokenizer` is "bytes" or the path of a Hugging Face tokenizers file (tokenizer.json).
    """
    if tokenizer == BYTES:
        vocab_size, key = 256, _content_key(files)
        chunks = _byte_chunks(files)
    else:
        path = existing(tokenizer, "task_args.tokenizer")
        model = load_tokenizer(path)
        vocab_size, key = model.get_vocab_size(), f"{_content_key(files)}-{digest(path)}"
        chunks = _encoded_chunks(files, model)
    dtype = "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"

    def make(path: Path) -> None:
        with open(path, "wb") as out:
            for chunk in chunks:
                out.write(np.asarray(chunk, dtype=dtype).tobytes())

    made = cached(f"tokens-{key}.{dtype}.bin", make)
    length = made.stat().st_size // np.dtype(dtype).itemsize
    if length == 0:
        others = f" and {len(files) - 1} other files" if len(files) > 1 else ""
        raise UserError(f"task_args.data: there is no text in {files[0]}{others}; give files with text")
    return TokenFile(made, dtype, length), vocab_size, sum(file.stat().st_size for file in files)


def _content_key(files: Sequence[Path]) -> str:
    """The files' digest, remembered by their paths, sizes and times so that it is computed once."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:16]
    return cached(f"digest-{name}.txt", lambda path: path.write_text(digest(*files))).read_text()


def _byte_chunks(files: Sequence[Path]) -> Iterator[Any]:
    for file in files:
        with open(file, "rb") as source:
            while chunk := source.read(CHUNK):
                yield np.frombuffer(chunk, dtype=np.uint8)


def _encoded_chunks(files: Sequence[Path], tokenizer: Tokenizer) -> Iterator[Any]:
    """Each file's tokens, a piece at a time; a file that is not UTF-8 gets replacement characters."""
    for file in files:
        with open(file, encoding="utf-8", errors="replace") as source:
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
