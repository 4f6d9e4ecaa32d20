"""Where a run comes from: code revision, versions, machine, user, job. Quick, and never an error."""

from __future__ import annotations

import functools
import getpass
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from app.tracking.masking import mask_text, mask_uri

KEY_PACKAGES = ("torch", "ray", "mlflow", "numpy", "transformers", "deepspeed", "trireme")
"""Whose versions are tags; all others are in `environment_text`."""
_GIT_SECONDS = 1.0


def provenance_tags() -> dict[str, str]:
    """Tags for the MLflow run, under MLflow's own names where it has one."""
    tags: dict[str, str] = {}
    for part in (_person, _command, _machine, _revision, _job, _versions):
        tags.update(_or_nothing(part))
    return {key: value for key, value in tags.items() if value}


def environment_text() -> str:
    """The installed packages as `name==version` lines, in alphabetical order, below the interpreter's version."""
    lines = [f"{name}=={version}" for name, version in sorted(_installed().items(), key=lambda item: item[0].lower())]
    return "\n".join([f"# Python {platform.python_version()} on {platform.platform()}", *lines, ""])


def user_tag() -> dict[str, str]:
    """Who started the run, as MLflow's tag; {} if nobody knows."""
    return _or_nothing(_person)


def _or_nothing(part: Callable[[], dict[str, str]]) -> dict[str, str]:
    try:
        return part()
    except Exception:  # a run is not refused because nobody knows who started it
        return {}


def _person() -> dict[str, str]:
    return {"mlflow.user": getpass.getuser()}


def _command() -> dict[str, str]:
    script = sys.argv[0] if sys.argv and sys.argv[0] not in ("-", "-c", "-m", "") else sys.executable
    return {
        "mlflow.source.name": script,
        "mlflow.source.type": "LOCAL",
        "trireme.command": mask_text(" ".join(sys.argv)),
        "trireme.directory": os.getcwd(),
    }


def _machine() -> dict[str, str]:
    return {
        "trireme.host": socket.gethostname(),
        "trireme.platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "trireme.python": platform.python_version(),
    }


def _revision() -> dict[str, str]:
    """The git revision of the current folder (a user's own task), else of our own sources."""
    for folder in (Path.cwd(), Path(__file__).parents[2]):
        if tags := _git(folder):
            return tags
    return {}


def _git(folder: Path) -> dict[str, str]:
    # One command tells commit, branch and changes; it must not take the index lock from somebody's `git commit`.
    status = _run(["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"], folder)
    found = dict(re.findall(r"^# branch\.(oid|head) (.+)$", status, re.M))
    if not re.fullmatch(r"[0-9a-f]{40,64}", found.get("oid", "")):
        return {}
    dirty = any(line and not line.startswith("#") for line in status.splitlines())
    branch = found.get("head", "")
    return {
        "mlflow.source.git.commit": found["oid"],
        "mlflow.source.git.branch": "" if branch == "(detached)" else branch,
        "mlflow.source.git.repoURL": mask_uri(_run(["git", "config", "--get", "remote.origin.url"], folder).strip()),
        "mlflow.source.git.dirty": str(dirty).lower(),
    }


def _run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _job() -> dict[str, str]:
    """The Ray or Slurm job that we run in."""
    metadata = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("metadata") or {}
    return {
        "trireme.ray_job_id": str(metadata.get("job_submission_id", "")),
        "trireme.ray_job_name": str(metadata.get("job_name", "")),
        "trireme.slurm_job_id": os.environ.get("SLURM_JOB_ID", ""),
    }


def _versions() -> dict[str, str]:
    installed = {name.lower(): version for name, version in _installed().items()}
    return {f"trireme.version.{name}": installed.get(name, "") for name in KEY_PACKAGES}


@functools.cache
def _installed() -> dict[str, str]:
    """Versions by name, from the names of the `.dist-info` folders: opening 200 files would take ten times as long."""
    found: dict[str, str] = {}
    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")
        except OSError:
            continue
        for name in names:
            if match := re.fullmatch(r"(.+?)-([^-]+?)\.dist-info", name):
                found.setdefault(match[1].replace("_", "-"), match[2])
    return found
