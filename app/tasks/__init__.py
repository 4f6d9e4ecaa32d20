"""Tasks by name: the built-in ones, and a user's own by import path."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from app.errors import MissingData, UserError, nearest
from app.tasks import by_value
from app.tasks.base import Task
from app.tasks.parts import require_known
from app.tasks.user_code import user_module

BUILT_IN = {
    "image_classification": "app.tasks.vision:ImageClassification",
    "language_modelling": "app.tasks.language:LanguageModelling",
    "tabular": "app.tasks.tabular:Tabular",
    "huggingface": "app.tasks.huggingface.task:HuggingFace",
}


def load_task(name: str, task_args: Mapping[str, Any]) -> Task:
    """Make a task.

    Args:
        name: The name of a built-in task, or "package.module:Class".
        task_args: The arguments of its class.

    Raises:
        UserError: There is no such task, it cannot be imported, an argument is missing, or the task
            does not take one.
        Exception: Whatever the task's own code raises.
    """
    known = by_value.KNOWN.get(name)
    if isinstance(known, Task):
        if task_args:
            raise UserError(
                f"task {name!r} is an object, which takes no task_args: "
                "give its class to make it anew"
            )
        return known
    task_class = find_task(name)
    _check_arguments(name, task_class, task_args)
    return task_class(**task_args)


def find_task(name: str) -> type[Task]:
    """The class of a task.

    Args:
        name: The name of a built-in task, or "package.module:Class".

    Raises:
        UserError: There is no such task, or it cannot be imported.
    """
    if not name:
        raise UserError(
            f"no task is given; write task: {', '.join(BUILT_IN)} "
            "or the import path of your own class"
        )
    if name in by_value.KNOWN:
        return by_value.KNOWN[name]
    import_path = BUILT_IN.get(name, name)
    module_name, colon, class_name = import_path.partition(":")
    if not (module_name and colon and class_name):
        raise UserError(
            f"there is no task {name!r}{nearest(name, BUILT_IN)}; "
            f"write one of {', '.join(BUILT_IN)}, "
            "or the import path of your own class as package.module:Class"
        )
    module = _import(name, module_name, class_name)
    task_class = getattr(module, class_name, None)
    if task_class is None:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        hint = nearest(class_name, classes)
        raise UserError(f"task {name!r}: module {module_name} has no {class_name}{hint}")
    if not (inspect.isclass(task_class) and issubclass(task_class, Task)):
        raise UserError(
            f"task {name!r} is not a task: {class_name} must be a subclass of trireme.Task"
        )
    return task_class


def _import(name: str, module_name: str, class_name: str) -> ModuleType:
    """The module of a task.

    Raises:
        UserError: It cannot be imported.
    """
    try:
        if name in BUILT_IN:
            return importlib.import_module(module_name)
        module = user_module(module_name, class_name)
        # A module `app` that Trireme and the user both have runs the user's code when an attribute
        # is looked up (app/names.py). Its errors belong here.
        hasattr(module, class_name)
        return module
    except UserError:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or ""
        is_task_module = module_name == missing or module_name.startswith(f"{missing}.")
        if is_task_module:
            reason = (
                f"there is no module {missing!r} on Python's path; "
                "start trireme in the folder that holds it, or install it"
            )
        else:
            reason = f"{module_name} needs {missing!r}, which is not installed"
        raise UserError(f"task {name!r} does not import: {reason}") from error
    except Exception as error:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        first_line = (message.strip().splitlines() or ["no message"])[0].rstrip(".")
        raise UserError(
            f"task {name!r} does not import: {type(error).__name__}{_place(error)}: {first_line}"
        ) from error


def _place(error: BaseException) -> str:
    """Where the error was raised, as " (file.py, line 3)"; "" if that is not known."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    return f" ({frames[-1].filename}, line {frames[-1].lineno})"


def _check_arguments(name: str, task_class: type[Task], task_args: Mapping[str, Any]) -> None:
    """Check that a class takes these arguments and needs no others.

    Raises:
        MissingData: Only the argument `data` is missing.
        UserError: Another argument is missing, or the class does not take one.
    """
    parameters = list(inspect.signature(task_class).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    by_keyword = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    names = [parameter.name for parameter in by_keyword]
    require_known(task_args, names, key="task_args", owner=f"task {name!r}")
    missing = [
        parameter.name
        for parameter in by_keyword
        if parameter.default is parameter.empty and parameter.name not in task_args
    ]
    if missing:
        kind = MissingData if missing == ["data"] else UserError
        raise kind(
            f"task {name!r} needs task_args.{missing[0]}, which is not given; "
            "add it to the experiment"
        )


__all__ = ["BUILT_IN", "Task", "find_task", "load_task"]
