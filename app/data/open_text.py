"""Opens text files for every reader.

A file's first bytes, not its name, decide its compression (gzip, bzip2, xz or zstd) and its
encoding (UTF-8 with or without a byte-order mark, UTF-16 or UTF-32 with one). Other encodings are
refused with the line number, because a model would learn the mistakes of a wrong guess.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import fsspec

from app.errors import UserError

COMPRESSION = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""How a file is compressed, by its first bytes."""
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16's, which is its beginning
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
"""A file's encoding, by its first bytes."""
HEAD = 4096  # bytes that are searched for NUL bytes
SAMPLE = 1 << 16  # bytes that are read to find the separator of a table
SAMPLE_ROWS = 200
CHUNK = 1 << 20
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""The errors of the decompressors for a damaged file."""


@dataclass(frozen=True)
class Format:
    """The format of a file according to its first bytes.

    Args:
        compression: gzip, bz2, xz, zstd, or "" for none.
        encoding: utf-8, utf-8-sig, utf-16 or utf-32.
        binary: Whether there are NUL bytes, which text in UTF-8 does not have.
    """

    compression: str
    encoding: str
    binary: bool

    @property
    def is_plain(self) -> bool:
        """Whether the file is UTF-8 without compression or a byte-order mark."""
        return not self.compression and self.encoding == "utf-8"


def file_format(path: Path | str) -> Format:
    """The compression of a file, and the encoding of its decompressed text.

    Raises:
        UserError: The file is damaged.
    """
    with _decompressed(path) as (file, compression):
        return _format(file, compression)


@contextmanager
def open_utf8(path: Path | str, *, any_bytes: bool = False) -> Iterator[BinaryIO]:
    """Open a file as bytes of UTF-8 without a byte-order mark.

    Args:
        path: A local file, or a URL that fsspec opens.
        any_bytes: Accept NUL bytes at the beginning, which are refused otherwise. Other bytes that
            are not UTF-8 are never refused here.

    Raises:
        UserError: The file is damaged or not a text.
    """
    with _decompressed(path) as (file, compression):
        form = _format(file, compression)
        if form.binary and not any_bytes:
            start = bytes(file.read(4))
            raise UserError(
                f"{path} is not a text file: it begins with {start!r} and holds NUL bytes; "
                "if it is UTF-16 without a byte-order mark, convert it: "
                f"iconv -f utf-16le -t utf-8 {path}"
            )
        if form.encoding in ("utf-8", "utf-8-sig"):
            file.read(len(codecs.BOM_UTF8) if form.encoding == "utf-8-sig" else 0)
            yield file
        else:
            yield cast(BinaryIO, io.BufferedReader(_Utf8Reader(file, form.encoding, path)))


@contextmanager
def open_text(path: Path | str, *, newline: str | None = None) -> Iterator[TextIO]:
    """Open a file as text.

    Args:
        path: A local file, or a URL that fsspec opens.
        newline: As for `open`.

    Raises:
        UserError: The file is damaged or not UTF-8; raised while the file is read, too.
    """
    with open_utf8(path) as file:
        text = io.TextIOWrapper(cast(Any, file), encoding="utf-8", newline=newline)
        try:
            yield text
        except UnicodeDecodeError as error:
            raise not_utf8(path) from error
        finally:
            text.detach()


def not_utf8(path: Path | str) -> UserError:
    """The error for a file that is not UTF-8, which names the first wrong line."""
    place = str(path)
    shown = "some bytes"
    with open_utf8(path, any_bytes=True) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                place = f"{path}, line {number}"
                shown = repr(line[max(error.start - 10, 0) : error.end + 10])
                break
    return UserError(
        f"{place}: {shown} is not UTF-8; convert the file, for instance from Western European: "
        f"iconv -f windows-1252 -t utf-8 {path}"
    )


def utf8_size(path: Path | str) -> int:
    """The number of bytes of a file's text in UTF-8, without a byte-order mark."""
    if file_format(path).is_plain:
        return Path(path).stat().st_size
    size = 0
    with open_utf8(path, any_bytes=True) as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
    return size


def json_rows(path: Path | str) -> Iterator[tuple[str, Any]]:
    """The values of a file of JSON lines or of one JSON array.

    Blank lines are skipped.

    Args:
        path: A local file, or a URL that fsspec opens.

    Yields:
        (the value's place, such as `FILE:3`, for messages; the value)

    Raises:
        UserError: The file is damaged, not UTF-8, or a line is not JSON.
    """
    with open_text(path) as file:
        is_first = True
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            if is_first and line.lstrip().startswith("["):
                values = _parsed(line + file.read(), path, "")
                for item, value in enumerate(values, 1):
                    yield f"{path}, item {item}", value
                return
            is_first = False
            place = f"{path}:{number}"
            yield place, _parsed(line, place, "; write one object a line")


def _parsed(text: str, place: Path | str, advice: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{place} is not JSON: {error.msg} at character {error.pos + 1}{advice}"
        ) from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of nested brackets
        raise UserError(f"{place} cannot be read as JSON: {error}{advice}") from error


# --- separators of tables -------------------------------------------------------------------------

