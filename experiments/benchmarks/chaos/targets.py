"""What is fuzzed: configuration, cluster files, data of every format, a run's folder and its checkpoints."""

from __future__ import annotations

import gzip
import io
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app import checkpoint
from app.checkpoint import Checkpointer
from app.config import Config, RunConfig
from app.config_check import check_trainable
from app.config_io import explain, load_config
from app.data.loader import fetch
from app.run.manifest import Run
from app.tasks import load_task
from cluster.shape import read_cluster
from cluster.validate import validate_file
from experiments.benchmarks.chaos.fuzz import Target

ROOT = Path(__file__).parents[3]


def targets(folder: Path) -> list[Target]:
    """folder: where to make what is mutated."""
    return [
        Target("configuration", _all("experiments/*.yaml"), _configuration),
        Target("arguments", {"arguments": ARGUMENTS.encode()}, _arguments),
        Target("cluster files", _all("cluster/*.yaml", leave=("hardware.yaml",)), _cluster),
        Target("IDX images", _idx(), _images),
        Target("NumPy images", _numpy_images(), _numpy),
        Target(
            "tables", {"table.csv": _table().encode(), "table.csv.gz": gzip.compress(_table().encode(), mtime=0)}, _csv
        ),
        Target("texts", {"text.txt": ("A penny saved, ein Fünfer. " * 40).encode()}, _text),
        Target("tokens", _tokens(), _token_file),
        Target("checkpoints", _checkpoints(folder / "good"), _resume),
        Target("run folders", _run_folder(), _run),
    ]


def _all(pattern: str, leave: tuple[str, ...] = ()) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(ROOT.glob(pattern)) if path.name not in leave}


# --- configuration --------------------------------------------------------------------------------------------------

ARGUMENTS = """task=image_classification
train.steps=10
train.global_batch_size=16
optimizer.betas=[0.9,0.99]
resources_per_worker.CPU=0.5
parallel.stages=[1,2]
checkpoint.load=runs/other
tracking.tags.team=a
strategy=fsdp"""


def _configuration(folder: Path, name: str) -> None:
    config = load_config([folder / name])
    check_trainable(config)
    explain(config)


def _arguments(folder: Path, name: str) -> None:
    path = folder / name
    lines = path.read_bytes().decode(errors="replace").split("\n") if path.exists() else []
    check_trainable(load_config([], [line for line in lines if "=" in line]))


def _cluster(folder: Path, name: str) -> None:
    validate_file(str(folder / name))
    read_cluster(folder / name)


# --- data -----------------------------------------------------------------------------------------------------------


def _train_a_batch(task: str, arguments: dict[str, Any]) -> None:
    """What the first step does with the data: a model, and a batch's loss."""
    made = load_task(task, arguments)
    made.describe()
    data = made.train_data()
    batch = fetch(data, [(index % len(data), index) for index in range(4)])  # type: ignore[arg-type]
    torch.manual_seed(0)
    made.loss(made.build_model(), batch)


def _idx() -> dict[str, bytes]:
    chance = np.random.default_rng(0)
    files = {}
    for part, count in (("train", 20), ("t10k", 8)):
        images = chance.integers(0, 256, (count, 4, 4), dtype=np.uint8)
        files[f"{part}-images-idx3-ubyte"] = struct.pack(">BBBBIII", 0, 0, 8, 3, *images.shape) + images.tobytes()
        labels = bytes(i % 3 for i in range(count))
        files[f"{part}-labels-idx1-ubyte.gz"] = gzip.compress(
            struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels, mtime=0
        )
    return files


def _images(folder: Path, name: str) -> None:
    _train_a_batch("image_classification", {"data": str(folder), "model": "mlp", "model_args": {"hidden": [4]}})


def _numpy_images() -> dict[str, bytes]:
    chance = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "images": chance.integers(0, 256, (20, 4, 4), dtype=np.uint8),
        "labels": np.arange(20) % 3,
    }
    whole, one, other = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez(whole, **arrays)
    np.save(one, arrays["images"])
    np.save(other, arrays["labels"])
    torched = io.BytesIO()
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, torched)
    both = {"a.npz": whole.getvalue(), "b.npy": one.getvalue(), "b_labels.npy": other.getvalue()}
    return both | {"c.pt": torched.getvalue()}


