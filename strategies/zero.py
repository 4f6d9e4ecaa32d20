"""ZeRO stages 1 and 2: shard the optimizer state, then also the gradients, but compute with all parameters.

    stage   parameters   gradients   AdamW state    sends, beside DDP's all-reduce
      0       all          all          all           the same (that is DDP)
      1       all          all          1/R           the same: reduce-scatter, then all-gather
      2       all          1/R          1/R           the same; one reduce-scatter per micro-batch
      3       1/R          1/R          1/R           half as much again (fsdp.py)

AdamW needs only a shard's gradient to update the shard; so each worker updates 1/R of the parameters and the results
are gathered. Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, figure 1.

Both are `fully_shard` that keeps gathered parameters until backward is over: the shards are the parameters that the
optimizer sees, gathering them at the next forward is stage 1's final all-gather, and the state stays reshardable
(ZeroRedundancyOptimizer's does not). The stages differ in accumulation: stage 1 sums full gradients and reduces once,
stage 2 reduces each micro-batch's and keeps shards. With one micro-batch per step they are the same run.

Choose zero1 when a device holds the model and its gradients but not the optimizer state as well, zero2 when full
gradients are too much too; fsdp when parameters are. Nothing is sent between micro-batches with zero1. In a pipeline
parameters are gathered once per step and gradients scattered once whatever the stage of ZeRO, so there is only fsdp.
"""

from __future__ import annotations

from dataclasses import replace

from strategies import fsdp

ZERO1 = replace(
    fsdp.STRATEGY,
    name="zero1",
    summary="copies, optimizer state sharded",
    also=("dp_replicate", "tp"),
    reshard_after_forward=False,
    reduce_scatter_each_microbatch=False,
)
ZERO2 = replace(
    ZERO1,
    name="zero2",
    summary="copies, optimizer state and gradients sharded",
    reduce_scatter_each_microbatch=True,
)
