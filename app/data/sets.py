"""Data sets of Hugging Face's library `datasets`.

These are folders that `save_to_disk` wrote, and Parquet, JSONL, Arrow and WebDataset files, on this
machine or wherever fsspec reads (s3://, gs://, hf://, https://).

A data set of numbered rows is memory-mapped from the library's cache, and each worker reads only
its rows. (The texts of JSON are read line by line instead, see `documents`.) A stream is read in
place, with a state (stream.py). A row is a dict by column.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec

from app.data.files import existing
from app.data.open_text import file_format, json_rows
from app.errors import MissingData, UserError

FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".arrow": "arrow",
    ".tar": "webdataset",
}
PACKED = (".gz", ".zst", ".bz2", ".xz")
MARKERS = ("dataset_dict.json", "state.json")
"""Files in the folders of save_to_disk: of a data set with several parts, and with one part."""
HELD_OUT = ("validation", "test")
ROWS_WITHOUT = 10_000  # if as many rows of a JSON file lack a column, the column is missing


def is_dataset(data: str | Sequence[str]) -> bool:
    """Whether `open_dataset` reads this data."""
    names = [data] if isinstance(data, str) else list(data)
    return bool(names) and all(
        isinstance(name, str) and (_format(name) != "" or _is_saved(name)) for name in names
    )


def open_dataset(data: str | Sequence[str], *, stream: bool = False) -> tuple[Any, Any]:
    """Open a data set.

    Args:
        data: A folder of save_to_disk, or files of one format: paths, globs and URLs. A folder with
            several parts has one called train, and validation or test.
        stream: Read the data as a stream.

    Returns:
        (data to train on, held-out data or None), each a datasets.Dataset; with `stream` the first
        is a datasets.IterableDataset.

    Raises:
        UserError: The data cannot be read, or the package `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"task_args.data: {data} needs the package datasets: pip install 'trireme[datasets]'"
        ) from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # errors are reported once, below
    try:
        if isinstance(data, str) and _is_saved(data):
            folder = data if "://" in data else str(Path(data).expanduser())
            saved = datasets.load_from_disk(folder)
            parts = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            held_out = next((parts[name] for name in HELD_OUT if name in parts), None)
            return parts["train"].to_iterable_dataset() if stream else parts["train"], held_out
        names = [data] if isinstance(data, str) else list(data)
        kinds = {_format(name) for name in names}
        if len(kinds) > 1:
            raise UserError(
                f"task_args.data mixes files of {', '.join(sorted(kinds))}; give one kind"
            )
        kind = kinds.pop()
        if kind == "json" and stream:
            _require_streamed_json(names)
        # datasets 5.2 opens a tar with block_size=0, which file systems such as s3fs refuse: a
        # remote tar is copied first.
        in_place = stream and not (kind == "webdataset" and "://" in names[0])
        dataset = datasets.load_dataset(kind, data_files=names, split="train", streaming=in_place)
        return dataset.to_iterable_dataset() if stream and not in_place else dataset, None
    except UserError:
        raise
    except Exception as error:  # from the library, pyarrow or a file system
        refusal = MissingData if isinstance(error, OSError) else UserError
        raise refusal(
            f"task_args.data: {data} cannot be read as a data set ({reason_of(error)})"
        ) from error


def _require_streamed_json(names: Sequence[str]) -> None:
    """Raise UserError if the library's stream cannot read the first file, or the file is empty.

    The library's own message would be unclear.
    """
    first = _files(names[:1])[0]
    if "://" in first:
        return
    form = file_format(first)
    # The library recognises compression by the file's name.
    is_unnamed = form.compression and Path(first).suffix.lower() not in PACKED
    if form.encoding not in ("utf-8", "utf-8-sig") or is_unnamed:
        raise UserError(
            f"task_args.stream: {first} is {form.compression or form.encoding}, "
            "which is not read as a stream; leave stream out"
        )
    if next(json_rows(first), None) is None:
        raise UserError(f"task_args.data: {first} has no rows; give data with some")


def reason_of(error: BaseException) -> str:
    """The first line of the original error, since the library's own error says little."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def documents(data: str | Sequence[str], text: str) -> Iterator[str]:
    """The texts of a data set, without those that are null.

    JSON is read line by line (open_text.py), so that columns may change their type or be missing in
    some rows, as long as each value of the column `text` is a text or null.

    Args:
        data: See `open_dataset`.
        text: The column of the texts.

    Raises:
        UserError: The data cannot be read, has no such column, or has a value that is not a text.
    """
    names = [data] if isinstance(data, str) else list(data)
    if {_format(name) for name in names} == {"json"}:
        return _json_documents(_files(names), text, str(data))
    rows = open_dataset(data)[0]
    values = enumerate(rows[column(rows, text, "task_args.text")], 1)
    places = ((f"{data}, row {number}", value) for number, value in values)
    return _texts(places, text)


def _json_documents(files: Sequence[str], text: str, data: str) -> Iterator[str]:
    columns: dict[str, None] = {}
    for file in files:
        yield from _texts(_values(file, text, columns), text)
    if not columns:
        raise UserError(f"task_args.data: {data} has no rows; give data with some")
    if text not in columns:
        raise UserError(_no_column(text, "task_args.text", list(columns)))


def document(value: Any, place: str, column: str) -> str | None:
    """Check the text of a row.

    Args:
        value: A text, or None for null.
        place: The row, for messages.
        column: The text's column, for messages.

    Returns:
        The value.

    Raises:
        UserError: The value is not a text, or has half of a surrogate pair.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise UserError(
            f"{place}: column {column!r} holds {repr(value)[:40]} ({type(value).__name__}), "
            "not a text"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise UserError(
            f"{place}: column {column!r} holds {half}, half of a surrogate pair; leave it out"
        ) from error
    return value


def _texts(rows: Iterator[tuple[str, Any]], column: str) -> Iterator[str]:
    for place, value in rows:
        text = document(value, place, column)
        if text is not None:
            yield text


def _values(file: str, column: str, columns: dict[str, None]) -> Iterator[tuple[str, Any]]:
    """(place, the column's value or None) of each row; adds the rows' columns to `columns`."""
    for number, (place, row) in enumerate(json_rows(file)):
        if isinstance(row, str) and column == "text":  # an array of texts
            row = {"text": row}
        if not isinstance(row, dict):
            raise UserError(f"{place} is not an object such as {{{column!r}: …}}")
        columns.update(dict.fromkeys(row))
        if number == ROWS_WITHOUT and column not in columns:
            raise UserError(_no_column(column, "task_args.text", list(columns)))
        yield place, row.get(column)


def _files(names: Sequence[str]) -> list[str]:
    """Paths and URLs that match these names and patterns; raises MissingData if one has none."""
    files: list[str] = []
    for name in names:
        is_http = name.startswith(("http://", "https://"))  # in these ? begins a query
        is_pattern = glob.has_magic(name) and not is_http
        if "://" in name and is_pattern:
            matches = [file.fs.unstrip_protocol(file.path) for file in _opened([name])]
        elif "://" in name:
            matches = [name]
        elif is_pattern:
            matches = sorted(glob.glob(os.path.expanduser(name), recursive=True))
        else:
            matches = [str(existing(name, "task_args.data"))]
        if not matches:
            raise MissingData(
                f"task_args.data: no file matches {name!r} (looked in {Path.cwd()}); "
                "write another path or glob"
            )
        files += matches
    return files


def _opened(names: Sequence[str]) -> list[Any]:
    """fsspec's files of these paths, patterns and URLs, not yet open; raises UserError."""
    try:
        return list(fsspec.open_files(names))
    except Exception as error:  # each file system has errors of its own
        raise _no_access(names, error) from error


def _no_access(names: Sequence[str], error: Exception) -> UserError:
    refusal = MissingData if isinstance(error, OSError) else UserError
    return refusal(f"task_args.data: {', '.join(names)} cannot be read ({reason_of(error)})")


def column(dataset: Any, name: str, key: str) -> str:
    """Check that a data set has a column.

    Args:
        dataset: A datasets.Dataset or IterableDataset.
        name: The column.
        key: The configuration key that names it.

    Returns:
        The name.

    Raises:
        UserError: There is no such column, or the data cannot be read.
    """
    try:
        columns = dataset.column_names or list(next(iter(dataset.take(1)), {}))
    except Exception as error:  # from the library, pyarrow or a file system
        raise UserError(
            f"task_args.data cannot be read as a data set ({reason_of(error)})"
        ) from error
    if name not in columns:
        raise UserError(_no_column(name, key, columns))
    return name


def _no_column(name: str, key: str, columns: Sequence[str]) -> str:
    return f"{key} is {name!r}, but the data has the columns {', '.join(columns)}: name one of them"


def files_key(data: str | Sequence[str]) -> str:
    """A hash that changes with the files' sizes and times, or with the tags of stored objects."""
    names = [data] if isinstance(data, str) else list(data)
    files = _opened([f"{name}/**/*.arrow" if _is_saved(name) else name for name in names])
    try:
        keys = [file.fs.ukey(file.path) for file in files]
    except Exception as error:  # each file system has errors of its own
        raise _no_access(names, error) from error
    return hashlib.sha256(repr(keys).encode()).hexdigest()[:16]


def _format(name: str) -> str:
    suffixes = [suffix.lower() for suffix in Path(name).suffixes[-2:]]
    suffixes = [suffix for suffix in suffixes if suffix not in PACKED]
    return FORMATS.get(suffixes[-1], "") if suffixes else ""


def _is_saved(name: str) -> bool:
    if "://" not in name:
        return any((Path(name).expanduser() / marker).is_file() for marker in MARKERS)
    system, path = fsspec.core.url_to_fs(name)
    return not _format(name) and any(system.exists(f"{path}/{marker}") for marker in MARKERS)
