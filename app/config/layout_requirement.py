"""Conditions that a layout that `strategy: auto` chooses must meet."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """Conditions that the layout that auto chooses must meet.

    Args:
        memory_below: The planned memory of a worker, in bytes, that it has to stay below, since one
            that takes as much has run out of memory; None for no such bound.
        key: The layout, as `Candidate.key` names it, if there still is one; "" for any.
        stages: The number of blocks of each part of that layout's pipeline; empty for the plan's.
        batches: The global batches that the run still has, the present one first: those that it has
            left behind need not be shared by its workers. Empty: all of the configuration's.
    """

    memory_below: float | None = None
    key: str = ""
    stages: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()


ANY_LAYOUT = Requirement()
