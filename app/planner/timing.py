"""Seconds of one optimizer step, by parts.

    step = micro-batches · (forward + backward + what cannot be hidden) + waiting for the pipeline + optimizer + rest

A sharded block's parameters are gathered while the block before computes, its gradients scattered while the next one's
backward runs: what takes longer than that computing is exposed; so is what cannot start earlier (the root's), and what
the host has to do for it where launching is what a block waits for. DDP's all-reduce hides behind the last backward but
for its last bucket. Tensor parallelism hides nothing.

Beside the parts, exposed communication is told by collective and by the link that it waits for.
"""

from __future__ import annotations

import numpy as np

from app.planner.collectives import (
    Links,
    gather_seconds,
    is_across,
    links,
    on_processors,
    reduce_seconds,
    send_seconds,
)
from app.planner.evaluate import Group
from app.planner.stages import waits

Array = np.ndarray
Talk = dict[str, Array]
"""Collective → (rows,) exposed seconds of a step."""

HOST_LINK = 25e9
"""Bytes/s between a GPU and its host that PCIe 4 x16 reaches of its 31.5e9."""
HOST_MEMORY = 20e9
"""Bytes/s of host memory that the optimizer of one GPU's part reaches, where 8 of them share a host."""


def timing(group: Group) -> tuple[dict[str, Array], Array, Talk]:
    """(rows,) seconds by part; FLOPs of the whole step without what is computed twice; and exposed communication by
    "all_gather", "reduce_scatter", "all_reduce" or "send", and link: "all_gather.across"."""
    table, device, machine = group.table, group.machine.device, group.machine
    link = links(device, machine.across, min(machine.per_node, machine.world))
    if device.gpu.name == "cpu":  # whoever computes also sends
        link = on_processors(link, device, machine.world)
    slow = device.slowdown(min(machine.world, machine.per_node)) * group.settings.correction
    forward = group.work.forward[:, group.at] * slow
    backward = group.work.backward[:, group.at] * slow + _recomputed(group) * slow
    count, many = group.critical, table.micro_batches
    compute = ((forward + backward) * count).sum(0)
    tensor = _tensor(group, link) + np.where(table.tp > 1, device.waiting * compute, 0.0)
    shard, overlapped, talk = _sharded(group, forward, backward, link)
    replicate, hidden = _replicated(group, (backward * count).sum(0), link)
    lost = device.stage + (device.split if group.schedule.startswith("zb") else 0.0)
    sent = _sends(group, link)
    send = sent + np.where(table.pp > 1, lost * compute, 0.0)
    micro = compute + tensor + shard / many + send
    seconds = {
        "compute": compute * many,
        "tensor": tensor * many,
        "shard": shard,
        "replicate": replicate,
        "pipeline_send": send * many,
        "contention": (overlapped * many + hidden) * device.contention,
        "bubble": waits(group.schedule, table.pp, table.chunks) * micro,
        "optimizer": _optimizer(group, link),
        "data": _data(group),
        "rest": np.full(len(table), device.step),
    }
    flops = (group.work.flops[:, group.at] * group.counts_all[:, None]).sum(0) * table.tp * many * table.dp
    return seconds, flops, _by_link(group, link, seconds["tensor"], talk, replicate, sent * many)


def _recomputed(group: Group) -> Array:
    """(kinds, rows) seconds that backward computes forward again; of every N-th block, an N-th of them."""
    mode, blocks = group.table.checkpointing, len(group.order)
    full, selective = group.work.recompute_full[:, group.at], group.work.recompute_selective[:, group.at]
    again = np.where(mode == 2, full * group.recomputed_share, np.where(mode == 1, selective, 0.0))
    return again * np.array([bool(blocks) and name.startswith("block") for name in group.kinds])[:, None]


