"""What `import trireme` gives.

`train`, `fork`, `plan`, `sweep`, `scale`, `report`, `compare` and `load_run` are verbs of the
command line (app/api.py), and `Task` is the base of your own tasks. Editors and type checkers read
__init__.pyi instead, which shows all keywords.

`trireme.tasks`, `trireme.data`, … are `app.tasks`, `app.data`, … under names that no package of
yours can hide. Once this is imported, Trireme's own packages come before others with the same names
(app/names.py). Everything else is imported when it is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.api import (
        Plan,
        Run,
        Scaling,
        Sweep,
        compare,
        fork,
        load_run,
        plan,
        report,
        scale,
        sweep,
        train,
    )
    from app.errors import Interrupted, RunFailed, TriremeError, UserError
    from app.tasks.base import Task

_MODULES = {
    "app.api": (
        "Plan",
        "Run",
        "Scaling",
        "Sweep",
        "compare",
        "fork",
        "load_run",
        "plan",
        "report",
        "scale",
        "sweep",
        "train",
    ),
    "app.errors": ("Interrupted", "RunFailed", "TriremeError", "UserError"),
    "app.tasks.base": ("Task",),
}
"""For each module, the names that this package takes from it."""


def claim() -> None:
    """Make `app`, `strategies`, `cluster` and `experiments` Trireme's in this process.

    Importing this package has done so already. Ray's workers call it before anything else.

    Raises:
        ImportError: This installation is incomplete, or a user's module that was imported before
            defines what Trireme needs of its own under that name.
    """
    folder = Path(__file__).resolve().parent
    # Installed from a wheel, in a checkout, and among the sources that MLflow keeps with a model.
    for root in (folder / "packages", folder.parents[1], folder.parent):
        file = root / "app" / "names.py"
        if file.is_file():
            break
    # The file is loaded by its path, because `app` may still be a user's package.
    spec = importlib.util.spec_from_file_location("trireme_names", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is not a whole installation of Trireme: install it again")
    names: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    names.claim()


claim()


def __getattr__(name: str) -> Any:
    for module_name, exported in _MODULES.items():
        if name in exported:
            value = getattr(importlib.import_module(module_name), name)
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
    "Scaling",
    "Sweep",
    "Task",
    "TriremeError",
    "UserError",
    "compare",
    "fork",
    "load_run",
    "plan",
    "report",
    "scale",
    "sweep",
    "train",
]
