"""Data sets of Hugging Face's library `datasets`: folders that its save_to_disk wrote, and Parquet, JSONL, Arrow and
WebDataset files, here or wherever fsspec reads (s3://, gs://, hf://, https://).

Read whole they are memory-mapped from the library's cache and asked by number, each worker for its own rows; as a
stream they are read where they lie, with a state (stream.py). What they give is a dict by column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec

from app.errors import MissingData, UserError

FORMATS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".arrow": "arrow",
    ".tar": "webdataset",
}
PACKED = (".gz", ".zst", ".bz2", ".xz")
MARKERS = ("dataset_dict.json", "state.json")  # of folders that save_to_disk wrote: several parts, one part
HELD_OUT = ("validation", "test")


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
        # datasets 5.2 opens a tar with block_size=0, which file systems such as s3fs refuse: that is copied first.
        where_it_lies = stream and not (kind == "webdataset" and "://" in names[0])
        found = datasets.load_dataset(kind, data_files=names, split="train", streaming=where_it_lies)
        return found.to_iterable_dataset() if stream and not where_it_lies else found, None
    except UserError:
        raise
    except Exception as error:  # the library's own, pyarrow's and each file system's
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        refusal = MissingData if isinstance(error, OSError) else UserError
        raise refusal(f"task_args.data: {data} cannot be read as a data set ({said})") from error


def column(dataset: Any, name: str, key: str) -> str:
    """The name, if the data set has such a column. Raises UserError, naming those it has."""
    known = dataset.column_names or list(next(iter(dataset.take(1)), {}))
    if name not in known:
        raise UserError(f"{key} is {name!r}, but the data has the columns {', '.join(known)}: name one of them")
    return name


def files_key(data: str | Sequence[str]) -> str:
    """What tells whether the files have changed, as their file systems do: by size and time, or an object's tag."""
    names = [data] if isinstance(data, str) else list(data)
    files = fsspec.open_files([f"{name}/**/*.arrow" if _is_saved(name) else name for name in names])
    return hashlib.sha256(repr([file.fs.ukey(file.path) for file in files]).encode()).hexdigest()[:16]


def _format(name: str) -> str:
    suffixes = [suffix for suffix in Path(name).suffixes[-2:] if suffix not in PACKED]
    return FORMATS.get(suffixes[-1], "") if suffixes else ""


def _is_saved(name: str) -> bool:
    if "://" not in name:
        return any((Path(name).expanduser() / marker).is_file() for marker in MARKERS)
    system, path = fsspec.core.url_to_fs(name)
    return not _format(name) and any(system.exists(f"{path}/{marker}") for marker in MARKERS)
