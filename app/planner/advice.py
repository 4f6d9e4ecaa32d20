"""Why each strategy won, lost or cannot be, which to use, and what would hold a model that fits nowhere: sentences."""

from __future__ import annotations

from app.planner.device import device
from app.planner.estimate import Estimate
from app.planner.layouts import Fixed, enumerate_layouts
from app.planner.plan import GIB, NEAR, Plan
from cluster.hardware import all_instances
from strategies import registry
from strategies.dims import NAMES

PARTS = {
    "compute": "computation (smaller matrix products, or recomputation)",
    "tensor": "tensor parallelism's communication, which nothing hides",
    "shard": "gathering parameters and scattering gradients, which computation does not hide",
    "replicate": "the all-reduce that backward does not hide",
    "pipeline_send": "activations sent between stages",
    "contention": "computation slowed by communication beside it",
    "bubble": "stages waiting for the pipeline to fill and drain",
    "optimizer": "the optimizer, whose state is not sharded",
    "data": "copying samples to the GPU",
    "rest": "the fixed cost of a step",
}
"""timing.py's parts of a step in words."""
COMMUNICATION = ("tensor", "shard", "replicate", "pipeline_send", "contention")


def families(plan: Plan) -> dict[str, str]:
    """Each strategy that there is for the number of workers → why its best layout is or is not the plan's best."""
    found, several = {}, plan.space.world > 1
    for record in registry.STRATEGIES.values():
        if record.plannable and not record.alias_of and bool(record.degrees) == several:
            rows = [row for row in plan.rows if row.candidate.family == record.name]
            found[record.name] = _verdict(plan, rows) if rows else _absent(plan, record.name)
    return found


