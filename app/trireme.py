"""`import trireme`: Trireme's Python face, of four functions; app/api.py is what they do."""

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
