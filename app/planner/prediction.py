"""One layout's prediction, and the layout that `strategy: auto` chooses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.config import Config
from app.config_io import with_values
from app.errors import UserError
from app.planner.calibration import correction, learned
from app.planner.evaluate import Machine, evaluate
from app.planner.plan import Plan, make_plan, model_name, settings_of
from app.planner.read import Reader
from app.planner.table import CHECKPOINTING, DATA, PRECISIONS, SCHEDULES, Table
from app.planner.where import machine_of, running
from app.tasks.base import Task
from cluster.shape import ClusterShape
from strategies.layout import Layout, choose
from strategies.options import checkpoint_every

NEAR = 1.03
"""Layouts within this of the best's time are as good; of them auto takes the simplest."""


@dataclass(frozen=True)
class Prediction:
    memory_bytes: float
    step_seconds: float
    memory: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    correction: float = 1.0
    """What history made of the seconds: this times what was predicted without it."""
    memory_correction: float = 1.0
    fits: bool = True


def predict(
    config: Config,
    task: Task,
    layout: Layout,
    where: Machine | ClusterShape | None = None,
    reader: Reader | None = None,
) -> Prediction:
    """Memory and time of a configuration under a layout. where: None is this machine."""
    world = layout.dims.world_size
    machine = machine_of(where, world) if isinstance(where, ClusterShape) else where or running(world)
    reader = reader or Reader(
        task, sequence_parallel=config.parallel.sequence_parallel, loss_parallel=config.parallel.loss_parallel
    )
    before, factor = machine, correction(model_name(config), machine.device.gpu.name)
    machine = learned(machine, model_name(config))
    found = evaluate(reader.read, row_of(config, layout), machine, settings_of(config, machine, factor))
    return Prediction(
        float(found.bytes[0]),
        float(found.step[0]),
        {name: float(values[0]) for name, values in found.memory.items()},
        {name: float(values[0]) for name, values in found.seconds.items()},
        factor,
        (1 + machine.device.fragmentation) / (1 + before.device.fragmentation),
        bool(found.bytes[0] <= machine.capacity),
    )


