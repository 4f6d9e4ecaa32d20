"""Where a figure was measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version


def machine() -> str:
    """Cores and versions, in one line."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray", "mlflow"))
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}"
