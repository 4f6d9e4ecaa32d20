"""The same weights under every layout: where they start, and how they are saved and loaded.

**Initial weights.** `build()` is seeded, so every caller gets the same weights. Replicated layouts
call it on every rank. Sharded ones build the model on `meta` (no memory), split it, give every rank
memory for its own shards, and then broadcast the weights of the one real model that rank 0 has
built on its host: one tensor at a time, of which every rank keeps its part. So a rank needs memory
for its shards and the largest single tensor; a model of 7 billion parameters needs 28 GB on rank
0's host and nowhere else. Buffers are broadcast too, also those that are not saved with the model
(rotary tables), and so are tensors that a module keeps as plain attributes, which would have stayed
empty on meta. A model that cannot be built on meta is built on every rank instead.

**Names.** Wrappers leave marks in names (DDP and DataParallel `module.`, checkpoint wrappers,
torch.compile). Here only DDP and DataParallel wrap at all, and state is read from inside them, so
names are the same as on one device. Hence any layout reads a checkpoint that any other layout has
written: names agree, tensors are whole or `DTensor`s, and torch.distributed.checkpoint moves the
parts. https://docs.pytorch.org/docs/stable/distributed.checkpoint.html

**Optimizers.** Their state is keyed by parameter name instead of by position in a list: `{"state":
{name: {"exp_avg": …}}, "groups": {…}}`. Hyperparameters belong to the configuration and are not
loaded. Numbers in a parameter group that the optimizer itself updates (a step count, an estimate of
the learning rate) are. For an optimizer that is not torch's, an entry that still has its initial
value is assumed to be a hyperparameter, so initial values are saved too ("made_with").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from strategies.dims import Layout, LayoutError
from strategies.tree import tree_leaves

Build = Callable[[], nn.Module]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_HYPERPARAMETERS = """
lr initial_lr betas eps weight_decay momentum dampening nesterov foreach fused maximize capturable
differentiable amsgrad decoupled_weight_decay alpha centered rho lambd t0 etas step_sizes lr_decay
initial_accumulator_value momentum_decay ns_coefficients ns_steps adjust_lr_fn beta2_decay
"""
CONFIGURED = frozenset(_HYPERPARAMETERS.split())
"""Entries of parameter groups that the configuration decides, whatever the optimizer."""


# --- building -------------------------------------------------------------------------------------


def build_on_meta(build: Build) -> tuple[nn.Module, str]:
    """Builds a model without memory, or for real if that fails.

    The memory of a parameter follows the order of its dimensions, as sharding needs it: a
    transposed one is copied.

    Returns:
        The module on meta and "", or the real module and a remark that says why.
    """
    reason = ""
    try:
        with torch.device("meta"):
            module = build()
        reason = _tensors_in_containers(module)
    except Exception as error:
        # The model's own code may fail on tensors without values. If it has another mistake,
        # building it for real raises it again.
        reason = f"building it on meta fails: {error}"
    if reason:
        module = build()
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    if not reason:
        return module, ""
    return module, f"every worker builds the whole model first, because {reason}"


def _tensors_in_containers(module: nn.Module) -> str:
    """Says which tensors a module keeps in a list, tuple or dict of its own, if any.

    `broadcast_weights` does not find these.
    """
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            is_torchs_own = name in ("_parameters", "_buffers", "_modules")
            if is_torchs_own or not isinstance(value, (list, tuple, dict)):
                continue
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and id(leaf) not in registered:
                    attribute = f"{path}.{name}".lstrip(".")
                    return f"{attribute} holds tensors that are neither parameters nor buffers"
    return ""


def require_trainable_parameters(module: nn.Module) -> None:
    """Checks that there is something to train.

    Raises:
        LayoutError: No parameter requires a gradient.
    """
    parameters = list(module.parameters())
    if any(parameter.requires_grad for parameter in parameters):
        return
    content = "only parameters with requires_grad=False" if parameters else "no parameters"
    raise LayoutError(f"the model {type(module).__name__} has {content}: there is nothing to train")


def make_parameters_dense(module: nn.Module) -> None:
    """Copies parameters that have gaps in memory, such as every second row of a tensor.

    torch's fused optimizers (2.13) would update them by state without gaps.
    """
    for parameter in module.parameters():
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            parameter.data = parameter.data.contiguous()


def make_gradients_dense(module: nn.Module) -> tuple[str, ...]:
    """Gives embeddings with sparse=True dense gradients, of the same numbers.

    Neither sharding, nor DDP's buckets, nor fused optimizers, nor gradient norms accept sparse
    ones.

    Returns:
        A remark for the user if there are such embeddings.
    """
    names = []
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            layer.sparse = False
            names.append(name)
    if not names:
        return ()
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{others} has sparse=True: its gradients are dense here, of the same numbers",
    )


def batch_norm_notes(module: nn.Module, layout: Layout) -> tuple[str, ...]:
    """Remarks for the user if the model normalises over a batch that the layout splits."""
    norms = [part for part in module.modules() if isinstance(part, BATCH_NORMS) and part.training]
    if not norms or layout.dims.dp_cp * layout.dims.pp == 1:
        return ()
    return (
        f"{type(norms[0]).__name__} normalises over one worker's micro-batch, so this run differs "
        "from one with micro-batches of another size, and its running statistics are those of one "
        "worker (rank 0 of its stage): GroupNorm does not depend on that; torch.nn.SyncBatchNorm, "
        "on GPUs, on the number of micro-batches alone",
    )


def allocate(module: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Gives meta tensors uninitialised memory. A tensor that several modules share stays shared.

    Args:
        module: The model, split or sharded as it will be trained.
        device: Where the memory is.
        offload: Whether parameters are in the host's memory instead.
    """
    allocated: dict[int, torch.Tensor] = {}
    originals: list[torch.Tensor] = []  # kept alive, so that their ids are not used again

    def allocated_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in allocated:
            return allocated[id(tensor)]
        is_parameter = isinstance(tensor, nn.Parameter)
        target = torch.device("cpu") if offload and is_parameter else device
        is_meta = tensor.is_meta
        copy = torch.empty_like(tensor, device=target) if is_meta else tensor.to(target)
        if is_parameter and tensor is not copy:
            copy = nn.Parameter(copy.detach(), requires_grad=tensor.requires_grad)
        allocated[id(tensor)] = copy
        originals.append(tensor)
        return copy

    for owner in module.modules():
        for name, tensor in _direct_tensors(owner):
            copy = allocated_tensor(tensor)
            if isinstance(tensor, nn.Parameter):
                # Without this, torch reads the attribute first, which gathers what tp has split.
                delattr(owner, name)
            setattr(owner, name, copy)


