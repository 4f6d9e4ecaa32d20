"""The supervisor, and how many workers it continues with. Workers and nodes are fakes."""

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from app.config import Config
from app.config.io import with_values
from app.errors import RunFailed, UserError
from app.launchers.elastic import Elastic, limits_of, room_by_node
from app.launchers.failure_policy import Limits
from app.launchers.follow import Move, PlanFollower
from app.launchers.followed import followed_layout
from app.launchers.recovery import Nodes
from app.launchers.supervisor import Supervisor
from app.launchers.workers import Failures, Poll, Status, WorkerLost
from app.planner.auto import alternatives
from app.planner.corrections import planned_parts
from app.run.driver import Driver
from app.run.prepare import Prepared, prepare, read_task
from app.storage.storage import Storage
from app.tracking.settings import resolve_tracking
from app.training.events import (
    Event,
    StepParts,
    StepPartsMeasured,
    StepsDone,
    TrainingDone,
    TrainingStarted,
    WorkerInfo,
    WorkerStarted,
)
from app.training.job import Job
from cluster import ClusterError
from tests.chain import config

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("models_read_once")]

Free = Callable[[Sequence[str]], Mapping[str, Mapping[str, float]]]


prepared_before: dict[str, Prepared] = {}
"""Runs of a given layout by their configuration: a preparation takes a second, mostly a step."""


def prepare_once(config: Config, *, workers: int, **others: Any) -> Prepared:
    """A run, prepared; that of a layout which the planner chooses anew each time."""
    if config.strategy == "auto":
        return prepare(config, workers=workers, devices_per_node=None, **others)
    key = f"{config} {workers} {others.get('requirement')}"
    if key not in prepared_before:
        prepared_before[key] = prepare(config, workers=workers, devices_per_node=None, **others)
    return prepared_before[key]


def elastic(*overrides: str, free: Free = lambda excluded: {}, workers: int = 4) -> Elastic:
    """An `Elastic` for workers with one CPU each; `free` tells the free resources by node."""
    run_config = config(
        f"workers={workers}", "train.global_batch_size=12", "tracking.enabled=false", *overrides
    )
    prepare_for = functools.partial(prepare_once, task=read_task(run_config))
    return Elastic(
        config=run_config,
        first=prepare_for(run_config, workers=workers),
        per_worker={"CPU": 1.0},
        prepare=lambda config, workers, requirement: prepare_for(
            config, workers=workers, requirement=requirement
        ),
        free=free,
    )


