"""What is orthogonal to the layout, and the checks that need no process."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from strategies import float8
from strategies.layout import SHARDED, Layout, LayoutError
from strategies.pipeline import partition, schedules

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
REDUCE_DTYPES = ("fp32", "bf16")
COMPRESSIONS = ("none", "bf16", "powersgd")


@dataclass(frozen=True)
class Options:
    """How a layout behaves; the defaults train exactly as one device in float32 does."""

    activation_checkpointing: str = "none"
    """none, full (every block), every_N (every N-th block), or selective (every block, matrix products kept)."""
    precision: str = "fp32"
    """Type of the arithmetic: fp32, bf16, fp16 or fp8 (float8.py). Parameters, optimizer and loss stay float32."""
    reduce_dtype: str = "fp32"
    """Type that gradients are averaged over data-parallel workers in: fp32 or bf16."""
    compile: bool = False
    """torch.compile every block."""
    compile_backend: str = "inductor"
    offload: bool = False
    """With dp_shard: parameters, gradients and optimizer state in host memory."""
    sequence_parallel: bool = True
    """With tp and a plan: activations between the split layers are split along the sequence."""
    loss_parallel: bool = True
    """With tp and a plan: logits stay split over the vocabulary."""
    reshard_after_forward: bool | None = None
    """With dp_shard: free gathered parameters after forward. None: zero1 and zero2 no; zero3 yes, but on a GPU of whose
    free memory they take less than an eighth."""
    accumulate_sharded: bool | None = None
    """With dp_shard and several micro-batches: reduce-scatter each micro-batch's gradients instead of keeping whole
    ones until the last (less memory, more communication). None: zero2 yes, zero1 no, zero3 on a GPU of which whole
    ones would take an eighth or more."""
    float_output: bool = True
    """With dp_shard and 16 bits: the module's output comes back as float32. False: as it was computed."""
    compression: str = "none"
    """With ddp: gradients on the wire: none, bf16 or powersgd (lossy)."""
    bucket_mb: float = 25.0
    """With ddp: size of a gradient bucket, MiB. 0: measured at the start."""
    shared_memory: bool = True
    """With ddp on the CPUs of one machine: gradients are averaged in memory that the workers share (shared_sum.py)."""
    deepspeed: dict[str, Any] | None = None
    """With deepspeed: the contents of a DeepSpeed JSON. None: ZeRO stage 2."""
    static_graph: bool = True
    """With ddp: every step uses the same parameters in the same order, which DDP exploits. False: a step may leave some
    out; they are looked for in each."""
    schedule: str = "1f1b"
    """With pp: in which order stages work: gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_h2 or zbv."""
    chunks: int = 1
    """With pp and interleaved_1f1b: pieces of the model per stage."""
    stages: tuple[int, ...] | None = None
    """With pp: blocks per part, first to last (pp · chunks numbers). None: cut so that all take as long."""


def check(
    layout: Layout,
    options: Options | None = None,
    *,
    global_batch_size: int | None = None,
    heads: int | None = None,
    blocks: int | None = None,
    sequence_length: int | None = None,
    micro_batches: int | None = None,
) -> None:
    """Everything about a layout that can be known before a process starts; what is None is not checked.

    Raises:
        LayoutError: one sentence.
    """
    dims = layout.dims
    if "pipeline" in layout.parts and dims.pp < 2:
        raise LayoutError(
            "strategy pipeline needs at least 2 stages: write parallel.pp=2 and as many workers, or single"
        )
    if heads is not None and heads % dims.tp:
        divisors = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise LayoutError(
            f"parallel.tp is {dims.tp}, which does not divide the model's {heads} heads: write {divisors}"
        )
    if dims.pp > 1:
        _check_pipeline(layout, options or Options(), blocks, micro_batches)
    if global_batch_size is not None and global_batch_size < dims.dp:
        raise LayoutError(
            f"train.global_batch_size is {global_batch_size}, but it is split over {dims.dp} data-parallel workers: "
            f"write at least {dims.dp}, or fewer workers"
        )
    if sequence_length is not None and options and options.sequence_parallel and sequence_length % dims.tp:
        raise LayoutError(
            f"parallel.tp is {dims.tp}, which does not divide the sequence of {sequence_length}: write a length it "
            "divides, or parallel.sequence_parallel=false"
        )
    if options is not None:
        _check_options(layout, options)


