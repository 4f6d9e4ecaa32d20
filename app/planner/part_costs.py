"""What a part of a model takes on a device: seconds, added up from its kernels, and memory.

A matrix product takes as long as its size lets it (device.py), attention as long as the length of
the sequence and the width of the heads let it (fused.py), and any other operation as long as its
bytes take. Each kernel's start and end cost `Device.kernel` seconds besides. The host launches the
kernels ahead of a GPU, which waits only if all launches of a step take longer than its work
(timing.py); a CPU waits for the launches of each part. A compiled block moves the bytes and
launches the kernels of fused operations (fusion.py), with which it also orders the rows of several
samples for the collectives of tensor parallelism.

Batched products whose rows do not begin at multiples of 16 bytes (such as heads of width 150) run
without tensor cores, and others of 16 bits (such as the last layer for 50,257 words) slowly.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from app.planner.device import Device
from app.planner.model_costs import ModelCosts, PartCosts
from app.planner.read import AUTOCAST, CAST, PLAIN, Variant
from app.planner.trace import AFTER
from strategies.activation_checkpointing import kept_bytes, recomputed_blocks
from strategies.costs import FLOAT32_BYTES
from strategies.dims import checkpoint_every
from strategies.options import Options

FUSED_VALUES = ("moved_forward", "moved_backward", "operations_forward", "operations_backward")
"""The values of a trace that a compiler makes smaller."""
MOVED_VALUES = ("moved_forward", "moved_backward", "fused_moved_forward", "fused_moved_backward")
"""The values of a trace that are bytes read and written."""


FP8_CAST_BYTES = 2.0
"""Bytes moved to cast a number of a product's operands to 8 bits.

An operand is read in 16 bits and written in 8, and used in a product of forward and one or two of
backward. On one H100 the casts of a GPT of 1.3 B move 123 GB a step; this says 133.
"""
FP8_SAVED = 0.64
"""Share of what a compiled block saves in 16 bits that it saves with `train.precision=fp8`.

Measured of a GPT of 1.3 B on one H100 (experiments/benchmarks/gpu_first/one_gpu.csv).
"""


SLOW_SHARES = {2: 0.13, 4: 0.27, 8: 0.27}
"""Share of the peak that products of 16 bits reach if rows begin at multiples of so few bytes.

A vocabulary of 50,257 makes such products: on one H100 they reach 97 to 156 TFLOP/s, with 50,258 or
50,260 words 250 to 282, with 50,264 or 50,304 579 to 759.
"""


EXCHANGE_OPERATIONS = {"forward": 19, "backward": 6}
"""Operations with which a mixture sends tokens to other workers (strategies/expert/exchange.py).

They come beside those of a mixture that has all of its experts, which a trace counts. The host
waits for how many rows to send, so that no compiler has them.
"""


class Work(NamedTuple):
    """What a worker does with a micro-batch, as far as the costs of parts depend on it.

    Args:
        batch: Samples; a fraction of one if context parallelism splits the sequence.
        samples: Those of which the worker has all or a part.
        tp: The degree of tensor parallelism.
        precision: fp32, bf16, fp16 or fp8.
        variant: Which computation of the model a worker runs.
        checkpointing: The mode of activation checkpointing.
        moves_activations: Whether blocks keep what they save in host memory.
        ep: Over how many workers the experts of a mixture are split.
    """

    batch: float
    samples: int
    tp: int
    precision: str
    variant: Variant
    checkpointing: str
    moves_activations: bool = False
    ep: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of a number in matrix products."""
        return 4 if self.precision == "fp32" else 2


def variant_of(
    *, is_sharded: bool, tp: int, pp: int, precision: str, weight_dtype: str = Options.weight_dtype
) -> Variant:
    """Which computation of the model a layout runs.

    Sharded layouts and weights in 16 bits cast every number to 16 bits; the others use autocast.

    Args:
        is_sharded: Whether data-parallel workers shard the parameters, and gather them in the type
            of products; or another trainer keeps them in it.
        tp: The degree of tensor parallelism.
        pp: The number of pipeline stages.
        precision: fp32, bf16, fp16 or fp8.
        weight_dtype: What weights are kept in, fp32 or bf16.
    """
    if precision == "fp32":
        casting = PLAIN
    elif is_sharded or weight_dtype != "fp32":
        casting = CAST
    else:
        casting = AUTOCAST
    return Variant(casting, whole_model=tp * pp == 1)


