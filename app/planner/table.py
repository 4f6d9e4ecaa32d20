"""Every layout that could run, as columns of numbers: one row per layout, so that numpy plans them all at once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from strategies.pipeline.schedules import least_micro_batches

Array = np.ndarray

DATA = ("none", "ddp", "zero1", "zero2", "fsdp")
"""How data parallelism is done. hsdp is fsdp with dp_replicate > 1; none has no data parallelism."""
SHARDED = tuple(DATA.index(name) for name in ("zero1", "zero2", "fsdp"))
CHECKPOINTING = ("none", "selective", "full")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv")


@dataclass
class Table:
    """Columns; a name's column holds its place in the tuples above."""

    data: Array
    dp_replicate: Array
    dp_shard: Array
    tp: Array
    pp: Array
    micro_batch: Array
    micro_batches: Array
    checkpointing: Array
    precision: Array
    schedule: Array
    chunks: Array
    offload: Array

    def __len__(self) -> int:
        return len(self.data)

    @property
    def dp(self) -> Array:
        return self.dp_replicate * self.dp_shard

    def where(self, mask: Array) -> Table:
        return Table(**{entry.name: getattr(self, entry.name)[mask] for entry in fields(self)})

    def name(self, row: int) -> str:
        """The strategy's name as an experiment writes it."""
        data = DATA[self.data[row]]
        if data == "fsdp" and self.dp_replicate[row] > 1:
            data = "hsdp"
        names = [data] if data != "none" else []
        names += ["tensor"] if self.tp[row] > 1 else []
        names += ["pipeline"] if self.pp[row] > 1 else []
        return "+".join(names) or "single"


@dataclass(frozen=True)
class Held:
    """What a person has fixed; None or empty is free."""

    data: tuple[str, ...] = ()
    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    pp: int | None = None
    micro_batch: int | None = None
    checkpointing: str | None = None
    precision: str | None = None
    schedule: str | None = None
    chunks: int | None = None
    offload: bool | None = None
    parts: frozenset[str] | None = None
    """Of {"tensor", "pipeline"}: those a strategy's name holds; the others have degree 1. None: free."""
    replicated: bool | None = None
    """Whether shards have copies (hsdp) or not (fsdp)."""


