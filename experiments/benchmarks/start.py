"""`start`: from typing the command to the first finished step, as whole programs, in turns."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import click

from experiments.benchmarks.machine import machine

STEPS = 5
SIDES = ("torchrun, by hand", "trireme, torchrun", "trireme, Ray", "trireme, Ray actors")


def run(rounds: int) -> dict[str, Any]:
    """Median seconds to the first step: by hand under torchrun, ours under torchrun, ours in a Ray started cold (or in
    the one that runs here already), by Ray Train and by actors."""
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(-1, rounds):  # the first round warms the file cache
        names = list(seconds) if number % 2 else list(reversed(seconds))
        for name in names:
            taken = _once(name)
            if number >= 0:
                seconds[name].append(taken)
    return {name: {"median_s": statistics.median(times), "all_s": times} for name, times in seconds.items()}


def _once(name: str) -> float:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with tempfile.TemporaryDirectory() as folder:
        experiment = ["train", "experiments/mnist.yaml", f"train.steps={STEPS}", f"run.storage={folder}", "--json"]
        experiment += ["tracking.log_model=false"]
        command = {
            "torchrun, by hand": [*torchrun, "-m", "experiments.benchmarks.plain", "mnist", str(STEPS)],
            "trireme, torchrun": [*torchrun, "-m", "app", *experiment],
            "trireme, Ray": [sys.executable, "-m", "app", *experiment, "launcher=ray"],
            "trireme, Ray actors": [sys.executable, "-m", "app", *experiment, "launcher=actors"],
        }[name]
        begun = time.time()
        done = subprocess.run(
            command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
    found = re.search(r'first step done at ([\d.]+)|"first_step_at": ([\d.]+)', done.stdout)
    if not found:
        raise RuntimeError(f"{name} did not say when its first step was done: {done.stdout}")
    return float(found[1] or found[2]) - begun


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds of whole programs.")
@click.option("--json", "as_json", is_flag=True)
def main(rounds: int, as_json: bool) -> None:
    """Whole programs, from the command to the first finished step."""
    found = run(rounds)
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"{machine()}\n\n| command to first step | median, s | ratio |\n|---|---|---|")
    base = found["torchrun, by hand"]["median_s"]
    for name, r in found.items():
        click.echo(f"| {name} | {r['median_s']:.1f} | {r['median_s'] / base:.2f} |")


if __name__ == "__main__":
    main()
