"""Memory and time of every row of a table of layouts, in numpy; memory.py and timing.py hold the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from app.planner.rates import Rates
from app.planner.read import ModelRead
from app.planner.sizes import Sizes, sizes
from app.planner.stages import block_cut, stage_counts
from app.planner.table import CHECKPOINTING, DATA, PRECISIONS, SCHEDULES, Table
from app.planner.work import Work, ways_of, work

Array = np.ndarray


@dataclass(frozen=True)
class Machine:
    """Where a plan is for."""

    device: Rates
    world: int
    per_node: int
    """Devices of a node."""
    across: float
    """Bytes/s of a node to others."""
    price_per_hour: float | None = None
    """Of one device."""
    name: str = ""
    assumed: str = ""
    """What was not known and is assumed, in words."""

    @property
    def capacity(self) -> float:
        """Bytes that tensors may take."""
        return self.device.gpu.memory_bytes - self.device.context


@dataclass(frozen=True)
class Settings:
    """What of the configuration costs depend on, and no layout changes."""

    optimizer: str = "adamw"
    reduce_bf16: bool = False
    compression: str = "none"
    reshard_after_forward: bool | None = None
    accumulate_sharded: bool | None = None
    bucket_bytes: float = 25 * 2**20
    clip: bool = False
    correction: float = 1.0
    """What this model's computing was measured to take, over what was predicted."""
    memory_base: float = 0.0
    """Bytes a process takes without a model, where memory is the host's."""


@dataclass
class Group:
    """Rows that share a way of having precision, and a schedule: what `memory` and `timing` work on."""

    table: Table
    model: ModelRead
    machine: Machine
    settings: Settings
    way: str
    schedule: str
    kinds: list[str]
    order: list[str]
    at: Array
    """(rows,): column of `work` and of `pairs`."""
    pairs: Array
    """(2, pairs): micro-batch and tp."""
    work: Work
    sizes: Sizes
    critical: Array
    """(kinds, rows): parts on the slowest stage."""
    stages: list[tuple[Array, Array]]
    """Stages whose memory is looked at: (rows,) its number, (kinds, rows) its parts."""

    def part(self, name: str) -> Array:
        """(kinds, rows) of one of read.py's scalars, for the row's micro-batch and tp."""
        parts = self.model.costs[self.way].parts
        return np.array([np.maximum(p.at(name, *self.pairs), 0.0) for p in parts.values()])[:, self.at]

    @property
    def itemsize(self) -> float:
        """Bytes of a number in computing."""
        return 4.0 if self.way == "plain" else 2.0

    @property
    def wire(self) -> float:
        """Bytes of a gradient's number on its way."""
        return 2.0 if self.settings.reduce_bf16 or self.settings.compression == "bf16" else 4.0

    def is_data(self, *names: str) -> Array:
        return np.isin(self.table.data, [DATA.index(name) for name in names])

    def keeps(self) -> Array:
        """Whether a sharded row keeps gathered parameters from forward to backward."""
        asked = self.settings.reshard_after_forward
        whole = self.sizes.padded.T @ self.counts_all * self.itemsize
        room = self.machine.capacity / 8
        is_cpu = self.machine.device.gpu.name == "cpu"
        chosen = (whole < room) & (not is_cpu) if asked is None else np.full(len(self.at), not asked)
        return np.where(self.is_data("fsdp"), chosen, self.is_data("zero1", "zero2") & (asked is not True))

    def accumulates_whole(self) -> Array:
        """Whether a sharded row keeps whole gradients until the last micro-batch."""
        asked = self.settings.accumulate_sharded
        whole = ~self.is_data("zero2") if asked is None else np.full(len(self.at), not asked)
        return whole & (self.table.micro_batches > 1)

    @property
    def counts_all(self) -> Array:
        """(kinds,): parts of each kind in the whole model."""
        return np.array([self.order.count(name) or 1 for name in self.kinds], float)


@dataclass
class Evaluated:
    """Columns beside the table's: bytes and seconds, by parts."""

    memory: dict[str, Array] = field(default_factory=dict)
    seconds: dict[str, Array] = field(default_factory=dict)
    step: Array = field(default_factory=lambda: np.zeros(0))
    bytes: Array = field(default_factory=lambda: np.zeros(0))
    flops: Array = field(default_factory=lambda: np.zeros(0))
    blocks: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)
    """(schedule, pp, chunks) → blocks of each chunk."""


