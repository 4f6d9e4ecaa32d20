"""Benchmarks: the harness with its ratios and intervals, and each benchmark in its smallest form.

Also: chaos judges a disturbed run correctly.
"""

import functools
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
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
from app.errors import EXIT_REFUSED, UserError
from app.models.gpt import GPT
from app.planner.machine import MachineOptions, find_machine
from app.planner.plan import GIB
from app.planner.ranges import Traits, spread_of
from app.planner.read import Reader
from app.planner.stand_in import plan_experiment
from app.tasks.huggingface.model import find_model, library, resolve_config
from cluster.hardware import find_gpu
from experiments.benchmarks import __main__ as benchmarks
from experiments.benchmarks import (
    compared,
    evidence,
    fit,
    harness,
    laws,
    plain,
    published,
    published_runs,
)
from experiments.benchmarks.chaos import Kill, summary, unlike
from experiments.benchmarks.chaos_task import Start, lost_or_repeated
from experiments.benchmarks.compared import Compared, Prepared, prepare
from experiments.benchmarks.published_runs import Run
from strategies.dims import DEGREES, ParallelDims
from tests.pool import run_distributed
from tests.running import ROOT, environment


def test_a_ratio_compares_neighbouring_blocks_also_on_a_changing_machine() -> None:
    speed = [1.0, 1.0, 3.0, 3.0, 9.0, 9.0, 2.0, 2.0]
    sides = harness.compare_times({"A": speed, "B": [1.1 * value for value in speed]}, "A")
    assert sides["B"]["ratio"] == pytest.approx(1.1)
    assert sides["B"]["interval"] == pytest.approx((1.1, 1.1))
    assert sides["A"]["ratio"] == 1.0 and sides["A"]["ms"] == 2500.0
    low, high = harness.interval([1.0] * 40, [1.0, 1.0, 1.4, 1.4] * 10)
    assert low == pytest.approx(1.0)
    assert high == pytest.approx(1.4), "half of the blocks have this ratio"


COLUMNS = "d_model,n_layers,n_heads,vocab_size,seq_len,gpus,micro_batch_size,grad_accum,model"
COLUMNS += ",gpu,precision,sharding,activation_checkpointing,tokens_per_s_per_gpu"


