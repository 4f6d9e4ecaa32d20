"""Tracking against a real MLflow in a SQLite database: what arrives, and that deaths lose and double nothing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.tracking.spool import State
from app.tracking.tracker import Tracker, sync
from tests.app.tracking.test_tracking_kit import Store, alive, kill, new_database, python, tracker, wait_until

pytestmark = pytest.mark.alone

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from app.tasks.base import Task

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

class Toy(Task):
    def __init__(self, *, width: int = 3, token: str = "") -> None:
        self.width = width
        assert token == "sesame"

    def build_model(self):
        return Net(self.width)

    def train_data(self):
        return TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))

    def loss(self, model, batch):
        return model(batch[0]).sum()
"""

LOAD = """
import sys

class Nothing:  # only mlflow, torch and what they need
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "omegaconf", "fsspec"):
            raise ImportError(name)

sys.meta_path.insert(0, Nothing())
import mlflow, torch
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pytorch.load_model(f"runs:/{sys.argv[2]}/model")
print(type(model).__name__, sys.modules[type(model).__module__].__file__)
print(model(torch.ones(1, 4)).tolist())
info = mlflow.models.get_model_info(f"runs:/{sys.argv[2]}/model")
signature = info.signature
print(signature.inputs.inputs[0].shape, signature.outputs.inputs[0].shape, bool(info.saved_input_example_info))
"""

DRIVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tests.app.tracking.test_tracking_kit import tracker
tracker = tracker(Path(sys.argv[1]), sys.argv[2], run_uid=sys.argv[4])
tracker.start()
for step in range(int(sys.argv[5]), int(sys.argv[6])):
    tracker.metrics(step, {"loss": 1 / (step + 1)})
