"""`tracking` and `saving`: whole runs that differ in one thing, and what that thing costs.

`trireme train` under torchrun with two workers, with it and without, in turns A B B A. A run's time is that of its
training, so what the thing does in the background on the same cores is counted: the process that writes to MLflow, and
the thread that writes checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

import click

from experiments.benchmarks.harness import beside, ratio_row, show
from experiments.benchmarks.step import NEVER_SAVED, OURS

STEPS = {"mnist": 2000, "gpt": 150}
QUIET = ["strategy=ddp", "train.eval_every=null", "tracking.log_model=false", "train.clip_norm=1e9", *NEVER_SAVED]
"""Clipping on both sides, since it computes the gradient's norm, which `tracking` logs."""
SIDES = {
    "tracking": (["train.log_every=1000000"], ["train.log_every=1"]),
    "saving": (["train.log_every=1000000"], ["train.log_every=1000000", "checkpoint.every_steps=50"]),
}
"""The keys without, and with."""


def run(what: str, model: str, runs: int, steps: int) -> dict[str, dict[str, object]]:
    """Milliseconds a step "without" and "with", and the ratio with a 95 % interval."""
    times: dict[str, list[float]] = {"without": [], "with": []}
    sides = dict(zip(times, SIDES[what], strict=True))
    for number in range(runs):
        for side in list(sides) if number % 2 else list(reversed(sides)):
            words = [*OURS[model], *QUIET, *sides[side], f"train.steps={steps}"]
            times[side].append(_seconds(words) / steps)
    return beside(times, "without")


def _seconds(words: list[str]) -> float:
    """Of the training of one run."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "app"]
    with tempfile.TemporaryDirectory() as folder:
        place = ["run.name=overhead", f"run.storage={folder}", "launcher=torchrun", "--json"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run([*program, "train", *words, *place], env=env, capture_output=True, text=True)
        if done.returncode:
            raise click.ClickException(f"the run ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["summary"]["seconds"])


def _command(what: str) -> click.Command:
    @click.command(help=f"Whole runs with {what} and without, in turns.")
    @click.option("--model", default="mnist", show_default=True, type=click.Choice(list(OURS)))
    @click.option("--runs", default=8, type=click.IntRange(1), show_default=True, help="Of each side.")
    @click.option("--steps", type=click.IntRange(1), help="Of a run; default: about a quarter of a minute.")
    @click.option("--json", "as_json", is_flag=True)
    def command(model: str, runs: int, steps: int | None, as_json: bool) -> None:
        found = run(what, model, runs, steps or STEPS[model])
        show(what, found, [ratio_row(f"{model}, {what}", found, "without", "with")], as_json)

    return command


tracking, saving = _command("tracking"), _command("saving")
