"""A worker's sign of life: what it does and how often it has got on; written by the loop, read by who watches it.

The other way goes one wish: a checkpoint, soon."""

from __future__ import annotations

from dataclasses import dataclass

SLOW = ("starting", "saving", "ending")
"""What may take as long as a model is large or a storage slow; a step and a batch of evaluation have a history."""


@dataclass
class Beat:
    """A few plain stores per step, so that it costs the loop nothing; another thread may read it at any moment."""

    doing: str = "starting"  # starting, reading, training, evaluating, saving, ending
    step: int = 0  # optimizer steps done
    ticks: int = 0  # grows whenever anything is done
    save: bool = False  # set by who watches: a checkpoint is wanted at the next pulse
