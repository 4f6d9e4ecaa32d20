"""Delivery to MLflow, here in a SQLite database: everything arrives, and once.

This holds after any failure, also when drivers and writers are killed and a server starts late.
"""

import importlib
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mlflow import MlflowClient

from app.storage.lease import process_started
from app.tasks import load_task
from app.tasks.base import Task
from app.tracking import uploader
from app.tracking.model import LOADER
from app.tracking.model_files import _origins
from app.tracking.model_format import PICKLING, part_of
from app.tracking.spool import State
from app.tracking.tracker import Tracker, WriterProcess, sync
from app.tracking.writer import claim
from cluster.remote import free_port
from tests.app.tracking.kit import Store, tracker
from tests.running import end_tree, environment, seed, start, wait_until

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from app.tasks.base import Task

class Net(nn.Linear):
    "A class of the user's own."

class Toy(Task):
    def __init__(self, *, width: int = 3, token: str = "") -> None:
        self.width = width
        assert token == "sesame"
    def build_model(self):
        return Net(4, self.width)
    def train_data(self):
        return TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))
    def loss(self, model, batch):
        return model(batch[0]).sum()
"""

LOAD = """
import sys

class Blocker:  # only mlflow, torch and what they need can be imported
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "omegaconf", "fsspec"):
            raise ImportError(name)

# Nor Trireme, which an editable install would find.
finders = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.meta_path[:] = [Blocker(), *finders]
import mlflow, torch
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pytorch.load_model(sys.argv[2])
print(type(model).__name__, sys.modules[type(model).__module__].__file__)
print(model(torch.ones(1, 4)).tolist())
print(mlflow.pyfunc.load_model(sys.argv[2]).predict(torch.ones(1, 4).numpy()).tolist())
info = mlflow.models.get_model_info(sys.argv[2])
inputs, outputs = info.signature.inputs.inputs[0], info.signature.outputs.inputs[0]
print(inputs.shape, outputs.shape, bool(info.saved_input_example_info))
"""

DRIVER = """
import sys, time
from pathlib import Path
from tests.app.tracking.kit import tracker
tracker = tracker(Path(sys.argv[1]), sys.argv[2], run_uid="uid-1")
for step in range(int(sys.argv[3]), int(sys.argv[4])):
    tracker.metrics(step, {"loss": 1 / (step + 1)})
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """The address of an empty database of this test."""
    seed([f"run.storage={tmp_path}"])
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delivers in this process, when `finish` is called, in place of a tracker's writer process."""

    def deliver(self: WriterProcess, timeout: float) -> str:
        claim(self._folder, self.attempt)
        uploader_ = uploader.Uploader(self._folder, self._uri)
        try:
            assert not uploader_.deliver()
        except (uploader.TransientError, uploader.PermanentError) as error:
            uploader_.failed(str(error))
            return str(error)
        return ""

    monkeypatch.setattr(WriterProcess, "keep", lambda self: None)
    monkeypatch.setattr(WriterProcess, "wait", deliver)


