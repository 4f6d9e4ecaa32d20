"""Trains a job to its end: starts workers, reads their events, and restarts them after failures.

There is one mechanism for every launcher, over the small `Workers` interface. What to do after a
failure is decided by `failure_policy.decide`, and whether a rank hangs by
`heartbeats.HangDetector`. All attempts share the run's checkpoints, so another attempt is new
workers that find the newest commit by themselves.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from app.errors import Interrupted, UserError
from app.launchers.blame import rank_behind
from app.launchers.crash import log_sizes
from app.launchers.elastic import Elastic, StepUp, limits_of
from app.launchers.evaluation import SeparateEvaluation
from app.launchers.failure_policy import (
    Action,
    Decision,
    Failure,
    Kind,
    decide,
    mean_time_between_failures,
)
from app.launchers.heartbeats import COMPILED, Hang, HangDetector
from app.launchers.recovery import (
    Hung,
    NoCapacity,
    Nodes,
    NotStarted,
    State,
    classify,
    error_to_raise,
)
from app.launchers.workers import Failures, Poll, Workers
from app.run.driver import Driver
from app.training.events import (
    NodePreempted,
    StepPartsMeasured,
    StepsDone,
    WorkerDied,
    WorkerFailed,
    WorkerInfo,
    WorkerStarted,
)
from app.training.job import Job
from cluster import ClusterError

if TYPE_CHECKING:
    from app.launchers.follow import Move, PlanFollower

END_SECONDS = 10.0
"""How long an attempt may take to end after the rank that hung was killed."""
PENDING_SECONDS = 5.0
"""Seconds between two looks at why workers have no places."""
NAMED_WORKERS = 8
"""How many workers a sentence names."""
KEPT_RECORDS = 8
"""How many ranks' last collectives are kept after a hang, of a megabyte each."""
STACKS_CHARACTERS = 4_000_000
"""How much of the stacks is kept after a hang."""


