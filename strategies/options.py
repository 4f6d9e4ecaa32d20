"""What is orthogonal to the layout."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from strategies.dims import LayoutError

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
    """With ddp: size of a gradient bucket, MiB."""
    shared_memory: bool = True
    """With ddp on the CPUs of one machine: gradients are averaged in memory that they share (cpu_collectives/)."""
    deepspeed: dict[str, Any] | None = None
    """With deepspeed: the contents of a DeepSpeed JSON. None: ZeRO stage 2."""
    find_unused_parameters: bool = False
    """With ddp: a step may leave parameters out; they are looked for in each."""
    schedule: str = "1f1b"
    """With pp: in which order stages work: gpipe, 1f1b, interleaved_1f1b, zb_h1, zb_h2 or zbv."""
    chunks: int = 1
    """With pp and interleaved_1f1b: pieces of the model per stage."""
    stages: tuple[int, ...] | None = None
    """With pp: blocks per part, first to last (pp · chunks numbers). None: so that all take as long."""


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


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises LayoutError unless `value` is one of `allowed`; key: how the configuration writes it."""
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else f"write {', '.join(allowed)}"
        raise LayoutError(f"{key} is {value!r}: {hint}")
