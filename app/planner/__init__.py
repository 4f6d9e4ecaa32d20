"""The planner: what fits, how fast and how dear, before anything is started. README.md says how it works."""

from __future__ import annotations

from typing import Any

__all__ = ["Choice", "Prediction", "choose_layout", "make_plan", "predict"]


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is asked for: reading models needs torch's tracing, which takes a while."""
    if name == "make_plan":
        from app.planner.plan import make_plan

        return make_plan
    if name in __all__:
        import importlib

        return getattr(importlib.import_module("app.planner.prediction"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
