"""`chaos`: seeded kills of worker, stage, raylet and driver, at any moment; nothing may be lost.

It has a Ray of its own: a head without CPUs, and two nodes of two. One run after another, layouts
in turn, is disturbed several times; each time the same command is started again if it has ended. In
the end the run is compared with an undisturbed one.
"""

import contextlib
import itertools
import math
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil
import torch

from experiments.benchmarks import chaos_task
from experiments.benchmarks.chaos_session import Session, end_tree
from experiments.benchmarks.chaos_task import SAMPLES
from experiments.benchmarks.harness import show

BATCH = 16
WORKERS = 2
STEPS = 480
STEP_SECONDS = 0.01
"""How much longer every micro-batch takes, so that there is time for kills."""
MAX_DELAY = 1.2
"""Seconds of training before a kill, at most."""
HANG_SECONDS = 300.0
"""Without a step for so long, a run hangs: this is far more than what a busy machine takes."""
STARTING_SHARE = 0.2
"""The share of kills that come while the run starts again."""
MICRO_BATCHES_OF_STEP = 4
"""At most: a pipeline's."""
REFUSED = 2
"""The exit code of a command that was refused, for instance because a node is being started."""
COMMON = [
    "task=experiments.benchmarks.chaos_task:Recorded",
    f"train.global_batch_size={BATCH}",
    f"train.steps={STEPS}",
    "train.log_every=1",
    "checkpoint.every_steps=10",
    f"workers={WORKERS}",
    "tracking.log_model=false",
    "tracking.flush_timeout=60",
    "tracking.system_metrics_every=0",
    "fault.max_restarts=100",
    "fault.hang_seconds=2",
]
"""The experiment of all layouts."""
LAYOUTS: dict[str, list[str]] = {
    "ddp actors": ["strategy=ddp", "launcher=actors"],
    "pipeline actors": ["strategy=pipeline", "parallel.pp=2", "train.micro_batch_size=4"],
    "fsdp actors": ["strategy=fsdp", "launcher=actors"],
    "ddp ray": ["strategy=ddp", "launcher=ray"],
    "fsdp ray": ["strategy=fsdp", "launcher=ray"],
    "ddp torchrun": ["strategy=ddp", "launcher=torchrun"],
}
TORCHRUN = [
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "--max-restarts=100",
    "-m",
]
VICTIMS: dict[tuple[str, int], float] = {
    ("worker", signal.SIGKILL): 60,
    ("worker", signal.SIGTERM): 5,
    ("worker", signal.SIGSTOP): 8,
    ("driver", signal.SIGKILL): 8,
    ("driver", signal.SIGTERM): 4,
    ("raylet", signal.SIGKILL): 5,
}
"""What is killed by which signal, and how often.

It is a worker or stage, the command, or the raylet of a worker's node.
"""


@dataclass
class Kill:
    """A kill, and what came of it.

    Attributes:
        victim: "worker", "driver" or "raylet".
        signal: The number of the signal.
        delay: Seconds after the run trains again; after the last kill if `starting`.
        rank: The rank of the worker, or of the worker on whose node the raylet is.
        starting: Whether it comes while the run starts again.
        time: The Unix time of the kill; 0 if it was not done.
        seconds: Seconds until the next step was finished; None if there was none.
        committed: The step of the newest committed checkpoint at the time of the kill.
        resumed_from: The step from which the run was continued.
    """

    victim: str
    signal: int
    delay: float
    rank: int
    starting: bool
    time: float = 0.0
    seconds: float | None = None
    committed: int = 0
    resumed_from: int | None = None

    def __str__(self) -> str:
        victim = f"rank {self.rank}" if self.victim == "worker" else self.victim
        moment = " while starting" if self.starting else ""
        name = signal.Signals(self.signal).name
        return f"{name} of {victim}{moment} after {self.delay:.2f} s"


