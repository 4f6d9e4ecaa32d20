"""torch.nn.DataParallel: one process, the batch split over all GPUs of one machine (`dp`).

Every forward copies the parameters from the first GPU to the others, runs one thread per GPU on its part of the batch,
and gathers the outputs on the first; backward adds the gradients there. One optimizer, one process, nothing to launch.

Choose it only because it is there already: `ddp` keeps the copies alive, overlaps communication with backward, is not
held up by Python's interpreter lock, spreads outputs and loss too, and goes beyond one machine. It costs the parameters
to be sent twice per micro-batch (out, and gradients back), and memory for outputs and optimizer on the first GPU alone.
https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html. BatchNorm sees one GPU's part of a batch and
keeps the first GPU's statistics. On a machine without GPUs it passes everything through.
"""

from __future__ import annotations

from torch import nn

from strategies import devices
from strategies.costs import Collective, StepShape, UnitSize, replicated
from strategies.strategy import Applied, Setup, Strategy


def apply(setup: Setup) -> Applied:
    """Wraps the module, whose parameters are on the worker's first device."""
    setup.load()
    own = devices.own_devices(setup.device)
    ids = [device.index for device in own] if setup.device.type == "cuda" else None
    return Applied(nn.DataParallel(setup.module, device_ids=ids), notes=devices.remark(NAME, own, len(own)))


def collectives(unit: UnitSize, step: StepShape) -> tuple[Collective, ...]:
    """Parameters out and gradients back, for each micro-batch."""
    return (
        Collective("broadcast", "devices", unit.parameters, step.micro_batches, "forward"),
        Collective("reduce", "devices", unit.gradients, step.micro_batches, "backward"),
    )


NAME = "dp"
STRATEGY = Strategy(
    NAME,
    "the batch split over the GPUs of one process",
    replicated,
    collectives,
    apply,
    one_process=True,
    several_devices=True,
    plannable=False,
    precisions=("fp32", "bf16", "fp16"),
    reduce_dtype="is not for DataParallel, which adds gradients in float32: leave it out, or write strategy=ddp",
)
