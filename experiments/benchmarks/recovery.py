"""`python -m experiments.benchmarks.recovery`: a stage of a running pipeline is killed, again and again.

Seconds from SIGKILL until the supervisor knows, and until the next step is finished; with a warm spare, without one,
and under `torchrun --max-restarts` on the same training. At the end the weights are compared, bit by bit, with those of
a run that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import psutil
import torch

from app.config import Config
from app.config_io import load_config
from app.console import Console
from app.job import Job
from app.launchers.actor_group import ActorGroup
from app.launchers.pipeline import group as group_for
from app.run.driver import Driver
from app.run.manifest import Run
from app.run.prepare import prepare, read_task
from app.tracking.settings import resolve_tracking
from app.train import train as trireme_train
from cluster.connect import connect

TASK = ["experiments/gpt.yaml", "task_args.d_model=32", "task_args.n_layers=8", "task_args.sequence_length=32"]
TASK += ["task_args.eval_samples=8", "strategy=pipeline", "train.global_batch_size=16", "train.micro_batch_size=2"]
TASK += [
    "parallel.recut=false",
    "checkpoint.every_steps=5",
    "tracking.enabled=false",
    "tracking.log_model=false",
    "train.eval_every=null",
]
TASK += ["parallel.recut=false"]  # another cut rounds otherwise, and the last bits are compared
STEPS_BETWEEN = 8  # a kill comes after this many new steps, so that a checkpoint is there
TORCHRUN = "torchrun --max-restarts"
MODULE = "experiments.benchmarks.recovery"


class Watched(Driver):
    """A driver that remembers when it heard of steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard: list[tuple[float, int]] = []

    def _on_progress(self, event: dict[str, Any]) -> None:
        super()._on_progress(event)
        self.heard.append((time.time(), event["step"]))


class Steps(Console):
    """Says every step that it hears of, at once: where there is no terminal, a Console says one every five seconds."""

    def progress(self, event: dict[str, Any]) -> None:
        if not self.quiet:
            print(f"step {event['step']}", file=self._out, flush=True)


def worker(arguments: list[str]) -> None:
    """What torchrun starts: `trireme train ARGUMENTS`, heard at every step."""
    trireme_train(load_config(arguments[:1], arguments[1:]), Steps(quiet=os.environ["RANK"] != "0"))


def configured(folder: str, name: str, stages: int, steps: int, *more: str) -> Config:
    own = [f"parallel.pp={stages}", f"train.steps={steps}", f"run.name={name}", f"run.storage={folder}", *more]
    return load_config([TASK[0]], [*TASK[1:], *own])


def train(config: Config, group: ActorGroup, disturb: Callable[[Watched], None] | None = None) -> None:
    """One run on the group, with `disturb` running beside it in a thread."""
    run = Run(config)
    stages = config.parallel.pp or 1
    prepared = prepare(config, read_task(config), stages, devices_per_node=None)
    run.open()
    driver = Watched(run, Console(quiet=True), resolve_tracking(config.tracking, config.run.storage))
    driver.begin_tracking()
    job = Job(config, prepared.layout, run.folder, run.attempt, run.manifest.uid, prepared.steps, os.getcwd())
    if disturb:
        threading.Thread(target=disturb, args=(driver,), daemon=True).start()
    group.run(job, driver)
    run.end("finished", driver.summary)


def ours(folder: str, name: str, stages: int, kills: int, seed: int, spares: int) -> dict[str, list[float]]:
    """Kills a random stage `kills` times; seconds until noticed and until the next finished step, per kill."""
    found: dict[str, list[float]] = {"noticed": [], "next step": []}
    steps = _steps(kills)
    config = configured(folder, name, stages, steps, f"fault.spares={spares}", f"fault.max_restarts={kills + 1}")
    group = _group(config)
    draw = random.Random(seed)

    def once(driver: Watched) -> None:
        begin = len(driver.heard)
        _until(lambda: len(driver.heard) > begin and driver.step >= driver.heard[begin][1] + STEPS_BETWEEN)
        assert group.crew is not None
        process = group.crew.of(draw.randrange(stages))
        assert process.hello is not None
        heard, killed = len(driver.heard), time.time()
        os.kill(process.hello.pid, signal.SIGKILL)
        _until(lambda: (group.noticed_at or 0) > killed)
        noticed = group.noticed_at or 0.0
        _until(lambda: any(at > noticed for at, _ in driver.heard[heard:]))
        found["noticed"].append(noticed - killed)
        found["next step"].append(next(at for at, _ in driver.heard[heard:] if at > noticed) - killed)

    def disturb(driver: Watched) -> None:
        for _ in range(kills):
            once(driver)

    train(config, group, disturb)
    group.shutdown()
    return found