def draw_kills(seed: int, number: int, *, count: int, layout: str) -> list[Kill]:
    """The kills of one run; the same arguments always give the same ones.

    Args:
        seed: The seed of all runs.
        number: The run's number.
        count: The number of kills.
        layout: A key of `LAYOUTS`. Under torchrun only workers are killed: its own agent is the
            driver, and there is no Ray.
    """
    generator = random.Random(f"{seed}-{number}")
    weights = dict(VICTIMS)
    if "torchrun" in layout:
        weights = {kind: weight for kind, weight in VICTIMS.items() if kind[0] == "worker"}
    kills = []
    for _ in range(count):
        victim, signal_number = generator.choices(list(weights), list(weights.values()))[0]
        delay = generator.uniform(0.0, MAX_DELAY)
        rank = generator.randrange(WORKERS)
        is_early = generator.random() < STARTING_SHARE
        can_be_early = victim in ("driver", "worker") and signal_number == signal.SIGKILL
        kill = Kill(
            victim=victim,
            signal=signal_number,
            delay=round(delay, 3),
            rank=rank,
            starting=is_early and can_be_early,
        )
        kills.append(kill)
    return kills


class Hung(Exception):
    """The run did not continue within `HANG_SECONDS`."""


class Trial:
    """One run.

    Args:
        session: Where it runs.
        name: Its name.
        layout: A key of `LAYOUTS`.

    Attributes:
        weights: The final weights.
        curve: The loss of each step in MLflow.
        problems: What is wrong with it, a sentence each.
    """

    def __init__(self, session: Session, name: str, layout: str) -> None:
        self.session = session
        self.name = name
        self.folder = session.storage / "trials" / name
        """What the task writes."""
        self.run = session.storage / "runs" / name
        """What Trireme writes."""
        self.log = self.folder / "driver.log"
        self.folder.mkdir(parents=True)
        self.command = [
            sys.executable,
            "-m",
            *(TORCHRUN if "torchrun" in layout else []),
            "app",
            "train",
            *COMMON,
            *LAYOUTS[layout],
            f"run.name={name}",
            f"run.storage={session.storage}/runs",
            f"task_args={{folder: {self.folder}, step_seconds: {STEP_SECONDS}}}",
        ]
        self.driver = session.start(self.command, self.log)
        self.weights: dict[str, torch.Tensor] = {}
        self.curve: list[tuple[int, float]] = []
        self.problems: list[str] = []

    def disturb(self, kills: Sequence[Kill]) -> None:
        """Kills one after another; after each, waits until training continues.

        Kills that would come after the run's end are not done, and have no `time`.

        Raises:
            Hung: Training does not continue.
        """
        for kill in kills:
            if not self._strike(kill):
                return
            # The next step must be one of workers that began afterwards. A worker that gets SIGTERM
            # saves, and goes on.
            ends_workers = (kill.victim, kill.signal) != ("worker", signal.SIGTERM)
            continued = self._next_step(kill.time, by_new_workers=ends_workers)
            if continued is not None:
                kill.seconds = round(continued - kill.time, 2)
            kill.resumed_from = self._first_step_after(kill.time)
            self.session.mend()

    def _first_step_after(self, moment: float) -> int | None:
        """The step with which workers began that were started after a moment."""
        for start in chaos_task.read(self.folder):
            if start.began > moment and start.lines:
                _, positions, _ = start.lines[0]
                return positions[0] // BATCH
        return None

    def finish(self) -> None:
        """Waits for the end, and looks for what is wrong.

        Raises:
            Hung: Training does not continue.
        """
        while self._next_step(time.time()) is not None:
            time.sleep(0.2)
        starts = chaos_task.read(self.folder)
        self.problems += chaos_task.lost_or_repeated(starts, STEPS * BATCH, SAMPLES)
        self._read_mlflow()
        if "is skipped" in self.log.read_text():
            self.problems.append("a damaged checkpoint was met")
        self.weights = torch.load(self.run / "model" / "weights.pt", weights_only=True)

    def _read_mlflow(self) -> None:
        """Reads the curve, and looks for what is wrong with the run in MLflow."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self.session.database)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(experiments, f"attributes.run_name = '{self.name}'")
        for run in runs:
            history = client.get_metric_history(run.info.run_id, "train/loss")
            self.curve += [(point.step, point.value) for point in history]
        self.curve.sort()
        statuses = [run.info.status for run in runs]
        if statuses != ["FINISHED"]:
            self.problems.append(f"MLflow has {len(statuses)} runs of it: {', '.join(statuses)}")
        if [step for step, _ in self.curve] != list(range(1, STEPS + 1)):
            self.problems.append("MLflow has not each step of the curve once")

    def _strike(self, kill: Kill) -> bool:
        """Kills as soon as the victim is there.

        Returns:
            False if the run has come to its end.

        Raises:
            Hung: There is no such victim.
        """
        deadline = time.time() + HANG_SECONDS
        while time.time() < deadline:
            if self.driver.poll() == 0:
                return False
            if not kill.starting and self._next_step(time.time()) is None:
                return False
            time.sleep(kill.delay)
            kill.committed = self._last_committed_step()
            pid = self._victim(kill)
            if pid is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                now = time.time()
                os.kill(pid, kill.signal)
                kill.time = now
                return True
        raise Hung(f"there was nothing for {kill} within {HANG_SECONDS:.0f} s")

    def _last_committed_step(self) -> int:
        markers = self.run.glob("checkpoints/*/COMMIT.json")
        return max((int(marker.parent.name.split("-")[1]) for marker in markers), default=0)

    def _victim(self, kill: Kill) -> int | None:
        """The id of the process to be killed; None if it is not there now."""
        if kill.victim == "driver":
            return self.driver.pid if self.driver.poll() is None else None
        starts = [start for start in chaos_task.read(self.folder) if start.rank == kill.rank]
        if not starts or not psutil.pid_exists(starts[-1].pid):
            return None
        worker = starts[-1].pid
        return worker if kill.victim == "worker" else self.session.raylet_of(worker)

    def _next_step(self, since: float, *, by_new_workers: bool = False) -> float | None:
        """Waits until a step is finished, and starts the command again if it has ended.

        Args:
            since: The Unix time after which the step must have begun.
            by_new_workers: Whether the workers must have begun after that too.

        Returns:
            The Unix time at which the step was finished; None if the run has come to its end.

        Raises:
            Hung: No step is finished.
        """
        deadline = time.time() + HANG_SECONDS
        while time.time() < deadline:
            exit_code = self.driver.poll()
            if exit_code == 0:
                return None
            if exit_code is not None:
                self._start_again(exit_code)
            for start in chaos_task.read(self.folder, newest=2 * WORKERS):
                if by_new_workers and start.began <= since:
                    continue
                times = [seconds for seconds, _, _ in start.lines if seconds > since]
                if len(times) > MICRO_BATCHES_OF_STEP:
                    return times[MICRO_BATCHES_OF_STEP]
            time.sleep(0.03)
        raise Hung(f"no step within {HANG_SECONDS:.0f} s")

    def _start_again(self, exit_code: int) -> None:
        if exit_code == REFUSED:
            time.sleep(1.0)
        with self.log.open("a") as log:
            log.write(f"--- ended with {exit_code}; the same command again\n")
        self.driver = self.session.start(self.command, self.log)


def unlike(trial: Trial, undisturbed: Trial, kills: Sequence[Kill]) -> list[str]:
    """What is wrong with a disturbed run, a sentence each.

    Args:
        trial: The disturbed run.
        undisturbed: The undisturbed run of the same layout.
        kills: How it was disturbed.
    """
    problems = list(trial.problems)
    if trial.curve != undisturbed.curve:
        problems.append("the curve is not that of the undisturbed run")
    if not _are_equal(trial.weights, undisturbed.weights):
        problems.append("the final weights are not those of the undisturbed run")
    for kill in kills:
        if kill.resumed_from is not None and kill.resumed_from < kill.committed:
            step = kill.committed
            problems.append(f"{kill}: went on before step {step}, which was committed")
    return problems


def _are_equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether weights are the same, bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(session: Session, name: str, layout: str, *, kills: Sequence[Kill]) -> Trial:
    """One run that is disturbed.

    Args:
        session: Where it runs.
        name: Its name.
        layout: A key of `LAYOUTS`.
        kills: How it is disturbed; those that were done have a `time` afterwards.
    """
    trial = Trial(session, name, layout)
    try:
        trial.disturb(kills)
        trial.finish()
    except Hung as error:
        trial.problems.append(str(error))
    finally:
        end_tree(trial.driver.pid)
        trial.driver.wait()
        session.mend()
    return trial


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A line per layout and victim.

    It has the number of kills, in how many runs something was wrong, and seconds to the next step.
    """
    groups = defaultdict[tuple[str, str], list[Mapping[str, Any]]](list)
    for row in rows:
        groups[row["layout"], row["victim"]].append(row)
    table = []
    for (layout, victim), members in sorted(groups.items()):
        seconds = [row["seconds"] for row in members if row["seconds"] is not None]
        seconds = seconds or [math.nan]
        wrong_runs = {row["run"] for row in members if row["problems"]}
        table.append(
            {
                "layout": layout,
                "victim": victim,
                "kills": str(len(members)),
                "runs wrong": str(len(wrong_runs)),
                "median s": f"{statistics.median(seconds):.2f}",
                "worst s": f"{max(seconds):.2f}",
            }
        )
    return table