print("ready", flush=True)
time.sleep(60)
"""

HOLD = """
import sys, time
from pathlib import Path
from app.tracking.spool import take_lock
assert take_lock(Path(sys.argv[1]), "writer") is not None
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that the writers of two runs found missing at the same moment."""
    folder = tmp_path_factory.mktemp("template")
    uri = f"sqlite:///{folder / 'deep' / 'mlflow.db'}"
    runs = [tracker(folder / f"spool-{number}", uri, run_uid=f"uid-{number}") for number in (8, 9)]
    for run in runs:
        run.start()
        run.metrics(0, {"loss": 1.0})
    deliveries = [run.finish("FINISHED", timeout=60) for run in runs]
    assert all(delivery.complete for delivery in deliveries), (runs[0].folder / "writer.log").read_text()
    return folder / "deep" / "mlflow.db"


@pytest.fixture
def uri(template: Path, tmp_path: Path) -> str:
    return new_database(template, tmp_path)


def driver(folder: Path, uri: str, first: int, last: int, uid: str = "uid-1") -> subprocess.Popen[str]:
    """A driver process that logs the steps, says so, and sleeps until it is killed."""
    process = python(DRIVER, folder, uri, Path(__file__).parent, uid, first, last)
    assert process.stdout and process.stdout.readline() == "ready\n", process.communicate()
    return process


def test_a_run_and_its_continuation_are_one_run(uri: str, tmp_path: Path) -> None:
    store, folder = Store(uri), tmp_path / "spool"
    (tmp_path / "figure.txt").write_text("small")
    (tmp_path / "tree" / "leaf").mkdir(parents=True)
    (tmp_path / "tree" / "leaf" / "a").write_text("a")
    first = tracker(folder, uri, tags={"mlflow.parentRunId": "p"})
    first.start()
    begun = time.time()
    first.params({"lr": 0.1, "task.hf_token": "sesame", "task.bad key!": 1, **{f"p{n}": n for n in range(150)}})
    first.tags({"color": "green", "long": "x" * 9000})
    first.artifact(tmp_path / "figure.txt", "plots")
    first.artifact(tmp_path / "tree")
    first.artifact(tmp_path / "missing")
    first.text("lr: 0.1\n", "config.yaml")
    for nonsense in ({"type": "params", "values": 3}, {"type": "artifact"}, {"type": "unknown"}):
        first.emit(nonsense)
    for step in range(1500):
        first.metrics(step, {"loss": 1 / (step + 1), "bad(key)": 2.0})
    first.metrics(1500, {"nan": math.nan, "up": math.inf, "down": -math.inf})
    first.emit({"type": "metrics", "step": None, "time": begun + 7.4, "values": {"system/n/cpu": 5.0}})
    delivery = first.finish("FAILED", message="one sentence", timeout=20)
    assert delivery.complete and delivery.problem == ""
    assert delivery.run_id == State.load(folder).run_id == store.run() and delivery.run_id in delivery.url
    assert store.status() == "FAILED" and abs(store.end_seconds() - time.time()) < 30
    assert store.history("loss") == [(step, 1 / (step + 1)) for step in range(1500)]
    assert store.steps("bad_key_") == list(range(1500))
    assert (
        store.history("nan") == [(1500, None)]
        and store.history("down")[0][1] < -1e308 < 1e308 < store.history("up")[0][1]
    )
    assert store.steps("system/n/cpu") == [7]
    assert (
        store.params()["task.hf_token"] == "***"
        and store.params()["task.bad key_"] == "1"
        and store.params()["p149"] == "149"
    )
    tags = store.tags()
    assert (tags["color"], tags["trireme.message"], tags["mlflow.parentRunId"]) == ("green", "one sentence", "p")
    assert len(tags["long"]) == 5000 and tags["mlflow.runName"] == "a-run"
    assert store.query("select user_id from runs where run_uuid = ?", store.run())[0][0] == tags["mlflow.user"]
    files = {str(p.relative_to(store.artifacts())): p.read_text() for p in store.artifacts().rglob("*") if p.is_file()}
    assert files == {"plots/figure.txt": "small", "tree/leaf/a": "a", "config.yaml": "lr: 0.1\n"}
    assert "missing is no longer there" in (folder / "writer.log").read_text()

    again = tracker(folder, uri)
    again.start()
    wait_until(lambda: store.status() == "RUNNING")
    again.params({"lr": 0.2, "p0": 0})
    for step in range(1400, 1600):  # from the last checkpoint
        again.metrics(step, {"loss": 1 / (step + 1)})
    assert again.finish("FINISHED", timeout=20).complete
    assert store.status() == "FINISHED"
    assert store.history("loss") == [(step, 1 / (step + 1)) for step in range(1600)]
    assert store.params()["lr"] == "0.1" and store.tags()["trireme.param.lr"] == "0.2"
    assert "trireme.param.p0" not in store.tags()


def test_a_killed_driver_ends_as_killed_and_a_new_one_continues(uri: str, tmp_path: Path) -> None:
    store, folder = Store(uri), tmp_path / "spool"
    process = driver(folder, uri, 0, 3000)
    said = time.time()  # its last word; that the writer is at work takes until it has imported MLflow
    writer = wait_until(lambda: State.load(folder).writer)
    wait_until(lambda: not psutil.Process(process.pid).children(recursive=True))  # whom `ray job stop` would kill
    kill(process.pid)
    process.wait()
    wait_until(lambda: store.runs() and store.status() == "KILLED")
    assert store.steps("loss") == list(range(3000)) and abs(store.end_seconds() - said) < 5
    wait_until(lambda: not alive(writer))
    # Torn by the kill, then continued by a driver that is killed as well, while a third has already begun.
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"type":"metr')
    second = driver(folder, uri, 2900, 3100)
    kill(second.pid)
    second.wait()
    third = tracker(folder, uri)
    third.start()
    for step in range(3050, 3200):
        third.metrics(step, {"loss": 0.5})
    assert third.finish("FINISHED", timeout=20).complete
    assert store.status() == "FINISHED" and store.steps("loss") == list(range(3200))


def test_a_killed_writer_is_replaced_and_every_point_arrives_once(uri: str, tmp_path: Path) -> None:
    store, folder = Store(uri), tmp_path / "spool"
    run = tracker(folder, uri)
    run.start()
    for step in range(3_000):
        run.metrics(step, {f"m{n}": float(step + n) for n in range(10)})
    wait_until(lambda: store.runs() and store.steps("m9"))  # in the middle of its delivery
    kill(State.load(folder).writer)
    delivery = run.finish("FINISHED", timeout=30)
    assert delivery.complete and store.status() == "FINISHED"
    counts = store.query("select count(*), count(distinct key || ' ' || step) from metrics where key like 'm%'")
    assert counts == [(30_000, 30_000)]
    assert store.history("m9") == [(step, step + 9.0) for step in range(3_000)]


def test_two_runs_at_once_make_the_database_once(template: Path) -> None:
    store = Store(f"sqlite:///{template}")
    assert store.steps("loss", "uid-8") == store.steps("loss", "uid-9") == [0]
    assert store.query("select count(*) from experiments where name = 'tests'") == [(1,)]
    location = store.query("select artifact_location from experiments where name = 'tests'")[0][0]
    assert location == (template.parents[1] / "mlartifacts").as_uri()


def test_what_cannot_be_delivered_yet_is_told_and_waits(uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    folder = tmp_path / "spool"
    folder.mkdir()
    other_writer = python(HOLD, folder)
    assert other_writer.stdout and other_writer.stdout.readline() == "ready\n", other_writer.communicate()
    run = tracker(folder, uri)
    run.start()
    run.metrics(3, {"loss": 1.0})
    delivery = run.finish("FINISHED", timeout=1.0)
    assert not delivery.complete and Store(uri).runs() == []
    assert delivery.problem == "another process is delivering this spool"
    kill(other_writer.pid)
    other_writer.wait()
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tests").experiment_id
    client.delete_experiment(experiment)
    delivery = sync(folder, timeout=0.1)
    assert not delivery.complete and delivery.run_id is None
    assert f"mlflow experiments restore --experiment-id {experiment}" in delivery.problem
    client.restore_experiment(experiment)
    assert sync(folder).complete and State.load(folder).problem == ""
    assert Store(uri).status() == "FINISHED" and Store(uri).steps("loss") == [3]
    assert sync(tmp_path / "nothing-here").complete


def test_a_deleted_run_is_filled_anew_and_what_forgot_how_far_it_was_doubles_nothing(uri: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    store, ids = Store(uri), []
    # After the first start a person deletes the run; before the third the state is lost; for the fourth the run has
    # moved to another machine, where there is no spool of it.
    for folder, first, last in (("spool", 0, 20), ("spool", 10, 30), ("spool", 25, 50), ("elsewhere", 40, 60)):
        if first == 25:
            (tmp_path / "spool" / "delivered.json").unlink()
        run = tracker(tmp_path / folder, uri)
        run.start()
        run.params({"lr": 1})
        for step in range(first, last):
            run.metrics(step, {"loss": float(step)})
        delivery = run.finish("FINISHED", timeout=20)
        assert delivery.complete and delivery.run_id
        ids.append(delivery.run_id)
        if first == 0:
            MlflowClient(uri).delete_run(delivery.run_id)
    assert ids[0] != ids[1] == ids[2] == ids[3] == store.run()
    assert store.steps("loss") == list(range(60)) and store.params() == {"lr": "1"}


def test_a_lingering_writer_makes_way_and_sync_delivers_what_the_dead_left(uri: str, tmp_path: Path) -> None:
    folder, nowhere = tmp_path / "spool", "http://127.0.0.1:9"
    first = driver(folder, nowhere, 0, 10)
    lingering = wait_until(lambda: State.load(folder).problem and State.load(folder).writer)
    kill(first.pid)
    first.wait()
    assert alive(lingering)
    second = driver(folder, nowhere, 5, 20)
    wait_until(lambda: (pid := State.load(folder).writer) != lingering and pid)
    wait_until(lambda: not alive(lingering))
    going_on = sync(folder, uri=uri)
    assert not going_on.complete and going_on.problem == "the run is going on, and its own writer delivers it"
    kill(second.pid)
    second.wait()
    assert sync(folder, uri=uri).complete
    assert Store(uri).status() == "KILLED" and Store(uri).steps("loss") == list(range(20))


def test_lost_answers_double_nothing(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow has taken the points, and that it has is never heard of."""
    from mlflow import MlflowClient

    from app.tracking.errors import TransientError
    from app.tracking.uploader import Uploader

    run = tracker(tmp_path / "spool", "http://127.0.0.1:9")
    run.start()
    for step in range(2500):
        run.metrics(step, {"loss": float(step)})
    run.finish("FINISHED", timeout=0.1)
    log_batch, calls = MlflowClient.log_batch, []

    def lose(self: MlflowClient, *args: Any, **values: Any) -> None:
        log_batch(self, *args, **values)
        calls.append(len(values.get("metrics", ())))
        if "metrics" in values and sum(map(bool, calls)) <= 2:
            raise ConnectionError("reset")

    monkeypatch.setattr(MlflowClient, "log_batch", lose)
    for _ in range(2):
        uploader = Uploader(run.folder, uri)
        with pytest.raises(TransientError, match="reset"):
            uploader.deliver()
        uploader.failed("reset")
    assert not uploader.deliver() and Store(uri).status() == "FINISHED"
    assert Store(uri).steps("loss") == list(range(2500))
    assert sum(calls) == 2500, "points that MLflow already had were sent again"


