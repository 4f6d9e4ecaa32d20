"""Which layout is advised to a person, with the figures behind it, and what would hold a model that fits nowhere."""

from app.config import Config
from app.planner.device import device
from app.planner.estimate import Estimate
from app.planner.layouts import Candidate
from app.planner.machine import Machine, running
from app.planner.plan import GIB, Plan, estimator_of, reader_of
from app.planner.read import Reader
from app.tasks.base import Task
from cluster.hardware import all_instances
from strategies.dims import DEGREES, Layout
from strategies.pipeline.schedules import chunks_per_stage

COMMUNICATION = ("tensor", "context", "expert", "shard", "replicate", "pipeline_send", "contention")
PARTS = {
    "compute": "computation (smaller matrix products, or recomputation)",
    "tensor": "tensor parallelism's communication, which nothing hides",
    "context": "keys, values or heads that workers of one sequence exchange",
    "expert": "sending tokens to their experts and back, which nothing hides",
    "shard": "gathering parameters and scattering gradients, which computation does not hide",
    "replicate": "the all-reduce that backward does not hide",
    "pipeline_send": "activations sent between stages",
    "contention": "computation slowed by communication beside it",
    "bubble": "stages waiting for the pipeline to fill and drain",
    "optimizer": "the optimizer, whose state is not sharded",
    "data": "copying samples to the GPU",
    "rest": "the fixed cost of a step",
    "scale": "waiting for the slowest of many GPUs, and crowded links",
}
"""timing.py's parts of a step in words."""


def predict(
    config: Config, task: Task, layout: Layout, machine: Machine | None = None, reader: Reader | None = None
) -> Estimate:
    """Memory and time of a configuration under a layout. machine: None is what a run's workers are on."""
    machine = machine or running(layout.dims.world_size)
    reader = reader or reader_of(config, task, machine)
    return estimator_of(config, reader, machine).estimate(candidate_of(config, layout))


