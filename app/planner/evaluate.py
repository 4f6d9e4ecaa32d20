"""Memory and time of every row of a table of layouts, in numpy; memory.py and timing.py hold the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from app.planner.fitted import Costs
from app.planner.rates import Rates
from app.planner.read import GPU, ModelRead
from app.planner.sizes import Sizes, sizes
from app.planner.stages import block_cut, stage_counts
from app.planner.table import CHECKPOINTING, DATA, PRECISIONS, SCHEDULES, Table
from app.planner.work import Work, ways_of, work
from strategies.fsdp import ROOM

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
    shared_memory: bool = True
    clip: bool = False
    correction: float = 1.0
    """What this model's computing was measured to take, over what was predicted."""
    every: int = 1
    """Of which blocks every one is, or every second is, …, recomputed under full checkpointing."""
    compiled: bool = False
    """Whether blocks are compiled into fused kernels."""
    sequence_parallel: bool = True
    stages: tuple[int, ...] | None = None
    """Blocks per chunk of a pipeline, where the person has cut it."""
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
    costs: Costs
    work: Work
    sizes: Sizes
    critical: Array
    """(kinds, rows): parts on the slowest stage."""
    stages: list[tuple[Array, Array]]
    """Stages whose memory is looked at: (rows,) its number, (kinds, rows) its parts."""
    scattered: Array
    """(rows,): sharded ones that reduce every micro-batch's gradients, instead of keeping whole ones until the last."""

    def part(self, name: str) -> Array:
        """(kinds, rows) of one of read.py's scalars, for the row's micro-batch and tp."""
        return np.array([np.maximum(p.at(name, *self.pairs), 0.0) for p in self.costs.parts.values()])[:, self.at]

    @property
    def recomputed_share(self) -> float:
        """Of the blocks, those that are recomputed where any are."""
        blocks = max(1, len(self.order))
        return -(-blocks // self.settings.every) / blocks

    @property
    def itemsize(self) -> float:
        """Bytes of a number in computing."""
        return 4.0 if self.way == "plain" else 2.0

    @property
    def gathered(self) -> float:
        """Bytes of a number that sharding gathers: a pipeline gathers float32 and leaves the cast to autocast."""
        return 4.0 if (self.table.pp > 1).any() else self.itemsize

    @property
    def wire(self) -> float:
        """Bytes of a gradient's number on its way."""
        return 2.0 if self.settings.reduce_bf16 or self.settings.compression == "bf16" else 4.0

    def is_data(self, *names: str) -> Array:
        return np.isin(self.table.data, [DATA.index(name) for name in names])

    def keeps(self) -> Array:
        """Whether a sharded row keeps gathered parameters from forward to backward; a pipeline does for all of a step.

        strategies/fsdp.py's frees_after_forward."""
        asked = self.settings.reshard_after_forward
        chosen = self._small(self.gathered) if asked is None else np.full(len(self.at), not asked)
        kept = np.where(self.is_data("fsdp"), chosen, asked is not True) | (self.table.pp > 1)
        return kept & self.is_data("zero1", "zero2", "fsdp")

    def scatters_each(self) -> Array:
        """Whether a sharded row reduces every micro-batch's gradients as it is configured, or by itself.

        strategies/fsdp.py's scatters_each."""
        asked = self.settings.accumulate_sharded
        is_cpu = self.machine.device.gpu.name == "cpu"
        itself = self.is_data("zero2") | (self.is_data("fsdp") & ~self._small(self.wire) & (not is_cpu))
        return (itself if asked is None else np.full(len(self.at), asked)) & self.accumulates()

    def accumulates(self) -> Array:
        """Whether there is anything to decide: sharded, several micro-batches, and no pipeline, which reduces once."""
        sharded = self.is_data("zero1", "zero2", "fsdp")
        return sharded & (self.table.micro_batches > 1) & (self.table.pp == 1)

    def accumulates_whole(self) -> Array:
        """Whether a sharded row keeps whole gradients until the last micro-batch."""
        several = self.is_data("zero1", "zero2", "fsdp") & (self.table.micro_batches > 1)
        return several & ~self.scattered

    def _small(self, itemsize: float) -> Array:
        """Whether a whole model's numbers of that size take little enough of a GPU to be kept."""
        whole = self.sizes.padded.T @ self.counts_all * itemsize
        return (whole < ROOM * self.machine.capacity) & (self.machine.device.gpu.name != "cpu")

    @property
    def counts_all(self) -> Array:
        """(kinds,): parts of each kind in the whole model."""
        return np.array([self.order.count(name) or 1 for name in self.kinds], float)


@dataclass
class Evaluated:
    """Columns beside the table's: bytes and seconds, by parts."""

    memory: dict[str, Array] = field(default_factory=dict)
    seconds: dict[str, Array] = field(default_factory=dict)
    communication: dict[str, Array] = field(default_factory=dict)
    """Exposed seconds by collective and link, such as all_gather.across; they are among `seconds`."""
    step: Array = field(default_factory=lambda: np.zeros(0))
    bytes: Array = field(default_factory=lambda: np.zeros(0))
    flops: Array = field(default_factory=lambda: np.zeros(0))
    scattered: Array = field(default_factory=lambda: np.zeros(0, bool))
    """Whether every micro-batch's gradients are reduced: parallel.accumulate_sharded."""
    accumulates: Array = field(default_factory=lambda: np.zeros(0, bool))
    """Whether that is a question: sharded, several micro-batches, no pipeline."""
    block_bytes: float = 0.0
    """Of the largest block's parameters, whole."""
    blocks: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)
    """(schedule, pp, chunks) → blocks of each chunk."""


