"""Tasks that no module has: a class of a notebook or of the script that calls, or an object that is made already.

In a configuration `python:NAME` stands for one. It is pickled by value into the run's folder as task.pkl, where the
workers, MLflow's writer and later programs find it. To read it runs its code, as importing any task does.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

from app.errors import UserError
from app.storage.storage import Storage
from app.tasks.base import Task
from app.tasks.user_code import prepare_imports

PREFIX, FILE = "python:", "task.pkl"
KNOWN: dict[str, Any] = {}
"""Classes and objects of this process by name."""


def name_of(task: str | type[Task] | Task) -> str:
    """What stands for a task in a configuration: as it is written, a class's import path, else `python:NAME`."""
    if isinstance(task, str):
        return task
    kind = task if isinstance(task, type) else type(task)
    if not issubclass(kind, Task):
        raise UserError(f"task is {task!r}, but it must be a subclass of trireme.Task, an object of one, or a name")
    importable = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
    if task is kind and importable and kind.__module__ != "__main__":
        return f"{kind.__module__}:{kind.__qualname__}"
    name = f"{PREFIX}{kind.__name__}"
    KNOWN[name] = task
    return name


def write_task_file(name: str, storage: Storage) -> None:
    """Keeps the task with the run, if it is one of these."""
    if name in KNOWN:
        import cloudpickle

        storage.write_bytes(FILE, cloudpickle.dumps(KNOWN[name]))


def read_task_file(name: str, storage: Storage) -> None:
    """Makes the run's own known in this process, in place of another of that name. Raises UserError: it has none."""
    if not name.startswith(PREFIX):
        return
    prepare_imports()
    try:
        KNOWN[name] = pickle.loads(storage.read_bytes(FILE))
    except FileNotFoundError:
        raise UserError(f"the task {name} came from a program, and {storage.url} does not hold it") from None
    except Exception as error:  # a module that it needs is not here, or other versions
        raise UserError(f"the task {name} in {storage.url}/{FILE} cannot be read here: {error}") from error
