"""Tasks that cannot be imported: a class of a notebook or of the calling script, or an object.

In a configuration `python:NAME` stands for such a task. It is pickled by value into the run's
folder as task.pkl, where the workers, the MLflow writer and later programs find it. Reading the
file runs code, as importing a task does.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

from app.errors import UserError
from app.names import prepare_imports
from app.storage.storage import Storage
from app.tasks.base import Task

PREFIX = "python:"
FILE = "task.pkl"
KNOWN: dict[str, Any] = {}
"""The task classes and objects of this process, by their names in a configuration."""


def name_of(task: str | type[Task] | Task) -> str:
    """The name of a task in a configuration.

    Args:
        task: A name, a class or an object.

    Returns:
        The name itself, the import path of a class that can be imported, or `python:NAME`.

    Raises:
        UserError: It is not a task.
    """
    if isinstance(task, str):
        return task
    task_class = task if isinstance(task, type) else type(task)
    if not issubclass(task_class, Task):
        raise UserError(
            f"task is {task!r}, but it must be a subclass of trireme.Task, "
            "an object of one, or a name"
        )
    module = sys.modules.get(task_class.__module__)
    is_importable = getattr(module, task_class.__qualname__, None) is task_class
    if task is task_class and is_importable and task_class.__module__ != "__main__":
        return f"{task_class.__module__}:{task_class.__qualname__}"
    name = f"{PREFIX}{task_class.__name__}"
    KNOWN[name] = task
    return name


def write_task_file(name: str, storage: Storage) -> None:
    """Write a task that cannot be imported into the run's folder; do nothing for other tasks.

    Args:
        name: The task's name in the configuration.
        storage: The run's folder.
    """
    if name in KNOWN:
        import cloudpickle

        storage.write_bytes(FILE, cloudpickle.dumps(KNOWN[name]))


def read_task_file(name: str, storage: Storage) -> None:
    """Read a task that cannot be imported from the run's folder; do nothing for other tasks.

    It replaces another task with this name in this process.

    Args:
        name: The task's name in the configuration.
        storage: The run's folder.

    Raises:
        UserError: The folder does not have the task, or it cannot be read on this machine.
    """
    if not name.startswith(PREFIX):
        return
    prepare_imports()
    try:
        KNOWN[name] = pickle.loads(storage.read_bytes(FILE))
    except FileNotFoundError:
        raise UserError(
            f"the task {name} came from a program, and {storage.url} does not hold it"
        ) from None
    except Exception as error:  # a module that it needs is missing or has another version
        raise UserError(
            f"the task {name} in {storage.url}/{FILE} cannot be read here: {error}"
        ) from error
