"""Hybrid sharded data parallelism: shard within a node, replicate across nodes.

On a grid of G groups of S workers (dp_replicate × dp_shard) every group holds one sharded copy:

    forward, backward:  all-gather parameters within the group           (fast links, every block)
    backward:           reduce-scatter gradients within the group, then
                        all-reduce the slices across groups              (slow links, 1/S of the gradients, once)

It is `fully_shard` on a two-dimensional mesh and nothing else: fsdp.py says the rest. Choose it when one node's memory
holds the sharded training state and there are several nodes: FSDP over all of them would gather every block over the
slow links. It costs S-way memory instead of (G·S)-way. Zhao et al. 2023, https://arxiv.org/abs/2304.11277, §3.2.2;
zero1 and zero2 take a dp_replicate in the same way.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from strategies import fsdp
from strategies.costs import Cost, ModelSize, all_reduce
from strategies.options import Options


def apply(
    module: nn.Module, mesh: DeviceMesh, blocks: list[str], options: Options, *, reshard_after_forward: bool
) -> list[FSDPModule]:
    """Shards the module in place over a mesh (dp_replicate, dp_shard); its units, the root first."""
    return fsdp.apply(module, mesh, blocks, options, reshard_after_forward=reshard_after_forward)


def cost(size: ModelSize, groups: int, ways: int, options: Options | None = None, *, micro_batches: int = 1) -> Cost:
    """fsdp's within the group, and an all-reduce of the slices across groups."""
    return across(fsdp.cost(size, ways, options, micro_batches=micro_batches), groups, options)


def across(inside: Cost, groups: int, options: Options | None = None) -> Cost:
    """The cost of several groups, from that of one."""
    wire = inside.gradients // 2 if options is not None and options.reduce_dtype == "bf16" else inside.gradients
    return replace(inside, sent=inside.sent | {"all_reduce": all_reduce(wire, groups)})
