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

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from strategies.costs import Cost, ModelSize, replicated


class Spread(nn.DataParallel):
    """DataParallel that says, once, when a batch has fewer rows than there are devices."""

    said = False

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        parts = super().scatter(inputs, kwargs, device_ids)
        if len(parts[0]) < len(device_ids) and not self.said:
            self.said = True
            warnings.warn(
                f"strategy dp: a batch of {len(parts[0])} rows leaves {len(device_ids) - len(parts[0])} of "
                f"{len(device_ids)} GPUs idle: raise train.micro_batch_size",
                stacklevel=2,
            )
        return parts


def apply(module: nn.Module, devices: list[torch.device]) -> nn.DataParallel:
    """Wraps a module whose parameters are on the first device."""
    return Spread(module, device_ids=[device.index for device in devices] if devices[0].type == "cuda" else None)


def cost(size: ModelSize, devices: int, micro_batches: int = 1, optimizer: str = "adamw") -> Cost:
    """Of the first GPU: everything whole; parameters out and gradients back, for each micro-batch."""
    whole = replicated(size, optimizer)
    others = devices - 1
    sent = {"broadcast": whole.parameters * others * micro_batches, "reduce": whole.gradients * others * micro_batches}
    return replace(whole, sent=sent)
