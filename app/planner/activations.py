"""Bytes of activations on a device at the worst moment of backward.

During the backward of a part the device has what the parts up to it have saved, 16-bit copies of
their parameters, and the part's own working memory. A stage of a pipeline has this of each
micro-batch in flight.
"""

from app.planner.case import Case
from app.planner.part_trace import AFTER
from app.planner.stages import StageParts
from strategies.activation_offloading import ON_DEVICE, moved_blocks
from strategies.pipeline.schedules import SPLIT
from strategies.pipeline.simulate import activations_by_formula, backward_moments


def worst_moment(case: Case, gradient_bytes: float) -> tuple[float, float]:
    """The moment at which activations and the gradients so far take the most, without a pipeline.

    Args:
        case: The layout.
        gradient_bytes: Bytes of all gradients that the device keeps.

    Returns:
        (bytes of activations, bytes of gradients)
    """
    strategy = case.candidate.strategy
    accumulates = case.candidate.micro_batches > 1
    # If whole gradients wait for the last micro-batch (`Cost.transient` has those), the shards
    # take their place one after the other.
    waits_for_last = (
        accumulates and strategy.is_sharded and not case.step.reduce_scatter_each_microbatch
    )
    all_gradients = 0.0 if waits_for_last else gradient_bytes
    # Gradients of earlier micro-batches exist from the start, and so do DDP's buckets.
    exist_from_start = accumulates or (strategy.averages_gradients and case.candidate.dims.tp == 1)
    saved_before = 0.0
    blocks_before = 0
    gradients_after = all_gradients
    worst = (float("-inf"), 0.0, 0.0)
    for part, unit, count in zip(case.parts, case.units, case.counts):
        part_gradients = unit.sharded_gradients if strategy.is_sharded else unit.gradients
        at_work = part.recomputed_bytes + part.working_bytes
        saved = part.saved_bytes + part.copied_bytes
        for place in {1, count}:  # of equal blocks in a row either the first or the last is worst
            if exist_from_start:
                gradients = all_gradients
            else:
                gradients = max(0.0, gradients_after - part_gradients * place)
            blocks = blocks_before + place * part.is_block
            on_device = _bytes_not_moved_yet(case, blocks)
            activations = saved_before + saved * place + at_work + on_device
            worst = max(worst, (activations + gradients, activations, gradients))
        saved_before += saved * count
        blocks_before += count * part.is_block
        gradients_after = max(0.0, gradients_after - part_gradients * count)
    _, activations, gradients = worst
    return activations, gradients


def pipeline_activations(case: Case, stage: StageParts) -> float:
    """Bytes of the micro-batches that a stage has in flight, and of the part that is at work.

    The worst moment is one at which a micro-batch goes backward through a chunk, whose later parts
    have freed what they had saved. A backward that is split keeps it for the gradients of weights.
    Outputs that were sent are kept as well (runtime.py), because backward begins with them.
    """
    candidate = case.candidate
    saved_by_part = [part.saved_bytes for part in case.parts]
    saved_by_chunk = [
        case.sum_over_parts(saved_by_part, counts) + _sent_bytes(case, counts)
        for counts in stage.chunks
    ]
    moments = backward_moments(
        candidate.schedule,
        stages=candidate.dims.pp,
        micro_batches=candidate.micro_batches,
        chunks=candidate.chunks,
        stage=stage.number,
    )
    frees = candidate.schedule not in SPLIT
    at_work = [_chunk_at_work(case, counts, frees=frees) for counts in stage.chunks]
    copied_bytes = case.sum_over_parts([part.copied_bytes for part in case.parts], stage.counts)
    worst = max(
        sum(saved * count for saved, count in zip(saved_by_chunk, live)) + at_work[chunk]
        for chunk, live in moments
    )
    return worst + copied_bytes + _bytes_not_moved_yet(case, case.blocks(stage.counts))


def activations_in_host_memory(case: Case, stage: StageParts) -> float:
    """Bytes of a worker's saved tensors that are in host memory at the same time."""
    is_pipeline = case.candidate.dims.pp > 1
    blocks = case.blocks(stage.counts)
    saved = case.sum_over_parts([part.moved_bytes for part in case.parts], stage.counts)
    moved_share = moved_blocks(blocks, is_pipeline=is_pipeline) / max(1, blocks)
    micro_batches = _micro_batches_in_flight(case, stage.number) if is_pipeline else 1
    return saved * moved_share * micro_batches


def _micro_batches_in_flight(case: Case, stage: int) -> float:
    """The micro-batches whose activations a stage of a pipeline keeps at the same time."""
    candidate = case.candidate
    activations = activations_by_formula(
        candidate.schedule,
        stages=candidate.dims.pp,
        micro_batches=candidate.micro_batches,
        chunks=candidate.chunks,
        stage=stage,
    )
    return activations / candidate.chunks


def _bytes_not_moved_yet(case: Case, blocks: int) -> float:
    """Bytes on a device of blocks whose tensors are still to be moved, or are back again.

    On a CPU, where `saved_bytes` includes the copies, the last block's tensors are not copies.

    Args:
        case: The layout.
        blocks: The number of blocks up to the one that is at work.
    """
    at_once = ON_DEVICE - 1 if case.machine.device.is_cpu else ON_DEVICE
    return max(part.moved_bytes for part in case.parts) * min(at_once, blocks)


def _chunk_at_work(case: Case, counts: tuple[int, ...], *, frees: bool) -> float:
    """Bytes of a backward through a chunk at its worst moment, beside all that the chunk has saved.

    Args:
        case: The layout.
        counts: How many of each part the chunk has.
        frees: Whether parts free what they have saved as soon as their backward is done.
    """
    present = [(part, count) for part, count in zip(case.parts, counts) if count]
    received = _sent_bytes(case, counts)  # the output's gradient, from the next stage
    freed = 0.0
    worst = received
    for part, count in reversed(present):
        worst = max(worst, part.recomputed_bytes + part.working_bytes + received - freed)
        freed += part.saved_bytes * count * frees
    return worst


def _sent_bytes(case: Case, counts: tuple[int, ...]) -> float:
    """Bytes that a chunk sends to the next stage for a micro-batch; 0 if it has the loss.

    Args:
        case: The layout.
        counts: How many of each part the chunk has.
    """
    of_blocks = [
        part.output_bytes for part, count in zip(case.parts, counts) if part.is_block and count
    ]
    has_loss = any(part.name == AFTER and count for part, count in zip(case.parts, counts))
    return of_blocks[-1] if of_blocks and not has_loss else 0.0
