"""The driver's end of tracking, without MLflow: spool, masks, settings, provenance, samplers."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tracking_kit import python, wait_until

from app.errors import UserError
from app.tracking import Settings, SystemSampler, Tracker, resolve_tracking, run_url, ui_command
from app.tracking.masking import flatten, looks_secret, mask_text, mask_uri, mask_value
from app.tracking.provenance import environment_text, provenance_tags
from app.tracking.spool import Position, Reader, Spool, count_left, segment_path, segments
from app.tracking.state import Delivered, FileLock
from app.tracking.system import Sample


def events(folder: Path) -> list[dict]:
    reader, found = Reader(folder, Position()), []
    while chunk := reader.read():
        found += [event for event, _ in chunk]
    return found


# --- spool --------------------------------------------------------------------------------------------------------


def test_what_is_appended_is_read_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for number in range(5):
        spool.append({"type": "metrics", "number": number, "value": [math.inf, -math.inf][number % 2]})
    assert [(e["number"], e["value"]) for e in events(tmp_path)] == [(n, (-1) ** n * math.inf) for n in range(5)]


def test_a_torn_last_line_is_not_read_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append({"type": "tags", "n": 1})
    spool.close()
    with segment_path(tmp_path, 1).open("a") as file:
        file.write('{"type":"tags","n":')  # the driver was killed here
    assert [e["n"] for e in events(tmp_path)] == [1]
    assert count_left(tmp_path, Position()) == 1
    Spool(tmp_path).append({"type": "tags", "n": 3})
    assert [e.get("n") for e in events(tmp_path)] == [1, None, 3]
    assert count_left(tmp_path, Position()) == 2


def test_a_line_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path = segment_path(tmp_path, 1)
    path.write_text('{"type":"a"}\n{"type"')
    reader = Reader(tmp_path, Position())
    assert [e["type"] for e, _ in reader.read()] == ["a"]
    assert reader.read() == []
    with path.open("a") as file:
        file.write(':"b"}\n')
    assert [e["type"] for e, _ in reader.read()] == ["b"]


def test_segments_rotate_and_each_says_whose_it_is(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=200)
    spool.append({"type": "start", "attempt": "x"})
    for number in range(20):
        spool.append({"type": "metrics", "number": number})
    assert len(segments(tmp_path)) > 2
    read = events(tmp_path)
    assert [e["number"] for e in read if e["type"] == "metrics"] == list(range(20))
    starts = [e for e in read if e["type"] == "start"]
    assert len(starts) == len(segments(tmp_path)) and [bool(e.get("again")) for e in starts[:2]] == [False, True]
    assert count_left(tmp_path, Position()) == 21
    reader = Reader(tmp_path, Position())
    while reader.read():
        reader.discard_delivered()
    assert len(segments(tmp_path)) == 1
    assert events(tmp_path)[0]["type"] == "start"


def test_a_reader_finds_the_segment_after_the_one_it_was_at(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=1)
    spool.append({"type": "a"})
    reader = Reader(tmp_path, Position())
    assert [e["type"] for e, _ in reader.read()] == ["a"] and not reader.waiting()
    spool.append({"type": "b"})
    assert reader.waiting() and [e["type"] for e, _ in reader.read()] == ["b"]


def test_one_event_longer_than_a_chunk(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append({"type": "text", "text": "x" * 3_000_000})
    spool.append({"type": "tags"})
    assert [len(e.get("text", "")) for e in events(tmp_path)] == [3_000_000, 0]


@given(cut=st.integers(0, 400), junk=st.binary(max_size=40))
def test_any_damage_costs_only_the_lines_it_touches(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder)
    for number in range(10):
        spool.append({"type": "metrics", "number": number})
    path = segment_path(folder, 1)
    data = path.read_bytes()
    path.write_bytes(data[:cut] + junk)  # a machine that lost power leaves anything at the end
    whole = data[:cut].count(b"\n")
    later = Spool(folder)
    later.append({"type": "metrics", "number": 99})
    numbers = [e["number"] for e in events(folder) if "number" in e]
    assert numbers[:whole] == list(range(whole)) and numbers[-1] == 99


def test_a_damaged_state_is_as_none(tmp_path: Path) -> None:
    state = Delivered(offset=7, steps={"a": 3})
    state.save(tmp_path)
    assert Delivered.load(tmp_path) == state
    (tmp_path / "delivered.json").write_text('{"offset": 7, "st')
    assert Delivered.load(tmp_path) == Delivered()


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire() and not second.acquire()
    first.release()
    assert second.acquire()


# --- the tracker --------------------------------------------------------------------------------------------------


def test_logging_a_step_takes_microseconds(tmp_path: Path) -> None:
    tracker = Tracker(
        tmp_path, uri="http://127.0.0.1:9", experiment="e", run_name="r", run_uid="u", artifact_location=None
    )
    tracker.start()
    values = {f"train/metric_{number}": 0.1234567 * number for number in range(8)}
    medians = []
    for _ in range(5):
        seconds = []
        for step in range(400):
            begun = time.perf_counter()
            tracker.metrics(step, values)
            seconds.append(time.perf_counter() - begun)
        medians.append(statistics.median(seconds))
    delivery = tracker.finish("FINISHED", timeout=0.1)
    assert min(medians) < 50e-6, medians
    assert (delivery.complete, delivery.left, delivery.run_id) == (False, 2002, None)


def test_a_disabled_tracker_leaves_nothing(tmp_path: Path) -> None:
    tracker = Tracker(
        tmp_path / "t", uri="", experiment="", run_name="", run_uid="", artifact_location=None, enabled=False
    )
    tracker.start()
    tracker.metrics(1, {"a": 1.0})
    tracker.artifact(tmp_path / "missing")
    delivery = tracker.finish("FINISHED")
    assert delivery.complete and tracker.run_id is None and not (tmp_path / "t").exists()


def test_a_full_disk_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker(tmp_path, uri="", experiment="", run_name="", run_uid="", artifact_location=None)
    tracker._spool = Spool(tmp_path)
    os.close(tracker._spool._fd)
    tracker._spool._fd = os.open("/dev/full", os.O_WRONLY)
    tracker.metrics(1, {"a": 1.0})
    tracker.metrics(2, {"a": 1.0})
    assert caplog.text.count("metrics are not being kept") == 1


def test_the_driver_imports_neither_mlflow_nor_torch_nor_ray() -> None:
    code = """
