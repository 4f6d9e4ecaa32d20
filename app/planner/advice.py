"""The layout that a user is advised to take, and what would hold a model that fits nowhere."""

from app.config import Config
from app.planner.device import device_named
from app.planner.estimate import Estimate
from app.planner.layouts import Candidate
from app.planner.machine import Machine, machine_of_run
from app.planner.plan import GIB, Plan, estimator_of, first_of, reader_of
from app.planner.read import Reader
from app.planner.remedies import (
    LARGEST_CLUSTER,
    Remedy,
    needs_remedies,
    remedies,
)
from app.planner.saving_activations import compare_ways_to_save_activations
from app.tasks.base import Task
from cluster.hardware import all_instances
from strategies.dims import DEGREES, Layout
from strategies.pipeline.schedules import chunks_per_stage

COMMUNICATION = (
    "tensor",
    "context",
    "expert",
    "shard",
    "replicate",
    "pipeline_send",
    "contention",
)
"""The parts of a step that are communication."""
PARTS = {
    "compute": "computation (smaller matrix products, or recomputation)",
    "tensor": "tensor parallelism's communication, which nothing hides",
    "context": "keys, values or heads that workers of one sequence exchange",
    "expert": "sending tokens to their experts and back, which nothing hides",
    "shard": "gathering parameters and scattering gradients, which computation does not hide",
    "replicate": "the all-reduce that backward does not hide",
    "pipeline_send": "activations sent between stages",
    "contention": "computation slowed by communication beside it",
    "host": "copying activations to host memory and back, which computation does not hide",
    "bubble": "stages waiting for the pipeline to fill and drain",
    "optimizer": "the optimizer, whose state is not sharded",
    "data": "copying samples to the GPU",
    "launch": "waiting for the host, which launches kernels more slowly than the GPU runs them",
    "rest": "the fixed cost of a step",
    "scale": "waiting for the slowest of many GPUs, and crowded links",
}
"""The parts of a step (timing.py) in words."""
MOST_GPUS_DOUBLED = 64
"""With more GPUs there is no advice on twice as many, because planning those takes seconds."""
NO_FASTER = 1.05
"""A gain below this is called no gain."""


def predict(
    config: Config,
    task: Task,
    layout: Layout,
    machine: Machine | None = None,
    reader: Reader | None = None,
) -> Estimate:
    """The memory and time of a configuration under a layout.

    Args:
        config: The configuration.
        task: Its task.
        layout: The layout.
        machine: The machine; None for that of a run's workers.
        reader: Of the task, if there is one.
    """
    machine = machine or machine_of_run(layout.dims.world_size)
    reader = reader or reader_of(config, task, machine)
    return estimator_of(config, reader, machine).estimate(candidate_of(config, layout))


