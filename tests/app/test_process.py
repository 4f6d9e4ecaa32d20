"""What a training process sets for itself: torch's settings, and when garbage is collected."""

import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from app.config import TrainConfig
from app.config_io import load_config
from app.process import configure_torch, garbage_waits
from tests.app.kit import training_of
from tests.tasks import Points


def test_torch_is_set_on_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn, said = SimpleNamespace(), list[Any]()
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", said.append)
    configure_torch(TrainConfig(matmul_precision="high"), torch.device("cpu"))
    assert not said and not vars(cudnn)
    gpu = torch.device("cuda", 0)
    configure_torch(TrainConfig(), gpu)
    assert said == ["highest"] and vars(cudnn) == {"allow_tf32": False, "benchmark": True}, "torch's own differ"
    configure_torch(TrainConfig(matmul_precision="high", deterministic=True), gpu)
    assert said[1:] == [True, "high"] and vars(cudnn) == {"allow_tf32": True, "benchmark": False}
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


class Node:
    """Refers to itself, so that counting references does not free it."""

    def __init__(self) -> None:
        self.own = self


def test_garbage_waits_until_the_end_also_of_what_fails() -> None:
    with pytest.raises(KeyError), garbage_waits():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


class Littering(Points):
    """Each step leaves a cycle behind."""

    left: ClassVar[list[weakref.ref[Node]]] = []
    alive: ClassVar[list[int]] = []

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if model.training:
            assert not gc.isenabled() and [[] for _ in range(2000)]  # more than enough for Python's collector to run
            self.alive.append(sum(node() is not None for node in self.left))
            self.left.append(weakref.ref(Node()))
        return super().loss(model, batch)


def test_a_run_collects_between_steps_and_not_in_them(tmp_path: Path) -> None:
    given = ["train.steps=8", "train.global_batch_size=8", "train.eval_every=2", "run.name=x"]
    training, _ = training_of(load_config([], [f"task={__name__}:Littering", *given]), tmp_path)
    assert training.run()["step"] == 8 and gc.isenabled()
    alive = type(training.task).alive  # type: ignore[attr-defined]
    assert len(alive) == 8 and 0 < max(alive) <= 2, "at every second step there is a boundary"
