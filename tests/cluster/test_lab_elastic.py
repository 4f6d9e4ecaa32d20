"""A run whose hosts go and come back, in the lab: 4 → 3 → 2 → 4 workers, one run in MLflow, the curve of one worker.

Four hosts of one CPU with Ray on each; the first has Ray's head and the driver. One host loses its network, then
another its power; then the first gets its network back and the other is switched on again, and Ray is started on both,
as it would be by hand.
"""

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import pytest

from experiments.benchmarks import chaos_task
from experiments.benchmarks.chaos_session import HEALTH
from experiments.benchmarks.chaos_task import SAMPLES
from tests.lab import NEEDS_LAB, NETWORK, Lab
from tests.running import LONG, close, committed, curve, end_tree, mlflow_run, trireme, wait_until

pytestmark = NEEDS_LAB

HOSTS = 4
HEAD, CUT, CRASHED = 0, 1, 2
ADDRESS = f"{NETWORK}.11:6379"  # of Ray's head
BATCH, STEPS = 48, 600
TRAIN = ["task=experiments.benchmarks.chaos_task:Recorded", f"train.global_batch_size={BATCH}"]
TRAIN += ["train.micro_batch_size=4", f"train.steps={STEPS}", "train.log_every=1", "checkpoint.every_steps=20"]
TRAIN += ["optimizer.name=sgd", "optimizer.lr=0.0003", "tracking.log_model=false", "tracking.system_metrics_every=0"]
RAY = {"RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(HOSTS) as lab:
        start_ray(lab, HEAD)
        start_ray(lab, *range(1, HOSTS))
        yield lab


def start_ray(lab: Lab, *hosts: int) -> None:
    """Starts Ray on hosts, on all at once."""
    own = ["--num-cpus=1", "--num-gpus=0", "--object-store-memory=100000000", "--disable-usage-stats"]
    begun = []
    for host in hosts:
        role = ["--head", "--port=6379", "--include-dashboard=false"] if host == HEAD else [f"--address={ADDRESS}"]
        start = shlex.join(["ray", "start", *role, f"--node-ip-address={lab.address(host)}", *own])
        again = f"for attempt in 1 2 3; do {start} && exit 0; done; exit 1"  # Ray gives its own start 30 s
        begun.append((host, lab.start(host, ["sh", "-c", again], RAY | HEALTH)))
    for host, process in begun:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, f"Ray does not start on host {host}: {out}{err}"


def at_work(lab: Lab) -> set[int]:
    """The hosts on which workers of the run write down what they see."""
    signs = ("RayTrainWorker", "WorkerActor")
    return {h for h in range(HOSTS) if any(s in line for line in lab.processes_of(h) for s in signs)}


class Run:
    """A training run whose driver is on the head; storage: a folder that all hosts see."""

    def __init__(self, lab: Lab, launcher: str, storage: Path) -> None:
        self.folder, self.seen = storage / "elastic", storage / "seen-of-it"
        self.log = self.seen / "driver.log"
        self.seen.mkdir(parents=True)
        arguments = [*TRAIN, f"task_args={{folder: {self.seen}, step_seconds: 0.025, dropout: 0}}"]
        arguments += [f"launcher={launcher}", "strategy=ddp", "workers=4", "run.name=elastic", f"run.storage={storage}"]
        arguments += ["fault.elastic_seconds=2", "fault.max_restarts=9"]
        command = shlex.join([sys.executable, "-m", "app", "train", *arguments])
        into = ["sh", "-c", f"exec {command} > {shlex.quote(str(self.log))} 2>&1"]
        self.process: subprocess.Popen[str] = lab.start(HEAD, into, RAY | {"RAY_ADDRESS": ADDRESS}, quiet=True)

    @property
    def text(self) -> str:
        return self.log.read_text()[-3000:] if self.log.exists() else ""

    def said(self, part: str) -> None:
        self.wait(lambda: part in self.log.read_text(), 60)

    def further(self) -> None:
        """Waits until two more checkpoints are committed."""
        now = self.committed()
        self.wait(lambda: self.committed() >= now + 40, 90)

    def committed(self) -> int:
        return max(committed(self.folder), default=0)

    def wait(self, condition: Callable[[], bool], timeout: float) -> None:
        wait_until(lambda: condition() or self.process.poll() is not None, timeout)
        assert condition(), f"the command ended: {self.text}"


@pytest.mark.parametrize("launcher", ["ray", "actors"])
def test_four_three_two_four_workers_on_hosts_that_go_and_come_back(lab: Lab, launcher: str) -> None:
    storage = lab.shared / launcher
    run = Run(lab, launcher, storage)
    try:
        run.wait(lambda: run.committed() >= 40, 120)
        assert at_work(lab) == set(range(HOSTS)), run.text
        lab.cut(CUT)
        run.said("continuing with 3 of 4 workers")
        run.further()
        assert HEAD in at_work(lab) >= set(range(HOSTS)) - {CUT}, run.text
        lab.crash(CRASHED)
        run.said("continuing with 2 of 4 workers")
        run.further()
        lab.mend(CUT)
        lab.boot(CRASHED)
        # A raylet that was cut off ends when it hears that it was taken for dead; its processes with it.
        wait_until(lambda: not any("raylet" in line for line in lab.processes_of(CUT)))
        start_ray(lab, CUT, CRASHED)
        run.said("there is room for 4 workers again; continuing with 4 of 4")
        run.further()
        assert at_work(lab) == set(range(HOSTS)), run.text
        assert run.process.wait(LONG) == 0, run.text
    finally:
        end_tree(run.process.pid)
        run.process.wait()
    assert mlflow_run(storage, "elastic").info.status == "FINISHED"
    assert list(curve(storage, "elastic", "fault/workers").values()) == [3, 2, 4], "each once, in the one MLflow run"
    starts = chaos_task.read(run.seen)
    assert chaos_task.lost_or_repeated(starts, STEPS * BATCH, SAMPLES) == []
    ranks: dict[int, set[int]] = {}
    for position, (_, rank, _) in chaos_task.seen(starts)[0].items():
        ranks.setdefault(position // BATCH, set()).add(rank)
    assert [count for count, _ in groupby(len(ranks[step]) for step in sorted(ranks))] == [4, 3, 2, 4]
    alone = trireme("train", *TRAIN, "task_args.dropout=0", "launcher=local", "run.name=calm", f"run.storage={storage}")
    assert alone.code == 0, alone.err
    ours, theirs = curve(storage, "elastic"), curve(storage, "calm")
    assert sorted(ours) == sorted(theirs) == list(range(1, STEPS + 1)), "every step once"
    assert close(ours, theirs), "one curve, that of one worker"