class Scene:
    """A run of four workers on nodes a, b, c and d, which plays one attempt after another.

    It is the supervisor's `Workers` itself.
    """

    restartable = True
    kill = stop = mock.Mock()

    def __init__(
        self,
        cpus_by_node: Mapping[str, float] = dict.fromkeys("abcd", 1.0),
        strategy: str = "ddp",
        keys: Sequence[str] = (),
        workers: int = 4,
        **fault_options: float,
    ) -> None:
        self.nodes = {name: {"CPU": cpu} for name, cpu in cpus_by_node.items()}
        self.late_rank = -1
        """A rank that does not begin; -1: all do."""
        overrides = [
            f"fault.{key}={value}"
            for key, value in ({"elastic_seconds": 0.0} | fault_options).items()
        ]
        self.elastic = elastic(
            f"strategy={strategy}", *overrides, *keys, free=self.free, workers=workers
        )
        self.events: list[Event] = []
        """What the workers say at the next poll."""
        first = self.elastic.first
        self.job = Job(
            config=first.config,
            layout=first.layout,
            folder="/nowhere",
            attempt="x",
            run_uid="y",
            steps=5,
            cwd="/",
        )
        run = mock.Mock(local_folder=Path("/nowhere"), storage=None, **{"lease.successor": None})
        settings = resolve_tracking(first.config.tracking, "/nowhere")
        self.messages: list[str] = []
        self.tags: dict[str, str] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        tracker = mock.Mock(tags=self.tags.update)
        tracker.metrics = lambda step, values, time=None: self.logged.append((step, values))
        self.driver = Driver(
            run, first.config, mock.Mock(say=self.messages.append), settings, tracker=tracker
        )
        self.driver.progress = mock.Mock()
        nodes = Nodes(lost=lambda nodes: set(nodes) - self.nodes.keys(), oom_kills=lambda node: 0)
        self.supervisor = Supervisor(self, self.driver, self.elastic, nodes=nodes)  # type: ignore[arg-type]

    def go(self, *attempts: Any) -> list[int]:
        """Trains through these attempts, and returns the number of workers of each."""
        self.left = iter(attempts)
        self.sizes = list[int]()
        self.supervisor.run(self.job)
        return self.sizes

    def free(self, excluded: Sequence[str]) -> dict[str, dict[str, float]]:
        return {name: has for name, has in self.nodes.items() if name not in excluded}

    def steps(self, step: int) -> None:
        """Reports to the driver that the run has reached this step."""
        self.driver.handle(self.steps_done(step))

    def steps_done(self, step: int, *, batch: int = 0, samples: int = 0) -> StepsDone:
        """That the run has reached this step, with a batch and the samples seen."""
        return StepsDone(
            step=step,
            steps=60,
            loss=None,
            loss_step=0,
            rate=1.0,
            unit="samples",
            gpus=0,
            mfu=None,
            seconds_left=1.0,
            seconds_per_step=0.1,
            memory_bytes=0,
            global_batch_size=batch,
            samples_seen=samples,
        )

    # --- Workers ----------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        self.now = job
        self.sizes.append(job.layout.dims.world_size)
        places = ([*self.free(job.excluded_nodes)] * 4)[: self.sizes[-1]]
        self.infos = [
            WorkerInfo(rank=rank, pid=100 + rank, ip=f"10.0.0.{rank}", node=name, oom_kills=0)
            for rank, name in enumerate(places)
        ]
        self.attempt = next(self.left)
        self.begun = False

    def poll(self, stop: bool) -> Poll:
        if not self.begun and self.attempt is not finds_no_place:
            self.begun = True
            status = Status(phase="training", step=0, ticks=0, waiting=True)
            begun = [info for info in self.infos if info.rank != self.late_rank]
            statuses = {info.rank: status for info in begun}
            events: list[Event] = [WorkerStarted(info=info) for info in begun]
            return Poll(events=events, statuses=statuses, placed=True)
        ended = self.attempt(self)
        events = self.events
        self.events = []
        return Poll(events=events, ended=ended, placed=self.begun)


Attempt = Callable[[Scene], Failures | None]
"""Plays an attempt while the workers run, and returns the failures that end it."""


def dies(step: int, *, on: str, goes: bool = False) -> Attempt:
    """An attempt in which a worker on this node dies, and its neighbour loses the connection.

    With `goes` the node goes too.
    """

    def attempt(scene: Scene) -> Failures:
        scene.steps(step)
        rank = next(info.rank for info in scene.infos if info.node == on)
        if goes:
            del scene.nodes[on]
        return {rank: WorkerLost(), (rank + 1) % 4: RuntimeError("Connection closed by peer")}

    return attempt


def fills_the_gpu(scene: Scene) -> Failures:
    """An attempt in which a GPU's memory is full before the first step."""
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return {0: RuntimeError("Connection closed by peer"), 1: full}


def finds_no_place(scene: Scene) -> Failures | None:
    return None


def finishes(scene: Scene) -> Failures:
    scene.driver.handle(TrainingDone(summary={"stopped": False, "step": 5}))
    return {}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.launchers.elastic.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("app.launchers.elastic.STEADY_SECONDS", 0.0)
    monkeypatch.setattr(Supervisor, "_pause", lambda self, seconds: None)


def test_a_run_shrinks_when_nodes_go_and_grows_when_they_return() -> None:
    def pauses_for_more(scene: Scene) -> Failures | None:
        """Two nodes come back; once the supervisor has noticed, the workers pause."""
        scene.nodes |= {name: {"CPU": 1.0} for name in "cd"}
        scene.steps(30)
        scene.driver.handle(TrainingDone(summary={"stopped": True, "step": 30}))
        return None if scene.supervisor.larger_size is None else {}

    scene = Scene()
    d_goes = dies(10, on="d", goes=True)
    c_goes = dies(8, on="c", goes=True)
    assert scene.go(d_goes, c_goes, pauses_for_more, finishes) == [4, 3, 2, 4]
    sizes = {
        step: values["fault/workers"] for step, values in scene.logged if "fault/workers" in values
    }
    in_order = [sizes[step] for step in sorted(sizes)]
    assert in_order == [3.0, 2.0, 4.0], "logged at rising steps, also after a rewind"
    message = "worker 3, process 103 on 10.0.0.3, died after step 10 with its node"
    assert f"{message}; there is room for 3 of 4" in scene.messages[0]
    assert scene.tags["trireme.restarts"] == "2", "growing is no failure"
    assert scene.driver.metrics._values["restarts"] == 2
    assert scene.now.layout == scene.job.layout


