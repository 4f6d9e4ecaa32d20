"""Types for a person: whether a value fits one, how it is called, and a value to write instead."""

from __future__ import annotations

import inspect
import os
import types
import typing
from collections.abc import Mapping
from typing import Any

import yaml

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


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of YAML may be what an annotation says; in doubt it may."""
    origin = typing.get_origin(hint) or hint
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in arguments)
    if origin is typing.Annotated:
        return fits(value, arguments[0])
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
        return all(fits(item, arguments[0]) for item in value)
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


def takes_mapping(hint: Any) -> bool:
    """Whether an annotation allows a mapping."""
    origins = [typing.get_origin(option) or option for option in _options(hint)]
    return any(isinstance(origin, type) and issubclass(origin, Mapping) for origin in origins)


def words_of(hint: Any) -> str:
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


def example_of(key: str, hint: Any, default: Any) -> str:
    """A value that fits, as it is written on a command line: the default, if it says something."""
    has_default = default is not inspect.Parameter.empty and default not in (None, "", [], {})
    if has_default and fits(default, hint):
        text = yaml.safe_dump(default, default_flow_style=True, width=1000).split("\n")[0]
    else:
        option = _options(hint)[0]
        origin = typing.get_origin(option) or option
        literals = typing.get_args(option) if origin is typing.Literal else ("VALUE",)
        text = EXAMPLES.get(origin, str(literals[0]))
        items = [EXAMPLES[item] for item in typing.get_args(option) if item in EXAMPLES]
        if origin is dict:
            return f"{key}.KEY=VALUE"
        if origin is list and items:
            text = f"[{items[0]},{items[0]}]"
    written = f"{key}={text}"
    return f"'{written}'" if set(text) & set(" [{") else written