def under_torchrun(folder: str, name: str, stages: int, kills: int, seed: int) -> dict[str, list[float]]:
    """The same under torchrun: its agent ends all workers and starts them anew, and ours resume."""
    steps = _steps(kills)
    own = [f"parallel.pp={stages}", f"train.steps={steps}", f"run.name={name}", f"run.storage={folder}"]
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stages}"]
    command = [*program, f"--max-restarts={kills + 1}", "--monitor-interval=0.1", "-m", MODULE, *TASK, *own]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    heard: list[tuple[float, int]] = []

    def read() -> None:
        for line in process.stdout or ():
            if match := re.fullmatch(r"step (\d+)\n", line):
                heard.append((time.time(), int(match[1])))

    threading.Thread(target=read, daemon=True).start()
    draw = random.Random(seed)

    def once(number: int) -> float:
        _until(lambda: len(heard) > number and _newest(f"{folder}/{name}") >= (number + 1) * STEPS_BETWEEN)
        workers = [p for p in psutil.Process(process.pid).children() if MODULE in p.cmdline()]
        killed = time.time()
        workers[draw.randrange(len(workers))].kill()
        fresh = killed + 0.3  # what was said before it died has been read by then, and no process starts as soon
        _until(lambda: bool(heard) and heard[-1][0] > fresh)
        return next(at for at, _ in heard if at > fresh) - killed

    found = {"next step": [once(number) for number in range(kills)]}
    if process.wait() != 0:
        raise RuntimeError(f"the run under torchrun ended with exit code {process.returncode}")
    return found


def _group(config: Config) -> ActorGroup:
    stages = config.parallel.pp or 1
    prepared = prepare(config, read_task(config), stages, devices_per_node=None)
    share = {"CPU": min(1.0, (os.cpu_count() or 1) / stages)}
    return group_for(config, prepared.layout, share, connect(config.cluster.keep_warm_seconds))


def _steps(kills: int) -> int:
    """Enough for every kill to come in the middle, on a machine that is quick."""
    return (kills + 1) * 3 * STEPS_BETWEEN


def _newest(folder: str) -> int:
    """The newest committed step."""
    return max((int(p.parent.name.split("-")[1]) for p in Path(folder).glob("checkpoints/*/COMMIT.json")), default=0)


def _until(condition: Callable[[], bool], timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not get to where it was to be disturbed")
        time.sleep(0.01)


def _same(a: str, b: str) -> bool:
    x, y = (torch.load(f"{path}/model/weights.pt", weights_only=True) for path in (a, b))
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


@click.command()
@click.option("--stages", default=4, show_default=True)
@click.option("--kills", default=5, type=click.IntRange(1), show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--torchrun/--no-torchrun", default=True, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(stages: int, kills: int, seed: int, torchrun: bool, as_json: bool) -> None:
    """Kills one of the stages of a running pipeline, and measures how long it is away."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        calm = configured(folder, "calm", stages, _steps(kills))
        group = _group(calm)
        train(calm, group)
        group.shutdown()
        for name, spares in (("a warm spare", 1), ("no spare", 0)):
            run = name.replace(" ", "-")
            click.echo(f"killing, with {name}", err=True)
            times = ours(folder, run, stages, kills, seed, spares)
            results[name] = times | {"same bits": _same(f"{folder}/calm", f"{folder}/{run}")}
        if torchrun:
            times = under_torchrun(folder, "torchrun", stages, kills, seed)
            results[TORCHRUN] = times | {"same bits": _same(f"{folder}/calm", f"{folder}/torchrun")}
    click.echo(json.dumps(results) if as_json else table(results, stages, kills))


def table(results: dict[str, Any], stages: int, kills: int) -> str:
    """The results as Markdown."""
    lines = [f"SIGKILL of one of {stages} stages, {kills} times, seconds (median, worst)", ""]
    lines += ["| | noticed | next finished step | weights as undisturbed |", "|---|---|---|---|"]
    for name, found in results.items():
        cells = [
            f"{statistics.median(found[key]):.2f}, {max(found[key]):.2f}" if found.get(key) else "—"
            for key in ("noticed", "next step")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {'yes, every bit' if found['same bits'] else 'NO'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    worker(sys.argv[1:]) if "TORCHELASTIC_RUN_ID" in os.environ else main()
