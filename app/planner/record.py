"""What a run took beside what was predicted: noted when it ends, shown by `trireme plan --history`.

Memory is what the model brought, as plans count it: on a CPU without what the process took before there was a model.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from app.config import Config
from app.planner.calibration import LEAST_SECONDS, history, note
from app.planner.measure import FIRST_USE
from app.planner.plan import GIB, model_name
from app.planner.prediction import Prediction, predict
from app.planner.read import Reader
from app.planner.where import running
from app.tasks import load_task
from strategies.layout import Layout


def record(config: Config, layout: Layout, seconds: float, memory: float, trained: float) -> dict[str, float]:
    """Notes a run; figures to log. Empty where the model cannot be planned.

    seconds: measured per step. memory: bytes that training took on the fullest worker, 0 where that is not known.
    trained: seconds the training took; plans learn from those that took long.
    """
    if seconds <= 0:
        return {}
    try:
        machine = running(layout.dims.world_size)
        reader = _reader(config)
        found = predict(config, reader.task, layout, machine, reader)
        if memory and machine.device.gpu.name == "cpu":
            memory = max(0.0, memory - FIRST_USE)
    except Exception:  # whatever is wrong with a prediction, the run itself was right
        return {}
    note(entry(config, layout, machine.device.gpu.name, found, seconds, memory, trained))
    figures = {
        "plan/step_seconds": found.step_seconds,
        "plan/step_seconds_measured": seconds,
        "plan/step_error": found.step_seconds / seconds - 1,
        "plan/memory_bytes": found.memory_bytes,
    }
    if memory > 0:
        figures |= {"plan/memory_bytes_measured": memory, "plan/memory_error": found.memory_bytes / memory - 1}
    return figures


_KEPT: dict[str, Reader] = {}


def _reader(config: Config) -> Reader:
    """The model as plans read it, which takes as long as training a small one: that of the last run in this process is
    kept, since the trials of a sweep mostly have the same."""
    split = {"sequence_parallel": config.parallel.sequence_parallel, "loss_parallel": config.parallel.loss_parallel}
    key = json.dumps([config.task, config.task_args, split], default=str, sort_keys=True)
    if key not in _KEPT:
        _KEPT.clear()
        _KEPT[key] = Reader(load_task(config.task, config.task_args), **split)
    return _KEPT[key]


def entry(
    config: Config,
    layout: Layout,
    gpu: str,
    found: Prediction,
    seconds: float,
    memory: float,
    trained: float = LEAST_SECONDS,
) -> dict[str, Any]:
    return {
        "trained": trained,
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
        "uncorrected_bytes": found.memory_bytes / found.memory_correction,
        "measured_bytes": memory,
    }


def history_text(as_json: bool = False) -> str:
    """The runs noted and how wrong predictions were: of time, and of memory."""
    entries = history()
    if as_json:
        return json.dumps(entries)
    if not entries:
        return "no run has been noted yet: every run that trains long enough to show its speed is"
    lines = [f"{'run':20s} {'layout':34s} {'predicted':>10s} {'measured':>10s}  {'error':>6s}    memory"]
    for one in entries[-40:]:
        memory = f"{one['predicted_bytes'] / GIB:.2f} GiB"
        if _measured_memory(one):
            memory += f", measured {one['measured_bytes'] / GIB:.2f}"
        lines.append(
            f"{one['run'][:20]:20s} {one['layout'][:34]:34s} {1e3 * one['predicted_seconds']:8.1f}ms "
            f"{1e3 * one['measured_seconds']:8.1f}ms {100 * _error(one, 'seconds'):+6.0f}%  {memory}"
            f"{'' if _is_long(one) else ' (short)'}"
        )
    told = [one for one in entries if _is_long(one)][-40:] or entries[-40:]
    lines.append(f"{len(entries)} runs; median error of the last {len(told)}{_of_long(told)}: {_median_errors(told)}")
    return "\n".join(lines)


def _is_long(one: dict[str, Any]) -> bool:
    return bool(one.get("trained", LEAST_SECONDS) >= LEAST_SECONDS)


def _of_long(told: list[dict[str, Any]]) -> str:
    return f" that trained {LEAST_SECONDS:.0f} s or more" if _is_long(told[0]) else ""


def _measured_memory(one: dict[str, Any]) -> bool:
    """Whether memory was measured as it was predicted; lines of older versions counted the whole process."""
    return bool(one.get("measured_bytes")) and "uncorrected_bytes" in one


def _error(one: dict[str, Any], of: str) -> float:
    return float(one[f"predicted_{of}"] / one[f"measured_{of}"] - 1)


def _median_errors(told: list[dict[str, Any]]) -> str:
    said = f"{100 * statistics.median(abs(_error(one, 'seconds')) for one in told):.0f} % of time"
    memory = [abs(_error(one, "bytes")) for one in told if _measured_memory(one)]
    return said + (f", {100 * statistics.median(memory):.0f} % of memory" if memory else "")
