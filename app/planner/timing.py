"""Seconds of one optimizer step, by parts.

    step = micro-batches · (forward + backward + what cannot be hidden) + the pipeline's bubble + optimizer + rest

A sharded block's parameters are gathered while the block before computes, its gradients scattered while the next one's
backward runs: what takes longer than that computing is exposed; so is what cannot start earlier (the root's), and what
the host has to do for it where launching is what a block waits for. An average over copies hides behind the last
backward but for its last bucket. Tensor parallelism hides nothing, or with parallel.async_tp a share (`async_tp`, less
what products lose to it) if the products beside it take as long; exchanging tokens with experts hides nothing; experts
are taken to be used evenly, and to be gathered and averaged over as many workers as the rest.

Collectives are rings over the links between the devices that take part (Thakur et al. 2005). Ranks are numbered so that
tp peers are next to one another, then cp's, dp_shard's, dp_replicate's, then stages (strategies/dims.py); a node holds
`per_node` consecutive ranks. A group whose neighbours are `stride` ranks apart has min(n, per_node / stride) members in
a node; the other ranks of the node run the same collective in groups of their own and share the node's link.
"""

import math
from dataclasses import dataclass

from app.planner.layouts import Candidate
from app.planner.machine import Machine
from app.planner.part_costs import PartCost, Work
from strategies.context.apply import METHODS
from strategies.costs import STATES, Collective, StepShape, UnitSize
from strategies.options import Options
from strategies.pipeline.schedules import SPLIT
from strategies.pipeline.simulate import Times, bubble_by_formula

HOST_LINK = 25e9
"""Bytes/s between a GPU and its host that PCIe 4 x16 reaches of its 31.5e9."""
HOST_MEMORY = 20e9
"""Bytes/s of host memory that the optimizer of one GPU's part reaches, where 8 of them share a host."""
BESIDE = 2 / 3
"""Of a block's products, those that stand beside what asynchronous tensor parallelism sends: of layers called with the
same input only the first (a gated block's q, out, gate and down)."""
TOGETHER = 64
"""GPUs up to which nobody waits for the slowest of many."""
THIRD = Times.equal(1 / 3)
"""Of a micro-batch's time, forward, the gradients of inputs, and those of weights take about a third each."""


@dataclass(frozen=True)
class Case:
    """One layout with all that its time depends on. Lists have an entry per part of the model."""

    candidate: Candidate
    machine: Machine
    work: Work
    step: StepShape
    parts: list[PartCost]
    units: list[UnitSize]  # what a rank holds of one such part
    counts: tuple[int, ...]  # how many of them the slowest stage has
    options: Options
    context: str  # how workers that share a sequence attend
    exchanged: float = 0.0
    """Bytes of a micro-batch's rows that a stage's mixtures send to experts and back, if they are split."""


Exposed = dict[str, float]
"""Seconds of communication that nothing hides, by part of the step; `hidden`: those that computing hides."""


def timing(case: Case, sample_bytes: float, tensors: int, clips: bool) -> tuple[dict[str, float], float]:
    """Seconds by part; FLOPs of the whole step, computed once.

    sample_bytes: of one sample, which goes to the device. tensors: how many parameters the model has. clips: whether
    gradients are, which takes an all-reduce."""
    candidate, machine, dims = case.candidate, case.machine, case.candidate.dims
    device = machine.device
    many = candidate.micro_batches
    exposed: Exposed = dict.fromkeys(
        ("tensor", "context", "expert", "shard", "replicate", "pipeline_send", "hidden"), 0.0
    )
    compute = sum((part.forward + part.backward) * n for part, n in zip(case.parts, case.counts))
    lost = device.stage + device.split * (candidate.schedule in SPLIT) if dims.pp > 1 else 0.0
    _tensor(case, exposed)
    _context(case, exposed)
    if dims.ep > 1:  # nothing hides it; like a gathering it sends all but one's own share
        exposed["expert"] = machine.links.gather(case.exchanged, dims.ep, dims.tp) * many
    if dims.dp_cp > 1 and candidate.strategy.is_sharded:
        for part, unit, count in zip(case.parts, case.units, case.counts):
            _unit(case, part, unit, count, exposed)
    elif dims.dp_cp > 1:
        _average(case, exposed)
    hidden = exposed.pop("hidden")
    waits = sum(exposed[name] for name in ("tensor", "context", "expert", "shard"))
    of_each = compute * (1 + lost) + waits / many
    _sends(case, of_each, exposed)
    exposed["pipeline_send"] += lost * compute * many
    seconds = {
        "compute": compute * many,
        **exposed,
        "contention": hidden * device.contention,
        "bubble": _bubbles(candidate) * of_each,
        "optimizer": _optimizer(case, clips),
        "data": 0.0 if device.is_cpu else candidate.micro_batch * many * sample_bytes / HOST_LINK,
        "rest": device.step * tensors + device.loop,
    }
    seconds["scale"] = sum(seconds.values()) * device.scale * max(0.0, math.log2(case.machine.world / TOGETHER))
    flops = sum(part.flops * part.count for part in case.parts) * dims.tp * many * dims.dp_cp
    return seconds, flops


def _tensor(case: Case, exposed: Exposed) -> None:
    tp, link = case.candidate.dims.tp, case.machine.links
    if tp == 1:
        return
    sent = sum(part.sent * n for part, n in zip(case.parts, case.counts))
    calls = sum(part.calls * n for part, n in zip(case.parts, case.counts))
    hops = (tp - 1) * (link.hop_across if tp > link.per_node else link.hop_within)
    seconds = link.gather(sent * tp / (tp - 1), tp, 1) + max(calls - 1, 0) * hops
    hidden = 0.0
    if case.options.async_tp and case.candidate.schedule not in SPLIT and sent:
        each = seconds / sent * case.machine.device.async_tp
        beside = (min(each * part.sent, BESIDE * part.multiplying) for part in case.parts)
        hidden = sum(one * n for one, n in zip(beside, case.counts))
    exposed["tensor"] += (seconds - hidden) * case.candidate.micro_batches