@pytest.mark.parametrize(
    ("plays", "ends"),
    [([finds_no_place], True), ([dies(10, on="d"), finds_no_place], False)],
    ids=["at the start", "after a failure"],
)
def test_workers_without_places_say_why_and_a_start_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, plays: list[Attempt], ends: bool
) -> None:
    """As the stages of a pipeline do that ask for resources of their own."""
    monkeypatch.setattr("app.launchers.supervisor.PENDING_SECONDS", 0.0)
    scene = Scene(keys=["cluster.wait_seconds=0.05"])
    sentences = iter(["", "bundle 2 is held by job 1"])
    supervisor = scene.supervisor
    supervisor.elastic = None
    supervisor.nodes = Nodes(
        oom_kills=lambda node: 0, pending=lambda excluded: next(sentences, "bundle 2 is held")
    )
    asked: list[int] = []

    def stops() -> bool:
        asked.append(1)
        time.sleep(0.001)
        if len(asked) > 300:
            raise TimeoutError
        return False

    monkeypatch.setattr(scene.driver, "stop_requested", stops)
    with pytest.raises(ClusterError if ends else TimeoutError) as caught:
        scene.go(*plays)
    remarks = [message for message in scene.messages if message.startswith("waiting for resources")]
    expected = "waiting for resources: bundle 2 is held"
    assert remarks == [f"{expected} by job 1", expected]
    if ends:
        waited = "the workers have no places after 0.05 s (cluster.wait_seconds)"
        assert str(caught.value) == f"{waited}: bundle 2 is held"


def growing(*keys: str) -> tuple[Scene, list[int]]:
    """A run of two workers whose batch grows from 2 to 8, and what it asks the cluster for.

    Twice the workers take half the time of a step. A withdrawal is asked for as 0.
    """
    scene = Scene(
        cpus_by_node=dict.fromkeys("ab", 1.0),
        keys=["train.batch_schedule=[[0,2],[40,8]]", "train.steps=60", *keys],
        workers=2,
    )
    asked: list[int] = []

    def request(workers: int, excluded: Sequence[str]) -> Callable[[], object]:
        asked.append(workers)
        return lambda: asked.append(0)

    def step_seconds(prepared: Prepared, batch: int) -> float:
        return batch / prepared.layout.dims.world_size

    scene.elastic.request = request
    scene.elastic.step_seconds = step_seconds
    return scene, asked


def steps_up(scene: Scene) -> Failures | None:
    """The batch has grown; once the supervisor has noticed room for more, the workers pause."""
    if scene.supervisor.last_steps is None:
        scene.events = [
            scene.steps_done(20, batch=2, samples=40),
            scene.steps_done(21, batch=8, samples=48),
        ]
    scene.driver.handle(TrainingDone(summary={"stopped": True, "step": 21}))
    return None if scene.supervisor.larger_size is None else {}


def test_a_run_asks_for_more_workers_when_its_batch_grows_and_uses_them() -> None:
    scene, asked = growing("cluster.max_workers=4", "cluster.wait_seconds=60")

    def they_come(scene: Scene) -> Failures | None:
        if asked:
            scene.nodes |= {name: {"CPU": 1.0} for name in "cd"}
        return steps_up(scene)

    def steps_on(scene: Scene) -> Failures:
        scene.events = [scene.steps_done(23, batch=8, samples=64)]
        return finishes(scene)

    assert scene.go(they_come, steps_on) == [2, 4]
    assert asked == [2, 0], "their places are free before they are used, and none are wanted more"
    assert scene.now.config.train.batches.batches == [2, 8], "which four workers could not share"
    sentence = "with a batch of 8, 4 workers are expected to take 0.2 s per step and 2 0.4 s"
    assert any(sentence in message for message in scene.messages), scene.messages
    assert "there is room for 4 workers; continuing with 4 of 4 workers" in scene.messages[-1]


