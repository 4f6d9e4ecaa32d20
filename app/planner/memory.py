"""Bytes of a layout on the fullest device, by kind, and in host memory.

The strategies say what parameters, gradients and optimizer state take, and what they gather or have
in flight (`Strategy.cost`). The peak is the worst moment of backward (activations.py) or the
optimizer's step, whichever takes more.
"""

from collections.abc import Callable
from dataclasses import replace

from app.planner.activations import (
    activations_in_host_memory,
    pipeline_activations,
    worst_moment,
)
from app.planner.case import Case
from app.planner.device import Device
from app.planner.stages import StageParts, Stages
from strategies.costs import FLOAT32_BYTES, STEP_COPIES, RankSize

SizeOnRank = Callable[[tuple[int, ...]], RankSize]
"""What one rank holds of a stage, by how many of each part the stage has."""


def memory_on_device(case: Case, stages: Stages, size_on_rank: SizeOnRank) -> dict[str, float]:
    """Bytes on the fullest device, by kind.

    Args:
        case: The layout.
        stages: The stages of its pipeline, or the whole model as one.
        size_on_rank: Gives what one rank holds of a stage.
    """
    memory_of_stages = [
        _memory_of_stage(case, stage, size_on_rank(stage.counts))
        for stage in stages.candidates_for_fullest
    ]
    fullest = max(memory_of_stages, key=lambda memory: sum(memory.values()))
    margin = sum(fullest.values()) * case.machine.device.fragmentation
    return {**fullest, "margin": margin}


def memory_on_host(case: Case, stages: Stages, size_on_rank: SizeOnRank) -> float:
    """Bytes of a host's memory that hold what is offloaded from its GPUs.

    Args:
        case: The layout.
        stages: The stages of its pipeline, or the whole model as one.
        size_on_rank: Gives what one rank holds of a stage.
    """
    candidate = case.candidate
    machine = case.machine
    bytes_of_gpu = 0.0
    if candidate.offload:
        cost = candidate.strategy.cost(size_on_rank(stages.slowest), case.step)
        bytes_of_gpu += float(cost.parameters + cost.gradients + cost.optimizer)
    if candidate.moves_activations and not machine.device.is_cpu:
        bytes_of_gpu += max(
            activations_in_host_memory(case, stage) for stage in stages.candidates_for_fullest
        )
    return bytes_of_gpu * min(machine.per_node, machine.world)


def _memory_of_stage(case: Case, stage: StageParts, size: RankSize) -> dict[str, float]:
    """Bytes on a device of a stage, by kind, without the margin."""
    candidate = case.candidate
    strategy = candidate.strategy
    step = case.step
    if case.machine.device.kept_weights:
        step = replace(step, reshard_after_forward=False)
    cost = strategy.cost(size, step)
    is_on_device = not candidate.offload
    if candidate.dims.pp > 1:
        activations = pipeline_activations(case, stage)
        gradients_at_peak = 0.0 if strategy.is_sharded else float(cost.gradients)
    else:
        # Offloaded gradients are not on the device at any moment.
        gradients_on_device = float(cost.gradients) if is_on_device else 0.0
        activations, gradients_at_peak = worst_moment(case, gradients_on_device)
    # The optimizer's step comes when activations and gathered parameters are gone.
    copies = step_copies(case.machine.device, step.optimizer) * float(cost.gradients)
    optimizer = float(cost.optimizer)
    optimizer += max(0.0, copies - activations - float(cost.transient))
    # All gradients are counted below, but at the peak of activations some are still to come.
    missing_gradients = (cost.gradients - gradients_at_peak) * is_on_device
    return {
        "parameters": cost.parameters * is_on_device + _copied_weights(case, size),
        "gradients": cost.gradients * is_on_device,
        "optimizer": optimizer * is_on_device,
        "activations": max(activations - missing_gradients, 0.0),
        "communication": float(cost.transient),
        "buffers": float(cost.buffers),
    }


def _copied_weights(case: Case, size: RankSize) -> float:
    """Bytes of copies of weights that another trainer keeps for the whole step."""
    candidate = case.candidate
    device = case.machine.device
    copies = 0.0
    if candidate.precision == "fp8":
        copies += size.blocks * device.weight_copies
    # Sharded strategies gather such copies, which `Cost.transient` counts.
    is_narrow = case.options.weight_dtype != "fp32" or candidate.precision == "fp32"
    if device.shared_copies and not candidate.strategy.is_sharded and not is_narrow:
        copies += size.parameters / FLOAT32_BYTES * case.work.itemsize
    return copies


def step_copies(device: Device, optimizer: str) -> float:
    """Copies of a worker's trained parameters that the optimizer's step makes.

    Args:
        device: The device of the worker.
        optimizer: The name of the optimizer.
    """
    copies = 0 if device.is_cpu else STEP_COPIES.get(optimizer, 0)
    return max(device.update, float(copies))
