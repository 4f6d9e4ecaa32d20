"""Seconds of collectives, by ring algorithms over the links between the devices that take part.

Ranks are numbered so that tp peers are next to one another, then dp_shard's, then dp_replicate's, then stages
(strategies/layout.py); a node holds `per_node` consecutive ranks. A group whose neighbours are `stride` ranks apart has
min(n, per_node / stride) members in a node; the other ranks of the node run the same collective in groups of their own
at the same time and share the node's link. Thakur et al. 2005.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from app.planner.rates import Rates

Array = np.ndarray
CROWDED = 1.5
"""How much slower workers are where there are more of them than processors."""


@dataclass(frozen=True)
class Links:
    """What connects devices: bytes/s per device within a node, per node across."""

    within: float
    across: float
    per_node: int
    """Devices of a node that are used."""
    latency_within: float
    latency_across: float


def links(device: Rates, across: float, per_node: int) -> Links:
    return Links(
        device.gpu.link_within * device.within,
        across * device.across,
        per_node,
        device.latency_within,
        device.latency_across,
    )


def on_processors(link: Links, device: Rates, workers: int) -> Links:
    """Between workers on a machine's processors: whoever computes also sends, and waits for its turn."""
    slow = device.slowdown(workers)
    turn = device.crowded_latency if slow > CROWDED else 1.0
    return replace(link, within=link.within / slow, latency_within=link.latency_within * turn)


def gather_seconds(size: Array, ways: Array, stride: Array, link: Links) -> Array:
    """An all-gather to, or reduce-scatter from, `size` bytes over `ways` ranks that are `stride` apart."""
    members, nodes = _placed(ways, stride, link)
    inside = size * (ways - 1) / ways / link.within
    sharing = np.maximum(1, link.per_node / members)
    outside = np.where(nodes > 1, size * (nodes - 1) / nodes * sharing / link.across, 0.0)
    hops = (members - 1) * link.latency_within + (nodes - 1) * link.latency_across
    return np.where(ways > 1, np.maximum(inside, outside) + hops, 0.0)


def is_across(ways: Array, stride: Array, link: Links) -> Array:
    """Whether such a group waits for the link between nodes rather than for that within."""
    members, nodes = _placed(ways, stride, link)
    outside = (nodes - 1) / nodes * np.maximum(1, link.per_node / members) / link.across
    return (nodes > 1) & (outside >= (ways - 1) / ways / link.within)


def reduce_seconds(size: Array, ways: Array, stride: Array, link: Links) -> Array:
    """An all-reduce of `size` bytes: a reduce-scatter and an all-gather; hops in a tree."""
    members, nodes = _placed(ways, stride, link)
    without = gather_seconds(size, ways, stride, link)
    hops = (members - 1) * link.latency_within + (nodes - 1) * link.latency_across
    tree = np.log2(np.maximum(members, 1)) * link.latency_within + np.log2(np.maximum(nodes, 1)) * link.latency_across
    return np.where(ways > 1, 2 * (without - hops + tree), 0.0)


def send_seconds(size: Array, stride: Array, link: Links) -> Array:
    """From one stage to the next, `stride` ranks away; all of a node's devices send at once."""
    crossing = stride >= link.per_node
    rate = np.where(crossing, link.across / link.per_node, link.within)
    return size / rate + np.where(crossing, link.latency_across, link.latency_within)


def _placed(ways: Array, stride: Array, link: Links) -> tuple[Array, Array]:
    """Members per node, and nodes, of a group."""
    members = np.clip(link.per_node // np.maximum(stride, 1), 1, ways)
    members = np.where(ways % members == 0, members, 1)
    return members, ways // members
