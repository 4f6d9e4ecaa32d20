"""Real strategies through our own saver: what one has trained, another continues, optimizer and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from app import checkpoint
from app.checkpoint import Checkpointer
from experiments.parity.curves import Trial, run_steps
from experiments.parity.rows import Row
from strategies.parallelize import Options, Parallel, parallelize
from tests.pool import run_distributed
from tests.strategies.models import classifier_loss, seeded, vector_batch

CPU = torch.device("cpu")
SINGLE, DDP, FSDP, TENSOR = Row("single", 1), Row("ddp", 2), Row("fsdp", 2), Row("tensor", 2)
ZERO1, HSDP, BOTH = Row("zero1", 2), Row("hsdp", 4, {"dp_shard": 2}), Row("fsdp+tensor", 4, {"tp": 2})
SAVED_AND_READ = [(DDP, FSDP), (HSDP, ZERO1), (ZERO1, TENSOR), (BOTH, SINGLE), (FSDP, BOTH)]


def _build() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3))


TRIAL = Trial(seeded(_build), classifier_loss, vector_batch, tensor_plan={"0": "colwise", "2": "rowwise"})


def _start(row: Row) -> tuple[Parallel, torch.optim.Optimizer]:
    parallel = parallelize(
        TRIAL.build, row.layout, Options(), device=CPU, blocks=TRIAL.blocks, tensor_plan=TRIAL.tensor_plan
    )
    return parallel, parallel.prepare_optimizer(TRIAL.optimizer(parallel.parameters()))


def _state(parallel: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": parallel.model_state(), "optimizer": parallel.optimizer_state(optimizer)}


def _begin(_: int, row: Row, folder: str) -> dict[str, torch.Tensor]:
    """Two steps, a checkpoint, and while it is written one step more, after which rank 0 has these weights."""
    parallel, optimizer = _start(row)
    run_steps(TRIAL, parallel, optimizer, range(2))
    checkpointer = Checkpointer(folder)
    checkpointer.save(_state(parallel, optimizer), meta={"step": 2})
    run_steps(TRIAL, parallel, optimizer, range(2, 3))
    checkpointer.close()
    return parallel.full_model_state()


def _continue(_: int, row: Row, folder: str) -> dict[str, torch.Tensor]:
    parallel, optimizer = _start(row)
    state = _state(parallel, optimizer)
    commit, _passed = checkpoint.latest_good(folder)
    assert commit is not None
    checkpoint.load(commit, state)
    parallel.load_model_state(state["model"])
    parallel.load_optimizer_state(optimizer, state["optimizer"])
    run_steps(TRIAL, parallel, optimizer, range(2, 3))
    return parallel.full_model_state()


@pytest.mark.parametrize(("row", "reader"), SAVED_AND_READ, ids=str)
def test_what_one_strategy_saves_another_continues(tmp_path: Path, row: Row, reader: Row) -> None:
    expected = run_distributed(_begin, row.workers, row, str(tmp_path))[0]
    got = run_distributed(_continue, reader.workers, reader, str(tmp_path))[0]
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6, msg=f"{name}: {row} → {reader}")
