"""A plan: every layout of an experiment on a machine, its memory and its time, best first."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from app.config import Config
from app.errors import UserError
from app.planner.calibration import correction
from app.planner.evaluate import Evaluated, Machine, Settings, as_on, evaluate
from app.planner.held import held_of, notes_of, refuse, ways_needed
from app.planner.read import ModelRead, Reader
from app.planner.table import CHECKPOINTING, PRECISIONS, SCHEDULES, Held, Table, enumerate_layouts
from app.tasks.base import Task
from strategies.layout import LayoutError, choose
from strategies.options import checkpoint_every
from strategies.pipeline.partition import require_sizes

RANKS = ("time", "cost", "memory")
NEAR = 1.03
"""Layouts within this of the fastest's time are as good."""
GIB = 2**30


@dataclass
class Plan:
    """Columns of all layouts, and what they were planned for."""

    config: Config
    task: Task
    reader: Reader
    machine: Machine
    settings: Settings
    held: Held
    table: Table
    costs: Evaluated
    order: np.ndarray
    """Rows, best first: those that fit, then those that do not, least memory first."""
    steps: int
    seconds: dict[str, float] = field(default_factory=dict)
    """What planning itself took: reading the model, and the layouts."""
    rank: str = "time"
    given: frozenset[str] = frozenset()
    """Keys that are held fixed."""
    notes: list[str] = field(default_factory=list)
    """What of what is held was changed, or is not modelled."""

    @property
    def model(self) -> ModelRead:
        return self.reader.model

    @property
    def fits(self) -> np.ndarray:
        return self.costs.bytes <= self.machine.capacity

    def layout(self, row: int) -> dict[str, Any]:
        """One layout as a dictionary that is ready for JSON."""
        table, costs, machine = self.table, self.costs, self.machine
        seconds = float(costs.step[row])
        samples = self.config.train.global_batch_size / seconds
        items = samples * self.model.items_per_sample
        schedule, pp, chunks = SCHEDULES[table.schedule[row]], int(table.pp[row]), int(table.chunks[row])
        blocks = costs.blocks.get((schedule, pp, chunks))
        price = machine.price_per_hour
        cost = None if price is None else price * machine.world * seconds / 3600
        peak = machine.device.gpu.rate(PRECISIONS[table.precision[row]])
        fits = bool(self.fits[row])
        return {
            "strategy": table.name(row),
            "parallel": {
                "dp_replicate": int(table.dp_replicate[row]),
                "dp_shard": int(table.dp_shard[row]),
                "tp": int(table.tp[row]),
                "pp": pp,
                "schedule": schedule if pp > 1 else None,
                "chunks": chunks if pp > 1 else None,
                "stages": blocks if pp > 1 else None,
                "offload": bool(table.offload[row]),
                "accumulate_sharded": bool(costs.scattered[row]) if costs.accumulates[row] else None,
            },
            "micro_batch_size": int(table.micro_batch[row]),
            "micro_batches": int(table.micro_batches[row]),
            "activation_checkpointing": self.held.checkpointing or CHECKPOINTING[table.checkpointing[row]],
            "precision": PRECISIONS[table.precision[row]],
            "memory_bytes": int(costs.bytes[row]),
            "memory": {name: int(values[row]) for name, values in costs.memory.items()},
            "step_seconds": seconds,
            "seconds": {name: float(values[row]) for name, values in costs.seconds.items()},
            "communication": {name: float(values[row]) for name, values in costs.communication.items()},
            "samples_per_second": samples,
            f"{self.model.unit}_per_second": items,
            "tokens_per_second": items if self.model.unit == "tokens" else None,
            "mfu": float(costs.flops[row]) / (seconds * machine.world * peak),
            "cost_per_step": cost,
            "cost_per_run": None if cost is None else cost * self.steps,
            "energy_kwh_per_run": machine.device.gpu.watts * machine.world * seconds * self.steps / 3.6e6,
            "fits": fits,
            "why_not": None if fits else why_not(self, row),
        }

    def best(self) -> int | None:
        """The best layout's row, if one fits."""
        return int(self.order[0]) if len(self.order) and self.fits[self.order[0]] else None


def why_not(plan: Plan, row: int) -> str:
    """Why a layout does not fit, with the part that takes most."""
    parts = {name: float(values[row]) for name, values in plan.costs.memory.items()}
    largest = max(parts, key=lambda name: parts[name])
    sentence = (
        f"needs {plan.costs.bytes[row] / GIB:.1f} GiB per GPU, {plan.machine.capacity / GIB:.1f} there; the most for "
        f"{largest} ({parts[largest] / GIB:.1f} GiB)"
    )
    whole = plan.costs.accumulates[row] and not plan.costs.scattered[row]
    if whole and largest == "communication":
        sentence += ": whole gradients wait for the last micro-batch, parallel.accumulate_sharded=true keeps shards"
    return sentence