def test_a_run_whose_batch_has_grown_goes_on_without_workers_that_do_not_come() -> None:
    scene, asked = growing("cluster.max_workers=8", "cluster.wait_seconds=0")
    remaining = 20

    def they_do_not_come(scene: Scene) -> Failures | None:
        nonlocal remaining
        remaining -= 1
        steps_up(scene)
        return None if remaining else finishes(scene)

    assert scene.go(they_do_not_come) == [2]
    assert asked == [6, 0]
    assert scene.elastic.wanted == 2
    sentence = "the 6 workers that were asked for did not come within 0 s: continuing with 2"
    assert any(sentence in message for message in scene.messages), scene.messages


@pytest.mark.parametrize(
    ("key", "batch"),
    [("cluster.max_workers=null", 8), ("cluster.max_workers=2", 8), ("cluster.max_workers=4", 2)],
)
def test_no_more_workers_are_asked_for_without_need(key: str, batch: int) -> None:
    scene, asked = growing(key)

    def goes_on(scene: Scene) -> Failures:
        scene.events = [scene.steps_done(21, batch=batch, samples=48)]
        return finishes(scene)

    assert scene.go(goes_on) == [2]
    assert not asked


def test_auto_takes_a_smaller_layout_when_the_first_step_finds_a_gpu_full() -> None:
    scene = Scene(strategy="auto")
    first = scene.elastic.first.prediction
    assert first is not None
    assert scene.go(fills_the_gpu, dies(2, on="b"), finishes) == [4, 4, 4]
    second = scene.driver.prediction
    assert second is not None and second.memory_bytes < 0.95 * first.memory_bytes
    assert second.candidate.layout == scene.now.layout
    assert scene.now.config.train.micro_batch_size == second.candidate.micro_batch
    sentence, why, _ = scene.messages
    assert sentence == (
        "worker 1, process 101 on 10.0.0.1, ran out of its GPU's memory before the first step; "
        "trying the next layout, which takes less memory"
    )
    assert why.startswith("note: strategy auto is ")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_full_gpu_ends_a_run_where_no_smaller_layout_may_be_taken(strategy: str) -> None:
    scene = Scene(strategy=strategy)
    with pytest.raises(RunFailed, match=r"ran out of its GPU's memory .*: write a smaller"):
        scene.go(*[fills_the_gpu] * 9)
    assert len(scene.sizes) == (1 if strategy == "ddp" else 5)


def test_a_gpu_that_is_full_later_is_tried_again_once() -> None:
    def fills_it_later(scene: Scene) -> Failures:
        scene.steps(7)
        return fills_the_gpu(scene)

    scene = Scene(strategy="auto")
    with pytest.raises(RunFailed, match="memory after step 7, twice at the same step"):
        scene.go(fills_it_later, fills_it_later, finishes)
    assert scene.now.layout == scene.elastic.first.layout


def test_a_run_continues_smaller_when_a_node_does_not_return_in_time() -> None:
    scene = Scene(max_restarts=1, elastic_seconds=0.3)
    sizes = scene.go(dies(10, on="d", goes=True), finds_no_place, finishes)
    assert sizes == [4, 4, 3], "waiting is not counted as a restart"
    assert "waiting for their places" in scene.messages[0]
    assert "worker 3" in scene.messages[1], "the first cause is still named"


def test_an_excluded_node_is_used_again_when_the_other_node_goes() -> None:
    def b_goes(scene: Scene) -> Failures | None:
        assert scene.now.excluded_nodes == ["a"] and scene.tags["trireme.excluded_nodes"] == "a"
        assert "2 failures began at that node" in scene.messages[1]
        return dies(30, on="b", goes=True)(scene)

    scene = Scene({"a": 4.0, "b": 4.0})
    assert scene.go(dies(10, on="a"), dies(20, on="a"), b_goes, finishes) == [4, 4, 4, 4]
    assert scene.now.excluded_nodes == [] and scene.tags["trireme.excluded_nodes"] == ""
    assert "with its node; continuing with 4 of 4" in scene.messages[2]


def test_a_worker_that_does_not_start_in_time_is_a_failure() -> None:
    def waits(scene: Scene) -> Failures | None:
        return None

    scene = Scene(start_seconds=0.2)
    scene.late_rank = 2
    scene.go(waits, finishes)
    assert "worker 2 did not start within 0.2 s" in scene.messages[0]


def test_rewinds_are_logged() -> None:
    scene = Scene()
    scene.steps(17)
    started = TrainingStarted(
        time=1.0, resumed_from=15, step=15, steps=60, device="cpu", parameters=1
    )
    for _ in range(2):
        scene.driver.handle(started)
    assert {"fault/rewind_steps": 2.0} in [values for step, values in scene.logged if step == 17]


