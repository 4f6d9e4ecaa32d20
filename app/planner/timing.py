"""Seconds of one optimizer step, by parts.

    step = micro-batches · (forward + backward + exposed communication)
         + the pipeline's bubble + optimizer + fixed costs

The parameters of a sharded block are gathered while the block before it computes, and its gradients
are scattered while the backward of the next one runs. Communication is exposed where it takes
longer than that computation, and where it cannot start earlier (the root's parameters). An
all-reduce over replicas hides behind the last backward, except for its last bucket. A GPU waits for
its host where launching all kernels and collectives of a step takes longer than running them, and
for samples where copying them does. Tensor parallelism hides the sums of its backward behind the
gradients of the weights that used them, and what it gathers again behind the gradients of inputs;
with parallel.async_tp a share of everything (`Device.async_tp`, less what products lose to it) if
the products beside it take as long. Exchanging tokens with experts hides nothing, but in trainers
that interleave two micro-batches (`Device.exchange_overlap`). Experts are assumed to be used
evenly, and to be gathered and averaged over as many workers as the other parameters.

All-gathers and reduce-scatters are rings over the links between the devices that take part (Thakur
et al. 2005), all-reduces trees over their nodes, as NCCL has them. A ring of R devices on several
nodes sends (R - 1) / R of the tensor over each node's link, also what began in the node that gets
it. A tree over N nodes sends (N - 1) / N of it each way. Ranks are numbered so that tp peers are
next to one another, then those of cp, dp_shard and dp_replicate, then stages (strategies/dims.py);
a node holds `per_node` consecutive ranks. A group whose neighbours are `stride` ranks apart has
min(n, per_node / stride) members in a node; the other ranks of the node run the same collective in
groups of their own and share the node's link.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from app.planner.layouts import Candidate
from app.planner.machine import Machine
from app.planner.part_costs import PartCost, Work
from strategies.activation_offloading import moved_blocks
from strategies.context.apply import METHODS
from strategies.costs import STATES, Collective, StepShape, UnitSize
from strategies.options import Options
from strategies.pipeline.schedules import SPLIT
from strategies.pipeline.simulate import Times, bubble_by_formula

MUON_ITERATIONS = 5
HOST_MEMORY = 20e9
"""Bytes/s of host memory that the optimizer of one GPU's shard reaches if 8 GPUs share a host."""
OVERLAPPABLE_SHARE = 2 / 3
"""Share of a block's products that run beside the collectives of asynchronous tensor parallelism.

Of several layers with the same input only the first does: in a gated block q, out, gate and down.
"""
FIRST_LAYERS_SHARE = 0.3
"""Share of a block's products that belong to the first layers with an input: q and gate."""
EQUAL_THIRDS = Times.equal(1 / 3)
"""Forward and the gradients of inputs and of weights take about a third of a micro-batch each."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout with everything on which its time and memory depend.

    Args:
        candidate: The layout.
        machine: The machine it runs on.
        work: What a worker does with a micro-batch.
        step: What strategies need to know of a step.
        parts: The cost of each part of the model.
        units: The sizes, on one rank, of each part's unit of sharding.
        counts: How many of each part the slowest stage has.
        options: Of the configuration.
        context_method: How workers that share a sequence attend.
        expert_bytes: Of a micro-batch's rows, sent to experts and back by the mixtures of a stage,
            if experts are split.
        experts: E and k of its mixtures: how many experts, and how many a token chooses.
        expert_workers: How many workers, tensor-parallel ones too, share the experts.
        orthogonalised: (rows, columns, how many) of the slowest stage's matrices that Muon makes
            orthogonal; empty for other optimizers.
    """

    candidate: Candidate
    machine: Machine
    work: Work
    step: StepShape
    parts: list[PartCost]
    units: list[UnitSize]
    counts: tuple[int, ...]
    options: Options
    context_method: str
    expert_bytes: float = 0.0
    experts: tuple[int, int] = (1, 1)
    expert_workers: int = 1
    orthogonalised: tuple[tuple[int, int, int], ...] = ()

    def sum_of_parts(self, values: list[float]) -> float:
        """A sum over the slowest stage of values with an entry per part."""
        return sum(value * count for value, count in zip(values, self.counts))


