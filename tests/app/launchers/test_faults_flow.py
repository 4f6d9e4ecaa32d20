"""The loop around attempts, and the watch over torchrun's store, with stand-ins for workers: no process is started."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from app.checkpoint.errors import CheckpointError
from app.config_io import load_config
from app.errors import Interrupted, RunFailed
from app.heartbeat import Beat
from app.job import Job
from app.launchers import answers, restart, store_watch
from app.launchers.elastic import Elastic
from app.launchers.restart import NoRoom, WorkerLost, until_done
from app.launchers.store_watch import StoreWatch
from app.launchers.whereabouts import Where, Whereabouts
from app.run.driver import Driver
from app.run.prepare import prepare, read_task


class Scene:
    """A driver, an elastic job of four workers on nodes a, b, c and d, and what is said and logged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
        self.said: list[str] = []
        self.tags: dict[str, str] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.nodes = {name: {"CPU": 1.0} for name in "abcd"}
        self.sizes: list[int] = []
        self.reshaped: list[int] = []

        def written() -> Any:
            arguments = ["task=tests.chain:Chain", "train.steps=5", "workers=4", "strategy=ddp", *more]
            return load_config([], [*arguments, "train.global_batch_size=12", "fault.elastic_seconds=0"])

        self.config = written()
        task = read_task(self.config)
        prepared = prepare(self.config, task, 4, devices_per_node=None)
        self.elastic = Elastic(written(), self.config, task, {"CPU": 1.0}, None, prepared)
        self.elastic.reshape = lambda job: self.reshaped.append(job.layout.dims.world_size)
        self.job = Job(self.config, prepared.layout, "/nowhere", "x", "y", 5, "/")
        self.driver: Any = object.__new__(Driver)
        self.driver.__dict__.update(
            whereabouts=Whereabouts(),
            step=0,
            progressed=False,
            lost_at=None,
            first_step_at=None,
            more=None,
            resized=False,
            failures=0,
            rewinds=[],
            stopping=0,
            meter=None,
            cut=None,
            next_cut=None,
            began=time.monotonic(),
            summary={},
            console=SimpleNamespace(say=self.said.append),
            run=SimpleNamespace(local_folder=Path("/nowhere")),
            tracker=SimpleNamespace(
                tags=self.tags.update, metrics=lambda step, values: self.logged.append((step, values))
            ),
        )
        monkeypatch.setattr(
            "app.launchers.elastic.free_by_node",
            lambda excluded: {name: has for name, has in self.nodes.items() if name not in excluded},
        )
        monkeypatch.setattr(restart, "living", lambda node: node in self.nodes)
        monkeypatch.setattr(restart, "_kernel_kills_at", lambda node: 0)
        monkeypatch.setattr(restart, "last_words", lambda log, since: "")

    def go(self, *attempts: Callable[[Scene], dict[int | None, BaseException]]) -> None:
        left = iter(attempts)

        def attempt(job: Job, number: int) -> dict[int | None, BaseException]:
            self.sizes.append(job.layout.dims.world_size)
            self.now = job
            names = [name for name in self.nodes if name not in job.config.cluster.exclude_nodes]
            self.driver.whereabouts.ranks = {
                rank: Where(rank, 100 + rank, f"10.0.0.{rank}", name)
                for rank, name in enumerate(names[: job.layout.dims.world_size])
            }
            return next(left)(self)

        until_done(self.job, self.driver, attempt, self.elastic)


def dies(rank: int, step: int, *, node_goes: str = "") -> Callable[[Scene], dict[int | None, BaseException]]:
    def attempt(scene: Scene) -> dict[int | None, BaseException]:
        scene.driver.step, scene.driver.progressed = step, True
        where = scene.driver.whereabouts.ranks[rank]
        scene.nodes.pop(node_goes, None)
        return {rank: WorkerLost(str(where)), (rank + 1) % 4: RuntimeError("Connection closed by peer")}

    return attempt


def finishes(scene: Scene) -> dict[int | None, BaseException]:
    scene.driver.summary = {"stopped": False, "step": 5}
    return {}


def pauses_for(workers: int, step: int, **nodes: float) -> Callable[[Scene], dict[int | None, BaseException]]:
    def attempt(scene: Scene) -> dict[int | None, BaseException]:
        scene.nodes |= {name: {"CPU": cpus} for name, cpus in nodes.items()}
        scene.driver.step, scene.driver.progressed, scene.driver.more = step, True, workers
        scene.driver.summary = {"stopped": True, "step": step}
        return {}

    return attempt