import sys
import app.tracking, app.tracking.provenance, app.tracking.settings
from types import SimpleNamespace
app.tracking.resolve_tracking(SimpleNamespace(uri="http://localhost:5000", experiment=None), "runs")
app.tracking.provenance.provenance_tags()
print({"mlflow", "torch", "ray"} & set(sys.modules))
"""
    out, error = python(code).communicate(timeout=60)
    assert out.strip() == "set()", error


# --- masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["password", "db.Password", "hf_token", "apiKey", "AWS_SECRET_ACCESS_KEY", "x.credentials.user"]
)
def test_names_of_secrets(name: str) -> None:
    assert looks_secret(name) and mask_value(name, "abc") == "***"


@pytest.mark.parametrize("name", ["tokenizer", "train/tokens_per_second", "monkey", "keyboard", "task_args.d_model"])
def test_names_of_no_secrets(name: str) -> None:
    assert not looks_secret(name) and mask_value(name, "abc") == "abc"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://me:pa55@host:5000/x", "http://***@host:5000/x"),
        ("postgresql+psycopg2://u:p@ss@db/x and more", "postgresql+psycopg2://***@db/x and more"),
        ("https://h/a?x=1&api_token=abc&y=2", "https://h/a?x=1&api_token=***&y=2"),
        ("s3://bucket/path", "s3://bucket/path"),
        ("mail me@example.org", "mail me@example.org"),
    ],
)
def test_credentials_in_uris(text: str, masked: str) -> None:
    assert mask_uri(text) == masked


def test_credentials_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter22")
    assert mask_uri("said hunter22 twice") == "said *** twice"


def test_secrets_in_a_configuration_text() -> None:
    text = "task_args:\n  hf_token: abc def\n  vocab: 3\n  key: null\nuri: http://u:p@h\ntokenizer: bpe\n"
    assert mask_text(text) == (
        "task_args:\n  hf_token: '***'\n  vocab: 3\n  key: null\nuri: http://***@h\ntokenizer: bpe\n"
    )
    assert mask_text("train x.yaml task_args.password=abc a=b") == "train x.yaml task_args.password=*** a=b"
    assert mask_text("a:\n  key: |-\n    one\n    two\n  b: 1\n") == "a:\n  key: '***'\n  b: 1\n"
    assert mask_text("key: 'one\n\n  two'\nb: 1\n") == "key: '***'\nb: 1\n"
    assert json.loads(mask_text('{"password": "a b", "n": 1}')) == {"password": "***", "n": 1}


def test_nested_parameters_get_dotted_keys() -> None:
    nested = {"a": {"b": 1, "secret": "x", "none": None, "empty": {}}, "list": [1, 2], "token": 5}
    assert flatten(nested) == {"a.b": 1, "a.secret": "***", "a.none": None, "a.empty": {}, "list": [1, 2], "token": 5}


def test_no_secret_reaches_the_spool(tmp_path: Path) -> None:
    uri = "http://user:sesame@127.0.0.1:9"
    tracker = Tracker(tmp_path, uri=uri, experiment="e", run_name="r", run_uid="u", artifact_location=None)
    tracker.start()
    tracker.params({"a": {"password": "sesame"}, "uri": uri})
    tracker.tags({"token": "sesame", "from": uri})
    tracker.text(f"password: sesame\nuri: {uri}", "config.yaml")
    delivery = tracker.finish("FAILED", message=f"cannot reach {uri}", timeout=2.5)
    assert not delivery.complete and "127.0.0.1:9 does not answer" in delivery.problem
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"sesame" not in path.read_bytes(), path


# --- settings -----------------------------------------------------------------------------------------------------


def resolve(uri: str | None, storage: str = "runs", environ: dict[str, str] | None = None) -> Settings:
    return resolve_tracking(SimpleNamespace(uri=uri, experiment=None), storage, environ or {})


def test_configuration_before_environment_before_storage(tmp_path: Path) -> None:
    environ = {"MLFLOW_TRACKING_URI": "http://env:1", "MLFLOW_EXPERIMENT_NAME": "from-env"}
    assert resolve("http://config:2", str(tmp_path), environ).uri == "http://config:2"
    from_environment = resolve(None, str(tmp_path), environ)
    assert (from_environment.uri, from_environment.experiment) == ("http://env:1", "from-env")
    assert from_environment.artifact_location is None and from_environment.source == "MLFLOW_TRACKING_URI"
    embedded = resolve(None, f"file://{tmp_path}")
    assert embedded.uri == f"sqlite:///{tmp_path}/mlflow.db" and embedded.embedded
    assert embedded.artifact_location == (tmp_path / "mlartifacts").as_uri()
    assert embedded.experiment == "trireme"


def test_a_folder_means_a_database_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for uri in (str(tmp_path / "x"), "./x", f"file://{tmp_path}/x", f"file:{tmp_path}/x"):
        assert resolve(uri).uri == f"sqlite:///{tmp_path}/x/mlflow.db"
    assert resolve("sqlite:///here.db").uri == f"sqlite:///{tmp_path}/here.db"
    assert resolve("mlruns").uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"


def test_an_object_store_keeps_the_database_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = resolve(None, "s3://bucket/runs")
    assert settings.uri == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert settings.artifact_location == (tmp_path / "runs/mlartifacts").as_uri()
    assert resolve("postgresql://u:p@db/x", "s3://bucket/runs").artifact_location == "s3://bucket/runs/mlartifacts"


@pytest.mark.parametrize(
    "uri", ["databricks", "databricks://profile", "https://mlflow.example.org/path", "mysql+pymysql://u@h/d"]
)
def test_uris_that_are_left_as_they_are(uri: str) -> None:
    assert resolve(uri).uri == uri


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("foo://bar", "unknown scheme 'foo'"),
        ("htp://localhost:5000", "did you mean http:"),
        ("sqllite:///x.db", "did you mean sqlite:"),
        ("nonsense", "neither a URI nor a folder"),
        ("not a uri", "neither a URI nor a folder"),
        ("localhost:5000", "write http://localhost:5000"),
        ("http://", "names no host"),
        ("http:/localhost", "names no host"),
        ("http://host:port", "not a server's address"),
        ("http://a host", "names no host"),
        ("sqlite://", "names no database file"),
        ("sqlite:///:memory:", "names no database file"),
        ("sqlite:///README.md/mlflow.db", "cannot be written"),
        ("postgresql://", "names no host"),
        ("sqlite:///README.md", "not a SQLite database"),
    ],
)
def test_nonsense_gets_one_sentence(uri: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("this is no database")
    with pytest.raises(UserError) as error:
        resolve(uri)
    assert says in str(error.value) and "tracking.uri=" in str(error.value) and "\n" not in str(error.value)


def test_a_password_in_a_wrong_uri_is_not_shown() -> None:
    with pytest.raises(UserError) as error:
        resolve("htp://me:sesame@host")
    assert "sesame" not in str(error.value)


def test_where_to_look(tmp_path: Path) -> None:
    server = Settings("https://me:pw@mlflow.example.org/base", "e", None, "tracking.uri")
    assert run_url(server, "3", "abc") == "https://mlflow.example.org/base/#/experiments/3/runs/abc"
    assert ui_command(server) == "https://***@mlflow.example.org/base"
    assert run_url(server, None, None) == ""
    embedded = resolve(None, str(tmp_path / "my runs"))
    assert f"mlflow ui --workers 1 --backend-store-uri 'sqlite:///{tmp_path}/my runs/mlflow.db'" in ui_command(embedded)
    assert run_url(embedded, "1", "abc") == "http://127.0.0.1:5000/#/experiments/1/runs/abc"


# --- provenance ---------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> None:
    import subprocess

    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_provenance_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-b", "trunk")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "remote", "add", "origin", "https://me:sesame@example.org/x.git")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "raysubmit_1", "job_name": "raysubmit_1"}}'
    )
    tags = provenance_tags()
    assert len(tags["mlflow.source.git.commit"]) == 40 and tags["mlflow.source.git.branch"] == "trunk"
    assert tags["mlflow.source.git.dirty"] == "false"
    assert tags["mlflow.source.git.repoURL"] == "https://***@example.org/x.git"
    assert tags["trireme.ray_job_id"] == "raysubmit_1"
    assert tags["trireme.version.torch"].startswith("2.") and tags["mlflow.user"]
    (tmp_path / "a.py").write_text("2")
    assert provenance_tags()["mlflow.source.git.dirty"] == "true"


def test_provenance_never_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{not json")
    monkeypatch.setattr("getpass.getuser", lambda: 1 / 0)
    tags = provenance_tags()
    assert "mlflow.source.git.commit" not in tags and "mlflow.user" not in tags and tags["trireme.python"]


def test_provenance_is_quick() -> None:
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        provenance_tags()
        environment_text()
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 0.05


def test_all_packages_are_listed() -> None:
    from importlib.metadata import distributions

    def canonical(name: str) -> str:
        return name.lower().replace("_", "-").replace(".", "-")

    listed = {canonical(line.split("==")[0]): line.split("==")[1] for line in environment_text().split("\n")[1:-1]}
    for distribution in distributions():
        if str(distribution._path).endswith(".dist-info"):  # type: ignore[attr-defined]
            assert listed[canonical(distribution.metadata["Name"])] == distribution.version


# --- system metrics -----------------------------------------------------------------------------------------------


def test_samples_have_mlflows_names() -> None:
    values = Sample().take()
    assert {
        "cpu_utilization_percentage",
        "system_memory_usage_megabytes",
        "system_memory_usage_percentage",
        "disk_usage_percentage",
        "disk_usage_megabytes",
        "disk_available_megabytes",
        "network_receive_megabytes",
        "network_transmit_megabytes",
    } <= set(values)
    assert 0 < values["system_memory_usage_percentage"] < 100 and values["network_receive_megabytes"] >= 0


def test_a_gpu_tells_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def no_power(handle: object) -> int:
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=20e9, total=80e9),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=91 + handle),
        nvmlDeviceGetPowerUsage=no_power,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    gpus = {key: value for key, value in Sample().take().items() if key.startswith("gpu_1")}
    assert gpus == {
        "gpu_1_memory_usage_percentage": 25.0,
        "gpu_1_memory_usage_megabytes": 20_000.0,
        "gpu_1_utilization_percentage": 92,
    }


def test_a_sampler_emits_and_stops() -> None:
    emitted: list[dict] = []
    sampler = SystemSampler(emitted.append, "node-3", 0.01)
    wait_until(lambda: emitted, 5)
    sampler.close()
    count = len(emitted)
    assert emitted[0]["type"] == "metrics" and emitted[0]["step"] is None
    assert emitted[0]["values"]["system/node-3/cpu_utilization_percentage"] >= 0
    time.sleep(1.2)
    assert len(emitted) == count
    SystemSampler(emitted.append, "n", 0.0).close()
    assert len(emitted) == count


def test_a_sample_costs_little() -> None:
    """At the default of one in five seconds: at most 0.2 % of one core."""
    sample = Sample()
    sample.take()
    begun = time.process_time()
    for _ in range(50):
        sample.take()
    assert (time.process_time() - begun) / 50 / 5.0 < 0.002