def _context(case: Case, exposed: Exposed) -> None:
    """What attention across workers sends; a ring's hides behind attending."""
    dims, link, method = case.candidate.dims, case.machine.links, METHODS[case.context]
    if dims.cp == 1:
        return
    for part, count in zip(case.parts, case.counts):
        sent = method.sent_bytes(queries=part.queries, keys=part.keys, cp=dims.cp, itemsize=case.work.itemsize)
        for bytes_, times, attending in zip(sent, (part.exchanges, 1.0), part.attending):
            seconds = link.gather(bytes_ * dims.cp / (dims.cp - 1), dims.cp, dims.tp)
            left = max(0.0, seconds - attending) if method.hides_sending else seconds
            exposed["context"] += left * times * count * case.candidate.micro_batches
            exposed["hidden"] += (seconds - left) * times * count * case.candidate.micro_batches


def _unit(case: Case, part: PartCost, unit: UnitSize, count: int, exposed: Exposed) -> None:
    """A sharded part: of each of its collectives what takes longer than the computing beside it."""
    device, many = case.machine.device, case.candidate.micro_batches
    host = device.unit_operations * device.operation
    found = case.candidate.strategy.collectives(unit, case.step)
    for phase, computing, launch in (
        ("forward", part.forward, part.launch_forward),
        ("backward", part.backward, part.launch_backward),
    ):
        own = [c for c in found if c.phase == phase and c.times]
        room = computing * device.hidden if part.is_block else 0.0
        if own and part.is_block:  # what the host does for it, where launching is what a block waits for
            exposed["shard"] += min(max(launch + host - computing, 0.0), host) * many * count
        before = 0
        for times in sorted({c.times for c in own}):  # with some micro-batches all of them go, with others a few
            total = sum(_seconds(case, c) for c in own if c.times >= times)
            exposed["shard"] += max(total - room, 0.0) * (times - before) * count
            exposed["hidden"] += min(total, room) * (times - before) * count
            before = times


def _seconds(case: Case, collective: Collective) -> float:
    """Of one such collective."""
    dims, link = case.candidate.held, case.machine.links
    ways = getattr(dims, collective.over)
    stride = dims.tp * (dims.dp_shard if collective.over == "dp_replicate" else 1)
    take = link.reduce if collective.name == "all_reduce" else link.gather
    return take(collective.bytes, ways, stride)


def _average(case: Case, exposed: Exposed) -> None:
    """All parts' gradients in buckets, behind the last backward."""
    dims, link, device = case.candidate.held, case.machine.links, case.machine.device
    size = sum(
        float(collective.bytes) * n
        for unit, n in zip(case.units, case.counts)
        for collective in case.candidate.strategy.collectives(unit, case.step)
        if collective.over == "dp_replicate"
    )
    bucket = min(size, case.options.bucket_mb * 2**20)
    backward = sum(part.backward * n for part, n in zip(case.parts, case.counts))
    seconds, last = (link.reduce(each, dims.dp_replicate, dims.tp) for each in (size, bucket))
    left = min(seconds, max(seconds - device.hidden * backward, last))
    exposed["hidden"] += seconds - left
    exposed["replicate"] += left


def _sends(case: Case, of_each: float, exposed: Exposed) -> None:
    """An activation on and a gradient back for each chunk. While the pipeline fills and drains every hop is waited for;
    between, a send has the time in which its stage computes another micro-batch or chunk.

    of_each: seconds of a micro-batch on a stage."""
    candidate, link = case.candidate, case.machine.links
    if candidate.dims.pp > 1:
        stride = candidate.dims.dp_cp * candidate.dims.tp
        seconds = link.send(max(part.crossing for part in case.parts), stride)
        room = case.machine.device.hidden * of_each / candidate.chunks / 2
        steady = candidate.micro_batches * candidate.chunks * max(0.0, seconds - room)
        exposed["pipeline_send"] += 2 * (seconds * (candidate.dims.pp - 1) + steady)


def _bubbles(candidate: Candidate) -> float:
    """Micro-batch times (forward and backward) that a stage waits for in one step."""
    if candidate.dims.pp == 1:
        return 0.0
    many = candidate.micro_batches
    share = bubble_by_formula(
        candidate.schedule, stages=candidate.dims.pp, micro_batches=many, chunks=candidate.chunks, times=THIRD
    )
    return share * many / (1 - share)


def _optimizer(case: Case, clips: bool) -> float:
    """Reads parameter, gradient and state, writes parameter and state, all float32; clipping adds an all-reduce."""
    candidate, device, machine = case.candidate, case.machine.device, case.machine
    sharded = candidate.strategy.is_sharded
    held = sum((u.sharded_gradients if sharded else u.gradients) * n for u, n in zip(case.units, case.counts))
    moved = held * (3 + 2 * STATES.get(case.step.optimizer, 2) + clips)
    norm = case.machine.links.reduce(4.0, machine.world, 1) if clips else 0.0
    if candidate.offload:  # over PCIe: the shards up for each gathering, the gradients down
        return moved / HOST_MEMORY + norm + (1 + 2 * candidate.micro_batches) * held / HOST_LINK
    return moved / device.bandwidth + norm
