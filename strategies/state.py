"""The same weights under every layout: where they begin, and how they are saved and loaded, under plain names.

**The beginning.** `build()` is seeded, so every caller gets the same weights. Replicated layouts call it on every
rank. Sharded ones build the structure on `meta` (no memory), split it, give every rank memory for its own shards, and
then stream the weights out of the one real model that rank 0 built on its host: one tensor at a time is broadcast and
every rank keeps its part. A rank needs its shards and the largest single tensor; a model of 7 billion parameters needs
28 GB on rank 0's host and nowhere else. Buffers travel too, also those that are not saved with the model (rotary
tables), and so do tensors that a module keeps as plain attributes: on meta they would have stayed empty. A model that
cannot be built on meta is built on every rank.

**Names.** Wrappers leave marks in names (DDP and DataParallel `module.`, checkpoint wrappers, torch.compile); here
nothing but DDP and DataParallel wraps at all, and state is read from inside them: names are what one device would call
them. So a checkpoint written by any layout is read by any other: names agree, tensors are whole or `DTensor`s, and
torch.distributed.checkpoint moves the parts. https://docs.pytorch.org/docs/stable/distributed.checkpoint.html

**Optimizers.** Their state is keyed by parameter name instead of by position in a list: `{"state": {name: {"exp_avg":
…}}, "groups": {…}}`. Hyperparameters belong to the configuration and are not saved; numbers of a group that an
optimizer itself keeps (a step count, an estimate of the learning rate) are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from strategies.dims import Layout, LayoutError
from strategies.tree import tree_leaves

Build = Callable[[], nn.Module]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_HYPERPARAMETERS = """
lr initial_lr betas eps weight_decay momentum dampening nesterov foreach fused maximize capturable differentiable
amsgrad decoupled_weight_decay alpha centered rho lambd t0 etas step_sizes lr_decay initial_accumulator_value
momentum_decay
"""
CONFIGURED = frozenset(_HYPERPARAMETERS.split())
"""Entries of an optimizer's parameter groups that the configuration decides."""


def structure(build: Build) -> tuple[nn.Module, str]:
    """The module on meta and ""; or, if it cannot be built there, the real one and why. Its parameters lie in memory in
    the order of their dimensions, as sharding needs it: a transposed one is copied."""
    try:
        with torch.device("meta"):
            module = build()
        why = _kept_in_containers(module)
    except Exception as error:  # whatever a model's own code does with values; a mistake is one for real too
        why = f"building it on meta fails: {error}"
    if why:
        module = build()
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    return module, f"every worker builds the whole model first, because {why}" if why else ""