def row_of(config: Config, layout: Layout) -> Table:
    """The table with that layout alone."""
    dims, train, parallel = layout.dims, config.train, config.parallel
    share = max(1, train.global_batch_size // dims.dp)
    size = min(train.micro_batch_size or share, share)
    data = layout.parts[0] if dims.dp > 1 or dims.dp_shard > 1 else "none"
    data = {"zero3": "fsdp", "hsdp": "fsdp", "deepspeed": "zero2"}.get(data, data)
    if data not in DATA:
        data = "fsdp" if dims.dp_shard > 1 else "ddp" if dims.dp > 1 else "none"
    mode = train.activation_checkpointing
    mode = mode if checkpoint_every(mode) is None else "full"
    schedule = parallel.schedule if dims.pp > 1 else SCHEDULES[0]
    chunks = 2 if schedule == "zbv" else parallel.chunks
    columns = {
        "data": DATA.index(data),
        "dp_replicate": dims.dp_replicate,
        "dp_shard": dims.dp_shard,
        "tp": dims.tp,
        "pp": dims.pp,
        "micro_batch": size,
        "micro_batches": -(-share // size),
        "checkpointing": CHECKPOINTING.index(mode),
        "precision": PRECISIONS.index(train.precision),
        "schedule": SCHEDULES.index(schedule),
        "chunks": chunks if dims.pp > 1 else 1,
        "offload": parallel.offload,
    }
    return Table(**{name: np.array([value]) for name, value in columns.items()})


class FitsNowhere(UserError):
    """No layout of the model fits the machine's memory."""


@dataclass(frozen=True)
class Choice:
    """What auto decided: the layout, what of the configuration it sets, and why, in a sentence."""

    layout: Layout
    micro_batch_size: int | None
    activation_checkpointing: str
    sentence: str
    parallel: dict[str, Any] = field(default_factory=dict)
    """Of `parallel`: schedule, chunks and stages of a pipeline, offload, accumulate_sharded; those it decides."""

    def in_config(self, config: Config) -> Config:
        """The configuration with what was chosen in it."""
        values = {f"parallel.{key}": value for key, value in self.parallel.items()} | {
            "train.micro_batch_size": self.micro_batch_size,
            "train.activation_checkpointing": self.activation_checkpointing,
        }
        return with_values(config, values)


def choose_layout(
    config: Config,
    task: Task,
    workers: int,
    devices: Iterable[str] | Machine | None = None,
    per_node: int | None = None,
) -> Choice:
    """The layout that `strategy: auto` means, for a number of workers on this machine or `devices` of the catalogue.

    Degrees, micro-batch and precision that are written stay; activations are recomputed, pipelines used, and state
    kept in host memory, only if nothing fits otherwise. Where planning is impossible the choice is what it was without
    a planner, and says so. per_node: workers of one node, where that is known.
    Raises:
        FitsNowhere: what is needed, what is there, and what would do.
    """
    wanted = config.parallel
    degrees = {name: getattr(wanted, name) for name in ("dp_replicate", "dp_shard", "tp", "pp")}
    written = {f"parallel.{name}" for name, value in degrees.items() if value is not None}
    if len(written) == 4:
        return Choice(choose("auto", workers, **degrees), config.train.micro_batch_size, _mode(config), "")
    try:
        machine = devices if isinstance(devices, Machine) else _machine(devices, workers, per_node)
        return _planned(config, task, learned(machine, model_name(config)), written)
    except FitsNowhere:
        raise
    except Exception as error:
        layout = choose("auto", workers, **degrees)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Choice(
            layout, config.train.micro_batch_size, _mode(config), f"strategy auto is {layout}, unplanned: {first}"
        )


def _machine(devices: Iterable[str] | None, workers: int, per_node: int | None) -> Machine:
    from app.planner.where import Asked, find

    names = list(devices or ())
    if names:
        return find(Asked(gpus=workers, gpu=names[0], per_node=min(workers, len(names))), str(workers))
    return running(workers, per_node)


def _planned(config: Config, task: Task, machine: Machine, written: set[str]) -> Choice:
    plan, row = _search(config, task, machine, written)
    found, train = plan.layout(row), config.train
    parallel = found["parallel"]
    layout = choose(
        found["strategy"], machine.world, **{key: parallel[key] for key in ("dp_replicate", "dp_shard", "tp", "pp")}
    )
    size = _whole_share(plan, row) if train.micro_batch_size is None else found["micro_batch_size"]
    mode = found["activation_checkpointing"] if train.activation_checkpointing == "none" else _mode(config)
    sets: dict[str, Any] = {"offload": True} if parallel["offload"] else {}
    if parallel["accumulate_sharded"] is not None:
        sets["accumulate_sharded"] = parallel["accumulate_sharded"]
    if parallel["pp"] > 1 and "parallel.pp" not in written:
        sets |= {key: parallel[key] for key in ("schedule", "chunks", "stages")}
    sentence = (
        f"strategy auto is {layout}, micro-batches of {size}, activation checkpointing {mode}: predicted "
        f"{found['step_seconds']:.3g} s per step and {found['memory_bytes'] / 2**30:.2f} GiB per worker"
    )
    return Choice(layout, size, mode, sentence, sets)


def _search(config: Config, task: Task, machine: Machine, written: set[str]) -> tuple[Plan, int]:
    """The simplest layout that is about the best, and its plan; less is allowed first, more where nothing fits."""
    train, parallel = config.train, config.parallel
    given = written | {"train.precision", "train.activation_checkpointing", "parallel.offload"}
    if train.micro_batch_size is not None:
        given = given | {"train.micro_batch_size"}
    if "parallel.pp" in written:
        given = given | {"parallel.schedule", "parallel.chunks"}
    own = "parallel.pp" in written
    more = frozenset({"train.activation_checkpointing"} if train.activation_checkpointing == "none" else ())
    attempts = [(frozenset[str](), own), (more, own), (more, True)]
    if not parallel.offload and machine.device.gpu.name != "cpu":
        attempts.append((more | {"parallel.offload"}, True))
    plans: dict[frozenset[str], Plan] = {}
    reader = None
    for free, pipelines in attempts:
        if free not in plans:
            plans[free] = make_plan(config, task, machine, given=frozenset(given - free), reader=reader)
        plan = plans[free]
        reader = plan.reader
        row = _simplest(plan, allow_pipeline=pipelines)
        if row is not None:
            return plan, row
    from app.planner.nowhere import nowhere

    raise FitsNowhere("strategy auto finds nothing that fits. " + " ".join(nowhere(plan)))


def _whole_share(plan: Plan, row: int) -> int:
    """The layout's micro-batch; the worker's whole share where plans did not look at it, and it fits and is as fast."""
    from app.planner.probe import costs_of

    size, share = int(plan.table.micro_batch[row]), plan.config.train.global_batch_size // int(plan.table.dp[row])
    if plan.table.pp[row] > 1 or size == share:
        return size
    whole = costs_of(plan, row, np.array([share]))
    good = whole.bytes[0] <= plan.machine.capacity and whole.step[0] <= NEAR * plan.costs.step[row]
    return share if good else size


def _mode(config: Config) -> str:
    return config.train.activation_checkpointing


def _simplest(plan: Plan, *, allow_pipeline: bool) -> int | None:
    """Of the rows that fit and are about as fast as the best, the simplest; with the largest micro-batch."""
    table = plan.table
    usable = plan.fits & (allow_pipeline | (table.pp == 1))
    if not usable.any():
        return None
    best = plan.costs.step[usable].min()
    rows = np.flatnonzero(usable & (plan.costs.step <= NEAR * best))
    simple = np.array([0, 1, 3, 4, 2])[table.data] + 10 * (table.tp > 1) + 100 * (table.pp > 1)
    order = np.lexsort((plan.costs.step[rows], table.micro_batches[rows], table.checkpointing[rows], simple[rows]))
    return int(rows[order[0]])
