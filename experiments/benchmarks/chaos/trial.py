"""One run, disturbed several times: each time the same command again where it has ended, and in the end the truth."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from experiments.benchmarks.chaos import record
from experiments.benchmarks.chaos.cluster import Cluster
from experiments.benchmarks.chaos.task import SAMPLES
from experiments.benchmarks.start import end_tree

BATCH, WORKERS, HANG_SECONDS = 16, 2, 60.0
COMMON = ["task=experiments.benchmarks.chaos.task:Recorded", f"train.global_batch_size={BATCH}", "train.log_every=1"]
COMMON += ["checkpoint.every_steps=10", f"workers={WORKERS}", "tracking.log_model=false", "tracking.flush_timeout=60"]
COMMON += ["tracking.system_metrics_every=0", "fault.max_restarts=100", "fault.hang_seconds=2"]
LAYOUTS: dict[str, list[str]] = {
    "ddp actors": ["strategy=ddp", "launcher=actors"],
    "pipeline actors": ["strategy=pipeline", "parallel.pp=2", "parallel.rebalance=false", "train.micro_batch_size=4"],
    "fsdp actors": ["strategy=fsdp", "launcher=actors"],
    "ddp ray": ["strategy=ddp", "launcher=ray"],
    "fsdp ray": ["strategy=fsdp", "launcher=ray"],
    "ddp torchrun": ["strategy=ddp", "launcher=torchrun"],
}
TORCHRUN = ["-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}", "--standalone", "--max-restarts=100"]
VICTIMS: dict[tuple[str, int], float] = {
    ("worker", signal.SIGKILL): 60,
    ("worker", signal.SIGTERM): 5,
    ("worker", signal.SIGSTOP): 8,
    ("driver", signal.SIGKILL): 8,
    ("driver", signal.SIGTERM): 4,
    ("raylet", signal.SIGKILL): 5,
    ("writer", signal.SIGKILL): 5,
}
"""What is killed, and how often: a worker or stage, the command, the raylet of a worker's node, the process that writes
to MLflow."""


@dataclass
class Kill:
    """delay: seconds after training goes on, or at once after the last one was found to go on ("starting"). The rest is
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

    @property
    def ends_workers(self) -> bool:
        """Whether the next step must be of workers that began afterwards. One that gets SIGTERM goes on, and saves."""
        return self.victim != "writer" and (self.victim, self.signal) != ("worker", signal.SIGTERM)

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.victim == "worker" else self.victim
        when = " while starting" if self.starting else ""
        return f"{signal.Signals(self.signal).name} of {who}{when} after {self.delay:.2f} s"


def draw(seed: int, number: int, count: int, victims: list[str], pause: float) -> list[Kill]:
    """The kills of one run: a function of the seed and the run's number. victims: only these; [] all."""
    chance = random.Random(f"{seed}-{number}")
    kinds = {kind: weight for kind, weight in VICTIMS.items() if not victims or kind[0] in victims}
    kills = []
    for _ in range(count):
        victim, number_ = chance.choices(list(kinds), list(kinds.values()))[0]
        delay, rank, early = chance.uniform(0.0, pause), chance.randrange(WORKERS), chance.random() < 0.2
        starting = early and victim in ("driver", "worker") and number_ == signal.SIGKILL
        kills.append(Kill(victim, number_, round(delay, 3), rank, starting))
    return kills


class Hung(Exception):
    """The run did not get on within a minute."""


@dataclass
class Left:
    """What a finished run leaves. seconds: from the first sample to the last."""

    weights: dict[str, torch.Tensor]
    curve: list[tuple[int, float]]
    seconds: float
    problems: list[str] = field(default_factory=list)