def _kept_in_containers(module: nn.Module) -> str:
    """Which tensors a module keeps where `fill` does not find them: in a list, a tuple or a dict of its own."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if name in ("_parameters", "_buffers", "_modules") or not isinstance(value, (list, tuple, dict)):
                continue
            if any(isinstance(leaf, torch.Tensor) and id(leaf) not in known for leaf in tree_leaves(value)):
                return f"{f'{path}.{name}'.lstrip('.')} holds tensors that are neither parameters nor buffers"
    return ""


def make_dense(module: nn.Module) -> None:
    """Copies parameters between whose elements other memory lies, such as every second row of a tensor: torch's fused
    optimizers (2.13) would update them by state that lies in memory without gaps."""
    for parameter in module.parameters():
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            parameter.data = parameter.data.contiguous()


def make_gradients_dense(module: nn.Module) -> tuple[str, ...]:
    """Lets embeddings with sparse=True have dense gradients, the same numbers; a remark for the user if there are any.

    Neither sharding nor DDP's buckets nor fused optimizers nor a gradient norm take sparse ones.
    """
    tables = [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
    ]
    for _, layer in tables:
        layer.sparse = False
    if not tables:
        return ()
    others = f" and {len(tables) - 1} more" if len(tables) > 1 else ""
    return (f"{tables[0][0]}{others} has sparse=True: its gradients are dense here, of the same numbers",)


def require_parameters(module: nn.Module) -> None:
    """Raises LayoutError if there is nothing to train."""
    if not any(p.requires_grad for p in module.parameters()):
        what = "only parameters with requires_grad=False" if any(True for _ in module.parameters()) else "no parameters"
        raise LayoutError(f"the model {type(module).__name__} has {what}: there is nothing to train")


def batch_norm_notes(module: nn.Module, layout: Layout) -> tuple[str, ...]:
    """Remarks for the user if the model normalises over a batch that the layout splits."""
    norms = [type(m).__name__ for m in module.modules() if isinstance(m, BATCH_NORMS) and m.training]
    if not norms or layout.dims.dp_cp * layout.dims.pp == 1:
        return ()
    return (
        f"{norms[0]} normalises over one worker's micro-batch, so this run differs from one with micro-batches of "
        "another size, and its running statistics are those of one worker (rank 0 of its stage): GroupNorm does "
        "not depend on that; torch.nn.SyncBatchNorm, on GPUs, on the number of micro-batches alone",
    )


def materialise(module: nn.Module, device: torch.device, offload: bool = False) -> None:
    """Gives meta tensors memory, uninitialised, on the device; with offload, parameters on the host. A parameter shared
    by several modules stays shared."""
    made: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            place = torch.device("cpu") if offload and isinstance(tensor, nn.Parameter) else device
            empty = torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(place)
            if isinstance(tensor, nn.Parameter) and tensor is not empty:
                empty = nn.Parameter(empty.detach(), requires_grad=tensor.requires_grad)
            made[id(tensor)] = empty
            keep.append(tensor)
        return made[id(tensor)]

    keep: list[torch.Tensor] = []  # so that ids stay taken
    for owner in module.modules():
        for name, tensor in _held(owner):
            found = real(tensor)
            if isinstance(tensor, nn.Parameter):  # or torch would read it first, which gathers what tp has split
                delattr(owner, name)
            setattr(owner, name, found)


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
        if (target := own.get(name)) is not None:
            copy_whole_or_shard(target, value)


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
        yield from ((f"{prefix}.{name}".lstrip("."), tensor) for name, tensor in _held(owner))


def _held(owner: nn.Module) -> list[tuple[str, torch.Tensor]]:
    own: dict[str, Any] = {"recurse": False, "remove_duplicate": False}
    return [*owner.named_parameters(**own), *owner.named_buffers(**own), *tensor_attributes(owner)]


def tensor_attributes(owner: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tensors kept as plain attributes (but for those that are another pipeline stage's)."""
    values = [(name, value) for name, value in vars(owner).items() if isinstance(value, torch.Tensor)]
    return [(name, value) for name, value in values if not getattr(value, "is_placeholder", False)]


# --- saved and loaded -------------------------------------------------------------------------------------------------


def load_model_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Copies `state` in. A whole tensor is accepted where the module holds a shard; every name must be there.

    Raises:
        LayoutError: names or shapes that are not this model's.
    """
    own = module.state_dict()
    require_same({name: value.shape for name, value in own.items() if isinstance(value, torch.Tensor)}, state, own)
    with torch.no_grad():
        for name, target in own.items():
            source = state[name]
            if isinstance(target, torch.Tensor) and source is not target:
                copy_whole_or_shard(target, source)
    module.load_state_dict(own)  # runs the hooks of modules that keep something beside tensors


def require_same(shapes: dict[str, torch.Size], state: dict[str, Any], names: Iterable[str]) -> None:
    """Raises LayoutError unless `state` has exactly `names`, and tensors of these shapes."""
    own = set(names)
    for problem, odd in (("lacks", own - state.keys()), ("has unknown", state.keys() - own)):
        if odd:
            raise LayoutError(f"the state {problem} {min(odd)!r} ({len(odd)} in all): it is another model's")
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise LayoutError(
                f"{name} is {tuple(state[name].shape)} in the state and {tuple(shape)} in the model: it is "
                "another model's"
            )


def copy_whole_or_shard(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target` ← `source`, both whole, both sharded alike, or the part of a whole `source` that `target` holds."""
    if isinstance(target, DTensor):
        local = source.to_local() if isinstance(source, DTensor) else shard_of(source, target)
        target.to_local().copy_(local)
    else:
        target.copy_(source)