class _TensorDescription(NamedTuple):
    """What the other ranks need to know of one of rank 0's tensors."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_alias: bool
    """Whether it is a parameter that an earlier name refers to as well."""


@torch.no_grad()
def broadcast_weights(
    module: nn.Module,
    source: nn.Module | None,
    device: torch.device,
    *,
    is_partial: bool = False,
) -> None:
    """Broadcasts rank 0's weights, one tensor at a time, into the shards of every rank's module.

    Collective over all ranks.

    Args:
        module: Where this rank's parts are written.
        source: The real model on rank 0; None on other ranks.
        device: This rank's device.
        is_partial: Whether the module holds only some of the tensors, as a pipeline's stage does.

    Raises:
        LayoutError: The module has other tensors than the source.
    """
    weights = dict(_named_tensors(source)) if source is not None else {}
    message: list[list[_TensorDescription]] = [_descriptions(weights)]
    dist.broadcast_object_list(message, src=0, device=device)
    descriptions = message[0]
    targets = dict(_named_tensors(module))
    names = {description.name for description in descriptions}
    unmatched = targets.keys() - names if is_partial else targets.keys() ^ names
    if unmatched:
        raise LayoutError(
            f"the model is not the same on meta and for real: {min(unmatched)} exists in one of "
            "them only"
        )
    for name, shape, dtype, is_alias in descriptions:
        if is_alias:
            continue
        value = torch.empty(shape, dtype=dtype, device=device)
        if source is not None:
            value.copy_(weights[name])
        dist.broadcast(value, src=0)
        target = targets.get(name)
        if target is not None:
            copy_whole_or_shard(target, value)


def _descriptions(weights: dict[str, torch.Tensor]) -> list[_TensorDescription]:
    seen: set[int] = set()
    descriptions = []
    for name, tensor in weights.items():
        is_alias = id(tensor) in seen and isinstance(tensor, nn.Parameter)
        seen.add(id(tensor))
        descriptions.append(
            _TensorDescription(name, tuple(tensor.shape), tensor.dtype, is_alias=is_alias)
        )
    return descriptions


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a module under all their names."""
    for path, owner in module.named_modules():
        for name, tensor in _direct_tensors(owner):
            yield f"{path}.{name}".lstrip("."), tensor