# --- a run beside its plan ------------------------------------------------------------------------


@pytest.fixture
def following(tmp_path: Path, own_cache: Path) -> Scene:
    """A run that follows its plan, and has 10 million steps."""
    scene = Scene(strategy="auto")
    config = with_values(scene.elastic.first.config, {"plan.follow": True})
    scene.elastic.config = with_values(scene.elastic.config, {"plan.follow": True})
    scene.job = replace(scene.job, config=config, steps=10**7)
    scene.driver.run.storage = Storage(tmp_path)
    scene.driver.run.manifest.name = "run"
    scene.supervisor.follower = PlanFollower(scene.driver, scene.elastic.first, scene.elastic)
    return scene


def measures(communication: float, then: Failures | None = None) -> Attempt:
    """An attempt whose steps take a second and what communication takes, and that then pauses."""

    def attempt(scene: Scene) -> Failures | None:
        assert scene.now.measures_parts
        scene.steps(20)
        parts = StepParts(computing=1.0, communication=communication)
        event = StepPartsMeasured(step=20, parts=parts)
        scene.supervisor._handle_events(scene.now, Poll(events=[event]))
        scene.driver.handle(TrainingDone(summary={"stopped": True, "step": 25}))
        scene.supervisor.larger_size = None
        return then if then is not None else {}

    return attempt


def finishes_measured(scene: Scene) -> Failures:
    assert not scene.now.measures_parts, "no layout is measured twice"
    return finishes(scene)


@pytest.mark.parametrize("then", [None, pytest.param({2: WorkerLost()}, marks=pytest.mark.slow)])
def test_a_run_moves_to_the_layout_that_is_now_expected_to_be_faster(
    following: Scene, then: Failures | None, tmp_path: Path
) -> None:
    scene = following
    slow = next(
        row
        for row in scene.elastic.first.plan.rows  # type: ignore[union-attr]
        if planned_parts(row.seconds).communication > 0.5 * row.step_seconds
        and row.candidate.checkpointing == "none"
        and row.candidate.dims.pp == 1
    )
    prepared = scene.elastic.take_layout(4, slow.candidate.key)
    assert scene.supervisor.follower is not None
    scene.supervisor.follower.prepared = prepared
    scene.job = replace(scene.job, config=prepared.config, layout=prepared.layout)

    def is_as_fast_as_planned(scene: Scene) -> Failures:
        prediction = scene.driver.prediction
        assert prediction is not None and scene.now.measures_parts
        parts = planned_parts(prediction.seconds)
        event = StepPartsMeasured(step=40, parts=parts)
        scene.supervisor._handle_events(scene.now, Poll(events=[event]))
        return finishes(scene)

    assert scene.go(measures(100.0, then), is_as_fast_as_planned) == [4, 4]
    assert scene.now.layout != prepared.layout and scene.now.layout.dims.world_size == 4
    assert scene.driver.prediction is not None
    assert scene.driver.prediction.candidate.layout == scene.now.layout
    record = json.loads((tmp_path / "plan.json").read_text())
    assert len(record["path"]) == 2 and len(record["seconds"]) == 2
    assert record["key"] == scene.driver.prediction.candidate.key
    assert followed_layout(scene.now.config, Storage(tmp_path)).key == record["key"]
    wrong, moving, *_ = scene.messages
    assert "wrong mostly about communication" in wrong and "are corrected by it" in wrong
    assert moving.startswith("following the plan: ")
    assert scene.tags["trireme.moves"].startswith("after step 20: following the plan")
    logged = {name: value for step, values in scene.logged for name, value in values.items()}
    assert logged["plan/moves"] == 1.0
    at_20 = [values for step, values in scene.logged if step == 20]
    assert {"plan/communication_seconds_measured": 100.0}.items() <= at_20[0].items()


