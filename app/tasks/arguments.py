"""Checks a task's arguments against the signature of its class, before the class is called."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from app.config.types import example_of, fits, takes_mapping, words_of
from app.errors import MissingData, UserError
from app.tasks.base import Task
from app.tasks.parts import require_known


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
    parameters = inspect.signature(task_class).parameters
    by_keyword = {
        parameter.name: parameter
        for parameter in parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any:
        owner = f"task {name!r}"
        require_known(task_args, list(by_keyword), key="task_args", owner=owner)
    _check_types(name, task_class, by_keyword, task_args)
    missing = [
        parameter.name
        for parameter in by_keyword.values()
        if parameter.default is parameter.empty and parameter.name not in task_args
    ]
    if missing:
        kind = MissingData if missing == ["data"] else UserError
        raise kind(
            f"task {name!r} needs task_args.{missing[0]}, which is not given; "
            "add it to the experiment"
        )


def _check_types(
    name: str,
    task_class: type[Task],
    parameters: Mapping[str, inspect.Parameter],
    task_args: Mapping[str, Any],
) -> None:
    """Check the types of those arguments that have an annotation.

    Raises:
        UserError: An argument has the wrong type; a sentence for each.
    """
    try:
        hints = typing.get_type_hints(task_class.__init__)
    except Exception:  # names that exist for type checkers only
        return
    is_built_in = task_class.__module__.startswith("app.tasks.")
    mistakes = []
    for key, value in task_args.items():
        parameter = parameters.get(key)
        if parameter is None or key not in hints:
            continue
        hint = hints[key]
        default = parameter.default
        # An annotation may forget what the default is: `path: str = None`.
        is_like_default = default is not parameter.empty and type(value) is type(default)
        # A built-in task itself says which keys such a mapping has.
        is_told_by_task = is_built_in and takes_mapping(hint)
        if is_like_default or is_told_by_task or fits(value, hint):
            continue
        example = example_of(f"task_args.{key}", hint, default)
        mistakes.append(
            f"task_args.{key} is {value!r}, but task {name!r} takes {words_of(hint)} there: "
            f"write for instance {example}"
        )
    if mistakes:
        raise UserError("\n".join(mistakes))