def _check_pipeline(layout: Layout, options: Options, blocks: int | None, micro_batches: int | None) -> None:
    stages = layout.dims.pp
    _one_of("parallel.schedule", options.schedule, tuple(schedules.SCHEDULES))
    schedules.require(options.schedule, stages, micro_batches, options.chunks)
    chunks = schedules.chunks_of(options.schedule, options.chunks)
    parts = stages * chunks
    if blocks is not None:
        partition.require_blocks(blocks, stages, chunks)
    if options.stages is not None:
        partition.require(options.stages, blocks if blocks is not None else sum(options.stages), parts)
    if set(layout.parts) & {"zero1", "zero2"}:
        raise LayoutError(
            f"strategy {layout.name} is not one of its own: in a pipeline parameters are gathered once per step and "
            "gradients scattered once whatever the name, so write fsdp+pipeline"
        )
    if options.offload:
        raise LayoutError("parallel.offload does not work in a pipeline: leave it out, or write strategy=fsdp")
    if options.compression == "powersgd":
        raise LayoutError("parallel.compression=powersgd does not work in a pipeline: write bf16 or none")


def _check_options(layout: Layout, options: Options) -> None:
    _one_of("train.precision", options.precision, PRECISIONS)
    if options.precision == "fp8":
        float8.check(layout)
    _one_of("parallel.reduce_dtype", options.reduce_dtype, REDUCE_DTYPES)
    _one_of("parallel.compression", options.compression, COMPRESSIONS)
    checkpoint_every(options.activation_checkpointing)
    if options.bucket_mb < 0:
        raise LayoutError(f"parallel.bucket_mb is {options.bucket_mb:g}: write a size in MiB, or 0 to have it measured")
    sharded = bool(set(layout.parts) & set(SHARDED))
    if options.offload and not sharded:
        raise LayoutError(f"parallel.offload needs sharded parameters, but the strategy is {layout.name}: write fsdp")
    if options.compression != "none" and not _replicates(layout):
        raise LayoutError(
            f"parallel.compression={options.compression} is for ddp, but the strategy is {layout.name}: leave it out"
            + (", or write parallel.reduce_dtype=bf16" if sharded else "")
        )
    if options.reduce_dtype != "fp32":
        _check_reduce_dtype(layout, options)
    if options.compression == "powersgd" and layout.dims.tp > 1:
        raise LayoutError("parallel.compression=powersgd does not work with parallel.tp > 1: write bf16 or none")


def _check_reduce_dtype(layout: Layout, options: Options) -> None:
    written = f"parallel.reduce_dtype={options.reduce_dtype}"
    if layout.name == "deepspeed":
        raise LayoutError(f"{written} is not DeepSpeed's: write communication_data_type in its JSON")
    if layout.name == "dp":
        raise LayoutError(f"{written}, but DataParallel adds gradients in float32: leave it out, or write strategy=ddp")
    if options.compression == "powersgd":
        raise LayoutError(f"{written} does nothing beside parallel.compression=powersgd: leave one of them out")


def _replicates(layout: Layout) -> bool:
    """Whether whole gradients are averaged over copies; `pipeline` says only by its degrees what else there is."""
    copies = "pipeline" in layout.parts and layout.dims.dp_replicate > 1 and layout.dims.dp_shard == 1
    return layout.parts[0] in ("ddp", "ddp_model_parallel") or copies


def checkpoint_every(value: str) -> int | None:
    """For "every_N" the N, for "full" 1, else None (none, selective)."""
    if value in ("none", "selective"):
        return None
    if value == "full":
        return 1
    head, _, number = value.partition("_")
    if head == "every" and number.isdigit() and int(number) > 0:
        return int(number)
    raise LayoutError(
        f"train.activation_checkpointing is {value!r}: write none, full, selective, or every_2 for every second block"
    )


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else f"write {', '.join(allowed)}"
        raise LayoutError(f"{key} is {value!r}: {hint}")