def _direct_tensors(owner: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a module holds itself."""
    return [
        *owner.named_parameters(recurse=False, remove_duplicate=False),
        *owner.named_buffers(recurse=False, remove_duplicate=False),
        *tensor_attributes(owner),
    ]


def tensor_attributes(owner: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a module keeps as plain attributes, except another stage's placeholders."""
    return [
        (name, value)
        for name, value in vars(owner).items()
        if isinstance(value, torch.Tensor) and not getattr(value, "is_placeholder", False)
    ]


# --- saving and loading the model -----------------------------------------------------------------


def load_model_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Copies a state into a module.

    Args:
        module: The model; it may hold shards where the state has whole tensors.
        state: A value for every name of the module's own state.

    Raises:
        LayoutError: Names or shapes are not this model's.
    """
    own_state = module.state_dict()
    shapes = {name: v.shape for name, v in own_state.items() if isinstance(v, torch.Tensor)}
    require_same(shapes, state, names=own_state)
    with torch.no_grad():
        for name, target in own_state.items():
            source = state[name]
            if isinstance(target, torch.Tensor) and source is not target:
                copy_whole_or_shard(target, source)
    # Runs the hooks of modules that keep something beside tensors.
    module.load_state_dict(own_state)


def require_same(
    shapes: dict[str, torch.Size], state: dict[str, Any], names: Iterable[str]
) -> None:
    """Checks that a state is this model's.

    Args:
        shapes: The names of tensors → their whole shapes.
        state: What is to be loaded.
        names: All names that the state must have, and no others.

    Raises:
        LayoutError: A name is missing or unknown, or a shape differs.
    """
    expected = set(names)
    missing = expected - state.keys()
    unknown = state.keys() - expected
    for problem, wrong in (("lacks", missing), ("has unknown", unknown)):
        if wrong:
            raise LayoutError(
                f"the state {problem} {min(wrong)!r} ({len(wrong)} in all): it is another model's"
            )
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise LayoutError(
                f"{name} is {tuple(state[name].shape)} in the state and {tuple(shape)} in the "
                "model: it is another model's"
            )


def copy_whole_or_shard(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies one tensor into another.

    Args:
        target: Whole, or this rank's shard of a DTensor.
        source: Whole, or sharded as the target is.
    """
    if isinstance(target, DTensor):
        shard = source.to_local() if isinstance(source, DTensor) else shard_of(source, target)
        target.to_local().copy_(shard)
    else:
        target.copy_(source)


def shard_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The part of a tensor that this rank holds; no communication.

    Args:
        whole: The whole tensor.
        like: A tensor that is distributed as the result is.
    """
    part = whole
    for dim, (start, length) in enumerate(shard_bounds(like)):
        part = part.narrow(dim, start, length)
    return part


def shard_bounds(like: DTensor) -> list[tuple[int, int]]:
    """Where in the whole tensor the part of this rank is; no communication.

    The dimensions of the mesh split in order, but one that is marked strided (fsdp on top of tp)
    splits after those to its right. Each splits as torch.chunk does: into equal parts, rounded up,
    the last ones smaller or empty.

    Args:
        like: A distributed tensor.

    Returns:
        (first index, length) of each dimension.
    """
    mesh = like.device_mesh
    placements = like.placements
    mesh_dims = list(range(mesh.ndim))
    strided = [i for i in mesh_dims if type(placements[i]).__name__ == "_StridedShard"]
    in_order = [i for i in mesh_dims if i not in strided]
    bounds = [(0, size) for size in like.shape]
    for mesh_dim in in_order + strided:
        tensor_dim = getattr(placements[mesh_dim], "dim", None)
        if tensor_dim is None:
            continue
        first, size = bounds[tensor_dim]
        length = -(-size // mesh.size(mesh_dim))
        start = min(size, length * mesh.get_local_rank(mesh_dim))
        bounds[tensor_dim] = (first + start, min(length, size - start))
    return bounds


def whole_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The whole of a tensor; collective if it is sharded.

    Args:
        tensor: A DTensor or a plain tensor.
        device: This rank's device, where an offloaded tensor is gathered.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    is_offloaded = tensor.device_mesh.device_type != tensor.device.type
    if is_offloaded:
        tensor = DTensor.from_local(
            tensor.to_local().to(device),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.full_tensor()


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in the host's memory, made from a tensor on a GPU without a second copy."""
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


# --- saving and loading the optimizer -------------------------------------------------------------


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]
) -> dict[str, Any]:
    """The optimizer's state by parameter name; initialised first if it has not stepped yet.

    Args:
        optimizer: Over the parameters in `names`.
        names: Each parameter's name.
    """
    initialise_optimizer_state(optimizer)
    state = {}
    groups = {}
    made_with: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if optimizer.state.get(parameter):
                state[names[parameter]] = dict(optimizer.state[parameter])
        entries = {k: v for k, v in group.items() if k != "params" and k not in CONFIGURED}
        if entries:
            groups[str(number)] = entries
        made_with |= {
            key: optimizer.defaults[key]
            for key, value in entries.items()
            if key in optimizer.defaults and not isinstance(value, torch.Tensor)
        }
    return {"state": state, "groups": groups, "made_with": made_with}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], names: dict[torch.Tensor, str]
) -> None:
    """Copies a state into an optimizer over the same model, under any layout.

    Args:
        optimizer: Over the parameters in `names`.
        state: What `optimizer_state` returned.
        names: Each parameter's name.

    Raises:
        LayoutError: It is the state of another model or another optimizer.
    """
    initialise_optimizer_state(optimizer)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter_state = optimizer.state.get(parameter, {})
                _load_parameter_state(parameter_state, state["state"], names[parameter])
    made_with = state.get("made_with", {})
    for number, entries in state.get("groups", {}).items():
        updated = {
            key: value
            for key, value in entries.items()
            if key not in made_with or made_with[key] != value
        }
        optimizer.param_groups[int(number)].update(updated)


