"""Trackers beside MLflow: the interface of one, and how a name in `tracking.also` is found.

A name is one of `BUILT_IN`, of an entry point of the group `trireme.trackers`, or an import path.
This file imports none of them before it is asked.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from app.errors import UserError, claim_package, described, nearest, own_line, with_line
from app.names import prepare_imports

GROUP = "trireme.trackers"
"""The group of entry points; an entry's value is package.module:Class."""
BUILT_IN = {"tensorboard": "app.tracking.tensorboard:TensorBoard"}
NEEDS = {"tensorboard": "tensorboard"}
"""Packages of built-in trackers, which are also names of Trireme's extras."""
METHODS = ("start", "log", "finish")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run that a tracker records.

    Args:
        name: The run's name.
        uid: Identifies the run; the same after every resume.
        folder: A local folder of the run, for files of the tracker.
        params: The configuration, flat, without secrets.
        resumed: Whether the tracker has been started for this run before.
    """

    name: str
    uid: str
    folder: Path
    params: Mapping[str, str]
    resumed: bool


class RunTracker(Protocol):
    """What a tracker has; made without arguments, once for each start of a run.

    It is called in a thread of the process that writes to MLflow, never in one that trains. What it
    raises goes into tracking/writer.log, and that call is left out.
    """

    def start(self, run: TrackedRun) -> None:
        """A run begins or continues."""

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Metrics of a step.

        Args:
            step: For each metric above its last one, also after a resume.
            values: The metrics by name, which may be NaN.
            time: Unix seconds.
        """

    def finish(self, status: str) -> None:
        """The run has ended for now: FINISHED, FAILED or KILLED. A later start continues it."""


def require_trackers(names: Iterable[str]) -> None:
    """Check that trackers can be made, before a run starts.

    Args:
        names: As in `tracking.also`.

    Raises:
        UserError: One cannot.
    """
    for name in names:
        find_tracker(name)


def find_tracker(name: str) -> type[RunTracker]:
    """The class of a tracker.

    Args:
        name: As in `tracking.also`.

    Raises:
        UserError: There is none, it cannot be imported, or it lacks a method.
    """
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    where = f"tracking.also: tracker {name!r}"
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        raise UserError(
            f"{where} needs the package {NEEDS[name]}: pip install 'trireme[{NEEDS[name]}]'"
        )
    if name not in BUILT_IN and name not in installed and ":" not in name:
        known = [*BUILT_IN, *installed]
        raise UserError(
            f"{where} is not installed{nearest(name, known)}: write {', '.join(known)} "
            "or the import path of a class as package.module:Class"
        )
    try:
        tracker: Any
        if name in installed:
            claim_package(installed[name].module)
            tracker = installed[name].load()
        else:
            tracker = _imported(name)
    except UserError:
        raise
    except Exception as error:
        sentence = f"{where} does not import: {described(error)}"
        raise UserError(with_line(sentence, own_line(error))) from error
    missing = [method for method in METHODS if not callable(getattr(tracker, method, None))]
    is_class = inspect.isclass(tracker)
    if missing or not is_class:
        raise UserError(
            f"{where} is not a class with the methods {', '.join(METHODS)}: "
            f"{', '.join(missing) or 'a class'} is missing"
        )
    return cast(type[RunTracker], tracker)


def _imported(name: str) -> Any:
    """The class with this import path, or of this built-in tracker."""
    module_name, _, class_name = BUILT_IN.get(name, name).partition(":")
    if name not in BUILT_IN:
        prepare_imports()
        claim_package(module_name)
    return getattr(importlib.import_module(module_name), class_name)
