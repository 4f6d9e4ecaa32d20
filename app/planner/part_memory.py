"""Bytes that a part of a model keeps for its backward, and those that it needs while at work."""

from typing import NamedTuple

from app.planner.part_on_device import PartOnDevice, result_numbers_of_widest
from app.planner.part_trace import AFTER
from app.planner.read import AUTOCAST
from strategies.activation_checkpointing import kept_bytes
from strategies.costs import FLOAT32_BYTES

FP8_SAVED = 0.64
"""Share of what a compiled block saves in 16 bits that it saves with `train.precision=fp8`.

Measured of a GPT of 1.3 B on one H100 (experiments/benchmarks/gpu_first/one_gpu.csv).
"""


class PartMemory(NamedTuple):
    """The memory of one part for one micro-batch, on average over all such parts.

    `PartCost` explains the fields, which it has too.
    """

    saved_bytes: float
    recomputed_bytes: float
    working_bytes: float
    moved_bytes: float
    copied_bytes: float
    cached_bytes: float


def part_memory(part: PartOnDevice, cached_bytes: float) -> PartMemory:
    """The memory of a part.

    Args:
        part: The part.
        cached_bytes: Bytes that autocast keeps of the parts before it until the end of forward.
    """
    # A compiled block of a pipeline or of tensor parallelism saves copies of parameters for each
    # micro-batch.
    has_own_copies = part.is_fused and part.is_block and not part.work.variant.whole_model
    copies = 0.0 if has_own_copies else part.values["copies"]
    saved, recomputed = _saved_bytes(part, copies)
    moved = _moved_bytes(part, saved)
    copies = max(0.0, copies - _copies_of_other_experts(part))
    return PartMemory(
        # The memory of a CPU is the host's, so that nothing leaves it.
        saved_bytes=saved if part.device.is_cpu else saved - moved,
        recomputed_bytes=recomputed,
        working_bytes=_working_bytes(part, saved, cached_bytes),
        moved_bytes=moved,
        copied_bytes=copies * (1 - part.recomputed_share),
        # A compiler's code has no cache.
        cached_bytes=0.0 if part.is_fused else copies * part.recomputed_share,
    )


def _saved_bytes(part: PartOnDevice, copies: float) -> tuple[float, float]:
    """What a part keeps for backward, on average over all such parts.

    Args:
        part: The part.
        copies: Bytes of 16-bit copies of parameters that micro-batches share.

    Returns:
        (bytes of each micro-batch, without such copies; bytes that are there again once the part is
        recomputed)
    """
    share = part.recomputed_share
    saved = part.values["saved"]
    if part.is_fused and part.is_block:  # torch.compile's partitioner saves as little as it can
        saved -= part.values["fusible"]
        if part.work.precision == "fp8":
            saved *= FP8_SAVED
    checkpointed = saved
    needed_in_backward = part.values["saved"]
    if share:
        checkpointed = kept_bytes(
            part.work.checkpointing,
            saved_bytes=saved,
            selective_bytes=part.values["kept"] * (1 - part.device.again),
            input_bytes=part.values["boundary"],
        )
        needed_in_backward += part.values["regathered"]
    average = checkpointed * share + saved * (1 - share)
    return average - copies * (1 - share), max(0.0, needed_in_backward - checkpointed)


def _moved_bytes(part: PartOnDevice, saved_bytes: float) -> float:
    """Bytes of a part's saved tensors that wait in host memory: all but what `selective` keeps."""
    if not part.is_block or not part.work.moves_activations:
        return 0.0
    share_that_stays = part.recomputed_share - part.fully_recomputed_share
    inputs = part.values["boundary"] * share_that_stays
    return min(saved_bytes, saved_bytes * (1 - share_that_stays) + inputs)


def _copies_of_other_experts(part: PartOnDevice) -> float:
    """Bytes of a trace's 16-bit copies of those experts that other workers have."""
    work = part.work
    if work.ep == 1 or work.variant.casting != AUTOCAST:
        return 0.0
    experts = (parameter for parameter in part.parameters if parameter.is_expert)
    numbers = sum(expert.numel for expert in experts if expert.itemsize == FLOAT32_BYTES)
    return numbers * work.itemsize * (1 - 1 / work.ep)


def _working_bytes(part: PartOnDevice, saved_bytes: float, cached_bytes: float) -> float:
    """Bytes at the worst moment of forward or backward, beyond what is saved.

    Args:
        part: The part.
        saved_bytes: What it saves.
        cached_bytes: Bytes that autocast keeps of the parts before it until the end of forward.
    """
    work = part.work
    if part.name != AFTER:
        return part.costs.working_bytes(work.batch, work.tp)
    # The worst moment of what is behind the blocks may be one of forward. A stage of a pipeline has
    # few of the blocks.
    forward_bytes = cached_bytes if work.variant.whole_model else 0.0
    working_bytes = part.costs.working_bytes(work.batch, work.tp, forward_bytes)
    return max(working_bytes, _loss_bytes(part) - saved_bytes)


def _loss_bytes(part: PartOnDevice) -> float:
    """Bytes of another trainer's loss, if one is described; otherwise 0."""
    whole_products = part.costs.products_at("forward", part.work.batch, 1)
    all_logits = result_numbers_of_widest(whole_products)
    logits_of_worker = result_numbers_of_widest(part.products("forward"))
    device = part.device
    return max(device.loss_memory * all_logits, device.split_loss_memory * logits_of_worker)
