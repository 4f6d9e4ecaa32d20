"""`import trireme`: Trireme's Python face, of four functions; app/api.py is what they do."""

# ruff: noqa: E402
import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ROOT = ROOT if (ROOT / "app").is_dir() else ROOT.parent
for _name in ("app", "strategies", "cluster", "experiments"):
    # A package of the same name in a script's own folder comes first: Trireme's modules are put before its own.
    _path = getattr(importlib.import_module(_name), "__path__", None)
    if _path is not None and str(ROOT / _name) not in _path:
        _path.insert(0, str(ROOT / _name))

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
