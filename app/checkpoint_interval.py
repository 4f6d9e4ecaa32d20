"""How often to save: pure functions of what a save costs and how often the run fails."""

from __future__ import annotations

import math


def checkpoint_interval(stall: float, write: float, mtbf: float) -> float:
    """Seconds between two checkpoints that lose least, by Young's formula (1974) with Daly's next terms (2006).

    stall: seconds that a save holds up training. write: seconds until it is committed in the background; one begins
    only when the one before has ended. mtbf: mean seconds between failures.
    """
    if stall >= 2 * mtbf:
        return max(write, mtbf)
    ratio = math.sqrt(stall / (2 * mtbf))
    best = math.sqrt(2 * stall * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - stall
    return max(write, best)


def mean_time_between_failures(failures: int, seconds: float, nodes: int) -> float:
    """Seconds: as observed, with one failure per node and month as the prior."""
    prior = 30 * 86400.0 / max(1, nodes)
    return (seconds + prior) / (failures + 1)
