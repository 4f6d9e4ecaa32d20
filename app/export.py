"""A run's trained weights as files for others: safetensors, one torch file, or a folder that transformers loads.

The weights stream out of the sharded checkpoint file by file (app/checkpoint/reader.py); the folder appears
when it is whole.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from app.checkpoint import Commit, Weights, commits, export, latest_good, verify
from app.errors import UserError, nearest
from app.storage import Storage

if TYPE_CHECKING:
    from app.tasks.huggingface.task import HuggingFace

FORMATS = ("safetensors", "huggingface", "torch")


@dataclass(frozen=True)
class Exported:
    """What was written."""

    step: int
    format: str
    folder: Path
    files: list[str]
    size: int  # bytes of all files


def export_run(
    run: str,
    *,
    to: str,
    out: str | None = None,
    step: int | None = None,
    warn: Callable[[str], None] = lambda sentence: None,
) -> Exported:
    """Writes the newest good checkpoint of the run's folder (or that of `step`) into the folder `out`.

    out: must be empty or not exist; default: export/FORMAT-step-N in the run's folder, or, if that is in an object
        store, here. warn: told of each damaged checkpoint that was skipped.
    """
    if to not in FORMATS:
        what = f"is {to!r}{nearest(to, FORMATS)}" if to else "is not given"
        raise UserError(f"--to {what}; it can be {', '.join(FORMATS)}")
    storage = Storage(run)
    if not storage.exists("run.json"):
        raise UserError(f"{run} is not a run's folder: write the one that `trireme train` named, such as runs/mnist")
    commit = _commit(storage, step, warn)
    folder = _out(storage, to, commit.step, out)
    task = _hugging_face(storage) if to == "huggingface" else None
    with _appears(folder) as made:
        if task is not None:
            _write_model_folder(task, commit, made)
        else:
            export(commit, to="torch" if to == "torch" else "safetensors", out=made)
        sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    return Exported(commit.step, to, folder, list(sizes), sum(sizes.values()))


def _commit(storage: Storage, step: int | None, warn: Callable[[str], None]) -> Commit:
    """The checkpoint to export, its files read once to see that they are as they were written."""
    folder = storage.join("checkpoints").url
    if step is None:
        newest, passed = latest_good(folder)
        for sentence in passed:
            warn(sentence)
        if newest is None:
            why = passed[0] if passed else "train the run until it saves one"
            raise UserError(f"there is no good checkpoint in {folder}: {why}")
        return newest
    found = commits(folder)
    commit = next((each for each in found if each.step == step), None)
    if commit is None:
        steps = ", ".join(str(number) for number in sorted({each.step for each in found})) or "none"
        raise UserError(f"there is no checkpoint of step {step} in {folder}; there are those of {steps}")
    faults = verify(commit)
    if faults:
        raise UserError(f"the checkpoint of step {step} is damaged: {faults[0]}; leave --step out to export a good one")
    return commit


def _out(storage: Storage, to: str, step: int, written: str | None) -> Path:
    name = f"{to}-step-{step:08d}"
    usual = (
        storage.local_path / "export" / name if storage.is_local else Path(f"{storage.url.rsplit('/', 1)[-1]}-{name}")
    )
    folder = usual if written is None else Path(written).expanduser()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} holds something already; write an empty or a new folder as --out")
    return folder


def _hugging_face(storage: Storage) -> HuggingFace:
    """The run's task, if it is one whose model transformers can load."""
    from app.config_io import from_dict
    from app.tasks import load_task
    from app.tasks.huggingface.task import HuggingFace

    config = from_dict(yaml.safe_load(storage.read_bytes("config.yaml")), f"{storage.url}/config.yaml")
    task = load_task(config.task, config.task_args)
    if not isinstance(task, HuggingFace):
        raise UserError(
            f"the run's task is {config.task}, whose model transformers does not have; write --to safetensors or torch"
        )
    return task


def _write_model_folder(task: HuggingFace, commit: Commit, folder: Path) -> None:
    model, held = task.structure(), Weights(commit).shapes()
    for name, tensor in model.state_dict().items():
        if held.get(name) != tuple(tensor.shape):
            raise UserError(
                f"the run's task_args no longer make the model that was trained ({name} is {held.get(name)} in the "
                f"checkpoint and {tuple(tensor.shape)} now): give it the data of the training"
            )
    task.write_folder(folder)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})  # names of parameters that are another's too
    export(commit, to="safetensors", out=folder, leave_out=tied)


@contextmanager
def _appears(folder: Path) -> Iterator[Path]:
    """A folder to fill, which is in its place once it is full."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); write another folder as --out") from error
    try:
        yield temporary
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
