"""`start`: from typing the command to the first finished step, as whole programs, in turns."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import time
from typing import Any

import click

from experiments.benchmarks.chaos.session import answers, end_tree, free_port, until
from experiments.benchmarks.machine import machine

STEPS = 5
PLAIN, OURS = "torchrun, by hand", "trireme, torchrun"
LAUNCHERS = {"ray": "Ray", "actors": "Ray actors"}
WHERE = ("a Ray of its own", "a running cluster, first run", "a running cluster, second run")
SIDES = (PLAIN, OURS, *(f"trireme, {name}, {where}" for name in LAUNCHERS.values() for where in WHERE))
ASKED = dict(zip(WHERE, ("by hand + 4 s", "by hand + 2 s", "by hand"), strict=True))


def run(rounds: int) -> dict[str, Any]:
    """Seconds from the command to the first step: by hand under torchrun, ours under torchrun, by Ray Train and by
    actors, each in a Ray that the command starts, and the first and second time on a cluster that is there."""
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(-1, rounds):  # the first round warms the file cache
        found = dict(_round(backwards=bool(number % 2)))
        for name in seconds if number >= 0 else ():
            seconds[name].append(found[name])
    return {name: {"median_s": statistics.median(times), "all_s": times} for name, times in seconds.items()}


def _round(*, backwards: bool) -> Iterator[tuple[str, float]]:
    """Each side once; those on a cluster in their order, each launcher on a cluster of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    ours = [sys.executable, "-m", "app"]
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"OMP_NUM_THREADS": "1"}
    order = ["hand", "torchrun", *LAUNCHERS]
    for side in reversed(order) if backwards else order:
        if side == "hand":
            yield PLAIN, _seconds([*torchrun, "experiments.benchmarks.plain", "mnist", str(STEPS)], own)
        elif side == "torchrun":
            yield OURS, _seconds([*torchrun, "app"], own, training=True)
        else:
            command, name = [*ours], LAUNCHERS[side]
            yield f"trireme, {name}, {WHERE[0]}", _seconds(command, own, f"launcher={side}", training=True)
            with _cluster(own) as address:
                there = own | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
                for where in WHERE[1:]:
                    yield f"trireme, {name}, {where}", _seconds(command, there, f"launcher={side}", training=True)


def _seconds(command: list[str], env: dict[str, str], *more: str, training: bool = False) -> float:
    """From this moment until the command's first step was done."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "experiments/mnist.yaml", f"train.steps={STEPS}", f"run.storage={folder}", "--json"]
        whole = [*command, *words, "tracking.log_model=false", *more] if training else command
        begun = time()
        done = subprocess.run(whole, check=True, env=env, capture_output=True, text=True)
    found = re.search(r'first step done at ([\d.]+)|"first_step_at": ([\d.]+)', done.stdout)
    if not found:
        raise RuntimeError(f"{' '.join(whole)} did not say when its first step was done: {done.stdout}")
    return float(found[1] or found[2]) - begun


@contextlib.contextmanager
def _cluster(env: dict[str, str]) -> Iterator[str]:
    """A Ray head of two CPUs, as `ray start` makes it, quiet before it is used; its address."""
    port, folder = free_port(), tempfile.mkdtemp(prefix="start-", dir="/tmp")
    program = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    place = ["--node-ip-address=127.0.0.1", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false"]
    with Path(folder, "log").open("wb") as log:
        process = subprocess.Popen(
            [*program, *place, f"--temp-dir={folder}", "--object-store-memory=100000000"],
            env=env | {"RAY_AUTH_MODE": "disabled"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until(lambda: answers(port) and b"runtime started" in Path(folder, "log").read_bytes(), 60, pause=0.2)
        subprocess.run(["sleep", "4"], check=True)  # its agents are still importing
        yield f"127.0.0.1:{port}"
    finally:
        end_tree(process.pid)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds of whole programs.")
@click.option("--json", "as_json", is_flag=True)
def main(rounds: int, as_json: bool) -> None:
    """Whole programs, from the command to the first finished step."""
    found = run(rounds)
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"{machine()}\n\n| command to first step | median, s | least to most | asked |\n|---|---|---|---|")
    for name, r in found.items():
        asked = next((text for where, text in ASKED.items() if name.endswith(where)), "")
        click.echo(f"| {name} | {r['median_s']:.1f} | {min(r['all_s']):.1f} to {max(r['all_s']):.1f} | {asked} |")


if __name__ == "__main__":
    main()