def test_a_table_of_published_runs_is_compared(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    rows = ["1024,6,16,1000,512,8,8,2,x,a100_80gb,bf16,FULL_SHARD,True,50000"]
    rows += ["1024,6,16,1000,512,8,8,2,y,b17_80gb,bf16,FULL_SHARD,True,50000"]
    table.write_text("\n".join([COLUMNS, *rows]))
    answer = json.loads(CliRunner().invoke(published.main, [str(table), "--json"]).stdout)
    figures = answer["found"]
    lines = {(row["by"], row["group"]): row for row in figures["table"]}
    assert figures["rows"] == 2
    assert figures["refused"] == 1
    assert figures["not_fitting"] == 0
    assert 0 < figures["median_error"] < 10
    assert lines["all", "all"]["speeds"] == "1" and lines["GPU", "b17-80gb"]["refused"] == "1"
    assert lines["kind", "data parallel"]["rows"] == "2"
    assert lines["sequence", "up to 2 k"]["rows"] == "2"
    assert lines[
        "source", "github.com/mosaicml/llm-foundry/blob/061f2c7/scripts/train/benchmarking"
    ]


@pytest.mark.parametrize(
    "row_number",
    [pytest.param(row, marks=[pytest.mark.slow] * (row != 0)) for row in range(0, 431, 43)],
)
def test_a_published_run_is_planned_by_arguments_that_a_user_could_write(row_number: int) -> None:
    """The command's parser takes them, and the plan has the run's layout."""
    run = published.runs()[row_number]
    arguments, options = run.command()
    config = load_config([], arguments)
    assert config.train.global_batch_size == run.global_batch and config.parallel.tp == run.tp
    names = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    degrees = [getattr(config.parallel, name) for name in names]
    assert math.prod(degrees) == run.gpus == options["gpus"]
    assert run.gpu in ("h100", "a100") or find_gpu(run.gpu)


@pytest.mark.parametrize(
    ("table", "rows", "with_speed", "ran_out", "others"),
    [
        ("fresh", 99, 99, 0, ()),
        ("blind", 154, 144, 1, ("fresh",)),
        ("later", 16, 16, 0, ("fresh", "blind")),
        ("unseen", 125, 122, 2, ("fresh", "blind", "later", "further")),
        ("sealed", 209, 186, 22, ("fresh", "blind", "later", "further", "unseen")),
    ],
)
def test_unfitted_rows_are_runs_that_no_other_table_has(
    table: str, rows: int, with_speed: int, ran_out: int, others: tuple[str, ...]
) -> None:
    unfitted = published_runs.runs(published_runs.FOLDER / f"{table}.csv.gz")
    assert len(unfitted) == rows
    assert len([run for run in unfitted if run.step_seconds > 0]) == with_speed
    assert len([run for run in unfitted if run.ran_out]) == ran_out
    assert all(run.step_seconds or run.memory_gib or run.ran_out for run in unfitted)
    assert all(run.source.startswith("https://") for run in unfitted), "each has its address"

    def speed_of(run: Run) -> tuple[Any, ...]:
        tokens = run.global_batch * run.sequence / (run.step_seconds or math.inf) / run.gpus
        settings = (run.model, run.sequence, run.gpu, run.gpus, run.micro_batch, run.precision)
        return *settings, f"{tokens:.2g}"

    known = {speed_of(run) for run in published.runs()}
    for other in others:
        known |= {
            speed_of(run) for run in published_runs.runs(published_runs.FOLDER / f"{other}.csv.gz")
        }
    assert not [run.name for run in unfitted if speed_of(run) in known]
    for run in unfitted[::20]:
        config = load_config([], run.command()[0])
        assert (config.parallel.tp, config.parallel.cp) == (run.tp, run.cp)


def test_the_rows_of_a_last_test_are_in_no_table_that_a_fit_or_a_range_is_made_of() -> None:
    tables = {*published_runs.TABLES, *published_runs.LATER_TABLES, published_runs.SWEEP}
    assert published_runs.SEALED not in tables and published_runs.SEALED.exists()


def test_a_published_run_has_a_layout_that_is_possible_here() -> None:
    """Megatron's ep counts tensor-parallel workers, and its chunks embedding and head."""
    names = ("fresh", "blind", "later", "unseen", "sealed")
    tables = [published_runs.FOLDER / f"{name}.csv.gz" for name in names]
    split = 0
    for run in [*published_runs.runs(), *published_runs.runs(*tables)]:
        keys = dict(word.split("=", 1) for word in run.command()[0])
        degrees = {name: int(keys[f"parallel.{name}"]) for name in DEGREES}
        dims = ParallelDims(**degrees)  # refuses what cannot be
        config = run.task_args.get("config", {})
        chunks = int(keys.get("parallel.chunks", 1))
        assert dims.pp * chunks <= config.get("num_hidden_layers", run.n_layers or 61), run.name
        experts = config.get("num_experts", config.get("num_local_experts", 256))
        if dims.ep > 1:
            assert experts % (dims.ep * dims.tp) == 0, run.name
            assert dims.ep * dims.tp == run.ep
            split += 1
    assert split > 20
    with_chunks = Run("x", "qwen3-235b-a22b", pp=32, chunks=3, tp=2, ep=8, gpus=256, data="zero1")
    words = replace(with_chunks, global_batch=2048, gpu="h100-80gb", sequence=4096).command()[0]
    assert {"parallel.ep=4", "parallel.chunks=2"} < set(words)


@functools.cache
def _small(layout: str = "data", gpus: int = 8) -> Prepared:
    """A run of a small model, which is not a published one."""
    degrees: dict[str, Any] = {"tp": 2} if layout == "tp" else {}
    sizes: dict[str, Any] = {
        "d_model": 1024,
        "n_layers": 2,
        "n_heads": 8,
        "n_kv_heads": 8,
        "d_hidden": 4096,
        "vocab_size": 1000,
    }
    run = Run(
        "x", "small", **sizes, sequence=2048, gpu="h100-80gb", gpus=gpus, data="fsdp", **degrees
    )
    return prepare(replace(run, micro_batch=16, global_batch=16 * gpus, step_seconds=1.0))


def test_the_planners_choice_is_compared_with_published_runs() -> None:
    """Runs that ran out of memory count too."""
    compared = _small().compare()
    assert compared.plan is not None
    measured = replace(compared.run, step_seconds=1.0, kernels="x")
    slow = replace(compared.plan, seconds={"compute": 2.0})
    fast = replace(compared.plan, seconds={"compute": 1.0})
    members = [Compared(replace(measured, micro_batch=i), slow) for i in (1, 2)]
    cases = [(0, 1.0, "+0.0 %"), (0, 1.5, "+50.0 %"), (1, 0.0, "ran out of memory")]
    for ran_out, step, difference in cases:
        chosen = Compared(
            replace(measured, micro_batch=4, ran_out=ran_out, step_seconds=step), fast
        )
        (choice,) = evidence.choices([*members, chosen])
        assert choice.row["chosen takes"].startswith(difference) and choice.row["layouts"] == "3"
        figures = evidence.figures_of([choice])
        assert figures["ran_out"] == ran_out and figures["models"] == 1
        assert (figures["median_loss"] is None) == bool(ran_out)
    assert not evidence.choices(members), "two layouts are too few"


@pytest.mark.parametrize(
    "content",
    ["loss,rate\n1,2\n", "model,gpu,ran_out\ngpt,h100-80gb,0\n", "d_model,n_heads\nwide,8\n"],
)
def test_what_is_no_table_of_published_runs_is_refused(content: str, tmp_path: Path) -> None:
    table = tmp_path / "other.csv"
    table.write_text(content)
    with pytest.raises(UserError, match=r"other.csv is not a table of published runs \(.*\): give"):
        published_runs.runs(table)


@pytest.mark.parametrize("options", [["--publishers", "--fit"], ["--memory", "--sweep"]])
def test_options_that_exclude_each_other_are_refused_in_one_line(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "published", *options])
    with pytest.raises(SystemExit) as ended:
        benchmarks.main()
    assert ended.value.code == EXIT_REFUSED
    message = capsys.readouterr().err
    assert message.startswith(f"benchmarks published: {options[0]} ") and message.count("\n") == 1


