"""Pictures from files such as .jpg and .png, by the package pillow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image


def read_picture(path: Path, place: str) -> Image:
    """A picture as it is in its file.

    Args:
        path: The file.
        place: Where the file is named, for messages.

    Raises:
        UserError: The file cannot be read, or pillow is not installed.
    """
    if not path.is_file():
        raise UserError(f"{place} names {path}, which is not there; write an existing file")
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(f"{place}: pictures need the package pillow: pip install pillow") from error
    try:
        picture = Image.open(path)
        picture.load()
    except Exception as error:  # damaged files raise errors of many kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{place}: {path} cannot be read as a picture ({lines[0]})") from error
    return picture
