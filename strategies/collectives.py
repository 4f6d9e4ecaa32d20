"""The one way to the accelerator for CPUs (cpu_collectives/), which may be deleted: then everything goes over gloo.

Between GPUs NCCL does all of this, and none of it is used. It is off with a torch it was not tested with.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from strategies.torch_internals import reduce_scatter_into

AllToAll = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], None]
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Versions of torch."""


def shared_memory(group: dist.ProcessGroup | None, device: torch.device) -> Any | None:
    """What averages and exchanges among the processes of one machine's CPUs, in memory that they share; None where
    `group` is not such a group, on every rank, and the caller uses torch.distributed. Collective over `group`.

    It has average_(tensor), which writes into a one-dimensional CPU tensor, and what `all_to_all` here gives.
    """
    found = _accelerator("shared_memory")
    return found.shared_memory(group, device) if found else None


def all_to_all(group: dist.ProcessGroup, device_type: str) -> AllToAll:
    """Sends rows of contiguous tensors as `torch.distributed.all_to_all_single` does: (arrived, given, how many come
    from each rank, how many go to each). Collective over `group`."""
    shared = shared_memory(group, torch.device(device_type))

    if shared is None:
        return lambda arrived, given, takes, gives: dist.all_to_all_single(arrived, given, takes, gives, group=group)

    @torch.compiler.disable
    def send(arrived: torch.Tensor, given: torch.Tensor, takes: Sequence[int], gives: Sequence[int]) -> None:
        with record_function("shared_memory:all_to_all"):  # as torch's own collectives are named in a profile
            shared.all_to_all(arrived, given, takes, gives)

    return send


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """output (n/k,) = the rank's shard of the sum of all ranks' input (n,); what to wait for, None if it is done."""
    if input.device.type == "cpu" and (found := _accelerator("reduce_scatter")):
        return found.DirectReduceScatter()(output, input, group, dist.ReduceOp.SUM)
    return reduce_scatter_into(output, input, group=group, async_op=True)


def use_direct_reduce_scatter(units: Sequence[FSDPModule], device_type: str) -> None:
    """Lets sharded modules on CPUs reduce their gradients by direct exchange; gloo itself all-reduces all of them."""
    found = _accelerator("reduce_scatter") if device_type == "cpu" else None
    for unit in units if found else ():
        unit.set_custom_reduce_scatter(found.DirectReduceScatter())  # type: ignore[union-attr]


def keep_freed_memory() -> bool:
    """Lets this process keep memory that it frees, for the next step; whether it does."""
    found = _accelerator("allocator")
    return found.keep_freed_memory() if found else False


def _accelerator(name: str) -> Any | None:
    """The module of cpu_collectives/, where it is there and torch is one it was tested with."""
    if not torch.__version__.startswith(tuple(f"{version}." for version in TESTED)):
        return None
    try:
        return importlib.import_module(f"strategies.cpu_collectives.{name}")
    except ModuleNotFoundError:
        return None
