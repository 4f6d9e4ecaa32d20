"""What the driver says of tracking, without MLflow: secrets masked, where to track, in one sentence what is wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from app.errors import UserError
from app.tracking.settings import Settings, resolve_tracking, run_url, ui_command
from app.tracking.tracker import Tracker


def test_no_secret_reaches_the_spool(tmp_path: Path) -> None:
    uri = "http://user:sesame@127.0.0.1:9"
    tracker = Tracker(tmp_path, Settings(uri, "e"), run_name="r", run_uid="u")
    tracker.start()
    tracker.params({"a.password": "sesame", "uri": uri})
    tracker.tags({"token": "sesame", "from": uri})
    tracker.text(f"password: sesame\nuri: {uri}", "config.yaml")
    delivery = tracker.finish("FAILED", message=f"cannot reach {uri}", timeout=0.1)
    assert not delivery.complete and "127.0.0.1:9 does not answer" in delivery.problem
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"sesame" not in path.read_bytes(), path


def resolve(uri: str | None, storage: str = "runs", environ: dict[str, str] | None = None) -> Settings:
    return resolve_tracking(SimpleNamespace(uri=uri, experiment=None), storage, environ or {})


def test_configuration_before_environment_before_storage(tmp_path: Path) -> None:
    environ = {"MLFLOW_TRACKING_URI": "http://env:1", "MLFLOW_EXPERIMENT_NAME": "from-env"}
    assert resolve("http://config:2", str(tmp_path), environ).uri == "http://config:2"
    from_environment = resolve(None, str(tmp_path), environ)
    assert (from_environment.uri, from_environment.experiment) == ("http://env:1", "from-env")
    assert from_environment.artifact_location is None
    embedded = resolve(None, f"file://{tmp_path}")
    assert embedded.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert embedded.artifact_location == (tmp_path / "mlartifacts").as_uri()
    assert embedded.experiment == "trireme"


def test_a_folder_means_a_database_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for uri in (str(tmp_path / "x"), "./x", f"file://{tmp_path}/x", f"file:{tmp_path}/x"):
        assert resolve(uri).uri == f"sqlite:///{tmp_path}/x/mlflow.db"
    assert resolve("sqlite:///here.db").uri == f"sqlite:///{tmp_path}/here.db"
    assert resolve("mlruns").uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    beside_an_object_store = resolve(None, "s3://bucket/runs")
    assert beside_an_object_store.uri == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert beside_an_object_store.artifact_location == (tmp_path / "runs/mlartifacts").as_uri()
    assert resolve("postgresql://u:p@db/x", "s3://bucket/runs").artifact_location == "s3://bucket/runs/mlartifacts"


def test_uris_that_are_left_as_they_are() -> None:
    for uri in ("databricks", "databricks://profile", "https://mlflow.example.org/path", "mysql+pymysql://u@h/d"):
        assert resolve(uri).uri == uri


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("htp://me:sesame@host", "not an address of MLflow's: write sqlite:///FOLDER/mlflow.db, http://HOST:PORT"),
        ("nonsense", "not an address"),
        ("localhost:5000", "http://HOST:PORT"),
        ("http://", "not an address"),
        ("postgresql://", "not an address"),
        ("sqlite://", "not an address"),
        ("sqlite:///README.md/mlflow.db", "cannot be written"),
    ],
)
def test_nonsense_gets_one_sentence(uri: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("this is no database")
    with pytest.raises(UserError) as error:
        resolve(uri)
    assert says in str(error.value) and "tracking.uri=" in str(error.value) and "\n" not in str(error.value)
    assert "sesame" not in str(error.value)


def test_where_to_look(tmp_path: Path) -> None:
    server = Settings("https://me:pw@mlflow.example.org/base", "e")
    assert run_url(server, "3", "abc") == "https://mlflow.example.org/base/#/experiments/3/runs/abc"
    assert ui_command(server) == "https://***@mlflow.example.org/base"
    assert run_url(server, "", "") == ""
    embedded = resolve(None, str(tmp_path / "my runs"))
    assert f"mlflow ui --workers 1 --backend-store-uri 'sqlite:///{tmp_path}/my runs/mlflow.db'" in ui_command(embedded)
    assert run_url(embedded, "1", "abc") == "http://127.0.0.1:5000/#/experiments/1/runs/abc"