SEPARATORS = ",;\t|"
DECIMAL_COMMA = re.compile(r"[-+]?(\d+|\d{1,3}(\.\d{3})+),\d+")
THOUSANDS_BY_COMMA = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+")
DECIMAL_POINT = re.compile(r"[-+]?\d*\.\d+")
THOUSANDS_BY_POINT = re.compile(r"[-+]?[1-9]\d{0,2}(\.\d{3})+")


@dataclass(frozen=True)
class Dialect:
    """The notation of a CSV file.

    Args:
        separator: The character between the cells of a row.
        decimal_point: "." or ",".
        skip_rows: Lines before the one with the columns' names.
    """

    separator: str = ","
    decimal_point: str = "."
    skip_rows: int = 0


def table_dialect(path: Path) -> Dialect:
    """The notation of a CSV file, found from its first rows.

    The separator is the one that gives most rows as many cells as the columns' names. Numbers have
    a decimal comma if there are cells such as 0,5 and none such as 0.5; cells such as 1,234 do not
    count.
    """
    with open_utf8(path) as file:
        sample = file.read(SAMPLE).decode("utf-8", "replace")
    sample = sample.replace("\r\n", "\n").replace("\r", "\n")
    lines = sample.splitlines(keepends=True)
    if len(sample) >= SAMPLE and len(lines) > 1:
        lines.pop()  # the last line may be incomplete
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    # Excel may name the separator in the first line.
    hint = re.fullmatch(r'"?sep=(.)"?', lines[first].strip("\r\n")) if lines else None
    skip_rows = first + 1 if hint else 0
    text = "".join(lines[skip_rows:])
    separator = hint[1] if hint else max(SEPARATORS, key=lambda candidate: _fit(text, candidate))
    return Dialect(separator, _decimal_point(text, separator), skip_rows)


def _sample_rows(text: str, separator: str) -> list[list[str]]:
    rows: list[list[str]] = []
    for row in csv.reader(io.StringIO(text), delimiter=separator):
        if row:
            rows.append(row)
        if len(rows) == SAMPLE_ROWS:
            return rows
    return rows


def _fit(text: str, separator: str) -> float:
    """The share of rows with as many cells as the first row; 0 if that has only one."""
    rows = _sample_rows(text, separator)
    width = len(rows[0]) if rows else 0
    if width < 2:
        return 0.0
    compared = rows[1:] or rows
    return sum(len(row) == width for row in compared) / len(compared)


def _decimal_point(text: str, separator: str) -> str:
    if separator == ",":
        return "."
    cells = [cell.strip() for row in _sample_rows(text, separator)[1:] for cell in row]
    has_comma = any(
        DECIMAL_COMMA.fullmatch(cell) and not THOUSANDS_BY_COMMA.fullmatch(cell) for cell in cells
    )
    has_point = any(
        DECIMAL_POINT.fullmatch(cell) and not THOUSANDS_BY_POINT.fullmatch(cell) for cell in cells
    )
    return "," if has_comma and not has_point else "."


# --- bytes ----------------------------------------------------------------------------------------


@contextmanager
def _decompressed(path: Path | str) -> Iterator[tuple[io.BufferedReader, str]]:
    """(the decompressed file, its compression); decompression errors become a UserError."""
    is_url = "://" in str(path)
    with fsspec.open(str(path), "rb") if is_url else open(path, "rb", buffering=0) as source:
        raw = io.BufferedReader(cast(Any, source), CHUNK)
        start = raw.peek(6)
        compression = _by_start(start, COMPRESSION) or ""
        if not compression:
            yield raw, ""
            return
        try:
            with _opened(raw, compression) as file:
                yield io.BufferedReader(cast(Any, file), CHUNK), compression
        except UserError:
            raise
        except BROKEN as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise UserError(
                f"{path} cannot be read as {compression}: {reason}; fetch it again"
            ) from error


def _opened(raw: io.BufferedReader, compression: str) -> Any:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if compression == "bz2":
        return bz2.BZ2File(raw)
    if compression == "xz":
        return lzma.LZMAFile(raw)
    import pyarrow  # not at the top: the import is slow, and few files need it

    return pyarrow.CompressedInputStream(raw, "zstd")


def _format(file: io.BufferedReader, compression: str) -> Format:
    head = file.peek(HEAD)[:HEAD]
    encoding = _by_start(head, BYTE_ORDER_MARKS) or "utf-8"
    has_wide_characters = encoding in ("utf-16", "utf-32")
    return Format(compression, encoding, binary=b"\0" in head and not has_wide_characters)


def _by_start(content: bytes, names: Mapping[bytes, str]) -> str | None:
    """The name of the first bytes that the content begins with."""
    return next((name for start, name in names.items() if content.startswith(start)), None)


class _Utf8Reader(io.RawIOBase):
    """A file in another encoding as bytes of UTF-8."""

    def __init__(self, file: io.BufferedReader, encoding: str, path: Path | str) -> None:
        self._text = io.TextIOWrapper(file, encoding=encoding, newline="")
        self._path = path
        self._encoding = encoding
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._pending:
            try:
                self._pending = self._text.read(CHUNK).encode("utf-8")
            except UnicodeError as error:
                raise UserError(
                    f"{self._path} begins as {self._encoding} but is damaged: {error}"
                ) from error
        part = self._pending[: len(buffer)]
        self._pending = self._pending[len(part) :]
        buffer[: len(part)] = part
        return len(part)
