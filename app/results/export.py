"""A run's trained weights as files for others: safetensors, one torch file, a folder that transformers loads, or its
adapters, which peft loads.

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
from typing import TYPE_CHECKING, Any

from app.checkpoint import Commit, Weights, export
from app.errors import UserError, nearest
from app.results.trained import checkpoint_of, require_same, task_of
from app.run.look import open_run
from app.storage.storage import Storage

if TYPE_CHECKING:
    from app.tasks.huggingface.task import HuggingFace

FORMATS = ("safetensors", "huggingface", "peft", "torch")


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
    storage = open_run(run)
    commit = checkpoint_of(storage, step, warn)
    folder = _out(storage, to, commit.step, out)
    task = _hugging_face(storage) if to in ("huggingface", "peft") else None
    if to == "peft" and task is not None and task.recipe.adapters is None:
        raise UserError("the run has trained all weights, not adapters (task_args.lora): write --to huggingface")
    with _appears(folder) as made:
        if task is not None and task.recipe.adapters is not None:
            _write_adapted(task, commit, made, merged=to == "huggingface")
        elif task is not None:
            _write_model_folder(task, commit, made)
        else:
            export(commit, to="torch" if to == "torch" else "safetensors", out=made)
        sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    return Exported(commit.step, to, folder, list(sizes), sum(sizes.values()))


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
    from app.tasks.huggingface.task import HuggingFace

    task = task_of(storage)
    if not isinstance(task, HuggingFace):
        raise UserError(
            f"the run's task is {type(task).__name__}, whose model transformers does not have; write --to safetensors "
            "or torch"
        )
    return task


def _write_model_folder(task: HuggingFace, commit: Commit, folder: Path) -> None:
    model = task.structure()
    require_same(model, Weights(commit))
    task.write_folder(folder)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})  # names of parameters that are another's too
    export(commit, to="safetensors", out=folder, leave_out=tied)


def _write_adapted(task: HuggingFace, commit: Commit, folder: Path, merged: bool) -> None:
    """The adapters in peft's own format; merged: the whole model, with what they have learnt added to its weights."""
    model: Any = task.recipe.wrapped()
    inner, weights = model.get_base_model(), Weights(commit)
    require_same(inner, weights)
    inner.load_state_dict({name: weights.read(name) for name in inner.state_dict()})
    if merged:
        model.merge_and_unload().save_pretrained(folder)
        task.write_folder(folder)
    else:
        model.save_pretrained(folder)
        task.tokenizer.save_pretrained(folder)


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
