"""Checks the arguments of a task against a signature, wherever that was read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from app.config.types import example_of, fits, takes_mapping, words_of
from app.errors import MissingData, UserError, nearest

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""The kinds of parameters that a configuration can give a value to."""


def check_arguments(
    name: str,
    signature: inspect.Signature,
    hints: Mapping[str, Any],
    task_args: Mapping[str, Any],
    *,
    is_built_in: bool = False,
) -> None:
    """Check that a task takes these arguments, that it needs no others, and their types.

    Args:
        name: The name of the task.
        signature: What its class is called with.
        hints: The types of those arguments that have one.
        task_args: The arguments.
        is_built_in: Whether the task itself says which keys a mapping may have.

    Raises:
        MissingData: Only the argument `data` is missing.
        UserError: Another argument is missing or has the wrong type, or the task does not take one.
    """
    parameters = signature.parameters.values()
    by_keyword = {parameter.name: parameter for parameter in parameters if parameter.kind in NAMED}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for argument in task_args:
        if argument not in by_keyword and not takes_any:
            owner = f"task {name!r}"
            raise UserError(
                no_such_argument(argument, list(by_keyword), key="task_args", owner=owner)
            )
    mistakes = []
    for argument, value in task_args.items():
        parameter = by_keyword.get(argument)
        if parameter is None or argument not in hints:
            continue
        hint = hints[argument]
        default = parameter.default
        # An annotation may forget what the default is: `path: str = None`.
        is_like_default = default is not parameter.empty and type(value) is type(default)
        is_told_by_task = is_built_in and takes_mapping(hint)
        if is_like_default or is_told_by_task or fits(value, hint):
            continue
        example = example_of(f"task_args.{argument}", hint, default)
        mistakes.append(
            f"task_args.{argument} is {value!r}, but task {name!r} takes {words_of(hint)} there: "
            f"write for instance {example}"
        )
    if mistakes:
        raise UserError("\n".join(mistakes))
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


def no_such_argument(name: str, known: Sequence[str], *, key: str, owner: str) -> str:
    """The sentence that something does not take an argument.

    Args:
        name: The name of the argument.
        known: The names of the arguments that it takes.
        key: The configuration key that the arguments are below.
        owner: What is called.
    """
    takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
    return f"{key}.{name}: {owner} has no such argument{nearest(name, known)}; {takes}"
