"""What to do after a failure: decided here by a pure function, carried out by the driver."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What sort of thing went wrong, by what can be done about it."""

    HOPELESS = "hopeless"  # trying again would give the same: wrong input, a loss that is not finite
    EXCEPTION = "exception"  # code raised something; may or may not come again
    DIED = "died"  # a process or a machine is gone


@dataclass(frozen=True)
class Failure:
    kind: Kind
    sentence: str  # what happened, where, for a person
    step: int  # optimizer steps that were done when it happened
    progressed: bool  # whether this start had taken a step of its own


@dataclass(frozen=True)
class Decision:
    retry: bool
    reason: str


def decide(history: list[Failure], max_restarts: int) -> Decision:
    """Whether to start again from the last checkpoint, given every failure so far, the newest last."""
    newest = history[-1]
    if newest.kind is Kind.HOPELESS:
        return Decision(False, newest.sentence)
    if newest.kind is Kind.EXCEPTION:
        if not newest.progressed:
            return Decision(False, newest.sentence)
        same = [f for f in history[:-1] if f.kind is Kind.EXCEPTION and f.sentence == newest.sentence]
        if any(f.step == newest.step for f in same):
            return Decision(False, f"{newest.sentence}, twice at the same step: trying again would not help")
    if len(history) > max_restarts:
        limit = f"fault.max_restarts={max_restarts} is used up" if max_restarts else "fault.max_restarts is 0"
        return Decision(False, f"{newest.sentence}; {limit}")
    return Decision(True, newest.sentence)
