"""Data sets of Hugging Face's library `datasets`: folders that its save_to_disk wrote, and Parquet, JSONL, Arrow and
WebDataset files, here or wherever fsspec reads (s3://, gs://, hf://, https://).

Read whole they are memory-mapped from the library's cache and asked by number, each worker for its own rows (the texts
of JSON are read line by line instead, see `documents`); as a stream they are read where they lie, with a state
(stream.py). What they give is a dict by column.
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
MARKERS = ("dataset_dict.json", "state.json")  # of folders that save_to_disk wrote: several parts, one part
HELD_OUT = ("validation", "test")
ROWS_WITHOUT = 10_000  # of a JSON file, after which a column that none of them has is given up


def is_dataset(data: str | Sequence[str]) -> bool:
    """Whether `open_dataset` is what reads this."""
    names = [data] if isinstance(data, str) else list(data)
    return bool(names) and all(isinstance(name, str) and (_format(name) != "" or _is_saved(name)) for name in names)


def open_dataset(data: str | Sequence[str], *, stream: bool = False) -> tuple[Any, Any]:
    """(data to train on, held-out data or None): a datasets.Dataset each, or IterableDataset with `stream`.

    data: a folder of save_to_disk, or files of one format: paths, globs and URLs. A folder with several parts has them
    named train, and validation or test.

    Raises UserError.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(f"task_args.data: {data} needs the package datasets: pip install 'trireme[datasets]'") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what goes wrong is said once, below
    try:
        if isinstance(data, str) and _is_saved(data):
            found = datasets.load_from_disk(str(Path(data).expanduser()) if "://" not in data else data)
            parts = found if isinstance(found, datasets.DatasetDict) else {"train": found}
            held_out = next((parts[name] for name in HELD_OUT if name in parts), None)
            return parts["train"].to_iterable_dataset() if stream else parts["train"], held_out
        names = [data] if isinstance(data, str) else list(data)
        kinds = {_format(name) for name in names}
        if len(kinds) > 1:
            raise UserError(f"task_args.data mixes files of {', '.join(sorted(kinds))}; give one kind")
        kind = kinds.pop()
        if kind == "json" and stream:
            _require_streamed_json(names)
        # datasets 5.2 opens a tar with block_size=0, which file systems such as s3fs refuse: that is copied first.
        where_it_lies = stream and not (kind == "webdataset" and "://" in names[0])
        found = datasets.load_dataset(kind, data_files=names, split="train", streaming=where_it_lies)
        return found.to_iterable_dataset() if stream and not where_it_lies else found, None
    except UserError:
        raise
    except Exception as error:  # the library's own, pyarrow's and each file system's
        refusal = MissingData if isinstance(error, OSError) else UserError
        raise refusal(f"task_args.data: {data} cannot be read as a data set ({reason_of(error)})") from error


def _require_streamed_json(names: Sequence[str]) -> None:
    """Raise UserError if the first file is one of which the library's stream would say little, or is not read by it."""
    first = _files(names[:1])[0]
    if "://" in first:
        return
    known = file_format(first)
    by_name = Path(first).suffix.lower() in PACKED
    if known.encoding not in ("utf-8", "utf-8-sig") or (known.compression and not by_name):
        form = known.compression or known.encoding
        raise UserError(f"task_args.stream: {first} is {form}, which is not read as a stream; leave stream out")
    if next(json_rows(first), None) is None:
        raise UserError(f"task_args.data: {first} has no rows; give data with some")


