"""`chaos`: seeded kills of worker, stage, raylet and driver, at any moment; nothing may be lost.

On a Ray of its own (a head without CPUs and two nodes of two) one run after another, layouts in turn, is disturbed
several times: each time the same command again where it has ended. In the end it is compared with an undisturbed one.
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

BATCH, WORKERS, STEPS, STEP_SECONDS, PAUSE, HANG_SECONDS = 16, 2, 480, 0.01, 1.2, 300.0
COMMON = [
    "task=experiments.benchmarks.chaos_task:Recorded",
    f"train.global_batch_size={BATCH}",
    "train.log_every=1",
]
COMMON += [
    "checkpoint.every_steps=10",
    f"workers={WORKERS}",
    "tracking.log_model=false",
    "tracking.flush_timeout=60",
]
COMMON += [
    "tracking.system_metrics_every=0",
    "fault.max_restarts=100",
    "fault.hang_seconds=2",
    f"train.steps={STEPS}",
]
LAYOUTS: dict[str, list[str]] = {
    "ddp actors": ["strategy=ddp", "launcher=actors"],
    "pipeline actors": ["strategy=pipeline", "parallel.pp=2", "train.micro_batch_size=4"],
    "fsdp actors": ["strategy=fsdp", "launcher=actors"],
    "ddp ray": ["strategy=ddp", "launcher=ray"],
    "fsdp ray": ["strategy=fsdp", "launcher=ray"],
    "ddp torchrun": ["strategy=ddp", "launcher=torchrun"],
}
VICTIMS: dict[tuple[str, int], float] = {
    ("worker", signal.SIGKILL): 60,
    ("worker", signal.SIGTERM): 5,
    ("worker", signal.SIGSTOP): 8,
    ("driver", signal.SIGKILL): 8,
    ("driver", signal.SIGTERM): 4,
    ("raylet", signal.SIGKILL): 5,
}
"""What is killed, and how often: a worker or stage, the command, the raylet of a worker's node."""


@dataclass
class Kill:
    """delay: seconds after it trains again, or at once after the last one continued ("starting"). The rest is
    what came of it: seconds to the next finished step, the newest commit, and the step that was resumed from."""

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
        who = f"rank {self.rank}" if self.victim == "worker" else self.victim
        when = " while starting" if self.starting else ""
        return f"{signal.Signals(self.signal).name} of {who}{when} after {self.delay:.2f} s"


def draw(seed: int, number: int, count: int, layout: str) -> list[Kill]:
    """The kills of one run: a function of the seed, the run's number and its layout. Under torchrun only workers: its
    own agent is the driver, and there is no Ray."""
    chance = random.Random(f"{seed}-{number}")
    kinds = {
        kind: weight
        for kind, weight in VICTIMS.items()
        if kind[0] == "worker" or "torchrun" not in layout
    }
    kills = []
    for _ in range(count):
        victim, sent = chance.choices(list(kinds), list(kinds.values()))[0]
        delay, rank, early = (
            chance.uniform(0.0, PAUSE),
            chance.randrange(WORKERS),
            chance.random() < 0.2,
        )
        starting = early and victim in ("driver", "worker") and sent == signal.SIGKILL
        kills.append(Kill(victim, sent, round(delay, 3), rank, starting))
    return kills


class Hung(Exception):
    """The run did not get on within `HANG_SECONDS`: far more than what a busy machine takes."""


