"""One process, with one device or several: the strategies that need no process group.

**single**, one device, is the reference that every other strategy is compared with.

    θ ← θ - η · AdamW(∇ mean over the global batch of loss(θ, sample))

A global batch that does not fit into memory is split into micro-batches whose gradients add up.
Nothing else happens, and nothing is sent. Choose it when the model, its optimizer state (16 bytes
per parameter with AdamW in float32: 4 weight, 4 gradient, 8 state) and one micro-batch fit on one
device, and the time is bearable.

**dp**, torch.nn.DataParallel, splits the batch over all GPUs of one machine. Every forward copies
the parameters from the first GPU to the others, runs one thread per GPU on its part of the batch,
and gathers the outputs on the first GPU, where backward adds up the gradients. There is one
optimizer, one process, and nothing to launch. It sends the parameters twice per micro-batch (copies
out, gradients back), and only the first GPU has memory for outputs and optimizer state. Choose it
only because your code already uses it: `ddp` keeps the copies, overlaps communication with
backward, is not held up by Python's interpreter lock, spreads outputs and loss too, and goes beyond
one machine. BatchNorm sees one GPU's part of a batch and keeps the first GPU's statistics.
DataParallel copies parameters, but not a forward that was replaced, so recomputation and
compilation do not work with it, nor do mixtures of experts. On a machine without GPUs it calls the
model directly. https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html

**model_parallel**, naive model parallelism, puts consecutive blocks on several devices and moves
the activations between them.

    device 0: embedding, blocks 1 … k   →  x  →   device 1: blocks k+1 … n, head   →  y  →  device 0

A model too large for one GPU runs on two, with no change to its code. But only one device computes
at a time, so n devices are no faster than one. It sends the activations between neighbours, forward
and backward. Choose it for a model that must just run, or as `ddp_model_parallel` (one copy per
worker, each over the worker's own devices, gradients averaged by DDP) where several small GPUs
stand in for a large one. A pipeline also splits the model by blocks but keeps the devices busy, and
fsdp also uses the memory of all devices.
https://docs.pytorch.org/tutorials/intermediate/model_parallel_tutorial.html; Huang et al. 2019,
https://arxiv.org/abs/1811.06965, figure 2b, shows the idle time.

What comes before the first block goes to the first device, what comes after the last block to the
last one. A weight that is used in two places has one device, and both places compute there. The
model is first built whole in the worker's host memory (ddp_model_parallel does so once per worker)
and moved device by device, so no GPU ever holds more than its own blocks.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from strategies import ddp
from strategies.costs import Collective, StepShape, UnitSize, replicated
from strategies.dims import LayoutError
from strategies.mixtures import find_mixtures
from strategies.pipeline import partition
from strategies.strategy import Applied, Setup, Strategy
from strategies.traits import Trait
from strategies.tree import tree_map


def apply_single(setup: Setup) -> Applied:
    """Loads the module and leaves it as it is."""
    setup.load()
    return Applied(setup.module)


SINGLE = Strategy(name="single", summary="one device", apply=apply_single, one_process=True)

# --- the devices of one worker --------------------------------------------------------------------

CPU_STAND_INS = 2
"""Without GPUs, the CPU stands in for this many devices, so that the same code runs."""


def worker_devices(device: torch.device) -> list[torch.device]:
    """All GPUs of this worker; without GPUs the CPU, several times.

    Under Ray's actors and Slurm's --gpus-per-task each worker sees only its own GPUs. Under
    torchrun and Ray Train all workers see all GPUs of a node and have equal shares of them,
    according to LOCAL_RANK and LOCAL_WORLD_SIZE.

    Args:
        device: This worker's device, which is the first in the result.
    """
    if device.type != "cuda":
        return [device] * CPU_STAND_INS
    gpus = gpus_of_worker(
        first_gpu=device.index or 0,
        rank=int(os.environ.get("LOCAL_RANK", "0")),
        workers=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        visible=torch.cuda.device_count(),
    )
    return [torch.device("cuda", index) for index in gpus]


def gpus_of_worker(*, first_gpu: int, rank: int, workers: int, visible: int) -> list[int]:
    """The numbers of the GPUs that belong to one worker; pure.

    Args:
        first_gpu: The worker's device.
        rank: The worker's rank on its node.
        workers: Workers on the node.
        visible: GPUs that the worker sees.
    """
    per_worker = visible // workers
    is_start_of_share = per_worker > 0 and first_gpu == rank * per_worker
    if is_start_of_share:
        return list(range(first_gpu, first_gpu + per_worker))
    return list(range(visible)) if first_gpu == 0 else [first_gpu]


def first_gpu_of_worker(has_several: bool, rank: int, workers: int, visible: int) -> int:
    """The number of the GPU that a worker starts on; pure.

    A launcher may show each worker only its own GPUs. Then fewer GPUs than workers are visible, and
    every one of them is this worker's.

    Args:
        has_several: Whether each worker uses several GPUs.
        rank: The worker's rank on its node.
        workers: Workers on the node.
        visible: GPUs that the worker sees.
    """
    if has_several:
        return rank * (visible // workers)
    return rank % max(1, visible)


def spread_notes(strategy: str, devices: list[torch.device], used: int) -> tuple[str, ...]:
    """Remarks for the user if a strategy cannot spread a model or a batch over all devices.

    Args:
        strategy: Its name.
        devices: The worker's devices.
        used: How many of them are used.
    """
    if devices[0].type != "cuda":
        return (
            f"strategy {strategy} spreads over the GPUs of a machine and this one has none: "
            "everything is on the CPU",
        )
    if len(devices) == 1:
        return (
            f"strategy {strategy} has one GPU per worker, so nothing is spread: it is the same as "
            "one device",
        )
    if used < len(devices):
        return (
            f"strategy {strategy} leaves {len(devices) - used} of {len(devices)} GPUs idle: the "
            "model has too few blocks",
        )
    return ()


# --- torch.nn.DataParallel ------------------------------------------------------------------------


def apply_dp(setup: Setup) -> Applied:
    """Wraps the module, whose parameters are on the worker's first device."""
    setup.load()
    devices = worker_devices(setup.device)
    gpus = [device.index for device in devices] if setup.device.type == "cuda" else None
    if gpus is not None and len(gpus) > 1:
        require_copyable(setup.module)
    wrapped = Replicas(setup.module, device_ids=gpus)
    notes = spread_notes(setup.strategy.name, devices, used=len(devices))
    return Applied(wrapped, notes=notes)


