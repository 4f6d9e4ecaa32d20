"""4 → 3 → 2 → 4 workers: hosts are lost and come back while a run trains, and its curve stays that of one worker.

Four hosts of one CPU in the lab (tests/lab.py, which says what it needs), with Ray started on each; the first has Ray's
head and the driver. One host loses its network, then another its power; then the first gets its network back and the
other is switched on again, and Ray is started on both, as they would be by hand. What came of it is held against one
process that trains the same undisturbed.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.data.order import Order
from experiments.benchmarks.chaos import record
from experiments.benchmarks.chaos.session import HEALTH
from tests.lab import Lab
from tests.running import committed, curve, end_tree, mlflow_run, trireme, wait_until

HOSTS = 4
HEAD, CUT, CRASHED = 0, 1, 2
BATCH, STEPS, SAMPLES = 48, 600, 250
LAUNCHERS = ("ray", "actors")
TASK = ["task=experiments.benchmarks.chaos.task:Recorded", "task_args.dropout=0", "task_args.step_seconds=0.025"]
TRAIN = [*TASK, f"train.global_batch_size={BATCH}", "train.micro_batch_size=4", f"train.steps={STEPS}"]
TRAIN += ["train.log_every=1", "checkpoint.every_steps=20", "optimizer.name=sgd", "optimizer.lr=0.0003"]
TRAIN += ["tracking.log_model=false", "tracking.system_metrics_every=0"]
RAY = {"RAY_AUTH_MODE": "disabled"}


@dataclass
class Event:
    """What was done to a host, and what came of it."""

    what: str
    step: int  # the last one that had begun
    seconds: float  # until training had finished another step, with the hosts that were then there
    pause: float  # in which no micro-batch was computed


@dataclass
class Ride:
    """A run of all that, and the undisturbed one; lists have an entry per step."""

    launcher: str
    status: str
    said: list[int]  # fault/workers in MLflow
    events: list[Event] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)  # whose computations the final weights come from
    loss: list[float] = field(default_factory=list)
    calm: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # with the samples
    seconds: float = 0.0

    @property
    def difference(self) -> float:
        """The largest of the losses, relative."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.loss, self.calm, strict=True))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Ride:
        known = json.loads(path.read_text())
        return cls(**known | {"events": [Event(**event) for event in known["events"]]})


# --- the cluster ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster() -> Iterator[Lab]:
    """The lab with Ray on its hosts."""
    with Lab(HOSTS) as lab:
        _start_ray(lab, HEAD)
        _start_ray(lab, *range(1, HOSTS))
        yield lab


def _start_ray(lab: Lab, *hosts: int) -> None:
    """Starts Ray on hosts, on all at once."""
    own = ["--num-cpus=1", "--num-gpus=0", "--object-store-memory=100000000", "--disable-usage-stats"]
    begun = []
    for host in hosts:
        role = ["--head", "--port=6379", "--include-dashboard=false"] if host == HEAD else [f"--address={_head(lab)}"]
        start = shlex.join(["ray", "start", *role, f"--node-ip-address={lab.address(host)}", *own])
        again = f"for attempt in 1 2 3; do {start} && exit 0; done; exit 1"  # Ray gives its own start 30 s
        begun.append((host, lab.start(host, ["sh", "-c", again], RAY | HEALTH)))
    for host, process in begun:
        out, err = process.communicate(timeout=120)
        if process.returncode:
            raise RuntimeError(f"Ray does not start on host {host}: {out}{err}")


def _head(lab: Lab) -> str:
    return f"{lab.address(HEAD)}:6379"


def at_work(lab: Lab) -> set[int]:
    """The hosts on which Ray has an actor of the run's."""
    signs = ("RayTrainWorker", "Member")
    return {h for h in range(HOSTS) if any(s in line for line in lab.processes_of(h) for s in signs)}


# --- the run ----------------------------------------------------------------------------------------------------


