"""What was measured of devices, and what runs took beside what was predicted: a JSON file for each kind of device.

`rates-GPU.json` is beside the cluster's file if that is named by TRIREME_CLUSTER, else in ~/.cache/trireme/planner. It
holds device.py's constants as `trireme calibrate` found them, which go before every fit and datasheet, and under `runs`
how a model's last long run compared with its prediction, which corrects the next one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from app.data.files import cache_folder

LEAST_SECONDS = 30.0
"""Of training, before a run corrects anything: a short run's step time says little."""
BOUNDS = {"seconds": (0.25, 4.0), "bytes": (0.5, 2.0)}
"""How far a correction goes."""


def folder() -> Path:
    beside = os.environ.get("TRIREME_CLUSTER")
    chosen = Path(beside).expanduser() if beside else None
    if chosen is not None and chosen.is_file() and os.access(chosen.parent, os.W_OK):
        return chosen.parent / ".trireme"
    return cache_folder() / "planner"


def remembered(gpu: str) -> dict[str, Any]:
    """What is known of a GPU of the catalogue; empty if it was never measured."""
    try:
        return dict(json.loads((folder() / f"rates-{gpu}.json").read_text()))
    except (OSError, ValueError):
        return {}


def remember(gpu: str, values: dict[str, Any]) -> Path:
    """Keeps values, over what was known; the file."""
    path = folder() / f"rates-{gpu}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(json.dumps(remembered(gpu) | values, indent=1))
    written.replace(path)
    return path


def remember_run(gpu: str, model: str, ratios: dict[str, float]) -> None:
    """ratios: measured over predicted without a correction, of seconds and bytes."""
    runs = remembered(gpu).get("runs", {})
    remember(gpu, {"runs": runs | {model: runs.get(model, {}) | ratios}})


def correction(gpu: str, model: str, of: str) -> float:
    """Measured over predicted "seconds" per step or "bytes" of the last long run of a model on a GPU; 1 before that."""
    least, most = BOUNDS[of]
    found = remembered(gpu).get("runs", {}).get(model, {}).get(of, 1.0)
    return min(most, max(least, float(found)))