def test_publishers_of_the_same_run_are_compared_and_pages_of_one_repository_are_not() -> None:
    """The speeds of a repository's runs are one: their median."""
    run = Run(
        "https://github.com/first/trainer/blob/main/README.md",
        "llama3-8b",
        sequence=4096,
        gpu="h100-80gb",
        gpus=8,
        global_batch=8,
        step_seconds=1.0,
    )
    other = replace(run, source="github.com/second/trainer/issues/7", gpus=64, global_batch=64)
    runs = [
        run,
        replace(run, source="https://github.com/first/trainer/tree/v2", step_seconds=1.0),
        replace(run, step_seconds=9.0),
        replace(other, step_seconds=1.25),
        replace(other, step_seconds=2.0, precision="fp8"),
        replace(other, step_seconds=0.0),
    ]
    rows, apart = evidence.publishers(runs)
    assert [row["apart"] for row in rows] == ["25 %"]
    assert rows[0]["tokens/s of a GPU"] == "3,277 to 4,096"
    assert apart == {"pairs": 1, "median": pytest.approx(0.25), "90th": pytest.approx(0.25)}
    assert evidence.publishers(runs[:3]) == ([], {"pairs": 0})


def test_published_runs_have_a_source_and_a_part_that_results_do_not_decide() -> None:
    table = published.runs()
    assert len(table) == 431 and all(run.source.startswith("https://") for run in table)
    for name in ("published", "llm-foundry", "beyond"):
        parts = [run.part for run in table if run.table == name]
        assert set(parts) == {"fit", "choose", "held out"}
        assert 0.35 < parts.count("fit") / len(parts) < 0.75
    other_results: dict[str, Any] = {
        "step_seconds": 3.0,
        "memory_gib": 3.0,
        "described": (("flash", 3.0),),
    }
    assert all(replace(run, **other_results).part == run.part for run in table)
    ran_out = [run for run in table if run.ran_out]
    assert len(ran_out) == 28 and not any(run.step_seconds for run in ran_out)


def test_the_sweep_has_all_layouts_of_its_sheets() -> None:
    sweep = published_runs.sweep_runs()
    assert len(sweep) == 587 and 300 < sum(run.ran_out for run in sweep) < 400
    settings = ("kernels", "micro_batch", "tp", "pp", "sequence_parallel", "recompute")
    seconds = {
        (run.source, *(getattr(run, name) for name in settings)): run.step_seconds for run in sweep
    }
    same = [run for run in published.runs() if run.source in {run.source for run in sweep}]
    assert len(same) == 108
    for run in same:
        key = (run.source, *(getattr(run, name) for name in settings))
        assert seconds[key] == pytest.approx(run.step_seconds, abs=0.01)


def test_a_trainer_is_described_to_a_plan_by_options_of_the_command() -> None:
    run = replace(_small().run, described=(("flash", 0.5), ("logits", 28), ("context_gib", 2.0)))
    assert run.assumptions == ("flash=0.5", "logits=28")
    described = replace(_small(), run=run).compare(described=True).plan
    arguments, options = run.command()
    machine = find_machine(MachineOptions(**options, assume=run.assumptions), "auto")
    keys = frozenset(word.partition("=")[0] for word in arguments)
    plan = plan_experiment(load_config([], arguments), machine, keys)
    assert described is not None
    assert plan.rows[0].step_seconds == pytest.approx(described.step_seconds)
    undescribed = _small().compare().plan
    assert undescribed is not None and undescribed.step_seconds < described.step_seconds


