"""How tokens spread over the experts of a mixture, as metrics `experts/…` of a step."""

from app.checkpoint.ranks import Ranks
from strategies.parallel import Parallel


def expert_metrics(parallel: Parallel) -> dict[str, float]:
    """The metrics of the last step. A collective call in a pipeline.

    A load of 1 is an expert's share if all are used evenly. An entropy of 1 is that of a router
    that prefers no expert. The metrics are means over the layers, except for the largest and the
    smallest load.

    Args:
        parallel: The model under its layout.

    Returns:
        The metrics by name; {} for a model without experts.
    """
    by_layer = parallel.router_metrics()
    if parallel.layout.dims.pp > 1:
        by_layer = {
            name: metrics
            for stage in Ranks().all_gather(by_layer)
            for name, metrics in stage.items()
        }
    if not by_layer:
        return {}
    loads = []
    entropies = []
    dropped = []
    for *load, entropy, dropped_tokens in by_layer.values():
        loads.append(load)
        entropies.append(entropy)
        dropped.append(dropped_tokens)
    layers = len(by_layer)
    values = {
        "experts/load_largest": max(max(load) for load in loads),
        "experts/load_smallest": min(min(load) for load in loads),
        "experts/router_entropy": sum(entropies) / layers,
        "experts/dropped_tokens": sum(dropped) / layers,
    }
    has_equal_layers = len({len(load) for load in loads}) == 1
    if has_equal_layers:
        for expert, load_by_layer in enumerate(zip(*loads, strict=True)):
            values[f"experts/load_{expert}"] = sum(load_by_layer) / layers
    return values
