"""Where a run is tracked: configuration < environment < a SQLite database in the run's storage; needs no mlflow.

MLflow 3.17 no longer offers its file store, so a folder (or a `file:` URI) means the SQLite database `mlflow.db` in it.
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
_RIGHT = "write sqlite:///FOLDER/mlflow.db, http://HOST:PORT, a folder such as ./runs, or databricks"


@dataclass(frozen=True)
class Settings:
    """The resolved place of a run's tracking."""

    uri: str  # MLflow's tracking URI; may hold credentials, so show `mask_uri(uri)`
    experiment: str
    artifact_location: str | None = None  # for a new experiment; None lets the tracking server decide


def resolve_tracking(tracking: Any, storage: Any, environ: Mapping[str, str] = os.environ) -> Settings:
    """Where to track.

    tracking: the configuration's `tracking` (uri, experiment). storage: `run.storage`.
    Raises UserError: the URI is not one that MLflow could use.
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
    base, artifacts = re.split("[:+]", uri)[0], None
    if base == "sqlite":
        artifacts = ((folder or sqlite_path(uri).parent) / "mlartifacts").as_uri()
    elif base in _DATABASES:  # reached directly, such a store would put artifacts below the current folder
        artifacts = (folder / "mlartifacts").as_uri() if folder else f"{text.rstrip('/')}/mlartifacts"
    return Settings(uri, experiment, artifacts)


def _checked(uri: str, shown: str) -> str:
    """The URI in the form that MLflow is given; UserError if MLflow could not use it."""
    if uri == "databricks" or uri.startswith(("databricks://", "arn:aws:")):
        return uri
    try:
        scheme, parts = re.split("[:+]", uri)[0], urlsplit(uri)
        if " " in parts.netloc or parts.port == 0:  # which raises where it is not a number
            raise ValueError
    except ValueError:
        raise UserError(f"{shown} is not an address of MLflow's: {_RIGHT}") from None
    if (scheme in _SERVERS and parts.hostname) or (scheme in _DATABASES and (parts.netloc or parts.query)):
        return uri.rstrip("/")
    # A bare word is more often a typing mistake than a new folder.
    if not re.match(r"sqlite:///.|file:|[~./]|mlruns$", uri) and not Path(uri).is_dir():
        raise UserError(f"{shown} is not an address of MLflow's: {_RIGHT}")
    folder = Path(unquote(parts.path) if scheme == "file" else uri)
    file = (sqlite_path(uri) if scheme == "sqlite" else folder / "mlflow.db").expanduser().absolute()
    parent = next(folder for folder in file.parents if folder.exists())
    if file.is_dir() or not (shown.startswith("run.storage=") or _can_write(parent)):  # a storage says it of itself
        raise UserError(f"{shown}: the file {file} cannot be written: {_RIGHT}")
    if file.is_file() and file.open("rb").read(15) not in (b"", b"SQLite format 3"):
        raise UserError(f"{shown}: the file {file} is not a SQLite database: {_RIGHT}")
    return f"sqlite:///{file}"


def _can_write(folder: Path) -> bool:
    try:  # root may write everywhere, says os.access, also into /proc
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def sqlite_path(uri: str) -> Path:
    """The file of a SQLite URI. Taken literally, as SQLAlchemy does: `%20` is not a blank."""
    return Path(uri.split("?", 1)[0].removeprefix("sqlite:///"))


def run_url(settings: Settings, experiment_id: str, run_id: str) -> str:
    """The page of a run in the MLflow UI ("" while unknown). For SQLite: once `ui_command` is running."""
    if not run_id or not experiment_id:
        return ""
    page = f"#/experiments/{experiment_id}/runs/{run_id}"
    if settings.uri.startswith(_SERVERS):
        return f"{re.sub('//[^/]*@', '//', settings.uri)}/{page}"
    if settings.uri.startswith("databricks"):
        workspace = os.environ.get("DATABRICKS_HOST", "").rstrip("/")
        return f"{workspace}/ml/{page[2:]}" if workspace else ""
    return f"http://127.0.0.1:5000/{page}"


def ui_command(settings: Settings) -> str:
    """The one shell command that opens the MLflow UI on these settings; for a server, the address to open."""
    if settings.uri.startswith((*_SERVERS, "databricks")):
        return mask_uri(settings.uri)
    python, store = shlex.quote(sys.executable), shlex.quote(mask_uri(settings.uri))
    # Without the variable the server starts its job runners: ten processes instead of two.
    return f"MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false {python} -m mlflow ui --workers 1 --backend-store-uri {store}"
