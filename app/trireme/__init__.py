"""`import trireme`: Trireme's Python face.

`train`, `plan`, `sweep` and `load_run` are the command line's verbs (app/api.py), `Task` is what a task of your own is
a subclass of, and `trireme.tasks`, `trireme.data`, … are `app.tasks`, `app.data`, … by names that no package of yours
hides. From here on Trireme's own packages come before those of the same names (app/names.py). Nothing else is imported
before it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.api import Plan, Run, Sweep, load_run, plan, sweep, train
    from app.errors import Interrupted, RunFailed, TriremeError, UserError
    from app.tasks.base import Task

_HOMES = {
    "app.api": ("Plan", "Run", "Sweep", "load_run", "plan", "sweep", "train"),
    "app.errors": ("Interrupted", "RunFailed", "TriremeError", "UserError"),
    "app.tasks.base": ("Task",),
}


def claim() -> None:
    """Makes `app`, `strategies`, `cluster` and `experiments` Trireme's in this process, as importing this has done."""
    here = Path(__file__).resolve().parent
    # Installed from a wheel, in a checkout, and among the sources that MLflow keeps with a model.
    for root in (here / "packages", here.parents[1], here.parent):
        file = root / "app" / "names.py"
        if file.is_file():
            break
    spec = importlib.util.spec_from_file_location("trireme_names", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{here} is not a whole installation of Trireme: install it again")
    names: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)  # by its path, since `app` may be a user's as yet
    names.claim()


claim()


def __getattr__(name: str) -> Any:
    for home, attributes in _HOMES.items():
        if name in attributes:
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'trireme' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Interrupted",
    "Plan",
    "Run",
    "RunFailed",
    "Sweep",
    "Task",
    "TriremeError",
    "UserError",
    "load_run",
    "plan",
    "sweep",
    "train",
]
