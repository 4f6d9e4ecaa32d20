"""What the pipeline's launcher decides without any process: placement, micro-batches, who hangs, what to say."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest
import ray

from app.beat import Beat
from app.config import Config
from app.config_file import load_config
from app.errors import NonFiniteError, UserError
from app.launchers.hangs import Sign, Silence, moved, stuck
from app.launchers.pipeline import placement, resources_of_stages
from app.launchers.restart import WorkerLost, first_cause
from app.prepare import default_micro_batch_size, prepare, read_task
from app.schedule_picture import draw, text
from app.stage_profile import chrome_trace, figures
from cluster.connect import Cluster
from strategies.compose import LayoutError, ParallelDims
from strategies.pipeline.schedules import make
from strategies.pipeline.simulate import Span, Times, bubble, simulate
from tests.running import trireme

ONE = {"CPU": 1.0}
INTERLEAVED = ["parallel.pp=2", "parallel.schedule=interleaved_1f1b", "parallel.chunks=2", "train.micro_batch_size=6"]


def config(*more: str) -> Config:
    return load_config([], ["task=tests.chain:Chain", "train.steps=5", "train.global_batch_size=16", *more])


def cluster(**largest: float) -> Cluster:
    return Cluster("", 2, {k: 2 * v for k, v in largest.items()}, largest, MappingProxyType({}), False)


@pytest.mark.parametrize(
    ("dims", "cpus", "bundles", "bundle_of_rank", "strategy"),
    [
        # a copy fits on a node: its stages together, the copies apart
        (ParallelDims(dp_replicate=2, pp=2), 2, [2, 2], [0, 1, 0, 1], "SPREAD"),
        (ParallelDims(pp=4), 4, [4], [0, 0, 0, 0], "SPREAD"),
        # it does not: a stage with its shards together
        (ParallelDims(dp_shard=2, pp=2), 2, [2, 2], [0, 0, 1, 1], "PACK"),
        (ParallelDims(tp=2, pp=2), 3, [2, 2], [0, 0, 1, 1], "PACK"),
        # not even that
        (ParallelDims(tp=2, pp=2), 1, [1, 1, 1, 1], [0, 1, 2, 3], "PACK"),
    ],
)
def test_what_talks_most_is_placed_together(
    dims: ParallelDims, cpus: int, bundles: list[int], bundle_of_rank: list[int], strategy: str
) -> None:
    found = placement(dims, [ONE] * dims.pp, {"CPU": cpus})
    assert [bundle["CPU"] for bundle in found.bundles] == bundles
    assert (found.bundle_of_rank, found.strategy) == (bundle_of_rank, strategy)


def test_unlike_stages_get_what_they_ask_for() -> None:
    asked = config("parallel.stage_resources=[{big: 1}, {small: 2, CPU: 0.5}]")
    stages = resources_of_stages(asked, ParallelDims(pp=2, dp_replicate=2), ONE, cluster(CPU=4, big=1, small=2))
    assert stages == [{"CPU": 1.0, "big": 1.0}, {"CPU": 0.5, "small": 2.0}]
    chosen = placement(ParallelDims(pp=2, dp_replicate=2), stages, {"CPU": 4, "big": 1, "small": 2})
    assert chosen.bundles == [{"CPU": 1.5, "big": 1.0, "small": 2.0}] * 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("[{CPU: 1}]", "has 1 entries, but there are 2 stages"),
        ("[{CPU: 1}, {CPU: 9}]", "9 CPU for each worker of stage 1, but no node of this cluster has more than 4"),
        ("[{CPU: 1}, {A100: 1}]", "1 A100 for each worker of stage 1, but no node of this cluster has more than 0"),
        ("[{GPU: 1}, {CPU: 1}]", "GPUs to some stages and none to others"),
        ("[{CPU: 3}, {CPU: 3}]", "12 CPU in all, but this cluster has 8"),
    ],
)
def test_resources_that_cannot_be_given(asked: str, said: str) -> None:
    wanted = config(f"parallel.stage_resources={asked}")
    with pytest.raises(UserError, match=said):
        resources_of_stages(wanted, ParallelDims(pp=2, dp_replicate=2), ONE, cluster(CPU=4, GPU=1))


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


def test_bad_input_through_the_command_line() -> None:
    common = ["train", "task=tests.chain:Chain", "train.steps=5", "run.name=x", "strategy=pipeline", "parallel.pp=2"]
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
    assert moved({0: sign(ticks=1, doing="evaluating")}, {0: sign(ticks=2, doing="evaluating")})


@pytest.mark.parametrize(
    ("signs", "lasted", "rank", "why"),
    [
        ([sign(waits=True), None], 1, 1, "does not answer"),
        ([sign(waits=True), sign()], 9, None, ""),
        ([sign(waits=True), sign()], 10, 1, "has been training after step 7"),
        ([sign(8, waits=True), sign(7, waits=True)], 10, 1, "step 7"),
        ([sign(waits=True, doing="evaluating"), sign(doing="evaluating")], 59, None, ""),
        ([sign(waits=True, doing="evaluating"), sign(doing="evaluating")], 60, 1, "has been evaluating"),
        ([sign(doing="saving")] * 2, 1000, None, ""),  # a slow storage
        ([sign(doing="saving")] * 2, 1800, 0, "has been saving"),
    ],
)
def test_who_holds_the_others_up(signs: list[Sign | None], lasted: float, rank: int | None, why: str) -> None:
    found = stuck(dict(enumerate(signs)), lasted, limit=10)
    if rank is None:
        assert found is None
    else:
        assert found is not None and found[0] == rank and why in found[1]


def test_a_silence_is_judged_by_those_before_it() -> None:
    silence = Silence(least=2.0, since=0.0)
    assert not silence.suspicious(1500.0), "loading and compiling take as long as they take"
    silence.heard(1500.0)
    assert silence.suspicious(1502.5)
    silence.heard(1503.0)  # a gap of 3 s is usual now
    assert not silence.suspicious(1503.0 + 15.0)
    assert silence.suspicious(1503.0 + 15.1)
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
