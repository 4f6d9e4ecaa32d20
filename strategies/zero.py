"""ZeRO stages 1 and 2: shard the optimizer state, then also the gradients, but compute with whole parameters.

    stage   parameters   gradients   AdamW state    sends, beside DDP's all-reduce
      0       whole        whole        whole         the same (that is DDP)
      1       whole        whole        1/R           the same: reduce-scatter, then all-gather
      2       whole        1/R          1/R           the same; one reduce-scatter per micro-batch
      3       1/R          1/R          1/R           half as much again (fsdp.py)

AdamW needs only a slice's gradient to update the slice; so each worker updates 1/R of the parameters and the results
are gathered. Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, figure 1.

Both are `fully_shard` that keeps gathered parameters until backward is over: the slices are the parameters that the
optimizer sees, gathering them at the next forward is stage 1's final all-gather, and the state stays reshardable
(ZeroRedundancyOptimizer's does not). The stages differ in accumulation: stage 1 sums whole gradients and reduces once,
stage 2 reduces each micro-batch's and keeps slices. With one micro-batch per step they are the same run.

Choose zero1 when a device holds the model and its gradients but not the optimizer state as well, zero2 when whole
gradients are too much too; fsdp when parameters are. Nothing is sent between micro-batches with zero1.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from strategies import fsdp
from strategies.costs import Cost, ModelSize
from strategies.options import Options


def apply(module: nn.Module, mesh: DeviceMesh, blocks: list[str], options: Options) -> list[FSDPModule]:
    """Shards the module in place, freeing no parameter before backward is over; its units, the root first."""
    return fsdp.apply(module, mesh, blocks, options, reshard_after_forward=bool(options.reshard_after_forward))


def micro_step(units: list[FSDPModule], stage: int, options: Options) -> fsdp.MicroStep:
    """Of stage 1 only the last micro-batch communicates gradients, of stage 2 each; parameters are gathered once."""
    sharded = stage == 2 if options.accumulate_sharded is None else options.accumulate_sharded
    return fsdp.micro_step(units, accumulate_sharded=sharded, keep_gathered=not options.reshard_after_forward)


def cost(
    size: ModelSize,
    ways: int,
    stage: int,
    options: Options | None = None,
    *,
    micro_batches: int = 1,
    optimizer: str = "adamw",
) -> Cost:
    """fsdp's, with parameters gathered once per step and, for stage 2, gradients reduced per micro-batch."""
    return fsdp.cost(
        size,
        ways,
        options,
        reshard_after_forward=False,
        accumulate_sharded=stage == 2,
        micro_batches=micro_batches,
        optimizer=optimizer,
    )