class Run:
    """A training run whose driver is on the head; storage: a folder that all hosts see."""

    def __init__(self, lab: Lab, launcher: str, storage: Path) -> None:
        self.lab, self.launcher, self.storage = lab, launcher, storage
        self.name, self.began = f"elastic-{launcher}", time.time()
        self.folder = storage / f"seen-{launcher}"  # what the task writes
        self.log = self.folder / "driver.log"
        self.folder.mkdir(parents=True)
        (self.folder / "slow").touch()
        self.happened: list[tuple[str, float]] = []
        arguments = [*TRAIN, f"task_args.folder={self.folder}", f"launcher={launcher}", "strategy=ddp", "workers=4"]
        arguments += [f"run.name={self.name}", f"run.storage={storage}"]
        arguments += ["fault.elastic_seconds=2", "fault.spares=0", "fault.max_restarts=9"]
        command = shlex.join([sys.executable, "-m", "app", "train", *arguments])
        into = ["sh", "-c", f"exec {command} > {shlex.quote(str(self.log))} 2>&1"]
        self.process = lab.start(HEAD, into, RAY | {"RAY_ADDRESS": _head(lab)}, quiet=True)

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def said(self, part: str, timeout: float) -> None:
        """Waits until the command has said it."""
        self.wait(lambda: part in self.text, timeout, f"{part!r} was not said")

    def further(self, timeout: float = 90.0) -> None:
        """Waits until two more checkpoints are committed."""
        now = self.committed()
        self.wait(lambda: self.committed() >= now + 40, timeout, f"no checkpoints after step {now}")

    def committed(self) -> int:
        return max(committed(self.storage / self.name), default=0)

    def wait(self, condition: Any, timeout: float, otherwise: str) -> None:
        try:
            wait_until(lambda: condition() or self.process.poll() is not None, timeout)
        except AssertionError:
            raise AssertionError(f"{otherwise} within {timeout:g} s: {self.text[-3000:]}") from None
        assert condition(), f"{otherwise}, and the command ended: {self.text[-3000:]}"

    def note(self, what: str) -> None:
        self.happened.append((what, time.time()))

    def finish(self, timeout: float = 120.0) -> None:
        (self.folder / "slow").unlink()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout:g} s: {self.text[-3000:]}") from None

    def end(self) -> None:
        end_tree(self.process.pid)
        self.process.wait()


def ride(lab: Lab, launcher: str, storage: Path) -> Ride:
    """The run and all that happens to it; the hosts are as before when it returns.

    Raises:
        AssertionError: it did not go on as it should, with what it said.
    """
    run = Run(lab, launcher, storage)
    try:
        run.wait(lambda: run.committed() >= 40, 120, "no checkpoint")
        assert at_work(lab) == set(range(HOSTS)), run.text
        lab.cut(CUT)
        run.note("network cut")
        run.said("going on with 3 of 4 workers", 60)
        run.further()
        assert HEAD in at_work(lab) >= set(range(HOSTS)) - {CUT}, run.text
        lab.crash(CRASHED)
        run.note("power lost")
        run.said("going on with 2 of 4 workers", 60)
        run.further()
        _bring_back(lab)
        run.note("both back")
        run.said("there is room for 4 workers again; going on with 4 of 4", 60)
        run.further()
        assert at_work(lab) == set(range(HOSTS)), run.text
        run.finish()
    finally:
        run.end()
    return judge(run)


def _bring_back(lab: Lab) -> None:
    lab.mend(CUT)
    lab.boot(CRASHED)
    # A raylet that was cut off ends when it hears that it was taken for dead; its processes with it.
    wait_until(lambda: not any("raylet" in line for line in lab.processes_of(CUT)), 60)
    _start_ray(lab, CUT, CRASHED)


# --- what came of it --------------------------------------------------------------------------------------------


def judge(run: Run) -> Ride:
    """The finished run beside one of a single process."""
    calm = f"calm-{run.launcher}"
    took = time.time() - run.began
    one = trireme("train", *TRAIN, "launcher=local", f"run.name={calm}", f"run.storage={run.storage}")
    assert run.process.returncode == 0, run.text[-3000:]
    assert one.code == 0, one.err
    losses = [curve(run.storage, name) for name in (run.name, calm)]
    for found in losses:
        assert sorted(found) == list(range(1, STEPS + 1)), "every step once"
    said = list(curve(run.storage, run.name, "fault/workers").values())
    starts = record.read(run.folder)
    workers, problems = seen(starts)
    ours, theirs = ([found[step] for step in sorted(found)] for found in losses)
    return Ride(
        run.launcher,
        mlflow_run(run.storage, run.name).info.status,
        [int(value) for value in said],
        events=[_event(what, at, starts) for what, at in run.happened],
        workers=workers,
        loss=ours,
        calm=theirs,
        problems=problems,
        seconds=round(took, 1),
    )


