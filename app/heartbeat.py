"""A worker's heartbeat: what it does and how far it is, written by the loop, read by another thread at any moment."""

from __future__ import annotations

from dataclasses import dataclass

UNBOUNDED_PHASES = ("starting", "saving", "ending")
"""Phases whose duration depends on the size of the model and the storage; a step has a history to compare with."""


@dataclass
class Heartbeat:
    """A few plain stores per step, so that it costs the loop nothing."""

    phase: str = "starting"
    """starting, reading, training, evaluating, saving, ending or finished."""
    step: int = 0
    """Optimizer steps taken."""
    ticks: int = 0
    """Grows with every batch of an evaluation."""
    save_requested: bool = False
    """Set from outside: a checkpoint is wanted at the next boundary."""
