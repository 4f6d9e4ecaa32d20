"""Tasks by name: the built-in ones, and a user's own by import path."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from app.config.task_names import BUILT_IN
from app.errors import (
    UserError,
    claim_package,
    described,
    nearest,
    own_code,
    own_line,
    with_line,
)
from app.names import parsed
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
    if not name:
        raise UserError(
            f"no task is given; write task: {', '.join(BUILT_IN)} "
            "or the import path of your own class"
        )
    if name in by_value.KNOWN:
        return by_value.KNOWN[name]
    import_path = BUILT_IN.get(name, name)
    module_name, colon, class_name = import_path.partition(":")
    if name not in BUILT_IN:
        _refuse_file(name, module_name, class_name)
    if not (module_name and colon and class_name):
        hint = nearest(name, BUILT_IN)
        package, dot, last = name.rpartition(".")
        if dot and package and last not in ("", "py") and not colon:
            hint = f" (did you mean '{package}:{last}'?)"
        raise UserError(
            f"there is no task {name!r}{hint}; "
            f"write one of {', '.join(BUILT_IN)}, "
            "or the import path of your own class as package.module:Class"
        )
    module = _import(name, module_name, class_name)
    task_class = getattr(module, class_name, None)
    if task_class is None:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        tasks = [key for key in classes if _is_users_task(getattr(module, key))]
        hint = nearest(class_name, classes)
        if tasks and not hint:
            hint = f": write {' or '.join(f'{module_name}:{task}' for task in tasks)}"
        raise UserError(f"task {name!r}: module {module_name} has no {class_name}{hint}")
    if not (inspect.isclass(task_class) and issubclass(task_class, Task)):
        raise UserError(
            f"task {name!r} is not a task: {class_name} must be a subclass of trireme.Task"
        )
    return task_class


def _is_users_task(value: object) -> bool:
    is_task = inspect.isclass(value) and issubclass(value, Task)
    return is_task and not value.__module__.startswith("app.tasks")


def _refuse_file(name: str, module_name: str, class_name: str) -> None:
    """Check that a task is not written as a file, or as a module without its class.

    Args:
        name: As it was written.
        module_name: What is before the colon.
        class_name: What is after it.

    Raises:
        UserError: It is; the message has the task's import path.
    """
    is_file = module_name.endswith(".py")
    path = Path(module_name if is_file else f"{module_name.replace('.', '/')}.py")
    if class_name and not is_file:
        return
    if not path.is_file():
        return
    module = ".".join(path.with_suffix("").parts)
    if not class_name:
        classes = [node for node in parsed(str(path)).body if isinstance(node, ast.ClassDef)]
        tasks = [node.name for node in classes if any("Task" in ast.unparse(b) for b in node.bases)]
        class_name = (tasks or ["MyTask"])[0]
    raise UserError(
        f"there is no task {name!r}: a task is the import path of its class, "
        f"here {module}:{class_name}"
    )


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
            reason = (
                f"there is no module {missing!r} on Python's path; "
                "start trireme in the folder that holds it, or install it"
            )
        else:
            reason = f"{module_name} needs {missing!r}, which is not installed"
        line = None if is_task_module else own_line(error)
        raise UserError(with_line(f"task {name!r} does not import: {reason}", line)) from error
    except Exception as error:
        sentence = f"task {name!r} does not import: {described(error)}"
        raise UserError(with_line(sentence, own_line(error))) from error


__all__ = ["BUILT_IN", "Task", "check_task", "find_task", "load_task"]
