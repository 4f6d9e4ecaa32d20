"""Where a figure was measured, and how figures are printed."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version


def machine() -> str:
    """Cores and versions, in one line; of what there is, since one GPU needs neither Ray nor MLflow."""
    return f"{os.cpu_count()} cores, {', '.join(f'{name} {number}' for name, number in versions().items())}"


def versions() -> dict[str, str]:
    """Of Python and what of the packages there is."""
    here = {name: _version(name) for name in ("torch", "ray", "mlflow")}
    return {"Python": platform.python_version()} | {name: number for name, number in here.items() if number}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], about: str = "") -> str:
    """The machine, what else there is to say of it, and a table in Markdown."""
    lines = [f"{machine()}{about}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