def test_one_writer_delivers_a_run_and_its_children(uri: str, tmp_path: Path) -> None:
    """As of a sweep: children come and go, and only spool; one is killed."""
    store, parent = Store(uri), tracker(tmp_path / "tracking", uri)
    parent.start()
    children: list[Tracker] = []
    for number in range(2):
        child = tracker(tmp_path / f"t{number}" / "tracking", uri, run_uid=f"child-{number}", parent=parent.folder)
        child.start()
        child.metrics(1, {"loss": float(number)})
        children.append(child)
    delivery = children[0].finish("FAILED", message="diverged")
    assert delivery.complete and not (children[0].folder / "writer.log").exists()
    wait_until(lambda: store.runs("child-0") and store.status("child-0") == "FAILED")
    wait_until(lambda: store.runs("child-1") and store.steps("loss", "child-1") == [1])
    assert store.status("child-1") == "RUNNING"
    os.close(children[1]._driver or -1)  # as the kernel does for a process that was killed
    wait_until(lambda: store.status("child-1") == "KILLED")
    parent.metrics(7, {"best": 0.5})
    assert parent.finish("FINISHED", timeout=20).complete and store.steps("best") == [7]
    sql = "select count(*) from tags where key = 'mlflow.parentRunId' and value = ?"
    assert store.query(sql, store.run()) == [(2,)]