@dataclass
class Exposed:
    """Seconds of a step's communication that nothing hides, by cause, and those that are hidden."""

    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    shard: float = 0.0
    host: float = 0.0
    replicate: float = 0.0
    pipeline_send: float = 0.0
    hidden: float = 0.0


def timing(
    case: Case, *, sample_bytes: float, parameter_tensors: int, clips: bool
) -> tuple[dict[str, float], float]:
    """The time of an optimizer step.

    Args:
        case: The layout.
        sample_bytes: Bytes of a sample, which are copied to the device.
        parameter_tensors: How many parameters, as tensors, the model has.
        clips: Whether gradients are clipped, which takes an all-reduce.

    Returns:
        (seconds by part, FLOPs of the whole step without what is recomputed)
    """
    candidate = case.candidate
    dims = candidate.dims
    machine = case.machine
    device = machine.device
    micro_batches = candidate.micro_batches

    compute = case.sum_of_parts(
        [part.forward_seconds + part.backward_seconds for part in case.parts]
    )
    pipeline_loss = 0.0
    if dims.pp > 1:
        pipeline_loss = device.stage + device.split * (candidate.schedule in SPLIT)

    exposed = Exposed()
    _add_tensor(case, exposed)
    _add_context(case, exposed)
    if dims.ep > 1:
        exchange_seconds = _exchange_seconds(case)
        # Behind the computation of another micro-batch, as far as the trainer overlaps the two.
        hidden = min(exchange_seconds, device.exchange_overlap * compute)
        exposed.expert = (exchange_seconds - hidden) * micro_batches
        exposed.hidden += hidden * micro_batches
    if dims.dp_cp > 1 and candidate.strategy.is_sharded:
        for part, unit, count in zip(case.parts, case.units, case.counts):
            _add_sharded_unit(case, part, unit=unit, count=count, exposed=exposed)
    elif dims.dp_cp > 1:
        _add_gradient_average(case, exposed)
    _add_moved_activations(case, exposed)
    launching_seconds = _launching_seconds(case)  # of a micro-batch
    micro_batch_seconds = compute
    if dims.pp > 1 and not device.is_cpu:  # the next stage waits for what is launched late
        micro_batch_seconds = max(compute, launching_seconds)
    waits = exposed.tensor + exposed.context + exposed.expert + exposed.shard + exposed.host
    micro_batch_seconds = micro_batch_seconds * (1 + pipeline_loss) + waits / micro_batches
    _add_stage_sends(case, micro_batch_seconds, exposed)
    exposed.pipeline_send += pipeline_loss * compute * micro_batches

    seconds = {
        "compute": compute * micro_batches,
        "tensor": exposed.tensor,
        "context": exposed.context,
        "expert": exposed.expert,
        "shard": exposed.shard,
        "host": exposed.host,
        "replicate": exposed.replicate,
        "pipeline_send": exposed.pipeline_send,
        "contention": exposed.hidden * device.contention,
        "bubble": _bubble_micro_batches(candidate) * micro_batch_seconds,
        "optimizer": _optimizer_seconds(case, clips) + _orthogonal_seconds(case),
        "rest": device.loop,
    }
    if device.is_cpu:
        seconds["rest"] += device.step * parameter_tensors
    else:
        busy_seconds = sum(seconds.values())
        sent_bytes = candidate.micro_batch * micro_batches * sample_bytes
        copying_seconds = sent_bytes / device.gpu.link_host
        seconds["data"] = max(0.0, copying_seconds - busy_seconds)
        host_seconds = launching_seconds * micro_batches + device.step * parameter_tensors
        meanwhile_seconds = busy_seconds + seconds["data"]
        if dims.pp > 1:  # while a stage waits for another one, its host waits too
            meanwhile_seconds = compute * micro_batches
        seconds["launch"] = max(0.0, host_seconds - meanwhile_seconds)
    doublings = 0.0 if device.is_cpu else math.log2(machine.world)
    seconds["scale"] = sum(seconds.values()) * device.scale * doublings
    model_flops = sum(part.flops * part.count for part in case.parts)
    return seconds, model_flops * dims.tp * micro_batches * dims.dp_cp


