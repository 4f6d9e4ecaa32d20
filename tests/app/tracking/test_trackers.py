"""Trackers beside MLflow: found by name, fed with the same points once, and never waited for."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.config.io import load_config
from app.errors import UserError
from app.tracking import trackers
from app.tracking.feed import Feed, problems
from app.tracking.settings import Settings
from app.tracking.spool import Spool, State, look_at_lock, write_json
from app.tracking.tensorboard import TensorBoard
from app.tracking.tracker import Tracker, sync
from app.tracking.trackers import TrackedRun, find_tracker
from tests.app.tracking.kit import Store
from tests.running import (
    POINTS,
    committed,
    curve,
    end_tree,
    environment,
    invoke,
    seed,
    start,
    wait_until,
)

RECORDER = """
import json, pathlib

class Recorder:
    def start(self, run):
        self.file = run.folder / "recorded.jsonl"
        self.write("start", run.name, run.resumed, run.params.get("train.steps"))
    def log(self, step, values, time):
        self.write("log", step, values)
    def finish(self, status):
        self.write("finish", status)
    def write(self, *words):
        with self.file.open("a") as file:
            file.write(json.dumps(words) + "\\n")

class Slow(Recorder):
    def log(self, step, values, time):
        import time
        time.sleep(300)

class Broken(Recorder):
    def log(self, step, values, time):
        raise SystemExit("the disk of the tracker is full")

class Unstartable(Recorder):
    def start(self, run):
        raise ValueError("no such server")

class Half:
    def start(self, run): ...
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path with trackers, and with a distribution that registers one."""
    folder = tmp_path / "modules"
    information = folder / "recorders-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: recorders\nVersion: 1.0\n")
    entry = "[trireme.trackers]\nrecorder = recorders_of_test:Recorder\n"
    (information / "entry_points.txt").write_text(entry)
    (folder / "recorders_of_test.py").write_text(RECORDER)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def recorded(folder: Path) -> list[list[Any]]:
    """What a recorder has been told about the run in a folder."""
    return [json.loads(line) for line in (folder / "recorded.jsonl").read_text().splitlines()]


def scalars(run: Path, metric: str) -> list[tuple[int, float]]:
    """What TensorBoard reads of a metric in a run's folder."""
    # By default it keeps ten of a metric's points.
    read = EventAccumulator(str(run / "tensorboard"), {"tensors": 0}).Reload()
    return [(each.step, each.tensor_proto.float_val[0]) for each in read.Tensors(metric)]


# --- names ----------------------------------------------------------------------------------------


def test_a_tracker_is_found_by_its_name_its_entry_point_or_its_class() -> None:
    assert find_tracker("tensorboard") is TensorBoard
    assert find_tracker("recorder") is find_tracker("recorders_of_test:Recorder")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensorbord", ["did you mean 'tensorboard'", "write tensorboard, recorder or"]),
        ("recorders_of_test:Half", ["start, log, finish", "log, finish is missing"]),
        ("recorders_of_test:Nobody", ["does not import", "Nobody"]),
        ("nowhere_at_all:Recorder", ["does not import", "nowhere_at_all"]),
    ],
)
def test_a_wrong_name_is_refused_with_what_is_installed(name: str, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        find_tracker(name)
    assert all(word in str(refused.value) for word in [*words, "tracking.also"])


def test_a_missing_package_is_named_and_trackers_need_tracking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(trackers.NEEDS, "tensorboard", "package_that_is_missing")
    with pytest.raises(UserError, match="pip install 'trireme"):
        find_tracker("tensorboard")
    with pytest.raises(UserError, match=r"tracking\.enabled is false"):
        load_config([], ["tracking.also=[recorder]", "tracking.enabled=false"])


# --- feeding --------------------------------------------------------------------------------------


def spooled(folder: Path, *events: dict[str, Any]) -> None:
    """Append events to the spool of a run."""
    spool = Spool(folder)
    write_json(folder / "start.json", {"run_name": "r", "run_uid": "u"})
    for event in events:
        spool.append({"time": 1000.5, **event})
    spool.close()


def metrics(step: int | None, time: float = 1000.5, **values: float) -> dict[str, Any]:
    return {"type": "metrics", "step": step, "time": time, "values": values}


def test_a_tracker_gets_each_point_once_also_after_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "tracking"
    name = "recorders_of_test:Recorder"
    params = {"type": "params", "values": {"train.steps": "9"}}
    spooled(folder, {"type": "start"}, params, metrics(1, loss=3.0), metrics(2, loss=2.0))
    Feed(folder, name, "first").deliver()
    system = metrics(None, time=1003.9, cpu=5.0)
    spooled(folder, {"type": "start"}, metrics(2, loss=2.0, lr=1.0), metrics(3, loss=1.0), system)
    spooled(folder, {"type": "finish", "status": "FINISHED"})
    feed = Feed(folder, name, "second")
    feed.deliver()
    assert feed.has_all and not problems(folder)
    assert recorded(tmp_path / "run") == [
        ["start", "r", False, "9"],
        ["log", 1, {"loss": 3.0}],
        ["log", 2, {"loss": 2.0}],
        ["finish", "KILLED"],  # the first driver has died without a finish
        ["start", "r", True, "9"],
        ["log", 2, {"lr": 1.0}],
        ["log", 3, {"loss": 1.0}],
        ["log", 3, {"cpu": 5.0}],
        ["finish", "FINISHED"],
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Broken", ["SystemExit: the disk of the tracker is full"]),
        ("Unstartable", ["ValueError: no such server", "not called again"]),
    ],
)
def test_what_a_tracker_raises_is_reported_and_left_out(
    tmp_path: Path, name: str, words: list[str]
) -> None:
    folder = tmp_path / "run" / "tracking"
    spooled(folder, {"type": "start"}, metrics(1, loss=3.0), {"type": "finish", "status": "FAILED"})
    feed = Feed(folder, f"recorders_of_test:{name}", "first")
    feed.deliver()
    assert feed.has_all == (name == "Broken")
    (problem,) = problems(folder)
    assert all(word in problem for word in [*words, "writer.log"])


