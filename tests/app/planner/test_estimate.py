"""Memory of layouts, summed up again, moment by moment, from parts whose sizes are drawn at random."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.planner import estimate
from app.planner.layouts import Candidate
from app.planner.machine import cpus
from app.planner.output import between
from app.planner.part_costs import PartCost
from app.planner.plan import ranked
from app.planner.read import Reader
from strategies.costs import ModelSize, ParameterSize
from strategies.dims import Layout
from strategies.layout import choose
from strategies.options import Options
from strategies.pipeline.schedules import Placement
from strategies.pipeline.simulate import activations_by_formula
from tests.app.planner.conftest import gpus, plan_of
from tests.layout_cost import layout_cost

CHAIN = ["before", *["block0"] * 4, "after"]
COUNTS = {"before": 1, "block0": 4, "after": 1}
CASES = [(choose(name, 4), many, "", 1) for name in ("ddp", "fsdp", "zero1", "zero2", "tensor") for many in (1, 2)]
CASES += [(choose(name, 4, tp=2), 1, "", 1) for name in ("fsdp", "ddp")]
CASES += [(choose("pipeline", 2), 4, "1f1b", 1), (choose("fsdp", 4, pp=2), 4, "interleaved_1f1b", 2)]


def summed(layout: Layout, chain: list[str], parts: Any, sizes: Any, many: int, alive: float) -> dict[str, float]:
    """On the device that has `chain`. alive: in a pipeline, micro-batches whose activations are."""
    own = [replace(sizes[name], unit=f"{name}.{i}" if name == "block0" else "") for i, name in enumerate(chain)]
    cost, _ = layout_cost(layout, tuple(own), None, many)
    gradients = [layout_cost(layout, (size,), None, many)[0].gradients for size in own]
    saved = [parts[name].saved_bytes for name in chain]
    at_work = [parts[name].recomputed_bytes + parts[name].working_bytes for name in chain]
    early = many > 1 or ("ddp" in layout.parts and layout.dims.tp == 1)  # gradients are there from the start
    sharded = bool({"fsdp", "zero1"} & set(layout.parts))  # but those of which whole ones wait for the last micro-batch
    there = [cost.gradients if early else sum(gradients[i + 1 :]) for i in range(len(chain))]
    there = [0.0] * len(chain) if sharded and many > 1 else there
    peak = max(sum(saved[: i + 1]) + at_work[i] + there[i] for i in range(len(chain)))
    if alive:
        peak = sum(saved) * alive + max(at_work)
        peak += 0 if sharded else cost.gradients
    return {
        "parameters": cost.parameters,
        "gradients": cost.gradients,
        "optimizer": cost.optimizer,
        "activations": max(peak - cost.gradients, 0),
        "communication": cost.transient,
        "buffers": 24,
    }


@pytest.mark.parametrize(("layout", "many", "schedule", "chunks"), CASES)
def test_memory_is_that_of_the_worst_moment_on_the_fullest_device(
    layout: Layout, many: int, schedule: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, pp = random.Random(3), layout.dims.pp
    for cut in ((1, 1, 1, 1) if chunks == 2 else (1, 3), (2, 0, 1, 1) if chunks == 2 else (3, 1)) * 10:
        parts = {
            name: PartCost(
                name=name,
                count=count,
                forward_seconds=1.0,
                backward_seconds=2.0,
                launch_forward_seconds=0.0,
                launch_backward_seconds=0.0,
                flops=0.0,
                saved_bytes=draw.randrange(500),
                recomputed_bytes=draw.randrange(500),
                working_bytes=draw.randrange(500),
                stage_input_bytes=0.0,
                tp_bytes=0.0,
                tp_collectives=0.0,
            )
            for name, count in COUNTS.items()
        }
        sizes = {name: ParameterSize(name, (draw.randint(1, 9), 4), split_dim=0) for name in COUNTS}
        model: Any = SimpleNamespace(counts=COUNTS, parts=parts, order=CHAIN[1:-1])
        model.parameters = {name: (size,) for name, size in sizes.items()}
        monkeypatch.setattr(estimate, "part_costs", lambda *_, found=parts, **__: list(found.values()))
        size = ModelSize((), 24)
        reader: Any = SimpleNamespace(costs=lambda _, found=model, **__: found, size=size)
        reader.sample_bytes, reader.exchanged_numel = 1.0, 0.0
        reader.heads, reader.blocks, reader.compiles_loss = None, len(model.order), False
        options = Options(stages=cut if pp > 1 else None)
        candidate = Candidate(layout, 2, many, "none", "fp32", schedule, chunks)
        found = estimate.Estimator(reader=reader, machine=cpus(4), options=options).estimate(candidate)
        chains, expected = [CHAIN], []
        if pp > 1:
            spans = [CHAIN[1 + end - size : 1 + end] for size, end in zip(cut, itertools.accumulate(cut))]
            spans[0], spans[-1] = ["before", *spans[0]], [*spans[-1], "after"]
            owner = Placement.of(schedule, pp, chunks).stage_of
            chains = [[n for part, span in enumerate(spans) for n in span if owner(part) == s] for s in range(pp)]
        for stage, chain in enumerate(chains):
            alive = 0.0
            if pp > 1:
                numbers = {"stages": pp, "micro_batches": many, "chunks": chunks, "stage": stage}
                alive = activations_by_formula(schedule, **numbers) / chunks
            expected.append(summed(layout, chain, parts, sizes, many, alive))
        fullest = max(expected, key=lambda memory: sum(memory.values()))
        assert found.memory == fullest | {"margin": sum(fullest.values()) * cpus(4).device.fragmentation}
        assert found.stages == options.stages and found.memory_bytes == sum(found.memory.values())


def test_a_plan_says_what_fits_and_a_simpler_layout_within_the_range_of_the_fastest_comes_first(small: Reader) -> None:
    plan = plan_of(small, gpus(8), "train.precision=bf16", given=("train.activation_checkpointing",))
    row = plan.rows[0]
    assert row.verdict == "fits" and row.speed_range[0] < 1 < row.speed_range[1]
    low, high = plan.layout(row)["tokens_per_second_range"]
    assert low < plan.layout(row)["tokens_per_second"] < high
    for share, verdict in ((1.2, "fits"), (1.05, "close"), (0.95, "close"), (0.8, "does not fit")):
        assert replace(row, capacity=share * row.memory_bytes).verdict == verdict
    beyond_host = replace(row, host_memory_bytes=1.1, host_bytes=1.0)
    assert not beyond_host.fits and beyond_host.verdict == "does not fit"
    assert between(6.1e3, 7e3) == "6.1–7.0 k" and between(95, 120) == "95–120"
    simple = min((row for row in plan.rows if row.fits), key=lambda row: row.candidate.complexity)
    other = next(row for row in plan.rows if row.fits and row.candidate.complexity > simple.candidate.complexity)
    slow = replace(simple, seconds={"compute": 1.0})
    assert ranked([slow, replace(other, seconds={"compute": 0.98}, speed_range=(0.9, 1.1))])[0] is slow
    assert ranked([slow, replace(other, seconds={"compute": 0.6}, speed_range=(0.9, 1.1))])[0] is not slow
    wide = replace(other, seconds={"compute": 0.9}, speed_range=(0.5, 2.0))
    assert ranked([slow, wide])[0] is not slow, "that all are known badly does not make them equal"


@pytest.mark.parametrize(
    ("share", "gain", "first"),
    [
        (0.5, 0.9, "fast"),
        (0.85, 0.9, "fast"),
        (0.97, 0.9, "safe"),
        (0.97, 0.5, "fast"),
        (0.999, 0.6, "safe"),
        (1.2, 0.1, "safe"),
    ],
)
def test_speed_counts_by_the_chance_that_it_fits(small: Reader, share: float, gain: float, first: str) -> None:
    """fast: takes `gain` of the safe one's time, and `share` of the GPU's memory."""
    row = plan_of(small, gpus(2), "train.precision=bf16", given=("train.activation_checkpointing",)).rows[0]
    safe = replace(row, seconds={"compute": 1.0}, memory={"parameters": 0.3 * row.capacity})
    fast = replace(row, seconds={"compute": gain}, memory={"parameters": share * row.capacity})
    assert safe.fit_probability > 0.999 and 0 <= fast.fit_probability <= 1
    assert (fast.fit_probability > 0.5) == (share < 1)
    assert ranked([fast, safe])[0] is (safe if first == "safe" else fast)
    assert replace(safe, host_memory_bytes=1.2, host_bytes=1.0).fit_probability == 0