def reason_of(error: BaseException) -> str:
    """The first line of the error that the others came from: the library's own says little."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def documents(data: str | Sequence[str], text: str) -> Iterator[str]:
    """The texts of a data set, those that are null left out.

    JSON is read line by line, as every text file is (open_text.py): a column may change its type or be missing in some
    rows, so long as each value of `text` is a text or null.

    Args:
        data: See `open_dataset`.
        text: The column that holds them.

    Raises:
        UserError: It cannot be read, has no such column, or something in it is not a text.
    """
    names = [data] if isinstance(data, str) else list(data)
    if {_format(name) for name in names} == {"json"}:
        return _json_documents(_files(names), text, str(data))
    rows = open_dataset(data)[0]
    values = enumerate(rows[column(rows, text, "task_args.text")], 1)
    return _texts(((f"{data}, row {number}", value) for number, value in values), text)


def _json_documents(files: Sequence[str], text: str, data: str) -> Iterator[str]:
    known: dict[str, None] = {}
    for file in files:
        yield from _texts(_values(file, text, known), text)
    if not known:
        raise UserError(f"task_args.data: {data} has no rows; give data with some")
    if text not in known:
        raise UserError(_no_column(text, "task_args.text", list(known)))


def document(value: Any, place: str, column: str) -> str | None:
    """The text in a row, or None for null. Raises UserError for anything else."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise UserError(f"{place}: column {column!r} holds {repr(value)[:40]} ({type(value).__name__}), not a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise UserError(f"{place}: column {column!r} holds {half}, half of a character of two; leave it out") from error
    return value


def _texts(rows: Iterator[tuple[str, Any]], column: str) -> Iterator[str]:
    for place, value in rows:
        text = document(value, place, column)
        if text is not None:
            yield text


def _values(file: str, column: str, known: dict[str, None]) -> Iterator[tuple[str, Any]]:
    """(place, the column's value or None) of each row; notes the columns that there are."""
    for number, (place, row) in enumerate(json_rows(file)):
        if isinstance(row, str) and column == "text":  # an array of texts
            row = {"text": row}
        if not isinstance(row, dict):
            raise UserError(f"{place} is not an object such as {{{column!r}: …}}")
        known.update(dict.fromkeys(row))
        if number == ROWS_WITHOUT and column not in known:
            raise UserError(_no_column(column, "task_args.text", list(known)))
        yield place, row.get(column)


def _files(names: Sequence[str]) -> list[str]:
    """Paths and URLs without patterns. Raises MissingData: there is nothing."""
    files: list[str] = []
    for name in names:
        is_pattern = glob.has_magic(name) and not name.startswith(("http://", "https://"))  # whose ? is a query
        if "://" in name:
            matches = [file.fs.unstrip_protocol(file.path) for file in _opened([name])] if is_pattern else [name]
        elif is_pattern:
            matches = sorted(glob.glob(os.path.expanduser(name), recursive=True))
        else:
            matches = [str(existing(name, "task_args.data"))]
        if not matches:
            raise MissingData(
                f"task_args.data: no file matches {name!r} (looked in {Path.cwd()}); write another path or glob"
            )
        files += matches
    return files


def _opened(names: Sequence[str]) -> list[Any]:
    """fsspec's files of these paths, patterns and URLs, which are not opened yet. Raises UserError."""
    try:
        return list(fsspec.open_files(names))
    except Exception as error:  # each file system has its own
        raise _no_access(names, error) from error


def _no_access(names: Sequence[str], error: Exception) -> UserError:
    refusal = MissingData if isinstance(error, OSError) else UserError
    return refusal(f"task_args.data: {', '.join(names)} cannot be read ({reason_of(error)})")


def column(dataset: Any, name: str, key: str) -> str:
    """The name, if the data set has such a column. Raises UserError, naming those it has."""
    try:
        known = dataset.column_names or list(next(iter(dataset.take(1)), {}))
    except Exception as error:  # of a stream: the library's own, pyarrow's and each file system's
        raise UserError(f"task_args.data cannot be read as a data set ({reason_of(error)})") from error
    if name not in known:
        raise UserError(_no_column(name, key, known))
    return name


def _no_column(name: str, key: str, known: Sequence[str]) -> str:
    return f"{key} is {name!r}, but the data has the columns {', '.join(known)}: name one of them"


def files_key(data: str | Sequence[str]) -> str:
    """What tells whether the files have changed, as their file systems do: by size and time, or an object's tag."""
    names = [data] if isinstance(data, str) else list(data)
    files = _opened([f"{name}/**/*.arrow" if _is_saved(name) else name for name in names])
    try:
        keys = [file.fs.ukey(file.path) for file in files]
    except Exception as error:  # each file system has its own
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