@pytest.mark.parametrize("layout", ["data", "tp"])
def test_a_trainers_loss_takes_memory_for_each_logit_of_the_whole_vocabulary(layout: str) -> None:
    run = _small(layout).run
    activations = []
    for loss_memory in (0, 1, 1000, 2000):
        described = replace(run, described=(("loss_memory", loss_memory),))
        plan = replace(_small(layout), run=described).compare(described=True).plan
        assert plan is not None
        activations.append(plan.memory["activations"])
    logits = run.micro_batch * run.sequence * run.vocab_size
    assert activations[0] == activations[1], "a smaller loss than Trireme's changes nothing"
    assert activations[3] - activations[2] == pytest.approx(1000 * logits, rel=1e-6)
    assert activations[2] > 900 * logits


def test_a_trainers_loss_takes_memory_for_each_logit_that_a_worker_has() -> None:
    for layout, split in (("data", 1), ("tp", 2)):
        run = _small(layout).run
        activations = []
        for loss_memory in (1000, 2000):
            described = replace(run, described=(("split_loss_memory", loss_memory),))
            plan = replace(_small(layout), run=described).compare(described=True).plan
            assert plan is not None
            activations.append(plan.memory["activations"])
        logits = run.micro_batch * run.sequence * run.vocab_size / split
        assert activations[1] - activations[0] == pytest.approx(1000 * logits, rel=1e-6)


def test_an_optimizers_step_takes_memory_beside_activations_only_where_it_is_more() -> None:
    optimizer = []
    for update in (0, 1, 1000, 2000):
        described = replace(_small().run, described=(("update", update),))
        plan = replace(_small(), run=described).compare(described=True).plan
        assert plan is not None
        optimizer.append(plan.memory["optimizer"])
    assert optimizer[0] == optimizer[1], "activations take more than a copy of the weights"
    assert optimizer[3] - optimizer[2] == pytest.approx(1000 * plan.memory["gradients"])


def test_a_run_is_compared_with_the_plan_of_its_own_strategy() -> None:
    speeds = {}
    for data in ("fsdp", "zero2"):
        compared = replace(_small(), run=replace(_small().run, data=data)).compare()
        assert compared.plan is not None
        assert compared.plan.candidate.strategy.name == data
        assert compared.memory_gib == compared.plan.memory_bytes / GIB
        speeds[data] = compared.plan.step_seconds
    one_worker = replace(_small(), run=replace(_small().run, data="")).compare()
    assert one_worker.plan is not None
    assert one_worker.plan.step_seconds <= min(speeds.values())


@pytest.mark.parametrize(
    ("stages", "equal"), [((3, 2, 2, 1), (2, 2, 2, 2)), ((3, 2, 2), (3, 2, 2)), (None, None)]
)
def test_a_trainers_stages_are_equal_where_blocks_can_be_divided(stages: Any, equal: Any) -> None:
    assert compared._equal(stages) == equal


def test_peaks_of_which_it_is_not_said_what_they_count_are_a_group_of_their_own() -> None:
    one = _small().compare()
    peaks = ("allocated", "")
    members = [replace(one, run=replace(one.run, memory_gib=9.0, peak=peak)) for peak in peaks]
    rows = published.memory_summary(members, {member.run: 1.0 for member in members})
    counts = {(row["by"], row["group"]): row["rows"] for row in rows}
    assert counts["all", "all"] == counts["peak", "allocated"] == counts["peak", "not said"] == "1"


def test_runs_without_a_known_network_have_a_line_of_their_own() -> None:
    one = _small().compare()
    several = replace(one, run=replace(one.run, gpus=16))
    named = replace(one, run=replace(one.run, gpus=16, network_gbit=400.0))
    billions = {each.run: 1.0 for each in (one, several, named)}
    rows = published.summary([one, several, named], billions)
    speeds = {row["group"]: row["speeds"] for row in rows if row["by"] == "network"}
    assert speeds == {"known or not needed": "2", "its page names none": "1"}


def test_a_trainer_may_gather_weights_in_8_bits() -> None:
    """It changes what is sent of the blocks' weights if products have 8 bits, and nothing else."""
    seconds = {}
    for precision in ("bf16", "fp8"):
        one = _small(gpus=64)
        run = replace(one.run, precision=precision, micro_batch=1, global_batch=64)
        for gather in (0, 1, 2):
            described = replace(run, described=(("gather", gather),))
            plan = replace(prepare(run), run=described).compare(described=True).plan
            assert plan is not None
            seconds[precision, gather] = plan.seconds["shard"] + plan.seconds["contention"]
    assert seconds["bf16", 1] == seconds["bf16", 0] == seconds["bf16", 2]
    assert seconds["fp8", 1] < seconds["fp8", 0] == seconds["fp8", 2]