def _load_parameter_state(
    targets: dict[str, Any], state: dict[str, dict[str, Any]], name: str
) -> None:
    if targets and (name not in state or targets.keys() != state[name].keys()):
        raise LayoutError(
            f"the optimizer state does not fit {name!r}: it is another model's or another "
            "optimizer's"
        )
    for key, target in targets.items():
        source = state[name][key]
        if not isinstance(target, torch.Tensor):
            targets[key] = source
        elif source is not target:
            value = source if isinstance(source, torch.Tensor) else torch.as_tensor(source)
            copy_whole_or_shard(target, value)


@torch.no_grad()
def initialise_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives every parameter the state that it would have before its first step.

    Optimizers create their state in `step`. A step with zero gradients and a learning rate of zero
    moves nothing. The state that it creates is then set to zero, as it is before a first step. (An
    optimizer whose initial state is another one, such as Adagrad, creates it on construction, and
    is left alone.)
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    missing = [p for p in trained if not optimizer.state.get(p)]
    # Only SGD has a dampening. Without momentum it has no state; RMSprop without one has.
    is_plain_sgd = all("dampening" in g and not g["momentum"] for g in optimizer.param_groups)
    if not missing or is_plain_sgd:
        return
    gradients = [(p, p.grad) for p in trained]
    group_entries = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    for p in trained:
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
        for group, entries in zip(optimizer.param_groups, group_entries):
            group.update(entries)
    for p in missing:
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif type(value) in (int, float):
                optimizer.state[p][key] = type(value)(0)
