"""The built-in tasks, what a task's name may be, and the sentences about a name that is wrong."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from app.errors import UserError, nearest
from app.names import parsed

BUILT_IN = {
    "image_classification": "app.tasks.vision:ImageClassification",
    "language_modelling": "app.tasks.language:LanguageModelling",
    "tabular": "app.tasks.tabular:Tabular",
    "huggingface": "app.tasks.huggingface.task:HuggingFace",
}
"""The import path of each."""


def module_and_class(name: str) -> tuple[str, str]:
    """The module and the class that the name of a task stands for.

    Args:
        name: The name of a built-in task, or "package.module:Class".

    Raises:
        UserError: It is neither.
    """
    if not name:
        raise UserError(
            f"no task is given; write task: {', '.join(BUILT_IN)} "
            "or the import path of your own class"
        )
    module, colon, class_name = BUILT_IN.get(name, name).partition(":")
    if name not in BUILT_IN:
        _refuse_file(name, module, class_name)
    if not (module and colon and class_name):
        hint = nearest(name, BUILT_IN)
        package, dot, last = name.rpartition(".")
        if dot and package and last not in ("", "py") and not colon:
            hint = f" (did you mean '{package}:{last}'?)"
        raise UserError(
            f"there is no task {name!r}{hint}; "
            f"write one of {', '.join(BUILT_IN)}, "
            "or the import path of your own class as package.module:Class"
        )
    return module, class_name


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


def no_such_module(name: str, missing: str) -> str:
    """The sentence that the module of a task does not exist."""
    return (
        f"task {name!r} does not import: there is no module {missing!r} on Python's path; "
        "start trireme in the folder that holds it, or install it"
    )


def not_installed(name: str, missing: str) -> str:
    """The sentence that the module of a task imports what is not installed."""
    module = name.partition(":")[0]
    return f"task {name!r} does not import: {module} needs {missing!r}, which is not installed"


def no_such_class(name: str, classes: Iterable[str], tasks: Iterable[str]) -> str:
    """The sentence that the module of a task has no such class.

    Args:
        name: The name of the task.
        classes: The names of the classes that the module has.
        tasks: Those of them that are the person's own tasks.
    """
    module, _, class_name = name.partition(":")
    hint = nearest(class_name, classes)
    written = " or ".join(f"{module}:{task}" for task in tasks)
    if written and not hint:
        hint = f": write {written}"
    return f"task {name!r}: module {module} has no {class_name}{hint}"


def not_a_task(name: str) -> str:
    """The sentence that what a task's name stands for is something else."""
    class_name = name.partition(":")[2]
    return f"task {name!r} is not a task: {class_name} must be a subclass of trireme.Task"
