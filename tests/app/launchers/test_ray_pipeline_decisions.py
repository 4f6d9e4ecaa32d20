"""What the pipeline's launcher decides without any process: placement, micro-batches, who hangs, what to say."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import astuple
from pathlib import Path
from types import MappingProxyType

import pytest
import ray

from app.config import Config
from app.config_io import load_config
from app.errors import NonFiniteError, UserError
from app.heartbeat import Beat
from app.launchers.hangs import Sign, Silence, moved, stuck
from app.launchers.pipeline import Placement, placement, resources_of_stages
from app.launchers.restart import WorkerLost, first_cause, root_cause
from app.pipeline_profile import chrome_trace, figures
from app.planner.actions import part_times, schedule
from app.planner.plan import make_plan
from app.planner.read import Reader
from app.planner.where import machine_of
from app.run.model_check import check_model
from app.run.prepare import default_micro_batch_size, prepare, read_task
from app.schedule_picture import draw, text
from app.tasks import load_task
from cluster.connect import Cluster
from cluster.pending import NodeState
from cluster.shape import of_gpus
from strategies.parallelize import LayoutError, ParallelDims, choose
from strategies.pipeline.schedules import SCHEDULES, chunks_of, make
from strategies.pipeline.simulate import Span, Times, bubble, simulate
from tests.running import ROOT, trireme

ONE = {"CPU": 1.0}
INTERLEAVED = ["parallel.pp=2", "parallel.schedule=interleaved_1f1b", "parallel.chunks=2", "train.micro_batch_size=6"]


def config(*more: str) -> Config:
    return load_config([], ["task=tests.chain:Chain", "train.steps=5", "train.global_batch_size=16", *more])


def node(name: str = "10.0.0.1", free: dict[str, float] | None = None, **total: float) -> NodeState:
    return NodeState(name, "", total, total if free is None else free)


def cluster(*nodes: NodeState, **limits: float) -> Cluster:
    names = {name for one in nodes for name in one.total}
    total = {name: sum(one.total.get(name, 0.0) for one in nodes) for name in names}
    most = {name: max(one.total.get(name, 0.0) for one in nodes) for name in names}
    return Cluster("", len(nodes), total, most, MappingProxyType(limits), False)


@pytest.mark.parametrize(
    ("dims", "cpus", "bundles", "bundle_of_rank", "strategy"),
    [
        # a copy fits on a node: its stages together, the copies apart
        (ParallelDims(dp_replicate=2, pp=2), [2, 2], [2, 2], [0, 1, 0, 1], "SPREAD"),
        (ParallelDims(pp=4), [4], [4], [0, 0, 0, 0], "SPREAD"),
        # it does not: a stage with its shards together
        (ParallelDims(dp_shard=2, pp=2), [2, 2], [2, 2], [0, 0, 1, 1], "PACK"),
        (ParallelDims(tp=2, pp=2), [3, 3], [2, 2], [0, 0, 1, 1], "PACK"),
        # one would, but not both: stages 3 + 3 on nodes of 4 and 2
        (ParallelDims(dp_replicate=2, pp=3), [4, 2], [1] * 6, [0, 3, 1, 4, 2, 5], "PACK"),
        # not even that
        (ParallelDims(tp=2, pp=2), [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 2, 3], "PACK"),
    ],
)
def test_what_talks_most_is_placed_together(
    dims: ParallelDims, cpus: list[int], bundles: list[int], bundle_of_rank: list[int], strategy: str
) -> None:
    found = placement(dims, [ONE] * dims.pp, [node(CPU=count) for count in cpus])
    assert [bundle["CPU"] for bundle in found.bundles] == bundles
    together = [{r for r, b in enumerate(found.bundle_of_rank) if b == own} for own in found.bundle_of_rank]
    assert together == [{r for r, b in enumerate(bundle_of_rank) if b == own} for own in bundle_of_rank]
    assert found.strategy == strategy


def test_unlike_stages_get_what_they_ask_for() -> None:
    asked = config("parallel.stage_resources=[{big: 1}, {small: 2, CPU: 0.5}]")
    nodes = [node(CPU=4, big=1, small=2)] * 2
    stages = resources_of_stages(asked, ParallelDims(pp=2, dp_replicate=2), ONE, cluster(*nodes), nodes)
    assert stages == [{"CPU": 1.0, "big": 1.0}, {"CPU": 0.5, "small": 2.0}]
    chosen = placement(ParallelDims(pp=2, dp_replicate=2), stages, nodes)
    assert chosen.bundles == [{"CPU": 1.5, "big": 1.0, "small": 2.0}] * 2


def test_stages_on_unlike_gpus_are_on_the_nodes_that_have_them() -> None:
    """No node has both kinds, though each resource by itself is on one: a whole copy would wait for ever."""
    stages = [{"GPU": 1.0, "A100": 1.0}, {"GPU": 1.0, "T4": 1.0}]
    nodes = [node("a", GPU=2, A100=2, CPU=8), node("b", GPU=2, T4=2, CPU=8)]
    chosen = placement(ParallelDims(pp=2), stages, nodes)
    assert chosen == Placement(stages, [0, 1], "PACK")


def test_room_that_others_hold_just_now_counts_only_if_there_is_no_other() -> None:
    half = [node("a", {"CPU": 1.0}, CPU=2), node("b", {"CPU": 1.0}, CPU=2)]
    assert placement(ParallelDims(pp=2), [ONE] * 2, half).bundles == [ONE, ONE], "now, on two nodes"
    full = [node("a", {}, CPU=2), node("b", {}, CPU=2)]
    assert placement(ParallelDims(pp=2), [ONE] * 2, full).bundles == [{"CPU": 2.0}], "later, on one"


def test_workers_that_no_way_of_placing_finds_room_for() -> None:
    stages = [{"GPU": 1.0, "A100": 1.0}, {"GPU": 1.0, "T4": 1.0}]
    nodes = [node("a", GPU=1, A100=1, T4=1), node("b", GPU=1)]
    with pytest.raises(UserError, match=r"worker 1 \(stage 1 of 2\) asks for GPU 1, T4 1, for which the others leave"):
        placement(ParallelDims(pp=2), stages, nodes)
    assert placement(ParallelDims(pp=2), stages, nodes, grows=True).bundles == stages, "a node may yet come"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("[{CPU: 1}]", "has 1 entries, but there are 2 stages"),
        ("[{CPU: 1}, {CPU: 9}]", "9 CPU for each worker of stage 1, but no node of this cluster has more than 4"),
        ("[{CPU: 1}, {A100: 1}]", "1 A100 for each worker of stage 1, but no node of this cluster has more than 0"),
        ("[{CPU: 1}, {disk: 1, net: 1}]", "CPU 1, disk 1, net 1 for each worker of stage 1, but no one node .* all of"),
        ("[{GPU: 1}, {CPU: 1}]", "GPUs to some stages and none to others"),
        ("[{CPU: 3}, {CPU: 3}]", "12 CPU in all, but this cluster has 8"),
    ],
)
def test_resources_that_cannot_be_given(asked: str, said: str) -> None:
    wanted = config(f"parallel.stage_resources={asked}")
    nodes = [node("a", CPU=4, GPU=1, disk=1), node("b", CPU=4, GPU=1, net=1)]
    with pytest.raises(UserError, match=said):
        resources_of_stages(wanted, ParallelDims(pp=2, dp_replicate=2), ONE, cluster(*nodes), nodes)


@pytest.mark.parametrize(
    ("share", "stages", "schedule", "size"),
    [
        (32, 2, "1f1b", 4),  # 8 micro-batches
        (64, 4, "1f1b", 4),  # 16
        (12, 2, "1f1b", 2),  # 6: 8 would be uneven
        (12, 4, "interleaved_1f1b", 1),  # 12, a multiple of 4
        (24, 4, "interleaved_1f1b", 2),  # 12
        (3, 4, "1f1b", 1),  # fewer than stages: the schedule has its say
        (17, 2, "1f1b", 2),  # 9, the last one smaller
    ],
)
def test_micro_batches_that_nobody_decided(share: int, stages: int, schedule: str, size: int) -> None:
    assert default_micro_batch_size(share, stages, schedule) == size


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["parallel.pp=5"], "parallel.pp is 5, but the model has only 4 blocks: write at most 4"),
        (INTERLEAVED, "in groups of 2, one per stage, but a step has 3: .*parallel.schedule=1f1b, which takes any"),
        (["parallel.pp=2", "parallel.schedule=zb_h2", "train.micro_batch_size=8"], "needs at least 3.*=zb_h1"),
        (["parallel.pp=2", "parallel.stages=[1,2]"], "adds up to 3 blocks, but the model has 4"),
        (["parallel.pp=2", "parallel.chunks=2"], "interleaved_1f1b"),
    ],
)
def test_pipelines_that_cannot_work(more: list[str], said: str) -> None:
    wanted = config("strategy=pipeline", *more)
    with pytest.raises(LayoutError, match=said):
        prepare(wanted, read_task(wanted), wanted.parallel.pp or 1, devices_per_node=None)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["task_args.what=empty", "strategy=ddp"], "Sequential has no parameters"),
        (["task_args.what=misnamed", "strategy=fsdp"], r"names the block 'bloks.1'.*did you mean 'blocks.1'"),
        (["task_args.what=fork", "strategy=tensor"], r"'blocks.\*.upp' matches no module of Net"),
        (["task_args.what=fork", "strategy=pipeline", "parallel.pp=2"], "blocks.1 does not use what blocks.0 puts out"),
        (["strategy=pipeline", "parallel.pp=2", "parallel.schedule=zbv", "task_args.what=misnamed"], "names the block"),
    ],
)
def test_models_that_do_not_fit_the_layout_are_known_before_a_worker_starts(more: list[str], said: str) -> None:
    wanted = config("task=tests.chain:Wrong", *more)
    with pytest.raises(LayoutError, match=said):
        prepare(wanted, read_task(wanted), 2, devices_per_node=None)


def test_a_deepspeed_file_is_read_before_a_worker_starts(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}))
    wanted = config(f"parallel.deepspeed={file}", "strategy=ddp")
    layout = dataclasses.replace(choose("ddp", 2), name="deepspeed")
    with pytest.raises(LayoutError, match="the DeepSpeed configuration sets optimizer, which the experiment decides"):
        check_model(wanted, read_task(wanted), layout, None)


def test_a_trace_that_will_not_be_made_is_said() -> None:
    wanted = config("strategy=pipeline", "parallel.pp=2", "parallel.trace_step=6")
    notes = prepare(wanted, read_task(wanted), 2, devices_per_node=None).notes
    assert notes[-1] == "parallel.trace_step is 6, but the run has 5 steps: no step is traced"


def test_copies_of_a_pipeline_may_compress_their_gradients() -> None:
    wanted = config("strategy=pipeline", "parallel.pp=2", "parallel.dp_replicate=2", "parallel.compression=bf16")
    assert prepare(wanted, read_task(wanted), 4, devices_per_node=None).layout.dims.dp_replicate == 2


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("fork", "the model is no chain of blocks: blocks.1 does not use what blocks.0 puts out"),
        ("iterator", "the block blocks.1 returns a list_iterator, which cannot be sent to the next stage"),
    ],
)
def test_models_that_are_no_chain_through_the_command_line(
    what: str, said: str, tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    task = ["task=tests.chain:Wrong", f"task_args.what={what}", "train.steps=5", "train.global_batch_size=16"]
    layout = ["strategy=pipeline", "parallel.pp=2", "run.name=x", f"run.storage={tmp_path}"]
    ended = trireme("train", *task, *layout, env=ray_environment)
    assert ended.code == 2 and ended.err.startswith(f"trireme: {said}"), ended.err
    assert not (tmp_path / "x").exists(), "nothing was started"


def test_a_layout_error_of_a_worker_is_not_tried_again() -> None:
    failure = LayoutError("the model did not call its block b.1")
    assert first_cause({0: RuntimeError("Connection closed by peer"), 1: failure}) == (1, failure)
    assert isinstance(root_cause({1: failure}, "…"), LayoutError)


def test_bad_input_through_the_command_line(tmp_path: Path) -> None:
    common = ["train", "task=tests.chain:Chain", "train.steps=5", "strategy=pipeline", "parallel.pp=2"]
    common += ["run.name=x", f"run.storage={tmp_path}"]
    ended = trireme(*common, "launcher=local")
    assert ended.code == 2 and "write launcher=ray, or strategy=model_parallel" in ended.err
    ended = trireme(*common, "parallel.schedule=1f2b")
    assert ended.code == 2 and "did you mean '1f1b'" in ended.err


# --- hangs ------------------------------------------------------------------------------------------------------


def sign(step: int = 7, ticks: int = 0, doing: str = "training", waits: bool = False) -> Sign:
    return Sign(Beat(doing, step, ticks), waits)


def test_who_gets_on() -> None:
    assert not moved({0: sign(), 1: None}, {0: sign(), 1: None})
    assert moved({0: sign(), 1: sign()}, {0: sign(), 1: sign(8)})
    assert moved({0: sign(), 1: None}, {0: sign(), 1: sign()}), "it was only slow to answer"
    assert moved({0: sign()}, {0: sign(), 1: sign()}), "it has only begun"
    assert moved({0: sign(ticks=1, doing="evaluating")}, {0: sign(ticks=2, doing="evaluating")})


@pytest.mark.parametrize(
    ("signs", "lasted", "rank", "why"),
    [
        ([sign(waits=True), None], 9, None, ""),  # a machine that is busy with others
        ([sign(waits=True), None], 10, 1, "does not answer"),
        ([sign(waits=True), sign()], 9, None, ""),
        ([sign(waits=True), sign()], 10, 1, "has been training after step 7"),
        ([sign(8, waits=True), sign(7, waits=True)], 10, 1, "step 7"),
        ([sign(waits=True, doing="evaluating"), sign(doing="evaluating")], 59, None, ""),
        ([sign(waits=True, doing="evaluating"), sign(doing="evaluating")], 60, 1, "has been evaluating"),
        ([sign(waits=True), sign(doing="reading")], 59, None, ""),  # data that come late
        ([sign(waits=True), sign(doing="reading")], 60, 1, "has been reading"),
        ([sign(doing="saving")] * 2, 1000, None, ""),  # a slow storage
        ([sign(doing="saving")] * 2, 1800, 0, "has been saving"),
    ],
)
def test_who_holds_the_others_up(signs: list[Sign | None], lasted: float, rank: int | None, why: str) -> None:
    found = stuck(dict(enumerate(signs)), lasted, limit=10, dumb=10)
    if rank is None:
        assert found is None
    else:
        assert found is not None and found[0] == rank and why in found[1]


def test_a_silence_is_judged_by_those_before_it() -> None:
    silence = Silence(least=2.0, since=0.0)
    assert silence.suspicious(2.1) and silence.window == 1800.0, "loading and compiling take as long as they take"
    assert silence.dumb == 20.0, "but do not silence a process"
    silence.heard(1500.0)
    assert silence.window == 1800.0, "nobody knows yet how long a step takes"
    silence.heard(1500.3)
    assert silence.suspicious(1502.5) and silence.window == silence.dumb == 2.0, "in a few step times"
    silence.heard(1503.3)  # a gap of 3 s is usual now
    assert not silence.suspicious(1503.3 + 15.0)
    assert silence.suspicious(1503.3 + 15.1) and silence.window == 6.0
    assert not Silence(least=0.0, since=0.0, news=5).suspicious(1e9), "0 suspects nobody"


def test_the_first_cause_is_not_its_consequence() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    bug, gone = KeyError("x"), ray.exceptions.ActorDiedError()
    assert first_cause({0: lost, 1: bug}) == (1, bug)
    assert first_cause({0: lost, 1: gone, 2: bug}) == (1, gone)
    hung = WorkerLost("worker 1 does not answer")
    assert first_cause({0: lost, 1: hung}) == (1, hung)
    nan = NonFiniteError("step 3")
    assert first_cause({0: lost, 1: hung, 2: nan}) == (2, nan)


# --- pictures and figures ---------------------------------------------------------------------------------------


def test_the_pictures_of_a_schedule(tmp_path: Path) -> None:
    spans = simulate(make("1f1b", 2, 4), Times(1.0, 1.0, 1.0))
    lines = text(spans).splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["0", "1"]
    assert lines[0].count("F") == lines[1].count("B") == 4 and lines[1].split()[2].startswith("·")
    share = (lines[0].count("·") + lines[1].count("·")) / (2 * len(lines[0].split()[2]))
    assert abs(share - bubble(spans)) < 0.05 and f"{bubble(spans):.1%} bubble" in lines[2]
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        draw(spans, tmp_path / f"x{ending}", "1f1b")
        assert (tmp_path / f"x{ending}").read_bytes().startswith(magic)
    with pytest.raises(UserError, match=r"write \.png"):
        draw(spans, tmp_path / "x.xyz")
    with pytest.raises(UserError, match="nothing to draw"):
        draw([Span(0, "SEND", 0, 0, 0.0, 1.0)], tmp_path / "x.png")


@functools.cache
def eight_blocks() -> Reader:
    wanted = load_config([str(ROOT / "experiments" / "gpt.yaml")], ["task_args.n_layers=8"])
    return Reader(load_task(wanted.task, wanted.task_args))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plans_schedule_is_drawn_with_its_predicted_times(name: str, tmp_path: Path) -> None:
    keys = ("parallel.pp", "parallel.schedule", "parallel.chunks", "train.micro_batch_size", "strategy")
    chunks = 2 if name == "interleaved_1f1b" else 1
    more = ["strategy=pipeline", "parallel.pp=2", f"parallel.schedule={name}", f"parallel.chunks={chunks}"]
    file = str(ROOT / "experiments" / "gpt.yaml")
    wanted = load_config([file], [*more, "task_args.n_layers=8", "train.micro_batch_size=8"])
    machine = machine_of(of_gpus(2, "rtx-4090", 2), 2)
    reader = eight_blocks()
    plan = make_plan(wanted, reader.task, machine, given=frozenset(keys), reader=reader)
    row = next(int(row) for row in plan.order if plan.table.pp[row] > 1)
    times, parallel = part_times(plan, row), plan.layout(row)["parallel"]
    assert all(len(column) == len(parallel["stages"]) == 2 * chunks_of(name, chunks) for column in astuple(times)[:3])
    one = sum(sum(column) for column in astuple(times)[:3]) * plan.layout(row)["micro_batches"] / 2
    assert 0.5 < one / plan.layout(row)["seconds"]["compute"] <= 1.01, "the slowest stage's, and the stages' mean"
    drawn = schedule(plan, str(tmp_path / "x.png"))
    assert f"{name}, 2 stages of {parallel['stages']} blocks" in drawn and "% bubble (·)" in drawn and "·" in drawn
    assert "µs" in drawn or "ms" in drawn, "not units"
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2)])
def test_a_step_that_ran_as_simulated_has_the_simulated_bubble(name: str, chunks: int) -> None:
    spans = simulate(make(name, 2, 8, chunks), Times(0.01, 0.01, 0.01))
    ranks = [[span for span in spans if span.stage == stage] for stage in (0, 1)]
    wanted = config(f"parallel.schedule={name}", f"parallel.chunks={chunks}")
    found = figures(ranks, wanted)
    assert abs(found["pipeline/bubble"] - bubble(spans)) < 1e-9
    assert abs(found["pipeline/bubble_by_simulation"] - bubble(spans)) < 1e-9
    assert abs(found["pipeline/stage_1/compute_seconds"] - 8 * chunks * 0.03) < 1e-9
    trace = json.loads(json.dumps(chrome_trace(spans)))["traceEvents"]
    assert sum(event["ph"] == "X" for event in trace) == len(spans)