def test_four_three_two_four_workers_of_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.go(dies(3, 10, node_goes="d"), dies(2, 20, node_goes="c"), pauses_for(4, 30, c=1.0, d=1.0), finishes)
    assert (scene.sizes, scene.reshaped) == ([4, 3, 2, 4], [3, 2, 4])
    assert [values for _, values in scene.logged] == [{"fault/workers": float(n)} for n in (3, 2, 4)]
    assert (
        "worker 3, process 103 on 10.0.0.3, died after step 10 with its node; there is room for 3 of 4" in scene.said[0]
    )
    assert scene.tags["trireme.restarts"] == "2", "growing is no failure"
    assert scene.now.layout == scene.job.layout and scene.now.config is scene.config


def test_a_place_that_does_not_come_back_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, "fault.max_restarts=1")
    scene.elastic.written.fault.elastic_seconds = 1000.0

    def waits_in_vain(scene: Scene) -> dict[int | None, BaseException]:
        scene.elastic.written.fault.elastic_seconds = 0.0  # the time is over
        return {None: NoRoom("no places")}

    scene.go(dies(3, 10, node_goes="d"), waits_in_vain, finishes)
    assert scene.sizes == [4, 4, 3] and scene.driver.failures == 1, "waiting counts for nothing"
    assert "waiting for their places" in scene.said[0] and "worker 3" in scene.said[1], "the cause is what it was"


def test_a_node_that_keeps_failing_gets_no_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.go(dies(1, 10), dies(1, 20), finishes)
    assert scene.sizes == [4, 4, 3] and scene.now.config.cluster.exclude_nodes == ["b"]
    assert scene.tags["trireme.excluded_nodes"] == "b" and "2 failures began at that node" in scene.said[1]


def test_an_excluded_node_is_used_again_when_the_others_go(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.nodes = {name: {"CPU": 4.0} for name in "ab"}

    def b_goes(scene: Scene) -> dict[int | None, BaseException]:
        assert scene.now.config.cluster.exclude_nodes == ["a"]
        return dies(0, 30, node_goes="b")(scene)

    scene.go(dies(0, 10), dies(0, 20), b_goes, finishes)
    assert scene.sizes == [4, 4, 4, 4] and scene.now.config.cluster.exclude_nodes == []
    assert (
        scene.tags["trireme.excluded_nodes"] == "" and "room for 0 of 4 workers; going on with 4 of 4" in scene.said[2]
    )


@pytest.mark.parametrize("raised", [RuntimeError, CheckpointError])
def test_a_death_that_only_its_peers_tell_of_is_one(monkeypatch: pytest.MonkeyPatch, raised: type[Exception]) -> None:
    scene = Scene(monkeypatch)

    def loses_a_peer(scene: Scene) -> dict[int | None, BaseException]:
        return {1: raised("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")}

    scene.go(loses_a_peer, loses_a_peer, finishes)  # an exception before the first step would not be tried again
    assert scene.tags["trireme.last_failure"] == "a worker that worker 1 was connected to died before the first step"
    assert scene.sizes == [4, 4, 4], "worker 1's node is not to blame"


def test_who_it_was_that_peers_lost_is_said_once_ray_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.elastic.written.fault.elastic_seconds = 1000.0

    def loses_a_peer(scene: Scene) -> dict[int | None, BaseException]:
        scene.driver.step, scene.driver.progressed = 20, True
        scene.nodes["d"]["CPU"] = 0.0  # its places are lost, and Ray still takes it for alive
        return {1: RuntimeError("Read error: Connection reset by peer")}

    def waits(scene: Scene) -> dict[int | None, BaseException]:
        scene.driver.whereabouts.ranks = {}  # nobody has begun
        return {None: NoRoom("no places")}

    def waits_in_vain(scene: Scene) -> dict[int | None, BaseException]:
        del scene.nodes["d"]
        scene.elastic.written.fault.elastic_seconds = 0.0
        return waits(scene)

    scene.go(loses_a_peer, waits, waits_in_vain, finishes)
    assert all("a worker that worker 1 was connected to died after step 20" in said for said in scene.said[:2])
    assert "worker 3, process 103 on 10.0.0.3, died after step 20 with its node; there is room for 3" in scene.said[2]
    assert "died after step 20 with its node" in scene.tags["trireme.last_failure"]
    assert scene.sizes == [4, 4, 4, 3] and scene.driver.failures == 1


def test_announced_ends_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, "fault.max_restarts=0")
    scene.driver.whereabouts.announced["d"] = "AWS takes it back"
    scene.go(dies(3, 10, node_goes="d"), finishes)
    assert "as announced (AWS takes it back)" in scene.tags["trireme.last_failure"]
    with pytest.raises(RunFailed, match=r"worker 0.*died after step 20; fault.max_restarts is 0"):
        scene.go(dies(0, 20))


