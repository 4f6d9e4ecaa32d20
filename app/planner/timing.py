"""Seconds of one optimizer step, by parts.

    step = micro-batches · (forward + backward + what cannot be hidden) + waiting for the pipeline + optimizer + rest

A sharded block's parameters are gathered while the block before computes, its gradients scattered while the next one's
backward runs: what takes longer than that computing is exposed; so is what cannot start earlier (the root's). DDP's
all-reduce hides behind the last backward but for its last bucket. Tensor parallelism hides nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from app.planner.collectives import Links, gather_seconds, links, reduce_seconds, send_seconds
from app.planner.evaluate import Group
from app.planner.stages import waits

Array = np.ndarray

HOST_LINK = 25e9
"""Bytes/s between a GPU and its host that PCIe 4 x16 reaches of its 31.5e9."""
HOST_MEMORY = 20e9
"""Bytes/s of host memory that the optimizer of one GPU's part reaches, where 8 of them share a host."""


def timing(group: Group) -> tuple[dict[str, Array], Array]:
    """(rows,) seconds by part, and FLOPs of the whole step without what is computed twice."""
    table, device, machine = group.table, group.machine.device, group.machine
    link = links(device, machine.across, min(machine.per_node, machine.world))
    if device.gpu.name == "cpu":  # whoever computes also sends
        link = replace(link, within=link.within / device.slowdown(machine.world))
    slow = device.slowdown(min(machine.world, machine.per_node)) * group.settings.correction
    forward = group.work.forward[:, group.at] * slow
    again = np.where(
        np.array([name.startswith("block") for name in group.kinds])[:, None],
        np.where(
            table.checkpointing == 2,
            group.work.recompute_full[:, group.at],
            np.where(table.checkpointing == 1, group.work.recompute_selective[:, group.at], 0.0),
        ),
        0.0,
    )
    backward = (group.work.backward[:, group.at] + 0.0) * slow + again * slow
    count, many = group.critical, table.micro_batches
    compute = ((forward + backward) * count).sum(0)
    tensor = _tensor(group, link)
    shard_each, shard_once, overlapped = _sharded(group, forward, backward, link)
    replicate, hidden = _replicated(group, (backward * count).sum(0), link)
    lost = device.stage + (device.split if group.schedule.startswith("zb") else 0.0)
    send = _sends(group, link) + np.where(table.pp > 1, lost * compute, 0.0)
    micro = compute + tensor + shard_each + send
    seconds = {
        "compute": compute * many,
        "tensor": tensor * many,
        "shard": shard_each * many + shard_once,
        "replicate": replicate,
        "pipeline_send": send * many,
        "contention": (overlapped * many + hidden) * device.contention,
        "bubble": waits(group.schedule, table.pp, table.chunks) * micro,
        "optimizer": _optimizer(group, link),
        "rest": np.full(len(table), device.step),
    }
    flops = (group.work.flops[:, group.at] * group.counts_all[:, None]).sum(0) * table.tp * many * table.dp
    return seconds, flops


def _tensor(group: Group, link: Links) -> Array:
    """Per micro-batch; what a block's forward sends is sent again when it is recomputed."""
    tp = group.table.tp
    again = np.where(group.table.checkpointing > 0, 1.5, 1.0)
    size = (group.part("sent") * group.critical).sum(0) * again
    calls = (group.part("calls") * group.critical).sum(0) * again
    one = np.ones_like(tp)
    hops = (tp - 1) * np.where(tp > link.per_node, link.latency_across, link.latency_within)
    return np.where(tp > 1, gather_seconds(size, tp, one, link) + np.maximum(calls - 1, 0) * hops, 0.0)


def _sharded(group: Group, forward: Array, backward: Array, link: Links) -> tuple[Array, Array, Array]:
    """Exposed seconds per micro-batch, exposed ones once per step, and overlapped ones per micro-batch."""
    table, sizes, device = group.table, group.sizes, group.machine.device
    rows = len(table)
    each, once, overlapped = np.zeros(rows), np.zeros(rows), np.zeros(rows)
    sharded = table.dp_shard > 1
    if not sharded.any():
        return each, once, overlapped
    keeps, whole = group.keeps(), group.accumulates_whole()
    every = ~whole & (table.micro_batches > 1)  # gradients are scattered for each micro-batch
    for i, name in enumerate(group.kinds):
        count = group.critical[i]
        gather = gather_seconds(sizes.padded[i] * group.gathered, table.dp_shard, table.tp, link)
        scatter = gather_seconds(sizes.padded[i] * group.wire, table.dp_shard, table.tp, link)
        gather, scatter = gather + device.unit, scatter + device.unit
        scatter = scatter + reduce_seconds(
            sizes.shard[i] * group.wire / 4, table.dp_replicate, table.tp * table.dp_shard, link
        )
        if not name.startswith("block"):  # the root's: gathered before anything runs, scattered after everything
            each += np.where(keeps, 0.0, gather * count) + np.where(every, scatter * count, 0.0)
            once += np.where(keeps, gather * count, 0.0) + np.where(every, 0.0, scatter * count)
            continue
        ahead, behind = forward[i] * device.hidden, backward[i] * device.hidden
        gather_forward = np.maximum(gather - ahead, 0) * count
        each += np.where(keeps, 0.0, gather_forward)
        once += np.where(keeps, gather_forward, 0.0)
        sent_back = np.where(keeps, 0.0, gather)
        plain = np.maximum(sent_back - behind, 0)
        with_scatter = np.maximum(sent_back + scatter - behind, 0)
        each += np.where(every, with_scatter, plain) * count
        once += np.where(every, 0.0, with_scatter - plain) * count
        share = np.where(every, 1.0, 1.0 / table.micro_batches)
        used = np.minimum(np.where(keeps, gather / table.micro_batches, gather), ahead)
        overlapped += (used + np.minimum(sent_back + scatter * share, behind)) * count
    zero = np.zeros(rows)
    return tuple(np.where(sharded, values, zero) for values in (each, once, overlapped))  # type: ignore[return-value]


def _replicated(group: Group, backward: Array, link: Links) -> tuple[Array, Array]:
    """DDP's all-reduce: exposed seconds per step, and those hidden behind the last backward."""
    table = group.table
    plain = (table.dp_shard == 1) & (table.dp_replicate > 1)
    size = (group.sizes.trainable_local * group.critical).sum(0) * group.wire / 4
    stride = table.tp * table.dp_shard
    seconds = reduce_seconds(size, table.dp_replicate, stride, link)
    last = reduce_seconds(np.minimum(size, group.settings.bucket_bytes), table.dp_replicate, stride, link)
    exposed = np.minimum(seconds, np.maximum(seconds - group.machine.device.hidden * backward, last))
    return np.where(plain, exposed, 0.0), np.where(plain, seconds - exposed, 0.0)


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
    return moved / bandwidth * crowded + norm + moved_over + split * crowded
