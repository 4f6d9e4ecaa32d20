"""Trains a job to its end: starts the workers, reads their events, notices what breaks, and starts them again.

One mechanism for every launcher, over the small `Workers` interface. What to do after a failure is decided by
`failure_policy.decide`; whether a rank hangs by `heartbeats.HangDetector`. An attempt's checkpoints are the run's,
so another attempt is new workers that find the newest commit by themselves.
"""

import time
from dataclasses import replace

from app.errors import Interrupted
from app.launchers.blame import rank_behind
from app.launchers.crash import log_sizes
from app.launchers.elastic import Elastic, limits_of
from app.launchers.failure_policy import Action, Decision, Failure, Kind, decide, mean_time_between_failures
from app.launchers.heartbeats import COMPILED, Hang, HangDetector
from app.launchers.recovery import Hung, NoCapacity, Nodes, State, classify, error_to_raise
from app.launchers.workers import Failures, Poll, WorkerLost, Workers
from app.run.driver import Driver
from app.training.events import NodePreempted, WorkerDied, WorkerFailed, WorkerInfo, WorkerStarted
from app.training.job import Job

END_SECONDS = 10.0
"""For an attempt to end whose culprit was killed."""


class Supervisor:
    """elastic: how to continue with other numbers of workers; None: their number stays what it is."""

    def __init__(
        self, workers: Workers, driver: Driver, elastic: Elastic | None = None, *, nodes: Nodes | None = None
    ) -> None:
        self.workers, self.driver, self.elastic = workers, driver, elastic
        self.nodes = nodes or Nodes()
        self.infos: dict[int, WorkerInfo] = {}  # of the present attempt, by rank
        self.more: int | None = None  # workers there is room for, when training is to pause for them
        self.history: list[Failure] = []
        self.hangs = 0

    def run(self, job: Job) -> None:
        """Trains, with further attempts as long as `decide` says so.

        Raises:
            UserError, LayoutError, NonFiniteError: a worker found something that another attempt cannot mend.
            RunFailed: the restarts are used up.
            Interrupted: asked to stop, and the checkpoint is saved.
        """
        driver = self.driver
        while True:
            failures = self._attempt(self._next(job))
            if failures:
                job = self._recover(job, failures)
            elif driver.summary.get("stopped") and self.more is not None and not driver.stop_requested():
                driver.workers_lost()
                job = self._resize(job, self.more, f"there is room for {self.more} workers again")
            else:
                break
        if driver.summary.get("stopped"):
            raise Interrupted(f"stopped after step {driver.summary['step']:,}")

    def _next(self, job: Job) -> Job:
        """The job for the next attempt, which knows how often the run has failed."""
        driver = self.driver
        nodes = len({info.node for info in self.infos.values()})
        failures = sum(failure.kind is not Kind.NO_CAPACITY for failure in self.history)
        return replace(
            job,
            mtbf_seconds=mean_time_between_failures(failures, time.monotonic() - driver.start_clock, nodes),
        )

    # --- one attempt --------------------------------------------------------------------------------------------

    def _attempt(self, job: Job) -> Failures:
        """From the start of the workers to their end, and what ended them."""
        driver, fault = self.driver, job.config.fault
        self.infos, self.more = {}, None
        self.log_sizes = log_sizes(driver.run.local_folder / "logs")
        self.placed_at: float | None = None
        driver.begin_attempt()
        least = fault.hang_seconds * (COMPILED if job.config.train.compile else 1.0)
        detector = HangDetector(least, time.monotonic())
        blamed: dict[int | None, BaseException] = {}
        deadline = float("inf")
        try:
            self.workers.start(job)
            while True:
                found = self.workers.poll(driver.stop_requested() or self.more is not None)
                self._handle(found)
                now = time.monotonic()
                if found.ended is not None:
                    return blamed or found.ended if found.ended else {}
                if now > deadline:
                    return blamed
                driver.check()
                if blamed:
                    continue
                if hang := detector.update(found.statuses, now):
                    blamed, deadline = self._end_hang(hang), now + END_SECONDS
                elif failed := self._starting_failed(job, found, now):
                    return failed
                elif self.elastic is not None and not driver.starting and self.more is None:
                    self.more = self.elastic.growth(job.layout.dims.world_size)
        finally:
            self.workers.stop()

    def _handle(self, found: Poll) -> None:
        for event in found.events:
            match event:
                case WorkerStarted(info=info):
                    self.infos[info.rank] = info
                case NodePreempted(node=node, reason=reason, message=message):
                    self.nodes.preempted[node] = reason
                    self.driver.note(message)
                case WorkerFailed() | WorkerDied():
                    pass  # the launcher counts these among what has ended
                case _:
                    self.driver.handle(event)
        if found.ended:
            self.driver.workers_lost()

    def _starting_failed(self, job: Job, found: Poll, now: float) -> Failures:
        """While workers start: whether their places will not come, or one of them does not begin."""
        world, seconds = job.layout.dims.world_size, job.config.fault.start_seconds
        missing = sorted(set(range(world)) - found.statuses.keys())
        if not found.placed:
            self.placed_at = None
            waits = self.elastic is None or not self.elastic.need_not_wait(job)
            return {} if waits else {None: NoCapacity("the workers' places have not come back")}
        self.placed_at = self.placed_at or now
        if not missing or now - self.placed_at <= seconds:
            return {}
        named = ", ".join(map(str, missing[:8]))
        return {None: WorkerLost(f"worker {named} did not begin within {seconds:g} s and")}

    def _end_hang(self, hang: Hang) -> dict[int | None, BaseException]:
        """Keeps every rank's stack and last collectives with the MLflow run, and ends those that hold up the others."""
        driver, infos = self.driver, self.infos
        driver.workers_lost()
        self.hangs += 1
        driver.count_hangs(self.hangs)
        stacks = self.workers.ask("stack")
        text = "\n".join(f"--- {info}\n{stacks.get(rank, 'does not answer')}\n" for rank, info in sorted(infos.items()))
        driver.tracker.text(text, f"hangs/step-{driver.step}.txt")
        records = {rank: record for rank, record in self.workers.ask("flight_recorder").items() if record}
        for rank, record in records.items():
            driver.tracker.text(record, f"hangs/step-{driver.step}-rank-{rank}.json")
        if not hang.silent and (found := rank_behind(records)):  # one that does not answer has no record
            hang = replace(
                hang, rank=found.rank, why=f"{found.why}; {hang.why}" if found.rank != hang.rank else hang.why
            )
        sentence = f"{infos.get(hang.rank, f'worker {hang.rank}')} {hang.why}"
        if not self.workers.restartable:  # this process may be ended with it, before it is classified
            driver.tracker.tags({"trireme.last_failure": sentence})
            driver.console.say(f"{sentence}; ending it (torchrun --max-restarts=N starts all ranks again)")
        self.workers.kill([infos[rank] for rank in {hang.rank} | hang.silent if rank in infos])
        return {hang.rank: Hung(sentence)}

    # --- between attempts ---------------------------------------------------------------------------------------

    def _recover(self, job: Job, failures: Failures) -> Job:
        """Says what happened and what is done about it; the job of the next attempt.

        Raises: see `run`.
        """
        driver, elastic = self.driver, self.elastic
        driver.workers_lost()
        while not self.nodes.reachable():  # what watches them (cluster/watch.py) says so, and ends or restarts the run
            self._pause(0.2)
        logs = driver.run.local_folder / "logs"
        state = State(self.infos, driver.step, driver.progressed, logs, self.nodes, self.log_sizes)
        self.history.append(classify(failures, state, self.history))
        capacity = elastic.capacity(job.layout.dims.world_size) if elastic else None
        limits = elastic.limits if elastic else limits_of(job.config)
        decision = decide(self.history, limits, capacity)
        if decision.action is Action.GIVE_UP or not self.workers.restartable:
            raise error_to_raise(failures, decision.reason, here=not self.workers.restartable)
        job = self._carry_out(decision, job)
        self._pause(decision.pause)
        return job

    def _carry_out(self, decision: Decision, job: Job) -> Job:
        driver, elastic = self.driver, self.elastic
        count = sum(failure.kind is not Kind.NO_CAPACITY for failure in self.history)
        driver.count_restarts(count, self.history[-1].sentence)
        if elastic is not None:
            if decision.action is Action.EXCLUDE_NODE:
                elastic.excluded = (*elastic.excluded, decision.node)
            if decision.workers or elastic.excludes_others(job):
                return self._resize(job, decision.workers or job.layout.dims.world_size, decision.reason)
        waits = decision.action is Action.WAIT
        then = "waiting for their places" if waits else "starting again from the last checkpoint"
        after = f" in {decision.pause:g} s" if decision.pause > 1 and not waits else ""
        driver.console.say(f"{decision.reason}; {then}{after}")
        return job

    def _resize(self, job: Job, workers: int, reason: str) -> Job:
        """The job with another number of workers, or on other nodes."""
        driver, elastic = self.driver, self.elastic
        assert elastic is not None
        before, job = job.layout, elastic.job(job, workers)
        layout = "" if job.layout.dims.dp == before.dims.dp else f" ({job.layout})"
        driver.console.say(
            f"{reason}; continuing with {workers} of {elastic.wanted} workers{layout} after the last save"
        )
        driver.resize(workers, ",".join(elastic.excluded_nodes))
        return job

    def _pause(self, seconds: float) -> None:
        """Waits, unless a stop is asked for."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.driver.check()
            time.sleep(0.1)
