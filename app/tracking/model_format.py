"""How the files of a trained model wait for the writer (model_files.py writes, model.py reads)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import names

WEIGHTS = "model.pth"
"""The pickled module in the folder `data`, where `mlflow.pytorch.load_model` reads it."""
DESCRIPTION = "description.pkl"
PART = ".part"
"""The end of the name of a folder whose files are still being written."""
PICKLING = f"{names.FACE}.pickling"
"""The pickle module that `mlflow.pytorch.load_model` uses; see there."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What MLflow shows of a model.

    Args:
        inputs: An example of what the model takes.
        outputs: What it answers to that.
        requirements: Pins of installed packages.
        torch_version: The version of torch that has pickled it.
    """

    inputs: Any
    outputs: Any
    requirements: list[str]
    torch_version: str


def files_of(recipe_path: Path) -> Path:
    """The folder with a model's files, which is there only when everything is in it.

    Args:
        recipe_path: The recipe of the model; see `Tracker.model`.
    """
    return recipe_path.with_suffix("")


def part_of(files: Path) -> Path:
    """The folder in which a model's files are written.

    Args:
        files: The folder that it becomes when everything is in it.
    """
    return files.with_name(f"{files.name}{PART}")
