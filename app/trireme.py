"""`import trireme`: Trireme's Python face, of four functions; app/api.py is what they do."""

# ruff: noqa: E402
import importlib
import importlib.util
from pathlib import Path


def _come_first() -> None:
    """Puts Trireme's modules before those of a package of the same name in a script's own folder."""
    here = Path(__file__).resolve().parent
    root = here if (here / "app").is_dir() else here.parent
    for name in ("app", "strategies", "cluster", "experiments"):
        found = importlib.util.find_spec(name)
        if found is None:
            continue
        if found.submodule_search_locations is None:  # a file, which is not run for this
            raise ImportError(f"{found.origin} hides Trireme's own package {name}: give it another name")
        if str(root / name) not in found.submodule_search_locations:
            importlib.import_module(name).__path__.insert(0, str(root / name))


_come_first()

from app.api import Plan, Run, Sweep, load_run, plan, sweep, train
from app.errors import Interrupted, RunFailed, UserError
from app.tasks.base import Task

__all__ = [
    "Interrupted",
    "Plan",
    "Run",
    "RunFailed",
    "Sweep",
    "Task",
    "UserError",
    "load_run",
    "plan",
    "sweep",
    "train",
]
