"""What was measured of devices, and how wrong predictions were: small JSON files that outlive a run.

Beside the cluster's file if it is named by TRIREME_CLUSTER, else in ~/.cache/trireme/planner:

    rates-GPU.json       what `trireme calibrate` found; goes before every fit and datasheet
    history.jsonl        one line per run: predicted and measured seconds and bytes

The last few lines of a model on a GPU correct its next prediction by the median of measured over predicted, of time
and of memory. Short runs are noted too, but teach nothing: their step time says little.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.data.files import cache_folder

if TYPE_CHECKING:
    from app.planner.evaluate import Machine

REMEMBERED = 8
"""Runs of a model that its correction looks at."""
MODELS = 3
"""Models that must have run before a new one is corrected by what they took."""
LEAST_SECONDS = 30.0
"""Of training, before a run teaches anything."""
LEAST_BYTES = 2**28
"""Of memory: below that what a process takes beside the model is most of it."""
KEPT = 2**20
"""Bytes at the history's end that are read."""


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
    """The runs noted last, oldest first; torn lines are passed over."""
    try:
        with open(folder() / "history.jsonl", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - KEPT))
            lines = file.read().decode(errors="replace").splitlines()
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


def correction(model: str, gpu: str, entries: list[dict[str, Any]] | None = None, of: str = "seconds") -> float:
    """Measured over predicted, of: seconds per step or bytes, as the last long runs of this model on this GPU had it.

    A model that never ran takes the median over the GPU's other models, where there are some; else it is 1.
    """
    entries = history() if entries is None else entries
    ratios: dict[str, list[float]] = {}
    for entry in entries:
        measured, predicted = entry.get(f"measured_{of}"), entry.get(f"uncorrected_{of}")
        told = entry.get("gpu") == gpu and entry.get("trained", LEAST_SECONDS) >= LEAST_SECONDS
        if told and measured and predicted and (of == "seconds" or measured >= LEAST_BYTES):
            ratios.setdefault(str(entry.get("model")), []).append(measured / predicted)
    medians = {name: statistics.median(values[-REMEMBERED:]) for name, values in ratios.items()}
    if model in medians:
        found = medians[model]
    else:
        found = statistics.median(medians.values()) if len(medians) >= MODELS else 1.0
    least, most = (0.25, 4.0) if of == "seconds" else (0.5, 2.0)
    return min(most, max(least, found))


def learned(machine: Machine, model: str) -> Machine:
    """The machine with what a model's runs on it took of memory, over what was predicted."""
    device = machine.device
    factor = correction(model, device.gpu.name, of="bytes")
    return replace(machine, device=replace(device, fragmentation=(1 + device.fragmentation) * factor - 1))
