"""Export a run's trained weights: safetensors, a torch file, a transformers folder, peft adapters.

The weights are read from the sharded checkpoint one file at a time (app/checkpoint/reader.py). The
output folder appears under its name only when it is complete.
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

from app.checkpoint import Commit, Weights, export
from app.errors import FULL, UserError, free_space, nearest
from app.results.trained import checkpoint_of, require_same, task_of
from app.run.look import open_run
from app.storage.storage import Storage

if TYPE_CHECKING:
    from app.tasks.huggingface.task import HuggingFace

FORMATS = ("safetensors", "huggingface", "peft", "torch")


@dataclass(frozen=True)
class Exported:
    """The files that an export has written.

    Args:
        step: The step of the checkpoint.
        format: safetensors, huggingface, peft or torch.
        folder: Where the files are.
        files: Their names.
        size: Bytes of all files.
    """

    step: int
    format: str
    folder: Path
    files: list[str]
    size: int


def export_run(
    run: str,
    *,
    to: str,
    out: str | None = None,
    step: int | None = None,
    warn: Callable[[str], None] = lambda sentence: None,
) -> Exported:
    """Export a checkpoint of a run.

    Args:
        run: The run's folder.
        to: One of `FORMATS`.
        out: The folder to write, which must be empty or not exist. By default
            export/FORMAT-step-N in the run's folder, or, if that is in an object store,
            RUN-FORMAT-step-N in the current folder.
        step: The checkpoint of this step; None means the newest good one.
        warn: Called with a sentence for each damaged checkpoint that is skipped.

    Raises:
        UserError: The run has no such checkpoint, its task does not support the format, or the
            folder cannot be written.
    """
    if to not in FORMATS:
        raise UserError(f"--to is {to!r}{nearest(to, FORMATS)}; it can be {', '.join(FORMATS)}")
    storage = open_run(run)
    commit = checkpoint_of(storage, step, warn)
    folder = _output_folder(storage, out, name=f"{to}-step-{commit.step:08d}")
    task = _hugging_face(storage) if to in ("huggingface", "peft") else None
    if to == "peft" and task is not None and task.recipe.adapters is None:
        raise UserError(
            "the run has trained all weights, not adapters (task_args.lora): write --to huggingface"
        )
    with _atomic_folder(folder) as temporary:
        if task is not None and task.recipe.adapters is not None:
            _write_adapted(task, commit, temporary, merge=to == "huggingface")
        elif task is not None:
            _write_model_folder(task, commit, temporary)
        else:
            export(commit, to="torch" if to == "torch" else "safetensors", out=temporary)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    return Exported(
        step=commit.step, format=to, folder=folder, files=list(sizes), size=sum(sizes.values())
    )


def _output_folder(storage: Storage, out: str | None, *, name: str) -> Path:
    """The folder that --out names, or the default one, after a check that it is empty."""
    if out is not None:
        folder = Path(out).expanduser()
    elif storage.is_local:
        folder = storage.local_path / "export" / name
    else:
        run_name = storage.url.rsplit("/", 1)[-1]
        folder = Path(f"{run_name}-{name}")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; write an empty or a new folder as --out")
    return folder


def _hugging_face(storage: Storage) -> HuggingFace:
    """The run's task, if transformers can load its model.

    Raises:
        UserError: It is another task.
    """
    from app.tasks.huggingface.task import HuggingFace

    task = task_of(storage)
    if not isinstance(task, HuggingFace):
        raise UserError(
            f"the run's task is {type(task).__name__}, whose model transformers does not have; "
            "write --to safetensors or torch"
        )
    return task


def _write_model_folder(task: HuggingFace, commit: Commit, folder: Path) -> None:
    model = task.structure()
    require_same(model, Weights(commit))
    task.write_folder(folder)
    # Tied parameters have two names; transformers expects only one of them in the file.
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    export(commit, to="safetensors", out=folder, leave_out=tied)


def _write_adapted(task: HuggingFace, commit: Commit, folder: Path, *, merge: bool) -> None:
    """Write the adapters in peft's format, or with `merge` the model with the adapters merged."""
    from app.tasks.huggingface.quantized import restore_layers

    model = task.recipe.build_with_adapters()
    base_model = model.get_base_model()
    weights = Weights(commit)
    require_same(base_model, weights)
    base_model.load_state_dict({name: weights.read(name) for name in base_model.state_dict()})
    if merge:
        restore_layers(model)
        model.merge_and_unload().save_pretrained(folder)
        task.write_folder(folder)
    else:
        model.save_pretrained(folder)
        task.tokenizer.save_pretrained(folder)


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` when the block ends without an error."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}); write another folder as --out"
        ) from error
    try:
        yield temporary
        _set_usual_mode(temporary)
        os.replace(temporary, folder)
    except OSError as error:
        if error.errno not in FULL:
            raise
        shutil.rmtree(temporary, ignore_errors=True)
        room = f"make room there, {free_space(str(folder))}"
        raise UserError(
            f"{folder} cannot be written ({error.strerror}): {room}, or write another folder as "
            "--out"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _set_usual_mode(folder: Path) -> None:
    """Give files the mode that the umask leaves, as the folder has it."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(folder.stat().st_mode & 0o666)