@dataclass(frozen=True, kw_only=True)
class PartCost:
    """What one part of the model costs a tensor-parallel worker for one micro-batch.

    Args:
        name: The part's name (trace.py).
        count: How many such parts the model has.
        forward_seconds: Of the device; on a CPU at least what launching the operations takes.
        backward_seconds: The same of backward, with what is recomputed.
        launch_forward_seconds: What the host needs to launch the operations of forward.
        launch_backward_seconds: The same of backward, with what is recomputed.
        flops: Of forward and backward, without what is recomputed.
        saved_bytes: Kept by each micro-batch until its backward, without `copied_bytes`.
        recomputed_bytes: Saved again while the part is recomputed.
        working_bytes: Alive at the worst moment of forward or backward, beyond what is saved.
        stage_input_bytes: What a pipeline sends to the stage that begins with this part.
        tp_bytes: What tensor parallelism sends.
        tp_collectives: In how many collectives.
        tp_bytes_beside_weights: Of `tp_bytes`, what is sent beside the products for the gradients
            of weights.
        tp_bytes_beside_inputs: The same of inputs.
        query_numel: Numbers in the queries of attention.
        key_value_numel: Numbers in its keys and values.
        attention_forwards: How often the forward of attention runs, with recomputation.
        attention_seconds: Of attention, (in one forward, in backward).
        overlappable_seconds: Of the products that can run beside the collectives of tensor
            parallelism: in forward, in recomputation, and for the gradients of inputs.
        weight_gradient_seconds: Of the products for the gradients of weights; those of inputs take
            as long.
        moved_bytes: Kept as `saved_bytes` are, but in host memory.
        copied_bytes: 16-bit copies of parameters, which micro-batches share: made in forward, and
            kept until the part's backward.
        output_bytes: What a block gives to the next part: a stage of a pipeline keeps its last
            block's until the micro-batch goes backward, and gets as large a gradient.
        cached_bytes: Those that autocast has until the end of forward and no backward reads, as the
            part is recomputed. `working_bytes` of what is behind the blocks has them, where that is
            in forward.
    """

    name: str
    count: int
    forward_seconds: float
    backward_seconds: float
    launch_forward_seconds: float
    launch_backward_seconds: float
    flops: float
    saved_bytes: float
    recomputed_bytes: float
    working_bytes: float
    stage_input_bytes: float
    tp_bytes: float
    tp_collectives: float
    query_numel: float = 0.0
    key_value_numel: float = 0.0
    attention_forwards: float = 1.0
    attention_seconds: tuple[float, float] = (0.0, 0.0)
    overlappable_seconds: float = 0.0
    tp_bytes_beside_weights: float = 0.0
    tp_bytes_beside_inputs: float = 0.0
    weight_gradient_seconds: float = 0.0
    moved_bytes: float = 0.0
    copied_bytes: float = 0.0
    output_bytes: float = 0.0
    cached_bytes: float = 0.0

    @property
    def is_block(self) -> bool:
        """Whether it is one of the repeating blocks."""
        return self.name.startswith("block")

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, kw_only=True)
class _PhaseCost:
    """What forward or backward of a part takes, in seconds and FLOPs."""

    seconds: float
    launch_seconds: float
    flops: float
    attention_seconds: float
    product_seconds: float


class _Recomputed(NamedTuple):
    """The shares of blocks that activation checkpointing runs again.

    Args:
        recomputed: Those of which at least something is recomputed.
        fully: Those that are recomputed as a whole; `selective` keeps the results of products and
            collectives.
    """

    recomputed: float
    fully: float


