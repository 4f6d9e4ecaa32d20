"""The memory of layouts, summed again moment by moment over parts of random sizes."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.planner.estimator import Estimator
from app.planner.layouts import Candidate
from app.planner.machine import cpus
from app.planner.part_costs import PartCost
from strategies.costs import ModelSize, ParameterSize
from strategies.dims import Layout
from strategies.layout import choose
from strategies.options import Options
from strategies.pipeline.schedules import Schedule, make_schedule
from tests.layout_cost import layout_cost

pytestmark = pytest.mark.pure
CHAIN = ["before", *["block0"] * 4, "after"]
COUNTS = {"before": 1, "block0": 4, "after": 1}
CASES = [
    (choose(name, 4), micro_batches, "", 1)
    for name in ("ddp", "fsdp", "zero1", "zero2", "tensor")
    for micro_batches in (1, 2)
]
CASES += [(choose(name, 4, tp=2), 1, "", 1) for name in ("fsdp", "ddp")]
CASES += [
    (choose("pipeline", 2), 4, "1f1b", 1),
    (choose("pipeline", 2), 4, "gpipe", 1),
    (choose("pipeline", 2), 4, "zb_h2", 1),
    (choose("pipeline", 2), 4, "zbv", 2),
    (choose("fsdp", 4, pp=2), 4, "interleaved_1f1b", 2),
    (choose("pipeline", 2), 24, "interleaved_1f1b", 2),
]


def summed_memory(
    *,
    layout: Layout,
    chain: list[str],
    parts: Any,
    sizes: Any,
    micro_batches: int,
    pipeline_peak: float | None,
) -> dict[str, float]:
    """Bytes per kind of memory on the device that holds `chain`.

    Args:
        layout: How the parameters are split.
        chain: Names of the parts on the device, in forward order.
        parts: The cost of each part by name.
        sizes: The parameter of each part by name.
        micro_batches: Micro-batches per step.
        pipeline_peak: In a pipeline, the most that its micro-batches take; otherwise None.
    """
    chain_sizes = [
        replace(sizes[name], unit=f"{name}.{i}" if name == "block0" else "")
        for i, name in enumerate(chain)
    ]
    cost, _ = layout_cost(layout, tuple(chain_sizes), None, micro_batches)
    gradients = [
        layout_cost(layout, (size,), None, micro_batches)[0].gradients for size in chain_sizes
    ]
    copied = [parts[name].copied_bytes for name in chain]
    saved = [parts[name].saved_bytes for name in chain]
    temporary = [parts[name].recomputed_bytes + parts[name].working_bytes for name in chain]
    is_plain_ddp = "ddp" in layout.parts and layout.dims.tp == 1
    gradients_preallocated = micro_batches > 1 or is_plain_ddp
    gradients_sharded = bool({"fsdp", "zero1"} & set(layout.parts))
    if gradients_sharded and micro_batches > 1:
        # Unsharded gradients wait for the last micro-batch and are counted there.
        waiting_gradients = [0.0] * len(chain)
    elif gradients_preallocated:
        waiting_gradients = [cost.gradients] * len(chain)
    else:
        waiting_gradients = [sum(gradients[i + 1 :]) for i in range(len(chain))]
    moments = []
    for i in range(len(chain)):
        kept = sum(saved[: i + 1]) + sum(copied[: i + 1])
        moments.append(kept + temporary[i] + waiting_gradients[i])
    peak = max(moments)
    if pipeline_peak is not None:
        peak = pipeline_peak + sum(copied)
        peak += 0 if gradients_sharded else cost.gradients
    return {
        "parameters": cost.parameters,
        "gradients": cost.gradients,
        "optimizer": cost.optimizer,
        "activations": max(peak - cost.gradients, 0),
        "communication": cost.transient,
        "buffers": 24,
    }


def peak_of_stage(schedule: Schedule, stage: int, spans: list[list[str]], parts: Any) -> float:
    """The most bytes that a stage's micro-batches take, tensor by tensor.

    Args:
        schedule: The instructions of all stages.
        stage: The stage's number.
        spans: The names of its parts, by chunk.
        parts: The cost of each part by name.
    """
    alive: dict[tuple[int, int, int], float] = {}
    peak = 0.0
    for op in schedule.ops[stage]:
        span = spans[op.chunk]
        places = [(op.chunk, op.micro_batch, i) for i in range(len(span))]
        output = (op.chunk, op.micro_batch, len(span))  # what was sent, and what comes back
        sent = parts[span[-1]].output_bytes if span and span[-1] != "after" else 0
        if op.kind == "F":
            alive |= {place: parts[span[place[-1]]].saved_bytes for place in places}
            alive[output] = sent
        if op.kind == "B":
            peak = max(peak, sum(alive.values()) + sent)
        for place in reversed(places) if op.kind == "B" else ():
            part = parts[span[place[-1]]]
            at_work = part.recomputed_bytes + part.working_bytes + sent
            peak = max(peak, sum(alive.values()) + at_work)
            if not schedule.splits_backward:
                del alive[place]
        if op.kind == "W":
            for place in places:
                del alive[place]
        if op.kind == ("W" if schedule.splits_backward else "B"):
            del alive[output]
    assert not alive
    return peak


@pytest.mark.parametrize(("layout", "micro_batches", "schedule", "chunks"), CASES)
def test_memory_is_that_of_the_worst_moment_on_the_fullest_device(
    layout: Layout, micro_batches: int, schedule: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(3)
    pp = layout.dims.pp
    partitions = ((1, 1, 1, 1), (2, 0, 1, 1)) if chunks == 2 else ((1, 3), (3, 1))
    for block_counts in partitions * 10:
        parts = {
            name: PartCost(
                name=name,
                count=count,
                forward_seconds=1.0,
                backward_seconds=2.0,
                launch_forward_seconds=0.0,
                launch_backward_seconds=0.0,
                flops=0.0,
                saved_bytes=generator.randrange(500),
                recomputed_bytes=generator.randrange(500),
                working_bytes=generator.randrange(500),
                stage_input_bytes=0.0,
                tp_bytes=0.0,
                tp_collectives=0.0,
                copied_bytes=generator.randrange(500),
                output_bytes=generator.randrange(500) if name == "block0" else 0,
            )
            for name, count in COUNTS.items()
        }
        sizes = {
            name: ParameterSize(name, (generator.randint(1, 9), 4), split_dim=0) for name in COUNTS
        }
        model: Any = SimpleNamespace(counts=COUNTS, parts=parts, order=CHAIN[1:-1])
        model.parameters = {name: (size,) for name, size in sizes.items()}
        costs = list(parts.values())
        monkeypatch.setattr("app.planner.estimator.part_costs", lambda *_, costs=costs, **__: costs)
        size = ModelSize((), 24)
        reader: Any = SimpleNamespace(costs=lambda _, model=model, **__: model, size=size)
        reader.sample_bytes = 1.0
        reader.exchanged_numel = 0.0
        reader.mixtures = []
        reader.heads = None
        reader.blocks = len(model.order)
        reader.compiles_loss = False
        options = Options(stages=block_counts if pp > 1 else None)
        candidate = Candidate(layout, 2, micro_batches, "none", "fp32", schedule, chunks)
        estimator = Estimator(reader=reader, machine=cpus(4), options=options)
        estimated = estimator.estimate(candidate)
        chains = [CHAIN]
        expected = []
        peaks: list[float | None] = [None]
        if pp > 1:
            ends = itertools.accumulate(block_counts)
            spans = [CHAIN[1 + end - count : 1 + end] for count, end in zip(block_counts, ends)]
            spans[0], spans[-1] = ["before", *spans[0]], [*spans[-1], "after"]
            played = make_schedule(schedule, stages=pp, micro_batches=micro_batches, chunks=chunks)
            spans_of = [
                [spans[part] for part in played.placement.parts_of(stage)] for stage in range(pp)
            ]
            chains = [list(itertools.chain(*spans)) for spans in spans_of]
            peaks = [
                peak_of_stage(played, stage, spans, parts) for stage, spans in enumerate(spans_of)
            ]
        for chain, peak in zip(chains, peaks):
            memory = summed_memory(
                layout=layout,
                chain=chain,
                parts=parts,
                sizes=sizes,
                micro_batches=micro_batches,
                pipeline_peak=peak,
            )
            expected.append(memory)
        fullest = max(expected, key=lambda memory: sum(memory.values()))
        margin = sum(fullest.values()) * cpus(4).device.fragmentation
        assert estimated.memory == fullest | {"margin": margin}
        assert estimated.stages == options.stages
        assert estimated.memory_bytes == sum(estimated.memory.values())
