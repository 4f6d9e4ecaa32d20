"""Plans: every layout, its memory by the strategies' own cost functions, why and why not, and what bad input gets."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from app.cli.plan import command
from app.config_io import load_config
from app.errors import UserError
from app.planner import calibration, published
from app.planner.collectives import gather_seconds, links, reduce_seconds
from app.planner.evaluate import Machine, Settings, evaluate
from app.planner.plan import make_plan
from app.planner.prediction import choose_layout, predict, row_of
from app.planner.rates import Rates, rates
from app.planner.read import Reader
from app.planner.show import cells
from app.planner.stages import cut, in_flight, waits
from app.planner.table import SCHEDULES, Held, enumerate_layouts
from app.planner.verdicts import dims_text, families
from app.planner.where import machine_of
from app.planner.why import advice
from app.tasks import load_task
from cluster import hardware
from cluster.shape import of_gpus
from strategies import estimate
from strategies.costs import ModelSize
from strategies.layout import choose
from strategies.pipeline.schedules import SCHEDULES as REAL
from strategies.pipeline.schedules import make
from strategies.pipeline.simulate import Times, alive_by_formula, bubble_by_formula
from tests.running import ROOT

pytestmark = pytest.mark.alone

EXPERIMENT = str(ROOT / "experiments" / "gpt.yaml")
LARGE = ["task_args.d_model=4096", "task_args.n_layers=16", "task_args.n_heads=32", "task_args.sequence_length=1024"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "folder", lambda: tmp_path / "planner")


@pytest.fixture(scope="module")
def small() -> Reader:
    config = load_config([EXPERIMENT])
    return Reader(load_task(config.task, config.task_args))


@pytest.fixture(scope="module")
def large() -> Reader:
    config = load_config([EXPERIMENT], LARGE)
    return Reader(load_task(config.task, config.task_args))


def _plan(reader: Reader, machine: Machine, *overrides: str, given: tuple[str, ...] = ()) -> Any:
    config = load_config([EXPERIMENT], overrides)
    return make_plan(config, reader.task, machine, given=frozenset(given), reader=reader)


def _machine(gpus: int = 8, gpu: str = "h100-80gb", across: str = "3200Gb") -> Machine:
    return machine_of(of_gpus(gpus, gpu, min(gpus, 8), across), gpus)


# --- hardware ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("A100-40G", "a100-40gb"),
        ("a100_40gb", "a100-40gb"),
        ("2080ti", "rtx-2080-ti"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_a_gpu_is_known_by_its_names(written: str, name: str) -> None:
    assert hardware.gpu(written).name == name


def test_every_entry_of_the_catalogue_is_whole() -> None:
    for gpu in hardware.all_gpus().values():
        assert gpu.memory_bytes > 2**30 and gpu.memory_bandwidth > 1e9 and gpu.link_within > 1e9 and gpu.source
        assert all(rate > 1e10 for rate in gpu.peak.values())
    for offer in hardware.all_instances().values():
        assert offer.gpu in hardware.all_gpus() and offer.price_per_hour > 0.1 and offer.date and offer.source


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(hardware.HardwareError, match=r"'h1000'.*did you mean h100-80gb.*hardware\.yaml"):
        hardware.gpu("h1000")


# --- formulas ---------------------------------------------------------------------------------------------------


def test_a_collective_waits_for_the_slowest_link() -> None:
    device = rates("h100-80gb")
    link = links(device, 400e9, 8)
    one, eight, sixteen = np.array([1]), np.array([8]), np.array([16])
    size = np.array([1e9])
    within = gather_seconds(size, eight, one, link)
    assert within == pytest.approx(1e9 * 7 / 8 / (450e9 * device.within), rel=0.02)
    assert gather_seconds(size, sixteen, one, link) > within
    # eight groups of two nodes share each node's link: eight times the bytes
    assert gather_seconds(size, np.array([2]), eight, link) == pytest.approx(
        8e9 / 2 / (400e9 * device.across), rel=0.02
    )
    assert reduce_seconds(size, eight, one, link) == pytest.approx(2 * within, rel=0.02)
    assert gather_seconds(size, one, one, link) == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipelines_hold_and_wait_as_their_schedules_say(name: str) -> None:
    stages, micro, chunks = 4, 16, 2 if name in ("interleaved_1f1b", "zbv") else 1
    made = make(name, stages, micro, chunks)
    for stage in range(stages):
        found = in_flight(name, np.array(stage), np.array(stages), np.array(micro), np.array(chunks))
        assert float(found) == pytest.approx(alive_by_formula(made, stage) / chunks)
    times = Times(1 / 3, 1 / 3, 1 / 3)
    if chunks == 2:
        times = Times(1 / 6, 1 / 6, 1 / 6)
    expected = bubble_by_formula(name, stages, micro, chunks, times)
    assert float(waits(name, np.array(stages), np.array(chunks))) == pytest.approx(_waited(expected, micro), rel=0.05)
    assert set(SCHEDULES) == set(REAL)


def _waited(bubble: float, micro: int) -> float:
    """Micro-batch times waited for, from the share of the step that is waiting."""
    return bubble * micro / (1 - bubble) if bubble < 1 else bubble


def test_stages_are_cut_by_cost_not_by_number() -> None:
    assert cut(np.array([1.0, 1, 1, 1]), 2) == [2, 2]
    assert cut(np.array([1.0, 1, 1, 3]), 2) == [3, 1]
    assert cut(np.array([4.0, 1, 1, 1, 1]), 2) == [1, 4]
    assert cut(np.array([1.0, 1, 1]), 3) == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "workers", "degrees"),
    [
        ("ddp", 4, {}),
        ("fsdp", 4, {}),
        ("zero1", 4, {}),
        ("zero2", 4, {}),
        ("hsdp", 4, {"dp_shard": 2}),
        ("fsdp+tensor", 4, {"dp_shard": 2, "tp": 2}),
        ("tensor", 2, {}),
    ],
)
def test_static_memory_is_that_of_the_rows_own_cost_function(
    small: Reader, name: str, workers: int, degrees: dict[str, int]
) -> None:
    layout = choose(name, workers, **degrees)
    config = load_config([EXPERIMENT], ["train.micro_batch_size=2"])
    found = predict(config, small.task, layout, _machine(workers), small)
    size = ModelSize(small.model.size.parameters, small.model.size.buffer_bytes)
    exact = estimate.cost(layout, size)
    for part in ("parameters", "gradients", "optimizer"):
        assert found.memory[part] == getattr(exact, part), part


# --- enumeration ------------------------------------------------------------------------------------------------


def test_every_layout_multiplies_to_the_workers_and_is_there_once() -> None:
    table = enumerate_layouts(
        64, 256, Held(), precisions=("bf16",), blocks=8, splits=True, heads=8, per_node=8, sequence=128
    )
    assert (table.dp_replicate * table.dp_shard * table.tp * table.pp == 64).all()
    assert (table.micro_batch * table.micro_batches * table.dp == 256).all()
    assert table.tp.max() == 8 and table.pp.max() == 8
    columns = [getattr(table, field.name) for field in dataclasses.fields(table)]
    assert len(np.unique(np.stack(columns), axis=1).T) == len(table) > 1000
    names = {table.name(row) for row in range(len(table))}
    assert {"ddp", "fsdp", "hsdp", "zero1", "zero2", "fsdp+tensor", "hsdp+tensor+pipeline"} <= names


def test_sixteen_thousand_gpus_are_planned_in_two_seconds(large: Reader) -> None:
    plan = _plan(large, _machine(16384), "train.global_batch_size=16384", "train.precision=bf16")
    begun = time.process_time()
    plan = _plan(large, _machine(16384), "train.global_batch_size=16384", "train.precision=bf16")
    assert len(plan.table) > 5000 and time.process_time() - begun < 2.0
    assert plan.best() is not None


@pytest.mark.parametrize(
    ("key", "value", "column"),
    [
        ("parallel.dp_shard", 4, "dp_shard"),
        ("parallel.tp", 2, "tp"),
        ("train.micro_batch_size", 2, "micro_batch"),
    ],
)
def test_a_key_that_is_given_is_held(small: Reader, key: str, value: int, column: str) -> None:
    plan = _plan(small, _machine(), f"{key}={value}", given=(key,))
    assert len(plan.table) and set(getattr(plan.table, column)) == {value}


def test_more_work_takes_longer_and_more_memory(large: Reader) -> None:
    def of(*overrides: str) -> Any:
        config = load_config([EXPERIMENT], ["train.global_batch_size=64", "train.precision=bf16", *overrides])
        return predict(config, large.task, choose("fsdp", 8), _machine(), large)

    plain, full = of("train.micro_batch_size=8"), of("train.micro_batch_size=8", "train.activation_checkpointing=full")
    assert full.memory["activations"] < 0.5 * plain.memory["activations"]
    assert 1.1 < full.seconds["compute"] / plain.seconds["compute"] < 1.4
    small = of("train.micro_batch_size=1")
    assert small.memory["activations"] < plain.memory["activations"] / 4 and small.step_seconds > plain.step_seconds
    slow = predict(
        load_config([EXPERIMENT], ["train.global_batch_size=64", "train.precision=bf16"]),
        large.task,
        choose("fsdp", 16),
        _machine(16, across="10Gb"),
        large,
    )
    assert slow.seconds["shard"] > 10 * plain.seconds["shard"]


def _seconds(reader: Reader, name: str, *overrides: str, **degrees: int) -> Any:
    config = load_config([EXPERIMENT], ["train.global_batch_size=64", "train.precision=bf16", *overrides])
    return predict(config, reader.task, choose(name, 8, **degrees), _machine(), reader)


def test_recomputing_sends_again_what_is_not_kept(large: Reader) -> None:
    tensor = {
        mode: _seconds(large, "tensor", f"train.activation_checkpointing={mode}", "train.micro_batch_size=8").seconds
        for mode in ("none", "selective", "full")
    }
    assert tensor["selective"]["tensor"] == pytest.approx(tensor["none"]["tensor"])
    assert tensor["full"]["tensor"] == pytest.approx(1.5 * tensor["none"]["tensor"], rel=0.01)


def test_some_blocks_recomputed_lie_between_all_and_none(large: Reader) -> None:
    none, second, full = (
        _seconds(large, "fsdp", f"train.activation_checkpointing={mode}", "train.micro_batch_size=8")
        for mode in ("none", "every_2", "full")
    )
    middle = (none.seconds["compute"] + full.seconds["compute"]) / 2
    assert second.seconds["compute"] == pytest.approx(middle, rel=0.01)
    assert full.memory["activations"] < second.memory["activations"] < none.memory["activations"]


def test_compiled_blocks_move_fewer_bytes(large: Reader) -> None:
    plain, compiled = (_seconds(large, "fsdp", f"train.compile={value}") for value in ("false", "true"))
    assert 0.7 < compiled.seconds["compute"] / plain.seconds["compute"] < 0.97


def test_exposed_communication_is_told_by_collective_and_link(large: Reader) -> None:
    plan = _plan(large, _machine(16, across="100Gb"), "train.precision=bf16", "train.global_batch_size=64")
    told = np.sum(list(plan.costs.communication.values()), axis=0)
    parts = plan.costs.seconds["tensor"] + plan.costs.seconds["shard"] + plan.costs.seconds["replicate"]
    one = plan.table.pp == 1
    assert told[one] == pytest.approx(parts[one])
    layout = plan.layout(int(np.flatnonzero(plan.table.dp_shard == 16)[0]))
    assert layout["communication"]["reduce_scatter.across"] > layout["communication"]["reduce_scatter.within"] == 0


# --- words ------------------------------------------------------------------------------------------------------


def test_families_say_why_with_figures(large: Reader) -> None:
    plan = _plan(large, _machine(gpu="a100-40gb"), "train.precision=bf16", "train.global_batch_size=64")
    said = {verdict.family: verdict for verdict in families(plan)}
    assert not said["ddp"].fits and "GiB per GPU at least, 39 there" in said["ddp"].sentence
    assert "smallest that fits" in said["ddp"].sentence
    assert sum("the best" in verdict.sentence and verdict.fits for verdict in said.values()) >= 1
    words = " ".join(advice(plan))
    assert "One GPU does not hold it" in words and "Use " in words and "ddp would fit" in words


def test_a_model_that_fits_one_gpu_is_told_to_stay(small: Reader) -> None:
    words = " ".join(advice(_plan(small, _machine(1))))
    assert "fits one GPU" in words and "until time matters" in words


def test_a_model_that_fits_nowhere_is_told_what_would_do(large: Reader) -> None:
    plan = _plan(large, _machine(1, "rtx-3060"), "train.precision=bf16", "train.global_batch_size=8")
    assert plan.best() is None
    words = " ".join(advice(plan))
    assert "No layout fits" in words and "smallest cluster of the catalogue" in words and "$" in words
    assert "To make it fit here: " in words and "× rtx-3060 would hold it" in words
    plan = _plan(
        large, _machine(8, "rtx-3060"), "strategy=ddp", "train.precision=bf16", "train.global_batch_size=8",
        given=("strategy",),
    )  # fmt: skip
    words = " ".join(advice(plan))
    assert "To make it fit here: " in words and "s per step" in words and "smallest cluster" in words


def test_a_small_model_on_one_machine_is_told_ddp(small: Reader) -> None:
    plan = _plan(small, _machine(8, "t4"), "train.precision=fp16", given=("train.precision",))
    assert plan.table.name(plan.best()) == "ddp"
    words = " ".join(advice(plan))
    assert "Use ddp today" in words and "Several GPUs in one machine → ddp" in words and "none to cross" in words


def test_advice_names_both_links(large: Reader) -> None:
    plan = _plan(large, _machine(64, across="100Gb"), "train.precision=bf16", "train.global_batch_size=64")
    words = " ".join(advice(plan))
    assert "450 GB/s" in words and "1.6 GB/s" in words and "→ tensor" in words and "→ pipeline" in words


def test_what_is_left_out_says_by_which_key(small: Reader) -> None:
    plan = _plan(small, _machine(), "strategy=fsdp", given=("strategy",))
    said = {verdict.family: verdict.sentence for verdict in families(plan)}
    assert all("strategy=fsdp is held" in said[name] for name in ("ddp", "zero1", "hsdp", "tensor", "pipeline"))
    plan = _plan(small, _machine(), "parallel.tp=2", given=("parallel.tp",))
    assert "parallel.tp=2 is held" in {v.family: v.sentence for v in families(plan)}["ddp"]


def test_memory_is_ranked_in_memorys_words(large: Reader) -> None:
    config = load_config([EXPERIMENT], ["train.precision=bf16", "train.global_batch_size=64"])
    plan = make_plan(config, large.task, _machine(), rank="memory", reader=large)
    said = {verdict.family: verdict.sentence for verdict in families(plan)}
    assert "the best's memory" in said["zero1"]
    plan = make_plan(config, large.task, _machine(), rank="cost", reader=large)
    assert "all of them are paid for" in " ".join(advice(plan)) and "the cheapest is" in " ".join(advice(plan))


def test_what_is_held_and_changed_is_said(small: Reader) -> None:
    plan = _plan(small, _machine(), "train.micro_batch_size=16", given=("train.micro_batch_size",))
    assert "train.micro_batch_size is 16, more than a worker's share" in plan.notes[0]
    plan = _plan(small, _machine(), "train.compile=true", given=("train.compile",))
    assert "train.compile is counted" in plan.notes[0]
    plan = _plan(small, _machine(), "parallel.offload=true", given=("parallel.offload",))
    row = int(plan.order[0])
    assert "state in host memory" in dims_text(plan, row) and "offload" in cells(plan.layout(row))[1]


def test_recomputation_is_regretted_only_where_memory_asks_for_it(large: Reader) -> None:
    mode = "train.activation_checkpointing"
    plan = _plan(large, _machine(), f"{mode}=full", "train.precision=bf16", given=(mode,))
    assert "nothing would be recomputed" not in " ".join(advice(plan))


# --- command line -----------------------------------------------------------------------------------------------


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(command, [EXPERIMENT, *arguments])


def test_json_has_the_layouts_best_first(tmp_path: Path) -> None:
    written = tmp_path / "best.yaml"
    result = _run("--gpus", "8", "--gpu", "h100-80gb", "--json", "train.precision=bf16", "--write", str(written))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[0])
    layouts = found["layouts"]
    assert layouts and found["count"] >= len(layouts)
    for layout in layouts:
        degrees = layout["parallel"]
        assert degrees["dp_replicate"] * degrees["dp_shard"] * degrees["tp"] * degrees["pp"] == 8
        assert layout["memory_bytes"] == pytest.approx(sum(layout["memory"].values()), abs=20)
        assert layout["step_seconds"] == pytest.approx(sum(layout["seconds"].values()))
        assert layout["tokens_per_second"] > 0 and layout["precision"] == "bf16" and 0 < layout["mfu"] < 1
        assert layout["fits"] and layout["why_not"] is None
    times = [layout["step_seconds"] for layout in layouts]
    assert times[0] <= 1.03 * min(times) and all(b >= 0.998 * a for a, b in itertools.pairwise(times[1:]))
    config = load_config([written])
    best = layouts[0]
    assert (config.strategy, config.train.micro_batch_size) == (best["strategy"], best["micro_batch_size"])
    assert config.parallel.dp_shard == best["parallel"]["dp_shard"] and config.workers == "8"


def test_one_layout_can_be_asked_about() -> None:
    result = _run(
        "--gpus", "8", "--gpu", "t4", "--json", *LARGE, "strategy=ddp", "train.micro_batch_size=1",
        "train.activation_checkpointing=none", "train.precision=fp32", "train.global_batch_size=8",
    )  # fmt: skip
    layouts = json.loads(result.stdout.splitlines()[0])["layouts"]
    assert len(layouts) == 1 and not layouts[0]["fits"] and "13.9 there" in layouts[0]["why_not"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "8", "--gpu", "h1000"], "did you mean h100-80gb"),
        (["--gpus", "0", "--gpu", "t4"], "at least 1"),
        (["--gpus", "8", "--gpu", "t4", "--interconnect", "fast"], "cannot be read"),
        (["--gpus", "8", "--gpu", "t4", "parallel.dp_shard=3"], "8 workers"),
        (["--gpus", "8", "--gpu", "t4", "parallel.tp=8"], "does not divide"),
        (["--gpus", "8", "--gpu", "t4", "strategy=fdsp"], "did you mean fsdp"),
        (["--gpus", "8", "--gpu", "t4", "train.activation_checkpointing=fulll"], "is 'fulll'"),
        (["--gpus", "8", "--gpu", "t4", "parallel.stages=[1,4]"], "adds up to 5 blocks"),
        (["--gpus", "8", "--gpu", "t4", "parallel.pp=4", "parallel.stages=[1,3]"], "names 2 parts"),
        (["--gpus", "1", "--gpu", "t4", "parallel.offload=true"], "parallel.offload needs sharded parameters"),
        (["--gpus", "8", "--gpu", "t4", "--rank-by", "beauty"], "time, cost, memory"),
        (["--published", "nowhere.csv"], "cannot be read"),
        (["--cluster", "laptop"], "no GPUs"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], said: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2 and said in result.output
    assert len(result.output.strip().splitlines()) == 1 and "Traceback" not in result.output


# --- auto, history, published -----------------------------------------------------------------------------------


def test_auto_takes_the_simplest_of_the_fast_ones(small: Reader, large: Reader) -> None:
    config = load_config([EXPERIMENT], ["strategy=auto", "train.global_batch_size=32"])
    assert choose_layout(config, small.task, 8, _machine()).layout.name == "ddp"
    config = load_config([EXPERIMENT], ["strategy=auto", "train.global_batch_size=32", "train.precision=bf16"])
    found = choose_layout(config, large.task, 8, _machine(gpu="a100-40gb"))
    assert found.layout.parts[0] in ("fsdp", "hsdp", "zero1", "zero2") and found.layout.dims.world_size == 8
    assert "predicted" in found.sentence
    kept = load_config([EXPERIMENT], ["strategy=auto", "parallel.tp=2"])
    assert choose_layout(kept, small.task, 4, _machine(4)).layout.dims.tp == 2


def test_auto_without_a_plan_is_what_it_was(small: Reader) -> None:
    config = load_config([EXPERIMENT], ["strategy=auto", "train.global_batch_size=32"])
    found = choose_layout(config, small.task, 4, ["no such gpu"])
    assert found.layout.name == "ddp" and "unplanned" in found.sentence


def test_history_corrects_the_next_prediction(small: Reader) -> None:
    config = load_config([EXPERIMENT])
    layout = choose("ddp", 2)
    before = predict(config, small.task, layout, _machine(2), small)
    from app.planner.record import entry, history_text

    for _ in range(3):
        calibration.note(entry(config, layout, "h100-80gb", before, 2 * before.step_seconds, before.memory_bytes))
    after = predict(config, small.task, layout, _machine(2), small)
    assert after.correction == pytest.approx(2.0) and after.seconds["compute"] == pytest.approx(
        2 * before.seconds["compute"]
    )
    assert "3 runs" in history_text()


def test_measured_rates_go_before_the_catalogue() -> None:
    calibration.remember("a100-80gb", {"matmul": {"bf16": 0.5}, "link_within": 1e9, "measured": True})
    machine = _machine(gpu="a100-80gb")
    assert machine.device.measured and machine.device.matmul["bf16"] == 0.5
    assert machine.device.gpu.link_within == 1e9


HEADER = (
    "model,d_model,n_layers,n_heads,vocab_size,seq_len,gpus,gpu,mfu_percent,hfu_percent,micro_batch_size,grad_accum,"
    "global_batch_size,tokens_per_s_per_gpu,precision,sharding,activation_checkpointing,parameters,section"
)


def test_a_table_of_published_runs_is_held_against(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        f"{HEADER}\nx,1024,6,16,1000,512,8,a100_80gb,1,1,8,2,128,50000,bf16,FULL_SHARD,True,77000000,made up\n"
    )
    (found,) = published.compare(published.rows_of(table))
    assert found.fits and 1e5 < found.tokens_per_second < 1e8
    assert published.model_of(1024, 6, 16, 1000, 512).parameters == pytest.approx(77.1e6, rel=0.01)
    table.write_text("model,what\nx,1\n")
    with pytest.raises(UserError, match="not a table of published runs"):
        published.rows_of(table)


def test_evaluation_is_by_row(small: Reader) -> None:
    """What a row costs does not depend on what else is in the table."""
    machine = _machine()
    plan = _plan(small, machine, "train.precision=bf16", given=("train.precision",))
    for row in plan.order[:: max(1, len(plan.order) // 12)]:
        alone = plan.table.where(np.arange(len(plan.table)) == row)
        found = evaluate(small.read, alone, machine, plan.settings)
        assert float(found.bytes[0]) == pytest.approx(float(plan.costs.bytes[row]))
        if plan.table.pp[row] == 1:  # where stages are cut looks at the middle of the micro-batches
            assert float(found.step[0]) == pytest.approx(float(plan.costs.step[row]))


def test_row_of_is_the_layout(small: Reader) -> None:
    config = load_config([EXPERIMENT], ["train.global_batch_size=32", "train.micro_batch_size=2"])
    table = row_of(config, choose("hsdp", 8, dp_shard=4))
    assert table.name(0) == "hsdp" and int(table.micro_batches[0]) == 2
    assert isinstance(rates("cpu"), Rates) and isinstance(Settings(), Settings)