def seen(starts: list[record.Start]) -> tuple[list[int], list[str]]:
    """How many workers computed what the final weights have of each step, and what is wrong with the samples.

    A position that was computed several times counts as it was computed last.
    """
    last: dict[int, tuple[float, int, int]] = {}
    for start in starts:
        for at, positions, samples in start.lines:
            for position, sample in zip(positions, samples, strict=True):
                last[position] = max(last.get(position, (0.0, 0, 0)), (at, start.rank, sample))
    expected = Order(SAMPLES, 0).indices(0, STEPS * BATCH).tolist()
    lost = [p for p, sample in enumerate(expected) if p not in last and p != sample]  # those `record.read` leaves out
    other = [p for p in range(len(expected)) if p in last and last[p][2] != expected[p]]
    beyond = [p for p in last if p >= len(expected)]
    kinds = (("lost", lost), ("other than the order has", other), ("too many", beyond))
    problems = [f"{len(where)} samples {what}, the first at position {where[0]:,}" for what, where in kinds if where]
    ranks: list[set[int]] = [set() for _ in range(STEPS)]
    for position, (_, rank, _) in last.items():
        if position < len(expected):
            ranks[position // BATCH].add(rank)
    return [len(own) for own in ranks], problems


def _event(what: str, at: float, starts: list[record.Start]) -> Event:
    """From what the task wrote down: of the processes that began after it, when the first was in its second step."""
    after = [s for s in starts if s.began > at and s.last_step(BATCH) > s.first_step(BATCH)]
    first = min(s.lines[0][0] for s in after)
    before = [(time, positions[0]) for s in starts for time, positions, _ in s.lines if time < first]
    finished = min(next(t for t, p, _ in s.lines if p[0] // BATCH + 1 > s.first_step(BATCH)) for s in after)
    step = max((position // BATCH + 1 for time, position in before if time <= at), default=0)
    return Event(what, step, round(finished - at, 1), round(first - max(before)[0], 1))


# --- the picture ------------------------------------------------------------------------------------------------


def draw(ride: Ride, path: Path) -> None:
    """The curve over that of the undisturbed run, and the number of workers under it."""
    from matplotlib import pyplot

    from experiments.report.figures import COLOURS, INK, new

    figure, empty = new(8.0, 4.6)
    empty.remove()
    curve, workers = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(ride.loss) + 1)
    curve.plot(steps, ride.calm, color=COLOURS[1], linewidth=3.2, alpha=0.55, label="one worker, undisturbed")
    name = {"ray": "Ray Train", "actors": "Ray actors"}[ride.launcher]
    curve.plot(steps, ride.loss, color=COLOURS[0], linewidth=0.8, label=f"4 → 3 → 2 → 4 workers, {name}")
    curve.set_ylabel("training loss")
    curve.set_title(f"largest relative difference {ride.difference:.1e}", fontsize=10.5, loc="left")
    curve.legend(loc="upper right")
    workers.step(steps, ride.workers, where="mid", color=COLOURS[0], linewidth=1.6)
    workers.set_ylim(0, 4.6)
    workers.set_yticks(range(5))
    workers.set_ylabel("workers")
    workers.set_xlabel("step")
    for event in ride.events:
        for axes in (curve, workers):
            axes.axvline(event.step, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        there = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "rotation": 90, "fontsize": 9}
        curve.annotate(event.what, (event.step, 0.04), (4, 0), **there)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def table(ride: Ride) -> str:
    """The figures as Markdown."""
    lines = ["| | at step | s to the next finished step | s without any |", "|---|---|---|---|"]
    lines += [f"| {event.what} | {event.step:,} | {event.seconds} | {event.pause} |" for event in ride.events]
    counts = [ride.workers[0]]
    counts += [b for a, b in zip(ride.workers, ride.workers[1:], strict=False) if a != b]
    lines.append("")
    lines.append(
        f"{ride.launcher}: workers {counts}, MLflow {ride.status}, {len(ride.loss):,} steps once each, "
        f"largest relative difference of the losses {ride.difference:.1e}, {len(ride.problems)} faults in the samples, "
        f"{ride.seconds:g} s"
    )
    return "\n".join(lines)
