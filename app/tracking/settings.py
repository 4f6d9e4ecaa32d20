"""Where a run is tracked: configuration < environment < a SQLite database in the run's storage, checked without mlflow.

MLflow's own file store is no longer offered by MLflow 3.17, so a folder (or a `file:` URI) means the SQLite database
`mlflow.db` in that folder.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from app.errors import UserError
from app.tracking.masking import mask_uri

DEFAULT_EXPERIMENT = "trireme"
_DATABASES = ("postgresql", "mysql", "mssql")
_SERVERS = ("http", "https")
_SCHEMES = (*_SERVERS, "sqlite", *_DATABASES, "file", "databricks")
_RIGHT = "write sqlite:///FOLDER/mlflow.db, http://HOST:PORT, a folder such as ./runs, or databricks"


@dataclass(frozen=True)
class Settings:
    """The resolved place of a run's tracking.

    Attributes:
        uri: MLflow tracking URI; may hold credentials, so show `mask_uri(uri)`.
        experiment: name of the MLflow experiment.
        artifact_location: URI for the artifacts of a new experiment; None lets the tracking server decide.
        source: what decided the URI: "tracking.uri", "MLFLOW_TRACKING_URI" or "run.storage".
    """

    uri: str
    experiment: str
    artifact_location: str | None
    source: str

    @property
    def embedded(self) -> bool:
        """Whether this is a SQLite database that no server needs to be running for."""
        return self.uri.startswith("sqlite:")


def resolve_tracking(tracking: Any, storage: Any, environ: Mapping[str, str] = os.environ) -> Settings:
    """Where to track.

    Args:
        tracking: the configuration's `tracking` (uri, experiment).
        storage: `run.storage`, as text or as an object whose `str` or `url` is that text.
    Raises:
        UserError: the URI is not one that MLflow could use.
    """
    folder = _local_folder(getattr(storage, "url", None) or str(storage))
    if tracking.uri:
        uri, source = str(tracking.uri), "tracking.uri"
    elif environ.get("MLFLOW_TRACKING_URI"):
        uri, source = environ["MLFLOW_TRACKING_URI"], "MLFLOW_TRACKING_URI"
    else:
        uri, source = str(folder or Path("runs").absolute()), "run.storage"
    uri = _checked(uri.strip(), source)
    experiment = (tracking.experiment or environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT).strip()
    if not 0 < len(experiment) <= 500:
        raise UserError(f"tracking.experiment has {len(experiment)} characters; write a name of 1 to 500.")
    return Settings(uri, experiment, _artifact_location(uri, folder, str(storage)), source)


def _local_folder(storage: str) -> Path | None:
    """The storage as an absolute folder; None if it is an object store."""
    if storage.startswith("file:"):
        storage = unquote(urlsplit(storage).path)
    return None if "://" in storage else Path(storage).expanduser().absolute()


def _artifact_location(uri: str, folder: Path | None, storage: str) -> str | None:
    scheme = uri.split(":", 1)[0].split("+", 1)[0]
    if scheme == "sqlite":
        return ((folder or sqlite_path(uri).parent) / "mlartifacts").as_uri()
    if scheme in _DATABASES:
        # Reached directly, such a store would put artifacts below the current folder.
        return (folder / "mlartifacts").as_uri() if folder else f"{storage.rstrip('/')}/mlartifacts"
    return None


def _checked(uri: str, source: str) -> str:
    """The URI in the form mlflow is given; UserError if it is nonsense."""
    shown = f"{source}={mask_uri(uri)!r}"
    scheme, colon, rest = uri.partition(":")
    if uri == "databricks" or uri.startswith("databricks://") or uri.startswith("arn:aws:"):
        return uri
    if "://" in uri or scheme in ("file", "sqlite", *_SERVERS):
        base = scheme.split("+", 1)[0]
        if base == "file":
            return _sqlite_in(Path(unquote(urlsplit(uri).path)), shown)
        if base == "sqlite":
            return _checked_sqlite(uri, shown)
        if base in _SERVERS:
            return _checked_server(uri, shown)
        if base in _DATABASES:
            if not urlsplit(uri).hostname and not urlsplit(uri).query:
                raise UserError(f"{shown} names no host; write {base}://USER:PASSWORD@HOST/DATABASE.")
            return uri
        if scheme in {entry.name for entry in entry_points(group="mlflow.tracking_store")}:
            return uri
        near = difflib.get_close_matches(scheme, _SCHEMES, n=1)
        hint = f"did you mean {near[0]}:{'//' if rest.startswith('//') else ''}…? Otherwise " if near else ""
        raise UserError(f"{shown} has the unknown scheme {scheme!r}: {hint}{_RIGHT}.")
    if colon and re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri):
        raise UserError(f"{shown} lacks its scheme; write http://{uri}.")
    return _checked_folder(uri, shown)


def _checked_folder(text: str, shown: str) -> str:
    folder = Path(text).expanduser()
    if folder.is_file():
        raise UserError(f"{shown} is a file; for a SQLite database write sqlite:///{folder.absolute()}.")
    if not folder.is_dir() and not re.match(r"[~./]", text) and text != "mlruns":
        # A bare word is more often a slip than a new folder.
        raise UserError(f"{shown} is neither a URI nor a folder that is there; {_RIGHT}.")
    return _sqlite_in(folder, shown)


def _checked_server(uri: str, shown: str) -> str:
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"{shown} is not a server's address ({error}); write http://HOST:PORT.") from None
    if not host or re.search(r"\s", uri):
        raise UserError(f"{shown} names no host; write http://HOST:PORT.")
    return uri.rstrip("/")


def sqlite_path(uri: str) -> Path:
    """The file of a SQLite URI. Taken literally, as SQLAlchemy does: `%20` is no blank."""
    return Path(uri.split("?", 1)[0].removeprefix("sqlite:///"))


def _sqlite_in(folder: Path, shown: str) -> str:
    return _checked_sqlite(f"sqlite:///{folder.expanduser().absolute() / 'mlflow.db'}", shown)


def _checked_sqlite(uri: str, shown: str) -> str:
    if not uri.startswith("sqlite:///") or uri in ("sqlite:///", "sqlite:///:memory:"):
        raise UserError(f"{shown} names no database file; write sqlite:///FOLDER/mlflow.db.")
    path = sqlite_path(uri).expanduser().absolute()
    if path.is_dir():
        raise UserError(f"{shown} is a folder; write sqlite:///{path}/mlflow.db.")
    if path.is_file() and path.stat().st_size and path.open("rb").read(15) != b"SQLite format 3":
        raise UserError(f"{shown}: {path} is not a SQLite database; give another file.")
    parent = next(folder for folder in path.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"{shown}: {parent} cannot be written; give a folder of your own.")
    return f"sqlite:///{path}"


def run_url(settings: Settings, experiment_id: str | None, run_id: str | None) -> str:
    """The page of a run in the MLflow UI ("" while unknown). An embedded store: once `ui_command` is running."""
    if not run_id or not experiment_id:
        return ""
    page = f"#/experiments/{experiment_id}/runs/{run_id}"
    if settings.uri.startswith(_SERVERS):
        parts = urlsplit(settings.uri)
        host = parts.netloc.rpartition("@")[2]
        return f"{urlunsplit((parts.scheme, host, parts.path.rstrip('/'), '', ''))}/{page}"
    if settings.uri.startswith("databricks"):
        workspace = os.environ.get("DATABRICKS_HOST", "").rstrip("/")
        return f"{workspace}/ml/experiments/{experiment_id}/runs/{run_id}" if workspace else ""
    return f"http://127.0.0.1:5000/{page}"


def ui_command(settings: Settings) -> str:
    """The one shell command that opens the MLflow UI on these settings; for a server, the address to open."""
    if settings.uri.startswith((*_SERVERS, "databricks")):
        return mask_uri(settings.uri)
    beside = Path(sys.executable).parent / "mlflow"
    program = "mlflow" if shutil.which("mlflow") or not beside.exists() else shlex.quote(str(beside))
    store = shlex.quote(mask_uri(settings.uri))
    # Without the variable the server starts its job runners: ten processes instead of two.
    return f"MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false {program} ui --workers 1 --backend-store-uri {store}"