def enumerate_layouts(
    world: int,
    global_batch: int,
    held: Held,
    *,
    precisions: tuple[str, ...],
    blocks: int,
    splits: bool,
    heads: int | None,
    per_node: int,
    sequence: int | None,
    pipelines: bool = True,
    offload: bool = False,
) -> Table:
    """All layouts of `world` devices that `held` leaves open and the model allows, in no order."""
    modes = [held.checkpointing] if held.checkpointing else list(CHECKPOINTING)
    kinds = [held.precision] if held.precision else list(precisions)
    rows: list[tuple[Any, ...]] = []
    for replicate, shard, tp, pp in _grids(world, held, blocks, splits, heads, per_node, sequence, pipelines):
        dp = replicate * shard
        if global_batch < dp or global_batch % dp:
            continue
        share = global_batch // dp
        sizes = [min(held.micro_batch, share)] if held.micro_batch else _divisors(share, 256)
        for data in _data_names(replicate, shard, pp, held):
            for schedule, chunks in _schedules(pp, blocks, held):
                for size in sizes:
                    number = -(-share // size)
                    if _schedulable(schedule, pp, number):
                        row = (data, replicate, shard, tp, pp, size, number, schedule, chunks)
                        rows.extend((*row, moved) for moved in _offloads(data, pp, held, offload))
    return _table(rows, modes, kinds)


def _table(rows: list[tuple[Any, ...]], modes: list[str], kinds: list[str]) -> Table:
    count = len(rows)
    columns = np.array(rows, dtype=np.int64).reshape(count, 10).T
    each = len(modes) * len(kinds)
    data, replicate, shard, tp, pp, size, number, schedule, chunks, offload = (np.repeat(c, each) for c in columns)
    mode = np.tile(np.repeat([_mode(m) for m in modes], len(kinds)), count)
    precision = np.tile([PRECISIONS.index(k) for k in kinds], count * len(modes))
    table = Table(data, replicate, shard, tp, pp, size, number, mode, precision, schedule, chunks, offload.astype(bool))
    return table.where((precision != PRECISIONS.index("fp8")) | ((tp == 1) & (pp == 1)))  # as strategies/float8.py


def _mode(name: str) -> int:
    """every_N is planned as full: it lies between full and none."""
    return CHECKPOINTING.index(name) if name in CHECKPOINTING else CHECKPOINTING.index("full")


def _grids(
    world: int,
    held: Held,
    blocks: int,
    splits: bool,
    heads: int | None,
    per_node: int,
    sequence: int | None,
    pipelines: bool,
) -> list[tuple[int, int, int, int]]:
    found = []
    free_parts = held.parts
    tps = [held.tp] if held.tp else _divisors(world, world)
    for tp in tps:
        if world % tp or (tp > 1 and (not splits or (free_parts is not None and "tensor" not in free_parts))):
            continue
        if tp > 1 and ((heads or tp) % tp or (sequence or tp) % tp or (tp > per_node and not held.tp)):
            continue
        pps = [held.pp] if held.pp else _divisors(world // tp, blocks)
        for pp in pps:
            alone = free_parts is not None and "pipeline" not in free_parts
            if (world // tp) % pp or pp > max(1, blocks) or (pp > 1 and (alone or not pipelines)):
                continue
            rest = world // tp // pp
            shards = [held.dp_shard] if held.dp_shard else _divisors(rest, rest)
            for shard in shards:
                if rest % shard or (held.dp_replicate and held.dp_replicate * shard != rest):
                    continue
                if held.replicated is not None and shard > 1 and held.replicated is not (rest > shard):
                    continue
                found.append((rest // shard, shard, tp, pp))
    return found


def _data_names(replicate: int, shard: int, pp: int, held: Held) -> list[int]:
    """In a pipeline all sharded ones are the same, and called fsdp."""
    sharded = ["fsdp"] if pp > 1 else ["zero1", "zero2", "fsdp"]
    names = sharded if shard > 1 else ["ddp"] if replicate > 1 else ["none"]
    return [DATA.index(name) for name in names if not held.data or name in held.data]


def _schedules(pp: int, blocks: int, held: Held) -> list[tuple[int, int]]:
    if pp == 1:
        return [(0, 1)]
    names = [held.schedule] if held.schedule else list(SCHEDULES)
    found = []
    for name in names:
        if name == "zbv":
            chunks = [2]
        elif name == "interleaved_1f1b":
            chunks = [held.chunks] if held.chunks else [2, 4]
        else:
            chunks = [1]
        found += [(SCHEDULES.index(name), c) for c in chunks if pp * c <= blocks]
    return found


def _offloads(data: int, pp: int, held: Held, offload: bool) -> tuple[bool, ...]:
    """Whether state may be kept in host memory: by those that shard, not in a pipeline; looked at for fsdp alone
    unless it is held."""
    if pp > 1:
        return (False,) if not held.offload else ()
    if held.offload:
        return (True,) if data in SHARDED else ()
    if held.offload is False:
        return (False,)
    return (False, True) if offload and DATA[data] == "fsdp" else (False,)


def _schedulable(schedule: int, pp: int, micro_batches: int) -> bool:
    """Whether the schedule can use that many micro-batches; strategies/pipeline/schedules.py says why not."""
    name = SCHEDULES[schedule]
    if pp > 1 and name == "interleaved_1f1b" and micro_batches % pp:
        return False
    return pp == 1 or micro_batches >= least_micro_batches(name, pp)


def _divisors(number: int, limit: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    every = sorted({*small, *(number // d for d in small)})
    return [d for d in every if d <= limit]
