"""Environment variables that go along with a job: plain ones through Ray, secret ones past it.

Ray keeps a job's runtime environment, values and all, and shows it to whoever may ask for it. So secrets go over SSH
into a file on the head that only its owner reads, and the job removes the file when it has read it.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import UserError

if TYPE_CHECKING:
    from app.config import Config

ALWAYS = ("URI", "USERNAME", "TOKEN", "PASSWORD")  # of MLFLOW_TRACKING_…


def chosen(names: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """Plain and secret variables of this process that are to go along: those named, and MLflow's where they are set.

    Raises:
        UserError: a variable is asked for by value, or is not set here.
    """
    from app.masking import is_secret, mask_uri

    for name in names:
        if "=" in name:
            raise UserError(f"--env takes a variable's name, not its value: set {name.partition('=')[0]} and name it")
        if name not in os.environ:
            raise UserError(f"the environment variable {name}, which --env names, is not set here")
    always = ("MLFLOW_EXPERIMENT_NAME", *(f"MLFLOW_TRACKING_{name}" for name in ALWAYS))
    found = {name: os.environ[name] for name in (*names, *always) if name in os.environ}
    secret = {
        name: value
        for name, value in found.items()
        if is_secret(name) or "KEY" in name.upper().split("_") or mask_uri(value) != value
    }
    return {name: value for name, value in found.items() if name not in secret}, secret


def refuse_written(config: Config) -> None:
    """Raises UserError if the configuration holds a secret: it would be shipped, and shown by Ray."""
    from app.config_io import flatten, to_dict
    from app.masking import is_secret, mask_uri

    for key, value in flatten(to_dict(config)).items():
        if isinstance(value, str) and value and (mask_uri(value) != value or is_secret(key)):
            raise UserError(
                f"{key} holds a secret, which would be shipped with the job and shown by Ray: put it into an "
                "environment variable (MLflow's goes along by itself, others with --env NAME)"
            )


def leave(cluster: str, secret: Mapping[str, str]) -> str:
    """Puts secrets into a file on the head of `cluster`, for the job alone; returns its path there.

    Raises:
        UserError: it could not be written.
    """
    from cluster.files import read_ray_file
    from cluster.launch import head_host
    from cluster.ray_file import is_this_machine
    from cluster.remote import login_of, run

    data, file = read_ray_file(cluster)
    name, text = f".trireme/secrets/{uuid.uuid4().hex}", json.dumps(dict(secret))
    if is_this_machine(data):
        path = Path.home() / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.write_text(text)
        return str(path)
    command = f"umask 077; mkdir -p ~/.trireme/secrets; cat > ~/{name}; echo ~/{name}"
    answer = run(login_of(data), head_host(data, file), command, stdin=text)
    if answer.problem or answer.code:
        raise UserError(f"the secrets cannot be put on the head: {answer.problem or answer.err.strip()[-200:]}")
    return answer.out.strip().splitlines()[-1]


def take(path: Path) -> None:
    """Puts the secrets of a file into this process' environment and removes the file."""
    if path.is_file():
        os.environ.update(json.loads(path.read_text()))
        path.unlink()
        os.environ.pop("TRIREME_SECRETS", None)