def candidate_of(config: Config, layout: Layout) -> Candidate:
    """The layout with the rest of the configuration."""
    dims, train, parallel = layout.dims, config.train, config.parallel
    share = max(1, train.global_batch_size // dims.dp)
    size = min(train.micro_batch_size or share, share)
    pipeline = (parallel.schedule, chunks_per_stage(parallel.schedule, parallel.chunks)) if dims.pp > 1 else ("", 1)
    mode, precision = train.activation_checkpointing, train.precision
    return Candidate(layout, size, -(-share // size), mode, precision, *pipeline, parallel.offload)


def size_text(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def smallest(rows: list[Estimate]) -> Estimate:
    """The one that takes least of a GPU, of those whose state the hosts hold."""
    return min(rows, key=lambda row: (max(1.0, row.in_host), row.memory_bytes))


def shortage(row: Estimate) -> str:
    """What it needs, and what there is of that."""
    if row.in_host > 1:
        return f"{row.in_host:.1f} times the memory of its hosts"
    return f"{size_text(row.memory_bytes)} per GPU, of {size_text(row.capacity)} available"


def figures(row: Estimate) -> str:
    return f"{row.step_seconds:.3g} s per step, {size_text(row.memory_bytes)} per GPU"


def settings_text(row: Estimate) -> str:
    """Degrees and what else a layout decides."""
    candidate, mode = row.candidate, row.candidate.checkpointing
    written = " ".join(
        f"{name}={getattr(candidate.dims, name)}" for name in DEGREES if getattr(candidate.dims, name) > 1
    )
    recomputes = "" if mode == "none" else f", {mode} recomputation"
    moved = ", state in host memory" if candidate.offload else ""
    return f"{written or 'one worker'}, micro-batch {candidate.micro_batch}{recomputes}{moved}"


def advice(plan: Plan) -> list[str]:
    """The answer first: what to use, how fast, at what cost and with how much room; then what speaks for another number
    of GPUs, and what the step waits for."""
    machine, best = plan.machine, plan.best
    if best is None:
        return infeasible(plan)
    sentences = [_answer(plan, best), *_from_one_gpu(plan, best), *_from_twice_as_many(plan, best)]
    return [*sentences, *_waiting(best), *([machine.assumed] if machine.assumed else [])]


def _answer(plan: Plan, best: Estimate) -> str:
    spare = size_text(best.capacity - best.memory_bytes)
    where = f"{best.candidate.layout.name}{_devices(plan)}"
    answer = f"Use {where} ({settings_text(best)}): {figures(best)}, {spare} to spare"
    cost, steps = plan.layout(best)["cost_per_step"], plan.steps
    if cost is not None and steps:
        dollars = f"${cost * steps:,.2f}" if cost * steps >= 0.01 else "less than a cent"
        answer += f"; {dollars} for the run of {steps:,} steps"
    return f"{answer}."


def _devices(plan: Plan) -> str:
    """ " on 8 GPUs"; nothing of a CPU's cores."""
    world = plan.machine.world
    return "" if plan.machine.device.is_cpu else f" on {world} GPU{'s' if world > 1 else ''}"


def _best(rows: list[Estimate]) -> Estimate | None:
    """The fastest that fits, else the one that takes least memory."""
    return min(rows, key=lambda r: (not r.fits, r.step_seconds if r.fits else r.memory_bytes), default=None)


def _from_one_gpu(plan: Plan, best: Estimate) -> list[str]:
    world, there = plan.machine.world, plan.machine.device.capacity / GIB
    one = best if world == 1 else _best(plan.on_gpus(1, {}))
    if one is None:
        return []
    needed, gain = size_text(one.memory_bytes), one.step_seconds / best.step_seconds
    device = "worker" if plan.machine.device.is_cpu else "GPU"
    if not one.fits:
        return [f"The model does not fit one {device} (at least {needed}, of {there:.0f} GiB): shard or split it."]
    if world == 1:
        return [f"The model fits one {device} ({needed} of {there:.0f} GiB)."]
    return [
        f"The model fits one {device} ({figures(one)}); {world} are {gain:.1f} × as fast, {100 * gain / world:.0f} % "
        f"of ideal, so one {device} costs less while time does not matter."
    ]


MOST_DOUBLED = 64
"""GPUs up to which it is said what twice as many would bring: beyond, planning those takes seconds."""


NO_FASTER = 1.05


def _from_twice_as_many(plan: Plan, best: Estimate) -> list[str]:
    """What the next doubling would bring with the same global batch."""
    world = plan.machine.world
    if plan.machine.device.is_cpu or world > MOST_DOUBLED:
        return []
    fixed = {"train.activation_checkpointing": best.candidate.checkpointing}
    twice = _best(plan.on_gpus(2 * world, fixed))
    if twice is None or not twice.fits:
        return []
    gain = best.step_seconds / twice.step_seconds
    if gain < NO_FASTER:
        return [f"{2 * world} GPUs would be no faster."]
    return [f"{2 * world} GPUs would be {gain:.2g} × as fast, and the run would cost {2 / gain:.2g} times as much."]


def _waiting(best: Estimate) -> list[str]:
    """What a step waits for, where that is more than a tenth of it."""
    found, talk, bubble = [], sum(best.seconds[part] for part in COMMUNICATION), best.seconds["bubble"]
    if talk > 0.1 * best.step_seconds:
        most = max(COMMUNICATION, key=lambda part: best.seconds[part])
        found.append(
            f"Communication takes {100 * talk / best.step_seconds:.0f} % of the step, mostly {PARTS[most]}: faster "
            "links, a larger train.global_batch_size or parallel.reduce_dtype=bf16 would shorten it."
        )
    if bubble > 0.1 * best.step_seconds:
        found.append(
            f"The pipeline's bubble takes {100 * bubble / best.step_seconds:.0f} % of the step: more micro-batches (a "
            "larger train.global_batch_size) or a zero-bubble parallel.schedule would shorten it."
        )
    return found


def infeasible(plan: Plan) -> list[str]:
    """Why nothing fits, what would make it fit, and the smallest cluster that would do."""
    least = smallest(plan.rows)
    largest = max(least.memory, key=lambda name: least.memory[name])
    # GPUs → least bytes per GPU, with everything sharded, recomputed, and one sample at a time
    fixed = {"train.activation_checkpointing": "full", "train.micro_batch_size": 1}
    found = {world: plan.on_gpus(world, fixed, batch=world) for world in (2**power for power in range(13))}
    needs = {world: min(row.memory_bytes for row in rows) for world, rows in found.items() if rows}
    return [
        f"No layout fits: the smallest, {least.candidate.layout.name} with {settings_text(least)}, needs "
        f"{shortage(least)}, mostly for {largest}.",
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
