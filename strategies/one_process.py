"""One process, with one device or several: the strategies that need no process group.

**single**, one device, is the reference that every other strategy is compared with.

    θ ← θ - η · AdamW(∇ mean over the global batch of loss(θ, sample))

A global batch larger than the memory is split into micro-batches whose gradients add up; nothing else happens. Choose
it when the model, its optimizer state (16 bytes per parameter with AdamW in float32: 4 weight, 4 gradient, 8 state) and
one micro-batch fit on one device and the time is bearable. It sends nothing.

**dp**, torch.nn.DataParallel: the batch is split over all GPUs of one machine. Every forward copies the parameters from
the first GPU to the others, runs one thread per GPU on its part of the batch, and gathers the outputs on the first;
backward adds the gradients there. One optimizer, one process, nothing to launch. Choose it only because it is there
already: `ddp` keeps the copies alive, overlaps communication with backward, is not held up by Python's interpreter
lock, spreads outputs and loss too, and goes beyond one machine. It costs the parameters to be sent twice per
micro-batch (out, and gradients back), and memory for outputs and optimizer on the first GPU alone. BatchNorm sees one
GPU's part of a batch and keeps the first GPU's statistics. Copies are made of parameters, not of a forward that was
replaced, so recomputing and compiling are not for it, nor are mixtures of experts. On a machine without GPUs it passes
everything through.
https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html

**model_parallel**, naive model parallelism: consecutive blocks on several devices, activations moved between them.

    device 0: embedding, blocks 1 … k     →  x  →     device 1: blocks k+1 … n, head     →  output back to device 0

A model too large for one GPU runs on two, with no change to its code. But one device works while the others wait:
n devices are no faster than one. Choose it for a model that must just run, or as `ddp_model_parallel` (a copy per
worker, each over its own devices, gradients averaged by DDP) where several small GPUs make up one large one; a
pipeline keeps the devices busy, fsdp uses the memory of all as well. It costs a copy of the activations between
neighbours, forward and backward. https://docs.pytorch.org/tutorials/intermediate/model_parallel_tutorial.html;
Huang et al. 2019, https://arxiv.org/abs/1811.06965, figure 2b, shows the waiting.

What is before the first block goes with it to the first device, what is after the last one to the last. A weight used
in two places has one device, and both places compute there. It is built whole in the worker's host memory first, as
ddp_model_parallel does once per worker, and moved device by device; no GPU ever holds more than its own blocks.
"""

import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from strategies import ddp
from strategies.costs import Collective, StepShape, UnitSize, replicated
from strategies.dims import LayoutError
from strategies.mixtures import find_mixtures
from strategies.pipeline import partition
from strategies.strategy import Applied, Setup, Strategy
from strategies.traits import Trait
from strategies.tree import tree_map


def apply_single(setup: Setup) -> Applied:
    """The module itself."""
    setup.load()
    return Applied(setup.module)


SINGLE = Strategy("single", "one device", apply=apply_single, one_process=True)

# --- which devices one worker may use ---------------------------------------------------------------------------

PRETENDED = 2
"""On a machine without GPUs this many "devices" stand for the CPU, so that the path is the same."""


def own_devices(device: torch.device) -> list[torch.device]:
    """All GPUs that are this worker's, its `device` first. Without GPUs the CPU, several times.

    Where each worker sees its own only (Ray's actors, Slurm's --gpus-per-task) they are all its own; where all see all
    of a node's (torchrun, Ray Train) the node's workers, by LOCAL_RANK and LOCAL_WORLD_SIZE, have equal shares.
    """
    if device.type != "cuda":
        return [device] * PRETENDED
    workers, rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    return [torch.device("cuda", index) for index in share(device.index or 0, rank, workers, torch.cuda.device_count())]


def share(first: int, rank: int, workers: int, visible: int) -> list[int]:
    """Of `visible` GPUs those of local worker `rank` of `workers`, whose device is `first`; pure."""
    each = visible // workers
    if each and first == rank * each:
        return list(range(first, first + each))
    return list(range(visible)) if first == 0 else [first]


