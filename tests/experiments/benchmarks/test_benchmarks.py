"""The harness (who runs when, what a ratio and its interval are), every benchmark once in its smallest form; and chaos
judges rightly."""

import functools
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from app.data.order import Order
from app.planner.device import Device
from experiments.benchmarks import evidence, fit, harness, plain, published
from experiments.benchmarks.chaos import Kill, summary, unlike
from experiments.benchmarks.chaos_task import Start, lost_or_repeated
from experiments.benchmarks.compared import Compared, compare
from tests.pool import run_distributed
from tests.running import ROOT, environment


def test_a_ratio_is_that_of_neighbouring_blocks_whatever_the_machine_does_meanwhile() -> None:
    speed = [1.0, 1.0, 3.0, 3.0, 9.0, 9.0, 2.0, 2.0]
    sides = harness.beside({"A": speed, "B": [1.1 * each for each in speed]}, "A")
    assert sides["B"]["ratio"] == pytest.approx(1.1) and sides["B"]["interval"] == pytest.approx((1.1, 1.1))
    assert sides["A"]["ratio"] == 1.0 and sides["A"]["ms"] == 2500.0
    low, high = harness.interval([1.0] * 40, [1.0, 1.0, 1.4, 1.4] * 10)
    assert low == pytest.approx(1.0) and high == pytest.approx(1.4), "half of the blocks say this, half that"


def test_a_table_of_published_runs_is_compared(tmp_path: Path) -> None:
    columns = "d_model,n_layers,n_heads,vocab_size,seq_len,gpus,micro_batch_size,grad_accum,model,gpu,precision"
    columns += ",sharding,activation_checkpointing,tokens_per_s_per_gpu"
    table = tmp_path / "runs.csv"
    table.write_text(f"{columns}\n1024,6,16,1000,512,8,8,2,x,a100_80gb,bf16,FULL_SHARD,True,50000\n")
    found = json.loads(CliRunner().invoke(published.main, [str(table), "--json"]).stdout)["found"]
    assert found["rows"] == 1 and found["not_fitting"] == 0 and 0 < found["median_error"] < 10
    said = CliRunner().invoke(published.main, [str(table), "--calibration", str(tmp_path / "curve.svg")])
    assert said.exit_code == 2 and "needs 8 runs" in said.output


@functools.cache
def _compared(model: str, gpus: int) -> list[Compared]:
    return [compare(run) for run in published.runs() if (run.model, run.gpus) == (model, gpus)]


@pytest.mark.slow
def test_what_a_plan_would_choose_is_held_beside_what_ran_and_beside_the_best_that_was_found(tmp_path: Path) -> None:
    many = _compared("aleph-13b", 32)
    (row,) = evidence.among_published(many)
    loss = float(row["chosen takes"].partition(" %")[0])
    assert loss >= 0 and (loss == 0) == (row["best known"] == "the same")
    wrong = [replace(one, run=replace(one.run, step_seconds=1 / one.plan.step_seconds)) for one in many]
    assert float(evidence.among_published(wrong)[0]["chosen takes"].removesuffix(" %, measured")) > 0
    size = many[0].plan.memory_bytes / 2**30  # of the 2.5 GiB that a card holds beside it the plan says nothing
    card = replace(many[0], run=replace(many[0].run, memory_gib=size + 2.5, beside_gib=2.5))
    assert card.memory_error == pytest.approx(0)
    in_pieces = compare(replace(many[0].run, fragments=0.5)).plan.memory_bytes / 2**30
    assert in_pieces == pytest.approx(2 * size / (1 + Device.fragmentation))  # instead of what is planned for
    (best,) = evidence.beside_best(_compared("nanotron-1.34b", 8))
    assert best["chosen takes"].endswith("planned") and best["mostly"] and best["chosen"] != best["best known"]
    curve = tmp_path / "curve.svg"
    evidence.draw([replace(one, run=replace(one.run, micro_batch=i)) for one in many for i in range(9)], str(curve))
    assert "<svg" in curve.read_text()


def test_published_runs_are_halved_by_their_address_and_settings_and_not_by_what_they_reached() -> None:
    table = published.runs()
    assert all(run.source.startswith("https://") for run in table)
    ran = [run for run in table if run.tp * run.pp > 1 and run.step_seconds]
    assert len(ran) >= 60 and 0.4 < sum(run.is_unseen for run in ran) / len(ran) < 0.6
    others = ("step_seconds", "memory_gib", "flash", "again", "beside_gib", "fragments")
    assert all(replace(run, **dict.fromkeys(others, 3.0), loss="?").is_unseen == run.is_unseen for run in table)
    torchtitan = {run.loss for run in table if "torchtitan" in run.source}
    assert torchtitan == {"float32"} and {run.flash for run in table if "NVIDIA" in run.source} == {1.4}


