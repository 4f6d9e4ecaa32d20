"""`scale-failures`: a node, a rack and a hang among simulated ranks, until the supervisor decides.

The run's supervisor, driver, failure policy and queue are the real ones, and so is what a launcher
in Ray does with the ranks' reports. The ranks are simulated by a thread of this process: each sends
a heartbeat a second to its node's aggregator, answers what the driver asks, and fails when a peer
is gone. Nothing is trained. Each scene ends when the run has continued without what was lost.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from ray import cloudpickle

from app.config import Config
from app.config.io import load_config
from app.console.terminal import Console
from app.launchers import ray_workers
from app.launchers.aggregator import Beat, Orders
from app.launchers.elastic import Elastic
from app.launchers.event_socket import LocalQueue
from app.launchers.ray_workers import RayWorkers
from app.launchers.recovery import Nodes
from app.launchers.supervisor import Supervisor
from app.launchers.workers import Failures, WorkerLost
from app.run.driver import Driver
from app.run.manifest import Run
from app.run.prepare import Prepared
from app.tracking.settings import resolve_tracking
from app.training.events import (
    Event,
    StepsDone,
    TrainingDone,
    TrainingStarted,
    WorkerFailed,
    WorkerInfo,
    WorkerStarted,
)
from app.training.job import Job
from experiments.benchmarks.harness import show
from experiments.benchmarks.scale_out import NODE_RANKS, Tree, flight_record, infos_of
from strategies.layout import Layout, ParallelDims

RACK_NODES = 64
STEP_SECONDS = 0.5
"""How long a step of the simulated run takes."""
BEAT_SECONDS = 1.0
"""Between two heartbeats of a rank."""
RAY_SECONDS = 1.0
"""How long Ray takes to tell that processes are gone, if their node's connection is closed.