def _exchange_seconds(case: Case) -> float:
    """What sending a micro-batch's tokens to experts and back takes.

    With `Device.dispatch` a token goes once to each worker that has any of its k experts, and from
    node to node once to each such node, which passes it on (DeepEP, https://github.com/deepseek-ai/
    DeepEP); results come back as sums.
    """
    dims = case.candidate.dims
    device = case.machine.device
    links = case.machine.links
    sent_bytes = case.expert_bytes * device.exchange
    if not device.dispatch:
        return links.exchange(sent_bytes, dims.ep, dims.tp)
    nodes = links.nodes(dims.ep, dims.tp)
    return links.exchange(
        sent_bytes,
        dims.ep,
        dims.tp,
        share_within=chosen_share(case.expert_workers, *case.experts),
        share_across=chosen_share(nodes, *case.experts),
    )


def chosen_share(groups: int, experts: int, top_k: int) -> float:
    """To how many groups of experts a token goes on average, for each of its experts.

    A group has none of k experts that are chosen by chance with the probability
    C(E - E/groups, k) / C(E, k).

    Args:
        groups: Into which the experts are split.
        experts: E.
        top_k: k.
    """
    others = experts - experts // groups
    chosen = 1 - math.comb(others, top_k) / math.comb(experts, top_k)
    return groups * chosen / top_k


def _launching_seconds(case: Case) -> float:
    """What the host needs to launch a micro-batch's kernels and collectives of sharded units."""
    device = case.machine.device
    is_sharded = case.candidate.dims.dp_cp > 1 and case.candidate.strategy.is_sharded
    unit_seconds = device.unit_operations * device.operation if is_sharded else 0.0
    seconds_of_parts = []
    for part in case.parts:
        launches = part.launch_forward_seconds + part.launch_backward_seconds
        seconds_of_parts.append(launches + 2 * unit_seconds * part.is_block)
    return case.sum_of_parts(seconds_of_parts)


def _add_tensor(case: Case, exposed: Exposed) -> None:
    """The collectives of tensor parallelism, less what products hide."""
    candidate = case.candidate
    tp = candidate.dims.tp
    links = case.machine.links
    if tp == 1:
        return
    sent = case.sum_of_parts([part.tp_bytes for part in case.parts])
    collectives = case.sum_of_parts([part.tp_collectives for part in case.parts])
    hop_seconds = links.hop_across if tp > links.per_node else links.hop_within
    seconds = links.gather(sent * tp / (tp - 1), tp, 1)  # with the hops of one collective
    seconds += max(collectives - 1, 0) * ((tp - 1) * hop_seconds)
    hidden = 0.0
    if case.options.async_tp and candidate.schedule not in SPLIT and sent:
        hideable_per_byte = seconds / sent * case.machine.device.async_tp
        hidden_by_part = [
            min(hideable_per_byte * part.tp_bytes, OVERLAPPABLE_SHARE * part.overlappable_seconds)
            for part in case.parts
        ]
        hidden = case.sum_of_parts(hidden_by_part)
    elif candidate.schedule not in SPLIT and sent:
        hidden = case.sum_of_parts(
            [_hidden_in_backward(case, p, seconds / sent) for p in case.parts]
        )
        exposed.hidden += hidden * candidate.micro_batches
    exposed.tensor += (seconds - hidden) * candidate.micro_batches


def _hidden_in_backward(case: Case, part: PartCost, seconds_per_byte: float) -> float:
    """Seconds of a part's tensor-parallel collectives that its backward hides."""
    hiding_seconds = case.machine.device.hidden * FIRST_LAYERS_SHARE * part.weight_gradient_seconds
    beside_weights = min(seconds_per_byte * part.tp_bytes_beside_weights, hiding_seconds)
    beside_inputs = min(seconds_per_byte * part.tp_bytes_beside_inputs, hiding_seconds)
    return beside_weights + beside_inputs