def test_constants_that_are_tried_are_planned_with_and_ranges_hold_what_they_were_made_of() -> None:
    run = next(one.run for one in _compared("aleph-13b", 32) if one.run.micro_batch == 1)
    slower, faster = (compare(run, {**fit.START, "ampere.bf16": rate}) for rate in (0.6, 0.8))
    assert slower.plan.step_seconds > faster.plan.step_seconds
    found = fit.ranges([("tp", error / 100) for error in range(-10, 11)])
    mixed = fit.ranges([("pp", 0.0)] * 9 + [("tp", error / 100) for error in range(-10, 11)])
    assert mixed["pp"] == mixed["any"] and mixed["pp"][0] < 0.95, "nine lucky runs do not make a range of no width"
    low, high = found["tp"]
    assert found["any"] == found["tp"] and 0.90 < low < 0.93 and 1.08 < high < 1.12


def _by_hand(rank: int, wrap: str) -> float:
    training = plain.gpt(3, wrap)
    training.advance()
    index = next(training.indices)
    return training.forward_backward(training.inputs[index], training.targets[index]).item()


@pytest.mark.slow
def test_what_is_written_by_hand_for_a_divided_sequence_is_the_same_training() -> None:
    halves = run_distributed(_by_hand, 2, "context")
    assert sum(halves) / 2 == pytest.approx(run_distributed(_by_hand, 1, "single")[0], rel=1e-5)


SMALLEST = {"step": "--model gpt --strategy zbv --blocks 1", "chaos": "--seed 5 --kills 18 --each 3"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs(name: str) -> None:
    """In a process of its own; chaos ends with 1 if anything is lost."""
    command = [sys.executable, "-m", "experiments.benchmarks", name, *SMALLEST[name].split(), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["benchmark"] == name and said["versions"]["torch"] == torch.__version__
    assert said["command"].startswith(f"python -m experiments.benchmarks {name}") and "cores" in said["machine"]
    assert said["found"] and "NaN" not in json.dumps(said["found"])


# --- chaos ------------------------------------------------------------------------------------------------------------

BATCH, STEPS, SAMPLES = 4, 6, 10
ORDER = Order(SAMPLES, 0).indices(0, 100).tolist()


def steps(rank: int, began: float, first: int, last: int) -> Start:
    """A start of one of two ranks that took the steps first … last, two samples each."""
    places = [[BATCH * (step - 1) + 2 * rank + i for i in (0, 1)] for step in range(first, last + 1)]
    return Start(began, rank, 1, [(began + p[0], p, [ORDER[at] for at in p]) for p in places])


def test_samples_that_were_lost_or_repeated_are_named() -> None:
    def judged(*starts: Start) -> list[str]:
        return lost_or_repeated(starts, STEPS * BATCH, SAMPLES)

    whole = [steps(0, 0, 1, 6), steps(1, 0, 1, 6)]
    again = [steps(0, 0, 1, 4), steps(1, 0, 1, 3), Start(50, 0, 2, []), steps(0, 100, 3, 6), steps(1, 100, 3, 6)]
    assert judged(*whole) == judged(*again) == [], "going back to a checkpoint loses nothing"
    assert judged(whole[0])[0].endswith("samples lost, the first at position 2")
    twice = steps(0, 0, 1, 6)
    twice.lines.append(twice.lines[2])
    assert "rank 0 used position 8 twice in one start" in judged(twice, whole[1])
    assert "4 samples too many, the first at position 24" in judged(steps(0, 0, 1, 7), steps(1, 0, 1, 7))
    other = steps(0, 0, 1, 6)
    other.lines[0] = (0.0, [0, 1], [ORDER[1], ORDER[0]])
    assert judged(other, whole[1]) == ["2 samples other than the order has, the first at position 0"]


def test_a_run_that_ended_otherwise_is_wrong() -> None:
    calm: Any = SimpleNamespace(weights={"w": torch.ones(2)}, curve=[(1, 0.5)], problems=[])
    good, bad = Kill("worker", signal.SIGKILL, 0.5, 0, False), Kill("worker", signal.SIGKILL, 0.5, 0, False)
    bad.committed, bad.resumed_from = 20, 10
    assert unlike(calm, calm, [good]) == []
    other: Any = SimpleNamespace(weights={"w": torch.zeros(2)}, curve=[(1, 0.6)], problems=["lost"])
    found = unlike(other, calm, [good, bad])
    assert len(found) == 4 and "SIGKILL of rank 0 after 0.50 s: went on before step 20" in found[-1]
    rows = [{"layout": "ddp", "victim": "worker", "run": "1", "problems": found, "seconds": s} for s in (1.0, 3.0)]
    assert list(summary(rows)[0].values()) == ["ddp", "worker", "2", "1", "2.00", "3.00"]
