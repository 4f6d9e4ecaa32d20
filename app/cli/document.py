"""The one JSON document that a command prints with --json."""

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from app.errors import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED

STATUS = {EXIT_FAILED: "failed", EXIT_REFUSED: "refused", EXIT_STOPPED: "stopped"}
"""The `status` in the document of a command that ends with an error, by its exit code."""


def document(answer: Any, *, exit_code: int, error: str = "") -> dict[str, Any]:
    """The document of a command that has ended.

    Args:
        answer: A dataclass or mapping; None if the command has ended without an answer.
        exit_code: How it has ended. A code other than 0 stands in the document too.
        error: A sentence on what went wrong; "" if nothing did.
    """
    fields = {} if answer is None else plain(answer)
    if error:
        fields = {"status": STATUS[exit_code], **fields, "error": error}
    if exit_code:
        fields["exit_code"] = exit_code
    return fields


def text_of(fields: Mapping[str, Any]) -> str:
    """A document as one line of JSON."""
    return json.dumps(fields, allow_nan=False)


def plain(value: Any) -> Any:
    """A value as JSON has it: no NaN and no infinity, which become null, and no other classes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "item"):  # a number of NumPy or a tensor
        return plain(value.item())
    return str(value)
