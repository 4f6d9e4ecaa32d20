"""The driver's side of tracking, without MLflow.

Covers the spool, the tracker that writes it, the choice of where to track, and the environment
that a run records.
"""

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UserError
from app.launchers.workers import start_system_sampler
from app.tracking import environment, tracker
from app.tracking.environment import Sample, environment_text, provenance_tags
from app.tracking.settings import Settings, resolve_tracking, run_url, ui_command
from app.tracking.spool import ANOTHER_DELIVERS, Spool, State, look_at_lock, read, size, take_lock
from app.tracking.tracker import Tracker, WriterProcess
from app.tracking.writer import AUTOGROUP
from app.training.events import Event, SystemSampled, WarningIssued
from app.training.job import SilentChannel
from tests.running import ROOT, end_tree, start, wait_until


def events(folder: Path) -> list[dict]:
    """All events of a spool but those that mark damage."""
    read_events = []
    offset = 0
    while chunk := read(folder, offset):
        read_events += [event for event, _ in chunk]
        offset = chunk[-1][1]
    return [event for event in read_events if event["type"] != "damaged"]


def append(folder: Path, *new_events: dict) -> None:
    """Appends events to a spool, and closes it."""
    spool = Spool(folder)
    for event in new_events:
        spool.append({"type": "metrics"} | event)
    spool.close()


