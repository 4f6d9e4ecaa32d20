"""The harness (who runs when, what a ratio and its interval are), every benchmark once in its smallest form; and chaos
judges rightly."""

import functools
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from app.config.io import load_config
from app.data.order import Order
from app.models.gpt import GPT
from app.planner.ranges import Traits, spread_of
from app.tasks.huggingface.model import find_model, library, resolve_config
from cluster.hardware import find_gpu
from experiments.benchmarks import evidence, fit, harness, laws, plain, published, published_runs
from experiments.benchmarks.chaos import Kill, summary, unlike
from experiments.benchmarks.chaos_task import Start, lost_or_repeated
from experiments.benchmarks.compared import Compared, Prepared, prepare
from experiments.benchmarks.published_runs import Run
from tests.pool import run_distributed
from tests.running import ROOT, environment


def test_a_ratio_is_that_of_neighbouring_blocks_whatever_the_machine_does_meanwhile() -> None:
    speed = [1.0, 1.0, 3.0, 3.0, 9.0, 9.0, 2.0, 2.0]
    sides = harness.compare_times({"A": speed, "B": [1.1 * each for each in speed]}, "A")
    assert sides["B"]["ratio"] == pytest.approx(1.1) and sides["B"]["interval"] == pytest.approx((1.1, 1.1))
    assert sides["A"]["ratio"] == 1.0 and sides["A"]["ms"] == 2500.0
    low, high = harness.interval([1.0] * 40, [1.0, 1.0, 1.4, 1.4] * 10)
    assert low == pytest.approx(1.0) and high == pytest.approx(1.4), "half of the blocks say this, half that"


COLUMNS = "d_model,n_layers,n_heads,vocab_size,seq_len,gpus,micro_batch_size,grad_accum,model,gpu,precision"
COLUMNS += ",sharding,activation_checkpointing,tokens_per_s_per_gpu"


