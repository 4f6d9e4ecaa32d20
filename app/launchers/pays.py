"""Whether more workers pay: pure functions of the seconds that a step takes."""

import math
from collections.abc import Mapping

PAYS = 1.5
"""Twice the workers pay if they do at least this many times the work."""


def workers_that_pay(
    seconds: Mapping[int, float], *, present: int, steps_left: int, moving_seconds: float
) -> int:
    """The most workers up to which every doubling does at least `PAYS` times the work.

    Args:
        seconds: Of a step, by the number of workers.
        present: The number that trains now.
        steps_left: The steps that are left.
        moving_seconds: How long it takes to continue with another number.

    Returns:
        `present` if no more of them pay, the restart counted.
    """
    if present not in seconds:
        return present
    chosen = present
    chosen_seconds = steps_left * seconds[present]
    for workers in sorted(size for size in seconds if size > present):
        rest_seconds = moving_seconds + steps_left * seconds[workers]
        doublings = math.log2(workers / chosen)
        if chosen_seconds / rest_seconds >= PAYS**doublings:
            chosen = workers
            chosen_seconds = rest_seconds
    return chosen
