"""A run that decides on its batch while it trains: when it looks, what decides, and the run."""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from app.config import Config
from app.errors import UserError
from app.run.prepare import prepare, read_task
from app.storage.lease import write_lease
from app.storage.storage import Storage
from app.training import batch_growth
from app.training.batch_growth import (
    LEVEL,
    MOST_MEASURING,
    PIECES,
    BranchLosses,
    Decision,
    Growth,
    compare,
    is_as_good,
)
from app.training.events import Event, WarningIssued
from app.training.persistence import Persistence
from strategies.layout import LayoutError
from tests.app.kit import logged, training_of
from tests.app.results.test_compare import autocorrelated
from tests.chain import Chain, Net, config
from tests.pool import run_distributed

# --- when it looks --------------------------------------------------------------------------------


def walk(growth: Growth, answers: list[bool]) -> Growth:
    """Take the whole run, with these decisions and then none for twice the batch."""
    samples = 0
    answer = iter(answers)
    for _ in range(100_000):
        point = growth.point_at(samples)
        if point is None:
            if samples >= growth.total:
                return growth
            samples += growth.batches.batch_at(samples)
            continue
        decision = Decision(
            samples=point.samples,
            batch=point.batch,
            window=point.window,
            difference=0.0,
            error=0.0,
            doubled=next(answer, False),
            dropped_steps=0,
            dropped_seconds=0.0,
        )
        growth = replace(growth, decisions=(*growth.decisions, decision))
        samples += point.window
    raise AssertionError("the run does not end")


@pytest.mark.pure
@given(st.integers(1, 64), st.integers(1, 5000), st.lists(st.booleans(), max_size=6))
def test_looks_come_at_doublings_and_cost_a_share_at_most(
    batch: int, steps: int, answers: list[bool]
) -> None:
    growth = walk(Growth.of(batch=batch, steps=steps, warmup_steps=20), answers)
    assert growth.dropped_samples <= MOST_MEASURING * growth.total
    present = batch
    before = 0
    for decision in growth.decisions:
        assert decision.batch == present
        assert decision.samples >= 256 * batch
        assert decision.window % (2 * present) == 0
        assert decision.window >= 2 * PIECES * present
        # Two looks have a doubling of the samples between them.
        octave = math.floor(math.log2(decision.samples / (256 * batch)))
        assert octave >= before
        before = octave + 1
        present *= 2 if decision.doubled else 1
    assert growth.possible_batches()[-1] >= present


@pytest.mark.pure
def test_a_long_run_looks_at_every_doubling_and_a_short_one_never() -> None:
    long = walk(Growth.of(batch=8, steps=20_000, warmup_steps=300), [True, False, True])
    assert [each.samples for each in long.decisions] == [2400, 4800, 9600, 19_200, 38_400, 76_800]
    assert long.batches.rows == ((0, 8), (2400, 16), (9600, 32))
    assert long.possible_batches() == [8, 16, 32, 64, 128, 256]
    assert not walk(Growth.of(batch=8, steps=600, warmup_steps=0), []).decisions


@pytest.mark.pure
def test_the_rates_curve_does_not_depend_on_decisions_and_ends_with_the_run() -> None:
    growth = Growth.of(batch=8, steps=1000, warmup_steps=0)
    assert [growth.step_on_curve(8 * step, 8) for step in range(1000)] == list(range(1000))
    assert growth.step_on_curve(8 * 1000 - 32, 32) == 999


# --- what decides ---------------------------------------------------------------------------------


def branches(random: np.random.Generator, *, worse: float, correlation: float) -> bool:
    """Whether twice the batch is taken, if its loss is higher by `worse` standard deviations."""
    samples = random.normal(3.0, 0.5, 2 * PIECES)  # the noise of samples, which both have alike
    differences = autocorrelated(random, PIECES, correlation) + worse
    same = BranchLosses(losses=samples.tolist(), items=[8.0] * (2 * PIECES))
    doubled = samples.reshape(-1, 2).mean(axis=1) + differences
    return is_as_good(compare(same, BranchLosses(losses=doubled.tolist(), items=[16.0] * PIECES)))


@pytest.mark.pure
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_without_a_difference_twice_the_batch_is_refused_as_often_as_documented(
    correlation: float,
) -> None:
    random = np.random.default_rng(1)
    refused = sum(not branches(random, worse=0.0, correlation=correlation) for _ in range(1000))
    # Four standard deviations of the share.
    assert refused / 1000 == pytest.approx(LEVEL, abs=0.05)


