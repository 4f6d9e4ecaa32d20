"""Whole runs of the loop on fake CUDA devices, with what a run may have beside plain steps: what each step waits for,
but not the boundaries between, and the last loss and gradient norm."""

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

Task = Callable[[Path], tuple[str, dict[str, Any]]]


class Counted(Plain):
    """Its batches hold different numbers of items, which the host counts."""

    def items(self, batch: Any) -> int:
        return int(batch[0].shape[0])


def loop(row: Row, made: dict[str, Any], on: str, rank: int) -> dict[str, Any]:
    """made: task (a name, or a function of a folder that gives name and arguments), profile (steps), others: of
    TrainConfig. On a GPU the device has no index."""
    given = {"steps": 4, "global_batch_size": 8, "micro_batch_size": 2, "clip_norm": 1.0, "log_every": 2} | made
    task, profiled = given.pop("task", f"{__name__}:Counted"), given.pop("profile", [])
    folder, name, arguments = _shared(rank, lambda folder: (task, {}) if isinstance(task, str) else task(folder))
    parallel = ParallelConfig(**row.degrees | row.options)
    train = TrainConfig(**given)
    # Adam's usual epsilon scales up what is zero but for rounding, as adapters' gradients are at first
    config = Config(
        task=name,
        task_args=arguments,
        strategy=row.name,
        parallel=parallel,
        train=train,
        optimizer=OptimizerConfig(eps=1e-5),
        profile=ProfileConfig(profiled),
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
    if on == "cuda":
        torch.cuda.set_device(rank)
    place = Place(rank=rank, world_size=row.workers, local_rank=rank, device=torch.device(on))
    training = Training(job, place, SilentChannel())
    take_step = training.step
    waits: list[tuple[str, str]] = []

    def counted(micro_batches: list[Any]) -> None:
        fake.waits.clear()
        take_step(micro_batches)
        waits.extend(fake.waits)

    training.step = counted  # type: ignore[method-assign]
    summary = training.run()
    training.close()
    assert latest_good(job.checkpoints)[0] is not None and summary["step"] == train.steps
    numbers = [summary["metrics"][f"train/{name}"] for name in ("loss", "grad_norm")]
    return {"waits": waits, "numbers": numbers}


def _shared(rank: int, task: Task) -> Any:
    """The run's folder and its task, which rank 0 makes."""
    box: list[Any] = [None]
    if rank == 0:
        folder = tempfile.mkdtemp(prefix="fake-cuda-loop-")
        write_lease(Storage(folder), "attempt", 0)
        box = [(folder, *task(Path(folder)))]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def _sums(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("".join(f"{i} and {i} are {2 * i}.\n" for i in range(400)))
    return str(path)


def gpt(folder: Path) -> tuple[str, dict[str, Any]]:
    sizes = {"sequence_length": 16, "d_model": 32, "n_layers": 2, "n_heads": 4, "eval_samples": 8}
    how = {"linear_loss": True, "residual_in_fp32": False, "fused_projections": True}
    return "language_modelling", {"data": _sums(folder), **sizes, **how, "mixture": {"n_experts": 4, "top_k": 2}}


def adapters(folder: Path) -> tuple[str, dict[str, Any]]:
    """Of a llama; on conversations, of which several share a row."""
    talks, base = folder / "talks.jsonl", folder / "base"
    said = ([{"role": role, "content": f"{i} " * (1 + i % 5)} for role in ("user", "assistant")] for i in range(96))
    talks.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 264}
    learnt = HuggingFace(model="llama", config=sizes, data=_sums(folder), sequence_length=16)
    torch.manual_seed(0)
    learnt.build_model().save_pretrained(base)
    learnt.write_folder(base)
    how = {"model": str(base), "pretrained": True, "eval_samples": 8, "kind": "instructions", "lora": {"r": 2}}
    return "huggingface", {"data": str(talks), "sequence_length": 256, **how}
