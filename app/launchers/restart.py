"""Trying again: what ended the workers, in one sentence, and what to go on with; decided by `failure_policy.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ray

from app.config_io import with_values
from app.errors import Interrupted, NonFiniteError, RunFailed, UserError
from app.job import Job
from app.launchers.elastic import Elastic, limits_of, living
from app.launchers.failure_policy import Action, Death, Decision, Failure, Kind, death_of, decide
from app.launchers.whereabouts import Where, kernel_kills, last_words
from app.run.cost import rate_now
from strategies.layout import LayoutError

if TYPE_CHECKING:
    from app.run.driver import Driver

Failures = Mapping[int | None, BaseException]
"""What ended each worker, by rank; None is the launcher itself. Empty: all finished."""


HOPELESS = (UserError, LayoutError, NonFiniteError)
"""What trying again cannot mend, and says so in a sentence of its own."""
ANSWER_SECONDS = 3.0


class WorkerLost(Exception):
    """A worker is gone or hangs; says which, where and since when; of one that DIED, only which and where.

    words: Ray's, about its end."""

    def __init__(self, sentence: str, kind: Kind = Kind.DIED, words: str = "") -> None:
        super().__init__(sentence)
        self.kind, self.words = kind, words


class NoRoom(Exception):
    """The workers' places have not come back in the time they have for it."""


def until_done(job: Job, driver: Driver, attempt: Callable[[Job, int], Failures], elastic: Elastic | None) -> None:
    """Calls `attempt` (with the job, and how many went before) until it finishes or `decide` gives up.

    elastic: how to go on with other numbers of workers; None: their number stays what it is.

    Raises:
        UserError, LayoutError, NonFiniteError: a worker found something that trying again cannot mend.
        RunFailed: the restarts are used up.
        Interrupted: asked to stop, and the checkpoint is saved.
    """
    history: list[Failure] = []
    number = 0
    while True:
        driver.whereabouts.begin()
        driver.summary = {}
        failures = attempt(driver.as_it_stands(job), number)
        driver.whereabouts.end()
        number += 1
        more, driver.more = driver.more, None
        paused = driver.summary.get("stopped") and not driver.stop_requested()
        if not failures and elastic is not None and more is not None and paused:
            driver.lost()
            job = _resize(job, driver, elastic, more, f"there is room for {more} workers again")
            continue
        if not failures and paused:
            failures = _asked_to_end(driver)
        if not failures:
            break
        driver.lost()
        history.append(classify(failures, driver, history))
        driver.failures += history[-1].kind is not Kind.NO_ROOM
        there = elastic.look(job) if elastic is not None else None
        decision = decide(history, elastic.limits if elastic else limits_of(job.config), there)
        if decision.action is Action.GIVE_UP:
            raise root_cause(failures, decision.reason)
        job = _carry_out(decision, job, driver, elastic, history)
        _pause(driver, decision.pause)
    if driver.summary.get("stopped"):
        raise Interrupted(f"stopped after step {driver.summary['step']:,}")


def _asked_to_end(driver: Driver) -> Failures:
    """The ranks that had all save and end because their process was asked to."""
    found = driver.whereabouts
    after = f"after step {driver.step:,}, its checkpoint saved"
    return {
        rank: WorkerLost(f"{found.ranks.get(rank, f'worker {rank}')} went {after}, as announced ({why})", Kind.NOTICE)
        for rank, why in found.told.items()
    }


def _carry_out(decision: Decision, job: Job, driver: Driver, elastic: Elastic | None, history: list[Failure]) -> Job:
    """Says what happened and what is done about it; the job to go on with."""
    newest, count = history[-1], sum(f.kind is not Kind.NO_ROOM for f in history)
    driver.tracker.tags({"trireme.restarts": str(count), "trireme.last_failure": newest.sentence})
    if decision.node:
        excluded = [*job.config.cluster.exclude_nodes, decision.node]
        job = replace(job, config=with_values(job.config, {"cluster.exclude_nodes": excluded}))
        driver.tracker.tags({"trireme.excluded_nodes": ",".join(excluded)})
    if elastic is not None and decision.action is Action.PARDON:
        excluded = list(elastic.written.cluster.exclude_nodes)
        job = replace(job, config=with_values(job.config, {"cluster.exclude_nodes": excluded}))
        driver.tracker.tags({"trireme.excluded_nodes": ""})
    if elastic is not None and decision.action in (Action.SMALLER, Action.EXCLUDE, Action.PARDON):
        return _resize(job, driver, elastic, decision.workers, decision.reason)
    then = "waiting for their places" if decision.action is Action.WAIT else "starting again from the last checkpoint"
    after = f" in {decision.pause:g} s" if decision.pause > 1 and decision.action is not Action.WAIT else ""
    driver.console.say(f"{decision.reason}; {then}{after}")
    return job


def _resize(job: Job, driver: Driver, elastic: Elastic, workers: int, reason: str) -> Job:
    """The job with another number of workers (or on other nodes), and its places."""
    before, job = job.layout, elastic.job(job, workers)
    passes = "" if job.layout.dims.dp == before.dims.dp else f" ({job.layout})"
    driver.console.say(f"{reason}; going on with {workers} of {elastic.wanted} workers{passes} after the last save")
    driver.tracker.metrics(driver.step, {"fault/workers": float(workers)})
    driver.tracker.tags({"trireme.workers": str(workers)})
    driver.resized = True
    if driver.meter is not None:
        driver.stop_requested()  # counts what was spent at the rate until now
        driver.meter.rate = rate_now(job.config, workers, elastic.per_worker) or driver.meter.rate
    elastic.reshape(job)
    return job