def make_plan(
    config: Config,
    task: Task,
    machine: Machine,
    *,
    given: frozenset[str] = frozenset(),
    rank: str = "time",
    reader: Reader | None = None,
    corrected: bool = True,
) -> Plan:
    """Plans an experiment. given: keys that are held fixed, such as train.micro_batch_size.

    Raises:
        UserError, LayoutError: nothing could run as it is held; one sentence.
    """
    begun = time.perf_counter()
    parallel = config.parallel
    reader = reader or Reader(task, sequence_parallel=parallel.sequence_parallel, loss_parallel=parallel.loss_parallel)
    held, precisions = held_of(config, machine, given)
    if "parallel.stages" in given and parallel.stages:
        require_sizes(parallel.stages, len(reader.model.blocks), len(parallel.stages))
    for way in ways_needed(held, precisions):
        reader.read(as_on(machine, way))
    read = time.perf_counter() - begun
    begun = time.perf_counter()
    model = reader.model
    table = enumerate_layouts(
        machine.world,
        config.train.global_batch_size,
        held,
        precisions=precisions,
        blocks=len(model.blocks),
        splits=model.splittable,
        heads=model.heads,
        per_node=machine.per_node,
        sequence=model.sequence_length if parallel.sequence_parallel else None,
        pipelines=len(model.blocks) > 1 and _pipelines_run(),
        offload=machine.device.gpu.name != "cpu",
    )
    if not len(table):
        refuse(config, machine, held, model)
    settings = settings_of(
        config, machine, correction(model_name(config), machine.device.gpu.name) if corrected else 1.0
    )
    if held.checkpointing is None:
        settings = replace(settings, every=1)
    if "parallel.stages" not in given:
        settings = replace(settings, stages=None)
    costs = evaluate(reader.read, table, machine, settings)
    plan = Plan(config, task, reader, machine, settings, held, table, costs, np.zeros(0, int), steps_of(config, model))
    plan.order = ranked(plan, rank)
    plan.rank, plan.given, plan.notes = rank, given, notes_of(config, machine, given, table)
    plan.seconds = {"model": read, "layouts": time.perf_counter() - begun}
    return plan


def model_name(config: Config) -> str:
    """What history knows a model by: its task and arguments."""
    arguments = ", ".join(f"{key}={config.task_args[key]}" for key in sorted(config.task_args))
    return f"{config.task}({arguments})"


def settings_of(config: Config, machine: Machine, corrected: float = 1.0) -> Settings:
    parallel = config.parallel
    is_cpu = machine.device.gpu.name == "cpu"
    return Settings(
        optimizer=config.optimizer.name,
        reduce_bf16=parallel.reduce_dtype == "bf16",
        compression=parallel.compression,
        reshard_after_forward=parallel.reshard_after_forward,
        accumulate_sharded=parallel.accumulate_sharded,
        bucket_bytes=parallel.bucket_mb * 2**20,
        shared_memory=parallel.shared_memory,
        clip=config.train.clip_norm is not None,
        correction=corrected,
        every=checkpoint_every(config.train.activation_checkpointing) or 1,
        compiled=config.train.compile and config.train.compile_backend == "inductor",
        sequence_parallel=parallel.sequence_parallel,
        stages=tuple(parallel.stages) if parallel.stages else None,
        memory_base=PROCESS_BYTES if is_cpu else 0.0,
    )


PROCESS_BYTES = 0.0


def ranked(plan: Plan, rank: str) -> np.ndarray:
    """Rows best first. Equally good ones (within 0.1 %) by less memory, then by the simpler layout.

    Of layouts within `NEAR` of the fastest the simplest comes first: what is gained by another is less than what is
    known. Cost is time where the machine is given: all of its devices are paid for.
    """
    if rank not in RANKS:
        raise UserError(f"--rank-by is {rank!r}: write {', '.join(RANKS)}")
    table, costs = plan.table, plan.costs
    simple = table.pp * 1000 + table.tp * 10 + np.array([0, 1, 3, 4, 2])[table.data] + table.checkpointing
    rounded = np.round(np.log(costs.step) * 1000)
    first = np.round(np.log(costs.bytes) * 100) if rank == "memory" else rounded
    measure = np.where(plan.fits, first, np.log(costs.bytes) * 1000)
    order = np.lexsort((simple, costs.bytes, rounded, measure, ~plan.fits))
    if rank == "memory" or not plan.fits.any():
        return order
    near = order[plan.fits[order] & (costs.step[order] <= NEAR * costs.step[plan.fits].min())]
    kind = _kind(table)[near]
    simplest = near[np.argmax(kind == kind.min())]
    return np.concatenate([[simplest], order[order != simplest]])


def _kind(table: Table) -> np.ndarray:
    """How many ideas a layout takes: one GPU, ddp, fsdp, zero, hsdp; then tensor, offload, pipeline."""
    data = np.array([0, 1, 3, 4, 2])[table.data]
    both = (table.dp_replicate > 1) & (table.dp_shard > 1)
    return data + 2 * both + 10 * (table.tp > 1) + 20 * table.offload + 100 * (table.pp > 1)


def steps_of(config: Config, model: ModelRead) -> int:
    train = config.train
    if train.steps:
        return train.steps
    return max(1, int(np.ceil((train.epochs or 1.0) * model.samples / train.global_batch_size)))


def _pipelines_run() -> bool:
    """Whether this version can run pipelines."""
    from strategies.layout import check

    try:
        check(choose("pipeline", 2, pp=2))
    except LayoutError:
        return False
    return True