def test_events_of_any_size_are_read_in_order_and_only_once_complete(tmp_path: Path) -> None:
    sizes = [3_000_000, *[5000] * 500]
    appended = [
        {"type": "metrics", "n": number, "value": -math.inf, "text": "x" * size}
        for number, size in enumerate(sizes)
    ]
    append(tmp_path, *appended[:9])
    append(tmp_path, *appended[9:])
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"type":"a"}\n{"type"')  # the second event is being written
        file.flush()
        assert events(tmp_path) == [*appended, {"type": "a"}]
        file.write(':"b"}\n')
    assert events(tmp_path)[-2:] == [{"type": "a"}, {"type": "b"}]


@given(length=st.integers(0, 400), garbage=st.binary(max_size=40))
def test_damage_costs_only_the_lines_it_touches(
    tmp_path_factory: pytest.TempPathFactory, length: int, garbage: bytes
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    append(folder, *({"number": number} for number in range(10)))
    data = (folder / "events.jsonl").read_bytes()
    # A machine that lost power may leave anything at the end.
    (folder / "events.jsonl").write_bytes(data[:length] + garbage)
    complete_lines = max(0, data[:length].count(b"\n") - 1)  # the first line is empty
    append(folder, {"number": 99})
    numbers = [event["number"] for event in events(folder) if "number" in event]
    assert numbers[:complete_lines] == list(range(complete_lines)) and numbers[-1] == 99


def test_a_lock_is_free_when_its_holder_dies_though_a_child_lives(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from app.tracking.spool import take_lock
assert take_lock(Path(sys.argv[1]), "a", text="mine") is not None
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""
    process = start([code, str(tmp_path)], program=[sys.executable, "-c"])
    child = int(process.stdout.readline())
    try:
        assert look_at_lock(tmp_path, "a") == (True, "mine") and take_lock(tmp_path, "a") is None
        process.kill()
        process.wait()
        assert look_at_lock(tmp_path, "a") == (False, "mine")
        assert take_lock(tmp_path, "a") is not None
    finally:
        end_tree(child)


def test_a_full_disk_is_reported_once_and_loses_nothing(tmp_path: Path) -> None:
    warnings: list[str] = []
    spool = Spool(tmp_path, warnings.append)
    spool_file = spool._file
    spool._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    for number in range(3):
        spool.append({"type": "metrics", "n": number})
    assert len(warnings) == 1 and "metrics wait in memory until there is room" in warnings[0]
    spool._file = spool_file
    spool.append({"type": "metrics", "n": 3})
    assert [event["n"] for event in events(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.usefixtures("real_start")
def test_no_secret_reaches_the_spool_and_a_writer_without_a_server_ends(tmp_path: Path) -> None:
    uri = "http://user:sesame@127.0.0.1:9"
    tracker = Tracker(tmp_path, Settings(uri, "e"), run_name="r", run_uid="u")
    tracker.start()
    tracker.params({"a.password": "sesame", "uri": uri})
    tracker.tags({"token": "sesame", "from": uri})
    tracker.text(f"password: sesame\nuri: {uri}", "config.yaml")
    delivery = tracker.finish("FAILED", message=f"cannot reach {uri}", timeout=0.1)
    assert not delivery.complete and "127.0.0.1:9 does not answer" in delivery.problem
    wait_until(lambda: not look_at_lock(tmp_path, "writer")[0], 3)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"sesame" not in path.read_bytes(), path


# --- where to track -------------------------------------------------------------------------------


def resolve(
    uri: str | None, storage: str = "runs", environ: dict[str, str] | None = None
) -> Settings:
    return resolve_tracking(
        SimpleNamespace(uri=uri, experiment=None, also=[]), storage, environ or {}
    )


def test_configuration_overrides_environment_which_overrides_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"MLFLOW_TRACKING_URI": "http://env:1", "MLFLOW_EXPERIMENT_NAME": "from-env"}
    assert resolve("http://config:2", environ=environ) == Settings("http://config:2", "from-env")
    assert resolve(None, environ=environ).uri == "http://env:1"
    for uri in (str(tmp_path / "x"), "./x", f"file://{tmp_path}/x", f"file:{tmp_path}/x"):
        assert resolve(uri).uri == f"sqlite:///{tmp_path}/x/mlflow.db"
    assert resolve("sqlite:///here.db").uri == f"sqlite:///{tmp_path}/here.db"
    assert resolve("mlruns").uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    for storage in ("runs", f"file://{tmp_path}/runs", "s3://bucket/runs"):
        artifacts = (tmp_path / "runs" / "mlartifacts").as_uri()
        database = f"sqlite:///{tmp_path}/runs/mlflow.db"
        assert resolve(None, storage) == Settings(database, "trireme", artifacts)
    in_bucket = resolve("postgresql://u:p@db/x", "s3://bucket/runs")
    assert in_bucket.artifact_location == "s3://bucket/runs/mlartifacts"
    unchanged = ["databricks", "databricks://profile", "https://mlflow.example.org/path"]
    unchanged += ["mysql+pymysql://u@h/d"]
    for uri in unchanged:
        assert resolve(uri).uri == uri


NO_ADDRESS = (
    "http://",
    "postgresql://",
    "sqlite://",
    "http://127.0.0.1:port",
    "http://[::1",
    "htp://me:sesame@host",
)
NOT_MLFLOW = "is not an address of MLflow's: write sqlite:///FOLDER/mlflow.db, http://HOST:PORT"
MESSAGES = {
    **dict.fromkeys(NO_ADDRESS, NOT_MLFLOW),
    "http://ho st": "not an address",
    "localhost:5000": "http://HOST:PORT",
    "sqlite:///README.md/mlflow.db": "cannot be written",
    "/proc/nowhere": "cannot be written",
    "sqlite:///README.md": "is not a SQLite database",
}


@pytest.mark.parametrize("uri", MESSAGES)
def test_a_wrong_address_gets_one_sentence(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("this is no database")
    with pytest.raises(UserError) as error:
        resolve(uri)
    message = str(error.value)
    assert MESSAGES[uri] in message
    assert "tracking.uri=" in message
    assert "\n" not in message
    assert "sesame" not in message


def test_a_run_tells_where_to_look_at_it(tmp_path: Path) -> None:
    server = Settings("https://me:pw@mlflow.example.org/base", "e")
    page = "#/experiments/3/runs/abc?workflowType=machine_learning"
    assert run_url(server, "3", "abc") == f"https://mlflow.example.org/base/{page}"
    assert ui_command(server) == "https://***@mlflow.example.org/base"
    assert run_url(server, "", "") == ""
    embedded = resolve(None, str(tmp_path / "my runs"))
    assert (
        f"mlflow ui --workers 1 --backend-store-uri 'sqlite:///{tmp_path}/my runs/mlflow.db'"
        in ui_command(embedded)
    )
    assert run_url(embedded, "3", "abc") == f"http://127.0.0.1:5000/{page}"


# --- where it ran ---------------------------------------------------------------------------------


def test_provenance_is_that_of_the_repository_and_never_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("1")
    script = "git init -b trunk && git add ."
    script += " && git -c user.name=n -c user.email=e@example.org commit -m one"
    script += " && git remote add origin https://me:sesame@example.org/x.git"
    subprocess.run(script, shell=True, cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    tags = provenance_tags()
    git = "mlflow.source.git"
    values = [tags[f"{git}.{name}"] for name in ("branch", "dirty", "repoURL")]
    assert values == ["trunk", "false", "https://***@example.org/x.git"]
    assert len(tags[f"{git}.commit"]) == 40
    assert tags["trireme.slurm_job_id"] == "17" and tags["mlflow.user"]
    assert tags["trireme.version.torch"].startswith("2.")
    assert f"torch=={tags['trireme.version.torch']}" in environment_text().splitlines()
    (tmp_path / "a.py").write_text("2")
    assert provenance_tags()[f"{git}.dirty"] == "true"
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("getpass.getuser", lambda: 1 / 0)
    tags = provenance_tags()
    assert f"{git}.commit" not in tags and "mlflow.user" not in tags and tags["trireme.python"]


def test_a_gpu_without_some_metrics_reports_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    no_power = Mock(side_effect=LookupError("no power"))
    nvml = Mock(NVMLError=LookupError, nvmlDeviceGetPowerUsage=no_power)
    nvml.nvmlDeviceGetCount.return_value = 2
    nvml.nvmlDeviceGetHandleByIndex = int
    nvml.nvmlDeviceGetMemoryInfo.return_value = SimpleNamespace(used=20e9, total=80e9)
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=91 + handle)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    values = {key[6:]: value for key, value in Sample().take().items() if key.startswith("gpu_1_")}
    memory = {"memory_usage_percentage": 25.0, "memory_usage_megabytes": 20_000.0}
    assert values == memory | {"utilization_percentage": 92}


def test_a_sampler_measures_the_machine_and_warns_of_gpus_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = tmp_path / Path(environment.GPU_DEVICES).name
    monkeypatch.setattr(environment, "GPU_DEVICES", str(devices))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (tmp_path / "nvidiactl").touch()
    assert not Sample().gpu_problem, "there is no GPU"
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    channel = SilentChannel()
    emitted = list[Event]()
    channel.emit = emitted.append  # type: ignore[method-assign]
    sampler = start_system_sampler(channel, "node-3", 0.01)
    wait_until(lambda: len(emitted) > 1)
    sampler.close()
    assert not sampler._thread.is_alive()
    warning, sample, *_ = emitted
    assert isinstance(warning, WarningIssued)
    assert warning.message.startswith("node-3 has 2 GPUs whose metrics cannot be recorded (")
    advice = "pynvml halted; None in sys.modules): `pip install nvidia-ml-py` there"
    assert warning.message.endswith(advice)
    assert isinstance(sample, SystemSampled)
    assert sample.values["system/node-3/cpu_utilization_percentage"] >= 0
    idle = start_system_sampler(channel, "n", 0.0)
    assert not idle._thread.is_alive()
    idle.close()


@pytest.mark.parametrize("by_thread", [False, True], ids=["itself", "one of its threads"])
def test_a_process_that_others_leave_no_processor_is_seen(
    by_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "STARVED_SECONDS", 0.5)
    processor = min(os.sched_getaffinity(0))
    spin = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.nice(int(sys.argv[2]))"
    spin += "\nwhile os.getppid() == int(sys.argv[3]): pass"

    def started(code: str, niceness: int) -> subprocess.Popen[bytes]:
        words = [str(processor), str(niceness), str(os.getpid())]
        return subprocess.Popen([sys.executable, "-c", code, *words])

    in_a_thread = spin.replace("\n", "\ndef run():\n    ") + "\nimport threading"
    in_a_thread += "\nthreading.Thread(target=run).start()"
    processes = [
        started(in_a_thread if by_thread else spin, 19),
        started("import time; time.sleep(60)", 19),
        started(spin, 0),
    ]
    try:
        time.sleep(0.3)
        starved, asleep, busy = (tracker.Starvation() for _ in processes)
        deadline = time.monotonic() + 20
        while not starved.lasts(processes[0].pid) and time.monotonic() < deadline:
            assert not asleep.lasts(processes[1].pid)
            time.sleep(0.1)
        assert starved.lasts(processes[0].pid)
        assert not asleep.lasts(processes[1].pid)
        assert not busy.lasts(2**22 + 1), "there is no such process"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_writer_may_starve_after_it_has_waited_for_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: seconds)
    monkeypatch.setattr(tracker, "time", clock)
    monkeypatch.setattr(Path, "read_text", lambda _: f"0 {waited * 1e9:.0f} 1")
    starvation = tracker.Starvation()
    answers = []
    for seconds in range(80):
        waited = max(0, seconds - 60)  # it is asleep for a minute
        answers.append(starvation.lasts(os.getpid()))
    assert True not in answers[:61] and True in answers[61:71]


@pytest.mark.skipif(
    not os.access(AUTOGROUP, os.W_OK), reason="Linux does not schedule processes by session here"
)
@pytest.mark.parametrize("niceness", [0, 15])
def test_a_writers_session_is_as_nice_as_the_writer(niceness: int) -> None:
    """Otherwise it would take half a processor of two workers that use both."""
    code = (
        f"from app.tracking.writer import AUTOGROUP, be_nicer\nbe_nicer({niceness}, session=True)"
    )
    code += "\nprint(AUTOGROUP.read_text())"
    command = [sys.executable, "-c", code]
    before = AUTOGROUP.read_text()
    answer = subprocess.run(
        command, cwd=ROOT, start_new_session=True, capture_output=True, text=True, check=True
    )
    expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + niceness) if niceness else 0
    assert answer.stdout.split()[1:] == ["nice", str(expected)]
    assert AUTOGROUP.read_text() == before


def test_the_writer_of_an_earlier_start_that_gets_no_processor_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, {"n": 1})
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    other = subprocess.Popen(sleep)
    earlier = subprocess.Popen([*sleep, str(tmp_path)])
    State(writer=other.pid).save(tmp_path)
    asked: list[int] = []

    def lasts(starvation: tracker.Starvation, pid: int) -> bool:
        asked.append(pid)
        return len(asked) > 1

    def spawn(writer: WriterProcess, niceness: int) -> str:
        State(writer=earlier.pid).save(tmp_path)
        if earlier.poll() is None:
            return ANOTHER_DELIVERS
        State(offset=size(tmp_path)).save(tmp_path)
        return ""

    monkeypatch.setattr(tracker.Starvation, "lasts", lasts)
    monkeypatch.setattr(WriterProcess, "_spawn", spawn)
    try:
        assert WriterProcess(tmp_path, "", "newer").wait(timeout=60.0) == ""
        assert set(asked) == {earlier.pid}
        assert other.poll() is None, "the number may be that of another process by now"
    finally:
        for process in (other, earlier):
            process.kill()
            process.wait()


@pytest.mark.parametrize(("ends", "problem"), [(True, ""), (False, ANOTHER_DELIVERS)])
def test_the_writer_of_an_earlier_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool, problem: str
) -> None:
    """A killed command's may be in a long call, such as the upload of a model."""
    append(tmp_path, {"n": 1})
    tries = []

    def spawn(writer: WriterProcess, niceness: int) -> str:
        tries.append(niceness)
        if not ends or len(tries) < 3:
            return ANOTHER_DELIVERS
        State(offset=size(tmp_path)).save(tmp_path)
        return ""

    monkeypatch.setattr(WriterProcess, "_spawn", spawn)
    timeout = 60.0 if ends else 0.3
    assert WriterProcess(tmp_path, "", "newer").wait(timeout) == problem
    assert len(tries) >= 3 and set(tries) == {0}
