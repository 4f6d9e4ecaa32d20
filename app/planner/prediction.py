"""One layout's prediction, and the layout that `strategy: auto` chooses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from app.config import Config
from app.planner.calibration import correction
from app.planner.evaluate import Machine, evaluate
from app.planner.plan import Plan, make_plan, model_name, settings_of
from app.planner.read import Reader
from app.planner.table import CHECKPOINTING, DATA, PRECISIONS, SCHEDULES, Table
from app.planner.where import machine_of, running
from app.tasks.base import Task
from cluster.shape import ClusterShape
from strategies.names import Layout, choose
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
    factor = correction(model_name(config), machine.device.gpu.name)
    found = evaluate(reader.read, row_of(config, layout), machine, settings_of(config, machine, factor))
    return Prediction(
        float(found.bytes[0]),
        float(found.step[0]),
        {name: float(values[0]) for name, values in found.memory.items()},
        {name: float(values[0]) for name, values in found.seconds.items()},
        factor,
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


@dataclass(frozen=True)
class Choice:
    """What auto decided: the layout, what of the configuration it sets, and why, in a sentence."""

    layout: Layout
    micro_batch_size: int | None
    activation_checkpointing: str
    sentence: str
    accumulate_sharded: bool | None = None


def choose_layout(config: Config, task: Task, workers: int, devices: Iterable[str] | Machine | None = None) -> Choice:
    """The layout that `strategy: auto` means, for a number of workers on this machine or `devices` of the catalogue.

    Degrees, micro-batch and precision that are written stay; activations are recomputed, and pipelines used, only if
    nothing fits otherwise. Where planning is impossible the choice is what it was without a planner, and says so.
    """
    wanted = config.parallel
    degrees = {name: getattr(wanted, name) for name in ("dp_replicate", "dp_shard", "tp", "pp")}
    written = {f"parallel.{name}" for name, value in degrees.items() if value is not None}
    if workers == 1 or len(written) == 4:
        return Choice(choose("auto", workers, **degrees), config.train.micro_batch_size, _mode(config), "")
    try:
        machine = devices if isinstance(devices, Machine) else _machine(devices, workers)
        return _planned(config, task, machine, written)
    except Exception as error:
        layout = choose("auto", workers, **degrees)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Choice(
            layout, config.train.micro_batch_size, _mode(config), f"strategy auto is {layout}, unplanned: {first}"
        )


def _machine(devices: Iterable[str] | None, workers: int) -> Machine:
    from app.planner.where import Asked, find

    names = list(devices or ())
    if names:
        return find(Asked(gpus=workers, gpu=names[0], per_node=min(workers, len(names))), str(workers))
    return running(workers)


def _planned(config: Config, task: Task, machine: Machine, written: set[str]) -> Choice:
    train = config.train
    given = written | {"train.precision", "train.activation_checkpointing", "parallel.offload"}
    if train.micro_batch_size is not None:
        given = given | {"train.micro_batch_size"}
    plan = make_plan(config, task, machine, given=frozenset(given))
    row = _simplest(plan, allow_pipeline="parallel.pp" in written)
    if row is None and train.activation_checkpointing == "none":
        plan = make_plan(
            config, task, machine, given=frozenset(given - {"train.activation_checkpointing"}), reader=plan.reader
        )
        row = _simplest(plan, allow_pipeline=False)
    if row is None:
        row = _simplest(plan, allow_pipeline=True)
    if row is None:
        from app.planner.nowhere import nowhere

        raise ValueError(nowhere(plan)[0])
    found = plan.layout(row)
    parallel = found["parallel"]
    layout = choose(
        found["strategy"], machine.world, **{key: parallel[key] for key in ("dp_replicate", "dp_shard", "tp", "pp")}
    )
    size = found["micro_batch_size"]
    mode = found["activation_checkpointing"] if train.activation_checkpointing == "none" else _mode(config)
    sentence = (
        f"strategy auto is {layout}, micro-batches of {size}, activation checkpointing {mode}: predicted "
        f"{found['step_seconds']:.3g} s per step and {found['memory_bytes'] / 2**30:.2f} GiB per worker"
    )
    return Choice(layout, size, mode, sentence, parallel["accumulate_sharded"])


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
