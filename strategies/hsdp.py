"""Hybrid sharded data parallelism: shard within a node, replicate across nodes.

On a mesh of G groups of S workers (dp_replicate × dp_shard) every group holds one sharded copy:

    forward, backward:  all-gather parameters within the group           (fast links, every block)
    backward:           reduce-scatter gradients within the group, then
                        all-reduce the shards across groups              (slow links, 1/S of the gradients, once)

It is `fully_shard` on a two-dimensional mesh and nothing else: fsdp.py has the rest, this second all-reduce included.
Choose it when one node's memory holds the sharded training state and there are several nodes: FSDP over all of them
would gather every block over the slow links. It costs S-way memory instead of (G·S)-way. Zhao et al. 2023,
https://arxiv.org/abs/2304.11277, §3.2.2; zero1 and zero2 take a dp_replicate in the same way.
"""

from __future__ import annotations

from dataclasses import replace

from strategies import fsdp

STRATEGY = replace(
    fsdp.STRATEGY,
    name="hsdp",
    summary="sharded in groups, groups replicated",
    degrees=("dp_replicate", "dp_shard"),
    also=("tp", "pp"),
)