def shard_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The part of `whole` that this rank holds of a tensor distributed as `like`; no communication.

    Sides of the mesh split in order, but a side marked strided (fsdp on top of tp) splits after those to its right.
    Each cuts as torch.chunk does: equal parts, rounded up, the last ones smaller or empty.
    """
    mesh, placements = like.device_mesh, like.placements
    sides = list(range(mesh.ndim))
    strided = [i for i in sides if type(placements[i]).__name__ == "_StridedShard"]
    for side in [i for i in sides if i not in strided] + strided:
        placement = placements[side]
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        size = whole.size(dim)
        part = -(-size // mesh.size(side))
        start = min(size, part * mesh.get_local_rank(side))
        whole = whole.narrow(dim, start, min(part, size - start))
    return whole


def whole_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The whole of a tensor; collective where it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.device_type != tensor.device.type:  # offloaded: gather on the mesh's own devices
        local = tensor.to_local().to(device)
        spec = (tensor.device_mesh, tensor.placements)
        tensor = DTensor.from_local(local, *spec, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return tensor.full_tensor()


def optimizer_state(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> dict[str, Any]:
    """The optimizer's own tensors, by parameter name; made first where the optimizer has not stepped yet."""
    initialise(optimizer)
    state = {
        names[parameter]: dict(optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if optimizer.state.get(parameter)
    }
    groups = {
        str(i): {key: value for key, value in group.items() if key != "params" and key not in CONFIGURED}
        for i, group in enumerate(optimizer.param_groups)
    }
    return {"state": state, "groups": {key: value for key, value in groups.items() if value}}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], names: dict[torch.Tensor, str]
) -> None:
    """Copies what `optimizer_state` gave into an optimizer over the same model, under any layout.

    Raises:
        LayoutError: state of another model or another optimizer.
    """
    initialise(optimizer)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _load_parameter(optimizer.state.get(parameter, {}), state["state"], names[parameter])
    for key, values in state.get("groups", {}).items():
        optimizer.param_groups[int(key)].update(values)


def _load_parameter(own: dict[str, Any], state: dict[str, Any], name: str) -> None:
    if own and (name not in state or own.keys() != state[name].keys()):
        raise LayoutError(f"the optimizer state does not fit {name!r}: it is another model's or another optimizer's")
    for key, target in own.items():
        source = state[name][key]
        if not isinstance(target, torch.Tensor):
            own[key] = source
        elif source is not target:
            copy_whole_or_shard(target, source if isinstance(source, torch.Tensor) else torch.as_tensor(source))


@torch.no_grad()
def initialise(optimizer: torch.optim.Optimizer) -> None:
    """Gives every parameter the state it would have before its first step.

    Optimizers make their state inside `step`. A step with zero gradients and a learning rate of zero moves nothing;
    the state it makes is then set to zero, as it is before a first step. (An optimizer whose state begins otherwise,
    such as Adagrad, makes it on construction, and is left alone.)
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    missing = [p for p in parameters if not optimizer.state.get(p)]
    if not missing or all("momentum" in g and not g["momentum"] for g in optimizer.param_groups):
        return
    gradients = [(p, p.grad) for p in parameters]
    kept = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for p in parameters:
        p.grad = None
    for p in missing:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        lr = group["lr"]
        group["lr"] = torch.zeros_like(lr) if isinstance(lr, torch.Tensor) else 0.0
    try:
        optimizer.step()
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        for group, values in zip(optimizer.param_groups, kept):
            group.update(values)
    for p in missing:
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif type(value) in (int, float):
                optimizer.state[p][key] = type(value)(0)