@pytest.mark.pure
def test_a_worse_batch_is_seldom_taken_and_a_better_one_always() -> None:
    random = np.random.default_rng(1)
    taken = sum(branches(random, worse=1.0, correlation=0.0) for _ in range(200))
    assert taken < 4
    assert all(branches(random, worse=-1.0, correlation=0.0) for _ in range(200))


@pytest.mark.pure
def test_a_branch_that_diverges_loses_and_one_without_losses_decides_nothing() -> None:
    finite = BranchLosses(losses=[1.0] * (2 * PIECES), items=[1.0] * (2 * PIECES))
    doubled = BranchLosses(losses=[1.0] * PIECES, items=[2.0] * PIECES)
    diverged = BranchLosses(losses=[], items=[], diverged=True)
    assert not is_as_good(compare(finite, diverged))
    assert is_as_good(compare(diverged, doubled))
    items = [0.0] * (2 * PIECES)
    items[-2:] = [1.0, 3.0]
    sparse = BranchLosses(losses=[math.nan] * (2 * PIECES - 2) + [1.0, 2.0], items=items)
    difference = compare(sparse, doubled)
    assert difference.mean == pytest.approx(1.0 - 1.75), "the mean over items, not over steps"
    assert not is_as_good(difference)


@pytest.mark.pure
def test_a_decision_is_one_sentence() -> None:
    decision = Decision(
        samples=12_800,
        batch=64,
        window=8192,
        difference=-0.002,
        error=0.004,
        doubled=True,
        dropped_steps=128,
        dropped_seconds=1.0,
    )
    assert decision.sentence == "at 12,800 samples: 64 → 128, loss difference -0.002 ± 0.004"
    refused = replace(decision, doubled=False, difference=0.01)
    assert refused.sentence == (
        "at 12,800 samples: 64 stays, not 128, loss difference +0.01 ± 0.004"
    )
    assert replace(refused, difference=math.inf).sentence.endswith("not 128, 128 diverged")


# --- the run --------------------------------------------------------------------------------------


class Steady(Chain):
    """The chain without dropout."""

    def build_model(self) -> nn.Module:
        return Net(self.width, 4, 0.0)


class Exploding(Steady):
    """Has no finite loss once a micro-batch has more than 8 samples."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss * math.nan if len(batch[0]) > 8 else loss


class Reading(IterableDataset[Any]):
    """The points as a stream, whose state is its position."""

    def __init__(self, points: Any) -> None:
        self.points = points
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            yield self.points[(self.position - 1) % len(self.points)]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class ExplodingOnStream(Exploding):
    """The same on data that are read from their beginning."""

    def train_data(self) -> Any:
        return Reading(super().train_data())


AUTO = (
    "task=tests.app.training.test_batch_growth_auto:Steady",
    "train.batch_schedule=auto",
    "train.global_batch_size=8",
    "train.steps=100",
    "train.log_every=5",
    "optimizer.lr=0.02",
    "optimizer.lr_scaling=sqrt",
    "optimizer.lr_batch_size=8",
    "schedule.name=cosine",
    "schedule.warmup_steps=3",
)
"""Looks after 10 steps of the first batch, and once or twice more; see `shorten`."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches of 12 pairs or more, of which all are compared, so that runs are short."""
    monkeypatch.setattr(batch_growth, "FIRST_STEPS", 10)
    monkeypatch.setattr(batch_growth, "PIECES", 12)
    monkeypatch.setattr(batch_growth, "COMPARED", 1.0)
    monkeypatch.setattr(batch_growth, "MOST_MEASURING", 0.8)
    monkeypatch.setattr(batch_growth, "LEAST_LEFT", 1)


def by_step(events: list[Event], metric: str) -> dict[int, float]:
    return {event.step: event.values[metric] for event in logged(events, metric)}


def prepared(world: int, strategy: str, *more: str) -> Config:
    """The configuration that the workers of a short run get."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        shorten(monkeypatch)
        run = config(*AUTO, f"strategy={strategy}", *more)
        return prepare(run, read_task(run), world, devices_per_node=None).config


def trained(rank: int, world: int, strategy: str, run: Config) -> dict[str, Any]:
    """What a run logs, says and decides."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        shorten(monkeypatch)
        training, events = training_of(run, "/nowhere", rank, world, strategy)
        summary = training.run()
    return {
        "losses": by_step(events, "train/loss"),
        "rates": by_step(events, "train/lr"),
        "batches": by_step(events, "train/global_batch_size"),
        "pairs": [
            (event.step, event.values["batch/loss_same"], event.values["batch/loss_doubled"])
            for event in logged(events, "batch/loss_same")
        ],
        "notes": [event.message for event in events if isinstance(event, WarningIssued)],
        "batch": summary["batch"],
        "steps": (summary["step"], summary["steps"]),
        "samples": training.progress.samples_seen,
    }


