"""Tasks by name: the built-in ones, and a user's own by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from app.config.task_names import (
    BUILT_IN,
    module_and_class,
    no_such_class,
    no_such_module,
    not_a_task,
    not_installed,
)
from app.errors import (
    UserError,
    claim_package,
    described,
    own_code,
    own_line,
    with_line,
)
from app.tasks import by_value
from app.tasks.arguments import check_arguments
from app.tasks.base import Task
from app.tasks.user_code import user_module


def load_task(name: str, task_args: Mapping[str, Any]) -> Task:
    """Make a task.

    Args:
        name: The name of a built-in task, or "package.module:Class".
        task_args: The arguments of its class.

    Raises:
        UserError: See `check_task`; or the task's own code raises an exception.
        Exception: Whatever the code of a built-in task raises.
    """
    known = check_task(name, task_args)
    if isinstance(known, Task):
        return known
    with own_code(f"task {name!r} cannot be made"):
        return known(**task_args)


def check_task(name: str, task_args: Mapping[str, Any]) -> type[Task] | Task:
    """Find a task and check its arguments, without making it, which may read data for long.

    Args:
        name: The name of a built-in task, or "package.module:Class".
        task_args: The arguments of its class.

    Returns:
        The task's class, or the object itself if that is what the calling program has given.

    Raises:
        UserError: There is no such task, it cannot be imported, an argument is missing or has the
            wrong type, or the task does not take one.
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
    check_arguments(name, task_class, task_args)
    return task_class


def find_task(name: str) -> type[Task]:
    """The class of a task.

    Args:
        name: The name of a built-in task, or "package.module:Class".

    Raises:
        UserError: There is no such task, or it cannot be imported.
    """
    if name in by_value.KNOWN:
        return by_value.KNOWN[name]
    module_name, class_name = module_and_class(name)
    module = _import(name, module_name, class_name)
    task_class = getattr(module, class_name, None)
    if task_class is None:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        tasks = [key for key in classes if _is_users_task(getattr(module, key))]
        raise UserError(no_such_class(name, classes, tasks))
    if not (inspect.isclass(task_class) and issubclass(task_class, Task)):
        raise UserError(not_a_task(name))
    return task_class


def _is_users_task(value: object) -> bool:
    is_task = inspect.isclass(value) and issubclass(value, Task)
    return is_task and not value.__module__.startswith("app.tasks")


def _import(name: str, module_name: str, class_name: str) -> ModuleType:
    """The module of a task.

    Raises:
        UserError: It cannot be imported.
    """
    try:
        if name in BUILT_IN:
            return importlib.import_module(module_name)
        claim_package(module_name)
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
            raise UserError(no_such_module(name, missing)) from error
        raise UserError(with_line(not_installed(name, missing), own_line(error))) from error
    except Exception as error:
        sentence = f"task {name!r} does not import: {described(error)}"
        raise UserError(with_line(sentence, own_line(error))) from error


__all__ = ["BUILT_IN", "Task", "check_task", "find_task", "load_task"]
