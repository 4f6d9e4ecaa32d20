"""The options of parallelism: how a layout behaves, beside the degrees that it runs with.

This is the one place where such an option has its default and its documentation.
`app/config/schema.py` takes both from here, `app/training/job.py` builds an `Options` from a
configuration, layout.py checks it, and strategies read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STRATEGIES = (
    "single",
    "dp",
    "model_parallel",
    "ddp",
    "ddp_model_parallel",
    "zero1",
    "zero2",
    "zero3",
    "fsdp",
    "hsdp",
    "tensor",
    "pipeline",
    "context",
    "expert",
    "deepspeed",
)
"""The names that registry.py has records for, here without what importing those takes."""
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
REDUCE_DTYPES = ("fp32", "bf16")
CONTEXT_METHODS = ("ring", "allgather", "ulysses")
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a layout behaves; the defaults train exactly as one device in float32 does.

    The string under a field is its documentation, which `trireme config` prints where the
    configuration has the field.
    """

    # --- arithmetic and memory, under every layout ------------------------------------------------

    precision: str = "fp32"
    """Type of the arithmetic: fp32, bf16, fp16 (with loss scaling), or fp8: bf16 with the blocks' linear layers in
    float8 (on GPUs from Ada and Hopper on). Parameters, optimizer and loss stay float32."""
    compile: bool = False
    """Compile each block with torch.compile."""
    compile_backend: str = "inductor"
    """Backend of torch.compile; aot_eager compiles nothing and starts quickly."""
    activation_checkpointing: str = "none"
    """Recompute activations in backward instead of keeping them: none, full (each block), every_2 (every second block;
    any number), or selective (each block, but the results of matrix products are kept)."""

    # --- data parallelism -------------------------------------------------------------------------

    reduce_dtype: str = "fp32"
    """Type that gradients are averaged over data-parallel workers in: fp32 or bf16."""
    bucket_mb: float = 25.0
    """With ddp: size of a gradient bucket, in MiB; smaller starts communicating earlier."""
    find_unused_parameters: bool = False
    """With ddp: a step may leave parameters unused; each step then searches for them, which takes time."""
    offload: bool = False
    """With dp_shard, or strategy=fsdp on one worker: keep parameters, gradients and optimizer state in host memory."""
    reshard_after_forward: bool | None = None
    """With dp_shard: free gathered parameters after forward (less memory, one more all-gather). null: zero1 and zero2
    no; fsdp, zero3 and hsdp yes, but not on a GPU of whose free memory they take less than an
    eighth."""
    accumulate_sharded: bool | None = None
    """With dp_shard and several micro-batches: reduce-scatter each one's gradients instead of keeping whole ones
    until the last (less memory, more communication). null: zero2 yes, zero1 no, fsdp on a GPU of
    which whole ones would take an eighth or more."""
    float_output: bool = True
    """With dp_shard and 16 bits: the module's output comes back as float32. False: as it was computed."""
    deepspeed: dict[str, Any] | None = None
    """With strategy deepspeed: the contents of a DeepSpeed JSON. None: ZeRO stage 2."""

    # --- tensor parallelism -----------------------------------------------------------------------

    sequence_parallel: bool = True
    """With tp: also split activations between the split layers along the sequence."""
    async_tp: bool = False
    """With tp: what the split layers send travels in pieces while they multiply (asynchronous tensor parallelism); for
    GPUs whose links take about as long as their products. Not in zb_h1, zb_h2 and zbv."""
    loss_parallel: bool = True
    """With tp: keep the logits split over the vocabulary and compute the loss on the parts."""

    # --- context parallelism ----------------------------------------------------------------------

    context: str = "auto"
    """With cp: how tokens of different workers attend: ring (keys pass round), allgather, ulysses (heads are exchanged
    for tokens), or auto: ulysses within a node where cp · tp divides the heads, else ring."""

    # --- pipelines --------------------------------------------------------------------------------

    schedule: str = "1f1b"
    """With pp: order of the micro-batches' forwards and backwards on each stage: gpipe, 1f1b, interleaved_1f1b,
    zb_h1, zb_h2 or zbv."""
    chunks: int = 1
    """With pp: chunks of the model on each stage; 2 or more for interleaved_1f1b, 2 for zbv."""
    stages: tuple[int, ...] | None = None
    """With pp: blocks of each chunk, first to last (pp · chunks numbers). None: balanced by estimated cost."""
