"""Trying again: what ended the workers, in one sentence, and whether another start makes sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import ray

from app.errors import Interrupted, NonFiniteError, RunFailed, UserError
from app.faults import Failure, Kind, decide
from app.job import Job
from strategies.dims import LayoutError

if TYPE_CHECKING:
    from app.driver import Driver

Failures = Mapping[int | None, BaseException]
"""What ended each worker, by rank; None is the launcher itself. Empty: all finished."""


HOPELESS = (UserError, LayoutError, NonFiniteError)
"""What trying again cannot mend, and says so in a sentence of its own."""


class WorkerLost(Exception):
    """A worker is gone or hangs; says which, where and since when."""


def until_done(job: Job, driver: Driver, attempt: Callable[[int], Failures]) -> None:
    """Calls `attempt` (given how many went before) until it finishes or `decide` gives up.

    Raises:
        UserError, LayoutError, NonFiniteError: a worker found something that trying again cannot mend.
        RunFailed: the restarts are used up.
        Interrupted: asked to stop, and the checkpoint is saved.
    """
    history: list[Failure] = []
    while failures := attempt(len(history)):
        driver.lost()
        failure = classify(failures, driver)
        history.append(failure)
        decision = decide(history, job.config.fault.max_restarts)
        if not decision.retry:
            raise root_cause(failures, decision.reason)
        driver.console.say(f"{failure.sentence}; starting again from the last checkpoint")
        driver.tracker.tags({"trireme.restarts": str(len(history)), "trireme.last_failure": failure.sentence})
    if driver.summary.get("stopped"):
        raise Interrupted(f"stopped after step {driver.summary['step']:,}")


def classify(failures: Failures, driver: Driver) -> Failure:
    """What ended the workers, in one sentence, and what kind of thing it was."""
    rank, original = first_cause(failures)
    if isinstance(original, (*HOPELESS, RunFailed)):
        kind, sentence = Kind.HOPELESS, str(original)
    elif isinstance(original, WorkerLost):
        kind, sentence = Kind.DIED, str(original)
    elif _is_death(original):
        kind, sentence = Kind.DIED, f"worker {rank} died" if rank is not None else "a worker died"
    else:
        text = (str(original).strip().splitlines() or [""])[0]
        at = f" on worker {rank}" if rank is not None else ""
        log = f" (see {driver.run.local_folder}/logs/rank-{rank}.log)" if rank is not None else ""
        kind, sentence = Kind.EXCEPTION, f"{type(original).__name__}{at}: {text}{log}"
    return Failure(kind, sentence, driver.step, driver.progressed)


def root_cause(failures: Failures, reason: str) -> Exception:
    """What to raise when the run is given up."""
    original = first_cause(failures)[1]
    if isinstance(original, HOPELESS):
        return original
    return RunFailed(reason)


def first_cause(failures: Failures) -> tuple[int | None, BaseException]:
    """The rank and the exception that came first: a peer that lost its connection is a consequence."""

    def order(item: tuple[int | None, BaseException]) -> int:
        if isinstance(item[1], HOPELESS):
            return 0
        if isinstance(item[1], WorkerLost) or _is_death(item[1]):
            return 1
        return 3 if is_consequence(item[1]) else 2

    return min(failures.items(), key=order)


def _is_death(error: BaseException) -> bool:
    return type(error).__name__.startswith("WorkerHealthCheck") or isinstance(error, ray.exceptions.RayActorError)


def is_consequence(error: BaseException) -> bool:
    """Whether this is what a rank says whose peer is gone."""
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset by peer", "connectFullMesh", "NCCL", "Broken pipe", "gloo")
    return type(error).__name__.startswith("Dist") or any(sign in text for sign in signs)
