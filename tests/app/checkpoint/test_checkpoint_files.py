"""How a tensor is written, and what a second save of the same layout does without."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from app import checkpoint
from app.checkpoint import Checkpointer
from app.checkpoint.files import write_tensor
from app.checkpoint.staging import StagedPlanner, Stager

TYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5, 2)], ids=str)
def test_torch_load_reads_what_is_written(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 3).to(dtype)
    for one in (tensor, tensor.transpose(0, -1) if shape else tensor):
        stager, stream = Stager(), io.BytesIO()
        staged = stager.stage({"a": {"b": one}})
        write_tensor(stream, staged.data["a.b"], staged.bits["a.b"])
        stream.seek(0)
        read = torch.load(stream, weights_only=True)
        assert read.dtype == dtype and read.shape == one.shape
        assert read.contiguous().view(-1).tolist() == one.contiguous().view(-1).tolist()


def test_the_same_layout_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan = StagedPlanner.create_local_plan

    def counted(self: StagedPlanner) -> Any:
        planned.append(self)
        return plan(self)

    monkeypatch.setattr(StagedPlanner, "create_local_plan", counted)
    checkpointer = Checkpointer(str(tmp_path), keep_last=9)
    for step, size in enumerate((4, 4, 4, 6, 6)):
        checkpointer.save({"w": torch.full((size,), float(step)), "n": step}, meta={"step": step})
    checkpointer.close()
    assert len(planned) == 2
    for commit in checkpoint.commits(str(tmp_path)):
        state: dict[str, Any] = {"w": torch.zeros(6 if commit.step > 2 else 4), "n": -1}
        checkpoint.load(commit, state)
        assert state["n"] == commit.step and set(state["w"].tolist()) == {commit.step}