def part_costs(
    model: ModelCosts,
    work: Work,
    device: Device,
    *,
    compiles_blocks: bool,
    compiles_loss: bool = False,
) -> list[PartCost]:
    """The cost of every part of a model, in the order of forward.

    Args:
        model: The costs of the parts for any batch and tensor-parallel degree.
        work: What a worker does with a micro-batch.
        device: The device that does it.
        compiles_blocks: Whether torch.compile compiles the blocks.
        compiles_loss: Whether the loss is compiled on a GPU that has whole logits.
    """
    costs: list[PartCost] = []
    cached_bytes = 0.0
    for name in model.parts:
        if name.startswith("block"):
            is_compiled = compiles_blocks
        else:
            # Logits that tensor parallelism splits have a loss of their own, which is not compiled.
            is_compiled = name == AFTER and compiles_loss and work.tp == 1
        is_fused = is_compiled and not device.is_cpu
        cost = _part_cost(
            model, name, work=work, device=device, is_fused=is_fused, cached_bytes=cached_bytes
        )
        costs.append(cost)
        cached_bytes += cost.cached_bytes * cost.count
    return costs


def _part_cost(
    model: ModelCosts,
    name: str,
    *,
    work: Work,
    device: Device,
    is_fused: bool,
    cached_bytes: float,
) -> PartCost:
    """The cost of one part.

    Args:
        model: The costs of the parts for any batch and tensor-parallel degree.
        name: The part's name.
        work: What a worker does with a micro-batch.
        device: The device that does it.
        is_fused: Whether a GPU's kernels of the part are a compiler's.
        cached_bytes: What autocast has of the parts before it until the end of forward only.
    """
    part = model.parts[name]
    is_block = name.startswith("block")
    values = part.at(work.batch, work.tp)
    if work.ep > 1:
        for kind in MOVED_VALUES:
            values[kind] -= _bytes_of_other_experts(model, name, kind, work)
    if is_fused:
        for kind in FUSED_VALUES:
            values[kind] = min(values[kind], values[f"fused_{kind}"])
    elif work.samples > 1:
        for phase in ("forward", "backward"):
            values[f"moved_{phase}"] += values[f"rearranged_{phase}"]
    if work.ep > 1 and any(parameter.is_expert for parameter in model.parameters[name]):
        for phase, operations in EXCHANGE_OPERATIONS.items():
            values[f"operations_{phase}"] += operations
    if work.precision == "fp8" and not is_block:  # fp8 is for the linear layers of blocks only
        work = work._replace(precision="bf16")
    if name == AFTER and device.logits:
        products = part.products_at("forward", work.batch, work.tp)
        values["moved_forward"] += device.logits * _logits(products)
    forward = _phase_cost(part, values, phase="forward", work=work, device=device)
    backward = _phase_cost(part, values, phase="backward", work=work, device=device)
    shares = _Recomputed(0.0, 0.0)
    if is_block:
        shares = _recomputed_shares(work.checkpointing, len(model.order))
    # A compiled block of a pipeline or of tensor parallelism saves copies of parameters for each
    # micro-batch.
    has_own_copies = is_fused and is_block and not work.variant.whole_model
    copies = 0.0 if has_own_copies else values["copies"]
    saved_bytes, recomputed_bytes = _saved_bytes(
        values,
        shares,
        work=work,
        device=device,
        has_fused_backward=is_fused and is_block,
        copies=copies,
    )
    copies = max(0.0, copies - _copies_of_other_experts(model, name, work))
    # The worst moment of what is behind the blocks may be one of forward. A stage of a pipeline has
    # few of the blocks.
    forward_bytes = cached_bytes if name == AFTER and work.variant.whole_model else 0.0
    working_bytes = part.working_bytes(work.batch, work.tp, forward_bytes)
    if name == AFTER:
        loss_bytes = _loss_bytes(part, work, device)
        working_bytes = max(working_bytes, loss_bytes - saved_bytes)
    moved_bytes = 0.0
    if is_block and work.moves_activations:
        moved_bytes = _moved_bytes(saved_bytes, values, shares)
    return PartCost(
        name=name,
        count=model.counts[name],
        forward_seconds=forward.seconds,
        backward_seconds=backward.seconds + _recompute_seconds(forward, values, shares, device),
        launch_forward_seconds=forward.launch_seconds,
        launch_backward_seconds=backward.launch_seconds + forward.launch_seconds * shares.fully,
        flops=forward.flops + backward.flops,
        # The memory of a CPU is the host's, so that nothing leaves it.
        saved_bytes=saved_bytes if device.is_cpu else saved_bytes - moved_bytes,
        recomputed_bytes=recomputed_bytes,
        working_bytes=working_bytes,
        stage_input_bytes=values["crossing"],
        # Backward repeats the collectives of forward, and gathers inputs again. If the part is
        # recomputed, its recomputation gathers them: three times those of forward in all.
        tp_bytes=values["sent"] * (1 - shares.fully) + 3 * values["sent_forward"] * shares.fully,
        tp_collectives=(
            values["collectives"] * (1 - shares.fully)
            + 3 * values["collectives_forward"] * shares.fully
        ),
        query_numel=values["queries"],
        key_value_numel=values["keys"],
        attention_forwards=1 + shares.recomputed,
        attention_seconds=(forward.attention_seconds, backward.attention_seconds),
        overlappable_seconds=(
            forward.product_seconds * (1 + shares.fully) + backward.product_seconds / 2
        ),
        # Compiled code gathers in one operation, and multiplies in autograd's order.
        tp_bytes_beside_weights=(0.0 if is_fused else values["sent_beside"]),
        tp_bytes_beside_inputs=0.0 if is_fused else values["regathered"] * (1 - shares.recomputed),
        weight_gradient_seconds=backward.product_seconds / 2,
        moved_bytes=moved_bytes,
        copied_bytes=copies * (1 - shares.recomputed),
        output_bytes=values["boundary"] if is_block else 0.0,
        # A compiler's code has no cache.
        cached_bytes=0.0 if is_fused else copies * shares.recomputed,
    )


