"""Where a run is tracked: configuration < environment < a SQLite database in the run's storage; needs no mlflow.

MLflow 3.17 no longer offers its file store, so a folder (or a `file:` URI) means the SQLite database `mlflow.db` in it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from app.errors import UserError, nearest
from app.masking import mask_uri

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
    base, scheme = re.split("[:+]", uri)[0], uri.partition(":")[0]
    if uri == "databricks" or uri.startswith(("databricks://", "arn:aws:")):
        return uri
    if base in (*_SERVERS, *_DATABASES):
        return _checked_server(uri, base, shown)
    if base == "sqlite":
        if not uri.startswith("sqlite:///") or uri in ("sqlite:///", "sqlite:///:memory:"):
            raise UserError(f"{shown} names no database file; write sqlite:///FOLDER/mlflow.db.")
        return _checked_file(sqlite_path(uri), shown)
    if base == "file":
        return _checked_file(Path(unquote(urlsplit(uri).path)) / "mlflow.db", shown)
    if "://" in uri:
        hint = nearest(scheme, (*_SERVERS, "sqlite", *_DATABASES, "file", "databricks"))
        raise UserError(f"{shown} has the unknown scheme {scheme!r}{hint}: {_RIGHT}.")
    if re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri):
        raise UserError(f"{shown} lacks its scheme; write http://{uri}.")
    if not Path(uri).expanduser().is_dir() and not re.match(r"[~./]", uri) and uri != "mlruns":
        # A bare word is more often a typing mistake than a new folder.
        raise UserError(f"{shown} is neither a URI nor a folder that exists; {_RIGHT}.")
    return _checked_file(Path(uri) / "mlflow.db", shown)


def _checked_server(uri: str, base: str, shown: str) -> str:
    right = "http://HOST:PORT" if base in _SERVERS else f"{base}://USER:PASSWORD@HOST/DATABASE"
    try:
        host, _ = urlsplit(uri).hostname or (base in _DATABASES and urlsplit(uri).query), urlsplit(uri).port
    except ValueError as error:
        raise UserError(f"{shown} is not a server's address ({error}); write {right}.") from None
    if not host or re.search(r"\s", uri):
        raise UserError(f"{shown} names no host; write {right}.")
    return uri.rstrip("/")


def _checked_file(path: Path, shown: str) -> str:
    path = path.expanduser().absolute()
    parent = next((folder for folder in path.parents if folder.exists()), path)
    if path.is_dir():
        raise UserError(f"{shown} is a folder; write sqlite:///{path}/mlflow.db.")
    if path.is_file() and path.stat().st_size and path.open("rb").read(15) != b"SQLite format 3":
        raise UserError(f"{shown}: {path} is not a SQLite database; give another file.")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{shown}: {parent} cannot be written; give a folder of your own.")
    return f"sqlite:///{path}"


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
