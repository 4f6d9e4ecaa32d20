"""Which devices one worker may use, for the strategies that use several."""

from __future__ import annotations

import os

import torch

PRETENDED = 2
"""On a machine without GPUs this many "devices" stand for the CPU, so that the path is the same."""


def own_devices(device: torch.device) -> list[torch.device]:
    """All GPUs that are this worker's, its `device` first. Without GPUs the CPU, several times.

    Where each worker sees its own only (Ray's actors) they are all its own; where all see all of a node's (torchrun,
    Ray Train) the node's workers, by LOCAL_RANK and LOCAL_WORLD_SIZE, have equal shares.
    """
    if device.type != "cuda":
        return [device] * PRETENDED
    workers, rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    return [torch.device("cuda", index) for index in share(device.index or 0, rank, workers, torch.cuda.device_count())]


def share(first: int, rank: int, workers: int, visible: int) -> list[int]:
    """Of `visible` GPUs those of local worker `rank` of `workers`, whose device is `first`; pure."""
    each = max(1, visible // workers)
    if first == rank * each:
        return list(range(first, first + each))
    return list(range(visible)) if first == 0 else [first]


def home(several: bool, rank: int, workers: int, visible: int) -> int:
    """The GPU on which local worker `rank` of `workers` begins: its own, or the first of its share if each has several;
    pure."""
    return rank * max(1, visible // workers) if several else rank


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