def evaluate(read: Callable[[str], ModelRead], table: Table, machine: Machine, settings: Settings) -> Evaluated:
    """Costs of every row. read: gives the model with its costs under a way of having precision."""
    from app.planner.timing import timing

    rows = len(table)
    found = Evaluated(step=np.zeros(rows), bytes=np.zeros(rows), flops=np.zeros(rows))
    found.scattered, found.accumulates = np.zeros(rows, bool), np.zeros(rows, bool)
    shards = np.isin(table.data, [DATA.index(name) for name in ("zero1", "zero2", "fsdp")])
    for mask in _alike(table, shards):
        first = int(np.flatnonzero(mask)[0])
        precision = PRECISIONS[table.precision[first]]
        way = ways_of(bool(shards[first]) and table.pp[first] == 1, precision)
        schedule = SCHEDULES[table.schedule[first]]
        group = _group(read(as_on(machine, way)), table.where(mask), machine, settings, way, precision, schedule, found)
        for name, values in _memory(group).items():
            found.memory.setdefault(name, np.zeros(len(table)))[mask] = values
        found.scattered[mask], found.accumulates[mask] = group.scattered, group.accumulates()
        seconds, flops, talk = timing(group)
        for name, values in talk.items():
            found.communication.setdefault(name, np.zeros(len(table)))[mask] = values
        for name, values in seconds.items():
            found.seconds.setdefault(name, np.zeros(len(table)))[mask] = values
        found.flops[mask] = flops
        found.block_bytes = max(found.block_bytes, _largest_block(group))
    found.bytes = np.sum(list(found.memory.values()), axis=0)
    found.step = np.sum(list(found.seconds.values()), axis=0)
    return found


def _largest_block(group: Group) -> float:
    whole = group.sizes.local.max(1)
    return max((float(size) for name, size in zip(group.kinds, whole) if name.startswith("block")), default=0.0)


def as_on(machine: Machine, way: str) -> str:
    """What read.py calls that way of having precision on that machine."""
    return way if machine.device.gpu.name == "cpu" else way + GPU


def _memory(group: Group) -> dict[str, Array]:
    """Bytes by part; rows that are free to, and fit no other way, reduce every micro-batch's gradients."""
    from app.planner.memory import memory

    group.scattered = group.scatters_each()
    parts = memory(group)
    if group.settings.accumulate_sharded is not None:
        return parts
    full = np.sum(list(parts.values()), axis=0) > group.machine.capacity
    changed = full & group.accumulates() & ~group.scattered & group.is_data("fsdp")
    if changed.any():
        group.scattered = group.scattered | changed
        parts = memory(group)
    return parts


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
    costs = model.costs[as_on(machine, way)]
    pairs, at = np.unique(np.stack([table.micro_batch, table.tp]), axis=1, return_inverse=True)
    at = at.reshape(-1)
    done = work(costs, way, precision, pairs[0], pairs[1], machine.device, settings.compiled)
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
        costs,
        done,
        sizes(model, costs, table.tp, table.dp_shard),
        np.zeros((len(kinds), len(table))),
        [],
        np.zeros(len(table), bool),
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
            given = list(group.settings.stages or ())
            blocks = given if len(given) == pp * chunks else block_cut(group.order, seconds, int(pp * chunks))
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
