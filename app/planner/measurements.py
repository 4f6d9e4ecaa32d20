"""What `trireme calibrate` and runs have measured of the GPUs of this machine, kept in files."""

import json
from pathlib import Path
from typing import Any

from app.data.files import cache_folder


def measured_values(gpu: str) -> dict[str, Any]:
    """What `trireme calibrate` has measured of a GPU of the catalogue; empty before that."""
    try:
        return dict(json.loads(_values_file(gpu).read_text()))
    except (OSError, ValueError):
        return {}


def save_measured_values(gpu: str, values: dict[str, Any]) -> Path:
    """Keep measured values of a GPU for later plans, over those that are known.

    Returns:
        The file.
    """
    return _write_values(gpu, measured_values(gpu) | values)


def drop_measured_value(gpu: str, name: str) -> None:
    """Remove one of the measured values of a GPU, if there is one."""
    values = measured_values(gpu)
    if name in values:
        del values[name]
        _write_values(gpu, values)


def gpus_with_measured_values() -> list[str]:
    """The GPUs of which values are kept."""
    prefix = "rates-"
    files = (cache_folder() / "planner").glob(f"{prefix}*.json")
    return sorted(file.stem.removeprefix(prefix) for file in files)


def _write_values(gpu: str, values: dict[str, Any]) -> Path:
    path = _values_file(gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(values, indent=1))
    temporary.replace(path)
    return path


def _values_file(gpu: str) -> Path:
    return cache_folder() / "planner" / f"rates-{gpu}.json"