def test_the_model_loads_where_there_is_only_mlflow_and_torch(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    (tmp_path / "code" / "toys").mkdir(parents=True)
    (tmp_path / "code" / "toys" / "tracked.py").write_text(TASK)
    (tmp_path / "code" / "toys" / "deadly.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    from app.tasks import load_task

    model = load_task("toys.tracked:Toy", {"width": 5, "token": "sesame"}).build_model()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    recipe = {"task": "toys.tracked:Toy", "weights": str(tmp_path / "weights.pt")}
    run = tracker(tmp_path / "spool", uri)
    run.start()
    run.params({"width": 5})
    run.metrics(7, {"eval/loss": 0.25})
    run.model(recipe | {"task_args": {"width": 5, "token": "sesame"}, "metrics": {"eval/loss": 0.25}})
    run.model(recipe | {"task_args": {"width": 6, "token": "sesame"}})  # does not fit its weights
    run.model({"task": "toys.deadly:Task", "task_args": {}, "weights": "none.pt"})  # as one that fills the memory
    delivery = run.finish("FINISHED", timeout=20)
    assert delivery.complete and Store(uri).status() == "FINISHED"
    assert "ended the writer, 3 times" in Store(uri).tags()["trireme.model_error"]
    assert "size mismatch" in (run.folder / "writer.log").read_text()
    assert not [path for path in run.folder.rglob("*") if path.is_file() and b"sesame" in path.read_bytes()]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, uri, delivery.run_id], cwd="/", env=environment, capture_output=True, text=True
    )
    assert loaded.returncode == 0, loaded.stderr
    lines = loaded.stdout.splitlines()
    assert lines[0].startswith("Net /tmp") and str(tmp_path / "code") not in lines[0], loaded.stderr
    assert lines[1] == str(model(torch.ones(1, 4)).tolist())
    assert lines[2] == "(-1, 4) (-1, 2) True"
    assert Store(uri).steps("eval/loss") == [7]
    models = Store(uri).query("select status, artifact_location from logged_models where name = 'model'")
    folder = Path(models[0][1].removeprefix("file://"))
    pins = (folder / "requirements.txt").read_text().split()
    assert f"torch=={torch.__version__.split('+')[0]}" in pins and any(pin.startswith("mlflow==3.") for pin in pins)
    assert (folder / "code" / "toys" / "tracked.py").exists() and not list(folder.rglob("worker.py"))
    assert Store(uri).query("select metric_name, metric_value from logged_model_metrics") == [("eval/loss", 0.25)]
