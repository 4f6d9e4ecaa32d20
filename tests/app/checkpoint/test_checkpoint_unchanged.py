"""Frozen tensors are written twice, then linked; what changes is written; pruning and failures harm nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from app import checkpoint
from app.checkpoint import Checkpointer, CheckpointError, unchanged
from app.checkpoint.files import HashingStream

STILL = "__0_1.distcp"


class Model:
    """A frozen layer (400 kB), one that trains (40 kB), and numbers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.frozen, self.bias, self.head = torch.randn(100, 1000), torch.zeros(0), torch.randn(10, 1000)
        self.step = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"model": {"frozen": self.frozen, "bias": self.bias, "head": self.head}, "step": self.step}

    def train(self) -> None:
        self.step += 1
        self.head = self.head + 1.0

    def save(self, saver: Checkpointer) -> Path:
        saver.save(self.state, meta={"step": self.step}, per_rank=self.step)
        saver.wait()
        assert saver.last_commit is not None
        return Path(saver.last_commit.path)


def assert_good(folder: Path, model: Model) -> None:
    """The newest checkpoint is whole, and holds what the model is."""
    found, passed = checkpoint.latest_good(str(folder), verify="sha256")
    assert found is not None and found.step == model.step and passed == []
    state = {"model": {name: torch.full_like(t, -1.0) for name, t in model.state["model"].items()}, "step": -1}
    checkpoint.load(found, state)
    assert all(torch.equal(state["model"][name], model.state["model"][name]) for name in state["model"])
    assert state["step"] == model.step and checkpoint.load_per_rank(found, 0) == model.step


def test_from_the_third_save_on_frozen_tensors_are_linked_and_pruning_leaves_them_whole(tmp_path: Path) -> None:
    saver, model = Checkpointer(str(tmp_path), keep_last=2), Model()
    numbers = []
    for _ in range(6):
        model.train()
        here = model.save(saver)
        numbers.append((here / STILL).stat().st_ino if (here / STILL).exists() else None)
        assert_good(tmp_path, model)
        assert (here / "__0_0.distcp").stat().st_size < (100_000 if numbers[-1] else 10**6)
    assert numbers[0] is None and numbers[1] is not None and set(numbers[1:]) == {numbers[1]}, "one file, linked"
    kept = sorted(tmp_path.glob("step-*"))
    assert len(kept) == 2 and (kept[0] / STILL).stat().st_nlink == 2, "the pruned ones' names are gone"
    saver.close()
    old = checkpoint.commits(str(tmp_path))[-1]
    assert checkpoint.verify(old) == []


def test_what_changes_after_all_is_written_from_then_on(tmp_path: Path) -> None:
    saver, model = Checkpointer(str(tmp_path), keep_last=9), Model()
    for _ in range(3):
        model.train()
        here = model.save(saver)
    assert (here / STILL).stat().st_nlink == 2
    model.frozen = model.frozen.clone()
    model.frozen[7, 7] += 1e-3
    for _ in range(3):
        model.train()
        here = model.save(saver)
        assert not (here / STILL).exists()
        assert_good(tmp_path, model)
    assert all(checkpoint.verify(commit) == [] for commit in checkpoint.commits(str(tmp_path)))


def test_a_failed_save_and_a_link_that_cannot_be_made_cost_only_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, model = Checkpointer(str(tmp_path), keep_last=2), Model()
    for _ in range(3):
        model.train()
        before = (model.save(saver) / STILL).stat() if model.step > 1 else model.save(saver).stat()
    with monkeypatch.context() as patch:
        patch.setattr(HashingStream, "write", lambda self, data: (_ for _ in ()).throw(OSError(28, "No space left")))
        model.train()
        with pytest.raises(CheckpointError, match="No space left"):
            model.save(saver)
    model.train()
    after = (model.save(saver) / STILL).stat()
    assert (after.st_ino, after.st_nlink) == (before.st_ino, 2), "of the last commit, not of the one that failed"
    assert_good(tmp_path, model)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    model.train()
    assert (model.save(saver) / STILL).stat().st_nlink == 1
    assert_good(tmp_path, model)


def test_it_is_written_anew_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "MOST_LINKS", 2)
    saver, model, numbers = Checkpointer(str(tmp_path), keep_last=20), Model(), []
    for _ in range(8):
        model.train()
        numbers.append(model.save(saver) / STILL)
    assert [path.stat().st_nlink for path in numbers[1:]] == [3, 3, 3, 3, 3, 3, 1]


def test_an_object_store_gets_whole_files() -> None:
    saver, model = Checkpointer("memory://unchanged/run"), Model()
    for _ in range(4):
        model.train()
        saver.save(model.state, meta={"step": model.step})
        saver.wait()
        assert saver.last_commit is not None and checkpoint.verify(saver.last_commit) == []
    assert saver.last_commit.files[STILL].size > 400_000