def test_runs_with_lora_of_some_sources_have_all_weights_in_16_bits() -> None:
    run = replace(_small().run, source="https://github.com/QwenLM/Qwen/x", method="lora")
    assert "train.weight_dtype=bf16" in run.command()[0]
    assert "train.weight_dtype=bf16" not in replace(run, method="sft").command()[0]
    assert "train.weight_dtype=bf16" not in replace(run, source="x").command()[0]


def test_each_source_of_peaks_counts_as_much_as_any_other() -> None:
    compared = _small().compare()
    assert compared.plan is not None
    gib = compared.memory_gib

    def with_peak(source: str, ratio: float) -> Compared:
        run = replace(compared.run, source=source, memory_gib=ratio * gib, peak="reserved")
        return replace(compared, run=run)

    members = [with_peak("many", 1.0)] * 50 + [with_peak("one", 2.0)]
    quantiles = published.peak_quantiles(members)
    assert list(quantiles) == sorted(quantiles) and next(iter(quantiles.values())) == 1.0
    assert quantiles[0.25] == 1.0 and quantiles[0.9] == 2.0
    assert not published.peak_quantiles([compared]), "a run without a published peak"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(published_runs._models()))
def test_models_have_the_number_of_parameters_that_was_published(name: str) -> None:
    published_model = published_runs._models()[name]
    config = resolve_config(
        find_model(published_model["model"], weights=False), {}, published_model["config"]
    )
    with torch.device("meta"):
        is_t5 = published_model["model"] == "t5"
        auto_class = "AutoModelForSeq2SeqLM" if is_t5 else "AutoModelForCausalLM"
        model = getattr(library(), auto_class).from_config(config)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert billions == pytest.approx(published_model["billions"], rel=0.03)


def test_the_constants_of_a_trial_are_used_by_the_planner() -> None:
    slower = _small().compare(fit.changed({**fit.START, "hopper.bf16": 0.3})).plan
    faster = _small().compare(fit.changed({**fit.START, "hopper.bf16": 0.8})).plan
    assert slower is not None and faster is not None and slower.step_seconds > faster.step_seconds
    with_flash = replace(_small().run, described=(("flash", 0.1),))
    described = replace(_small(), run=with_flash).compare(described=True).plan
    default = _small().compare().plan
    assert described is not None
    assert default is not None
    assert described.step_seconds > default.step_seconds
    assert set(fit.known_values()) == set(fit.CONSTANTS), "the file has every constant"
    for name, value in fit.known_values().items():
        assert fit.CONSTANTS[name].low * 0.99 <= value <= fit.CONSTANTS[name].high * 1.01, name


def test_the_fit_finds_the_constants_also_without_one_source() -> None:
    names = sorted(fit.CONSTANTS)
    generator = np.random.default_rng(1)
    slopes = generator.normal(size=(60, len(names)))
    centre = np.log([fit.CONSTANTS[name].start for name in names])
    low = np.log([fit.CONSTANTS[name].low for name in names])
    high = np.log([fit.CONSTANTS[name].high for name in names])
    moved = (centre + 0.1 * generator.normal(size=len(names)).clip(-1, 1)).clip(low, high)

    def seconds(values: fit.Values) -> list[float]:
        return list(np.exp(slopes @ (np.log([values[name] for name in names]) - centre)))

    truth = dict(zip(names, np.exp(moved)))
    values = fit.fit(seconds, seconds(truth))
    assert all(values[name] == pytest.approx(truth[name], rel=0.05) for name in names)
    # The last ten figures, as of another source, are five times as large.
    measured = [*seconds(truth)[:50], *(5 * second for second in seconds(truth)[50:])]
    observations = fit.with_slopes(seconds, measured, values)
    refitted = fit.without(observations, np.arange(50), np.ones(50))
    assert all(refitted[name] == pytest.approx(truth[name], rel=0.05) for name in names)
    sources = [str(i % 5) for i in range(60)]
    intervals = fit.intervals(observations, sources, np.ones(60), draws=20)
    assert all(low <= high for low, high in intervals.values())


def _residuals(
    errors: Iterable[tuple[Traits, float]], source: Callable[[int], str] = str
) -> list[fit.Residual]:
    """Errors of runs, each of a source of its own unless another is given for its number."""
    return [fit.Residual(source(i), traits, error) for i, (traits, error) in enumerate(errors)]


