"""Which devices one worker may use, for the strategies that use several."""

from __future__ import annotations

import os

import torch

PRETENDED = 2
"""On a machine without GPUs this many "devices" stand for the CPU, so that the path is the same."""


def own_devices(device: torch.device) -> list[torch.device]:
    """All visible GPUs, divided among this node's workers (LOCAL_RANK, LOCAL_WORLD_SIZE), this worker's first.

    Without GPUs the CPU, several times.
    """
    if device.type != "cuda":
        return [device] * PRETENDED
    workers, rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    each = max(1, torch.cuda.device_count() // workers)
    own = [torch.device("cuda", rank * each + i) for i in range(each)]
    return own if device in own else [device]


def remark(name: str, devices: list[torch.device], used: int) -> tuple[str, ...]:
    """What a person should hear about a strategy that spreads a model or batch over devices and cannot."""
    if devices[0].type != "cuda":
        return (f"strategy {name} spreads over the GPUs of a machine and this one has none: everything is on the CPU",)
    if len(devices) == 1:
        return (f"strategy {name} has one GPU per worker, so nothing is spread: it is the same as one device",)
    if used < len(devices):
        return (
            f"strategy {name} leaves {len(devices) - used} of {len(devices)} GPUs idle: the model has too few blocks",
        )
    return ()
