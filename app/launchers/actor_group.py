"""A group of warm Ray actors: worker processes that outlive runs, watched and replaced one by one.

    group = ActorGroup(4, {"CPU": 1.0}, spares=1)
    group.start()                 # returns at once; the processes import torch meanwhile
    group.run(job, driver)        # app.loop.train in every actor: one Ray call each, tensors go directly
    group.run(another, driver)    # no process starts, nothing is imported
    group.shutdown()

When an actor dies the others sit in a collective. They are told to let go and keep their processes, and the dead one's
place goes to a spare process of its node; so a new start costs a process group, a model and a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from app.errors import Interrupted
from app.job import Job
from app.launchers.crew import Crew, Place
from app.launchers.elastic import Elastic
from app.launchers.failure_policy import Kind
from app.launchers.hangs import DUMB_SECONDS
from app.launchers.inbox import hear, open_inbox
from app.launchers.member import Seat
from app.launchers.restart import Failures, NoRoom, WorkerLost, is_consequence, until_done
from app.launchers.unheard import Unheard
from app.launchers.watching import Stuck, Watching

if TYPE_CHECKING:
    from app.run.driver import Driver

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0  # that a worker gets to leave a run whose peer is gone


@dataclass
class Attempt:
    """One run of all ranks, under way."""

    calls: dict[Any, int]  # the run calls that have not ended, and whose they are
    watching: Watching
    failures: dict[int | None, BaseException] = field(default_factory=dict)


class ActorGroup:
    """`workers` places for processes, in a placement group of their own.

    per_worker: Ray resources of each rank; or a list with one entry per rank.
    bundles: what the placement group is made of, and bundle_of_rank: which of them each rank is in; None: one per rank.
    strategy: Ray's: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD, over the bundles.
    spares: idle processes with torch imported that are kept on each node, without resources of their own.
    labels: what messages call the ranks.
    avoid: ids of nodes that get no place. grows: whether an autoscaler may add nodes.
    """

    def __init__(
        self,
        workers: int,
        per_worker: dict[str, float] | Sequence[dict[str, float]],
        *,
        bundles: list[dict[str, float]] | None = None,
        bundle_of_rank: Sequence[int] | None = None,
        strategy: str = "PACK",
        spares: int = 0,
        labels: Sequence[str] | None = None,
        avoid: Sequence[str] = (),
        grows: bool = False,
    ) -> None:
        self.workers, self.strategy, self.spares = workers, strategy, spares
        self.needs = [dict(per_worker)] * workers if isinstance(per_worker, dict) else list(per_worker)
        self.bundles = bundles or self.needs
        self.bundle_of_rank = bundle_of_rank or range(workers)
        self.labels = labels or [""] * workers
        self.avoid, self.grows = list(avoid), grows
        self.crew: Crew | None = None
        self.inbox: Any = None
        self.elastic: Elastic | None = None
        self.noticed_at: float | None = None
        """When (Unix time) the last failure was noticed."""

    def start(self) -> None:
        """Asks Ray for the places and the processes in them; does not wait for either."""
        if self.crew is None:
            places = [Place(*entry) for entry in zip(self.bundle_of_rank, self.needs, self.labels, strict=True)]
            self.inbox = open_inbox()
            self.crew = Crew(places, self.bundles, self.strategy, self.spares, self.avoid, self.grows)

    def shutdown(self) -> None:
        """Ends every process of the group and gives its places back."""
        if self.crew is not None:
            self.crew.close()
            ray.kill(self.inbox)
        self.crew = self.inbox = None

    def become(self, other: ActorGroup) -> None:
        """Has the workers and places of another group, that was not started, from the next attempt on."""
        self.shutdown()
        self.workers, self.strategy, self.spares, self.needs = other.workers, other.strategy, other.spares, other.needs
        self.bundles, self.bundle_of_rank, self.labels = other.bundles, other.bundle_of_rank, other.labels
        self.avoid, self.grows = other.avoid, other.grows

    def run(self, job: Job, driver: Driver, elastic: Elastic | None = None) -> None:
        """Trains `job` in all places, starting again after a failure as long as `failure_policy.decide` says so.

        elastic: how to go on with other numbers of workers; None: their number stays what it is.
        Raises: see `app.launchers.restart.until_done`.
        """
        self.elastic = elastic
        until_done(job, driver, lambda job, number: self._attempt(job, driver), elastic)

    def _attempt(self, job: Job, driver: Driver) -> Failures:
        """One run of all ranks, and what ended it."""
        self.start()
        crew, elastic = self.crew, self.elastic
        assert crew is not None
        full = crew.fill(
            lambda: driver.stop_requested() or (elastic is not None and elastic.lacks(job)),
            driver.console.say,
            Unheard(job.config.fault.hang_seconds),
        )
        if driver.stop_requested():
            raise Interrupted("stopped before training began")
        if not full:
            return {None: NoRoom("the workers' places have not come back")}
        ray.get(self.inbox.begin.remote())
        try:
            store = ray.get(crew.of(0).actor.open_store.remote(), timeout=DUMB_SECONDS)
        except ray.exceptions.RayError:  # it died, or was stopped, just now
            crew.end(crew.of(0))
            crew.places[0].process = None
            return {0: WorkerLost("worker 0")}
        watching = Watching(job.config, crew.ask)
        attempt = Attempt(self._call(crew, job, store), watching)
        try:
            while attempt.calls:
                driver.check_start()
                self._look(crew, attempt, driver)
                if elastic is not None and not driver.starting and driver.more is None:
                    driver.more = elastic.more(job)
        finally:
            if attempt.calls:  # a second Ctrl-C, say
                self._break_off(crew, attempt, set(attempt.calls.values()))
        hear(self.inbox, driver)
        self._let_go_of(crew, driver)
        return attempt.failures

    def _let_go_of(self, crew: Crew, driver: Driver) -> None:
        """Ends the processes that were asked to end and have only saved: whoever asked will kill them soon."""
        for rank in driver.whereabouts.told:
            if process := crew.places[rank].process:
                crew.end(process)
                crew.places[rank].process = None

    def _call(self, crew: Crew, job: Job, store: tuple[str, int]) -> dict[Any, int]:
        """Has every rank begin; store: where they find one another."""
        hellos = [process.hello for process in map(crew.of, range(self.workers)) if process.hello]
        nodes = list(dict.fromkeys(hello.node_id for hello in hellos))
        on_node = dict.fromkeys(nodes, 0)
        use_gpu = any(need.get("GPU", 0) > 0 for need in self.needs)
        job_once, calls = ray.put(job), {}
        for rank, hello in enumerate(hellos):
            node = hello.node_id
            seat = Seat(rank, self.workers, on_node[node], nodes.index(node), store, use_gpu)
            calls[crew.of(rank).actor.run.remote(job_once, seat, self.inbox)] = rank
            on_node[node] += 1
        return calls

    # --- the supervisor -----------------------------------------------------------------------------------------

    def _look(self, crew: Crew, attempt: Attempt, driver: Driver) -> None:
        """One round: who ended, what is new, who is silent."""
        ended, _ = ray.wait(list(attempt.calls), timeout=POLL_SECONDS)
        if hear(self.inbox, driver):
            attempt.watching.heard()
            if attempt.watching.silence.news == 2:  # the start is over
                crew.have_spares()
        for call in ended:
            rank = attempt.calls.pop(call)
            if error := _error_of(call):
                attempt.failures[rank] = error
        if attempt.failures:
            self.noticed_at = driver.lost()
            self._break_off(crew, attempt, set())
        elif found := attempt.watching.look():
            self._end_stuck(crew, attempt, driver, found)

    def _end_stuck(self, crew: Crew, attempt: Attempt, driver: Driver, found: Stuck) -> None:
        """Keeps where everybody stands with the run, and ends the attempt."""
        self.noticed_at = driver.lost()
        attempt.watching.keep(driver, crew.name)
        attempt.failures[found.rank] = WorkerLost(f"{crew.name(found.rank)} {found.why}", Kind.HUNG)
        self._break_off(crew, attempt, {found.rank} | found.dumb)

    def _break_off(self, crew: Crew, attempt: Attempt, culprits: set[int]) -> None:
        """Ends an attempt: culprits are killed, the others let go of it and keep their processes if they can."""
        for rank in culprits:
            crew.end(crew.of(rank))
        for rank in set(attempt.calls.values()) - culprits:
            crew.of(rank).actor.let_go.remote()
        until = time.monotonic() + GRACE_SECONDS
        while attempt.calls and time.monotonic() < until:
            for call in ray.wait(list(attempt.calls), timeout=0.1)[0]:
                rank = attempt.calls.pop(call)
                if (error := _error_of(call)) and rank not in culprits:
                    attempt.failures.setdefault(rank, error)
        silent = set(attempt.calls.values()) - culprits
        attempt.calls.clear()
        for rank in silent:
            crew.end(crew.of(rank))
        if silent and all(is_consequence(error) for error in attempt.failures.values()):
            # Its peers lost it, and Ray does not know yet: its node is gone, or cut off.
            attempt.failures[min(silent)] = WorkerLost(
                f"{crew.name(min(silent))} cannot be reached any more", Kind.NODE
            )
        dead = {r: e for r, e in attempt.failures.items() if isinstance(e, ray.exceptions.RayActorError)}
        for number, error in dead.items():
            assert number is not None
            attempt.failures[number] = WorkerLost(crew.name(number), words=str(error))
        for rank in {*silent, *culprits, *(number for number in dead if number is not None)}:
            crew.places[rank].process = None


def _error_of(call: Any) -> BaseException | None:
    """What a finished call raised."""
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        return getattr(error, "cause", None) or error
    except ray.exceptions.RayError as error:
        return error
    return None