class Replicas(nn.DataParallel):
    """DataParallel that has the model's attributes too, because a loss may read these."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def require_copyable(module: nn.Module) -> None:
    """Checks that DataParallel's copies of a model compute what the model does.

    A forward that was replaced is bound to the model on the first GPU, so its copies would compute
    with that one's parameters. Mixtures count the tokens of their experts across GPUs.

    Raises:
        LayoutError: A forward was replaced, or the model has mixtures of experts.
    """
    if mixtures := find_mixtures(module):
        raise LayoutError(
            f"strategy dp is not for mixtures of experts, as {mixtures[0].name} is: "
            "write strategy=ddp"
        )
    for name, part in module.named_modules():
        if "forward" in vars(part):
            raise LayoutError(
                f"strategy dp copies the model to every GPU, but not the forward of "
                f"{name or 'the model'}, which was replaced (train.activation_checkpointing, "
                "train.activation_offloading and train.compile do that): write strategy=ddp, or "
                "leave them out"
            )


def dp_collectives(unit: UnitSize, step: StepShape) -> tuple[Collective, ...]:
    """Parameters out and gradients back, for each micro-batch."""
    return (
        Collective(
            name="broadcast",
            over="devices",
            bytes=unit.parameters,
            times=step.micro_batches,
            phase="forward",
        ),
        Collective(
            name="reduce",
            over="devices",
            bytes=unit.gradients,
            times=step.micro_batches,
            phase="backward",
        ),
    )


DP = Strategy(
    name="dp",
    summary="the batch split over the GPUs of one process",
    cost=replicated,
    collectives=dp_collectives,
    apply=apply_dp,
    one_process=True,
    several_devices=True,
    plannable=False,
    # Forward sees copies of the parameters, one per GPU, which are made anew each time.
    cannot_keep=frozenset(
        {Trait.CHANGES_PARAMETERS, Trait.CHANGES_PARAMETERS_BY_DATA, Trait.FUNCTIONAL_CALL},
    ),
    precisions=("fp32", "bf16", "fp16"),
    reduce_dtype_refusal=(
        "is not for DataParallel, which adds gradients in float32: leave it out, "
        "or write strategy=ddp"
    ),
)

# --- naive model parallelism ----------------------------------------------------------------------


def apply_model_parallel(setup: Setup) -> Applied:
    """Moves the module's parts to the worker's devices; with several workers, DDP replicates it."""
    devices = worker_devices(setup.device)
    used = spread_over_devices(setup.module, devices, setup.blocks)
    applied = Applied(setup.module)
    if setup.group is not None:
        applied = ddp.wrap(
            setup.module, setup.group, device=setup.device, options=setup.options, is_spread=True
        )
    return replace(applied, notes=spread_notes(setup.strategy.name, devices, used))


def spread_over_devices(module: nn.Module, devices: list[torch.device], blocks: list[str]) -> int:
    """Moves a module's parts to several devices, in place, and makes activations follow.

    Args:
        module: The model.
        devices: Where to; inputs and outputs are on the first.
        blocks: Names of its repeating blocks, in order.

    Returns:
        The number of devices that are used.
    """
    parts = _parts(module, blocks)
    sizes = [sum(t.numel() * t.element_size() for t in tensors) for _, tensors, _ in parts]
    are_blocks = [is_block for _, _, is_block in parts]
    first, costs, last = partition.costs_around_blocks(zip(sizes, are_blocks))
    counts: tuple[int, ...] = (1,)
    if blocks:
        ways = min(len(devices), len(blocks))
        counts = partition.balanced_partition(costs, ways, first, last)
    device_of_block = [number for number, count in enumerate(counts) for _ in range(count)]

    blocks_left = list(device_of_block)
    current = 0
    # A tensor that several parts share stays on the device of the first; by the tensor's id.
    placed: dict[int, torch.device] = {}
    for owner, tensors, is_block in parts:
        if is_block:
            current = blocks_left.pop(0)
        if not tensors:
            continue
        shared_devices = [placed[id(tensor)] for tensor in tensors if id(tensor) in placed]
        device = shared_devices[0] if shared_devices else devices[current]
        for tensor in tensors:
            if id(tensor) not in placed:
                placed[id(tensor)] = device
                tensor.data = tensor.data.to(device)
        owner.register_forward_pre_hook(_move_inputs_to(device), with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: _moved(output, devices[0]))
    return len(set(device_of_block))


def _parts(module: nn.Module, blocks: list[str]) -> list[tuple[nn.Module, list[Tensor], bool]]:
    """What has one device: each block, and each module outside of the blocks.

    Returns:
        The module, the tensors that belong to it, and whether it is a block.
    """
    inside_blocks = tuple(f"{block}." for block in blocks)
    parts = []
    for name, owner in module.named_modules():
        if name.startswith(inside_blocks):
            continue
        is_block = name in blocks
        tensors = [*owner.parameters(recurse=is_block), *owner.buffers(recurse=is_block)]
        parts.append((owner, tensors, is_block))
    return parts


def _move_inputs_to(device: torch.device) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _moved(args, device), _moved(kwargs, device)

    return hook


def _moved(values: Any, device: torch.device) -> Any:
    def moved(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    return tree_map(moved, values)


MODEL_PARALLEL = Strategy(
    name="model_parallel",
    summary="consecutive blocks on several devices of one process",
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
    combines_with=(),
    several_devices=True,
    plannable=False,
)