class Chaos:
    """Runs in all layouts, and their undisturbed counterparts.

    Args:
        session: Where they run.
        seed: The seed of all kills.
        kills_per_run: The number of kills of each run.

    Attributes:
        rows: A row for each kill.
        is_wrong: Whether something was wrong with a run.
    """

    def __init__(self, session: Session, *, seed: int, kills_per_run: int) -> None:
        self.session = session
        self.seed = seed
        self.kills_per_run = kills_per_run
        self.undisturbed: dict[str, Trial] = {}
        self.rows: list[dict[str, Any]] = []
        self.is_wrong = False

    def run(self, number: int) -> None:
        """Disturbs the run with this number, and says what came of it.

        Raises:
            ClickException: The undisturbed run of its layout goes wrong.
        """
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        undisturbed = self._undisturbed_run(layout)
        kills = draw_kills(self.seed, number, count=self.kills_per_run, layout=layout)
        trial = run(self.session, f"run-{number}", layout, kills=kills)
        problems = unlike(trial, undisturbed, kills)
        self.is_wrong = self.is_wrong or bool(problems)
        done = [kill for kill in kills if kill.time]
        if not done:
            done = kills[: len(problems)]  # a run that hangs before the first kill is counted too
        for kill in done:
            row = {**asdict(kill), "run": number, "layout": layout, "problems": problems}
            self.rows.append(row)
            continued = f"on from step {kill.resumed_from}, {kill.seconds} s"
            click.echo(f"    {kill}: {continued}", err=True)
        verdict = f"WRONG: {'; '.join(problems)}" if problems else "as undisturbed"
        click.echo(f"{len(self.rows)} kills; run {number} ({layout}): {verdict}", err=True)

    def _undisturbed_run(self, layout: str) -> Trial:
        if layout not in self.undisturbed:
            name = f"calm-{len(self.undisturbed)}"
            trial = run(self.session, name, layout, kills=[])
            if trial.problems:
                problem = f"undisturbed, {layout} goes wrong: {trial.problems}"
                raise click.ClickException(f"{problem}; see {self.session.storage}")
            self.undisturbed[layout] = trial
        return self.undisturbed[layout]


