"""What was measured of devices, and how wrong predictions were: small JSON files that outlive a run.

Beside the cluster's file if it is named by TRIREME_CLUSTER, else in ~/.cache/trireme/planner:

    rates-GPU.json       what `trireme calibrate` found; goes before every fit and datasheet
    history.jsonl        one line per run: predicted and measured seconds and bytes

The last few lines of a model on a GPU correct its next prediction by the median of measured over predicted.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

from app.data.files import cache_folder

REMEMBERED = 8
"""Runs of a model that its correction looks at."""


def folder() -> Path:
    beside = os.environ.get("TRIREME_CLUSTER")
    chosen = Path(beside).expanduser() if beside else None
    if chosen is not None and chosen.is_file() and os.access(chosen.parent, os.W_OK):
        return chosen.parent / ".trireme"
    return cache_folder() / "planner"


def remembered(gpu: str) -> dict[str, Any]:
    """The measured constants of a GPU of the catalogue; empty if it was never calibrated."""
    try:
        return dict(json.loads((folder() / f"rates-{gpu}.json").read_text()))
    except (OSError, ValueError):
        return {}


def remember(gpu: str, values: dict[str, Any]) -> Path:
    """Keeps measured constants, over what was known; the file."""
    path = folder() / f"rates-{gpu}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(json.dumps(remembered(gpu) | values, indent=1))
    written.replace(path)
    return path


def note(line: dict[str, Any]) -> None:
    """Adds a run's predicted and measured figures to the history; never in the way of the run."""
    try:
        path = folder() / "history.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError:
        return


def history() -> list[dict[str, Any]]:
    """Every run noted, oldest first; torn lines are passed over."""
    try:
        lines = (folder() / "history.jsonl").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def correction(model: str, gpu: str, entries: list[dict[str, Any]] | None = None) -> float:
    """Measured over predicted seconds per step of this model on this GPU, as the last runs had it; 1 if none did."""
    entries = history() if entries is None else entries
    ratios = [
        entry["measured_seconds"] / entry["uncorrected_seconds"]
        for entry in entries
        if entry.get("model") == model and entry.get("gpu") == gpu and entry.get("uncorrected_seconds")
    ]
    return min(4.0, max(0.25, statistics.median(ratios[-REMEMBERED:]))) if ratios else 1.0
