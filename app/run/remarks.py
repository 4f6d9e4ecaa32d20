"""Remarks on a run whose machines are healthy: GPUs that are not used, workers with too little to do. Each is said
once, at the start or while training; sentences from facts, nothing else."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from strategies import registry

if TYPE_CHECKING:
    from app.run.prepare import Prepared
    from strategies.parallelize import Layout

STEADY_SAMPLES = 4  # of a GPU's utilization, before anything is concluded from them
IDLE, BUSY = 5.0, 40.0  # per cent of a device's time


def with_remarks(
    prepared: Prepared, *, workers: int, gpus: int, gpus_used: float, pool: str = "the cluster"
) -> Prepared:
    """`prepared`, its notes with what will be slow or idle; gpus: how many the pool (cluster or machine) has."""
    found = [
        *gpu_remarks(workers, gpus, gpus_used, pool),
        *batch_remarks(prepared.config.train.global_batch_size, prepared.samples, prepared.layout.dims.dp),
    ]
    return replace(prepared, notes=(*prepared.notes, *found))


def gpus_of_this_machine(layout: Layout, processes: int, visible: int) -> int:
    """How many of the visible GPUs `processes` processes of this layout compute on."""
    several = any(record.several_devices for record in registry.records(layout.name))
    each = max(1, visible // processes) if several else 1
    return min(visible, processes * each)


def gpu_remarks(workers: int, gpus: int, used: float, pool: str) -> list[str]:
    if gpus and not used:
        return [f"this run computes on CPUs, but {pool} has {gpus} GPUs: write resources_per_worker.GPU=1"]
    if gpus - used >= 1:
        return [f"{gpus - used:g} of {pool}'s {gpus} GPUs are not used: workers={workers} takes {used:g}"]
    return []


def batch_remarks(global_batch: int, samples: int, data_parallel: int) -> list[str]:
    found = []
    if data_parallel > 1 and global_batch // data_parallel == 1:
        found.append(
            f"each of the {data_parallel} data-parallel workers computes one sample per step, so most of its time is "
            "communication: raise train.global_batch_size"
        )
    if samples < global_batch:
        found.append(f"a step takes {global_batch} samples, but the data has {samples}: each step repeats some")
    return found


class UtilizationMonitor:
    """Reports a GPU that is idle while others work, or all of them idle while CPUs work; from system metrics."""

    def __init__(self) -> None:
        self._gpus: dict[str, list[float]] = defaultdict(list)
        self._cpus: dict[str, list[float]] = defaultdict(list)
        self._reported: set[str] = set()

    def observe(self, values: Mapping[str, float]) -> list[str]:
        """New sentences after a node's sample, such as {"system/node-0/gpu_1_utilization_percentage": 97.0}."""
        for name, value in values.items():
            if match := re.fullmatch(r"system/(.+)/gpu_(\d+)_utilization_percentage", name):
                self._gpus[f"GPU {match[2]} of {match[1]}"].append(value)
            elif match := re.fullmatch(r"system/(.+)/cpu_utilization_percentage", name):
                self._cpus[match[1]].append(value)
        kind, sentence = self._finding()
        if not kind or kind in self._reported:
            return []
        self._reported.add(kind)
        return [sentence]

    def _finding(self) -> tuple[str, str]:
        if any(len(rows) < STEADY_SAMPLES for rows in self._gpus.values()):
            return "", ""
        gpus = {name: _recent(rows) for name, rows in self._gpus.items()}
        idle = sorted(name for name, share in gpus.items() if share < IDLE)
        if idle and any(share > BUSY for share in gpus.values()):
            return "some", f"{', '.join(idle[:4])} {'is' if len(idle) == 1 else 'are'} idle while others train"
        cpus = [_recent(rows) for rows in self._cpus.values() if len(rows) >= STEADY_SAMPLES]
        if idle and len(idle) == len(gpus) and max(cpus, default=0.0) > BUSY:
            return "all", (
                "every GPU is idle while the CPUs work: the data or the model is on the CPU, or loading data takes "
                "most of the time (raise train.data_workers)"
            )
        return "", ""


def _recent(rows: list[float]) -> float:
    return sum(rows[-STEADY_SAMPLES:]) / STEADY_SAMPLES
