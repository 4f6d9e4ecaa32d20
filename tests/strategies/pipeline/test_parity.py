"""A pipeline trains what one device trains: every schedule, alone and combined, and what it holds meanwhile."""

import functools
import itertools
from typing import Any

import pytest
import torch

from experiments.parity import curves
from experiments.parity.curves import Curve, Trial
from strategies.layout import Layout
from strategies.parallelize import Options, choose
from strategies.pipeline.schedules import SCHEDULES
from tests.pool import run_distributed
from tests.strategies.models import gpt_trial, language_loss
from tests.strategies.pipeline.test_trace import CHAINS, chain_trial

CPU = torch.device("cpu")
TOLERANCE = 5e-6
ALL: list[dict[str, Any]] = [{"schedule": name, "chunks": 2 if name == "interleaved_1f1b" else 1} for name in SCHEDULES]
"""Every schedule."""
OTHERWISE: list[dict[str, Any]] = [
    {"schedule": "zb_h1", "activation_checkpointing": "selective"},
    {"schedule": "zb_h1", "precision": "bf16"},
]
"""With whole recomputation: tests/strategies/test_parity.py."""


def _trial(layers: int = 4) -> Trial:
    """Tied embeddings, accumulation, clipping."""
    return gpt_trial(tied=True, layers=layers, micro_batches=4, clip=0.5, steps=2)


@functools.cache
def _truth(layers: int = 4) -> Curve:
    return curves.train(_trial(layers), Layout("single"), Options(), CPU)


def _train_all(_: int, name: str, workers: int, pp: int, options: list[Any]) -> list[Curve]:
    """The curve under each of the options, in one set of processes."""
    layout = choose(name, workers, pp=pp)
    return [curves.train(_trial(2 * pp), layout, Options(**given), CPU) for given in options]


def some(*names: str) -> list[dict[str, Any]]:
    return [given for given in ALL if given["schedule"] in names]


@pytest.mark.parametrize(
    ("name", "workers", "options"),
    [
        ("pipeline", 2, [*ALL, *OTHERWISE]),
        ("pipeline", 4, some("interleaved_1f1b", "zbv")),
        ("fsdp+pipeline", 4, some("interleaved_1f1b", "zbv")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_schedule_alone_and_combined(name: str, workers: int, options: list[Any]) -> None:
    """Others are rows of tests/strategies/test_parity.py; all of them for twenty steps: `trireme parity`."""
    pp = workers if name == "pipeline" else 2
    answers = run_distributed(_train_all, workers, name, workers, pp, options, timeout=240)
    for curve, given in zip(answers[0], options):
        found = curves.difference(_truth(2 * pp), curve)
        if "precision" in given:
            assert 1e-6 < found.loss < 3e-3, "computed in 16 bits, and not far off"
        else:
            assert found.loss <= TOLERANCE and found.norm <= 10 * TOLERANCE and found.weights <= 1e-3, (given, found)


@pytest.mark.parametrize(
    ("stages", "names"), [(2, list(CHAINS)), pytest.param(4, ["skips", "t5"], marks=pytest.mark.slow)]
)
def test_any_chain_without_hints(stages: int, names: list[str]) -> None:
    """Over four stages a value skips ahead of several."""
    trained = run_distributed(_train_chains, stages, names, stages)[0]
    for name, curve in zip(names, trained):
        found = curves.difference(curves.train(chain_trial(name), Layout("single"), Options(), CPU), curve)
        assert found.loss <= TOLERANCE and found.weights <= 1e-3, (name, found)


def _train_chains(_: int, names: list[str], stages: int) -> list[Curve]:
    schedules = itertools.cycle(("1f1b", "zb_h1"))
    return [
        curves.train(chain_trial(name), choose("pipeline", stages), Options(schedule=schedule), CPU)
        for name, schedule in zip(names, schedules)
    ]


# --- one step, looked at closely ----------------------------------------------------------------------------------


def _batches(rows: list[int]) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, 30, (2, n, 8), generator=generator)) for n in rows]


def _one_step(rank: int, rows: list[int], options: dict[str, Any]) -> dict[str, Any]:
    parallel = curves.begin(_trial(), choose("pipeline", 2), Options(**options), CPU)
    batches = _batches(rows)
    weights = [n / sum(rows) for n in rows]
    answers = []
    for _ in range(2):  # shapes are new in the first step, known in the second
        parallel.inner.zero_grad()
        total = parallel.forward_backward(batches, weights, language_loss, scale=4.0)
        answers.append(float(total))
    kept = {name: p.grad.clone() for name, p in parallel.named_parameters() if p.grad is not None}
    spans = parallel.profile(lambda: parallel.forward_backward(batches, weights, language_loss))
    evaluated = [parallel.forward(lambda model, batch: model(batch[0]), batch) for batch in batches]
    return {
        "losses": answers,
        "gradients": kept,
        "spans": spans,
        "evaluated": evaluated,
        "has_loss": parallel.has_loss,
        "own": sum(p.numel() for p in parallel.parameters()),
        "names": list(parallel.model_state()),
    }


@pytest.mark.parametrize("options", some("interleaved_1f1b", "zb_h1", "zbv"), ids=str)
def test_a_smaller_last_micro_batch_evaluation_and_a_profile(options: dict[str, Any]) -> None:
    rows = [2, 2, 2, 1]
    stages = run_distributed(_one_step, 2, rows, options)
    model, batches = _trial().build(), _batches(rows)
    total = sum(n / sum(rows) * language_loss(model, batch) for n, batch in zip(rows, batches))
    (4.0 * total).backward()
    found = [loss for stage in stages if stage["has_loss"] for loss in stage["losses"]]
    assert found == [pytest.approx(total.item(), rel=1e-6)] * 2
    whole = dict(model.named_parameters())
    seen = set()
    for stage in stages:
        for name, gradient in stage["gradients"].items():
            torch.testing.assert_close(gradient, whole[name].grad, rtol=1e-4, atol=1e-6, msg=name)
            seen.add(name)
    assert seen == whole.keys(), "the tied table under its first name, on both stages"
    assert set(stages[0]["names"]) | set(stages[1]["names"]) == set(model.state_dict())
    assert all(stage["own"] < 0.75 * sum(p.numel() for p in whole.values()) for stage in stages)
    last = 0 if options["schedule"] == "zbv" else 1  # folded, the first stage computes the loss
    assert [stage["has_loss"] for stage in stages] == [rank == last for rank in range(2)]
    for rank, stage in enumerate(stages):
        kinds = [span.kind for span in stage["spans"]]
        assert kinds.count("F") == kinds.count("B") == 4 * (1 + (options["chunks"] > 1 or last == 0))
        assert kinds.count("REDUCE") == 1 and {"SEND", "RECV"} <= set(kinds)
        assert all(span.stage == rank and span.start <= span.end for span in stage["spans"])
        assert all(a.end <= b.start for a, b in itertools.pairwise(stage["spans"]))
    for batch, found in zip(batches, stages[last]["evaluated"]):
        torch.testing.assert_close(found, model(batch[0]).detach(), rtol=1e-5, atol=1e-5)
    assert stages[1 - last]["evaluated"] == [None] * 4