@functools.cache
def trained_alone() -> dict[str, Any]:
    """What the run of one device logs, says and decides."""
    return trained(0, 1, "single", prepared(1, "single"))


def decided(run: dict[str, Any]) -> list[tuple[int, int, bool]]:
    return [(each["samples"], each["batch"], each["doubled"]) for each in run["batch"]["decisions"]]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        # Its state is as whole as that of one device, which the tests below look at.
        pytest.param("ddp", ["train.micro_batch_size=4"], marks=pytest.mark.slow),
        pytest.param("fsdp", ["train.micro_batch_size=8"], marks=pytest.mark.slow),
        ("pipeline", ["train.micro_batch_size=4"]),  # by default a step has 8 micro-batches
    ],
)
def test_every_layout_decides_the_same_on_the_same_curve(strategy: str, more: list[str]) -> None:
    alone = trained_alone()
    assert decided(alone)
    assert alone["batch"]["last"] > 8
    first, second = run_distributed(trained, 2, 2, strategy, prepared(2, strategy, *more))
    assert decided(first) == decided(second) == decided(alone)
    assert first["steps"] == alone["steps"]
    assert first["batches"] == alone["batches"]
    for values in ("losses", "rates"):
        assert first[values] == pytest.approx(alone[values], rel=2e-5)
    assert np.array(first["pairs"]) == pytest.approx(np.array(alone["pairs"]), rel=2e-5)


@pytest.mark.pure
def test_a_run_goes_on_from_the_better_branch_and_counts_the_other(short: None) -> None:
    run = trained_alone()
    decisions = run["batch"]["decisions"]
    assert decisions[0]["samples"] == 80
    assert run["samples"] >= 100 * 8
    assert run["steps"][0] == run["steps"][1] < 100
    taken = [each for each in decisions if each["doubled"]]
    batches = [8, *(2 * each["batch"] for each in taken)]
    assert sorted(set(run["batches"].values())) == sorted(set(batches))
    assert run["batch"]["dropped_samples"] == sum(each["window"] for each in decisions)
    for each in decisions:
        steps = each["window"] // (each["batch"] * (1 if each["doubled"] else 2))
        assert each["dropped_steps"] == steps
    steps = [step for step, *_ in run["pairs"]]
    assert steps == sorted(set(steps)), "MLflow takes each step of a metric once"
    assert list(run["losses"]) == sorted(run["losses"])
    assert sum("loss difference" in note for note in run["notes"]) == len(decisions)


@pytest.mark.pure
def test_the_branches_losses_are_those_of_runs_with_that_batch(short: None) -> None:
    constant = ("schedule.name=constant", "train.log_every=1", "train.micro_batch_size=8")
    run = trained(0, 1, "single", prepared(1, "single", *constant))
    decision = run["batch"]["decisions"][0]
    begin = decision["samples"] // 8
    rows = f"[[0,8],[{decision['samples']},16]]"
    losses = {}
    for key, steps in (("[]", begin + 24), (rows, begin + 12)):
        keys = [*AUTO, *constant, f"train.batch_schedule={key}", f"train.steps={steps}"]
        training, events = training_of(config(*keys), "/nowhere")
        training.run()
        losses[key] = list(by_step(events, "train/loss").values())[begin:]
    pairs = np.array(run["pairs"])[:12]
    same = np.array(losses["[]"]).reshape(-1, 2).mean(axis=1)
    assert pairs[:, 1] == pytest.approx(same, rel=1e-12)
    assert pairs[:, 2].tolist() == losses[rows]


@pytest.mark.pure
@pytest.mark.parametrize(
    "name", [pytest.param("Exploding", marks=pytest.mark.slow), "ExplodingOnStream"]
)
def test_a_larger_batch_that_diverges_is_refused_and_leaves_nothing(short: None, name: str) -> None:
    task = f"task=tests.app.training.test_batch_growth_auto:{name}"
    run = trained(0, 1, "single", prepared(1, "single", task, "train.micro_batch_size=16"))
    assert [each["doubled"] for each in run["batch"]["decisions"]] == [False] * len(decided(run))
    assert any("16 diverged" in note for note in run["notes"])
    fixed = config(*AUTO, task, "train.batch_schedule=[]", "train.global_batch_size=8")
    training, events = training_of(fixed, "/nowhere")
    training.run()
    assert run["losses"] == by_step(events, "train/loss")


