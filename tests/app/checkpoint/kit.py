"""A small training state that shows its step, for the tests of checkpoints, and saving it."""

from pathlib import Path
from typing import Any

import torch

from app import checkpoint
from app.checkpoint import Checkpointer


def state_of(value: float) -> dict[str, Any]:
    """A small training state, all of whose tensors hold `value`."""
    value = float(value)
    model = {
        "blocks.0.w": torch.full((4, 3), value),
        "b": torch.full((3,), value, dtype=torch.bfloat16),
    }
    moments = {name: {"exp_avg": w * 2, "step": torch.tensor(value)} for name, w in model.items()}
    optimizer = {
        "state": moments,
        "param_groups": {"blocks.0.w": {"lr": value, "betas": [0.9, 0.99]}},
    }
    return {"model": model, "optimizer": optimizer, "scheduler": {"last_epoch": int(value)}}


def plain(state: Any) -> Any:
    """The state with lists in place of tensors, so that states can be compared."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [str(state.dtype), state.tolist()] if isinstance(state, torch.Tensor) else state


def save(
    folder: str | Path, *steps: int, state: dict[str, Any] | None = None, **options: Any
) -> None:
    """Saves one checkpoint per step, of `state` or else of `state_of(step)`."""
    checkpointer = Checkpointer(str(folder), **options)
    for step in steps:
        checkpointer.save(state or state_of(step), meta={"step": step})
    checkpointer.close()


def steps(folder: str | Path) -> list[int]:
    """Steps of the committed checkpoints, the newest first."""
    return [commit.step for commit in checkpoint.commits(str(folder))]
