"""Ways to save memory of activations, each beside keeping all of them on the GPU.

Activation checkpointing, activations in host memory and smaller micro-batches are compared for one
layout, so that nothing else differs.
"""

from app.planner.estimate import Estimate
from app.planner.layouts import MOVES_ACTIVATIONS, Fixed
from app.planner.plan import GIB, Plan, first_of
from app.planner.remedies import LAYOUT_KEYS, on_same_gpus, sixteen_bits
from strategies.dims import DEGREES, Layout

CHECKPOINTING = "checkpointing"
OFFLOADING = "offloading activations"
BOTH = "both"
ACCUMULATION = "accumulation"


def compare_ways_to_save_activations(plan: Plan) -> str:
    """What checkpointing, offloading and accumulation take, beside keeping everything.

    All are planned for the layout that is the fastest if memory does not matter.

    Returns:
        A sentence; "" if the configuration leaves no choice.
    """
    train = plan.config.train
    fixed: Fixed = {key: value for key, value in plan.fixed.items() if key in LAYOUT_KEYS}
    fixed |= {"parallel.offload": False, "train.precision": sixteen_bits(plan)}
    at_once: Fixed = {"train.micro_batch_size": train.micro_batch_size or train.global_batch_size}
    not_recomputed: Fixed = {"train.activation_checkpointing": "none"}
    on_gpu: Fixed = {MOVES_ACTIVATIONS: False}
    on_host: Fixed = {MOVES_ACTIVATIONS: True}

    everything_stays = fixed | at_once | not_recomputed | on_gpu
    rows = on_same_gpus(plan, everything_stays)
    everything = min(rows, key=lambda row: row.step_seconds, default=None)
    if everything is None:
        return ""
    layout = everything.candidate.layout
    fixed |= {f"parallel.{name}": getattr(layout.dims, name) for name in DEGREES}
    ways = {
        CHECKPOINTING: _best(plan, layout, fixed | at_once | on_gpu, recomputes=True),
        OFFLOADING: _best(plan, layout, fixed | at_once | not_recomputed | on_host),
        BOTH: _best(plan, layout, fixed | at_once | on_host, recomputes=True),
        ACCUMULATION: _best(plan, layout, fixed | not_recomputed | on_gpu),
    }
    clauses = [_clause(way, row, everything) for way, row in ways.items() if row is not None]
    return (
        f"With all activations on the GPU {layout.name} in {everything.candidate.precision} needs "
        f"{everything.memory_bytes / GIB:.3g} GiB; {'; '.join(clauses)}."
    )


def _best(plan: Plan, layout: Layout, fixed: Fixed, *, recomputes: bool = False) -> Estimate | None:
    """The best plan of a layout; None if there is none.

    Args:
        plan: The plan.
        layout: The layout.
        fixed: Keys of the configuration whose values stay.
        recomputes: Whether activations are to be recomputed.
    """
    rows = on_same_gpus(plan, fixed)
    return first_of(
        [
            row
            for row in rows
            if row.candidate.layout == layout
            and (row.candidate.checkpointing != "none") == recomputes
        ]
    )


def _clause(way: str, row: Estimate, everything: Estimate) -> str:
    """What a way to save activations takes, beside keeping all of them."""
    candidate = row.candidate
    host_memory = f"{row.host_memory_bytes / GIB:.3g} GiB"
    value = {
        CHECKPOINTING: candidate.checkpointing,
        OFFLOADING: f"{host_memory} of each host",
        BOTH: f"{candidate.checkpointing}, {host_memory}",
        ACCUMULATION: f"micro-batches of {candidate.micro_batch}",
    }[way]
    size = f"{row.memory_bytes / GIB:.3g} GiB"
    verdict = f"it fits ({size})" if row.fits else f"it does not fit ({size})"
    times = row.step_seconds / everything.step_seconds
    return f"with {way} ({value}) {verdict} and takes {times:.3g} times as long"