def test_the_users_own_error_at_the_same_step_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(scene: Scene) -> dict[int | None, BaseException]:
        scene.driver.step, scene.driver.progressed = 7, True
        return {0: ValueError("a bug"), 1: RuntimeError("Connection reset by peer")}

    with pytest.raises(RunFailed, match=r"ValueError on worker 0: a bug.*twice at the same step"):
        Scene(monkeypatch).go(raises, raises)


def test_a_stop_that_somebody_asked_for_is_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    def stopped(scene: Scene) -> dict[int | None, BaseException]:
        scene.driver.stopping = 1
        return pauses_for(4, 8)(scene)

    with pytest.raises(Interrupted, match="stopped after step 8"):
        scene.go(stopped)


def test_rewinds_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.driver.step = 17
    for step in (15, 15):
        scene.driver.emit(
            {"type": "start", "resumed_from": step, "steps": 60, "device": "cpu", "parameters": 1, "step": step}
        )
    assert scene.logged[0] == (17, {"fault/rewind_steps": 2.0}) and scene.tags["trireme.rewinds"].startswith("17→15")


# --- torchrun ---------------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: dist.PrefixStore("group", made))
    monkeypatch.setattr(store_watch, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(store_watch, "ANSWER_SECONDS", 0.3)
    return made


def job(config: Any) -> Any:
    return SimpleNamespace(config=config, attempt="x")


def test_a_rank_that_does_not_answer_is_ended(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(store_watch, "kill", ended.append)
    monkeypatch.setattr(store_watch.os, "getpid", lambda: 4711)
    texts: list[str] = []
    driver: Any = SimpleNamespace(
        step=3,
        tracker=SimpleNamespace(text=lambda text, path: texts.append(text), tags=lambda tags: None),
        console=SimpleNamespace(say=texts.append),
    )
    config = load_config([], ["task=tests.tasks:Points", "fault.hang_seconds=0.3"])
    answers.NOW.begin(SimpleNamespace(beat=Beat("training", 3, 3)))
    ranks = [StoreWatch(job(config), rank, 3, driver if rank == 0 else None) for rank in range(3)]
    try:
        for _ in range(3):
            ranks[0].heard()
            time.sleep(0.02)
        ranks[2].over.set()  # its threads stand still
        until = time.monotonic() + 10
        while not ended and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        for rank in ranks:
            rank.close()
        answers.NOW.end()
    assert ended == [4711]
    assert "worker 2" in texts[-1] and "does not answer" in texts[-1] and "torchrun --max-restarts" in texts[-1]
    assert "--- worker 0" in texts[0] and texts[0].count("test_faults_flow.py") >= 2, "where the others stand"


def test_the_first_rank_is_watched_too(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(store_watch, "kill", ended.append)
    config = load_config([], ["task=tests.tasks:Points", "fault.hang_seconds=0.05"])
    driver: Any = SimpleNamespace(step=0)
    ranks = [StoreWatch(job(config), rank, 2, driver if rank == 0 else None) for rank in range(2)]
    ranks[1].patience = 0.5  # instead of 20 s
    time.sleep(0.3)
    assert not ended
    ranks[0].over.set()
    until = time.monotonic() + 10
    while not ended and time.monotonic() < until:
        time.sleep(0.02)
    for rank in ranks:
        rank.close()
    assert ended


def test_nothing_is_watched_where_nothing_can_hang(store: Any) -> None:
    config = load_config([], ["task=tests.tasks:Points", "fault.hang_seconds=0"])
    assert StoreWatch(job(config), 0, 2, None).threads == []
    assert StoreWatch(job(load_config([], ["task=tests.tasks:Points"])), 0, 1, None).threads == [], "one process alone"