class _Killed(BaseException):
    pass


def _run_until(folder: Path, killed_at: int | None, more: tuple[str, ...]) -> Any:
    """Train from the newest checkpoint; end at the n-th step that is taken, branches included."""
    folder.mkdir(exist_ok=True)
    write_lease(Storage(folder), "attempt", 0)
    values = config(*AUTO, "train.log_every=1", "checkpoint.every_steps=7", *more)
    training, events = training_of(values, folder, persistence_class=Persistence)
    taken = 0
    step = training.step

    def counted(micro_batches: Any) -> None:
        nonlocal taken
        if taken == killed_at:
            training.persistence.close()  # the checkpoint under way
            raise _Killed
        taken += 1
        step(micro_batches)

    training.step = counted  # type: ignore[method-assign]
    try:
        summary = training.run()
    except _Killed:
        return None
    finally:
        training.close()
    return training, events, summary


@pytest.mark.pure
@pytest.mark.parametrize(
    ("kills", "more"),
    [
        # In the larger branch, in the other one, and after the decision.
        ((15, 18, 40), ()),
        # In the first steps, in both branches at several steps, and after the decision.
        pytest.param((4, 9, 9, 24, 40, 3, 30), (), marks=pytest.mark.slow),
        pytest.param(
            (4, 9, 9, 24, 40, 3, 30),
            ("train.ema_decay=0.9", "optimizer.name=adamw8bit"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_is_killed_in_a_branch_and_outside_goes_on_to_the_bit(
    short: None, tmp_path: Path, kills: tuple[int, ...], more: tuple[str, ...]
) -> None:
    whole, _, summary = _run_until(tmp_path / "whole", None, more)
    parts = tmp_path / "parts"
    for killed_at in kills:
        assert _run_until(parts, killed_at, more) is None
    resumed, _, resumed_summary = _run_until(parts, None, more)
    for key, value in whole.parallel.model_state().items():
        assert torch.equal(value, resumed.parallel.model_state()[key]), key

    def numbers(summary: dict[str, Any]) -> Any:
        decisions = [{**each, "dropped_seconds": 0} for each in summary["batch"]["decisions"]]
        return decisions, summary["step"], summary["steps"]

    assert numbers(resumed_summary) == numbers(summary)
    assert len(summary["batch"]["decisions"]) > 1


@pytest.mark.pure
def test_a_stop_in_a_branch_leaves_the_checkpoint_where_the_branches_begin(
    short: None, tmp_path: Path
) -> None:
    values = config(*AUTO)
    write_lease(Storage(tmp_path), "attempt", 0)
    training, _ = training_of(values, tmp_path, persistence_class=Persistence)
    step = training.step

    def stopping(micro_batches: Any) -> None:
        step(micro_batches)
        training.channel.stopping = training.in_branch  # type: ignore[attr-defined]

    training.step = stopping  # type: ignore[method-assign]
    summary = training.run()
    training.close()
    assert (summary["stopped"], summary["step"]) == (True, 10)
    assert not summary["batch"]["decisions"]
    again, _ = training_of(values, tmp_path, persistence_class=Persistence)
    assert again.resumed_from == 10
    assert again.run()["batch"]["decisions"][0]["samples"] == 80
    again.close()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["strategy=ddp", "train.global_batch_size=9"], "does not divide by the 2"),
        (["strategy=ddp", "train.eval_separate=true"], "leave one of them out"),
        (
            [
                "strategy=pipeline",
                "parallel.schedule=interleaved_1f1b",
                "parallel.chunks=2",
                "train.global_batch_size=6",
                "train.micro_batch_size=4",
                "train.steps=20000",
            ],
            "with the batch of 12 in train.batch_schedule: ",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(keys: list[str], sentence: str) -> None:
    run = config(*AUTO, *keys)
    with pytest.raises((UserError, LayoutError), match=sentence):
        prepare(run, read_task(run), 2, devices_per_node=None)


@pytest.mark.pure
def test_a_run_says_what_it_will_do_and_keeps_as_many_samples_in_memory() -> None:
    run = config(*AUTO, "train.steps=4000", "strategy=ddp")
    prepared = prepare(run, read_task(run), 2, devices_per_node=None)
    assert prepared.config.train.micro_batch_size == 4
    assert any(
        note.startswith("the global batch is 8, and may grow to 32; twice the batch is tried first")
        for note in prepared.notes
    )
    short_run = config(*AUTO)
    notes = prepare(short_run, read_task(short_run), 1, devices_per_node=None).notes
    assert any("too short" in note for note in notes)
