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

NAMES: dict[str, dict[str, str]] = {
    "ClusterFacts": {"link_expected": "link_expected_bytes_per_second"},
    "Entry": {"since": "since_unix_seconds", "started": "started_unix_seconds"},
    "Exported": {"size": "size_bytes"},
    "GpuFacts": {
        "flops": "flops_per_second",
        "memory_total": "memory_total_bytes",
        "memory_used": "memory_used_bytes",
        "temperature": "temperature_celsius",
    },
    "Law": {"speed": "samples_per_second"},
    "NodeFacts": {"disk_free": "disk_free_bytes"},
    "NodeType": {
        "link_across": "link_across_bytes_per_second",
        "link_within": "link_within_bytes_per_second",
        "price_per_hour": "dollars_per_hour",
    },
    "Point": {
        "bubble": "bubble_seconds",
        "communication": "communication_seconds",
        "computing": "computing_seconds",
        "data": "data_seconds",
        "memory": "memory_bytes",
        "step": "step_seconds",
    },
    "RingFacts": {
        "exchange": "exchange_bytes_per_second",
        "expected": "expected_bytes_per_second",
        "rate": "rate_bytes_per_second",
    },
    "RunState": {"created": "created_unix_seconds", "updated": "updated_unix_seconds"},
}
"""By class, the fields that have a longer name in documents: with their unit."""


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


def with_units(class_name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a class under the names that they have in documents."""
    names = NAMES.get(class_name, {})
    return {names.get(name, name): value for name, value in values.items()}


def plain(value: Any) -> Any:
    """A value as JSON has it: no NaN and no infinity, which become null, and no other classes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return plain(with_units(type(value).__name__, values))
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