def test_ranges_cover_the_errors_that_they_were_made_from() -> None:
    traits = Traits("tp", "dense", "hopper", 7.0, 4096)
    errors = [(traits, error / 100) for error in range(-20, 21)]
    tight = [(traits._replace(layout="pp"), error / 1000) for error in range(-9, 10)]
    few = [(traits._replace(layout="cp"), 0.5)] * 3
    fitted = fit.ranges(_residuals([*errors, *tight, *few]))
    covered = 0
    for _, error in errors:
        spread = spread_of(traits, fitted)
        covered += spread.low <= 1 / (1 + error) <= spread.high
    assert 0.80 <= covered / len(errors) <= 0.93
    assert fitted["kinds"]["pp"][0] > fitted["kinds"]["tp"][0]
    assert "cp" not in fitted["kinds"]
    assert fitted["wider"] == fit.LEAST_WIDER
    assert set(fitted["seen"]["layouts"]) == {"tp", "pp", "cp"}


@pytest.mark.parametrize(
    ("sources", "unmeasured"), [(fit.ENOUGH_SOURCES - 1, ("a mixture of experts",)), (8, ())]
)
def test_ranges_cover_a_kind_of_model_of_which_there_are_few_or_many_sources(
    sources: int, unmeasured: tuple[str, ...]
) -> None:
    traits = Traits("tp", "dense", "hopper", 7.0, 4096)
    mixture = traits._replace(model="mixture")
    dense = [(traits, error / 100) for error in range(-20, 21)]
    of_mixtures = [(mixture, -0.5 + 0.03 * number) for number in range(sources)]
    fitted = fit.ranges(_residuals([*dense, *of_mixtures]))
    assert ("mixture" in fitted["kinds"]) == (not unmeasured)
    spread = spread_of(mixture, fitted)
    assert spread.unmeasured == unmeasured
    inside = [spread.low <= 1 / (1 + error) <= spread.high for _, error in of_mixtures]
    assert np.mean(inside) >= 0.8
    alone = fit.ranges(_residuals(dense))
    assert spread_of(traits, fitted) == spread_of(traits, alone), "dense models' stay as they are"


def test_a_range_has_eight_in_ten_runs_also_if_one_source_has_most_of_them() -> None:
    """The other sources' runs are all inside."""
    traits = Traits("tp", "dense", "hopper", 7.0, 4096)
    errors = [(traits, error / 1000) for error in range(-20, 21)]
    errors += [(traits, 0.1 + error / 100) for error in range(60)]
    one_source = fit.ranges(_residuals(errors, lambda i: "large" if i > 40 else str(i % 10)))
    spread = spread_of(traits, one_source)
    inside = np.mean([spread.low <= 1 / (1 + error) <= spread.high for _, error in errors])
    assert inside >= 0.8


def test_eight_in_ten_new_runs_of_each_group_are_inside() -> None:
    """The runs of one GPU err twice as much, which the range of all runs would hide."""
    traits = Traits("tp", "dense", "hopper", 7.0, 4096, gpu="h100-80gb")
    other = traits._replace(gpu="h200")
    errors = np.random.default_rng(0).normal(size=(2, 400)) * [[0.05], [0.15]]
    old = [(gpu, error) for gpu, row in zip((traits, other), errors) for error in row[:200]]
    fitted = fit.ranges(_residuals([*old, *old[:200], *old[:200]]))
    assert set(fitted["groups"]) == {"gpu h200"}
    for gpu, row in zip((traits, other), errors):
        spread = spread_of(gpu, fitted)
        inside = np.mean([spread.low <= 1 / (1 + error) <= spread.high for error in row[200:]])
        assert 0.77 <= inside <= 0.93


def test_more_runs_of_a_new_source_are_inside_if_sources_count_and_not_runs() -> None:
    """One of twelve sources has a third of the rows."""
    traits = Traits("tp", "dense", "hopper", 7.0, 4096)
    generator = np.random.default_rng(0)
    inside: list[bool] = []
    inside_pooled: list[bool] = []
    for _ in range(40):
        errors = []
        sources = []
        for number, rows in enumerate([30, *[5] * 11]):
            offset = 0.1 * generator.normal()
            errors += [(traits, offset + 0.01 * error) for error in generator.normal(size=rows)]
            sources += [str(number)] * rows
        new = 0.1 * generator.normal(size=200)
        by_source = _residuals(errors, sources.__getitem__)
        for shares, residuals in ((inside, by_source), (inside_pooled, _residuals(errors))):
            spread = spread_of(traits, fit.ranges(residuals))
            shares += [spread.low <= 1 / (1 + error) <= spread.high for error in new]
    assert np.mean(inside_pooled) < 0.72, "each row as a source of its own"
    assert 0.74 <= np.mean(inside) <= 0.9