def _by_link(group: Group, link: Links, tensor: Array, shard: Talk, replicate: Array, sent: Array) -> Talk:
    table = group.table
    one = np.ones_like(table.tp)
    inner = {"all_gather": tensor / 2, "reduce_scatter": tensor / 2}
    if not group.settings.sequence_parallel:
        inner = {"all_reduce": tensor}
    far = {
        "tensor": is_across(table.tp, one, link),
        "shard": is_across(table.dp_shard, table.tp, link),
        "replicate": is_across(table.dp_replicate, table.tp * table.dp_shard, link),
        "send": table.dp * table.tp >= link.per_node,
    }
    gathered = {name: shard[name] for name in ("all_gather", "reduce_scatter")}
    parts = [
        (inner, far["tensor"]),
        (gathered, far["shard"]),
        ({"all_reduce": shard["all_reduce"] + replicate}, far["replicate"]),
        ({"send": sent}, far["send"]),
    ]
    found: Talk = {}
    for part, across in parts:
        for name, values in part.items():
            for where, mask in (("within", ~across), ("across", across)):
                key = f"{name}.{where}"
                found[key] = found.get(key, 0.0) + np.where(mask, values, 0.0)
    return found


def _data(group: Group) -> Array:
    """A step's samples from the host's memory to the device; reading them is taken to keep up."""
    if group.machine.device.gpu.name == "cpu":
        return np.zeros(len(group.table))
    return group.table.micro_batch * group.table.micro_batches * group.model.sample_bytes / HOST_LINK


def _tensor(group: Group, link: Links) -> Array:
    """Per micro-batch; what a block's forward sends is sent again when it is recomputed."""
    tp = group.table.tp
    again = np.where(group.table.checkpointing == 2, 1.5, 1.0)  # selective keeps what collectives gave
    size = (group.part("sent") * group.critical).sum(0) * again
    calls = (group.part("calls") * group.critical).sum(0) * again
    one = np.ones_like(tp)
    hops = (tp - 1) * np.where(tp > link.per_node, link.latency_across, link.latency_within)
    return np.where(tp > 1, gather_seconds(size, tp, one, link) + np.maximum(calls - 1, 0) * hops, 0.0)


def _sharded(group: Group, forward: Array, backward: Array, link: Links) -> tuple[Array, Array, Talk]:
    """Exposed seconds per step, overlapped ones per micro-batch, and the exposed ones by collective."""
    table, device, many = group.table, group.machine.device, group.table.micro_batches
    zero = np.zeros(len(table))
    shard, overlapped, talk = zero, zero, {"all_gather": zero, "reduce_scatter": zero, "all_reduce": zero}
    sharded = table.dp_shard > 1
    if not sharded.any():
        return shard, overlapped, talk
    keeps, whole = group.keeps(), group.accumulates_whole()
    gathers = np.where(keeps, 1, many)  # of a step, in forward
    scatters = np.where(~whole, many, 1)
    host = device.unit_operations * device.operation
    for i, name in enumerate(group.kinds):
        count = group.critical[i]
        gather, scatter, reduce = _unit(group, i, link)
        sent_back = np.where(keeps, 0.0, gather)
        if not name.startswith("block"):  # the root's: gathered before anything runs, scattered after everything
            found = gather * gathers, scatter * scatters
        else:
            ahead, behind = forward[i] * device.hidden, backward[i] * device.hidden
            # each backward gathers again; those that also scatter wait for both
            both, alone = np.maximum(sent_back + scatter - behind, 0), np.maximum(sent_back - behind, 0)
            gathering = sent_back / np.maximum(sent_back + scatter, 1e-30)
            first = np.maximum(gather - ahead, 0) * gathers + _waits_for_host(group, i, host) * many
            found = first + both * gathering * scatters + alone * (many - scatters), both * (1 - gathering) * scatters
            used = np.minimum(gather * gathers / many, ahead)
            overlapped = overlapped + (used + np.minimum(sent_back + scatter * scatters / many, behind)) * count
        shard = shard + (found[0] + found[1]) * count
        part = reduce / np.maximum(scatter, 1e-30)
        split = (found[0], found[1] * (1 - part), found[1] * part)
        talk = {key: talk[key] + values * count for key, values in zip(talk, split)}
    return (
        np.where(sharded, shard, 0.0),
        np.where(sharded, overlapped, 0.0),
        {key: np.where(sharded, values, 0.0) for key, values in talk.items()},
    )


def _unit(group: Group, i: int, link: Links) -> tuple[Array, Array, Array]:
    """Seconds to gather a unit's parameters; to scatter its gradients and reduce the shards; the latter alone."""
    table, sizes, device = group.table, group.sizes, group.machine.device
    gather = gather_seconds(sizes.padded[i] * group.gathered, table.dp_shard, table.tp, link) + device.unit
    scatter = gather_seconds(sizes.padded[i] * group.wire, table.dp_shard, table.tp, link) + device.unit
    reduce = reduce_seconds(sizes.shard[i] * group.wire / 4, table.dp_replicate, table.tp * table.dp_shard, link)
    return gather, scatter + reduce, reduce


