"""All-reduce bandwidth as training has it: within nodes, across all, and, where that is slow, between neighbours.

Every idle GPU is a rank; where no node has one, every node's CPU is. Only nodes that can connect to one another take
part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from app.doctor.facts import ClusterFacts, NodeFacts, RingFacts

BYTES = {"nccl": 256 << 20, "gloo": 16 << 20}
TIMES = 5
JOIN_SECONDS = 25
GLOO_MOST = 1e9  # bytes/s: copying through the CPU gives no more on any link
Ask = Callable[[dict[Any, Any]], dict[Any, Any]]  # futures by name -> answers by name; a text is an error
Rank = tuple[NodeFacts, int | None]  # its node, and the driver's index of its GPU; None: the CPU


class RingRank:
    """The actor of one rank. gpu: as in `Rank`. interface: where gloo's peers find it. Sent by value, as the probe."""

    def __init__(self, gpu: int | None, interface: str) -> None:
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        import torch

        self.torch, self.backend = torch, "gloo" if gpu is None else "nccl"
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        self.store: Any = None

    def open(self, address: str) -> tuple[str, int]:
        """The first rank's part: where all find one another."""
        from torch.distributed import TCPStore

        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def join(self, rank: int, ranks: int, store: tuple[str, int]) -> str:
        import torch.distributed as dist

        if self.backend == "nccl":
            self.torch.cuda.set_device(self.device)
        wait = timedelta(seconds=JOIN_SECONDS)
        found = self.store or dist.TCPStore(*store, is_master=False, timeout=wait)
        dist.init_process_group(self.backend, store=found, rank=rank, world_size=ranks, timeout=wait)
        self.data = self.torch.ones(BYTES[self.backend] // 4, device=self.device)
        return self.backend

    def rate(self, groups: list[list[int]]) -> float | None:
        """Bytes/s that leave each rank while its group reduces, in a ring: 2 (n-1)/n of the data. Every rank calls this
        with the same disjoint groups; None where it is in none of them."""
        import torch.distributed as dist

        made = [(group, dist.new_group(group)) for group in groups]
        own = next(((ranks, group) for ranks, group in made if dist.get_rank() in ranks), None)
        if own is None:
            return None
        ranks, group = own
        best = float("inf")
        for _ in range(TIMES + 1):  # the first one connects
            self._finish()
            begun = time.perf_counter()
            dist.all_reduce(self.data, group=group)
            self._finish()
            best = min(best, time.perf_counter() - begun)
            self.data.fill_(1.0)
        return 2 * (len(ranks) - 1) / len(ranks) * BYTES[self.backend] / best

    def _finish(self) -> None:
        if self.backend == "nccl":
            self.torch.cuda.synchronize(self.device)


def measure(facts: ClusterFacts, ranks: list[Rank], actors: list[Any], ask: Ask) -> tuple[RingFacts, ...]:
    """What all-reduce gives between the ranks, each of which is an actor; facts: of the look so far."""
    nodes = list(dict.fromkeys(node.node_id for node, _ in ranks))
    store = ask({0: actors[0].open.remote(ranks[0][0].address)})[0]
    if isinstance(store, str):
        return (RingFacts(tuple(nodes), len(ranks), "", problem=store),)
    joined = ask({rank: actor.join.remote(rank, len(actors), store) for rank, actor in enumerate(actors)})
    problem = next((answer for answer in joined.values() if answer not in BYTES), "")
    if problem:
        return (RingFacts(tuple(nodes), len(ranks), "", problem=problem),)

    def ring(groups: list[list[int]]) -> list[RingFacts]:
        rates = ask({rank: actor.rate.remote(groups) for rank, actor in enumerate(actors)}) if groups else {}
        return [_ring(facts, [ranks[r][0] for r in group], joined[0], [rates[r] for r in group]) for group in groups]

    per_node = [[rank for rank, (node, _) in enumerate(ranks) if node.node_id == name] for name in nodes]
    found = ring([group for group in per_node if len(group) > 1])
    if len(nodes) > 1:
        found += ring([list(range(len(ranks)))])
    if len(nodes) > 2 and found[-1].is_slow:
        pairs = [[per_node[i][0], per_node[(i + 1) % len(nodes)][0]] for i in range(len(nodes))]
        for disjoint in (pairs[0:-1:2], pairs[1:-1:2], pairs[-1:]):
            found += ring(disjoint)
    return tuple(found)


def _ring(facts: ClusterFacts, members: list[NodeFacts], backend: str, rates: list[Any]) -> RingFacts:
    """One ring's measurement beside what should come; the slowest rank's rate is the ring's."""
    nodes = tuple(dict.fromkeys(node.node_id for node in members))
    problem = next((str(rate) for rate in rates if not isinstance(rate, float)), "")
    expected = expected_rate(facts, nodes, backend)
    return RingFacts(nodes, len(members), backend, None if problem else min(rates), expected, problem)


def expected_rate(facts: ClusterFacts, nodes: tuple[str, ...], backend: str) -> float | None:
    """Bytes/s that should leave each rank: within a node by the catalogue of GPUs, across nodes by the cluster's file.
    None where that is not known."""
    from cluster.hardware import HardwareError, gpu

    members = [facts.node(node) for node in nodes]
    if len(members) == 1:
        try:
            return min(gpu(each.name).link_within for each in members[0].gpus) if backend == "nccl" else None
        except HardwareError:
            return None
    rate = facts.link_expected
    return min(rate, GLOO_MOST) if rate and backend == "gloo" else rate


def ranks_of(facts: ClusterFacts) -> list[Rank]:
    """Idle GPUs that torch sees in the driver's order; without any GPU in the cluster, a CPU per node."""
    cut_off = {name for node in facts.answered if node.unreachable for name in (*node.unreachable, node.node_id)}
    nodes = [node for node in facts.answered if node.node_id not in cut_off and node.versions.get("torch")]
    if not any(node.gpus for node in nodes):
        return [(node, None) for node in nodes]
    usable = [node for node in nodes if node.torch_gpus == len(node.gpus) and node.visible is None]
    return [(node, gpu.index) for node in usable for gpu in node.gpus if not gpu.processes and not gpu.mig]
