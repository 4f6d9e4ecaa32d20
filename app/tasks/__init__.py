"""Tasks by name: the built-in ones, and a user's own by import path."""

from __future__ import annotations

import importlib
import inspect
import traceback
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


def load_task(name: str, task_args: dict[str, Any]) -> Task:
    """The task called `name` (built-in, or "package.module:Class") made with `task_args`.

    Raises UserError for a name that is not known or does not import, and for arguments that the task does not take or
    that are missing. What the task's own code raises is left as it is.
    """
    if name in by_value.KNOWN and isinstance(by_value.KNOWN[name], Task):
        if task_args:
            raise UserError(f"task {name!r} is an object, which takes no task_args: give its class to make it anew")
        return by_value.KNOWN[name]
    task_class = find_task(name)
    _check_arguments(name, task_class, task_args)
    return task_class(**task_args)


def find_task(name: str) -> type[Task]:
    """The class of the task called `name`; raises UserError as load_task does."""
    if not name:
        raise UserError(f"no task is given; write task: {', '.join(BUILT_IN)} or the import path of your own class")
    if name in by_value.KNOWN:
        return by_value.KNOWN[name]
    module_name, colon, class_name = BUILT_IN.get(name, name).partition(":")
    if not colon or not module_name or not class_name:
        raise UserError(
            f"there is no task {name!r}{nearest(name, list(BUILT_IN))}; write one of {', '.join(BUILT_IN)}, or the "
            "import path of your own class as package.module:Class"
        )
    module = _import(name, module_name, class_name)
    found = getattr(module, class_name, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise UserError(f"task {name!r}: module {module_name} has no {class_name}{nearest(class_name, classes)}")
    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise UserError(f"task {name!r} is not a task: {class_name} must be a subclass of trireme.Task")
    return found


def _import(name: str, module_name: str, class_name: str) -> Any:
    try:
        if name in BUILT_IN:
            return importlib.import_module(module_name)
        module = user_module(module_name, class_name)
        hasattr(module, class_name)  # of a user's `app` this runs the code (app/names.py)
        return module
    except UserError:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or ""
        own = module_name == missing or module_name.startswith(f"{missing}.")
        why = (
            f"there is no module {missing!r} on Python's path; start trireme in the folder that holds it, or install it"
            if own
            else f"{module_name} needs {missing!r}, which is not installed"
        )
        raise UserError(f"task {name!r} does not import: {why}") from error
    except Exception as error:
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        first = (said.strip().splitlines() or ["no message"])[0].rstrip(".")
        raise UserError(f"task {name!r} does not import: {type(error).__name__}{_place(error)}: {first}") from error


def _place(error: BaseException) -> str:
    """Where the error was raised, " (file.py, line 3)", for the innermost frame."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _check_arguments(name: str, task_class: type[Task], task_args: dict[str, Any]) -> None:
    parameters = list(inspect.signature(task_class).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    require_known("task_args", f"task {name!r}", task_args, [parameter.name for parameter in named])
    missing = [p.name for p in named if p.default is p.empty and p.name not in task_args]
    if missing:
        kind = MissingData if missing == ["data"] else UserError
        raise kind(f"task {name!r} needs task_args.{missing[0]}, which is not given; add it to the experiment")


__all__ = ["BUILT_IN", "Task", "find_task", "load_task"]