def _add_context(case: Case, exposed: Exposed) -> None:
    """What attention over a split sequence sends; a ring's messages hide behind attention."""
    candidate = case.candidate
    cp = candidate.dims.cp
    method = METHODS[case.context_method]
    if cp == 1:
        return
    for part, count in zip(case.parts, case.counts):
        sent = method.sent_bytes(
            queries=part.query_numel,
            keys=part.key_value_numel,
            cp=cp,
            itemsize=case.work.itemsize,
        )
        repeats = (part.attention_forwards, 1.0)
        for bytes_sent, times, attention_seconds in zip(sent, repeats, part.attention_seconds):
            seconds = case.machine.links.gather(bytes_sent * cp / (cp - 1), cp, candidate.dims.tp)
            left = max(0.0, seconds - attention_seconds) if method.hides_sending else seconds
            exposed.context += left * times * count * candidate.micro_batches
            exposed.hidden += (seconds - left) * times * count * candidate.micro_batches


def _add_sharded_unit(
    case: Case, part: PartCost, *, unit: UnitSize, count: int, exposed: Exposed
) -> None:
    """The collectives of a sharded part, as far as they take longer than its computation."""
    device = case.machine.device
    collectives = case.candidate.strategy.collectives(unit, case.step)
    for phase, compute_seconds in (
        ("forward", part.forward_seconds),
        ("backward", part.backward_seconds),
    ):
        of_phase = [
            collective
            for collective in collectives
            if collective.phase == phase and collective.times
        ]
        hiding_seconds = compute_seconds * device.hidden if part.is_block else 0.0
        # With some micro-batches all of the collectives run, with others a few of them only.
        previous_times = 0
        for times in sorted({collective.times for collective in of_phase}):
            together = sum(
                _collective_seconds(case, collective, part)
                for collective in of_phase
                if collective.times >= times
            )
            repeats = times - previous_times
            exposed.shard += max(together - hiding_seconds, 0.0) * repeats * count
            exposed.hidden += min(together, hiding_seconds) * repeats * count
            previous_times = times


def _collective_seconds(case: Case, collective: Collective, part: PartCost) -> float:
    """One collective over data-parallel workers for the parameters of a part."""
    dims = case.candidate.parameter_dims
    links = case.machine.links
    device = case.machine.device
    if collective.name == "all_gather" and part.is_block and case.work.precision == "fp8":
        # Trainers that multiply in 8 bits may gather the blocks' weights in 8 bits as well.
        size = collective.bytes * (device.gather or case.work.itemsize) / case.work.itemsize
        collective = replace(collective, bytes=size)
    ways = getattr(dims, collective.over)
    stride = dims.tp * (dims.dp_shard if collective.over == "dp_replicate" else 1)
    if collective.name == "all_reduce":
        return links.reduce(collective.bytes, ways, stride)
    return links.gather(collective.bytes, ways, stride)


def _add_moved_activations(case: Case, exposed: Exposed) -> None:
    """What copying saved tensors to the host and back takes longer than the computation beside it.

    While a block computes, the tensors of the block before are copied, and in backward likewise.
    The memory of a CPU is the host's, where the copies wait for nothing but hide behind nothing.
    """
    candidate = case.candidate
    device = case.machine.device
    if not candidate.moves_activations:
        return
    blocks = sum(count for part, count in zip(case.parts, case.counts) if part.is_block)
    moved = moved_blocks(blocks, is_pipeline=candidate.dims.pp > 1)
    for part, count in zip(case.parts, case.counts):
        if not part.is_block:
            continue
        bytes_per_second = device.bandwidth / 2 if device.is_cpu else device.gpu.link_host
        copy_seconds = part.moved_bytes / bytes_per_second
        times = count * moved / blocks * candidate.micro_batches
        for compute_seconds in (part.forward_seconds, part.backward_seconds):
            hidden = 0.0 if device.is_cpu else min(copy_seconds, compute_seconds)
            exposed.host += (copy_seconds - hidden) * times