def size_text(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def figures(row: Estimate) -> str:
    return f"{row.step_seconds:.3g} s per step, {size_text(row.memory_bytes)} per GPU"


def settings_text(row: Estimate) -> str:
    """Degrees and what else a layout decides."""
    candidate, mode = row.candidate, row.candidate.checkpointing
    written = " ".join(f"{name}={getattr(candidate.dims, name)}" for name in NAMES if getattr(candidate.dims, name) > 1)
    recomputes = "" if mode == "none" else f", {mode} recomputation"
    moved = ", state in host memory" if candidate.offload else ""
    return f"{written or 'one worker'}, micro-batch {candidate.micro_batch}{recomputes}{moved}"


def _verdict(plan: Plan, rows: list[Estimate]) -> str:
    row, best = rows[0], plan.best
    if not row.fits:
        needed, fitting = min(r.memory_bytes for r in rows), [r for r in plan.rows if r.fits]
        sentence = f"needs at least {needed / GIB:.1f} GiB per GPU, of {row.capacity / GIB:.1f} available"
        if fitting:
            least = min(fitting, key=lambda r: (-r.candidate.dims.dp_replicate, r.step_seconds))
            sentence += f"; the least sharded layout that fits: {least.candidate.layout.name}, {settings_text(least)}"
        return sentence
    if best is None or row is best:
        return f"the best, {figures(row)}"
    what, ratio = f"{figures(row)} ({settings_text(row)})", row.step_seconds / best.step_seconds
    if ratio < 1.001:
        near = f"within the {100 * (NEAR - 1):.0f} % by which predictions err, and not simpler"
        return f"{what}: {'as fast as the best' if ratio > 0.999 else near}"
    more = {name: seconds - best.seconds[name] for name, seconds in row.seconds.items()}
    return f"{what}: {ratio:.2f} × the best's time, mostly {PARTS[max(more, key=lambda name: more[name])]}"


def _absent(plan: Plan, family: str) -> str:
    """Which of the reasons keeps a whole strategy out."""
    space, degrees = plan.space, registry.STRATEGIES[family].degrees

    def is_there(fixed: Fixed) -> bool:
        return any(candidate.family == family for candidate in enumerate_layouts(space, fixed))

    if is_there({}):
        alone = [key for key, value in plan.fixed.items() if not is_there({key: value})]
        keys = [f"{key}={str(plan.fixed[key]).replace('True', 'true')}" for key in alone[:1] or plan.fixed]
        return f"left out, because {' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} fixed"
    if "tp" in degrees and not space.splits:
        return "the model has no layers that can be split over its heads"
    if "tp" in degrees:
        heads = f"the model's {space.heads} heads and its sequence" if space.heads else "the sequence"
        return f"no number of GPUs within a node of {space.per_node} divides the {space.world} workers and {heads}"
    if "pp" in degrees and space.blocks < 2:
        return "the model has no chain of blocks to cut into stages"
    return (
        f"{space.world} workers have no {' × '.join(degrees)} that divides train.global_batch_size {space.global_batch}"
    )


def advice(plan: Plan) -> list[str]:
    """Which strategy to use, with the figures behind it; and what would change it."""
    machine, best = plan.machine, plan.best
    if best is None:
        return infeasible(plan)
    sentences = _from_one_gpu(plan, best)
    if machine.world > machine.per_node:
        within, across = machine.device.gpu.link_within, machine.across / machine.per_node
        sentences.append(
            f"A GPU has {within / 1e9:.0f} GB/s to the others of its machine and {across / 1e9:.1f} GB/s (its share of "
            f"{machine.across / 1e9:.0f}) to other machines."
        )
    sentences.append(f"Use {best.candidate.layout.name}: {settings_text(best)}: {figures(best)}.")
    copies = registry.by_degrees("dp_replicate").name
    least = min((row.memory_bytes for row in plan.rows if row.candidate.family == copies), default=0.0)
    if best.candidate.strategy.is_sharded and least > best.capacity:
        sentences.append(f"With {least / GIB:.0f} GiB per GPU {copies} would fit, which sends a third less.")
    return [*sentences, *_waiting(best), *_fewer(plan, best), *([machine.assumed] if machine.assumed else [])]


def _best(rows: list[Estimate]) -> Estimate | None:
    """The fastest that fits, else the one that takes least memory."""
    return min(rows, key=lambda r: (not r.fits, r.step_seconds if r.fits else r.memory_bytes), default=None)


def _from_one_gpu(plan: Plan, best: Estimate) -> list[str]:
    world, there = plan.machine.world, plan.machine.device.capacity / GIB
    one = best if world == 1 else _best(plan.on_gpus(1, {}))
    if one is None:
        return []
    needed, gain = size_text(one.memory_bytes), one.step_seconds / best.step_seconds
    if not one.fits:
        return [f"The model does not fit one GPU (at least {needed}, of {there:.0f} GiB): shard or split it."]
    if world == 1:
        return [f"The model fits one GPU ({needed} of {there:.0f} GiB)."]
    return [
        f"The model fits one GPU ({figures(one)}); {world} are {gain:.1f} × as fast, {100 * gain / world:.0f} % of "
        f"ideal, so one GPU costs less while time does not matter."
    ]


def _waiting(best: Estimate) -> list[str]:
    """What a step waits for, where that is more than a tenth of it."""
    found, parts = [], best.communication
    talk, bubble = sum(best.seconds[part] for part in COMMUNICATION), best.seconds["bubble"]
    if talk > 0.1 * best.step_seconds and parts:
        name, _, link = max(parts, key=lambda key: parts[key]).partition(".")
        where = "between machines" if link == "across" else "within a machine"
        found.append(
            f"Communication takes {100 * talk / best.step_seconds:.0f} % of the step, mostly {name.replace('_', '-')} "
            f"{where}: faster links, a larger train.global_batch_size or parallel.reduce_dtype=bf16 would shorten it."
        )
    if bubble > 0.1 * best.step_seconds:
        found.append(
            f"The pipeline's bubble takes {100 * bubble / best.step_seconds:.0f} % of the step: more micro-batches (a "
            "larger train.global_batch_size) or a zero-bubble parallel.schedule would shorten it."
        )
    return found


def _fewer(plan: Plan, best: Estimate) -> list[str]:
    """What a step costs on a half, a quarter, … of the GPUs; on a given number of them cost is time."""
    price, world = plan.machine.price_per_hour, plan.machine.world
    if price is None or world == 1:
        return []
    counts = [world // 2**power for power in range(7) if world >= 2**power]
    rows = {n: best if n == world else _best(plan.on_gpus(n, {})) for n in counts}
    seconds = {n: row.step_seconds for n, row in rows.items() if row is not None and row.fits}
    costs = {n: price * n * step / 3600 for n, step in seconds.items()}
    told = ", ".join(f"{n} GPUs ${cost:.3g} in {seconds[n]:.3g} s" for n, cost in costs.items())
    return [f"Cost of a step: {told}."]


def infeasible(plan: Plan) -> list[str]:
    """Why nothing fits, what would make it fit, and the smallest cluster that would do."""
    least = min(plan.rows, key=lambda row: row.memory_bytes)
    largest = max(least.memory, key=lambda name: least.memory[name])
    # GPUs → least bytes per GPU, with everything sharded, recomputed, and one sample at a time
    fixed = {"train.activation_checkpointing": "full", "train.micro_batch_size": 1}
    found = {world: plan.on_gpus(world, fixed, batch=world) for world in (2**power for power in range(13))}
    needs = {world: min(row.memory_bytes for row in rows) for world, rows in found.items() if rows}
    return [
        f"No layout fits: the smallest, {least.candidate.layout.name} with {settings_text(least)}, needs "
        f"{size_text(least.memory_bytes)} per GPU, of {size_text(least.capacity)} available, mostly for {largest}.",
        f"What would fit: {_here(plan, needs, largest)}.",
        _smallest_cluster(needs),
    ]


def _here(plan: Plan, needs: dict[int, float], largest: str) -> str:
    """Something else fixed, state in host memory, more GPUs, or a smaller model."""
    world, there, precision = plan.machine.world, plan.machine.device.capacity, plan.rows[0].candidate.precision
    for offload in () if plan.machine.device.is_cpu else (False, True):
        row = _best(plan.on_gpus(world, {"train.precision": precision, "parallel.offload": offload}))
        if row is not None and row.fits:
            key = "parallel.offload=true, " if offload else ""
            return f"{key}{row.candidate.layout.name} with {settings_text(row)} ({figures(row)})"
    more = next((n for n, needed in needs.items() if needed <= there and n > world), None)
    if more:
        return f"{more} × {plan.machine.device.gpu.name} ({size_text(needs[more])} each)"
    if largest == "activations":
        return "a shorter sequence, or a model of fewer or narrower layers"
    return f"a smaller model, or GPUs of more than {size_text(there)}; more of these GPUs do not help"


def _smallest_cluster(needs: dict[int, float]) -> str:
    """The cheapest cluster of the catalogue by list price that holds the model; of equal ones the fewest machines."""
    offers = []
    for offer in all_instances().values():
        count = next((n for n, needed in needs.items() if needed <= device(offer.gpu).capacity), None)
        if count is not None:
            machines = -(-count // offer.gpus)
            offers.append((round(machines * offer.price_per_hour, 4), machines, count, offer.name, offer))
    if not offers:
        return f"No cluster of the catalogue with up to {max(needs, default=1):,} GPUs would hold it."
    price, machines, count, name, offer = min(offers, key=lambda o: o[:4])
    return (
        f"The smallest cluster of the catalogue that holds it: {count} × {offer.gpu}, {machines} × {name} "
        f"({offer.provider}, ${price:,.2f} per hour, {offer.date})."
    )
