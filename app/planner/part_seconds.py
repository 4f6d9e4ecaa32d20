"""Seconds that a part of a model takes on a device, added up from its kernels.

A matrix product takes as long as its size lets it (device.py), attention as long as the length of
the sequence and the width of the heads let it (fused.py), and any other operation as long as its
bytes take. Each kernel's start and end cost `Device.kernel` seconds besides. The host launches the
kernels ahead of a GPU, which waits only if all launches of a step take longer than its work
(timing.py); a CPU waits for the launches of each part.

Batched products whose rows do not begin at multiples of 16 bytes (such as heads of width 150) run
without tensor cores, and other products of 16 bits with such rows (such as the last layer for
50,257 words) run slowly.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from app.planner.device import constants
from app.planner.part_on_device import PartOnDevice

FP8_CAST_BYTES = 2.0
"""Bytes moved to cast a number of a product's operands to 8 bits.

An operand is read in 16 bits and written in 8, and used in a product of forward and one or two of
backward. On one H100 the casts of a GPT of 1.3 B move 123 GB a step; this says 133.
"""
SLOW_SHARES = {2: 0.13, 4: 0.27, 8: 0.27}
"""Share of the peak that products of 16 bits reach if rows begin at multiples of so few bytes.

A vocabulary of 50,257 makes such products: on one H100 they reach 97 to 156 TFLOP/s, with 50,258 or
50,260 words 250 to 282, with 50,264 or 50,304 579 to 759.
"""


@dataclass(frozen=True, kw_only=True)
class PhaseCost:
    """What the forward or the backward of a part takes.

    Args:
        seconds: Seconds of the device; on a CPU at least those of launching the operations.
        launch_seconds: Seconds in which the host launches the operations.
        flops: FLOPs of attention and of products.
        attention_seconds: Seconds of attention.
        product_seconds: Seconds of products.
    """

    seconds: float
    launch_seconds: float
    flops: float
    attention_seconds: float
    product_seconds: float


def phase_cost(part: PartOnDevice, phase: str) -> PhaseCost:
    """What the forward or the backward of a part takes, without what is recomputed.

    Args:
        part: The part.
        phase: forward or backward.
    """
    device = part.device
    precision = part.work.precision
    products = part.products(phase)
    product_seconds = device.product_seconds(products, precision, part.work.itemsize)
    if not device.is_cpu and part.work.itemsize < 4:
        product_seconds += _misalignment_seconds(part, phase)
    attention_rate = device.gpu.rate("bf16" if precision == "fp8" else precision)
    weighted_flops = part.values[f"weighted_attention_{phase}"]
    attention_seconds = weighted_flops / (attention_rate * device.attention)
    moved_bytes = part.values[f"moved_{phase}"]
    if precision == "fp8":
        moved_bytes += FP8_CAST_BYTES * _operand_numbers(products)
    moving_seconds = moved_bytes / device.bandwidth
    operations = part.values[f"operations_{phase}"]
    kernel_seconds = operations * device.kernel
    launch_seconds = operations * device.operation
    seconds = product_seconds + (attention_seconds + moving_seconds + kernel_seconds)
    product_flops = float(2 * products.prod(axis=1).sum())
    return PhaseCost(
        seconds=max(seconds, launch_seconds) if device.is_cpu else seconds,
        launch_seconds=launch_seconds,
        flops=part.values[f"attention_{phase}"] + product_flops,
        attention_seconds=attention_seconds,
        product_seconds=product_seconds,
    )


class CheckpointingSeconds(NamedTuple):
    """Seconds that checkpointing adds, on average over all such parts.

    Args:
        forward: Of the device, in forward; only a CPU, which is its own host, has some.
        backward: Of the device, in backward, with what is recomputed.
        launch_forward: In which the host launches the operations of forward.
        launch_backward: The same of backward, with what is recomputed.
    """

    forward: float
    backward: float
    launch_forward: float
    launch_backward: float


def checkpointing_seconds(part: PartOnDevice, forward: PhaseCost) -> CheckpointingSeconds:
    """Seconds that recomputing activations adds to a part.

    Without a compiler the host keeps and looks up in Python what a recomputed part saves, and under
    `selective` calls Python for each operation (strategies/activation_checkpointing.py).

    Args:
        part: The part.
        forward: What its forward takes without checkpointing.
    """
    device = part.device
    share = part.recomputed_share
    if not share:
        return CheckpointingSeconds(0.0, 0.0, 0.0, 0.0)
    is_full = part.fully_recomputed_share > 0
    if is_full:
        recomputation = forward.seconds
    else:
        moving_seconds = part.values["moved_forward"] / device.bandwidth
        product_seconds = forward.seconds - forward.attention_seconds - moving_seconds
        recomputation = moving_seconds + max(0.0, product_seconds) * device.again
    python_forward = 0.0
    python_again = 0.0
    # A compiler's backward has what `selective` computes again in its own kernels.
    launches_again = forward.launch_seconds if is_full or not part.is_fused else 0.0
    if not part.is_fused:
        operations = part.values["operations_forward"]
        of_operation = constants()["checkpointing"]["full" if is_full else "selective"]
        python_forward, python_again = (operations * seconds for seconds in of_operation)
    return CheckpointingSeconds(
        forward=python_forward * share if device.is_cpu else 0.0,
        backward=(recomputation + (python_again if device.is_cpu else 0.0)) * share,
        launch_forward=python_forward * share,
        launch_backward=(launches_again + python_again) * share,
    )


def _misalignment_seconds(part: PartOnDevice, phase: str) -> float:
    """Seconds that products of 16 bits lose because their rows do not begin at 16 bytes."""
    device = part.device
    precision = part.work.precision
    seconds = part.values[f"misaligned_{phase}"] / device.peak("fp32")
    for alignment, share in SLOW_SHARES.items():
        flops = part.values[f"aligned_{alignment}_{phase}"]
        slow_peak = device.gpu.rate(precision) * device.gpu.clock * share
        seconds += flops * max(0.0, 1 / slow_peak - 1 / device.peak(precision))
    return seconds


def _operand_numbers(products: npt.NDArray[np.float64]) -> float:
    """How many numbers both operands of all products have."""
    m, n, k, batch, repeats = products.T
    return float(((m * k + k * n) * batch * repeats).sum())
