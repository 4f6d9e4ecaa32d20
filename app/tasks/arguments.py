"""Checks a task's arguments against the signature of its class, before the class is called."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from app.config import arguments
from app.tasks.base import Task


def check_arguments(name: str, task_class: type[Task], task_args: Mapping[str, Any]) -> None:
    """Check that a class takes these arguments, that it needs no others, and their types.

    Args:
        name: The name of the task.
        task_class: Its class.
        task_args: The arguments.

    Raises:
        MissingData: Only the argument `data` is missing.
        UserError: Another argument is missing or has the wrong type, or the class does not take
            one.
    """
    try:
        hints = typing.get_type_hints(task_class.__init__)
    except Exception:  # names that exist for type checkers only
        hints = {}
    arguments.check_arguments(
        name,
        inspect.signature(task_class),
        hints,
        task_args,
        is_built_in=task_class.__module__.startswith("app.tasks."),
    )