def _numpy(folder: Path, name: str) -> None:
    data = folder / ("b.npy" if name.startswith("b") else name)
    _train_a_batch("image_classification", {"data": str(data), "model": "mlp", "model_args": {"hidden": [4]}})


def _table() -> str:
    rows = [f"{i % 7},{'xz'[i % 2]},{i * 0.5},2024-01-{i % 27 + 1:02}" for i in range(40)]
    return "\n".join(["a,kind,y,day", *rows]) + "\n"


def _csv(folder: Path, name: str) -> None:
    _train_a_batch("tabular", {"data": str(folder / name), "target": "y", "model_args": {"hidden": [4]}})


def _text(folder: Path, name: str) -> None:
    _train_a_batch("language_modelling", {"data": str(folder / name), **SMALL})


SMALL = {"sequence_length": 8, "d_model": 8, "n_layers": 1, "n_heads": 2}


def _tokens() -> dict[str, bytes]:
    numbers = (np.arange(400) % 50).astype(np.uint16)
    saved = io.BytesIO()
    np.save(saved, numbers)
    return {"tokens.bin": numbers.tobytes(), "tokens.npy": saved.getvalue()}


def _token_file(folder: Path, name: str) -> None:
    _train_a_batch("language_modelling", {"data": str(folder / name), "vocab_size": 64, **SMALL})


# --- checkpoints and runs -------------------------------------------------------------------------------------------


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((50,), float(step)), "b": torch.arange(7.0) * step}, "n": step}


def _checkpoints(folder: Path) -> dict[str, bytes]:
    saver = Checkpointer(str(folder), keep_last=2, attempt="first")
    for step in (1, 2):
        saver.save(_state(step), meta={"step": step}, per_rank=step)
    saver.close()
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _resume(folder: Path, name: str) -> None:
    """Resumes from the newest good one: what it loads must be what that step saved."""
    found, passed = checkpoint.latest_good(str(folder), verify="sha256")
    assert found is not None, "two good checkpoints, of which one file is changed, and none is found"
    assert all("\n" not in sentence for sentence in passed)
    state = _state(0)
    checkpoint.load(found, state)
    right = _state(found.step)
    assert state["n"] == found.step, f"{state['n']} was loaded as step {found.step}"
    assert all(torch.equal(state["model"][k], right["model"][k]) for k in right["model"]), "other weights were loaded"
    assert checkpoint.load_per_rank(found, 0) == found.step
    chosen = checkpoint.find(str(folder))
    checkpoint.load(chosen, _state(0))


def _run_folder() -> dict[str, bytes]:
    identity = {"task": "", "task_args": {}, "train.seed": 0, "optimizer.name": "adamw"}
    manifest = {"name": "run", "uid": "0" * 32, "created": 1.0, "identity": identity, "status": "failed", "starts": 2}
    manifest |= {"steps": 10, "mlflow_run_id": None, "stages": [1, 2], "summary": {"step": 3}}
    lease = {"attempt": "a", "host": "elsewhere", "pid": 1, "process_started": 1.0, "time": time.time() - 3600}
    return {"run.json": json.dumps(manifest, indent=1).encode(), "lease.json": json.dumps(lease).encode()}


def _run(folder: Path, name: str) -> None:
    run = Run(Config(run=RunConfig(name=folder.name, storage=str(folder.parent))))
    run.refuse_if_held(lambda text: None, seconds=0.0)
    checked: list[Callable[[], Any]] = [lambda: run.finished, lambda: run.local_folder, lambda: run.folder]
    for look in checked:
        look()
    made = [run.manifest.starts + 1, run.manifest.steps + 1, *(run.manifest.stages or []), *run.manifest.summary]
    assert len(made) >= 2 and isinstance(run.manifest.status, str) and isinstance(run.manifest.uid, str)