def _exit_on_sigterm(*_: object) -> None:
    sys.exit(143)


@click.command()
@click.option("--kills", default=40, type=click.IntRange(1), show_default=True, help="In all.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--each",
    default=10,
    type=click.IntRange(1),
    show_default=True,
    help="Kills of one run.",
)
@click.option(
    "--run",
    "only",
    type=int,
    help="Only this run of the seed's, once more: what a WRONG line says.",
)
@click.option(
    "--out",
    default="runs",
    show_default=True,
    help="In it, chaos-SEED-TIME is kept if a run is wrong.",
)
@click.option("--json", "as_json", is_flag=True)
def main(kills: int, seed: int, each: int, only: int | None, out: str, as_json: bool) -> None:
    """Kills worker, stage, raylet and driver, and looks whether anything was lost."""
    # Without it, what was started would be left behind.
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    session = Session(Path(out, f"chaos-{seed}-{int(time.time())}").absolute())
    chaos = Chaos(session, seed=seed, kills_per_run=each)
    try:
        for number in itertools.count() if only is None else [only]:
            chaos.run(number)
            if len(chaos.rows) >= kills:
                break
    finally:
        session.close()
    if not chaos.is_wrong:
        shutil.rmtree(session.storage, ignore_errors=True)
    show("chaos", chaos.rows, summary(chaos.rows), as_json=as_json)
    sys.exit(1 if chaos.is_wrong else 0)
