"""A run whose plan is wrong says so, moves to another layout, and survives a kill in the move."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.running import Lines, curve, environment, mlflow_run, start, trireme, wait_until

pytestmark = pytest.mark.slow
STEPS = 70
GPT = [
    "task=language_modelling",
    "task_args={data: python, tokenizer: bytes, sequence_length: 8, d_model: 32, n_layers: 6, "
    "n_heads: 2, eval_samples: 16}",
    "train.global_batch_size=2",
    "train.log_every=1",
    "checkpoint.every_seconds=null",
    "tracking.log_model=false",
    "tracking.system_metrics_every=0",
    "workers=2",
    "resources_per_worker.CPU=0.5",
]
"""Many layers of few numbers: tensor parallelism sends something in each of them."""
WRONG = {
    "memory_bandwidth": 2.5e8,
    "stream": 1.0,
    "operation": 5e-5,
    "link_within": 1e13,
    "latency_within": 2e-5,
    "latency_across": 2e-5,
}
"""A machine whose memory is slow and whose links cost next to nothing.

There the optimizer's state should be split between the workers, and who else waits for links does
not matter.
"""
MOVES = "saving a checkpoint to continue with it"


def record_of(folder: Path) -> Any:
    return json.loads((folder / "plan.json").read_text())


@pytest.fixture
def wrong_machine(tmp_path: Path) -> dict[str, str]:
    """An environment in whose cache `trireme calibrate` seems to have measured `WRONG`."""
    cache = tmp_path / "cache"
    file = cache / "trireme" / "planner" / "rates-cpu.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(WRONG))
    return environment(XDG_CACHE_HOME=str(cache), RAY_raylet_start_wait_time_s="120")


@pytest.mark.parametrize("launcher", ["actors", "ray"])
def test_a_run_moves_from_a_layout_that_only_looked_fast_and_survives_a_kill_in_between(
    tmp_path: Path, wrong_machine: dict[str, str], launcher: str
) -> None:
    folder = tmp_path / "run"
    arguments = ["train", *GPT, f"run.storage={tmp_path}", f"launcher={launcher}"]
    follows = [*arguments, "run.name=run", "strategy=auto", "plan.follow=true"]
    follows += ["parallel.dp_shard=1"]  # which leaves copies and split layers
    follows += ["train.steps=1000000"]  # however long the restart takes, it pays

    first = start(follows, env=wrong_machine)
    lines = Lines(first)
    lines.when(MOVES)
    running.end_tree(first.pid)
    first.wait()
    text = lines.text
    assert "strategy auto is tensor (tp 2)" in text
    assert "outside of the planned" in text and "the plan was wrong mostly about" in text
    record = record_of(folder)
    left, taken = record["path"]
    assert left.startswith("tensor (tp 2)") and taken.startswith(record["key"])
    assert list(record["seconds"]) == [left]
    (correction,) = json.loads(
        (tmp_path / "cache" / "trireme" / "planner" / "rates-cpu.json").read_text()
    )["corrections"]
    assert correction["run"] == "run"

    second = start(follows, env=wrong_machine)
    lines = Lines(second)
    wait_until(lambda: len(record_of(folder)["seconds"]) > 1)
    wait_until(lambda: json.loads((folder / "progress.json").read_text())["step"] >= STEPS)
    second.send_signal(signal.SIGTERM)
    second.wait(running.LONG)
    assert "run the same command again" in lines.text
    assert f"strategy auto is {record['key'].split(',')[0]}" in lines.text
    record = record_of(folder)
    assert record["path"][:2] == [left, taken], "the second start has taken up the move"
    assert len(record["path"]) <= 4 and list(record["seconds"])[:2] == [left, taken]

    trireme(
        *arguments, "run.name=truth", "strategy=ddp", f"train.steps={STEPS}", env=wrong_machine
    ).expect()
    moved = curve(tmp_path, "run")
    undisturbed = curve(tmp_path, "truth")
    steps = range(1, STEPS + 1)
    assert [moved[step] for step in steps] == pytest.approx(
        [undisturbed[step] for step in steps], rel=2e-4
    )
    run = mlflow_run(tmp_path, "run")
    assert run.info.status == "KILLED"
    assert f"following the plan: {taken} is expected to take" in run.data.tags["trireme.moves"]
    for part in ("computing", "communication", "bubble", "data"):
        assert f"plan/{part}_seconds" in run.data.metrics
        assert f"plan/{part}_seconds_measured" in run.data.metrics


def test_stages_of_a_pipeline_are_cut_again_by_what_their_blocks_take(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "task=tests.chain:Chain", f"run.storage={tmp_path}", "launcher=actors"]
    arguments += ["task_args={dropout: 0, slow_block_seconds: 0.05}", "train.global_batch_size=16"]
    arguments += ["workers=2", "resources_per_worker.CPU=0.5", "train.log_every=1"]
    arguments += ["tracking.log_model=false", "checkpoint.every_seconds=null"]
    arguments += ["parallel.pp=2", "parallel.schedule=1f1b", "train.micro_batch_size=4"]
    env = environment(XDG_CACHE_HOME=str(tmp_path / "cache"), RAY_raylet_start_wait_time_s="120")

    follows = [*arguments, "run.name=run", "strategy=auto", "plan.follow=true"]
    run = start([*follows, "train.steps=1000000"], env=env)
    lines = Lines(run)
    lines.when(MOVES)
    wait_until(lambda: len(record_of(folder)["seconds"]) > 1)
    wait_until(lambda: json.loads((folder / "progress.json").read_text())["step"] >= STEPS)
    run.send_signal(signal.SIGTERM)
    run.wait(running.LONG)
    even, uneven = list(record_of(folder)["seconds"].items())[:2]
    assert even[0].endswith("2+2 blocks") and uneven[0].endswith("3+1 blocks")
    assert uneven[1] < 0.8 * even[1], "each stage has one of the slow blocks"

    truth = [*arguments, "run.name=truth", "strategy=pipeline", f"train.steps={STEPS}"]
    trireme(*truth, env=env).expect()
    moved = curve(tmp_path, "run")
    undisturbed = curve(tmp_path, "truth")
    steps = range(1, STEPS + 1)
    assert [moved[step] for step in steps] == pytest.approx(
        [undisturbed[step] for step in steps], rel=2e-4
    )
