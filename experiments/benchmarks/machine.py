"""Where a figure was measured, and how figures are printed."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version


def machine() -> str:
    """Cores and versions, in one line."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray", "mlflow"))
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], about: str = "") -> str:
    """The machine, what else there is to say of it, and a table in Markdown."""
    lines = [f"{machine()}{about}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
