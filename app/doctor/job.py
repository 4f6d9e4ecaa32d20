"""What is wrong with a job on healthy machines: the checklist that every multi-GPU tutorial ends with, at the start
and while training, each said once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from strategies.layout import MANY_DEVICES

if TYPE_CHECKING:
    from app.config import Config
    from app.run.prepare import Prepared
    from strategies.parallelize import Layout

STEADY_SAMPLES = 4  # of system metrics, before anything is concluded from them
IDLE, BUSY = 5.0, 40.0  # per cent of a GPU's time


@dataclass(frozen=True)
class JobFacts:
    """What is known of a job before its workers start."""

    strategy: str
    workers: int
    data_parallel: int  # copies that take different samples
    devices_per_worker: int  # GPUs of one process
    global_batch: int
    micro_batch: int | None
    samples: int
    cluster_gpus: int
    gpus_used: float
    pool: str = "the cluster"  # whose GPUs these are


def with_remarks(config: Config, prepared: Prepared, workers: int, per_node: int, visible: int) -> Prepared:
    """`prepared`, its notes with what will be slow or pointless where no Ray is; visible: GPUs of this machine."""
    layout, each = prepared.layout, visible // per_node
    several = set(layout.parts) & set(MANY_DEVICES)
    facts = facts_of(
        config,
        layout,
        prepared.samples,
        per_node,
        {"GPU": float(max(1, each) if several else 1) if visible else 0.0},
        visible,
    )
    facts = replace(facts, workers=workers, pool="this machine")
    return replace(prepared, notes=(*prepared.notes, *at_start(facts)))


def facts_of(
    config: Config, layout: Layout, samples: int, workers: int, per_worker: Mapping[str, float], cluster_gpus: int
) -> JobFacts:
    """What is known of a run that has been prepared."""
    gpus = per_worker.get("GPU", 0.0)
    return JobFacts(
        layout.name,
        workers,
        layout.dims.dp,
        int(gpus),
        config.train.global_batch_size,
        config.train.micro_batch_size,
        samples,
        cluster_gpus,
        gpus * workers,
    )


def at_start(facts: JobFacts) -> list[str]:
    """What will be slow or pointless although nothing is broken; pure."""
    found = []
    unused = facts.cluster_gpus - facts.gpus_used
    if facts.cluster_gpus and not facts.gpus_used:
        found.append(
            f"this run computes on CPUs, and {facts.pool} has {facts.cluster_gpus} GPUs: write "
            "resources_per_worker.GPU=1"
        )
    elif unused >= 1:
        found.append(
            f"{unused:g} of {facts.pool}'s {facts.cluster_gpus} GPUs are not used: workers={facts.workers} takes "
            f"{facts.gpus_used:g}"
        )
    if facts.strategy == "dp" and facts.devices_per_worker > 1:
        at_once = facts.micro_batch or facts.global_batch
        if at_once < facts.devices_per_worker:
            found.append(
                f"DataParallel splits {at_once} samples over {facts.devices_per_worker} GPUs, so "
                f"{facts.devices_per_worker - at_once} get none: raise train.micro_batch_size, or use strategy=ddp"
            )
    share = facts.global_batch // max(1, facts.data_parallel)
    if facts.data_parallel > 1 and share == 1:
        found.append(
            f"each of the {facts.data_parallel} workers computes one sample per step, so it mostly communicates: raise "
            "train.global_batch_size"
        )
    if facts.samples < facts.data_parallel:
        found.append(
            f"there are {facts.samples} samples for {facts.data_parallel} data-parallel workers: some see the same one "
            "in a step"
        )
    elif facts.samples < facts.global_batch:
        found.append(
            f"a step takes {facts.global_batch} samples and there are {facts.samples}: each step sees some twice"
        )
    return found


class Watch:
    """Sees the system metrics go by and says once what they show: a GPU that is idle while others work, or all of them
    idle while CPUs work, as when the data or the model was left on the CPU."""

    def __init__(self) -> None:
        self._gpu: dict[str, list[float]] = defaultdict(list)
        self._cpu: dict[str, list[float]] = defaultdict(list)
        self._said: set[str] = set()

    def see(self, values: Mapping[str, float], *, training: bool) -> list[str]:
        """values: a node's sample, by MLflow's names (`system/node-0/gpu_1_utilization_percentage`)."""
        if not training:
            return []
        for name, value in values.items():
            if match := re.fullmatch(r"system/(.+)/gpu_(\d+)_utilization_percentage", name):
                self._gpu[f"GPU {match[2]} of {match[1]}"].append(value)
            elif match := re.fullmatch(r"system/(.+)/cpu_utilization_percentage", name):
                self._cpu[match[1]].append(value)
        found = [sentence for kind, sentence in self._judge() if kind not in self._said]
        self._said |= {kind for kind, _ in self._judge()}
        return found

    def _judge(self) -> list[tuple[str, str]]:
        steady = {name: _recent(rows) for name, rows in self._gpu.items() if len(rows) >= STEADY_SAMPLES}
        if not steady or len(steady) < len(self._gpu):
            return []
        idle = sorted(name for name, share in steady.items() if share < IDLE)
        busy = [name for name, share in steady.items() if share > BUSY]
        if idle and busy:
            return [("idle", f"{', '.join(idle[:4])} {'is' if len(idle) == 1 else 'are'} idle while others train")]
        cpu = [_recent(rows) for rows in self._cpu.values() if len(rows) >= STEADY_SAMPLES]
        if len(idle) == len(steady) and cpu and max(cpu) > BUSY:
            said = (
                "every GPU is idle while the CPUs work: the data or the model is on the CPU, or loading the data is "
                "what takes the time (train.data_workers)"
            )
            return [("cpu", said)]
        return []


def _recent(rows: list[float]) -> float:
    last = rows[-STEADY_SAMPLES:]
    return sum(last) / len(last)