def test_a_group_whose_runs_another_group_has_brought_in_needs_no_factor() -> None:
    """The runs of small models are those on one GPU, with some of another one's."""
    known = Traits("tp", "dense", "hopper", 30.0, 4096, gpu="h100-80gb")
    other = known._replace(gpu="h200", billions=1.0)
    errors = np.random.default_rng(1).normal(size=(2, 200)) * [[0.05], [0.2]]
    runs = [(known, error) for error in errors[0]] * 4
    runs += [(known._replace(billions=1.0), error) for error in errors[0][:20]]
    runs += [(other, error) for error in errors[1]]
    fitted = fit.ranges(_residuals(runs))
    assert len(fitted["groups"]) == 1
    spread = spread_of(other, fitted)
    inside = np.mean([spread.low <= 1 / (1 + error) <= spread.high for error in errors[1]])
    assert 0.79 <= inside <= 0.93


@pytest.mark.slow
def test_runs_are_judged_by_constants_and_ranges_of_other_sources() -> None:
    """Two sources agree with each other, and a third one's runs take four times as long."""
    small = _small()
    plan = small.compare().plan
    assert plan is not None
    prepared = []
    for source, times in (("a", 1.0), ("b", 1.0), ("c", 4.0)):
        rows = [replace(small.run, source=source, chunks=chunks) for chunks in range(1, 30)]
        for i, run in enumerate(run for run in rows if run.part == "fit"):
            seconds = plan.step_seconds * times * (1 + 0.002 * i)
            prepared.append(replace(small, run=replace(run, step_seconds=seconds)))
    judged, described = published._left_out(prepared, prepared, "source", described=True)
    assert [one.run for one in judged] == [one.run for one in described]
    inside = {"a": 0, "b": 0, "c": 0}
    for one in judged:
        inside[one.run.source] += one.is_inside
    assert inside["c"] == 0 < min(inside["a"], inside["b"]), "c has no say in its own range"
    slower = [one.plan.step_seconds for one in judged if one.run.source == "a" and one.plan]
    ignorant = [one.plan.step_seconds for one in judged if one.run.source == "c" and one.plan]
    assert min(slower) > max(ignorant), "constants of a's plans are fitted to c too"
    assert not published._left_out(prepared, prepared[:3], "gpu", described=False)[1]