def _add_gradient_average(case: Case, exposed: Exposed) -> None:
    """The all-reduce of all gradients in buckets, behind the last backward."""
    dims = case.candidate.parameter_dims
    links = case.machine.links
    size = sum(
        float(collective.bytes) * count
        for unit, count in zip(case.units, case.counts)
        for collective in case.candidate.strategy.collectives(unit, case.step)
        if collective.over == "dp_replicate"
    )
    last_bucket = min(size, case.options.bucket_mb * 2**20)
    seconds = links.reduce(size, dims.dp_replicate, dims.tp)
    last_bucket_seconds = links.reduce(last_bucket, dims.dp_replicate, dims.tp)
    backward_seconds = case.sum_of_parts([part.backward_seconds for part in case.parts])
    not_hidden = seconds - case.machine.device.hidden * backward_seconds
    left = min(seconds, max(not_hidden, last_bucket_seconds))
    exposed.hidden += seconds - left
    exposed.replicate += left


def _add_stage_sends(case: Case, micro_batch_seconds: float, exposed: Exposed) -> None:
    """An activation to the next stage and a gradient back, for each chunk.

    While the pipeline fills and drains every hop is waited for. In between, a send has the time in
    which its stage computes another micro-batch or chunk.

    Args:
        case: The layout.
        micro_batch_seconds: Of a micro-batch on a stage.
        exposed: Is added to.
    """
    candidate = case.candidate
    dims = candidate.dims
    if dims.pp == 1:
        return
    sent_bytes = max(part.stage_input_bytes for part in case.parts)
    seconds = case.machine.links.send(sent_bytes, dims.dp_cp * dims.tp)
    hiding_seconds = case.machine.device.hidden * micro_batch_seconds / candidate.chunks / 2
    steady_seconds = candidate.micro_batches * candidate.chunks * max(0.0, seconds - hiding_seconds)
    exposed.pipeline_send += 2 * (seconds * (dims.pp - 1) + steady_seconds)


def _bubble_micro_batches(candidate: Candidate) -> float:
    """The pipeline's bubble, in times of forward and backward of one micro-batch."""
    pp = candidate.dims.pp
    if pp == 1:
        return 0.0
    micro_batches = candidate.micro_batches
    share = bubble_by_formula(
        candidate.schedule,
        stages=pp,
        micro_batches=micro_batches,
        chunks=candidate.chunks,
        times=EQUAL_THIRDS,
    )
    return share * micro_batches / (1 - share)


def _orthogonal_seconds(case: Case) -> float:
    """Muon's products, which every worker computes on whole matrices, and gathering those.

    With the shorter side s and the longer l, each of five iterations multiplies (s, l) by its
    transpose, the result (s, s) by itself, and that by the matrix.
    """
    dims = case.candidate.dims
    ways = dims.tp
    if case.candidate.strategy.is_sharded:
        ways *= case.candidate.parameter_dims.dp_shard
    seconds = 0.0
    for rows, columns, count in case.orthogonalised:
        short, long = sorted((rows, columns))
        products = [(short, short, long), (short, short, short), (short, long, short)]
        sizes = np.array([(*product, 1, MUON_ITERATIONS * count) for product in products], float)
        seconds += case.machine.device.product_seconds(sizes, "bf16", 2)
        if ways > 1:
            seconds += case.machine.links.gather(4.0 * rows * columns, ways, 1) * count
    return seconds


def _optimizer_seconds(case: Case, clips: bool) -> float:
    """Reading parameters, gradients and state and writing parameters and state.

    Clipping adds an all-reduce.
    """
    candidate = case.candidate
    device = case.machine.device
    if candidate.strategy.is_sharded:
        gradient_bytes = case.sum_of_parts([unit.sharded_gradients for unit in case.units])
    else:
        gradient_bytes = case.sum_of_parts([unit.gradients for unit in case.units])
    state = STATES.get(case.step.optimizer, 2) * case.step.state_scale
    moved_bytes = gradient_bytes * (3 + 2 * state + clips)
    norm_seconds = case.machine.links.reduce(4.0, case.machine.world, 1) if clips else 0.0
    if candidate.offload:  # over PCIe: the shards up for each gathering, the gradients down
        parameter_bytes = case.sum_of_parts([unit.sharded_parameters for unit in case.units])
        sent_bytes = gradient_bytes + 2 * candidate.micro_batches * parameter_bytes
        return moved_bytes / HOST_MEMORY + norm_seconds + sent_bytes / device.gpu.link_host
    return moved_bytes / device.bandwidth + norm_seconds