A machine whose network is silent takes Ray's health check longer; that is not simulated.
"""
LOOK_SECONDS = 0.05
"""Between two rounds of the simulated ranks."""
RECORD = json.dumps({"entries": ["x" * 1_000_000]})
"""What a rank answers that is asked for its whole flight record."""


@dataclass(frozen=True)
class Scene:
    """What happens to a run.

    Attributes:
        name: For a person.
        nodes: How many nodes go.
        peers_fail: Whether the other ranks notice by their connections, as with gloo, and Ray says
            nothing of the ranks that are gone. Otherwise Ray says it, and the others wait, as with
            NCCL.
        hangs: Whether a rank stands still instead.
    """

    name: str
    nodes: int = 0
    peers_fail: bool = False
    hangs: bool = False


SCENES = (
    Scene("a node", nodes=1),
    Scene("a rack", nodes=RACK_NODES, peers_fail=True),
    Scene("a hang", hangs=True),
)


class SimulatedWorkers(RayWorkers):
    """Ranks of a run that a thread simulates.

    Args:
        scene: What happens to them in the first attempt.
        fault_seconds: How long they train before it.
        folder: A temporary one.
    """

    def __init__(self, scene: Scene, fault_seconds: float, folder: Path) -> None:
        queue = LocalQueue(folder)
        super().__init__(queue)
        self.root = queue.root
        self.scene = scene
        self.fault_seconds = fault_seconds
        self.fault_clock: float | None = None
        """When it happened, in seconds of the monotonic clock."""
        self.lost_nodes: set[str] = set()
        """Ids of the nodes that are gone, for the rest of the run."""
        self.killed: set[int] = set()
        """Ranks of this attempt whose processes are gone."""
        self.simulation_seconds = 0.0
        """CPU time of the threads that simulate ranks."""
        self._ended_attempt = threading.Event()
        self._thread: threading.Thread | None = None

    # --- the supervisor's side --------------------------------------------------------------------

    def start(self, job: Job) -> None:
        """See `Workers`."""
        self.begin_attempt(job)
        self.killed = set()
        nodes = (f"node-{number}" for number in range(10**6))
        living = (node for node in nodes if node not in self.lost_nodes)
        self.places = infos_of(self.world_size)
        if self.lost_nodes:
            names = [next(living) for _ in range(-(-self.world_size // NODE_RANKS))]
            self.places = {
                rank: replace(info, node=names[rank // NODE_RANKS])
                for rank, info in self.places.items()
            }
        tree = Tree(self.world_size, self.attempt, self.root)
        self._ended_attempt = threading.Event()
        self._thread = threading.Thread(target=self._simulate, args=[tree], daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """See `Workers`."""
        self._ended_attempt.set()
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """See `RayWorkers`."""
        time.sleep(ray_workers.POLL_SECONDS)

    def lost(self) -> Failures:
        """See `RayWorkers`."""
        if self.fault_clock is None or self.scene.peers_fail or self.attempt > 1:
            return {}
        if time.monotonic() - self.fault_clock < RAY_SECONDS:
            return {}
        return {rank: WorkerLost(details="its node died") for rank in self.killed}

    def kill(self, infos: list[WorkerInfo]) -> None:
        """See `Workers`."""
        self.killed |= {info.rank for info in infos}

    def _look_for_places(self) -> bool:
        return True

    # --- the ranks' side --------------------------------------------------------------------------

    def _simulate(self, tree: Tree) -> None:
        """All ranks of an attempt, until it ends."""
        ranks = SimulatedRanks(self, tree)
        while not self._ended_attempt.wait(LOOK_SECONDS):
            ranks.round()
        self.simulation_seconds += time.thread_time()

    def misfortune(self) -> bool:
        """Lets the scene's fault happen; returns whether it just has."""
        if self.fault_clock is not None:
            return False
        self.fault_clock = time.monotonic()
        if self.scene.nodes:
            middle = self.world_size // NODE_RANKS // 2
            last = min(middle + self.scene.nodes, self.world_size // NODE_RANKS)
            self.lost_nodes = {f"node-{number}" for number in range(middle, last)}
            self.killed = {
                rank for rank, info in self.places.items() if info.node in self.lost_nodes
            }
        return True


class SimulatedRanks:
    """What the ranks of an attempt do.

    Args:
        workers: Knows what happens to them.
        tree: What they report to.
    """

    def __init__(self, workers: SimulatedWorkers, tree: Tree) -> None:
        self.workers = workers
        self.tree = tree
        self.start_clock = time.monotonic()
        self.beat_clock = 0.0
        self.report_clock = 0.0
        self.stalled_step: int | None = None
        """The step at which a rank stands still; None if none does."""
        self.stalled_rank = tree.ranks // 2
        """The rank that stands still; see `flight_record`."""
        self.orders = Orders()
        self.answered = 0
        self.have_failed = False
        for rank, info in workers.places.items():
            self.emit(rank, WorkerStarted(info=info))
        first = TrainingStarted(
            time=time.time(), resumed_from=None, step=0, steps=10**6, device="cpu", parameters=1
        )
        self.emit(0, first)

    def emit(self, rank: int, event: Event, *, urgent: bool = False) -> None:
        """Sends an event of a rank."""
        self.tree.above(rank).put(self.tree.attempt, cloudpickle.dumps([event]), urgent)

    def round(self) -> None:
        """What happens in a fraction of a second."""
        now = time.monotonic()
        self.tree.clock = now
        trained = now - self.start_clock
        workers = self.workers
        if workers.attempt == 1 and trained > workers.fault_seconds and workers.misfortune():
            self.tree.gone = {int(node.partition("-")[2]) for node in workers.lost_nodes}
            if workers.scene.hangs:
                self.stalled_step = int(trained / STEP_SECONDS)
        if workers.killed and (workers.scene.peers_fail or workers.scene.hangs):
            self.fail()
        if now - self.beat_clock >= BEAT_SECONDS or self.orders.number > self.answered:
            self.beat_clock = now
            self.beats(trained)
        has_news = any(aggregator.urgent.is_set() for aggregator in self.tree.aggregators)
        if has_news or now - self.report_clock >= BEAT_SECONDS:
            self.report_clock = now
            self.tree.deliver()

    def fail(self) -> None:
        """Every living rank loses the connection to one that is gone."""
        if self.have_failed:
            return
        self.have_failed = True
        error = RuntimeError("Connection closed by peer [10.0.0.1]:123")
        for rank in self.living():
            self.emit(rank, WorkerFailed(rank=rank, error=error, line=None), urgent=True)

    def living(self) -> Iterable[int]:
        """The ranks whose processes live."""
        return (rank for rank in range(self.tree.ranks) if rank not in self.workers.killed)

    def beats(self, trained: float) -> None:
        """Every living rank sends a heartbeat, and an answer if it is asked.

        Args:
            trained: Seconds since the attempt began.
        """
        step = int(trained / STEP_SECONDS)
        if self.stalled_step is not None:
            step = self.stalled_step
        is_over = self.workers.attempt > 1 and trained > self.workers.fault_seconds
        question = self.orders.question if self.orders.number > self.answered else ""
        number = self.orders.number
        for rank in self.living():
            stands_still = self.stalled_step is not None and rank == self.stalled_rank
            beat: Beat = ("training", step, 0, not stands_still)
            if is_over:
                beat = ("finished", step, 0, False)
            answer = (number, self.answer(rank, question)) if question else None
            self.orders = self.tree.above(rank).beat(self.tree.attempt, rank, beat, answer)
        self.answered = number
        if is_over:
            self.emit(0, TrainingDone(summary={"stopped": False, "step": step}), urgent=True)
        elif step:
            self.emit(0, _steps_done(step))

    def answer(self, rank: int, question: str) -> str:
        """What a rank answers to a question; see `heartbeats.Reply`."""
        word, *asked = question.split()
        if asked and str(rank) not in asked:
            return ""
        if word == "collectives":
            return flight_record(rank, self.tree.ranks)
        if word == "flight_recorder":
            return RECORD
        place = "in its own code" if rank == self.stalled_rank else "in all_reduce"
        return f'  File "train.py", line 1, {place}\n' * 40


def _steps_done(step: int) -> StepsDone:
    return StepsDone(
        step=step,
        steps=10**6,
        loss=1.0,
        loss_step=step,
        rate=1.0,
        unit="samples",
        gpus=0,
        mfu=None,
        seconds_left=1.0,
        seconds_per_step=STEP_SECONDS,
        memory_bytes=0,
    )


# --- a run ----------------------------------------------------------------------------------------


class TimedConsole(Console):
    """Keeps what is said, with the time.

    Args:
        quiet: See `Console`.
    """

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=True)
        self.shows = not quiet
        self.start_clock = time.monotonic()
        self.log: list[tuple[float, str]] = []
        """Seconds of the monotonic clock, and what was said."""

    def say(self, text: str) -> None:
        """See `Console`."""
        now = time.monotonic()
        self.log.append((now, text))
        if self.shows:
            click.echo(f"{now - self.start_clock:7.2f} s  {text}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a scene ended.

    Attributes:
        seconds: From the fault to the decision.
        decision: What was said of it.
        workers: How many there were afterwards.
        driver_share: How much of a core the driver took, without the simulated ranks.
        log: What was said, with seconds since the start.
    """

    seconds: float
    decision: str
    workers: int
    driver_share: float
    log: tuple[tuple[float, str], ...]


def play(
    scene: Scene,
    ranks: int,
    *,
    train_seconds: float = 10.0,
    overrides: Sequence[str] = (),
    quiet: bool = True,
) -> Outcome:
    """Plays a scene.

    Args:
        scene: What happens.
        ranks: How many ranks there are.
        train_seconds: How long they train before it, and after the restart.
        overrides: Of the configuration.
        quiet: Say nothing meanwhile.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(
            [],
            [
                "task=tabular",
                "run.name=scale",
                f"run.storage={folder}",
                "strategy=ddp",
                f"workers={ranks}",
                f"train.global_batch_size={2 * ranks}",
                "tracking.enabled=false",
                "fault.elastic_seconds=0",
                *overrides,
            ],
        )
        workers = SimulatedWorkers(scene, train_seconds, Path(folder))
        console = TimedConsole(quiet=quiet)
        run = Run(config)
        driver = Driver(run, config, console, resolve_tracking(config.tracking, folder))
        elastic = _elastic(config, ranks, workers)
        nodes = Nodes(
            lost=lambda nodes: set(nodes) & workers.lost_nodes, oom_kills=lambda node: None
        )
        supervisor = Supervisor(workers, driver, elastic, nodes=nodes)
        start_clock = time.monotonic()
        start_cpu = time.process_time()
        job = Job(
            config=config,
            layout=elastic.first.layout,
            folder=run.folder,
            attempt=run.attempt,
            run_uid=run.manifest.uid,
            steps=10**6,
            cwd=str(Path.cwd()),
        )
        with contextlib.closing(workers):
            supervisor.run(job)
        cpu = time.process_time() - start_cpu - workers.simulation_seconds
        seconds = time.monotonic() - start_clock
    assert workers.fault_clock is not None
    decided = next((clock, text) for clock, text in console.log if clock > workers.fault_clock)
    return Outcome(
        seconds=decided[0] - workers.fault_clock,
        decision=decided[1],
        workers=workers.world_size,
        driver_share=cpu / seconds,
        log=tuple((clock - start_clock, text) for clock, text in console.log),
    )


def _elastic(config: Config, ranks: int, workers: SimulatedWorkers) -> Elastic:
    """Continues with the ranks of the nodes that are left."""

    def prepared(changed: Config, count: int) -> Prepared:
        layout = Layout("ddp", ParallelDims(dp_replicate=count))
        return Prepared(config=changed, layout=layout, steps=10**6, samples=None)

    def free(excluded: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
        gone = workers.lost_nodes | set(excluded)
        names = (f"node-{number}" for number in range(ranks // NODE_RANKS))
        return {name: {"GPU": float(NODE_RANKS)} for name in names if name not in gone}

    return Elastic(
        config=config,
        first=prepared(config, ranks),
        per_worker={"GPU": 1.0},
        prepare=lambda config, workers, memory_below: prepared(config, workers),
        free=free,
    )


@click.command(help=__doc__)
@click.option("--ranks", type=int, default=4096, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(ranks: int, as_json: bool) -> None:
    results: dict[str, Any] = {}
    rows: list[dict[str, str]] = []
    for scene in SCENES:
        if not as_json:
            click.echo(f"--- {scene.name} of {ranks:,} ranks")
        outcome = play(scene, ranks, quiet=as_json)
        results[scene.name] = {"seconds": outcome.seconds, "log": outcome.log}
        rows.append(
            {
                "what": scene.name,
                "seconds to the decision": f"{outcome.seconds:.1f}",
                "workers afterwards": f"{outcome.workers:,}",
                "driver's share of a core": f"{100 * outcome.driver_share:.0f} %",
            }
        )
    show("scale-failures", results, rows, as_json=as_json)


if __name__ == "__main__":
    main()
