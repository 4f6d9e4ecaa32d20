"""What is measured of a pipeline's step, when blocks move between stages by it, and what is kept of that."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.config_io import load_config
from app.console import Console
from app.job import Job, SilentChannel, strategy_options
from app.launchers.local import LocalWorkers
from app.launchers.supervisor import Supervisor
from app.pipeline_monitor import MEASURED_STEPS, WARM_UP_STEPS, PipelineMonitor, remembered_stages
from app.run.driver import Driver
from app.run.manifest import Run
from app.tracking.settings import resolve_tracking
from strategies.layout import choose
from strategies.pipeline.schedules import make
from strategies.pipeline.simulate import Times, bubble, chrome_trace, figures, simulate
from tests.chain import UNLIKE
from tests.running import curve, same_bits, torchrun, trireme, weights


def job(*more: str, steps: int = 60, pp: int = 2) -> Job:
    config = load_config([], ["task=tests.chain:Chain", "run.name=cut", "train.global_batch_size=16", *more])
    layout = choose("pipeline", pp, pp=pp) if pp > 1 else choose("single", 1)
    return Job(config, layout, "runs/cut", "a", "u", steps, ".")


@pytest.mark.parametrize(
    ("made", "done", "first"),
    [
        (job(), 0, 9),
        (job(steps=13), 0, 9),
        (job(steps=12), 0, None),  # one step would be left: less than a tenth
        (job(), 45, None),
        (job("parallel.rebalance=false"), 0, None),
        (job("train.deterministic=true"), 0, None),
        (job(pp=1), 0, None),
    ],
)
def test_when_it_is_measured(made: Job, done: int, first: int | None) -> None:
    found = PipelineMonitor.of(made, cast("Any", SimpleNamespace()), SilentChannel(), done)
    assert (found.measured[0] if found and found.measured else None) == first
    if found and first:
        assert first == done + WARM_UP_STEPS + 1
        assert [step for step in range(100) if found.due(step)] == [first + MEASURED_STEPS - 1]


def test_the_next_start_begins_with_the_stages_if_they_fit() -> None:
    assert remembered_stages(job(), [1, 3]) == (1, 3)
    assert remembered_stages(job(), None) is None
    assert remembered_stages(job(pp=4), [1, 3]) is None, "another number of parts"
    assert remembered_stages(job("parallel.stages=[2,2]"), [1, 3]) is None, "a person's word"
    assert strategy_options(job().config, (1, 3)).stages == (1, 3)
    assert strategy_options(job("parallel.stages=[2,2]").config, (1, 3)).stages == (2, 2)


def test_stages_are_kept_once_a_step_was_taken_with_them(tmp_path: Path) -> None:
    made = job(f"run.storage={tmp_path}", "tracking.enabled=false")
    settings = resolve_tracking(made.config.tracking, str(tmp_path))
    driver = Driver(Run(made.config), made.config, Console(quiet=True), settings)
    driver.run.open(made.config, 60)
    supervisor = Supervisor(LocalWorkers(), driver)
    driver.handle({"type": "rebalance", "step": 11, "sizes": (1, 3), "gain": 0.5, "text": "…"})
    again = supervisor._next(made)
    assert (again.stages, again.may_rebalance) == (None, False), "it failed before its first step: not once more"
    assert Run(made.config).manifest.stages is None
    progress = {"type": "progress", "step": 12, "steps": 60, "loss": 1.0, "rate": 1.0, "unit": "samples"}
    driver.handle(progress | {"seconds_left": 1.0, "seconds_per_step": 1.0, "memory_bytes": 0})
    again = supervisor._next(made)
    assert (again.stages, again.may_rebalance) == ((1, 3), True)
    assert Run(made.config).manifest.stages == [1, 3]
    driver.run.end("stopped")


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2)])
def test_a_step_that_ran_as_simulated_has_the_simulated_bubble(name: str, chunks: int) -> None:
    spans = simulate(make(name, 2, 8, chunks), Times(0.01, 0.01, 0.01))
    ranks = [[span for span in spans if span.stage == stage] for stage in (0, 1)]
    found = figures(ranks, name, chunks)
    assert abs(found["pipeline/bubble"] - bubble(spans)) < 1e-9
    assert abs(found["pipeline/bubble_by_simulation"] - bubble(spans)) < 1e-9
    assert abs(found["pipeline/stage_1/compute_seconds"] - 8 * chunks * 0.03) < 1e-9
    trace = json.loads(json.dumps(chrome_trace(spans)))["traceEvents"]
    assert sum(event["ph"] == "X" for event in trace) == len(spans)


def test_under_torchrun_the_same_processes_continue_with_the_new_stages(tmp_path: Path) -> None:
    """Two chunks on each stage; to the bit what one device computes, as nothing in it is random."""
    plain = ["train", *UNLIKE, "train.steps=30", f"run.storage={tmp_path}"]
    one = trireme(*plain, "run.name=one", "strategy=single", "launcher=local")
    staged = ["run.name=moved", "strategy=pipeline", "parallel.pp=2", "parallel.schedule=zbv", "parallel.chunks=2"]
    two = torchrun(*plain, *staged)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert re.search(r"1\+1\+\d\+\d instead of 2\+2\+2\+2", two.out), "a slow one on each stage"
    assert "continuing after" not in two.out and "continued after" not in two.out, "it is one start"
    assert curve(tmp_path, "moved") == curve(tmp_path, "one")
    assert same_bits(weights(tmp_path / "moved"), weights(tmp_path / "one"))
