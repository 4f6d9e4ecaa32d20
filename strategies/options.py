"""The options of parallelism: how a layout behaves, apart from its degrees.

Only this file has the defaults and the documentation of these options. `app/config/schema.py` takes
both from here, `app/training/job.py` builds an `Options` from a configuration, layout.py checks it,
and strategies read it.
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
"""The names that registry.py has records for. This file does not import the strategies."""
OTHER_NAMES = {
    "dp": "data_parallel dataparallel",
    "ddp": "distributed_data_parallel distributeddataparallel distributed",
    "zero2": "zero zero_2 shard_grad_op",
    "zero1": "zero_1 zero_redundancy_optimizer",
    "fsdp": "fsdp1 fsdp2 zero_3 full_shard fully_shard sharded",
    "hsdp": "hybrid_shard hybrid_sharded",
    "tensor": "tp tensor_parallel megatron megatron_lm",
    "pipeline": "pp pipeline_parallel",
    "context": "cp sp context_parallel sequence_parallel ring_attention ulysses",
    "expert": "ep moe expert_parallel",
}
"""For some strategies, the names that other libraries have for them, separated by spaces."""
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
REDUCE_DTYPES = ("fp32", "bf16")
WEIGHT_DTYPES = ("fp32", "bf16")
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
    """Type of the arithmetic: fp32, bf16, fp16 (with loss scaling), or fp8: bf16 with the blocks'
    linear layers in float8 (Ada and Hopper GPUs, or newer). Parameters, optimizer and loss stay
    float32."""
    weight_dtype: str = "fp32"
    """Type that weights and gradients are kept in: fp32, or with precision bf16 or fp8 also bf16,
    in half the memory. adamw and adamw8bit then round weights stochastically, up or down at random
    and right on average, so that steps too small for 16 bits are not lost."""
    compile: bool = False
    """Compile each block with torch.compile."""
    compile_backend: str = "inductor"
    """Backend of torch.compile; aot_eager compiles nothing and starts quickly."""
    activation_checkpointing: str = "none"
    """Recompute activations in backward instead of keeping them: none, full (each block), every_2
    (every second block; any number), or selective (each block, but the results of matrix products
    are kept)."""
    activation_offloading: bool = False
    """Keep what blocks save for backward in host memory instead of the GPU's. It is copied while
    other blocks compute, and costs time only where copying takes longer than computing."""

    # --- data parallelism -------------------------------------------------------------------------

    reduce_dtype: str = "fp32"
    """Type in which gradients are averaged over data-parallel workers: fp32 or bf16."""
    bucket_mb: float = 25.0
    """With ddp: size of a gradient bucket, in MiB; smaller starts communicating earlier."""
    find_unused_parameters: bool = False
    """With ddp: a step may leave parameters unused. Each step then searches for them, which takes
    time."""
    offload: bool = False
    """With dp_shard, or strategy=fsdp on one worker: keep parameters, gradients and optimizer state
    in host memory."""
    reshard_after_forward: bool | None = None
    """With dp_shard: free gathered parameters after forward (less memory, one more all-gather).
    null: no for zero1 and zero2; yes for fsdp, zero3 and hsdp, unless they take less than an eighth
    of a GPU's free memory."""
    accumulate_sharded: bool | None = None
    """With dp_shard and several micro-batches: reduce-scatter the gradients of each micro-batch
    instead of keeping whole gradients until the last one (less memory, more communication). null:
    yes for zero2, no for zero1, and for fsdp if whole gradients would take an eighth of a GPU's
    memory or more."""
    float_output: bool = True
    """With dp_shard and 16 bits: cast the module's output to float32. False: leave it as it is."""
    deepspeed: dict[str, Any] | None = None
    """With strategy deepspeed: the contents of a DeepSpeed JSON. None: ZeRO stage 2."""

    # --- tensor parallelism -----------------------------------------------------------------------

    sequence_parallel: bool = True
    """With tp: also split activations between the split layers along the sequence."""
    async_tp: bool = False
    """With tp: split layers send in pieces while they multiply (asynchronous tensor parallelism);
    for GPUs whose links take about as long as their products. Not in zb_h1, zb_h2 and zbv."""
    loss_parallel: bool = True
    """With tp: keep the logits split over the vocabulary and compute the loss on the parts."""

    # --- context parallelism ----------------------------------------------------------------------

    context: str = "auto"
    """With cp: how tokens attend to those of other workers: ring (keys go from worker to worker),
    allgather, ulysses (heads are exchanged for tokens), or auto: ulysses within a node if cp · tp
    divides the heads, else ring."""

    # --- pipelines --------------------------------------------------------------------------------

    schedule: str = "1f1b"
    """With pp: order of the micro-batches' forwards and backwards on each stage: gpipe, 1f1b,
    interleaved_1f1b, zb_h1, zb_h2 or zbv."""
    chunks: int = 1
    """With pp: chunks of the model on each stage; 2 or more for interleaved_1f1b, 2 for zbv."""
    stages: tuple[int, ...] | None = None
    """With pp: blocks of each chunk, first to last (pp · chunks numbers). None: balanced by
    estimated cost."""