class Trial:
    """One run of `steps` steps in a layout of `LAYOUTS`."""

    def __init__(self, cluster: Cluster, name: str, layout: str, steps: int, step_seconds: float) -> None:
        self.cluster, self.name, self.steps = cluster, name, steps
        self.folder = cluster.folder / "trials" / name  # what the task writes
        self.run = cluster.folder / "runs" / name  # what Trireme writes
        self.log = self.folder / "driver.log"
        self.folder.mkdir(parents=True)
        own = [f"run.name={name}", f"run.storage={cluster.folder}/runs", f"train.steps={steps}"]
        own += [f"task_args={{folder: {self.folder}, step_seconds: {step_seconds}}}"]
        program = [sys.executable, *(TORCHRUN if "torchrun" in layout else []), "-m", "app", "train"]
        self.command = [*program, *COMMON, *LAYOUTS[layout], *own]
        self.driver = cluster.start(self.command, self.log)

    def disturb(self, kills: list[Kill]) -> list[Kill]:
        """Kills one after another and waits for training to go on; those that were done before it came to its end.

        Raises:
            Hung: it did not go on.
        """
        done = []
        for kill in kills:
            if not self._strike(kill):
                break
            done.append(kill)
            resumed = self._gets_on(kill.time, anew=kill.ends_workers)
            kill.seconds = round(resumed - kill.time, 2) if resumed else None
            later = [s for s in record.read(self.folder) if s.began > kill.time and s.lines]
            kill.resumed_from = later[0].step(0, BATCH) - 1 if later else None
            self.cluster.mend()
        return done

    def finish(self) -> Left:
        """Waits for the end, and looks at what is left. Raises Hung."""
        while self._gets_on(time.time()) is not None:
            time.sleep(0.2)
        starts = record.read(self.folder)
        problems = record.lost_or_repeated(starts, self.steps * BATCH, SAMPLES)
        statuses, points = self.cluster.curve(self.name)
        if statuses != ["FINISHED"]:
            problems.append(f"MLflow has {len(statuses)} runs of it: {', '.join(statuses)}")
        if [step for step, _ in points] != list(range(1, self.steps + 1)):
            problems.append("MLflow has not each step of the curve once")
        if "is passed over" in self.log.read_text():
            problems.append("a damaged checkpoint was met")
        weights = torch.load(self.run / "model" / "weights.pt", weights_only=True)
        times = [line[0] for start in starts for line in start.lines]
        return Left(weights, points, max(times) - min(times), problems)

    def give_up(self) -> None:
        """Ends what is left of the run."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.driver.pid, signal.SIGCONT)
        end_tree(self.driver.pid)
        self.driver.wait()
        for start in record.read(self.folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(start.pid)
                if process.create_time() <= start.began:
                    process.kill()

    def _strike(self, kill: Kill) -> bool:
        """Kills as soon as there is what is to be killed; False if the run had come to its end."""
        deadline = time.time() + HANG_SECONDS
        while time.time() < deadline:
            if self.driver.poll() == 0 or (not kill.starting and self._gets_on(time.time()) is None):
                return False
            time.sleep(kill.delay)
            kill.committed, pid, kill.time = self._committed(), self._victim(kill), time.time()
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, kill.signal)
                    return True
        raise Hung(f"there was nothing for {kill} within {HANG_SECONDS:.0f} s")

    def _victim(self, kill: Kill) -> int | None:
        """The process to be killed; None: there is none now."""
        if kill.victim == "driver":
            return self.driver.pid if self.driver.poll() is None else None
        if kill.victim == "writer":
            for process in psutil.process_iter(["cmdline"]):
                line = " ".join(process.info["cmdline"] or [])
                if "app.tracking" in line and str(self.run / "tracking") in line:
                    return int(process.pid)
            return None
        newest = [start.pid for start in record.read(self.folder) if start.rank == kill.rank][-1:]
        worker = next((pid for pid in newest if psutil.pid_exists(pid)), None)
        return worker if worker is None or kill.victim == "worker" else self.cluster.raylet_of(worker)

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
                self.driver = self.cluster.start(self.command, self.log)
            for start in record.read(self.folder, 2 * WORKERS):
                after = [at for at, _, _ in start.lines if at > since and (not anew or start.began > since)]
                if len(after) > 4:  # a pipeline's step is four micro-batches
                    return after[4]
            time.sleep(0.03)
        said = [line for line in self.log.read_text().splitlines() if line.strip("- ")]
        raise Hung(f"no step within {HANG_SECONDS:.0f} s; the driver said last: {said[-1] if said else 'nothing'}")

    def _committed(self) -> int:
        """The newest committed step."""
        markers = self.run.glob("checkpoints/*/COMMIT.json")
        return max((int(marker.parent.name.split("-")[1]) for marker in markers), default=0)


def unlike(left: Left, calm: Left, kills: list[Kill]) -> list[str]:
    """What is wrong with a disturbed run beside the undisturbed one, a sentence each."""
    problems = list(left.problems)
    if left.curve != calm.curve:
        problems.append("the curve is not that of the undisturbed run")
    same = left.weights.keys() == calm.weights.keys()
    if not same or not all(torch.equal(left.weights[name], calm.weights[name]) for name in calm.weights):
        problems.append("the final weights are not those of the undisturbed run")
    for kill in kills:
        if kill.resumed_from is not None and kill.resumed_from < kill.committed:
            problems.append(f"{kill}: went on before step {kill.committed}, which was committed")
    return problems


def summary(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A row per layout and victim: how many kills, in how many runs something was wrong, seconds to the next step."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["layout"], row["victim"]), []).append(row)
    table = []
    for (layout, victim), own in sorted(groups.items()):
        times = sorted(row["seconds"] for row in own if row["seconds"] is not None)
        wrong = len({row["run"] for row in own if row["problems"]})
        table.append({"layout": layout, "victim": victim, "kills": str(len(own)), "runs wrong": str(wrong)})
        table[-1] |= {"median s": f"{times[len(times) // 2]:.2f}" if times else "–"}
        table[-1] |= {"worst s": f"{times[-1]:.2f}" if times else "–"}
    return table
