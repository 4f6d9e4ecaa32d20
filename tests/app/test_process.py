"""What a training process sets for itself: torch's settings, and when garbage is collected."""

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from app.config import CheckpointConfig, Config, TrainConfig
from app.job import Job, Place, SilentChannel
from app.lease import write_lease
from app.loop import Training
from app.process import collect_garbage, configure_torch, garbage_waits
from app.storage import Storage
from strategies.layout import choose
from tests.tasks import Points


@pytest.fixture
def settings() -> Iterator[None]:
    cudnn, before = torch.backends.cudnn, torch.get_float32_matmul_precision()
    kept = cudnn.allow_tf32, cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before)
    cudnn.allow_tf32, cudnn.benchmark = kept
    torch.use_deterministic_algorithms(False)


def _found() -> tuple[str, bool, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark


@pytest.mark.usefixtures("settings")
def test_torch_is_set_on_gpus_alone() -> None:
    before = _found()
    configure_torch(TrainConfig(matmul_precision="high"), torch.device("cpu"))
    assert _found() == before
    gpu = torch.device("cuda", 0)
    configure_torch(TrainConfig(), gpu)
    assert _found() == ("highest", False, True), "torch's own default is TF32 for convolutions"
    configure_torch(TrainConfig(matmul_precision="high", deterministic=True), gpu)
    assert _found() == ("high", True, False)
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


class Node:
    """Refers to itself, so that counting references does not free it."""

    def __init__(self) -> None:
        self.own = self


def test_garbage_waits_until_it_is_collected() -> None:
    with garbage_waits():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        left = weakref.ref(Node())
        kept = [[] for _ in range(100_000)]  # more than enough for Python's collector to run
        assert left() is not None
        collect_garbage()
        assert left() is None and len(kept) == 100_000
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with pytest.raises(KeyError), garbage_waits():
        raise KeyError
    assert gc.isenabled()


class Littering(Points):
    """Each step leaves a cycle behind."""

    left: ClassVar[list[weakref.ref[Node]]] = []
    alive: ClassVar[list[int]] = []

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if model.training:
            assert not gc.isenabled()
            self.alive.append(sum(node() is not None for node in self.left))
            self.left.append(weakref.ref(Node()))
        return super().loss(model, batch)


def test_a_run_collects_between_steps(tmp_path: Path) -> None:
    train = TrainConfig(steps=8, global_batch_size=8, eval_every=2)
    config = Config(task=f"{__name__}:Littering", train=train, checkpoint=CheckpointConfig(weights=False))
    write_lease(Storage(str(tmp_path)), "attempt", 0)
    job = Job(config, choose("single", 1), str(tmp_path), "attempt", "uid", 8, str(tmp_path))
    training = Training(job, Place(0, 1, 0, torch.device("cpu")), SilentChannel())
    task = training.task
    assert isinstance(task, Points) and training.run()["step"] == 8
    training.close()
    alive = type(task).alive  # type: ignore[attr-defined]
    assert len(alive) == 8 and max(alive) <= 2, "at every second step there is a boundary"
    assert gc.isenabled()
