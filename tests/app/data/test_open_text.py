"""Text files as users have them: compressed, in several encodings, with unusual line ends, damaged.

Tables may have other separators and decimal commas.
"""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from app.data.open_text import (
    Dialect,
    file_format,
    json_rows,
    open_text,
    open_utf8,
    table_dialect,
    utf8_size,
)
from app.errors import UserError

ROWS = [{"text": "grün", "number": 1}, {"text": "5 €", "number": None}]
LINES = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in ROWS)


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def plain(content: bytes) -> bytes:
    return content


def rows_of(path: Path) -> list[Any]:
    """The rows of a JSON file, without their places."""
    return [row for _, row in json_rows(path)]


@pytest.mark.parametrize("compress", [plain, gzip.compress, bz2.compress, lzma.compress, zstd])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_text_is_the_same_in_every_compression_and_encoding(
    tmp_path: Path, compress: Callable[[bytes], bytes], encoding: str
) -> None:
    path = tmp_path / "name says nothing.csv"
    path.write_bytes(compress(LINES.encode(encoding)))
    assert rows_of(path) == ROWS
    with open_utf8(path) as file:
        assert file.read() == LINES.encode()
    assert utf8_size(path) == len(LINES.encode())
    assert file_format(path).is_plain == (compress is plain and encoding == "utf-8")


def test_large_and_big_endian_files_are_read(tmp_path: Path) -> None:
    """They are decoded piece by piece, without losing a piece or cutting a character."""
    text = "€uro, 😀\r\n" * 300_000
    path = tmp_path / "large.txt"
    path.write_bytes(b"\xfe\xff" + text.encode("utf-16-be"))
    with open_text(path, newline="") as file:
        assert file.read() == text
    assert utf8_size(path) == len(text.encode())


@pytest.mark.parametrize(
    "content",
    [
        f"\n\n{LINES}",
        LINES.replace("\n", "\r\n\r\n"),
        LINES.replace("\n", "\r"),
        f"{LINES}   \n\t\n",
        json.dumps(ROWS),
        f"\ufeff{json.dumps(ROWS, indent=2)}",
        f"\n {json.dumps(ROWS)}\n\n",
    ],
)
def test_blank_lines_line_ends_and_arrays_do_not_matter(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content.encode())
    assert rows_of(path) == ROWS


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    for content in (b"", b"\xef\xbb\xbf", b"\n \n", b"[]"):
        path.write_bytes(content)
        assert rows_of(path) == []


GOOD = LINES.encode()
BAD: list[tuple[bytes, str]] = [
    (
        GOOD + "{'é'}".encode("latin-1"),
        r"f\.jsonl, line 3: .*\\xe9.* is not UTF-8; .*iconv -f windows-1252",
    ),
    (LINES.encode("cp1252"), r"f\.jsonl, line 1: .*\\xfc"),
    (GOOD + b'{"text": "\xed\xa0\x80"}', r"line 3: .* is not UTF-8"),
    (GOOD * 3000 + b"\xff", "line 6001: .* is not UTF-8"),
    (gzip.compress("ü".encode("latin-1")), "line 1: .* is not UTF-8"),
    (LINES.encode("utf-16-le"), "holds NUL bytes; if it is UTF-16 without a byte-order mark"),
    (b"PK\x03\x04\x14\x00\x00\x00", r"is not a text file: it begins with b'PK\\x03\\x04'"),
    (LINES.encode("utf-16")[:-1], "begins as utf-16 but is damaged"),
    (gzip.compress(GOOD * 99)[:-9], "cannot be read as gzip: .*; fetch it again"),
    (lzma.compress(GOOD * 99)[:-9], "cannot be read as xz"),
    (zstd(GOOD * 99)[:-9], "cannot be read as zstd"),
    (b"\x1f\x8bnot really", "cannot be read as gzip"),
    (
        GOOD + b'{"text": "x',
        r"f\.jsonl:3 is not JSON: Unterminated string .* at character 10; write one object",
    ),
    (GOOD + b"\n{]\n", r"f\.jsonl:4 is not JSON"),
    (b'[{"text": 1},', r"f\.jsonl is not JSON"),
    (GOOD + b'{"a": ' * 100_000, r"f\.jsonl:3 cannot be read as JSON"),
    (GOOD + b"1" * 5000, r"f\.jsonl:3 cannot be read as JSON"),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=[message for _, message in BAD])
def test_a_file_that_is_not_text_is_refused_with_one_sentence(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        rows_of(path)
    assert "\n" not in str(raised.value)


DIALECTS: list[tuple[str, Dialect]] = [
    ("a,b\n1,2\n", Dialect()),
    ("a\n1\n", Dialect()),
    ("", Dialect()),
    ("a;b\n1;2\n", Dialect(";")),
    ("a\tb\n1,5 and 3\t2\n", Dialect("\t")),
    ("a|b|c\n1 2|;|3\n", Dialect("|")),
    ("text,label\none; two; three,1\n", Dialect(",")),
    ('a,b\n"1;2;3\n;;",4\n', Dialect(",")),
    ('"a;b",c\n"x;y",1\n', Dialect(",")),
    ("\n\n\na;b\n1;2\n", Dialect(";")),
    ("sep=;\na;b\n1;2\n", Dialect(";", skip_rows=1)),
    ("a;b\r1;2\r", Dialect(";")),
    ("a;b\n1,5;x\n", Dialect(";", ",")),
    ("a;b\n1.234,5;x\n", Dialect(";", ",")),
    ("a\tb\n-0,125\tx\n", Dialect("\t", ",")),
    ("a;b\n1,234;x\n", Dialect(";")),  # the comma may separate thousands
    ("a;b\n1,5;2.5\n", Dialect(";")),
    ("a;b\n" + "1;2\n" * 100_000, Dialect(";")),
    ("a,b\n" + "1,2\n" * 30_000 + '"', Dialect(",")),
]


@pytest.mark.parametrize(
    ("content", "dialect"), DIALECTS, ids=[content[:30] for content, _ in DIALECTS]
)
def test_separators_and_decimal_commas_are_recognized(
    tmp_path: Path, content: str, dialect: Dialect
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode())
    assert table_dialect(path) == dialect
