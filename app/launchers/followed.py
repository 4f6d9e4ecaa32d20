"""What a run remembers of the layouts of its plan, for the start that follows a killed one."""

import json
from typing import Any

from app.config import Config
from app.config.layout_requirement import ANY_LAYOUT, Requirement
from app.storage.storage import Storage

FILE = "plan.json"
"""In the run's folder: the layouts with which it has trained, and what was measured of them."""


def read_record(storage: Storage) -> dict[str, Any]:
    """What earlier starts of a run have kept in plan.json; empty if there is nothing."""
    try:
        return dict(json.loads(storage.read_bytes(FILE)))
    except (OSError, ValueError):
        return {}


def followed_layout(config: Config, storage: Storage) -> Requirement:
    """The layout to which an earlier start has moved, if the run follows its plan."""
    if not config.plan.follow:
        return ANY_LAYOUT
    record = read_record(storage)
    if not record.get("key"):
        return ANY_LAYOUT
    return Requirement(key=record["key"], stages=tuple(record["stages"]))
