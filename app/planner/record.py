"""What a run took beside what was predicted: noted when it ends, shown by `trireme plan --history`."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from app.config import Config
from app.planner.calibration import history, note
from app.planner.plan import GIB, model_name
from app.planner.prediction import Prediction, predict
from app.planner.where import running
from app.tasks import load_task
from strategies.names import Layout

LEAST_SECONDS = 30.0
"""Shorter runs are not noted: their step time says little, and reading the model would be much beside them."""


def record(config: Config, layout: Layout, seconds: float, memory: float, trained: float) -> dict[str, float]:
    """Notes a run; figures to log. Empty for a short one, and where the model cannot be planned.

    seconds: measured per step. memory: bytes of the fullest worker. trained: seconds the training took.
    """
    if trained < LEAST_SECONDS or seconds <= 0:
        return {}
    try:
        machine = running(layout.dims.world_size)
        found = predict(config, load_task(config.task, config.task_args), layout, machine)
    except Exception:  # whatever is wrong with a prediction, the run itself was right
        return {}
    note(entry(config, layout, machine.device.gpu.name, found, seconds, memory))
    return {
        "plan/step_seconds": found.step_seconds,
        "plan/memory_bytes": found.memory_bytes,
        "plan/step_error": found.step_seconds / seconds - 1,
        "plan/memory_error": found.memory_bytes / memory - 1 if memory else 0.0,
    }


def entry(config: Config, layout: Layout, gpu: str, found: Prediction, seconds: float, memory: float) -> dict[str, Any]:
    return {
        "time": time.time(),
        "run": config.run.name,
        "model": model_name(config),
        "gpu": gpu,
        "layout": str(layout),
        "batch": config.train.global_batch_size,
        "predicted_seconds": found.step_seconds,
        "uncorrected_seconds": found.step_seconds / found.correction,
        "measured_seconds": seconds,
        "predicted_bytes": found.memory_bytes,
        "measured_bytes": memory,
    }


def history_text(as_json: bool = False) -> str:
    """The runs noted and how wrong predictions were: of time, and of memory."""
    entries = history()
    if as_json:
        return json.dumps(entries)
    if not entries:
        return "no run has been noted yet: runs that train for half a minute are"
    lines = [f"{'run':20s} {'layout':34s} {'predicted':>10s} {'measured':>10s}  {'error':>6s}    memory"]
    errors = []
    for one in entries[-40:]:
        error = one["predicted_seconds"] / one["measured_seconds"] - 1
        errors.append(abs(error))
        lines.append(
            f"{one['run'][:20]:20s} {one['layout'][:34]:34s} {1e3 * one['predicted_seconds']:8.1f}ms "
            f"{1e3 * one['measured_seconds']:8.1f}ms {100 * error:+6.0f}%  {one['predicted_bytes'] / GIB:.2f} GiB, "
            f"measured {one['measured_bytes'] / GIB:.2f}"
        )
    lines.append(
        f"{len(entries)} runs; median error of the last {len(errors)}: {100 * statistics.median(errors):.0f} %"
    )
    return "\n".join(lines)
