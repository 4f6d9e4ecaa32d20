"""Files with what they show or say: lines of JSON that name the files beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.data.open_text import json_rows
from app.data.sets import document
from app.data.text import find_files
from app.errors import UserError

FILE_NAME = "file_name"
"""What metadata.jsonl calls a file in the folders of Hugging Face's `datasets`."""


@dataclass(frozen=True)
class Listed:
    """A file, and what a line says of it.

    Args:
        place: The line, for messages to people.
        path: The file.
        text: What the line says of it.
        folder: The folder to which names in the line are relative.
    """

    place: str
    path: Path
    text: str
    folder: Path


def read_listed(data: Any, *, file_key: str, text_key: str, example: str) -> list[Listed]:
    """The files that JSON lines name.

    Args:
        data: Files of JSON lines; the names in them are relative to the folders of these files.
        file_key: The key of the names; `file_name` too.
        text_key: The key of what is said.
        example: A line as it must be, for messages.

    Raises:
        UserError: A line has no such names, or there are fewer than two.
    """
    listed: list[Listed] = []
    files = find_files(data)
    for file in files:
        for place, row in json_rows(file):
            name = row.get(file_key, row.get(FILE_NAME)) if isinstance(row, dict) else None
            text = row.get(text_key) if isinstance(row, dict) else None
            if not isinstance(name, str) or not name or not isinstance(text, str):
                raise UserError(
                    f"{place} does not name a file and its {text_key}; "
                    f"write lines such as {example}"
                )
            document(text, place, text_key)
            path = file.parent / Path(name).expanduser()
            listed.append(Listed(place, path, text, file.parent))
    if len(listed) < 2:
        raise UserError(f"{files[0]} has {len(listed)} lines; at least two are needed")
    return listed


def require_texts(listed: Sequence[Listed], text_key: str) -> None:
    """Check that no text is empty.

    Raises:
        UserError: One is.
    """
    for each in listed:
        if not each.text.strip():
            raise UserError(f"{each.place} has an empty {text_key}; leave the line out")
