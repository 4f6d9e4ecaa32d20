"""Whole commands beside other libraries (experiments/benchmarks/peers)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click import ClickException

from app.config.io import load_config
from experiments.benchmarks.peers import program
from experiments.benchmarks.peers.workload import RECORD, WORKLOADS, workload
from tests.running import ROOT, environment


def test_lines_of_code_are_neither_comments_nor_docstrings() -> None:
    source = '"""What it is.\n\nMore."""\n\nimport os\n\n\ndef f() -> None:\n'
    source += '    """A docstring."""\n    # A comment.\n    print(\n        os.sep,\n    )\n'
    assert program.lines_of_code(source) == 5
    assert all(10 < peer.lines < 100 for peer in program.PEERS)


def test_a_step_lasts_until_the_next_one_begins() -> None:
    records = b"".join(RECORD.pack(0.5 * step, 1e6 + step) for step in range(14))
    steps = program.steps_of(records)
    assert steps[-1] == (6.5, 1e6 + 13)
    assert program.step_seconds(steps) == [0.5] * 3, "the first ten warm up"


def test_the_table_has_medians_over_the_turns_and_ratios_to_by_hand() -> None:
    def measured(whole: float, step: float) -> program.Measurement:
        return program.Measurement(whole=whole, start=5.0, end=2.0, step=step, memory=3e8)

    measurements = {
        program.BY_HAND: [measured(20.0, 0.1), measured(24.0, 0.2), measured(22.0, 0.1)],
        "Trireme": [measured(30.0, 0.11), measured(33.0, 0.22), measured(27.0, 0.11)],
    }
    _, row = program.rows_of(measurements, {program.BY_HAND: 60, "Trireme": 20})
    assert row["whole, s"] == "30.0 (27.0 to 33.0)"
    assert row["beside by hand"] == "1.100 (1.100 to 1.100)"
    assert row["step, ms"] == "110.0"

    # Half as fast in the later turns: medians of different turns would say 0.1 / 0.2.
    steps = {program.BY_HAND: (0.1, 0.1, 0.2, 0.2, 0.2), "Trireme": (0.1, 0.1, 0.22, 0.22, 0.1)}
    turns = {name: [measured(20.0, step) for step in steps[name]] for name in steps}
    _, row = program.rows_of(turns, {program.BY_HAND: 60, "Trireme": 20})
    assert row["beside by hand"].startswith("1.000 (0.500 to 1.100)")


@pytest.mark.parametrize("model", list(WORKLOADS))
def test_trireme_trains_as_the_others_do(model: str, tmp_path: Path) -> None:
    peer = next(peer for peer in program.PEERS if peer.name == "Trireme")
    command = peer.command(model=model, strategy="fsdp", folder=tmp_path)
    keys = command[command.index("train") + 1 :]
    config = load_config([], keys)
    work = workload(model)
    assert config.train.steps == work.steps
    assert config.train.global_batch_size == work.batch == 2 * work.batch_of_worker
    assert config.train.clip_norm and config.optimizer.weight_decay


@pytest.mark.parametrize(
    ("name", "launchers"),
    [("Trireme", 0), ("Trireme under torchrun", 1), (program.BY_HAND, 1), ("Ray actors", 0)],
)
def test_torchrun_starts_the_workers_of_those_that_need_it(
    name: str, launchers: int, tmp_path: Path
) -> None:
    peer = next(peer for peer in program.PEERS if peer.name == name)
    command = peer.command(model="gpt", strategy="ddp", folder=tmp_path)
    assert command.count("torch.distributed.run") == launchers


@pytest.mark.parametrize("earlier", [0, 9])
def test_what_is_measured_are_the_steps_that_are_trained(earlier: int, tmp_path: Path) -> None:
    writing = f"""
import os, pathlib, struct, sys
for worker, more in enumerate([{earlier}, 0]):
    steps = b"".join(struct.pack("dd", 100.0 + step, 1e6) for step in range(-more, 20))
    pathlib.Path(os.environ[{program.FOLDER!r}], str(worker)).write_bytes(steps)
"""
    command = [sys.executable, "-c", writing]
    measured = program.measure(command, steps=20, folder=tmp_path, uri="sqlite:///nowhere")
    assert measured.step == 1.0
    assert measured.whole - measured.start - measured.end == pytest.approx(19.0)


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([20], id="a worker is missing"),
        pytest.param([20, 19], id="a worker ended early"),
        pytest.param([21, 21], id="every worker trained too long"),
        pytest.param([20, 20, 20], id="a worker too many"),
        pytest.param([20, 20, 9, 9], id="two drivers"),
    ],
)
def test_a_command_that_trains_otherwise_is_no_measurement(counts: list[int]) -> None:
    processes = [[(float(step), 1e6) for step in range(count)] for count in counts]
    assert program.trained_steps(processes, 20) is None


@pytest.mark.parametrize("counts", [[20, 20], [29, 20], [20, 9, 20]])
def test_steps_before_training_do_not_count(counts: list[int]) -> None:
    processes = [[(float(step - count), 1e6) for step in range(count)] for count in counts]
    workers = program.trained_steps(processes, 20)
    assert workers is not None
    assert [[began for began, _ in worker] for worker in workers] == 2 * [
        [float(step) for step in range(-20, 0)]
    ]


def test_an_unknown_peer_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ClickException, match="no peer is called 'trirem': write by hand, "):
        program.peers_named("trireme, trirem")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--running-ray"]])
def test_whole_commands_are_measured(more: list[str]) -> None:
    command = [sys.executable, "-m", "experiments.benchmarks", "peers", "--json"]
    command += ["--model", "mnist", "--turns", "1", "--only", "Trireme", *more]
    answer = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900
    )
    assert answer.returncode == 0, answer.stderr
    results = json.loads(answer.stdout)["found"]
    assert set(results) == {program.BY_HAND, "Trireme"}
    for measurement in (peer[0] for peer in results.values()):
        assert 0 < measurement["start"] < measurement["whole"]
        assert 0 < measurement["step"] < measurement["end"] < measurement["whole"]
