"""`auto-batch`: train.batch_schedule=auto beside the same training with a fixed small batch.

Both see the same samples with the same seeds, in this process, and the rate follows the batch by
its square root. The loss is that of the held-out data at the end. Steps of branches that auto drops
count as its steps.

Predicted before it was measured: on both tasks auto's loss, the mean over all seeds, is above that
of the fixed batch by no more than the standard deviation of the fixed batch's between seeds, and
it takes at least 30 % fewer steps.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from app.config.io import load_config
from app.run.prepare import prepare, read_task
from app.training.events import Event, MetricsLogged
from app.training.job import Job, Place, SilentChannel
from app.training.loop import Training
from app.training.persistence import NullPersistence
from experiments.benchmarks.harness import show

EXPERIMENTS = Path(__file__).parents[1]
SHARED = (
    *("workers=1", "strategy=single", "run.name=auto-batch", "tracking.enabled=false"),
    *("train.eval_every=null", "optimizer.lr_scaling=sqrt"),
)
TASKS = {
    "digits": (
        "digits.yaml",
        *("train.steps=null", "train.epochs=30", "train.global_batch_size=16"),
        "optimizer.lr_batch_size=16",
    ),
    "byte GPT": (
        "gpt.yaml",
        "task_args={d_model: 32, n_layers: 2, n_heads: 2, sequence_length: 32, eval_samples: 512}",
        *("train.steps=4000", "train.global_batch_size=4", "optimizer.lr_batch_size=8"),
    ),
}
"""Each a file of experiments/, and keys."""
LEAST_SAVED = 0.3
"""The share of steps that was predicted to be saved."""
SMOOTHED = 10
"""Logged steps whose mean the picture shows."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training at its end.

    Attributes:
        loss: On the held-out data.
        steps: Optimizer steps, those of branches that were dropped included.
        last_batch: The global batch at the end.
        decisions: Of auto, as in the summary of a run.
        curve: (samples seen, loss) of each logged step.
    """

    loss: float
    steps: int
    last_batch: int
    decisions: list[dict[str, Any]]
    curve: list[tuple[float, float]]


class _Channel(SilentChannel):
    """Keeps the metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[MetricsLogged] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, MetricsLogged):
            self.logged.append(event)


def train(name: str, seed: int, *, auto: bool) -> Trained:
    """Trains a task in this process.

    Args:
        name: Of `TASKS`.
        seed: Of weights and data.
        auto: Whether the run decides on its batch.
    """
    file, *keys = TASKS[name]
    schedule = "auto" if auto else "[]"
    words = [*SHARED, *keys, f"train.seed={seed}", f"train.batch_schedule={schedule}"]
    config = load_config([EXPERIMENTS / file], words)
    prepared = prepare(config, read_task(config), 1, devices_per_node=None)
    job = Job(
        config=prepared.config,
        layout=prepared.layout,
        folder="",
        attempt="",
        run_uid="",
        steps=prepared.steps,
        cwd=os.getcwd(),
    )
    place = Place(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"))
    channel = _Channel()
    summary = Training(job, place, channel, persistence_class=NullPersistence).run()
    batch = summary.get("batch")
    first_batch = config.train.global_batch_size
    curve = []
    for event in channel.logged:
        if "train/loss" in event.values:
            samples = event.values.get("train/samples_seen", event.step * first_batch)
            curve.append((samples, event.values["train/loss"]))
    return Trained(
        loss=summary["metrics"]["eval/loss"],
        steps=summary["step"] + (batch["dropped_steps"] if batch else 0),
        last_batch=batch["last"] if batch else first_batch,
        decisions=batch["decisions"] if batch else [],
        curve=curve,
    )


def compare(fixed: Sequence[Trained], auto: Sequence[Trained]) -> dict[str, Any]:
    """What the trainings say of the prediction.

    Args:
        fixed: With the fixed batch, by seed.
        auto: Likewise, of runs that decide on their batch.
    """
    losses = [each.loss for each in fixed]
    differences = [one.loss - other.loss for one, other in zip(auto, fixed, strict=True)]
    noise = statistics.stdev(losses)
    excess = statistics.fmean(differences)
    steps_fixed = statistics.fmean(each.steps for each in fixed)
    steps_auto = statistics.fmean(each.steps for each in auto)
    saved = 1 - steps_auto / steps_fixed
    return {
        "loss_fixed": statistics.fmean(losses),
        "loss_auto": statistics.fmean(each.loss for each in auto),
        "excess": excess,
        "noise": noise,
        "steps_fixed": steps_fixed,
        "steps_auto": steps_auto,
        "saved": saved,
        "last_batches": [each.last_batch for each in auto],
        "same_loss": excess <= noise,
        "enough_saved": saved >= LEAST_SAVED,
    }


def row_of(name: str, result: dict[str, Any]) -> dict[str, str]:
    """A line of the table."""
    return {
        "": name,
        "loss, fixed": f"{result['loss_fixed']:.4f}",
        "auto": f"{result['loss_auto']:.4f}",
        "difference": f"{result['excess']:+.4f}",
        "deviation between seeds": f"{result['noise']:.4f}",
        "steps, fixed": f"{result['steps_fixed']:,.0f}",
        "steps, auto": f"{result['steps_auto']:,.0f}",
        "saved": f"{result['saved']:.0%}",
        "batch at the end": ", ".join(map(str, result["last_batches"])),
        "as predicted: loss": "yes" if result["same_loss"] else "no",
        "steps": "yes" if result["enough_saved"] else "no",
    }


def draw(fixed: Trained, auto: Trained, path: Path) -> None:
    """Draws the losses of two trainings over the samples, with the batches of auto.

    Args:
        fixed: With the fixed batch.
        auto: Of a run that decides on its batch.
        path: The picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), dpi=100)
    for trained, label, colour in ((fixed, "fixed", "#8793a1"), (auto, "auto", "#2563a8")):
        samples = [place for place, _ in trained.curve]
        losses = [loss for _, loss in trained.curve]
        means = [
            statistics.fmean(losses[max(0, number - SMOOTHED + 1) : number + 1])
            for number in range(len(losses))
        ]
        axes.plot(samples, means, label=label, color=colour, lw=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    top = axes.get_ylim()[1]
    for decision in auto.decisions:
        doubled = decision["doubled"]
        axes.axvline(decision["samples"], color="#d98324" if doubled else "#d9dee5", lw=1)
        text = f"{decision['batch']} → {2 * decision['batch']}" if doubled else "stays"
        axes.text(decision["samples"], top, f" {text}", rotation=90, va="top", fontsize=8)
    axes.set_xlabel("samples seen")
    axes.set_ylabel(f"training loss, mean of {SMOOTHED}")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


@click.command(help=__doc__)
@click.option(
    "--task", "names", type=click.Choice(list(TASKS)), multiple=True, help="Default: all."
)
@click.option("--seeds", default=5, show_default=True)
@click.option("--picture", type=Path, help="Draws the curves of the last task's first seed.")
@click.option("--json", "as_json", is_flag=True)
def main(names: tuple[str, ...], seeds: int, picture: Path | None, as_json: bool) -> None:
    torch.set_num_threads(1)
    results = {}
    for name in names or TASKS:
        fixed = [train(name, seed, auto=False) for seed in range(seeds)]
        auto = [train(name, seed, auto=True) for seed in range(seeds)]
        results[name] = compare(fixed, auto)
    if picture is not None:
        draw(fixed[0], auto[0], picture)
    rows = [row_of(name, result) for name, result in results.items()]
    show("auto-batch", results, rows, as_json=as_json)
