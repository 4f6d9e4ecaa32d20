"""What the driver says of tracking, without MLflow: secrets masked, where to track, in one sentence what is wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from app.errors import UserError
from app.masking import is_secret, mask_text, mask_tree, mask_uri, mask_value
from app.tracking.settings import Settings, resolve_tracking, run_url, ui_command
from app.tracking.tracker import Tracker

# --- masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["password", "db.Password", "hf_token", "apiKey", "AWS_SECRET_ACCESS_KEY", "x.credentials.user"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name) and mask_value(name, "abc") == "***"


@pytest.mark.parametrize(
    "name",
    ["tokenizer", "train/tokens_per_second", "monkey", "task_args.d_model", "pad_token", "label_key", "key", "token.x"],
)
def test_names_of_no_secrets(name: str) -> None:
    assert not is_secret(name) and mask_value(name, "abc") == "abc"


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


def test_secrets_in_a_text() -> None:
    text = "hf_token: abc\nvocab: 3\nuri: http://u:p@h\ntokenizer: bpe\n"
    assert mask_text(text) == "hf_token: ***\nvocab: 3\nuri: http://***@h\ntokenizer: bpe\n"
    assert mask_text("train x.yaml task_args.password='a b' a=b") == "train x.yaml task_args.password=*** a=b"
    assert mask_text('{"password": "a b", "n": 1}') == '{"password": ***, "n": 1}'


def test_secrets_in_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "runs")
    inner = {"b": 1, "secret": "x", "none": None, "empty": {}}
    tree = {"a": inner, "list": ["http://u:p@h", 2], "token": 5, "c": "runs"}
    masked = mask_tree({**tree, "run": {"storage": "./runs"}})
    assert masked["run"] == {"storage": "./runs"}, "part of another word is not the password"
    hidden = {"b": 1, "secret": "***", "none": None, "empty": {}}
    assert masked | {"run": 0} == {"a": hidden, "list": ["http://***@h", 2], "token": 5, "c": "***", "run": 0}


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


# --- settings -----------------------------------------------------------------------------------------------------


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
    server = Settings("https://me:pw@mlflow.example.org/base", "e")
    assert run_url(server, "3", "abc") == "https://mlflow.example.org/base/#/experiments/3/runs/abc"
    assert ui_command(server) == "https://***@mlflow.example.org/base"
    assert run_url(server, "", "") == ""
    embedded = resolve(None, str(tmp_path / "my runs"))
    assert f"mlflow ui --workers 1 --backend-store-uri 'sqlite:///{tmp_path}/my runs/mlflow.db'" in ui_command(embedded)
    assert run_url(embedded, "1", "abc") == "http://127.0.0.1:5000/#/experiments/1/runs/abc"