def _pause(driver: Driver, seconds: float) -> None:
    """Waits, unless somebody asks to stop."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        driver.check_start()
        time.sleep(0.1)


# --- what happened ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cause:
    """What ended the workers."""

    kind: Kind
    sentence: str
    hearsay: bool = False


def classify(failures: Failures, driver: Driver, history: list[Failure]) -> Failure:
    """What ended the workers, in one sentence, and what kind of thing it was."""
    rank, original = first_cause(failures)
    cause = _cause(rank, original, driver)
    if cause.kind is Kind.NO_ROOM and history:
        cause = replace(_now_known(history[-1], driver), kind=Kind.NO_ROOM)
    where = driver.whereabouts.ranks.get(rank) if rank is not None and not _lost_peer(original) else None
    node = where.node if where else ""
    return Failure(cause.kind, cause.sentence, driver.step, driver.progressed, node, time.monotonic(), cause.hearsay)


def _now_known(failure: Failure, driver: Driver) -> Cause:
    """What is waited for. Peers notice at once that one is gone, Ray some seconds later which node went."""
    before = driver.whereabouts.before
    found = _gone_with_its_node(before, driver) if failure.hearsay else None
    return found or Cause(failure.kind, failure.sentence, failure.hearsay)


def _gone_with_its_node(ranks: Mapping[int, Where], driver: Driver) -> Cause | None:
    """The end of the first of these whose node Ray takes for dead; None if there is none."""
    dead = {node for node in {where.node for where in ranks.values()} if not living(node)}
    where = next((where for _, where in sorted(ranks.items()) if where.node in dead), None)
    if where is None:
        return None
    announced = driver.whereabouts.announced.get(where.node, "")
    return Cause(*death_of(Death(str(where), driver.step, node_gone=True, announced=announced)))


def _cause(rank: int | None, original: BaseException, driver: Driver) -> Cause:
    if isinstance(original, HOPELESS) or (isinstance(original, RunFailed) and not _lost_peer(original)):
        return Cause(Kind.HOPELESS, str(original))
    if isinstance(original, NoRoom):
        return Cause(Kind.NO_ROOM, str(original))
    if isinstance(original, WorkerLost) and (original.kind is not Kind.DIED or rank is None):
        return Cause(original.kind, str(original))
    if isinstance(original, WorkerLost) or _is_death(original):
        return Cause(*death_of(_death(rank, original, driver)))
    if _lost_peer(original):  # and nobody says who that is
        if found := _gone_with_its_node(driver.whereabouts.ranks, driver):
            return found
        after = f"after step {driver.step:,}" if driver.step else "before the first step"
        return Cause(Kind.DIED, f"a worker that worker {rank} was connected to died {after}", hearsay=True)
    text = (str(original).strip().splitlines() or [""])[0]
    at = f" on worker {rank}" if rank is not None else ""
    log = f" (see {driver.run.local_folder}/logs/rank-{rank}.log)" if rank is not None else ""
    return Cause(Kind.EXCEPTION, f"{type(original).__name__}{at}: {text}{log}")


def _death(rank: int | None, error: BaseException, driver: Driver) -> Death:
    """What its node, its log and Ray know of a rank's end."""
    where = driver.whereabouts.ranks.get(rank) if rank is not None else None
    who, text = (str(error), error.words) if isinstance(error, WorkerLost) else ("", str(error))
    memory = isinstance(error, ray.exceptions.OutOfMemoryError) or "OUT_OF_MEMORY" in text or "OutOfMemory" in text
    if where is None:
        return Death(who or (f"worker {rank}" if rank is not None else "a worker"), driver.step, ray_memory=memory)
    log = driver.run.local_folder / "logs" / f"rank-{rank}.log"
    gone = "node died" in text.lower() or "NODE_DIED" in text or not living(where.node)
    kills = None if gone else _kernel_kills_at(where.node)
    return Death(
        who or str(where),
        driver.step,
        node_gone=gone or not living(where.node),
        announced=driver.whereabouts.announced.get(where.node, ""),
        told=driver.whereabouts.told.get(where.rank, ""),
        kernel_kills=max(0, kills - where.kernel_kills) if kills is not None else 0,
        ray_memory=memory,
        last_words=last_words(log, where.log_bytes),
    )


def _kernel_kills_at(node: str) -> int | None:
    """A node's count; None if it does not answer soon."""
    if node == ray.get_runtime_context().get_node_id():
        return kernel_kills()
    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    asked = ray.remote(num_cpus=0)(kernel_kills).options(scheduling_strategy=there).remote()
    try:
        return ray.get(asked, timeout=ANSWER_SECONDS)
    except ray.exceptions.RayError:
        return None


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


LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def is_consequence(error: BaseException) -> bool:
    """Whether this may be what a rank says whose peer is gone."""
    signs = (*LOST_PEER, "connectFullMesh", "NCCL", "gloo")
    return type(error).__name__.startswith("Dist") or any(sign in str(error) for sign in signs)


def _lost_peer(error: BaseException) -> bool:
    """Whether this is what a rank says whose peer is gone, and can have no other cause."""
    return not isinstance(error, WorkerLost) and any(sign in str(error) for sign in LOST_PEER)