def test_what_is_read_of_a_model_is_kept(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _small().run
    monkeypatch.setattr(compared, "_READERS", {})
    first = prepare(run).compare().plan
    (kept,) = (own_cache / "trireme").glob("read-*.pickle")
    monkeypatch.setattr(compared, "_READERS", {})
    monkeypatch.setattr(Reader, "_trace", None)  # nothing is traced again
    again = prepare(run).compare().plan
    assert first is not None and again is not None
    assert (first.memory, first.seconds) == (again.memory, again.seconds)
    monkeypatch.setattr(compared, "_READERS", {})
    monkeypatch.setattr(compared, "_versions", lambda: "of other libraries")
    with pytest.raises(TypeError):
        prepare(run)
    assert kept.exists()


def test_ranges_allow_for_slower_attention() -> None:
    """Runs that are half attention, and of which the attention is two or three times as slow."""
    traits = Traits("data", "dense", "hopper", 7.0, 4096)
    errors = [(traits, error / 100) for error in range(-10, 11)]
    slow = [(traits._replace(attention=0.5), 0.5 + error / 50) for error in range(20)]
    fitted = fit.ranges(_residuals([*errors, *slow]))
    inside = 0
    for each, error in slow:
        inside += spread_of(each, fitted).low <= 1 / (1 + error)
    assert inside >= 0.9 * len(slow) and fitted["attention"] > 0
    assert fit.ranges(_residuals(errors))["attention"] == 0


def test_laws_are_judged_beyond_the_two_smallest_numbers() -> None:
    run = _small().run
    runs = [
        replace(run, gpus=8 * 2**i, global_batch=128 * 2**i, step_seconds=1 + 0.02 * i)
        for i in range(4)
    ]
    series = laws.series(runs)
    lengths = {group: [len(member) for member in members] for group, members in series.items()}
    assert lengths == {"weak, data parallel": [4]}
    assert not laws.series(runs[:2]) and not laws.series([*runs[:3], runs[2]])
    judged = laws.judge("weak", [Compared(run, None) for run in runs])
    errors = {(judgement.law, judgement.doublings): judgement.error for judgement in judged}
    assert [errors["logarithm", ahead] for ahead in (1.0, 2.0)] == pytest.approx([0, 0], abs=1e-9)
    assert errors["universal", 2.0] < -0.03, "it takes a hop of a ring for contention"
    strong = [replace(run, global_batch=1024) for run in runs]
    assert list(laws.series(strong)) == ["strong, data parallel"]


def _by_hand(rank: int, wrap: str) -> float:
    """The second loss of the hand-written training loop."""
    training = plain.gpt(3, wrap)
    training.advance()
    index = next(training.indices)
    return training.forward_backward(training.inputs[index], training.targets[index]).item()


@pytest.mark.alone
@pytest.mark.slow
def test_hand_written_context_parallelism_trains_the_same() -> None:
    halves = run_distributed(_by_hand, 2, "context")
    assert sum(halves) / 2 == pytest.approx(run_distributed(_by_hand, 1, "single")[0], rel=1e-5)


def test_hand_written_stages_compute_what_the_model_does() -> None:
    model = GPT(32, d_model=16, n_layers=4, n_heads=2)
    tokens = torch.arange(12).view(2, 6)
    x = tokens
    for part in range(4):
        x = plain.GptStage(model, part=part, parts=4)(x)
    assert torch.equal(x, model(tokens))


SMALLEST = {
    "step": "--model gpt --strategy zbv --blocks 1",
    "chaos": "--seed 5 --kills 18 --each 3",
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs(name: str) -> None:
    """It runs in a process; chaos ends with code 1 if anything is lost."""
    command = [sys.executable, "-m", "experiments.benchmarks", name]
    command += [*SMALLEST[name].split(), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == name and result["versions"]["torch"] == torch.__version__
    assert result["command"].startswith(f"python -m experiments.benchmarks {name}")
    assert "cores" in result["machine"]
    assert result["found"] and "NaN" not in json.dumps(result["found"])


# --- chaos ----------------------------------------------------------------------------------------

BATCH = 4
STEPS = 6
SAMPLES = 10
ORDER = Order(SAMPLES, 0).indices(0, 100).tolist()


def steps(rank: int, start: float, first: int, last: int) -> Start:
    """A start of one of two ranks that took the steps first … last, two samples each."""
    positions = [
        [BATCH * (step - 1) + 2 * rank + i for i in (0, 1)] for step in range(first, last + 1)
    ]
    lines = [(start + pair[0], pair, [ORDER[position] for position in pair]) for pair in positions]
    return Start(start, rank, 1, lines)


def test_samples_that_were_lost_or_repeated_are_named() -> None:
    def judged(*starts: Start) -> list[str]:
        return lost_or_repeated(starts, STEPS * BATCH, SAMPLES)

    complete = [steps(0, 0, 1, 6), steps(1, 0, 1, 6)]
    restarted = [
        steps(0, 0, 1, 4),
        steps(1, 0, 1, 3),
        Start(50, 0, 2, []),
        steps(0, 100, 3, 6),
        steps(1, 100, 3, 6),
    ]
    assert judged(*complete) == judged(*restarted) == [], "going back to a checkpoint loses nothing"
    assert judged(complete[0])[0].endswith("samples lost, the first at position 2")
    twice = steps(0, 0, 1, 6)
    twice.lines.append(twice.lines[2])
    assert "rank 0 used position 8 twice in one start" in judged(twice, complete[1])
    seven_steps = judged(steps(0, 0, 1, 7), steps(1, 0, 1, 7))
    assert "4 samples too many, the first at position 24" in seven_steps
    other_samples = steps(0, 0, 1, 6)
    other_samples.lines[0] = (0.0, [0, 1], [ORDER[1], ORDER[0]])
    (problem,) = judged(other_samples, complete[1])
    assert problem == "2 samples other than the order has, the first at position 0"


def test_a_disturbed_run_with_another_result_is_reported() -> None:
    undisturbed: Any = SimpleNamespace(weights={"w": torch.ones(2)}, curve=[(1, 0.5)], problems=[])
    exact = Kill("worker", signal.SIGKILL, 0.5, 0, False)
    rewound = Kill("worker", signal.SIGKILL, 0.5, 0, False)
    rewound.committed = 20
    rewound.resumed_from = 10
    assert unlike(undisturbed, undisturbed, [exact]) == []
    different: Any = SimpleNamespace(
        weights={"w": torch.zeros(2)}, curve=[(1, 0.6)], problems=["lost"]
    )
    problems = unlike(different, undisturbed, [exact, rewound])
    assert len(problems) == 4
    assert "SIGKILL of rank 0 after 0.50 s: went on before step 20" in problems[-1]
    rows = [
        {"layout": "ddp", "victim": "worker", "run": "1", "problems": problems, "seconds": seconds}
        for seconds in (1.0, 3.0)
    ]
    assert list(summary(rows)[0].values()) == ["ddp", "worker", "2", "1", "2.00", "3.00"]