class Trial:
    """One run in a layout of `LAYOUTS`, and what it leaves: `weights`, `curve`, and `problems` of its own."""

    def __init__(self, session: Session, name: str, layout: str) -> None:
        self.session, self.name = session, name
        self.folder = session.storage / "trials" / name  # what the task writes
        self.run = session.storage / "runs" / name  # what Trireme writes
        self.log = self.folder / "driver.log"
        self.folder.mkdir(parents=True)
        own = [f"run.name={name}", f"run.storage={session.storage}/runs"]
        own += [f"task_args={{folder: {self.folder}, step_seconds: {STEP_SECONDS}}}"]
        torchrun = [
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=100",
            "-m",
        ]
        program = [sys.executable, "-m", *(torchrun if "torchrun" in layout else [])]
        self.command = [*program, "app", "train", *COMMON, *LAYOUTS[layout], *own]
        self.driver = session.start(self.command, self.log)
        self.weights: dict[str, torch.Tensor] = {}
        self.curve: list[tuple[int, float]] = []
        self.problems: list[str] = []

    def disturb(self, kills: list[Kill]) -> None:
        """Kills one after another and waits for training to go on; those that come after its end have no `time`. Raises
        Hung."""
        for kill in kills:
            if not self._strike(kill):
                return
            # The next step must be of workers that began afterwards; one that gets SIGTERM goes on, and saves.
            ends_workers = (kill.victim, kill.signal) != ("worker", signal.SIGTERM)
            resumed = self._gets_on(kill.time, anew=ends_workers)
            kill.seconds = round(resumed - kill.time, 2) if resumed else None
            later = [
                s.lines[0] for s in chaos_task.read(self.folder) if s.began > kill.time and s.lines
            ]
            kill.resumed_from = later[0][1][0] // BATCH if later else None
            self.session.mend()

    def finish(self) -> None:
        """Waits for the end, and looks at what is left. Raises Hung."""
        from mlflow.tracking import MlflowClient

        while self._gets_on(time.time()) is not None:
            time.sleep(0.2)
        self.problems += chaos_task.lost_or_repeated(
            chaos_task.read(self.folder), STEPS * BATCH, SAMPLES
        )
        client = MlflowClient(self.session.database)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(experiments, f"attributes.run_name = '{self.name}'")
        points = [
            p for run in runs for p in client.get_metric_history(run.info.run_id, "train/loss")
        ]
        self.curve = sorted((point.step, point.value) for point in points)
        if (statuses := [run.info.status for run in runs]) != ["FINISHED"]:
            self.problems.append(f"MLflow has {len(statuses)} runs of it: {', '.join(statuses)}")
        if [step for step, _ in self.curve] != list(range(1, STEPS + 1)):
            self.problems.append("MLflow has not each step of the curve once")
        if "is skipped" in self.log.read_text():
            self.problems.append("a damaged checkpoint was met")
        self.weights = torch.load(self.run / "model" / "weights.pt", weights_only=True)

    def _strike(self, kill: Kill) -> bool:
        """Kills as soon as there is what is to be killed; False if the run had come to its end."""
        deadline = time.time() + HANG_SECONDS
        while time.time() < deadline:
            if self.driver.poll() == 0 or (
                not kill.starting and self._gets_on(time.time()) is None
            ):
                return False
            time.sleep(kill.delay)
            markers = self.run.glob("checkpoints/*/COMMIT.json")
            kill.committed = max(
                (int(marker.parent.name.split("-")[1]) for marker in markers), default=0
            )
            if (pid := self._victim(kill)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    now = time.time()
                    os.kill(pid, kill.signal)
                    kill.time = now
                    return True
        raise Hung(f"there was nothing for {kill} within {HANG_SECONDS:.0f} s")

    def _victim(self, kill: Kill) -> int | None:
        """The process to be killed; None: there is none now."""
        if kill.victim == "driver":
            return self.driver.pid if self.driver.poll() is None else None
        newest = [start.pid for start in chaos_task.read(self.folder) if start.rank == kill.rank][
            -1:
        ]
        worker = next((pid for pid in newest if psutil.pid_exists(pid)), None)
        return (
            worker if worker is None or kill.victim == "worker" else self.session.raylet_of(worker)
        )

    def _gets_on(self, since: float, *, anew: bool = False) -> float | None:
        """When a step begun after `since` (Unix time) was finished; starts the command again where it has ended. anew:
        by workers that have begun since then. None: the run has come to its end."""
        deadline = time.time() + HANG_SECONDS
        while time.time() < deadline:
            if (code := self.driver.poll()) is not None:
                if code == 0:
                    return None
                time.sleep(1.0 if code == 2 else 0.0)  # it was refused: a node is being started
                with self.log.open("a") as log:
                    log.write(f"--- ended with {code}; the same command again\n")
                self.driver = self.session.start(self.command, self.log)
            for start in chaos_task.read(self.folder, 2 * WORKERS):
                after = [
                    at
                    for at, _, _ in start.lines
                    if at > since and (not anew or start.began > since)
                ]
                if len(after) > 4:  # a pipeline's step is four micro-batches
                    return after[4]
            time.sleep(0.03)
        raise Hung(f"no step within {HANG_SECONDS:.0f} s")


def unlike(trial: Trial, calm: Trial, kills: list[Kill]) -> list[str]:
    """What is wrong with a disturbed run beside the undisturbed one, a sentence each."""
    problems = list(trial.problems)
    if trial.curve != calm.curve:
        problems.append("the curve is not that of the undisturbed run")
    same = trial.weights.keys() == calm.weights.keys()
    if not same or not all(
        torch.equal(trial.weights[name], calm.weights[name]) for name in calm.weights
    ):
        problems.append("the final weights are not those of the undisturbed run")
    for kill in kills:
        if kill.resumed_from is not None and kill.resumed_from < kill.committed:
            problems.append(f"{kill}: went on before step {kill.committed}, which was committed")
    return problems


def run(session: Session, name: str, layout: str, kills: list[Kill]) -> Trial:
    """One run, disturbed by these kills; those that were done have a `time`."""
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


def summary(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A row per layout and victim: how many kills, in how many runs something was wrong, seconds to the next step."""
    table = []
    for layout, victim in sorted({(row["layout"], row["victim"]) for row in rows}):
        own = [row for row in rows if (row["layout"], row["victim"]) == (layout, victim)]
        times = [row["seconds"] for row in own if row["seconds"] is not None] or [math.nan]
        wrong = len({row["run"] for row in own if row["problems"]})
        table.append(
            {"layout": layout, "victim": victim, "kills": str(len(own)), "runs wrong": str(wrong)}
        )
        table[-1] |= {"median s": f"{statistics.median(times):.2f}", "worst s": f"{max(times):.2f}"}
    return table


@click.command()
@click.option("--kills", default=40, type=click.IntRange(1), show_default=True, help="In all.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--each", default=10, type=click.IntRange(1), show_default=True, help="Kills of one run."
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
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # or what was started would be left behind
    rows, wrong = list[dict[str, Any]](), False
    calm: dict[str, Trial] = {}
    session = Session(Path(out, f"chaos-{seed}-{int(time.time())}").absolute())
    try:
        for number in itertools.count() if only is None else [only]:
            layout = list(LAYOUTS)[number % len(LAYOUTS)]
            if layout not in calm:
                calm[layout] = run(session, f"calm-{len(calm)}", layout, [])
                if problems := calm[layout].problems:
                    raise click.ClickException(
                        f"undisturbed, {layout} goes wrong: {problems}; see {session.storage}"
                    )
            drawn = draw(seed, number, each, layout)
            problems = unlike(run(session, f"run-{number}", layout, drawn), calm[layout], drawn)
            wrong = wrong or bool(problems)
            done = [kill for kill in drawn if kill.time] or drawn[
                : len(problems)
            ]  # it may hang before the first
            rows += [
                {**asdict(kill), "run": number, "layout": layout, "problems": problems}
                for kill in done
            ]
            for kill in done:
                click.echo(
                    f"    {kill}: on from step {kill.resumed_from}, {kill.seconds} s", err=True
                )
            verdict = f"WRONG: {'; '.join(problems)}" if problems else "as undisturbed"
            click.echo(f"{len(rows)} kills; run {number} ({layout}): {verdict}", err=True)
            if len(rows) >= kills:
                break
    finally:
        session.close()
    if not wrong:
        shutil.rmtree(session.storage, ignore_errors=True)
    show("chaos", rows, summary(rows), as_json=as_json)
    sys.exit(1 if wrong else 0)