def home(several: bool, rank: int, workers: int, visible: int) -> int:
    """The GPU on which local worker `rank` of `workers` begins, one of the `visible` ones; pure.

    It is the worker's own, or the first of its share where `several` are each worker's. Fewer GPUs than workers are
    visible where a launcher shows each worker its own only: there every one of them is this worker's.
    """
    if several:
        return rank * (visible // workers)
    return rank % max(1, visible)


def remark(name: str, devices: list[torch.device], used: int) -> tuple[str, ...]:
    """Remarks for the user about a strategy that spreads a model or batch over devices and cannot."""
    if devices[0].type != "cuda":
        return (f"strategy {name} spreads over the GPUs of a machine and this one has none: everything is on the CPU",)
    if len(devices) == 1:
        return (f"strategy {name} has one GPU per worker, so nothing is spread: it is the same as one device",)
    if used < len(devices):
        return (
            f"strategy {name} leaves {len(devices) - used} of {len(devices)} GPUs idle: the model has too few blocks",
        )
    return ()


# --- torch.nn.DataParallel --------------------------------------------------------------------------------------


def apply_dp(setup: Setup) -> Applied:
    """Wraps the module, whose parameters are on the worker's first device."""
    setup.load()
    own = own_devices(setup.device)
    ids = [device.index for device in own] if setup.device.type == "cuda" else None
    if ids and len(ids) > 1:
        require_copies(setup.module)
    wrapped = Replicas(setup.module, device_ids=ids)
    return Applied(wrapped, notes=remark(setup.strategy.name, own, len(own)))


class Replicas(nn.DataParallel):
    """DataParallel whose other attributes are those of the model, which a loss may read: its blocks, its methods."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def require_copies(module: nn.Module) -> None:
    """Raises LayoutError for a model whose copies on other GPUs would compute with the first one's parameters (those
    keep a forward that was replaced, as it is bound to the first), or count its experts' tokens across GPUs."""
    if mixtures := find_mixtures(module):
        raise LayoutError(f"strategy dp is not for mixtures of experts, as {mixtures[0].name} is: write strategy=ddp")
    replaced = next((name for name, part in module.named_modules() if "forward" in vars(part)), None)
    if replaced is not None:
        raise LayoutError(
            f"strategy dp copies the model to every GPU, but not the forward of {replaced or 'the model'}, which was "
            "replaced (train.activation_checkpointing and train.compile do that): write strategy=ddp, or leave them out"
        )


def dp_collectives(unit: UnitSize, step: StepShape) -> tuple[Collective, ...]:
    """Parameters out and gradients back, for each micro-batch."""
    return (
        Collective("broadcast", "devices", unit.parameters, step.micro_batches, "forward"),
        Collective("reduce", "devices", unit.gradients, step.micro_batches, "backward"),
    )


DP = Strategy(
    "dp",
    "the batch split over the GPUs of one process",
    replicated,
    dp_collectives,
    apply_dp,
    one_process=True,
    several_devices=True,
    plannable=False,
    # Forward sees copies of the parameters, one per GPU, which are made anew each time.
    cannot_keep=frozenset(
        {Trait.CHANGES_PARAMETERS, Trait.CHANGES_PARAMETERS_BY_DATA, Trait.FUNCTIONAL_CALL},
    ),
    precisions=("fp32", "bf16", "fp16"),
    reduce_dtype="is not for DataParallel, which adds gradients in float32: leave it out, or write strategy=ddp",
)

# --- naive model parallelism ------------------------------------------------------------------------------------


def apply_model_parallel(setup: Setup) -> Applied:
    """Moves the module's parts to the worker's devices, in place; with several workers, replicated by DDP."""
    own = own_devices(setup.device)
    used = place(setup.module, own, setup.blocks)
    applied = Applied(setup.module)
    if setup.group is not None:
        applied = ddp.wrap(setup.module, setup.group, setup.device, setup.options, spread=True)
    return replace(applied, notes=remark(setup.strategy.name, own, used))


def place(module: nn.Module, devices: list[torch.device], blocks: list[str]) -> int:
    """Moves the module's blocks, and what is around them, in place and makes activations follow; how many devices are
    used."""
    inside = tuple(f"{block}." for block in blocks)
    units = [(n, owner, n in blocks) for n, owner in module.named_modules() if not n.startswith(inside)]
    held = [[*owner.parameters(is_block), *owner.buffers(is_block)] for _, owner, is_block in units]
    sizes = [sum(t.numel() * t.element_size() for t in tensors) for tensors in held]
    first, costs, last = partition.costs_around_blocks(zip(sizes, (is_block for *_, is_block in units)))
    counts = partition.balanced_partition(costs, min(len(devices), len(blocks)), first, last) if blocks else (1,)
    indices = [index for index, count in enumerate(counts) for _ in range(count)]
    placed: dict[int, torch.device] = {}  # tensors, by id: a shared one stays where it is first
    reached, left = 0, list(indices)
    for (_, owner, is_block), tensors in zip(units, held):
        if is_block:
            reached = left.pop(0)
        if tensors:
            device = next((placed[id(t)] for t in tensors if id(t) in placed), devices[reached])
            for tensor in (t for t in tensors if id(t) not in placed):
                placed[id(tensor)] = device
                tensor.data = tensor.data.to(device)
            owner.register_forward_pre_hook(_follow(device), with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: _moved(output, devices[0]))
    return len(set(indices))


def _follow(device: torch.device) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _moved(args, device), _moved(kwargs, device)

    return hook


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map(lambda v: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v, values)


MODEL_PARALLEL = Strategy(
    "model_parallel",
    "consecutive blocks on several devices of one process",
    apply=apply_model_parallel,
    one_process=True,
    several_devices=True,
    plannable=False,
)
DDP_MODEL_PARALLEL = replace(
    ddp.STRATEGY,
    name="ddp_model_parallel",
    summary="DDP over workers that each spread the model over several devices",
    apply=apply_model_parallel,
    also=(),
    several_devices=True,
    plannable=False,
)
