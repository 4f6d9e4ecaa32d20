"""Loading on one process: another model is refused, and a person's path finds the checkpoint meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app import checkpoint
from app.errors import UserError
from tests.app.checkpoint.test_checkpoint import save, state_of

OTHERS = {
    "shape": (
        lambda s: s["model"].update({"blocks.0.w": torch.zeros(4, 4)}),
        "is of another model: blocks.0.w is (4, 3) there and (4, 4) here; use another run.name",
    ),
    "missing": (
        lambda s: s["model"].update({"head.w": torch.zeros(2)}),
        "is of another model: head.w is not in it",
    ),
    "unexpected": (lambda s: s["model"].pop("b"), "is of another model: b is (3,) there and does not exist here"),
    "optimizer": (
        lambda s: s["optimizer"]["state"]["b"].update({"exp_avg_sq": torch.zeros(3)}),
        "is of another optimizer: optimizer.state.b.exp_avg_sq is not in it",
    ),
    "number": (lambda s: s["model"].update({"b": 1.0}), "is of another model: b is (3,) there and float here"),
    "tensor": (
        lambda s: s["scheduler"].update({"last_epoch": torch.zeros(1)}),
        "scheduler.last_epoch is not a tensor there and (1,) here",
    ),
}


@pytest.mark.parametrize("case", list(OTHERS))
def test_another_model_is_refused_before_anything_is_read(tmp_path: Path, case: str) -> None:
    change, words = OTHERS[case]
    save(tmp_path, 1)
    into = state_of(0.0)
    change(into)
    with pytest.raises(UserError) as caught:
        checkpoint.load(checkpoint.commits(str(tmp_path))[0], into)
    assert words in str(caught.value) and "step-00000001 is" in str(caught.value) and "\n" not in str(caught.value)
    assert into["optimizer"]["state"]["blocks.0.w"]["step"].item() == 0.0


def test_weights_alone_and_numbers_that_are_new(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = checkpoint.commits(str(tmp_path))[0]
    weights = {"model": state_of(0.0)["model"]}
    checkpoint.load(found, weights)
    assert weights["model"]["b"].tolist() == [1.0] * 3
    into = state_of(0.0)
    into["scheduler"]["added_later"] = 7
    checkpoint.load(found, into)
    assert into["scheduler"] == {"last_epoch": 1, "added_later": 7}


# -- finding


def test_find(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoints", 1, 2)
    newest = checkpoint.commits(str(tmp_path / "run" / "checkpoints"))[0]
    for where in (newest.path, str(tmp_path / "run" / "checkpoints"), str(tmp_path / "run")):
        assert checkpoint.find(where) == newest
    with pytest.raises(UserError, match="it does not exist"):
        checkpoint.find(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"there is no COMMIT\.json in it"):
        checkpoint.find(str(tmp_path / "empty"))
    Path(newest.path, "COMMIT.json").write_text("{")
    with pytest.raises(UserError, match=r"is damaged: its COMMIT\.json cannot be read"):
        checkpoint.find(newest.path)
