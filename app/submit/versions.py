"""Versions here against versions there: Ray and Python before a job is sent, the rest at its start."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping

from app.doctor.probe import packages
from app.errors import UserError

PACKAGES = ("torch", "ray", "mlflow", "numpy", "omegaconf")
VARIABLE = "TRIREME_SUBMITTED_WITH"


def here() -> dict[str, str]:
    """Versions of what training depends on, in this process's Python."""
    return {"python": platform.python_version()} | packages(PACKAGES)


def check_before(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raises UserError if the cluster's Ray or Python could not run what is sent from here. Pure."""
    if theirs.get("ray") and mine.get("ray") != theirs["ray"]:
        raise UserError(
            f"the cluster runs Ray {theirs['ray']}, and this is Ray {mine.get('ray')}: install ray=={theirs['ray']} "
            "here, or set the cluster up with the same constraints.txt"
        )
    if theirs.get("python") and _minor(theirs["python"]) != _minor(mine["python"]):
        raise UserError(
            f"the cluster runs Python {theirs['python']}, and this is Python {mine['python']}: submit from Python "
            f"{_minor(theirs['python'])}, or set the cluster up with {_minor(mine['python'])}"
        )


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Packages whose versions differ, for a note; the part after + (cpu, cu128) may. Pure."""
    return [
        f"{name} is {theirs.get(name, 'missing')} on the cluster and {wanted} where the job came from"
        for name, wanted in mine.items()
        if name != "python" and theirs.get(name, "").partition("+")[0] != wanted.partition("+")[0]
    ]


def _minor(full: str) -> str:
    return ".".join(full.split(".")[:2])


def told() -> dict[str, str]:
    """What the submitter had, as the job's environment says; empty outside of a job."""
    try:
        return json.loads(os.environ.get(VARIABLE, "{}"))
    except ValueError:
        return {}
