"""Where a run is tracked.

The configuration decides, then the environment, and by default it is a SQLite database in the run's
storage. MLflow 3.17 no longer has a file store, so that a folder (or a `file:` URI) means the
SQLite database `mlflow.db` in it. This file does not import mlflow.
"""

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from app.console.masking import mask_uri
from app.errors import UserError

_DATABASES = ("postgresql", "mysql", "mssql")
_SERVERS = ("http", "https")
_ADVICE = (
    "write sqlite:///FOLDER/mlflow.db, http://HOST:PORT, a folder such as ./runs, or databricks"
)


@dataclass(frozen=True)
class Settings:
    """Where a run is tracked.

    Args:
        uri: MLflow's tracking URI, which may contain credentials: show `mask_uri(uri)`.
        experiment: The name of the MLflow experiment.
        artifact_location: Where a new experiment keeps artifacts; None means that the server
            decides.
        also: Trackers beside MLflow (trackers.py).
    """

    uri: str
    experiment: str
    artifact_location: str | None = None
    also: tuple[str, ...] = ()


def resolve_tracking(
    tracking: Any, storage: Any, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Decide where to track a run.

    Args:
        tracking: The configuration's `tracking`, with `uri`, `experiment` and `also`.
        storage: `run.storage`.
        environ: The environment variables.

    Raises:
        UserError: MLflow could not use the URI.
    """
    text = str(storage)
    local = unquote(urlsplit(text).path) if text.startswith("file:") else text
    folder = None if "://" in local else Path(local).expanduser().absolute()
    candidates = {
        "tracking.uri": tracking.uri,
        "MLFLOW_TRACKING_URI": environ.get("MLFLOW_TRACKING_URI"),
        "run.storage": folder or Path("runs").absolute(),
    }
    source, uri = next((source, str(uri).strip()) for source, uri in candidates.items() if uri)
    uri = _checked(uri, f"{source}={mask_uri(uri)!r}")
    experiment = tracking.experiment or environ.get("MLFLOW_EXPERIMENT_NAME") or "trireme"
    scheme = re.split("[:+]", uri)[0]
    artifacts = None
    if scheme == "sqlite":
        artifacts = ((folder or sqlite_path(uri).parent) / "mlartifacts").as_uri()
    elif scheme in _DATABASES and folder:  # MLflow would put artifacts into the current folder
        artifacts = (folder / "mlartifacts").as_uri()
    elif scheme in _DATABASES:
        artifacts = f"{text.rstrip('/')}/mlartifacts"
    return Settings(uri, experiment, artifacts, tuple(tracking.also))


def _checked(uri: str, shown: str) -> str:
    """The URI in MLflow's form; raises UserError if MLflow could not use it."""
    if uri == "databricks" or uri.startswith(("databricks://", "arn:aws:")):
        return uri
    try:
        scheme = re.split("[:+]", uri)[0]
        parts = urlsplit(uri)
        if " " in parts.netloc or parts.port == 0:  # `port` raises if it is not a number
            raise ValueError
    except ValueError:
        raise UserError(f"{shown} is not an address of MLflow's: {_ADVICE}") from None
    is_server = scheme in _SERVERS and bool(parts.hostname)
    is_database = scheme in _DATABASES and bool(parts.netloc or parts.query)
    if is_server or is_database:
        return uri.rstrip("/")
    # A single word is more often a typing mistake than a new folder.
    if not re.match(r"sqlite:///.|file:|[~./]|mlruns$", uri) and not Path(uri).is_dir():
        raise UserError(f"{shown} is not an address of MLflow's: {_ADVICE}")
    folder = Path(unquote(parts.path) if scheme == "file" else uri)
    file = sqlite_path(uri) if scheme == "sqlite" else folder / "mlflow.db"
    file = file.expanduser().absolute()
    parent = next(folder for folder in file.parents if folder.exists())
    is_storage = shown.startswith("run.storage=")  # the storage reports that it is not writable
    if file.is_dir() or not (is_storage or _is_writable(parent)):
        raise UserError(f"{shown}: the file {file} cannot be written: {_ADVICE}")
    if file.is_file() and file.open("rb").read(15) not in (b"", b"SQLite format 3"):
        raise UserError(f"{shown}: the file {file} is not a SQLite database: {_ADVICE}")
    return f"sqlite:///{file}"


def _is_writable(folder: Path) -> bool:
    try:  # os.access says that root may write everywhere, even into /proc
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def sqlite_path(uri: str) -> Path:
    """The file of a SQLite URI, without decoding: as for SQLAlchemy, `%20` is not a blank."""
    return Path(uri.split("?", 1)[0].removeprefix("sqlite:///"))


TRAINING_VIEW = "workflowType=machine_learning"
"""What makes MLflow's page show a training run; without it MLflow 3 begins with its GenAI view."""


def run_url(settings: Settings, experiment_id: str, run_id: str) -> str:
    """The address of a run's page in the MLflow UI.

    Args:
        settings: Where the run is tracked; for SQLite the page exists while `ui_command` runs.
        experiment_id: MLflow's id of the experiment.
        run_id: MLflow's id of the run.

    Returns:
        The address; "" if an id or the Databricks host is missing.
    """
    if not run_id or not experiment_id:
        return ""
    path = f"experiments/{experiment_id}/runs/{run_id}"
    if settings.uri.startswith("databricks"):
        workspace = os.environ.get("DATABRICKS_HOST", "").rstrip("/")
        return f"{workspace}/ml/{path}" if workspace else ""
    server = "http://127.0.0.1:5000"
    if settings.uri.startswith(_SERVERS):
        server = re.sub("//[^/]*@", "//", settings.uri)
    return f"{server}/#/{path}?{TRAINING_VIEW}"


def ui_command(settings: Settings) -> str:
    """The shell command that starts the MLflow UI; for a server, the address to open."""
    if settings.uri.startswith((*_SERVERS, "databricks")):
        return mask_uri(settings.uri)
    python = shlex.quote(sys.executable)
    store = shlex.quote(mask_uri(settings.uri))
    # Without the variable the server starts its job runners: ten processes instead of two.
    return (
        f"MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false {python} -m mlflow ui --workers 1 "
        f"--backend-store-uri {store}"
    )
