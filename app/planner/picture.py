"""A layout as a page: the first ranks beside the dimensions they are in, and what each dimension holds and sends."""

from typing import Any

from app.console.terminal import quantity
from app.planner.estimate import Estimate
from app.planner.plan import GIB, Plan
from app.planner.timing import Case
from strategies.context.apply import METHODS
from strategies.dims import MESH_DIMS, ParallelDims

SHOWN = 64
"""Ranks that are drawn."""
SIDE, LEFT = 15, 110  # of a rank's square, and of the names, in pixels
COLOURS = ("#2563a8", "#d98324", "#3a8f5c", "#a23b72", "#6b7280", "#b5a642", "#4aa3c7", "#8c564b")
EXPOSED = {"pp": "pipeline_send", "dp_replicate": "replicate", "dp_shard": "shard", "cp": "context", "tp": "tensor"}
EXPOSED["ep"] = "expert"
"""The part of the step's time that a dimension's communication is."""
DRAWN = (*MESH_DIMS[:-1], "ep", "tp")
"""Outermost first; ep is inside the data-parallel workers."""


def content(plan: Plan, row: Estimate) -> dict[str, Any]:
    """The page's contents, as experiments/report/page.py renders them."""
    candidate, machine, dims = row.candidate, plan.machine, row.candidate.dims
    memory = [{"on the fullest rank": name, "GiB": value / GIB} for name, value in row.memory.items() if value]
    gpus = f"{machine.world:,} × {machine.device.gpu.name}"
    shown = min(SHOWN, dims.world_size)
    return {
        "title": f"{candidate.layout}",
        "about": f"{quantity(plan.reader.parameters / 1e6)} million parameters on {gpus}, {machine.per_node} to a node",
        "facts": [
            [
                "Step",
                f"{row.step_seconds:.3g} s",
                f"{candidate.micro_batches} × {candidate.micro_batch} samples",
            ],
            ["Memory", f"{row.memory_bytes / GIB:.1f} GiB", f"of {row.capacity / GIB:.0f}, on the fullest rank"],
            ["Recomputation", candidate.checkpointing, candidate.precision],
        ],
        "sections": [
            {
                "title": "Ranks",
                "sentences": ["Ranks with the same colour and number have the same place along the dimension."],
                "plots": [[_drawn(plan, row, shown), f"The first {shown} of {dims.world_size:,} ranks, by node"]],
            },
            {"title": "Dimensions", "tables": [{"rows": _dimensions(plan, row)}]},
            {"title": "Memory", "tables": [{"rows": memory}]},
        ],
    }


def _drawn(plan: Plan, row: Estimate, shown: int) -> str:
    dims, node = row.candidate.dims, plan.machine.per_node
    names = [name for name in DRAWN if getattr(dims, name) > 1] or ["dp_replicate"]
    places = [dims.coordinates(rank) | {"ep": rank // dims.tp % dims.ep} for rank in range(shown)]
    parts: list[str] = []
    for y, name in enumerate(names):
        top = 20 + y * (SIDE + 6)
        parts.append(f'<text x="0" y="{top + 11}" font-size="11">{name} {getattr(dims, name)}</text>')
        for rank, place in enumerate(places):
            x = LEFT + rank * SIDE + 6 * (rank // node)
            colour, number = COLOURS[place[name] % len(COLOURS)], place[name]
            parts.append(f'<rect x="{x}" y="{top}" width="{SIDE - 1}" height="{SIDE}" fill="{colour}"/>')
            parts.append(f'<text x="{x + 2}" y="{top + 11}" font-size="8" fill="#fff">{number}</text>')
    for first in range(0, shown, node):
        parts.append(f'<text x="{LEFT + first * SIDE + 6 * (first // node)}" y="12" font-size="10">rank {first}</text>')
    width, height = LEFT + shown * SIDE + 6 * (shown // node), 26 + len(names) * (SIDE + 6)
    return f'<svg class="plot" viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _dimensions(plan: Plan, row: Estimate) -> list[dict[str, Any]]:
    """A row of the table for each dimension that is longer than 1; those of parameters with cp, which extends them."""
    case, dims, found = plan.estimator.case(row.candidate)[0], row.candidate.dims, []
    holds, sends = _holds(plan, row, case), _sends(case)
    for name in reversed(DRAWN):
        peers = _with_rank_0(row.candidate.held if name.startswith("dp_") else dims, name)
        if len(peers) > 1:
            nodes = len({rank // plan.machine.per_node for rank in peers})
            found.append(
                {
                    "dimension": f"{name}{' × cp' if getattr(dims, name) != len(peers) else ''} {len(peers):,}",
                    "with rank 0": ", ".join(f"{rank:,}" for rank in peers[1:4]) + (" …" if len(peers) > 4 else ""),
                    "over": "one node" if nodes == 1 else f"{nodes:,} nodes",
                    "each holds": holds[name],
                    "sends per step, GB": sends.get(name, 0.0) / 1e9,
                    "seconds not hidden": row.seconds[EXPOSED[name]],
                }
            )
    return found


def _with_rank_0(dims: ParallelDims, name: str) -> list[int]:
    if name == "ep":
        return [rank * dims.tp for rank in range(dims.ep)]
    return next(group for group in dims.peers(name) if 0 in group)


def _holds(plan: Plan, row: Estimate, case: Case) -> dict[str, str]:
    dims, strategy, length = row.candidate.dims, row.candidate.strategy, plan.reader.sequence_length or 0
    heads, mixtures, shards = plan.reader.heads, plan.reader.mixtures, row.candidate.held.for_experts().dp_shard
    experts = max((found.count for found in mixtures), default=0)
    return {
        "tp": f"1/{dims.tp} of each split layer" + (f", {heads // dims.tp} heads" if heads else ""),
        "cp": f"{length // dims.cp:,} tokens of each sequence ({case.context})",
        "ep": f"{experts // dims.ep} of {experts} experts in each of {len(mixtures)} layers"
        + (f", 1/{shards} of each" if strategy.is_sharded and shards > 1 else ""),
        "dp_shard": f"1/{row.candidate.held.dp_shard:,} of every parameter{' but experts' if dims.ep > 1 else ''}; "
        "other samples",
        "dp_replicate": f"the same {'shards' if strategy.is_sharded else 'parameters'}; other samples",
        "pp": f"{plan.reader.blocks / dims.pp:.3g} of {plan.reader.blocks} blocks",
    }


def _sends(case: Case) -> dict[str, float]:
    """Bytes that rank 0 sends in a step, by dimension."""
    dims, many, held = case.candidate.dims, case.candidate.micro_batches, case.candidate.held
    sent = {"tp": 0.0, "cp": 0.0, "dp_shard": 0.0, "dp_replicate": 0.0}
    sent["ep"] = case.exchanged * many * (dims.ep - 1) / dims.ep
    for part, unit, count in zip(case.parts, case.units, case.counts):
        sent["tp"] += part.sent * count * many
        if dims.cp > 1:
            forward, backward = METHODS[case.context].sent_bytes(part.queries, part.keys, dims.cp, case.work.itemsize)
            sent["cp"] += (forward * part.exchanges + backward) * count * many
        for collective in case.candidate.strategy.collectives(unit, case.step):
            ways = getattr(held, collective.over)
            share = (ways - 1) / ways * (2 if collective.name == "all_reduce" else 1)
            sent[collective.over] += float(collective.bytes) * share * collective.times * count
    ends = 2 * case.candidate.chunks * many * max(part.crossing for part in case.parts)
    return sent | {"pp": ends * (dims.pp > 1)}
