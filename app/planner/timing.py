"""Seconds of one optimizer step, by parts.

    step = micro-batches · (forward + backward + exposed communication)
         + the pipeline's bubble + optimizer + fixed costs

Communication is that of communication.py. A GPU waits for its host where launching all kernels and
collectives of a step takes longer than running them, and for samples where copying them does.
"""

import math
from collections.abc import Mapping

import numpy as np

from app.planner.case import Case
from app.planner.communication import communication_by_cause, stage_sends
from app.planner.layouts import Candidate
from strategies.costs import STATES
from strategies.pipeline.schedules import SPLIT
from strategies.pipeline.simulate import Times, bubble_by_formula

MUON_ITERATIONS = 5
HOST_MEMORY = 20e9
"""Bytes/s of host memory that the optimizer of one GPU's shard reaches if 8 GPUs share a host."""
EQUAL_THIRDS = Times.equal(1 / 3)
"""Forward and the gradients of inputs and of weights take about a third of a micro-batch each."""


def step_seconds(
    case: Case, *, sample_bytes: float, parameter_tensors: int, clips: bool
) -> dict[str, float]:
    """Seconds of an optimizer step, by part.

    Args:
        case: The layout.
        sample_bytes: Bytes of a sample, which are copied to the device.
        parameter_tensors: The number of parameters of the model, as tensors.
        clips: Whether gradients are clipped, which takes an all-reduce.

    Returns:
        compute: forward, backward and recomputation; tensor, context, expert: exposed communication
        of those parallelisms; shard: exposed gathering of parameters and scattering of gradients;
        host: exposed copies of activations to the host and back; replicate: the exposed average of
        gradients; pipeline_send: exposed sends between stages, and what a pipeline loses beside its
        bubble; contention: computation that communication beside it slows down; bubble; optimizer;
        rest: fixed costs; on GPUs data and launch: waiting for samples, and for the host to launch
        kernels; scale: what is lost to stragglers and congestion.
    """
    candidate = case.candidate
    device = case.machine.device
    micro_batches = candidate.micro_batches

    # Of one micro-batch, on the slowest stage.
    compute = case.sum_over_parts([part.seconds for part in case.parts])
    launching = _launching_seconds(case)
    communication = communication_by_cause(case, compute)
    exposed = {cause: seconds.exposed for cause, seconds in communication.items()}
    hidden = sum(seconds.hidden for seconds in communication.values())

    # Gradients are averaged once a step, and all other communication delays every micro-batch.
    waiting = sum(exposed[cause] for cause in exposed if cause != "replicate") / micro_batches
    pipeline_loss = _pipeline_loss(case)
    busy = compute
    if candidate.dims.pp > 1 and not device.is_cpu:
        busy = max(compute, launching)  # the next stage waits for what is launched late
    micro_batch = busy * (1 + pipeline_loss) + waiting

    seconds = {
        "compute": compute * micro_batches,
        **exposed,
        "pipeline_send": stage_sends(case, micro_batch) + pipeline_loss * compute * micro_batches,
        "contention": hidden * device.contention,
        "bubble": _bubble_micro_batches(candidate) * micro_batch,
        "optimizer": _optimizer_seconds(case, clips) + _orthogonal_seconds(case),
        "rest": device.loop,
    }
    updating = device.step * parameter_tensors
    if device.is_cpu:
        seconds["rest"] += updating
    else:
        seconds["data"] = _data_seconds(case, seconds, sample_bytes)
        seconds["launch"] = _launch_seconds(case, seconds, launching * micro_batches + updating)
    doublings = 0.0 if device.is_cpu else math.log2(case.machine.world)
    seconds["scale"] = sum(seconds.values()) * device.scale * doublings
    return seconds


def step_flops(case: Case) -> float:
    """FLOPs of an optimizer step on all devices, without what is recomputed."""
    dims = case.candidate.dims
    of_micro_batch = sum(part.flops * part.count for part in case.parts)
    return of_micro_batch * dims.tp * case.candidate.micro_batches * dims.dp_cp


def _pipeline_loss(case: Case) -> float:
    """The share of computation that a pipeline loses beside its bubble."""
    if case.candidate.dims.pp == 1:
        return 0.0
    device = case.machine.device
    return device.stage + device.split * (case.candidate.schedule in SPLIT)


def _launching_seconds(case: Case) -> float:
    """Seconds in which the host launches a micro-batch's kernels and sharded units' collectives."""
    device = case.machine.device
    is_sharded = case.candidate.dims.dp_cp > 1 and case.candidate.strategy.is_sharded
    unit_seconds = device.unit_operations * device.operation if is_sharded else 0.0
    seconds_of_parts = []
    for part in case.parts:
        launches = part.launch_forward_seconds + part.launch_backward_seconds
        seconds_of_parts.append(launches + 2 * unit_seconds * part.is_block)
    return case.sum_over_parts(seconds_of_parts)


def _data_seconds(case: Case, seconds: Mapping[str, float], sample_bytes: float) -> float:
    """Seconds in which a GPU waits for samples that are copied to it.

    Args:
        case: The layout.
        seconds: Seconds of the step's other parts, during which samples are copied.
        sample_bytes: Bytes of a sample.
    """
    candidate = case.candidate
    copied_bytes = candidate.micro_batch * candidate.micro_batches * sample_bytes
    copying_seconds = copied_bytes / case.machine.device.gpu.link_host
    return max(0.0, copying_seconds - sum(seconds.values()))


def _launch_seconds(case: Case, seconds: Mapping[str, float], launching_seconds: float) -> float:
    """Seconds in which a GPU waits for its host to launch kernels.

    Args:
        case: The layout.
        seconds: Seconds of the step's other parts, during which the host launches kernels.
        launching_seconds: Seconds in which the host launches all of the step.
    """
    meanwhile_seconds = sum(seconds.values())
    if case.candidate.dims.pp > 1:  # while a stage waits for another one, its host waits too
        meanwhile_seconds = seconds["compute"]
    return max(0.0, launching_seconds - meanwhile_seconds)


def _bubble_micro_batches(candidate: Candidate) -> float:
    """How many micro-batches a stage could compute in the bubble of its pipeline."""
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
    """Seconds of gathering whole matrices for Muon, and of its products, which every worker has.

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
    """Seconds of reading parameters, gradients and state and writing parameters and state.

    Args:
        case: The layout.
        clips: Whether gradients are clipped, which adds an all-reduce.
    """
    candidate = case.candidate
    device = case.machine.device
    if candidate.strategy.is_sharded:
        gradient_bytes = case.sum_over_parts([unit.sharded_gradients for unit in case.units])
    else:
        gradient_bytes = case.sum_over_parts([unit.gradients for unit in case.units])
    state = STATES.get(case.step.optimizer, 2) * case.step.state_scale
    moved_bytes = gradient_bytes * (3 + 2 * state + clips)
    norm_seconds = case.machine.links.reduce(4.0, case.machine.world, 1) if clips else 0.0
    if candidate.offload:  # over PCIe: the shards up for each gathering, the gradients down
        parameter_bytes = case.sum_over_parts([unit.sharded_parameters for unit in case.units])
        sent_bytes = gradient_bytes + 2 * candidate.micro_batches * parameter_bytes
        return moved_bytes / HOST_MEMORY + norm_seconds + sent_bytes / device.gpu.link_host
    return moved_bytes / device.bandwidth + norm_seconds
