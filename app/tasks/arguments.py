"""Checks a task's arguments against the signature of its class, before the class is called."""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Mapping
from typing import Any

import yaml

from app.errors import MissingData, UserError
from app.tasks.base import Task
from app.tasks.parts import require_known

WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "null",
}
"""What a person writes for a value of each type."""
EXAMPLES: dict[Any, str] = {
    bool: "true",
    int: "4",
    float: "0.1",
    str: "NAME",
    list: "[a,b]",
    tuple: "[1,2]",
    dict: "{KEY: VALUE}",
}
"""A value of each type, as it is written, for an argument that has no default."""


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
    mistakes = []
    for key, value in task_args.items():
        parameter = parameters.get(key)
        if parameter is None or key not in hints:
            continue
        hint = hints[key]
        default = parameter.default
        # An annotation may forget what the default is: `path: str = None`.
        is_like_default = default is not parameter.empty and type(value) is type(default)
        if is_like_default or _fits(value, hint):
            continue
        mistakes.append(
            f"task_args.{key} is {value!r}, but task {name!r} takes {_words(hint)} there: "
            f"write for instance {_example(key, hint, default)}"
        )
    if mistakes:
        raise UserError("\n".join(mistakes))


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of YAML may be what an annotation says; in doubt it may."""
    origin = typing.get_origin(hint) or hint
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is typing.Annotated:
        return _fits(value, arguments[0])
    if origin is typing.Literal:
        return value in arguments
    if origin is type(None):
        return value is None
    if origin is bool:
        return isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is str or (isinstance(origin, type) and issubclass(origin, os.PathLike)):
        # Whoever writes `tag=123` gets a number of YAML's, which text may be made of.
        return not isinstance(value, list | dict) and value is not None
    if origin is list and arguments and isinstance(value, list | tuple):
        return all(_fits(item, arguments[0]) for item in value)
    if origin in (list, tuple):
        return isinstance(value, list | tuple)
    if origin is dict:
        return isinstance(value, Mapping)
    return True


def _options(hint: Any) -> list[Any]:
    """The types that an annotation allows, without null."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [option for option in typing.get_args(hint) if option is not type(None)]
    return [hint]


def _words(hint: Any) -> str:
    """An annotation for a person, such as `a whole number or text`."""
    words = []
    for option in _options(hint):
        origin = typing.get_origin(option) or option
        arguments = typing.get_args(option)
        if origin is typing.Literal:
            words.append(" or ".join(str(value) for value in arguments))
        elif origin is list and arguments and arguments[0] in WORDS:
            words.append(f"a list (of {WORDS[arguments[0]]} each)")
        else:
            words.append(WORDS.get(origin, getattr(origin, "__name__", str(origin))))
    return " or ".join(dict.fromkeys(words))


def _example(key: str, hint: Any, default: Any) -> str:
    """A value that fits, as it is written on a command line: the default, if it says something."""
    has_default = default is not inspect.Parameter.empty and default not in (None, "")
    if has_default and _fits(default, hint):
        text = yaml.safe_dump(default, default_flow_style=True, width=1000).split("\n")[0]
    else:
        option = _options(hint)[0]
        origin = typing.get_origin(option) or option
        literals = typing.get_args(option) if origin is typing.Literal else ("VALUE",)
        text = EXAMPLES.get(origin, str(literals[0]))
        items = [EXAMPLES[item] for item in typing.get_args(option) if item in EXAMPLES]
        if origin is list and items:
            text = f"[{items[0]},{items[0]}]"
    written = f"task_args.{key}={text}"
    return f"'{written}'" if set(text) & set(" [{") else written