def _copies_of_other_experts(model: ModelCosts, name: str, work: Work) -> float:
    """Bytes of a trace's 16-bit copies of those experts that other workers have."""
    if work.ep == 1 or work.variant.casting != AUTOCAST:
        return 0.0
    experts = (parameter for parameter in model.parameters[name] if parameter.is_expert)
    numbers = sum(expert.numel for expert in experts if expert.itemsize == FLOAT32_BYTES)
    return numbers * work.itemsize * (1 - 1 / work.ep)


def _bytes_of_other_experts(model: ModelCosts, name: str, kind: str, work: Work) -> float:
    """What a trace with all experts reads and writes of those that other workers have.

    What does not grow with the batch is read and written of the parameters, such as sums of their
    gradients, and of each of them as much as it is large. A worker has one in `ep` experts.

    Args:
        model: The costs of the parts.
        name: The part's name.
        kind: One of `MOVED_VALUES`.
        work: What a worker does with a micro-batch.
    """
    part = model.parts[name]
    numbers = sum(parameter.numel for parameter in model.parameters[name])
    of_experts = sum(p.numel for p in model.parameters[name] if p.is_expert)
    if not of_experts or kind not in part.values:
        return 0.0
    of_parameters = part.at(0.0, work.tp)[kind]
    return of_parameters * of_experts / numbers * (1 - 1 / work.ep)


def _recomputed_shares(mode: str, blocks: int) -> _Recomputed:
    recomputed = recomputed_blocks(mode, blocks) / blocks
    return _Recomputed(recomputed, recomputed if checkpoint_every(mode) else 0.0)


def _recompute_seconds(
    forward: _PhaseCost, values: dict[str, float], shares: _Recomputed, device: Device
) -> float:
    """The time of recomputation in backward, on average over the blocks."""
    if shares.fully:
        return forward.seconds * shares.fully
    moving_seconds = values["moved_forward"] / device.bandwidth
    product_seconds = forward.seconds - forward.attention_seconds - moving_seconds
    selective_seconds = moving_seconds + max(0.0, product_seconds) * device.again
    return selective_seconds * shares.recomputed


