"""How a mixture's experts are used, as metrics: `experts/…`, of the last step before each boundary."""

from app.checkpoint.ranks import Ranks
from strategies.parallel import Parallel


def expert_metrics(parallel: Parallel) -> dict[str, float]:
    """Loads are relative to even use (1), entropies to that of a router that prefers no expert (1); means over layers,
    but for the largest and the smallest load. {} for a model without experts. Collective with stages."""
    found = parallel.router_metrics()
    if parallel.layout.dims.pp > 1:
        found = {name: row for part in Ranks().all(found) for name, row in part.items()}
    if not found:
        return {}
    loads, layers = [row[:-2] for row in found.values()], len(found)
    values = {
        "experts/load_largest": max(map(max, loads)),
        "experts/load_smallest": min(map(min, loads)),
        "experts/router_entropy": sum(row[-2] for row in found.values()) / layers,
        "experts/dropped_tokens": sum(row[-1] for row in found.values()) / layers,
    }
    if len({len(row) for row in loads}) == 1:
        values |= {f"experts/load_{e}": sum(column) / layers for e, column in enumerate(zip(*loads))}
    return values
