"""Peak bytes on the fullest device, by parts.

Backward of a part u needs what all parts up to u have saved, what is alive only within u's backward, and the gradients
of the parts after u, which are there already. The peak is the largest of these moments and of the optimizer's step.
What sharding gathers, and what waits to be reduced, is alive beside that.
"""

from __future__ import annotations

import numpy as np

from app.planner.evaluate import Group
from app.planner.sizes import states
from app.planner.stages import in_flight

Array = np.ndarray


def memory(group: Group) -> dict[str, Array]:
    """(rows,) bytes of parameters, gradients, optimizer, activations, communication, buffers and margin."""
    table, best = group.table, None
    stages = group.stages if (table.pp > 1).any() else group.stages[:1]
    for number, counts in stages:
        parts = _stage(group, number, counts)
        total = np.sum(list(parts.values()), axis=0)
        if best is None:
            best, most = parts, total
        else:
            best = {name: np.where(total > most, parts[name], best[name]) for name in best}
            most = np.maximum(most, total)
    assert best is not None
    device = group.machine.device
    best["margin"] = np.sum(list(best.values()), axis=0) * device.fragmentation + group.settings.memory_base
    return best


def _stage(group: Group, number: Array, counts: Array) -> dict[str, Array]:
    table, sizes = group.table, group.sizes
    sharded = group.is_data("zero1", "zero2", "fsdp")

    def held(whole: Array, part: Array) -> Array:
        return np.where(sharded, (part * counts).sum(0), (whole * counts).sum(0))

    parameters = held(sizes.local, sizes.shard)
    gradients = held(sizes.trainable_local, sizes.trainable_shard)
    optimizer = states(gradients, (sizes.tensors[:, None] * counts).sum(0), group.settings.optimizer)
    resident = np.where(table.offload, 0.0, 1.0)
    activations, early = _activations(group, number, counts, gradients)
    communication = np.where(sharded, _sharded_buffers(group, counts), _replicated_buffers(group, counts, gradients))
    # in the optimizer's step activations are gone; a peak before that lacks the gradients still to come
    missing = np.minimum(gradients - early, activations + communication)
    return {
        "parameters": parameters * resident,
        "gradients": gradients * resident,
        "optimizer": optimizer * resident,
        "activations": np.maximum(activations - np.where(table.offload, 0.0, missing), 0.0),
        "communication": communication,
        "buffers": np.full(len(table), float(group.model.size.buffer_bytes)),
    }


def saved_by_mode(group: Group) -> Array:
    """(kinds, rows) bytes a part keeps for its backward under the row's activation checkpointing."""
    saved, kept, boundary = group.part("saved"), group.part("kept"), group.part("boundary")
    is_block = np.array([name.startswith("block") for name in group.kinds])[:, None]
    mode = group.table.checkpointing
    share = group.recomputed_share
    full = boundary * share + saved * (1 - share)
    recomputed = np.where(mode == 2, full, np.minimum(kept + boundary, saved))
    return np.where(is_block & (mode > 0), recomputed, saved)


def _activations(group: Group, number: Array, counts: Array, gradients: Array) -> tuple[Array, Array]:
    """Bytes alive at the worst moment, and how much of the gradients is there at that moment."""
    table = group.table
    saved, extra, forward_extra = saved_by_mode(group), group.part("extra"), group.part("forward_extra")
    is_block = np.array([name.startswith("block") for name in group.kinds])[:, None]
    least = group.part("boundary") if group.settings.every > 1 else saved  # of one that is recomputed
    again = np.where(is_block & (table.checkpointing > 0), np.maximum(group.part("saved") - least, 0), 0.0)
    if (table.pp > 1).any():
        flying = in_flight(group.schedule, number, table.pp, table.micro_batches, table.chunks)
        worst = np.where(counts > 0, again + extra, 0.0).max(0)
        return (saved * counts).sum(0) * flying + worst, gradients
    every = table.micro_batches > 1  # gradients of earlier micro-batches are there from the start
    every |= group.is_data("ddp") & (table.tp == 1)  # DDP's buckets are always there
    per_kind = np.where(
        group.is_data("zero1", "zero2", "fsdp"), group.sizes.trainable_shard, group.sizes.trainable_local
    )
    peak, there = np.zeros(len(table)), np.zeros(len(table))
    before = np.zeros(len(table))  # saved by the units up to here
    after = gradients.copy()
    best = np.full(len(table), -np.inf)
    for unit in _units(group):
        before = before + saved[unit]
        after = np.maximum(after - per_kind[unit], 0.0)
        alive = before + again[unit] + np.maximum(extra[unit], forward_extra[unit] - saved[unit] - again[unit])
        have = np.where(every, gradients, after)
        better = alive + have > best
        best = np.where(better, alive + have, best)
        peak, there = np.where(better, alive, peak), np.where(better, have, there)
    return peak, there


def _units(group: Group) -> list[int]:
    """Kinds in the order of forward: before, the blocks, after."""
    names = (["before"] if "before" in group.kinds else []) + group.order
    return [group.kinds.index(name) for name in names + (["after"] if "after" in group.kinds else [])]


def _sharded_buffers(group: Group, counts: Array) -> Array:
    """What fully_shard has whole at the peak: the root's and two blocks' parameters, the gathering of a third, and one
    block's gradients on their way; all blocks' where they are kept after forward."""
    table, padded = group.table, group.sizes.padded * (counts > 0)
    is_block = np.array([name.startswith("block") for name in group.kinds])[:, None]
    root = np.where(is_block, 0.0, padded).sum(0)
    largest = np.where(is_block, padded, 0.0).max(0)
    blocks = np.where(is_block, padded * counts, 0.0).sum(0)
    several = np.minimum(2 * largest, blocks)
    whole = np.where(group.keeps(), root + blocks, root + several) * group.gathered
    on_the_way = np.maximum(largest * (group.gathered + group.wire), 0.0)
    waiting = np.where(group.accumulates_whole(), (root + blocks) * group.wire, 0.0)
    cast = np.where(table.pp > 1, (root + blocks) * (4.0 - group.itemsize), 0.0)  # autocast's 16-bit copies
    return whole + on_the_way + waiting + cast


def _replicated_buffers(group: Group, counts: Array, gradients: Array) -> Array:
    """autocast keeps a 16-bit copy of each weight until its backward; tensor × ddp flattens gradients to send them."""
    table = group.table
    cast = 0.0 if group.way == "plain" else (group.sizes.local * counts).sum(0) / 2
    flat = np.where((table.tp > 1) & (table.dp > 1), gradients, 0.0)
    return cast + flat