def test_a_layout_that_cannot_train_after_all_is_left_out_and_the_run_goes_on(
    following: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Elastic, workers: int, key: str, stages: tuple[int, ...]) -> None:
        raise UserError("its loss reads weights")

    monkeypatch.setattr(Elastic, "take_layout", refuse)
    scene = following
    before = scene.job.layout

    def wants_to_move(scene: Scene) -> Failures:
        scene.steps(20)
        follower = scene.supervisor.follower
        assert follower is not None and scene.elastic.first.plan is not None
        rows = alternatives(scene.elastic.first.plan, scene.elastic.first.prediction)  # type: ignore[arg-type]
        follower.history.path = ["as it was", "another"]
        key = rows[-1].candidate.key
        scene.supervisor.move = Move(key=key, stages=(), name="another", sentence="")
        follower._moves = ["a move"]
        scene.driver.handle(TrainingDone(summary={"stopped": True, "step": 25}))
        return {}

    assert scene.go(wants_to_move, finishes) == [4, 4]
    assert scene.now.layout == before
    assert (
        "another cannot train this model: its loss reads weights; continuing" in scene.messages[-1]
    )
    assert scene.supervisor.follower is not None
    assert scene.supervisor.follower.history.refused == ["another"]
    assert scene.tags["trireme.moves"] == ""


def test_without_follow_a_run_says_what_was_wrong_and_stays(
    following: Scene, own_cache: Path
) -> None:
    scene = following
    config = with_values(scene.job.config, {"plan.follow": False})
    scene.job = replace(scene.job, config=config)

    def measured(scene: Scene) -> Failures:
        measures(100.0)(scene)
        assert scene.supervisor.move is None
        return finishes(scene)

    assert scene.go(measured) == [4]
    (sentence,) = scene.messages
    assert "outside of the planned" in sentence
    assert "corrections" in (own_cache / "trireme/planner/rates-cpu.json").read_text()


# --- numbers of workers: which make a layout, how many have room, and when to grow ----------------


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        pytest.param(["strategy=ddp"], [0, 1, 2, 3, 4, 4], marks=pytest.mark.slow),
        pytest.param(  # 3 does not divide 16
            ["strategy=fsdp", "train.global_batch_size=16"],
            [0, 1, 2, 2, 4, 4],
            marks=pytest.mark.slow,
        ),
        (["strategy=ddp+pipeline", "parallel.pp=2"], [0, 0, 2, 2, 4, 4]),
        pytest.param(
            ["strategy=ddp", "parallel.dp_replicate=4"],
            [0, 1, 2, 3, 4, 4],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_smaller_run_has_complete_groups_and_the_same_global_batch(
    overrides: list[str], sizes: list[int]
) -> None:
    """`sizes` are the largest runs for 0, 1, 2, … free places."""
    elastic_run = elastic(*overrides)
    assert [elastic_run.largest(count) for count in range(len(sizes))] == sizes
    first = elastic_run.first
    smaller = elastic_run.prepared(max(count for count in sizes if 0 < count < 4))
    assert smaller is not None and smaller.layout.dims.pp == first.layout.dims.pp
    assert smaller.config.train.global_batch_size == first.config.train.global_batch_size
    share = first.config.train.global_batch_size // first.layout.dims.dp
    assert (smaller.config.train.micro_batch_size or share + 1) <= share, "more accumulation"
    assert smaller.steps == first.steps


def test_nodes_that_come_back_one_after_another_cost_one_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.launchers.elastic.STEADY_SECONDS", 3.0)
    nodes: dict[str, Any] = {"a": {"CPU": 2.0}}
    arrivals = {"b": 102, "c": 104}
    elastic_run = elastic("strategy=ddp", free=lambda excluded: nodes)
    growth: dict[int, int | None] = {}
    for second in range(100, 112):
        monkeypatch.setattr("app.launchers.elastic.time.monotonic", lambda time=float(second): time)
        nodes |= {name: {"CPU": 1.0} for name, arrival in arrivals.items() if second >= arrival}
        growth[second] = elastic_run.growth(2)
    expected = dict.fromkeys(range(100, 107)) | dict.fromkeys(range(107, 112), 4)
    assert growth == expected, "the run never grows to 3"


def test_room_is_counted_by_node() -> None:
    nodes = {"a": {"CPU": 1.5, "GPU": 2.0}, "b": {"CPU": 0.9}, "c": {"CPU": 8.0, "GPU": 1.0}}
    assert sorted(room_by_node({"CPU": 0.5}, nodes).values()) == [1, 3, 16]
    assert sorted(room_by_node({"CPU": 1.0, "GPU": 1.0}, nodes).values()) == [0, 1, 1]


def test_a_run_waits_longer_where_an_autoscaler_may_add_nodes() -> None:
    run_config = config("cluster.min_workers=2")
    assert limits_of(run_config) == Limits(3, 30.0, 2)
    assert limits_of(run_config, autoscaling=True) == Limits(3, 600.0, 2)