def _saved_bytes(
    values: dict[str, float],
    shares: _Recomputed,
    *,
    work: Work,
    device: Device,
    has_fused_backward: bool,
    copies: float,
) -> tuple[float, float]:
    """What a part keeps for backward, on average over the blocks.

    Args:
        values: Of the part's trace.
        shares: The shares of blocks that are run again.
        work: What a worker does with a micro-batch.
        device: The device that does it.
        has_fused_backward: Whether a compiler makes the backward.
        copies: Bytes of 16-bit copies of parameters that micro-batches share.

    Returns:
        (bytes of each micro-batch, without such copies; bytes that are there again once the part is
        recomputed)
    """
    saved = values["saved"]
    if has_fused_backward:  # torch.compile's partitioner saves as little as it can
        saved -= values["fusible"]
        if work.precision == "fp8":
            saved *= FP8_SAVED
    checkpointed = saved
    needed_in_backward = values["saved"]
    if shares.recomputed:
        results = values["kept"] * (1 - device.again)
        checkpointed = kept_bytes(
            work.checkpointing,
            saved_bytes=saved,
            selective_bytes=results,
            input_bytes=values["boundary"],
        )
        needed_in_backward += values["regathered"]
    average = checkpointed * shares.recomputed + saved * (1 - shares.recomputed)
    return (
        average - copies * (1 - shares.recomputed),
        max(0.0, needed_in_backward - checkpointed),
    )


def _moved_bytes(saved_bytes: float, values: dict[str, float], shares: _Recomputed) -> float:
    """What of a block's saved bytes waits in host memory: all but what `selective` keeps."""
    results_stay = shares.recomputed - shares.fully
    inputs = values["boundary"] * results_stay
    return min(saved_bytes, saved_bytes * (1 - results_stay) + inputs)


def _operand_numbers(products: npt.NDArray[np.float64]) -> float:
    """How many numbers both operands of all products have."""
    m, n, k, batch, repeats = products.T
    return float(((m * k + k * n) * batch * repeats).sum())


def _logits(products: npt.NDArray[np.float64]) -> float:
    """How many numbers the last layer gives: the results of the widest of these products.

    Others give gradients that a loss in chunks computes in forward.
    """
    m, n, _, batch, repeats = products.T
    is_widest = n > 0.99 * n.max(initial=0.0)
    return float((m * n * batch * repeats)[is_widest].sum())


def _loss_bytes(part: PartCosts, work: Work, device: Device) -> float:
    """Bytes of another trainer's loss, if one is described; else 0."""
    all_logits = _logits(part.products_at("forward", work.batch, 1))
    logits_of_worker = _logits(part.products_at("forward", work.batch, work.tp))
    return max(device.loss_memory * all_logits, device.split_loss_memory * logits_of_worker)


def _phase_cost(
    part: PartCosts, values: dict[str, float], *, phase: str, work: Work, device: Device
) -> _PhaseCost:
    """Forward or backward of a part: the time of products, attention, moved bytes and kernels."""
    products = part.products_at(phase, work.batch, work.tp)
    product_seconds = device.product_seconds(products, work.precision, work.itemsize)
    if not device.is_cpu and work.itemsize < 4:
        product_seconds += values[f"misaligned_{phase}"] / device.peak("fp32")
        for alignment, share in SLOW_SHARES.items():
            flops = values[f"aligned_{alignment}_{phase}"]
            slow_peak = device.gpu.rate(work.precision) * device.gpu.clock * share
            product_seconds += flops * max(0.0, 1 / slow_peak - 1 / device.peak(work.precision))
    attention_rate = device.gpu.rate("bf16" if work.precision == "fp8" else work.precision)
    attention_seconds = values[f"weighted_attention_{phase}"] / (attention_rate * device.attention)
    moved_bytes = values[f"moved_{phase}"]
    if work.precision == "fp8":
        moved_bytes += FP8_CAST_BYTES * _operand_numbers(products)
    moving_seconds = moved_bytes / device.bandwidth
    operations = values[f"operations_{phase}"]
    kernel_seconds = operations * device.kernel
    launch_seconds = operations * device.operation
    device_seconds = product_seconds + (attention_seconds + moving_seconds + kernel_seconds)
    product_flops = float(2 * products.prod(axis=1).sum())
    return _PhaseCost(
        seconds=max(device_seconds, launch_seconds) if device.is_cpu else device_seconds,
        launch_seconds=launch_seconds,
        flops=values[f"attention_{phase}"] + product_flops,
        attention_seconds=attention_seconds,
        product_seconds=product_seconds,
    )
