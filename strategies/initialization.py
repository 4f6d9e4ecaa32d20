"""The same initial weights under every layout, without the whole model on every device.

`build()` is seeded, so whoever calls it gets the same weights. Replicated layouts call it on every rank. Sharded ones
build the structure on `meta` (no memory), split it, give every rank memory for its own shards, and then stream the
weights out of the one real model that rank 0 built on its host: one tensor at a time is broadcast and every rank keeps
its part. A rank needs its shards and the largest single tensor; a model of 7 billion parameters needs 28 GB on rank
0's host and nowhere else.

Buffers travel too, also those that are not saved with the model (rotary tables), and so do tensors that a module keeps
as plain attributes: on meta they would have stayed empty. A model that cannot be built on meta is built on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from strategies import collectives
from strategies.dims import Layout, LayoutError
from strategies.state import shard_of

Build = Callable[[], nn.Module]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def structure(build: Build) -> tuple[nn.Module, str]:
    """The module on meta and ""; or, if it cannot be built there, the real one and why."""
    try:
        with torch.device("meta"):
            module = build()
    except Exception as error:  # whatever a model's own code does with values; a mistake is one for real too
        return build(), f"every worker builds the whole model first, because building it on meta fails: {error}"
    return module, ""


def require_parameters(module: nn.Module) -> None:
    """Raises LayoutError if there is nothing to train."""
    if not any(p.requires_grad for p in module.parameters()):
        what = "only parameters with requires_grad=False" if any(True for _ in module.parameters()) else "no parameters"
        raise LayoutError(f"the model {type(module).__name__} has {what}: there is nothing to train")


def unsynchronised(module: nn.Module, layout: Layout) -> tuple[str, ...]:
    """A sentence if the model normalises over a batch that the layout splits."""
    local = [m for m in module.modules() if isinstance(m, BATCH_NORMS) and m.training]
    if layout.dims.dp == 1 or not local:
        return ()
    kept = "those of rank 0's micro-batches" if layout.dims.dp_shard == 1 else "each worker's own, saved from rank 0"
    return (
        f"{type(local[0]).__name__} normalises over one worker's micro-batch, so this run differs from one on another "
        f"number of workers, and its running statistics are {kept}: GroupNorm, or torch.nn.SyncBatchNorm on GPUs, "
        "do not depend on the split",
    )


def materialise(module: nn.Module, device: torch.device, parameter_device: torch.device | None = None) -> None:
    """Gives meta tensors memory, uninitialised; a parameter shared by several modules stays shared."""
    made: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(place)
            if isinstance(tensor, nn.Parameter) and tensor is not empty:
                empty = nn.Parameter(empty.detach(), requires_grad=tensor.requires_grad)
            made[id(tensor)] = empty
            keep.append(tensor)
        return made[id(tensor)]

    keep: list[torch.Tensor] = []  # so that ids stay taken
    for owner in module.modules():
        for name, parameter in _parameters(owner):
            made_real = real(parameter, parameter_device or device)
            delattr(owner, name)  # or torch would read it first, which gathers what tensor parallelism has split
            setattr(owner, name, made_real)
        for name, value in [*_buffers(owner), *tensor_attributes(owner)]:
            setattr(owner, name, real(value, device))


@torch.no_grad()
def fill(module: nn.Module, source: nn.Module | None, device: torch.device, partly: bool = False) -> None:
    """Streams every tensor of rank 0's `source` (None on other ranks) into the shards of `module`. Collective.

    partly: the module holds only some of them, as a pipeline's stage does."""
    whole = dict(_tensors(source)) if source is not None else {}
    told = [_described(whole)]
    dist.broadcast_object_list(told, src=0, device=device)
    own, names = dict(_tensors(module)), {name for name, *_ in told[0]}
    odd = own.keys() - names if partly else own.keys() ^ names
    if odd:
        raise LayoutError(f"the model is not the same on meta and for real: {min(odd)} exists in one of them only")
    for name, shape, dtype, again in told[0]:
        if again:
            continue
        value = torch.empty(shape, dtype=dtype, device=device)
        if source is not None:
            value.copy_(whole[name])
        dist.broadcast(value, src=0)
        target = own.get(name)
        if target is None:
            continue
        if isinstance(target, DTensor):
            target.to_local().copy_(shard_of(value, target))
        else:
            target.copy_(value)


def _described(whole: dict[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype, bool]]:
    """Name, shape, type, and whether it is a parameter that an earlier name means too."""
    seen: set[int] = set()
    told = []
    for name, tensor in whole.items():
        again = id(tensor) in seen and isinstance(tensor, nn.Parameter)
        seen.add(id(tensor))
        told.append((name, tuple(tensor.shape), tensor.dtype, again))
    return told


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything a module holds under the names its modules know it by; aliases too."""
    for prefix, owner in module.named_modules():
        dot = prefix + "." if prefix else ""
        held = [*_parameters(owner), *_buffers(owner), *tensor_attributes(owner)]
        yield from ((dot + name, tensor) for name, tensor in held)


def _parameters(owner: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(owner.named_parameters(recurse=False, remove_duplicate=False))


def _buffers(owner: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(owner.named_buffers(recurse=False, remove_duplicate=False))


def tensor_attributes(owner: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tensors kept as plain attributes (but for those that are another pipeline stage's)."""
    values = [(name, value) for name, value in vars(owner).items() if isinstance(value, torch.Tensor)]
    return [(name, value) for name, value in values if not getattr(value, "is_placeholder", False)]


def forget_meshes(compiled: bool) -> None:
    """To be called when a process that goes on has no use for its process groups any more: frees the memory shared with
    their ranks, and what was compiled with them, if anything was."""
    collectives.release()
    if compiled:
        torch.compiler.reset()