def test_a_table_of_published_runs_is_compared(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    rows = ["1024,6,16,1000,512,8,8,2,x,a100_80gb,bf16,FULL_SHARD,True,50000"]
    rows += ["1024,6,16,1000,512,8,8,2,y,b17_80gb,bf16,FULL_SHARD,True,50000"]
    table.write_text("\n".join([COLUMNS, *rows]))
    answer = json.loads(CliRunner().invoke(published.main, [str(table), "--json"]).stdout)
    found = answer["found"]
    lines = {(row["by"], row["group"]): row for row in found["table"]}
    assert found["rows"] == 2 and found["refused"] == 1 and found["not_fitting"] == 0 and 0 < found["median_error"] < 10
    assert lines["all", "all"]["speeds"] == "1" and lines["GPU", "b17-80gb"]["refused"] == "1"
    assert lines["kind", "data parallel"]["rows"] == "2" and lines["sequence", "up to 2 k"]["rows"] == "2"


@pytest.mark.parametrize("place", range(0, 431, 43))
def test_a_row_is_planned_by_words_that_a_person_could_write(place: int) -> None:
    """The command's own parser takes them, and what is planned is the row's layout."""
    run = published.runs()[place]
    words, options = run.command()
    config = load_config([], words)
    assert config.train.global_batch_size == run.global_batch and config.parallel.tp == run.tp
    degrees = [getattr(config.parallel, name) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp")]
    assert math.prod(degrees) == run.gpus == options["gpus"]
    assert run.gpu in ("h100", "a100") or find_gpu(run.gpu)


@functools.cache
def _small(layout: str = "data", gpus: int = 8) -> Prepared:
    """A run of a small model that nobody has published."""
    split: dict[str, Any] = {"tp": 2} if layout == "tp" else {}
    sizes: dict[str, Any] = {
        "d_model": 1024,
        "n_layers": 2,
        "n_heads": 8,
        "n_kv_heads": 8,
        "d_hidden": 4096,
        "vocab_size": 1000,
    }
    run = Run("x", "small", **sizes, sequence=2048, gpu="h100-80gb", gpus=gpus, data="fsdp", **split)
    return prepare(replace(run, micro_batch=16, global_batch=16 * gpus, step_seconds=1.0))


def test_what_a_plan_ranks_first_is_held_beside_what_ran_and_what_ran_out_of_memory_counts() -> None:
    one = _small().compare()
    assert one.plan is not None
    same = replace(one.run, step_seconds=1.0, kernels="x")
    slow, fast = (replace(one.plan, seconds={"compute": seconds}) for seconds in (2.0, 1.0))
    members = [Compared(replace(same, micro_batch=i), slow) for i in (1, 2)]
    for ran_out, step, word in ((0, 1.0, "+0.0 %"), (0, 1.5, "+50.0 %"), (1, 0.0, "ran out of memory")):
        chosen = Compared(replace(same, micro_batch=4, ran_out=ran_out, step_seconds=step), fast)
        (row,) = evidence.among_published([*members, chosen])
        assert row["chosen takes"].startswith(word) and row["layouts"] == "3"
    assert not evidence.among_published(members), "of two layouts there is not much to choose"


def test_every_row_has_an_address_and_is_put_into_a_part_by_its_settings_and_not_by_what_it_reached() -> None:
    table = published.runs()
    assert len(table) == 431 and all(run.source.startswith("https://") for run in table)
    for name in ("published", "llm-foundry", "beyond"):
        parts = [run.part for run in table if run.table == name]
        assert set(parts) == {"fit", "choose", "held out"}
        assert 0.35 < parts.count("fit") / len(parts) < 0.75
    others: dict[str, Any] = {"step_seconds": 3.0, "memory_gib": 3.0, "described": (("flash", 3.0),)}
    assert all(replace(run, **others).part == run.part for run in table)
    ran_out = [run for run in table if run.ran_out]
    assert len(ran_out) == 28 and not any(run.step_seconds for run in ran_out)


@pytest.mark.parametrize("name", sorted(published_runs._models()))
def test_models_have_the_number_of_parameters_that_was_published(name: str) -> None:
    known = published_runs._models()[name]
    config = resolve_config(find_model(known["model"], weights=False), {}, known["config"])
    with torch.device("meta"):
        kinds = {"t5": "AutoModelForSeq2SeqLM"}
        model = getattr(library(), kinds.get(known["model"], "AutoModelForCausalLM")).from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(known["billions"], rel=0.03)


def test_constants_that_are_tried_are_planned_with() -> None:
    slower, faster = (_small().compare(fit.changed({**fit.START, "hopper.bf16": rate})).plan for rate in (0.3, 0.8))
    assert slower is not None and faster is not None and slower.step_seconds > faster.step_seconds
    described = replace(_small(), run=replace(_small().run, described=(("flash", 0.1),))).compare(described=True).plan
    usual = _small().compare().plan
    assert described is not None and usual is not None and described.step_seconds > usual.step_seconds
    assert set(fit.known_values()) == set(fit.CONSTANTS), "the file has every constant"
    for name, value in fit.known_values().items():
        assert fit.CONSTANTS[name].low * 0.99 <= value <= fit.CONSTANTS[name].high * 1.01, name


def test_the_fit_finds_what_made_the_figures_and_one_without_a_source_is_that_of_the_others() -> None:
    names, draw = sorted(fit.CONSTANTS), np.random.default_rng(1)
    slopes = draw.normal(size=(60, len(names)))
    centre = np.log([fit.CONSTANTS[name].start for name in names])
    moved = centre + 0.1 * draw.normal(size=len(names)).clip(-1, 1)

    def seconds(values: fit.Values) -> list[float]:
        return list(np.exp(slopes @ (np.log([values[name] for name in names]) - centre)))

    truth = dict(zip(names, np.exp(moved)))
    values = fit.fit(seconds, seconds(truth))
    assert all(values[name] == pytest.approx(truth[name], rel=0.05) for name in names)
    known = fit.with_slopes(seconds, [*seconds(truth)[:50], *(5 * s for s in seconds(truth)[50:])], values)
    again = fit.without(known, np.arange(50), np.ones(50))
    assert all(again[name] == pytest.approx(truth[name], rel=0.05) for name in names)
    between = fit.intervals(known, [str(i % 5) for i in range(60)], np.ones(60), draws=20)
    assert all(low <= high for low, high in between.values())


def test_ranges_hold_what_they_were_made_of() -> None:
    traits = Traits("tp", "dense", "hopper", 7.0, 4096)
    errors = [(traits, error / 100) for error in range(-20, 21)]
    tight = [(traits._replace(layout="pp"), error / 1000) for error in range(-9, 10)]
    few = [(traits._replace(layout="cp"), 0.5)] * 3
    found = fit.ranges([*errors, *tight, *few])
    low, high = found["layouts"]["tp"]
    assert 0.80 <= sum(low <= 1 / (1 + e) <= high for _, e in errors) / len(errors) <= 0.93
    assert found["layouts"]["pp"][0] > low and "cp" not in found["layouts"]
    assert found["wider"] == 0 and set(found["seen"]["layouts"]) == {"tp", "pp", "cp"}
    strange = [(traits._replace(model="mixture"), error) for error in (-0.4, -0.5, -0.3, -0.45, -0.5)]
    wider = fit.ranges([*errors, *strange])
    spreads = [spread_of(one, wider) for one, _ in strange]
    assert sum(s.low <= 1 / (1 + e) <= s.high for s, (_, e) in zip(spreads, strange)) >= 4
    assert all(s.unmeasured == ("a mixture of experts",) for s in spreads)


def test_laws_are_judged_beyond_the_two_smallest_numbers() -> None:
    run = _small().run
    runs = [replace(run, gpus=8 * 2**i, global_batch=128 * 2**i, step_seconds=1 + 0.02 * i) for i in range(4)]
    found = laws.series(runs)
    assert {group: [len(own) for own in members] for group, members in found.items()} == {"weak, data parallel": [4]}
    assert not laws.series(runs[:2]) and not laws.series([*runs[:3], runs[2]])
    judged = laws.judge("weak", [Compared(run, None) for run in runs])
    errors = {(one.law, one.doublings): one.error for one in judged}
    assert [errors["logarithm", ahead] for ahead in (1.0, 2.0)] == pytest.approx([0, 0], abs=1e-9)
    assert errors["universal", 2.0] < -0.03, "which takes a hop of a ring for contention"
    strong = [replace(run, global_batch=1024) for run in runs]
    assert list(laws.series(strong)) == ["strong, data parallel"]


def _by_hand(rank: int, wrap: str) -> float:
    training = plain.gpt(3, wrap)
    training.advance()
    index = next(training.indices)
    return training.forward_backward(training.inputs[index], training.targets[index]).item()


@pytest.mark.alone
@pytest.mark.slow
def test_what_is_written_by_hand_for_a_divided_sequence_is_the_same_training() -> None:
    halves = run_distributed(_by_hand, 2, "context")
    assert sum(halves) / 2 == pytest.approx(run_distributed(_by_hand, 1, "single")[0], rel=1e-5)


def test_the_stages_written_by_hand_are_together_the_model() -> None:
    model = GPT(32, d_model=16, n_layers=4, n_heads=2)
    tokens = torch.arange(12).view(2, 6)
    x = tokens
    for part in range(4):
        x = plain.GptStage(model, part=part, parts=4)(x)
    assert torch.equal(x, model(tokens))


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