def test_a_resumed_run_is_one_run_in_mlflow(
    uri: str, tmp_path: Path, inline: None, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(uri)
    folder = tmp_path / "spool"
    (tmp_path / "figure.txt").write_text("small")
    (tmp_path / "tree" / "leaf").mkdir(parents=True)
    (tmp_path / "tree" / "leaf" / "a").write_text("a")
    first = tracker(folder, uri, tags={"mlflow.parentRunId": "p"})
    start_time = time.time()
    params = {"lr": 0.1, "task.hf_token": "sesame", "task.bad key!": 1}
    first.params(params | {f"p{number}": number for number in range(150)})
    first.tags({"color": "green", "long": "x" * 9000})
    first.artifact(tmp_path / "figure.txt", "plots")
    first.artifact(tmp_path / "tree")
    first.artifact(tmp_path / "missing")
    first.text("lr: 0.1\n", "config.yaml")
    for nonsense in ({"type": "params", "values": 3}, {"type": "artifact"}, {"type": "unknown"}):
        first.emit(nonsense)
    for step in range(1100):
        first.metrics(step, {"loss": 1 / (step + 1), "bad(key)": 2.0})
    first.metrics(1100, {"nan": math.nan, "up": math.inf, "down": -math.inf})
    first.system_metrics({"system/n/cpu": 5.0}, start_time + 7.4)
    delivery = first.finish("FAILED", message="one sentence")
    assert delivery.complete and delivery.problem == ""
    assert delivery.run_id == State.load(folder).run_id == store.run()
    assert delivery.run_id in delivery.url
    assert store.run("status") == "FAILED"
    assert abs(store.run("end_time") / 1000 - time.time()) < 300
    assert store.history("loss") == [(step, 1 / (step + 1)) for step in range(1100)]
    assert store.steps("bad_key_") == list(range(1100))
    assert store.history("nan") == [(1100, None)]
    assert store.history("down")[0][1] < -1e308 < 1e308 < store.history("up")[0][1]
    assert store.steps("system/n/cpu") == [7]
    stored = store.values("params")
    tags = store.values("tags")
    assert (stored["task.hf_token"], stored["task.bad key_"], stored["p149"]) == ("***", "1", "149")
    assert tags["color"] == "green"
    assert tags["trireme.message"] == "one sentence"
    assert tags["mlflow.parentRunId"] == "p"
    assert len(tags["long"]) == 5000 and tags["mlflow.runName"] == "a-run"
    assert store.run("user_id") == tags["mlflow.user"]
    artifacts = tmp_path / "mlartifacts" / delivery.run_id / "artifacts"
    assert store.run("artifact_uri") == artifacts.as_uri()
    paths = [path for path in artifacts.rglob("*") if path.is_file()]
    files = {str(path.relative_to(artifacts)): path.read_text() for path in paths}
    assert files == {"plots/figure.txt": "small", "tree/leaf/a": "a", "config.yaml": "lr: 0.1\n"}
    assert "missing is no longer there" in caplog.text

    resumed = tracker(folder, uri)
    resumed.params({"lr": 0.2, "p0": 0})
    for step in range(1000, 1200):  # from the last checkpoint
        resumed.metrics(step, {"loss": 1 / (step + 1)})
    assert resumed.finish("FINISHED").complete
    assert store.run("status") == "FINISHED"
    assert store.history("loss") == [(step, 1 / (step + 1)) for step in range(1200)]
    assert store.values("params")["lr"] == "0.1"
    assert store.values("tags")["trireme.param.lr"] == "0.2"
    assert "trireme.param.p0" not in store.values("tags")


@pytest.mark.parametrize("other_content", ["", "another's"])
def test_the_first_complete_database_is_kept(
    other_content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow creates a database in many steps and without a lock."""
    file = tmp_path / "deep" / "mlflow.db"

    def make(uri: str) -> None:
        partial_file = Path(uri.removeprefix("sqlite:///"))
        if partial_file != file:
            assert not file.exists()
            partial_file.write_text("ours")
            if other_content:  # another process was faster
                file.write_text(other_content)

    monkeypatch.setattr(uploader, "MlflowClient", make)
    uploader.connect(f"sqlite:///{file}")
    assert file.read_text() == (other_content or "ours") and list(file.parent.iterdir()) == [file]


def test_a_failed_delivery_is_reported_and_completed_later(
    uri: str, tmp_path: Path, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = MlflowClient(uri)
    folder = tmp_path / "spool"
    store = Store(uri)
    experiment = client.create_experiment("tests")
    client.delete_experiment(experiment)
    run = tracker(folder, uri)
    run.metrics(3, {"loss": 1.0})
    run.model({"task": "toys:Task", "task_args": {}, "weights": "none.pt"})
    delivery = run.finish("FINISHED")
    assert not delivery.complete and delivery.run_id is None
    assert f"The experiment {experiment} must be in the 'active' state" in delivery.problem
    assert delivery.problem == State.load(folder).problem
    client.restore_experiment(experiment)
    # As a model that fills the memory, which ends the writer.
    monkeypatch.setattr("app.tracking.model.upload", lambda *args: sys.exit(1))
    for _ in range(3):
        with pytest.raises(SystemExit):
            sync(folder)
    assert sync(folder).complete and State.load(folder).problem == ""
    assert store.run("status") == "FINISHED" and store.steps("loss") == [3]
    assert "ended the writer, 3 times" in store.values("tags")["trireme.model_error"]
    assert sync(tmp_path / "nothing-here").complete


def test_a_writer_that_is_killed_leaves_no_file_outside_of_its_run(
    uri: str, tmp_path: Path, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it uploads: a driver kills a writer that makes no progress."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    log_artifact = MlflowClient.log_artifact
    files_outside: list[Path] = []

    def log(self: MlflowClient, *args: Any, **options: Any) -> None:
        files_outside.extend(temporary.rglob("*"))  # here they would stay
        log_artifact(self, *args, **options)

    monkeypatch.setattr(MlflowClient, "log_artifact", log)
    folder = tmp_path / "spool"
    (tmp_path / "figure.txt").write_text("small")
    run = tracker(folder, uri)
    run.text("lr: 0.1\n", "config.yaml")
    run.text("µs", "profile/profile.txt")
    run.artifact(tmp_path / "figure.txt", "plots")
    delivery = run.finish("FINISHED")
    assert delivery.complete
    assert not files_outside
    assert not (folder / uploader.TEXTS).exists()
    artifacts = tmp_path / "mlartifacts" / str(delivery.run_id) / "artifacts"
    assert (artifacts / "config.yaml").read_text() == "lr: 0.1\n"
    assert (artifacts / "profile" / "profile.txt").read_text() == "µs"
    assert (artifacts / "plots" / "figure.txt").read_text() == "small"


def test_no_metric_is_stored_twice(
    uri: str, tmp_path: Path, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow stores two batches of each attempt whose answers are lost.

    After the first attempt a person deletes the run, which is then filled again. Before the third
    the state file is lost. For the fourth the run has moved to another machine, without its spool.
    """
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "sesame")
    monkeypatch.setitem(uploader.BATCH, "metrics", 5)
    log_batch = MlflowClient.log_batch
    batch_sizes = list[int]()
    store = Store(uri)
    run_ids = list[str]()

    def lose(self: MlflowClient, *args: Any, **values: Any) -> None:
        log_batch(self, *args, **values)
        if "metrics" in values:
            batch_sizes.append(len(values["metrics"]))
            if len(batch_sizes) <= batches_to_lose:
                raise ConnectionError("reset sesame")

    monkeypatch.setattr(MlflowClient, "log_batch", lose)
    attempts = [("spool", 0, 20), ("spool", 10, 30), ("spool", 25, 50), ("elsewhere", 40, 60)]
    for folder, first, last in attempts:
        if first == 25:
            (tmp_path / "spool" / "delivered.json").unlink()
        run = tracker(tmp_path / folder, uri)
        batches_to_lose = len(batch_sizes) + 2
        run.params({"lr": 1})
        for step in range(first, last):
            run.metrics(step, {"loss": float(step)})
        assert "reset ***" in run.finish("FINISHED").problem
        assert "reset" in run._writer.wait(0.0) and run._writer.wait(0.0) == ""
        run_ids.append(State.load(run.folder).run_id)
        if first == 0:
            MlflowClient(uri).delete_run(run_ids[0])
    assert run_ids[0] != run_ids[1] == run_ids[2] == run_ids[3] == store.run()
    assert store.run("status") == "FINISHED"
    assert store.steps("loss") == list(range(60)) and store.values("params") == {"lr": "1"}
    assert sum(batch_sizes) == 20 + 60, "points that MLflow already had were sent again"


@pytest.mark.slow
@pytest.mark.parametrize("writes", ["driver", "writer"])
def test_the_model_loads_where_there_is_only_mlflow_and_torch(
    writes: str,
    uri: str,
    tmp_path: Path,
    inline: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "mismatch")
    (tmp_path / "code" / "toys").mkdir(parents=True)
    (tmp_path / "code" / "toys" / "tracked.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    model = load_task("toys.tracked:Toy", {"width": 5, "token": "sesame"}).build_model()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    recipe = {"task": "toys.tracked:Toy", "weights": str(tmp_path / "weights.pt")}
    run = tracker(tmp_path / "spool", uri)
    run.params({"width": 5})
    run.metrics(7, {"eval/loss": 0.25})
    task_args = {"width": 5, "token": "sesame"}
    task = load_task("toys.tracked:Toy", task_args) if writes == "driver" else None
    run.model(recipe | {"task_args": task_args, "metrics": {"eval/loss": 0.25}}, task)
    assert len([*run.folder.glob("model-*/description.pkl")]) == (writes == "driver")
    task_args = {"width": 6, "token": "sesame"}  # other shapes
    task = load_task("toys.tracked:Toy", task_args) if writes == "driver" else None
    run.model(recipe | {"task_args": task_args}, task)
    delivery = run.finish("FINISHED")
    assert delivery.complete and Store(uri).run("status") == "FINISHED"
    assert "size ***" in caplog.text, "the word 'mismatch' is the secret of this test"
    assert not [*run.folder.glob("model-*")]
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if b"sesame" in path.read_bytes()]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", LOAD, uri, f"runs:/{delivery.run_id}/model"]
    loaded = subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    origin, *outputs, signature = loaded.stdout.splitlines()
    assert origin.startswith("Net /tmp") and str(tmp_path / "code") not in origin, loaded.stderr
    assert outputs == [str(model(torch.ones(1, 4)).tolist())] * 2
    assert signature == "(-1, 4) (-1, 5) True"
    assert Store(uri).steps("eval/loss") == [7]
    sql = "select artifact_location from logged_models where name = 'model'"
    ((location,),) = Store(uri).query(sql)
    folder = Path(location.removeprefix("file://"))
    pins = (folder / "requirements.txt").read_text().split()
    assert f"torch=={torch.__version__.split('+')[0]}" in pins
    assert any(pin.startswith("mlflow==3.") for pin in pins)
    monkeypatch.setattr("app.__file__", "/lib/site-packages/app/__init__.py")
    packages = {"app": ["trireme"], "torch": ["torch"]}
    monkeypatch.setattr("app.tracking.model_files.packages_distributions", lambda: packages)
    pins = _origins(model, "app.tasks:Task")[1]
    assert not [pin for pin in pins if "trireme" in pin], "its sources are copied"
    assert (folder / "code" / "toys" / "tracked.py").exists()
    assert not list(folder.rglob("worker.py"))
    metrics = Store(uri).query("select metric_name, metric_value from logged_model_metrics")
    assert metrics == [("eval/loss", 0.25)]


def test_a_model_that_ended_a_driver_is_left_to_the_writer(
    uri: str, tmp_path: Path, inline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the same command would end there each time, and the run would never finish."""
    written_to: list[Path] = []

    def die(task: Task, recipe: dict[str, Any], folder: Path) -> None:
        """Leaves what a driver leaves that is killed while it writes."""
        part_of(folder).mkdir()
        written_to.append(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr("app.tracking.model_files.write_model_files", die)
    recipe = {"task": "toys:Task", "task_args": {}, "weights": "none.pt"}
    run = tracker(tmp_path / "spool", uri)
    with pytest.raises(KeyboardInterrupt):
        run.model(recipe, Task())
    run.model(recipe, Task())
    assert len(written_to) == 1, "the second start has not tried again"
    assert not part_of(written_to[0]).exists() and not written_to[0].with_suffix(".json").exists()
    recipes = [path.name for path in run.folder.glob("model-*")]
    assert len(recipes) == 1, "that of the event"
    run.leave()


def test_the_modules_that_a_logged_model_names_exist() -> None:
    assert callable(importlib.import_module(LOADER)._load_pyfunc)
    assert callable(importlib.import_module(PICKLING).Pickler)


# --- processes ------------------------------------------------------------------------------------


def driver(folder: Path, uri: str, first: int, last: int) -> subprocess.Popen[str]:
    """A driver process that has logged the steps, and sleeps until it is killed."""
    arguments = [DRIVER, str(folder), uri, str(first), str(last)]
    process = start(arguments, program=[sys.executable, "-c"])
    assert process.stdout and process.stdout.readline() == "ready\n", process.communicate()
    return process


@pytest.mark.slow
def test_kills_and_a_late_server_lose_nothing_and_store_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "figure.txt").write_text("bars")
    port = free_port()
    file = tmp_path / "server.db"
    folder = tmp_path / "spool"
    address = f"http://127.0.0.1:{port}"
    store = Store(f"sqlite:///{file}")
    first_driver = driver(folder, address, 0, 3000)
    old_writer = wait_until(lambda: State.load(folder).problem and State.load(folder).writer)
    assert "does not answer (refused)" in State.load(folder).problem
    assert not State.load(folder).run_id
    problem = "the run is still training, and its own writer delivers its metrics"
    assert sync(folder).problem == problem
    # The writer is no child of the driver, which `ray job stop` would kill too.
    wait_until(lambda: not psutil.Process(first_driver.pid).children(recursive=True))
    first_driver.kill()
    first_driver.wait()
    assert process_started(old_writer)
    with (folder / "events.jsonl").open("a") as events:  # torn by the kill
        events.write('{"type":"metr')
    run = tracker(folder, address)
    wait_until(lambda: not process_started(old_writer))  # it gives way to the new run's writer
    run.artifact(tmp_path / "figure.txt", "plots")
    for step in range(2900, 6000):
        metrics = {"loss": 1 / (step + 1), "nan": float("nan"), "up": float("inf")}
        metrics |= {f"m{number}": float(step + number) for number in range(5)}
        run.metrics(step, metrics)
    command = ["-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri=sqlite:///{file}"]
    command += [f"--artifacts-destination={tmp_path}/files"]
    env = environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", MLFLOW_DISABLE_TELEMETRY="true")
    server = subprocess.Popen([sys.executable, *command], env=env, stderr=subprocess.DEVNULL)
    try:
        # Until it is in the middle of its delivery.
        wait_until(lambda: State.load(folder).run_id and store.steps("m4"))
        assert State.load(folder).problem == "" and State.load(folder).run_id == store.run()
        assert store.run("status") == "RUNNING"
        end_tree(State.load(folder).writer)
        delivery = run.finish("FINISHED", timeout=30)
        assert delivery.complete and delivery.url.startswith(
            f"{address}/#/experiments/1/runs/{delivery.run_id}?"
        )
        assert store.run("status") == "FINISHED"
        last_driver = driver(folder, address, 5900, 6100)
        last_event_time = time.time()
        wait_until(lambda: store.run("status") == "RUNNING")
        last_driver.kill()
        last_driver.wait()
        wait_until(lambda: store.run("status") == "KILLED")
    finally:
        end_tree(server.pid)
    assert abs(store.run("end_time") / 1000 - last_event_time) < 5
    assert store.history("loss") == [(step, 1 / (step + 1)) for step in range(6100)]
    assert store.history("m4") == [(step, step + 4.0) for step in range(2900, 6000)]
    sql = "select count(*), count(distinct key || ' ' || step) from metrics where key like 'm%'"
    counts = store.query(sql)
    assert counts == [(15_500, 15_500)]
    assert store.history("nan") == [(step, None) for step in range(2900, 6000)]
    assert store.history("up")[0][1] > 1e308
    times = store.query("select timestamp from metrics where key = 'loss' order by step")
    assert times == sorted(times)
    assert [path.read_text() for path in (tmp_path / "files").rglob("plots/figure.txt")] == ["bars"]


def test_one_writer_delivers_a_run_and_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a sweep: children come and go, and only write their spools; one is killed.

    The folder has a package `app` of its own, and the database does not exist yet.
    """
    file = tmp_path / "deep" / "mlflow.db"
    for module in ("app/__init__.py", "app/tracking/__init__.py", "app/tracking/writer.py"):
        (tmp_path / module).parent.mkdir(exist_ok=True)
        (tmp_path / module).write_text("")
    monkeypatch.chdir(tmp_path)

    def child(number: int) -> Tracker:
        folder = tmp_path / f"t{number}" / "tracking"
        run = tracker(folder, uri, run_uid=f"child-{number}", parent=parent.folder)
        run.metrics(1, {"loss": float(number)})
        return run

    uri = f"sqlite:///{file}"
    store = Store(uri)
    parent = tracker(tmp_path / "tracking", uri)
    first = child(0)
    assert first.finish("FAILED", message="diverged").complete
    assert not (first.folder / "writer.log").exists()
    wait_until(lambda: file.exists() and store.run("status", "child-0") == "FAILED")
    os.close(child(1)._driver_lock or -1)  # as the kernel does for a killed process
    parent.metrics(7, {"best": 0.5})
    assert parent.finish("FINISHED", timeout=60).complete and store.steps("best") == [7]
    wait_until(lambda: store.run("status", "child-1") == "KILLED")
    assert store.steps("loss", "child-1") == [1]
    sql = "select count(*) from tags where key = 'mlflow.parentRunId' and value = ?"
    assert store.query(sql, store.run()) == [(2,)]