def candidate_of(config: Config, layout: Layout) -> Candidate:
    """A layout with everything else that a configuration decides."""
    train = config.train
    parallel = config.parallel
    samples = max(1, train.global_batch_size // layout.dims.dp)
    micro_batch = min(train.micro_batch_size or samples, samples)
    schedule, chunks = "", 1
    if layout.dims.pp > 1:
        schedule = parallel.schedule
        chunks = chunks_per_stage(parallel.schedule, parallel.chunks)
    return Candidate(
        layout=layout,
        micro_batch=micro_batch,
        micro_batches=-(-samples // micro_batch),
        checkpointing=train.activation_checkpointing,
        precision=train.precision,
        schedule=schedule,
        chunks=chunks,
        offload=parallel.offload,
        moves_activations=train.activation_offloading,
    )


# --- words ----------------------------------------------------------------------------------------


def size_text(size: float) -> str:
    """Bytes, with their unit."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def smallest(rows: list[Estimate]) -> Estimate:
    """The layout that takes the least of a GPU, of those whose state the hosts can hold."""
    return min(rows, key=lambda row: (max(1.0, row.host_memory_share or 0.0), row.memory_bytes))


def shortage(row: Estimate) -> str:
    """The memory that a layout needs, and what there is of it."""
    if row.exceeds_host:
        return f"{row.host_memory_share:.1f} times the memory of its hosts"
    return f"{size_text(row.memory_bytes)} per GPU, of {size_text(row.capacity)} available"


def figures(row: Estimate) -> str:
    """A layout's time and memory."""
    return f"{row.step_seconds:.3g} s per step, {size_text(row.memory_bytes)} per GPU"


def settings_text(row: Estimate) -> str:
    """A layout's degrees and what else it decides."""
    candidate = row.candidate
    degrees = [(name, getattr(candidate.dims, name)) for name in DEGREES]
    written = " ".join(f"{name}={degree}" for name, degree in degrees if degree > 1)
    mode = candidate.checkpointing
    recomputation = "" if mode == "none" else f", {mode} recomputation"
    offload = ""
    moved = [("state", candidate.offload), ("activations", candidate.moves_activations)]
    if any(is_moved for _, is_moved in moved):
        what = " and ".join(name for name, is_moved in moved if is_moved)
        offload = f", {size_text(row.host_memory_bytes)} of {what} in each host's memory"
    return f"{written or 'one worker'}, micro-batch {candidate.micro_batch}{recomputation}{offload}"


# --- advice ---------------------------------------------------------------------------------------


def advice(plan: Plan, tried: list[Remedy] | None = None) -> list[str]:
    """What to use, as sentences.

    The first says which layout, how fast, at what cost and with how much room. The others say what
    another number of GPUs would bring, and what the step waits for.

    Args:
        plan: The plan.
        tried: What `remedies` gives, where nothing fits and it has been asked already.
    """
    best = plan.best
    assumption = plan.machine.assumption
    if best is None:
        return [
            *infeasible(plan, tried),
            *_activations(plan),
            *([assumption] if assumption else []),
        ]
    single = best if plan.machine.world == 1 else first_of(plan.on_gpus(1, {}, as_planned=True))
    if single is not None and single is not best and _is_enough(single, best):
        return [
            _answer_of_one(plan, best, single),
            *_activations(plan),
            *_waits(best),
            *([assumption] if assumption else []),
        ]
    return [
        _answer(plan, best),
        *_activations(plan),
        *_compared_with_one_gpu(plan, best, single),
        *_compared_with_twice_as_many(plan, best),
        *_waits(best),
        *([assumption] if assumption else []),
    ]


def _answer(plan: Plan, best: Estimate) -> str:
    layout = best.candidate.layout.name
    world = plan.machine.world
    gpus = ""
    if not plan.machine.device.is_cpu:
        gpus = f" on {world} GPU{'s' if world > 1 else ''}"
    spare = size_text(best.capacity - best.memory_bytes)
    answer = f"Use {layout}{gpus} ({settings_text(best)}): {figures(best)}, {spare} to spare"
    cost = plan.layout(best)["dollars_per_run"]
    if cost is not None and plan.steps:
        dollars = f"${cost:,.2f}" if cost >= 0.01 else "less than a cent"
        answer += f"; {dollars} for the run of {plan.steps:,} steps"
    return f"{answer}."


def _is_enough(single: Estimate, best: Estimate) -> bool:
    """Whether one GPU is as fast as all of them."""
    return single.fits and single.step_seconds < NO_FASTER * best.step_seconds


def _answer_of_one(plan: Plan, best: Estimate, single: Estimate) -> str:
    world = plan.machine.world
    device = "worker" if plan.machine.device.is_cpu else "GPU"
    settings = settings_text(single).removeprefix("one worker, ")
    return (
        f"Use one {device} ({settings}): {figures(single)}; "
        f"{world} would be no faster ({best.candidate.layout.name}, {settings_text(best)}: "
        f"{best.step_seconds:.3g} s per step)."
    )


def _activations(plan: Plan) -> list[str]:
    """How the ways to save activations compare, where a plan needs something of the kind."""
    if not needs_remedies(plan) or plan.machine.device.is_cpu:
        return []
    sentence = compare_ways_to_save_activations(plan)
    return [sentence] if sentence else []


def _compared_with_one_gpu(plan: Plan, best: Estimate, single: Estimate | None) -> list[str]:
    world = plan.machine.world
    if single is None:
        return []
    device = "worker" if plan.machine.device.is_cpu else "GPU"
    needed = size_text(single.memory_bytes)
    capacity = f"{plan.machine.device.capacity / GIB:.0f} GiB"
    if not single.fits:
        return [
            f"The model does not fit one {device} (at least {needed}, of {capacity}): "
            "shard or split it."
        ]
    only_with = " only with its state in host memory" if single.candidate.offload else ""
    if world == 1:
        return [f"The model fits one {device}{only_with} ({needed} of {capacity})."]
    gain = single.step_seconds / best.step_seconds
    share = round(100 * gain / world)
    if share < 100:
        consequence = f"so one {device} costs less while time does not matter"
    else:
        consequence = "so they cost no more"
    return [
        f"The model fits one {device}{only_with} ({figures(single)}); "
        f"{world} are {gain:.1f} × as fast, {share} % of ideal, {consequence}."
    ]


def _compared_with_twice_as_many(plan: Plan, best: Estimate) -> list[str]:
    """What twice as many GPUs would bring with the same global batch."""
    world = plan.machine.world
    if plan.machine.device.is_cpu or world > MOST_GPUS_DOUBLED:
        return []
    # What a plan for that many would choose from, so that the two do not contradict each other.
    doubled = first_of(plan.on_gpus(2 * world, plan.fixed, as_planned=True))
    if doubled is None or not doubled.fits:
        return []
    gain = best.step_seconds / doubled.step_seconds
    if gain < NO_FASTER:
        return [f"{2 * world} GPUs would be no faster."]
    cost = f"{2 / gain:.2g}"
    price = "as much" if cost == "1" else f"{cost} times as much"
    return [f"{2 * world} GPUs would be {gain:.2g} × as fast, and the run would cost {price}."]


def _waits(best: Estimate) -> list[str]:
    """What a step waits for, if that is more than a tenth of it."""
    sentences = []
    communication = sum(best.seconds[part] for part in COMMUNICATION)
    if communication > 0.1 * best.step_seconds:
        largest = max(COMMUNICATION, key=lambda part: best.seconds[part])
        sentences.append(
            f"Communication takes {100 * communication / best.step_seconds:.0f} % of the step, "
            f"mostly {PARTS[largest]}: faster links, a larger train.global_batch_size or "
            "parallel.reduce_dtype=bf16 would shorten it."
        )
    copying = best.seconds["host"]
    if copying > 0.1 * best.step_seconds:
        sentences.append(
            f"Copies of activations take {100 * copying / best.step_seconds:.0f} % of the step "
            "longer than the computation beside them: train.activation_checkpointing=full leaves "
            "less to copy."
        )
    bubble = best.seconds["bubble"]
    if bubble > 0.1 * best.step_seconds:
        sentences.append(
            f"The pipeline's bubble takes {100 * bubble / best.step_seconds:.0f} % of the step: "
            "more micro-batches (a larger train.global_batch_size) or a zero-bubble "
            "parallel.schedule would shorten it."
        )
    return sentences


# --- a model that fits nowhere --------------------------------------------------------------------


def infeasible(plan: Plan, tried: list[Remedy] | None = None) -> list[str]:
    """Why nothing fits, what would make it fit, and the cheapest cluster that holds the model.

    Args:
        plan: The plan.
        tried: What `remedies` gives, if it has been asked already.
    """
    least = smallest(plan.rows)
    largest_kind = max(least.memory, key=lambda kind: least.memory[kind])
    needed_bytes = _needed_bytes(plan)
    fitting = (remedy for remedy in tried or remedies(plan) if remedy.fits)
    return [
        f"No layout fits: the smallest, {least.candidate.layout.name} with {settings_text(least)}, "
        f"needs {shortage(least)}, mostly for {largest_kind}.",
        f"What would fit: {_what_would_fit(plan, next(fitting, None), largest_kind)}.",
        _cheapest_cluster(needed_bytes),
    ]


def _needed_bytes(plan: Plan) -> dict[int, float]:
    """The least bytes per GPU by number of GPUs: all sharded and recomputed, one sample each."""
    fixed = {"train.activation_checkpointing": "full", "train.micro_batch_size": 1}
    needed = {}
    world = 1
    while world <= LARGEST_CLUSTER:
        rows = plan.on_gpus(world, fixed, global_batch=world)
        if rows:
            needed[world] = min(row.memory_bytes for row in rows)
        world *= 2
    return needed


def _what_would_fit(plan: Plan, remedy: Remedy | None, largest_kind: str) -> str:
    """The first remedy that is enough, or a smaller model."""
    if remedy is not None and remedy.row is not None:
        row = remedy.row
        layout = f"{row.candidate.layout.name} with {settings_text(row)}"
        gpus = ""
        if remedy.gpus != plan.machine.world:
            gpus = f"{remedy.gpus} × {plan.machine.device.gpu.name}, "
        return f"{remedy.name} ({remedy.keys}): {gpus}{layout}, {figures(row)}"
    capacity = size_text(plan.machine.device.capacity)
    if largest_kind == "activations":
        return "a shorter sequence, or a model of fewer or narrower layers"
    return f"a smaller model, or GPUs of more than {capacity}; more of these GPUs do not help"


def _cheapest_cluster(needed_bytes: dict[int, float]) -> str:
    """The cluster of the catalogue with the lowest list price, and the fewest machines."""
    offers = []
    for instance in all_instances().values():
        capacity = device_named(instance.gpu).capacity
        enough = (gpus for gpus, needed in needed_bytes.items() if needed <= capacity)
        gpus = next(enough, None)
        if gpus is not None:
            machines = -(-gpus // instance.gpus)
            price = round(machines * instance.price_per_hour, 4)
            offers.append((price, machines, gpus, instance.name))
    if not offers:
        most = max(needed_bytes, default=1)
        return f"No cluster of the catalogue with up to {most:,} GPUs holds it without offloading."
    price, machines, gpus, name = min(offers)
    instance = all_instances()[name]
    return (
        "The cheapest cluster of the catalogue that holds it without offloading: "
        f"{gpus} × {instance.gpu}, {machines} × {name} "
        f"({instance.provider}, ${price:,.2f} per hour, {instance.date})."
    )
