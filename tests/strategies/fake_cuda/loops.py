"""Whole runs of the training loop on fake CUDA devices, with more than plain steps.

A run's result is what each step waits for (but not what happens between steps), and the last loss
and gradient norm.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.checkpoint import latest_good
from app.config import Config, OptimizerConfig, ParallelConfig, ProfileConfig, TrainConfig
from app.storage.lease import write_lease
from app.storage.storage import Storage
from app.tasks.huggingface.task import HuggingFace
from app.training.job import Job, Place, SilentChannel
from app.training.loop import Training
from experiments.parity.rows import Row
from tests.strategies.fake_cuda import device as fake
from tests.tasks import Plain

TaskArgs = tuple[str, dict[str, Any]]
"""A task's name and arguments."""
MakeTask = Callable[[Path], TaskArgs]
"""Makes the files that a task needs in a folder."""

TRAIN = {
    "steps": 4,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "clip_norm": 1.0,
    "log_every": 2,
}


class Counted(Plain):
    """A task whose batches have numbers of items that the host counts."""

    def items(self, batch: Any) -> int:
        return int(batch[0].shape[0])


def run_loop(row: Row, changes: dict[str, Any], device_type: str, rank: int) -> dict[str, Any]:
    """Train a task.

    Args:
        row: The layout.
        changes: `task` (a name, or a function that makes it), `profile` (steps), and fields of
            TrainConfig.
        device_type: cuda or cpu. A GPU's device has no index.
        rank: This rank.
    """
    changes = dict(changes)
    task = changes.pop("task", f"{__name__}:Counted")
    profiled_steps = changes.pop("profile", [])
    make_task: MakeTask = (lambda folder: (task, {})) if isinstance(task, str) else task
    folder, name, arguments = _shared_folder_and_task(rank, make_task)
    train = TrainConfig(**{**TRAIN, **changes})
    config = Config(
        task=name,
        task_args=arguments,
        strategy=row.name,
        parallel=ParallelConfig(**row.degrees | row.options),
        train=train,
        # Adam's usual epsilon would scale up gradients that are zero but for rounding, as those of
        # adapters are at first.
        optimizer=OptimizerConfig(eps=1e-5),
        profile=ProfileConfig(profiled_steps),
    )
    job = Job(
        config=config,
        layout=row.layout,
        folder=folder,
        attempt="attempt",
        run_uid="uid",
        steps=train.steps or 0,
        cwd=folder,
    )
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    place = Place(
        rank=rank, world_size=row.workers, local_rank=rank, device=torch.device(device_type)
    )
    training = Training(job, place, SilentChannel())
    take_step = training.step
    waits: list[tuple[str, str]] = []

    def step_with_recorded_waits(micro_batches: list[Any]) -> None:
        fake.waits.clear()
        take_step(micro_batches)
        waits.extend(fake.waits)

    training.step = step_with_recorded_waits  # type: ignore[method-assign]
    summary = training.run()
    training.close()
    checkpoint, *_ = latest_good(job.checkpoints)
    assert checkpoint is not None
    assert summary["step"] == train.steps
    metrics = summary["metrics"]
    return {"waits": waits, "numbers": [metrics["train/loss"], metrics["train/grad_norm"]]}


def _shared_folder_and_task(rank: int, make_task: MakeTask) -> tuple[str, str, dict[str, Any]]:
    """The run's folder and its task, which rank 0 makes."""
    objects: list[Any] = [None]
    if rank == 0:
        folder = tempfile.mkdtemp(prefix="fake-cuda-loop-")
        write_lease(Storage(folder), "attempt", 0)
        name, arguments = make_task(Path(folder))
        objects = [(folder, name, arguments)]
    if dist.is_initialized():
        dist.broadcast_object_list(objects)
    return objects[0]


# --- tasks ----------------------------------------------------------------------------------------


def _write_sums(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("".join(f"{i} and {i} are {2 * i}.\n" for i in range(400)))
    return str(path)


def gpt(folder: Path) -> TaskArgs:
    """A GPT with mixtures of experts."""
    arguments = {
        "data": _write_sums(folder),
        "sequence_length": 16,
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "eval_samples": 8,
        "linear_loss": True,
        "residual_in_fp32": False,
        "fused_projections": True,
        "mixture": {"n_experts": 4, "top_k": 2},
    }
    return "language_modelling", arguments


def adapters(folder: Path) -> TaskArgs:
    """Adapters of a llama, trained on conversations of which several share a row."""
    conversations = folder / "conversations.jsonl"
    conversations.write_text("".join(_conversation(number) + "\n" for number in range(96)))
    base = folder / "base"
    config = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 264,
    }
    base_task = HuggingFace(
        model="llama", config=config, data=_write_sums(folder), sequence_length=16
    )
    torch.manual_seed(0)
    base_task.build_model().save_pretrained(base)
    base_task.write_folder(base)
    arguments = {
        "data": str(conversations),
        "sequence_length": 256,
        "model": str(base),
        "pretrained": True,
        "eval_samples": 8,
        "kind": "instructions",
        "lora": {"r": 2},
    }
    return "huggingface", arguments


def _conversation(number: int) -> str:
    """A line of JSON; the length depends on the number."""
    content = f"{number} " * (1 + number % 5)
    messages = [{"role": role, "content": content} for role in ("user", "assistant")]
    return json.dumps({"messages": messages})