def evaluate(read: Callable[[str], ModelRead], table: Table, machine: Machine, settings: Settings) -> Evaluated:
    """Costs of every row. read: gives the model with its costs under a way of having precision."""
    from app.planner.memory import memory
    from app.planner.timing import timing

    found = Evaluated(step=np.zeros(len(table)), bytes=np.zeros(len(table)), flops=np.zeros(len(table)))
    shards = np.isin(table.data, [DATA.index(name) for name in ("zero1", "zero2", "fsdp")])
    for mask in _alike(table, shards):
        first = int(np.flatnonzero(mask)[0])
        precision = PRECISIONS[table.precision[first]]
        way = ways_of(bool(shards[first]), precision)
        schedule = SCHEDULES[table.schedule[first]]
        group = _group(read(way), table.where(mask), machine, settings, way, precision, schedule, found)
        for name, values in memory(group).items():
            found.memory.setdefault(name, np.zeros(len(table)))[mask] = values
        seconds, flops = timing(group)
        for name, values in seconds.items():
            found.seconds.setdefault(name, np.zeros(len(table)))[mask] = values
        found.flops[mask] = flops
    found.bytes = np.sum(list(found.memory.values()), axis=0)
    found.step = np.sum(list(found.seconds.values()), axis=0)
    return found


def _alike(table: Table, shards: Array) -> list[Array]:
    """Masks of the rows that are worked out together: one precision, sharded or not, one schedule, stages or none."""
    keys = np.stack([table.precision, shards, table.schedule, table.pp > 1])
    _, which = np.unique(keys, axis=1, return_inverse=True)
    which = which.reshape(-1)
    return [which == i for i in range(which.max() + 1)] if len(which) else []


def _group(
    model: ModelRead,
    table: Table,
    machine: Machine,
    settings: Settings,
    way: str,
    precision: str,
    schedule: str,
    found: Evaluated,
) -> Group:
    costs = model.costs[way]
    pairs, at = np.unique(np.stack([table.micro_batch, table.tp]), axis=1, return_inverse=True)
    at = at.reshape(-1)
    done = work(costs, way, precision, pairs[0], pairs[1], machine.device)
    kinds = list(costs.parts)
    group = Group(
        table,
        model,
        machine,
        settings,
        way,
        schedule,
        kinds,
        costs.order,
        at,
        pairs,
        done,
        sizes(model, costs, table.tp, table.dp_shard),
        np.zeros((len(kinds), len(table))),
        [],
    )
    _cut(group, found)
    return group


def _cut(group: Group, found: Evaluated) -> None:
    """Fills in which parts the slowest stage holds, and those stages whose memory can be the largest."""
    table, rows = group.table, len(group.table)
    middle = group.pairs.shape[1] // 2
    seconds = dict(zip(group.kinds, group.work.forward[:, middle] + group.work.backward[:, middle]))
    numbers = [np.zeros(rows, int) for _ in range(4)]
    parts = [np.zeros((len(group.kinds), rows)) for _ in range(4)]
    shapes, which = np.unique(np.stack([table.pp, table.chunks]), axis=1, return_inverse=True)
    for i, (pp, chunks) in enumerate(shapes.T):
        mask = which.reshape(-1) == i
        if pp == 1:
            counts = group.counts_all[None, :]
        else:
            blocks = block_cut(group.order, seconds, int(pp * chunks))
            found.blocks[group.schedule, int(pp), int(chunks)] = blocks
            counts = stage_counts(group.order, group.kinds, blocks, int(pp), group.schedule)
        load = counts @ np.array([seconds[name] for name in group.kinds])
        slowest = int(np.argmax(load))
        group.critical[:, mask] = counts[slowest][:, None]
        for slot, stage in enumerate((0, slowest, int(pp) - 1, min(1, int(pp) - 1))):
            numbers[slot][mask] = stage
            parts[slot][:, mask] = counts[stage][:, None]
    group.stages = list(zip(numbers, parts))


def modes(table: Table) -> Array:
    return np.array(CHECKPOINTING)[table.checkpointing]