def test_a_tracker_that_ends_the_writer_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "tracking"
    spooled(folder, {"type": "start"}, metrics(1, loss=3.0))
    for _ in range(3):
        feed = Feed(folder, "recorders_of_test:Recorder", "first")
        feed.state.tries += 1  # as `deliver` does before it calls the tracker
        feed.save()
    Feed(folder, "recorders_of_test:Recorder", "first").deliver()
    assert not (tmp_path / "run" / "recorded.jsonl").exists()
    assert "it ended the tracking writer 3 times" in problems(folder)[0]
    Feed(folder, "recorders_of_test:Recorder", "the next start").deliver()
    assert not problems(folder) and recorded(tmp_path / "run")[1] == ["log", 1, {"loss": 3.0}]


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    tracker = TensorBoard()
    run = TrackedRun(name="r", uid="u", folder=tmp_path, params={"lr": "1"}, resumed=False)
    tracker.start(run)
    tracker.log(3, {"train/loss": 0.5, "eval/loss": math.nan}, 1000.0)
    tracker.finish("FINISHED")
    assert scalars(tmp_path, "train/loss") == [(3, 0.5)]
    assert math.isnan(scalars(tmp_path, "eval/loss")[0][1])


# --- the writer -----------------------------------------------------------------------------------


def test_a_slow_tracker_is_not_waited_for_and_mlflow_has_everything(tmp_path: Path) -> None:
    seed([f"run.storage={tmp_path}"])
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    also = ("recorders_of_test:Slow", "recorder")
    settings = Settings(uri, "tests", (tmp_path / "mlartifacts").as_uri(), also)
    tracker = Tracker(tmp_path / "run" / "tracking", settings, run_name="r", run_uid="uid-1")
    tracker.start()
    began = time.monotonic()
    for step in range(1, 200):
        tracker.metrics(step, {"loss": 1 / step})
    assert time.monotonic() - began < 1, "nothing waits while training"
    delivery = tracker.finish("FINISHED")
    assert delivery.complete
    (problem,) = delivery.trackers
    assert "recorders_of_test:Slow" in problem and "it is slow" in problem
    logged = [words[1:] for words in recorded(tmp_path / "run") if words[0] == "log"]
    history = Store(uri).history("loss")
    assert [(step, values["loss"]) for step, values in logged] == history and len(history) == 199
    end_tree(State.load(tmp_path / "run" / "tracking").writer or 0)  # it still waits for the other


def test_a_run_is_killed_and_continued_with_the_same_points_as_in_mlflow(
    tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", *POINTS, "launcher=local", f"run.storage={tmp_path}", "run.name=run"]
    words += ["train.steps=60", "train.eval_every=10", "train.log_every=2"]
    words += ["checkpoint.every_steps=10", "tracking.also=[tensorboard,recorder]"]
    env = environment(PYTHONPATH=f"{environment()['PYTHONPATH']}:{modules}")
    brake = tmp_path / "brake"
    brake.touch()
    words += ["task_args.step_seconds=0.2", f"task_args.slow_while={brake}"]
    process = start(words, env=env)
    wait_until(lambda: committed(tmp_path / "run"))
    end_tree(process.pid)
    brake.unlink()
    tracking = tmp_path / "run" / "tracking"
    wait_until(lambda: not look_at_lock(tracking, "writer")[0])
    process.communicate()
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])  # for the writer
    invoke(*words)
    wait_until(lambda: not sync(tracking).trackers)  # on a busy machine they are late
    recorder = recorded(tmp_path / "run")
    assert [each[2] for each in recorder if each[0] == "start"] == [False, True]
    assert [each[1] for each in recorder if each[0] == "finish"] == ["KILLED", "FINISHED"]
    for metric in ("train/loss", "eval/loss"):
        in_mlflow = curve(tmp_path, "run", metric)
        points = scalars(tmp_path / "run", metric)
        assert len(points) == len(in_mlflow) >= 6
        assert dict(points) == pytest.approx(in_mlflow, rel=1e-6), "TensorBoard has float32"
        logged = [each for each in recorder if each[0] == "log" and metric in each[2]]
        assert [(step, values[metric]) for _, step, values in logged] == list(in_mlflow.items())