class Supervisor:
    """Supervises the workers of one start of a run.

    Args:
        workers: The processes.
        driver: Shows and tracks what happens.
        elastic: Continues with other numbers of workers; None keeps their number.
        nodes: What can be asked about nodes; None means this machine only.
        evaluation: Evaluates checkpoints beside training; None leaves that to training.
        follower: Compares the run with its plan; None if there is none.
    """

    def __init__(
        self,
        workers: Workers,
        driver: Driver,
        elastic: Elastic | None = None,
        *,
        nodes: Nodes | None = None,
        evaluation: SeparateEvaluation | None = None,
        follower: PlanFollower | None = None,
    ) -> None:
        self.follower = follower
        self.move: Move | None = None
        """The layout to continue with, if training is to pause for it."""
        self.attempt_clock = 0.0
        """When the present attempt began, in seconds of the monotonic clock."""
        self.start_seconds: float | None = None
        """From then to its first step; None before that."""
        self.workers = workers
        self.evaluation = evaluation
        self.driver = driver
        self.elastic = elastic
        self.nodes = nodes or Nodes()
        self.infos: dict[int, WorkerInfo] = {}
        """The workers of the present attempt that have begun, by rank."""
        self.larger_size: int | None = None
        """How many workers there is room for, if training is to pause and continue with them."""
        self.last_steps: StepsDone | None = None
        """How far the present attempt is; None before its first step."""
        self.log_sizes: dict[str, int] = {}
        """Sizes of the workers' logs before the present attempt."""
        self.placed_clock: float | None = None
        """Since when all workers have their places, in seconds of the monotonic clock."""
        self.pending_clock = 0.0
        """When it was last looked why workers have no places, in the same seconds."""
        self.pending_sentence = ""
        """Why workers of the present attempt had no places at that look."""
        self.history: list[Failure] = []
        self.hangs = 0

    def run(self, job: Job) -> None:
        """Trains, with further attempts as long as `decide` says so.

        Raises:
            UserError: A worker found something that another attempt cannot mend; one sentence.
            LayoutError: See UserError.
            NonFiniteError: See UserError.
            RunFailed: The restarts are used up.
            Interrupted: The run was asked to stop, and the checkpoint is saved.
        """
        driver = self.driver
        evaluation = self.evaluation
        if evaluation is not None:
            evaluation.start(job)
        while True:
            if self.follower is not None:
                job = replace(job, measures_parts=self.follower.wants_parts())
            failures = self._attempt(self._with_mtbf(job))
            if failures:
                job = self._moved(self._recover(job, failures))
                continue
            was_stopped = bool(driver.summary.get("stopped"))
            if not was_stopped or not self._pauses or self._stop_requested():
                break
            driver.workers_lost()
            if self.larger_size is not None:
                assert self.elastic is not None
                has_grown = self.larger_size > self.elastic.first_size
                again = "" if has_grown else " again"
                reason = f"there is room for {self.larger_size} workers{again}"
                job = self._resize(job, self.larger_size, reason)
            job = self._moved(job)
        if was_stopped:
            if evaluation is not None:
                evaluation.leave(driver)
            raise Interrupted(f"stopped after step {driver.summary['step']:,}")
        if evaluation is not None:
            evaluation.finish(driver)

    def _stop_requested(self) -> bool:
        """Whether the workers are to save and stop, not to be started again."""
        by_evaluation = self.evaluation is not None and self.evaluation.wants_stop
        return self.driver.stop_requested() or by_evaluation

    @property
    def _pauses(self) -> bool:
        """Whether training is to pause, and continue with other workers or another layout."""
        return self.larger_size is not None or self.move is not None

    def _with_mtbf(self, job: Job) -> Job:
        """The job with the mean time between failures as it is known now."""
        seconds = time.monotonic() - self.driver.start_clock
        nodes = {info.node for info in self.infos.values()}
        mtbf = mean_time_between_failures(self._count_failures(), seconds, len(nodes))
        return replace(job, mtbf_seconds=mtbf)

    def _count_failures(self) -> int:
        return sum(failure.kind is not Kind.NO_CAPACITY for failure in self.history)

    # --- one attempt ------------------------------------------------------------------------------

    def _attempt(self, job: Job) -> Failures:
        """Starts the workers and supervises them to their end; returns what ended them."""
        driver = self.driver
        self.infos = {}
        self.larger_size = None
        self.last_steps = None
        self.log_sizes = log_sizes(driver.run.local_folder / "logs")
        self.placed_clock = None
        self.start_seconds = None
        self.attempt_clock = time.monotonic()
        self.pending_clock = self.attempt_clock
        self.pending_sentence = ""
        driver.begin_attempt()
        hang_seconds = job.config.fault.hang_seconds
        if job.config.train.compile:
            hang_seconds *= COMPILED
        detector = HangDetector(hang_seconds, time.monotonic())
        hang_failures: dict[int | None, BaseException] = {}
        deadline = float("inf")
        try:
            self.workers.start(job)
            while True:
                poll = self.workers.poll(self._stop_requested() or self._pauses)
                if self.evaluation is not None:
                    poll.events += self.evaluation.drain()
                self._handle_events(job, poll)
                now = time.monotonic()
                if poll.ended is not None:
                    # What the killed ranks report is a consequence of the hang.
                    return hang_failures if poll.ended and hang_failures else poll.ended
                if now > deadline:
                    return hang_failures
                driver.check()
                if hang_failures:
                    continue
                hang = detector.update(poll.statuses, now, poll.silent)
                if hang is not None:
                    hang_failures = self._end_hang(hang)
                    deadline = now + END_SECONDS
                    continue
                start_failure = self._start_failure(job, poll, now, begun=detector.statuses.keys())
                if start_failure:
                    return start_failure
                if self.elastic is not None and not driver.starting and not self._pauses:
                    workers = job.layout.dims.world_size
                    self.larger_size = self.elastic.growth(workers)
                    if self.larger_size is None:
                        self._say(self.elastic.stop_waiting(workers))
        finally:
            self.workers.stop()
            if self.elastic is not None:
                self.elastic.withdraw()

    def _handle_events(self, job: Job, poll: Poll) -> None:
        for event in poll.events:
            match event:
                case WorkerStarted(info=info):
                    self.infos[info.rank] = info
                case NodePreempted(node=node, reason=reason, message=message):
                    self.nodes.preempted[node] = reason
                    self.driver.note(message)
                case WorkerFailed() | WorkerDied():
                    pass  # the launcher counts these among what has ended
                case StepPartsMeasured():
                    self._compare_with_plan(job, event)
                case StepsDone():
                    self.driver.handle(event)
                    self._follow_batch(job, event)
                case _:
                    self.driver.handle(event)
        if self.start_seconds is None and not self.driver.starting:
            self.start_seconds = time.monotonic() - self.attempt_clock
            if self.follower is not None:
                self.follower.first_step_done()
        if poll.ended:
            self.driver.workers_lost()

    def _compare_with_plan(self, job: Job, event: StepPartsMeasured) -> None:
        """Compares a measured step with the plan; training pauses if a move is worth it."""
        if self.follower is None or self.driver.run.lease.successor is not None:
            return
        self.move = self.follower.compare(job, event, start_seconds=self._start_seconds)
        if self.move is not None:
            self.driver.console.say(
                f"{self.move.sentence}; saving a checkpoint to continue with it"
            )

    def _follow_batch(self, job: Job, event: StepsDone) -> None:
        """Asks for more workers if the batch is larger than at the last look, and they pay."""
        previous = self.last_steps
        self.last_steps = event
        elastic = self.elastic
        train = job.config.train
        batch = event.global_batch_size
        if elastic is None or job.config.cluster.max_workers is None or self._pauses:
            return
        if batch <= train.batches.batches[0] or self.driver.run.lease.successor is not None:
            return
        if previous is not None and previous.global_batch_size >= batch:
            return
        # Steps of both batches may lie between two events.
        measured = previous or event
        batches: tuple[int, ...] = (batch,)
        if not train.grows_by_itself:
            batches = train.batches.batches_from(event.samples_seen - batch)
        step_up = StepUp(
            batches=batches,
            workers=job.layout.dims.world_size,
            measured_batch=measured.global_batch_size,
            measured_seconds=measured.seconds_per_step,
            steps_left=event.steps - event.step,
            moving_seconds=self._start_seconds,
        )
        self._say(elastic.step_up(step_up))

    @property
    def _start_seconds(self) -> float:
        """From the start of the present attempt to its first step, or until now before that."""
        if self.start_seconds is not None:
            return self.start_seconds
        return time.monotonic() - self.attempt_clock

    def _say(self, sentence: str) -> None:
        if sentence:
            self.driver.note(sentence)

    def _start_failure(self, job: Job, poll: Poll, now: float, *, begun: Set[int]) -> Failures:
        """The failure of workers that do not start; empty while they may still start.

        Either their places do not come, or one of them does not begin.

        Args:
            job: What is trained.
            poll: The newest.
            now: Seconds of the monotonic clock.
            begun: The ranks that have begun.
        """
        if not poll.placed:
            self.placed_clock = None
            self._look_what_is_pending(job, now)
            if self.elastic is not None and self.elastic.need_not_wait(job):
                return {None: NoCapacity("the workers' places have not come back")}
            return {}
        if self.placed_clock is None:
            self.placed_clock = now
        start_seconds = job.config.fault.start_seconds
        world_size = job.layout.dims.world_size
        if len(begun) == world_size or now - self.placed_clock <= start_seconds:
            return {}
        missing = sorted(set(range(world_size)) - begun)
        ranks = ", ".join(map(str, missing[:NAMED_WORKERS]))
        return {None: NotStarted(f"worker {ranks} did not start within {start_seconds:g} s")}

    def _look_what_is_pending(self, job: Job, now: float) -> None:
        """Says what workers without places wait for.

        Raises:
            ClusterError: Nothing has been trained yet, and `cluster.wait_seconds` are over.
        """
        if now - self.pending_clock < PENDING_SECONDS:
            return
        self.pending_clock = now
        sentence = self.nodes.pending(job.excluded_nodes)
        if not sentence:
            return
        driver = self.driver
        wait_seconds = job.config.cluster.wait_seconds
        is_first_attempt = not self.history and driver.first_step_clock is None
        if is_first_attempt and now - self.attempt_clock > wait_seconds:
            raise ClusterError(
                f"the workers have no places after {wait_seconds:g} s (cluster.wait_seconds): "
                f"{sentence}"
            )
        if sentence != self.pending_sentence:
            self.pending_sentence = sentence
            driver.console.say(f"waiting for resources: {sentence}")
            driver.console.waits_for(f"resources: {sentence}", since=self.attempt_clock)

    def _end_hang(self, hang: Hang) -> dict[int | None, BaseException]:
        """Ends the rank that holds up the others, and those that do not answer.

        The stacks, and some ranks' last collectives, are kept with the MLflow run.

        Returns:
            The failure of that rank.
        """
        driver = self.driver
        driver.workers_lost()
        self.hangs += 1
        driver.count_hangs(self.hangs)
        self._keep_stacks()
        answers = self.workers.ask("collectives")
        summaries = {rank: summary for rank, summary in answers.items() if summary}
        if not hang.silent:  # a rank that does not answer has no record
            behind = rank_behind(summaries)
            if behind is not None and behind.rank != hang.rank:
                hang = replace(hang, rank=behind.rank, why=f"{behind.why}; {hang.why}")
        self._keep_flight_records(hang.rank, summaries.keys())
        who = self.infos.get(hang.rank, f"worker {hang.rank}")
        sentence = f"{who} {hang.why}"
        if not self.workers.restartable:
            # This process may be ended with the rank, before the failure is classified.
            driver.tracker.tags({"trireme.last_failure": sentence})
            driver.console.say(
                f"{sentence}; ending it (torchrun --max-restarts=N starts all ranks again)"
            )
        ranks_to_end = {hang.rank} | hang.silent
        self.workers.kill([self.infos[rank] for rank in ranks_to_end if rank in self.infos])
        return {hang.rank: Hung(sentence)}

    def _keep_stacks(self) -> None:
        stacks = self.workers.ask("stack")
        text = stacks_text(self.infos, stacks)
        self.driver.tracker.text(text, f"hangs/step-{self.driver.step}.txt")

    def _keep_flight_records(self, blamed: int, ranks: Set[int]) -> None:
        """Keeps the records of the rank that is blamed, and of the first of others.

        Args:
            blamed: The rank.
            ranks: Those that have a record.
        """
        driver = self.driver
        kept = [rank for rank in dict.fromkeys([blamed, *sorted(ranks)]) if rank in ranks]
        if not kept:
            return
        records = self.workers.ask("flight_recorder", kept[:KEPT_RECORDS])
        for rank, record in records.items():
            driver.tracker.text(record, f"hangs/step-{driver.step}-rank-{rank}.json")

    # --- between attempts -------------------------------------------------------------------------

    def _moved(self, job: Job) -> Job:
        """The job with the layout of the move that is due, if there is one."""
        move = self.move
        self.move = None
        if self.follower is None or move is None:
            return job
        driver = self.driver
        notes = set(self.follower.prepared.notes)
        try:
            prepared = self.follower.take(job.layout.dims.world_size, move)
        except UserError as error:
            driver.note(f"{error}; continuing as before")
            return job
        driver.move(prepared.config, prepared.prediction)
        for note in prepared.notes:
            if note not in notes:
                driver.note(note)
        return replace(job, config=prepared.config, layout=prepared.layout)

    def _recover(self, job: Job, failures: Failures) -> Job:
        """Says what happened and what is done about it.

        Returns:
            The job of the next attempt.

        Raises:
            RunFailed: See `run`, also for its other errors.
        """
        driver = self.driver
        elastic = self.elastic
        driver.workers_lost()
        # cluster/watch.py says that nodes are out of reach, and ends or restarts the run if they
        # stay so.
        while not self.nodes.reachable():
            self._pause(0.2)
        state = State(
            workers=self.infos,
            step=driver.step,
            progressed=driver.progressed,
            logs=driver.run.local_folder / "logs",
            nodes=self.nodes,
            log_sizes=self.log_sizes,
        )
        self.history.append(classify(failures, state, self.history))
        if elastic is None:
            decision = decide(self.history, limits_of(job.config))
        else:
            workers = job.layout.dims.world_size
            capacity = elastic.capacity(workers)
            if self.history[-1].too_large_to_start:
                smaller = elastic.take_smaller_layout(workers)
                capacity = replace(capacity, smaller_layout=smaller is not None)
            decision = decide(self.history, elastic.limits, capacity)
        restartable = self.workers.restartable
        if decision.action is Action.GIVE_UP or not restartable:
            raise error_to_raise(failures, decision.reason, here=not restartable)
        job = self._carry_out(decision, job)
        self._pause(decision.pause)
        return job

    def _carry_out(self, decision: Decision, job: Job) -> Job:
        """Carries out a decision to continue; returns the job of the next attempt."""
        driver = self.driver
        elastic = self.elastic
        driver.count_restarts(self._count_failures(), self.history[-1].sentence)
        if elastic is not None:
            if decision.action is Action.SMALLER_LAYOUT:
                return self._with_smaller_layout(job, decision.reason)
            if decision.action is Action.EXCLUDE_NODE:
                elastic.excluded = (*elastic.excluded, decision.node)
            if decision.workers or elastic.excludes_others(job):
                workers = decision.workers or job.layout.dims.world_size
                return self._resize(job, workers, decision.reason)
        if decision.action is Action.WAIT:
            consequence = "waiting for their places"
        elif decision.pause > 1:
            consequence = f"starting again from the last checkpoint in {decision.pause:g} s"
        else:
            consequence = "starting again from the last checkpoint"
        driver.console.say(f"{decision.reason}; {consequence}")
        return job

    def _with_smaller_layout(self, job: Job, reason: str) -> Job:
        """The job with the layout that takes less memory."""
        assert self.elastic is not None
        prepared = self.elastic.prepared(job.layout.dims.world_size)
        assert prepared is not None
        console = self.driver.console
        console.say(f"{reason}; trying the next layout, which takes less memory")
        if self.follower is not None:
            self.follower.continue_with(prepared)
        self.driver.lay_out_again(prepared.config, prepared.prediction)
        for note in prepared.notes:
            self.driver.note(note)
        return replace(job, config=prepared.config, layout=prepared.layout)

    def _resize(self, job: Job, workers: int, reason: str) -> Job:
        """The job with another number of workers, or on other nodes."""
        driver = self.driver
        elastic = self.elastic
        assert elastic is not None
        resized_job = elastic.job(job, workers)
        prepared = elastic.prepared(workers)
        if self.follower is not None and prepared is not None:
            self.follower.continue_with(prepared)
            self.move = None
        layout = ""
        if resized_job.layout.dims.dp != job.layout.dims.dp:
            layout = f" ({resized_job.layout})"
        driver.console.say(
            f"{reason}; continuing with {workers} of {elastic.wanted} workers{layout} after the "
            "last save"
        )
        driver.resize(workers, ",".join(elastic.excluded_nodes))
        return resized_job

    def _pause(self, seconds: float) -> None:
        """Waits, unless the run is to stop or has failed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.driver.check()
            time.sleep(0.1)


def stacks_text(infos: Mapping[int, WorkerInfo], stacks: Mapping[int, str]) -> str:
    """The stacks of all workers for a person; workers with the same stack share it.

    Args:
        infos: The workers by rank.
        stacks: What they have answered.
    """
    infos_by_stack: dict[str, list[WorkerInfo]] = defaultdict(list)
    for rank, info in sorted(infos.items()):
        infos_by_stack[stacks.get(rank, "does not answer")].append(info)
    sections = []
    characters = 0
    # A stack that few ranks have says more, so it comes first.
    for stack, sharers in sorted(infos_by_stack.items(), key=lambda item: len(item[1])):
        names = [f"--- {info}" for info in sharers[:NAMED_WORKERS]]
        if len(sharers) > NAMED_WORKERS:
            names.append(f"--- and {len(sharers) - NAMED_WORKERS:,} more")
        section = "\n".join([*names, stack, ""])
        characters += len(section)
        if characters > STACKS_CHARACTERS:
            sections.append("--- further stacks are left out")
            break
        sections.append(section)
    return "\n".join(sections)