def _waits_for_host(group: Group, i: int, host: float) -> Array:
    """Per micro-batch: what the host does for a sharded block beside launching it, where that is what takes longest."""
    waited = 0.0
    for seconds, launched in (
        (group.work.forward[i], group.work.launched_forward[i]),
        (group.work.backward[i], group.work.launched_backward[i]),
    ):
        waited = waited + np.clip(launched + host - seconds, 0.0, host)[group.at]
    return waited  # type: ignore[return-value]


def _replicated(group: Group, backward: Array, link: Links) -> tuple[Array, Array]:
    """DDP's all-reduce: exposed seconds per step, and those hidden behind the last backward; nothing is hidden of an
    average in memory, which whoever computes forms itself."""
    table = group.table
    plain = (table.dp_shard == 1) & (table.dp_replicate > 1)
    size = (group.sizes.trainable_local * group.critical).sum(0) * group.wire / 4
    stride = table.tp * table.dp_shard
    seconds = reduce_seconds(size, table.dp_replicate, stride, link)
    last = reduce_seconds(np.minimum(size, group.settings.bucket_bytes), table.dp_replicate, stride, link)
    exposed = np.minimum(seconds, np.maximum(seconds - group.machine.device.hidden * backward, last))
    in_memory = plain & _shares_memory(group)
    exposed = np.where(in_memory, _averaged(group, size), exposed)
    seconds = np.where(in_memory, exposed, seconds)
    return np.where(plain, exposed, 0.0), np.where(plain, seconds - exposed, 0.0)


def _shares_memory(group: Group) -> Array:
    """Rows whose gradients are averaged in memory (strategies/cpu_collectives/shared_memory.py)."""
    from strategies.collectives import most_sharing_ranks

    table, machine, settings = group.table, group.machine, group.settings
    if not (machine.device.shared and settings.shared_memory and machine.world <= machine.per_node):
        return np.zeros(len(table), dtype=bool)
    whole = settings.compression == "none" and not settings.reduce_bf16
    return whole & (table.tp == 1) & (table.pp == 1) & (table.dp_replicate <= most_sharing_ranks())


def _averaged(group: Group, size: Array) -> Array:
    """Seconds: each rank writes its share and reads all, so two ranks pass over four times the bytes, n over n + 2."""
    table, device = group.table, group.machine.device
    return size * (table.dp_replicate + 2) / 4 / (device.shared or 1.0) * device.slowdown(group.machine.world)


def _sends(group: Group, link: Links) -> Array:
    """Per micro-batch: an activation on and a gradient back for each chunk; about half of it is hidden."""
    table = group.table
    size = group.part("boundary").max(0)
    seconds = send_seconds(size, table.dp * table.tp, link)
    return np.where(table.pp > 1, seconds * table.chunks, 0.0)


def _optimizer(group: Group, link: Links) -> Array:
    """Reads parameter, gradient and state, writes parameter and state, all float32; clipping adds an all-reduce."""
    from strategies.costs import STATES

    table, sizes, device = group.table, group.sizes, group.machine.device
    sharded = group.is_data("zero1", "zero2", "fsdp")
    held = np.where(sharded, sizes.trainable_shard, sizes.trainable_local) * group.critical
    tensors = STATES.get(group.settings.optimizer, 2)
    moved = held.sum(0) * (3 + 2 * tensors + (1 if group.settings.clip else 0))
    bandwidth = np.where(table.offload, HOST_MEMORY, device.bandwidth)
    world = np.full(len(table), group.machine.world)
    norm = reduce_seconds(np.full(len(table), 4.0), world, np.ones(len(table)), link) if group.settings.clip else 0.0
    # over PCIe: the shards up for each gathering, the gradients down
    moved_over = np.where(table.offload, (1 + 2 * table.micro_batches) * held.sum(0) / HOST_LINK, 0.0)
    split = (sizes.tensors[:, None] * group.critical).sum(0) * np.where(
        sharded | (table.tp > 1), device.tensor_step, 0.0
    )
    crowded = device.slowdown(min(group.machine.world, group.machine.per_node))
    return moved / (bandwidth * device.optimizer) * crowded + norm + moved_over + split * crowded
