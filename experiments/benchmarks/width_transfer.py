"""`width-transfer`: the best rate of each width, with optimizer.width_transfer and without.

A GPT on bytes (experiments/gpt.yaml), or layers of as many units on digits, is trained at each
width with each rate of a grid, each twice the one before, in this process. The loss is that of the
held-out data at the end, the mean over all seeds. With the transfer the best rate of all widths is
to be within one point of the grid.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import click
import torch

from app.config import Config
from app.config.io import load_config
from app.data.loader import fetch, length
from app.run.base_model import widths_of
from app.run.prepare import read_task
from app.tasks.base import Task
from app.training.hooks import CurvePoint, set_learning_rate
from app.training.width_transfer import Widths
from experiments.benchmarks.harness import show
from experiments.coordinate_check import at_widths, batch_of, new_model

EXPERIMENT = Path(__file__).parents[1] / "gpt.yaml"
HEAD_DIM = 16
MODELS = ("gpt", "mlp")
COLOURS = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")
LAYERS = 3
"""Hidden layers of the mlp."""
Losses = dict[int, dict[float, float]]
"""By width and rate."""


def experiment(model: str, base: int, *, rate: float, seed: int, steps: int, batch: int) -> Config:
    """The experiment of a model with a rate.

    Args:
        model: Of `MODELS`.
        base: The width of the base model.
        rate: The rate at the top of the schedule.
        seed: Of weights and data.
        steps: Of the training.
        batch: Samples in a step.
    """
    if model == "gpt":
        heads = base // HEAD_DIM
        files = [EXPERIMENT]
        keys = [
            "task_args={n_layers: 2, sequence_length: 64, d_model: 0, n_heads: 0}",
            f"task_args.d_model={base}",
            f"task_args.n_heads={heads}",
            f"optimizer.width_transfer={{base: {{d_model: {base}, n_heads: {heads}}}}}",
        ]
    else:
        sizes = f"{{model_args: {{hidden: {[base] * LAYERS}}}}}"
        files = []
        keys = [
            "task=image_classification",
            f"task_args={{data: digits, model: mlp, model_args: {{hidden: {[base] * LAYERS}}}}}",
            f"optimizer.width_transfer={{base: {sizes}}}",
        ]
    return load_config(
        files,
        [
            *keys,
            f"optimizer.lr={rate}",
            f"train.seed={seed}",
            f"train.steps={steps}",
            f"train.global_batch_size={batch}",
            f"schedule.warmup_steps={max(1, steps // 10)}",
        ],
    )


def final_loss(config: Config, task: Task, widths: Widths) -> float:
    """The loss of the held-out data after a training; inf if it is not finite."""
    model, _, optimizer = new_model(config, task, widths)
    steps = config.train.steps or 1
    batch_size = config.train.global_batch_size
    for step in range(steps):
        set_learning_rate(
            optimizer,
            config,
            task,
            step=step,
            steps=steps,
            point=CurvePoint(step=step, steps=steps, batch_size=batch_size),
        )
        loss = task.loss(model, batch_of(config, task, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    held_out = task.eval_data()
    assert held_out is not None
    batch = fetch(held_out, [(index, index) for index in range(length(held_out) or 1)])
    with torch.no_grad():
        held_out_loss = float(task.loss(model.eval(), batch))
    return held_out_loss if math.isfinite(held_out_loss) else math.inf


def rows_of(losses: Losses, name: str) -> list[dict[str, str]]:
    """A line for each width: the loss at each rate, and the best rate."""
    return [
        {
            "": name,
            "width": str(width),
            **{f"{rate:.3g}": f"{loss:.3f}" for rate, loss in by_rate.items()},
            "best rate": f"{best_rate(by_rate):.3g}",
        }
        for width, by_rate in losses.items()
    ]


def best_rate(by_rate: dict[float, float]) -> float:
    """The rate with the least loss."""
    return min(by_rate, key=lambda rate: by_rate[rate])


def drift(losses: Losses) -> int:
    """How many points of the grid the best rates of all widths span."""
    best = [math.log2(best_rate(by_rate)) for by_rate in losses.values()]
    return round(max(best) - min(best))


def measure(
    model: str,
    widths: Sequence[int],
    rates: Sequence[float],
    *,
    seeds: int,
    steps: int,
    batch: int,
) -> tuple[Losses, Losses]:
    """The losses with the transfer and without."""
    transferred: Losses = {width: {} for width in widths}
    plain: Losses = {width: {} for width in widths}
    for rate in rates:
        collected: dict[tuple[bool, int], list[float]] = {}
        for seed in range(seeds):
            of_base = experiment(model, min(widths), rate=rate, seed=seed, steps=steps, batch=batch)
            configs = at_widths(of_base, widths)
            for width, config in configs.items():
                task = read_task(config)
                for transfers in (True, False):
                    beside_base = widths_of(config, task) if transfers else {}
                    loss = final_loss(config, task, beside_base)
                    collected.setdefault((transfers, width), []).append(loss)
        for width in widths:
            transferred[width][rate] = statistics.mean(collected[True, width])
            plain[width][rate] = statistics.mean(collected[False, width])
    return transferred, plain


def draw(transferred: Losses, plain: Losses, file: Path) -> None:
    """Draws loss over rate, a line for each width, with its best rate, without and with it."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    parts = (("without width_transfer", plain), ("with width_transfer", transferred))
    for axes, (title, losses) in zip(panels, parts, strict=True):
        for number, (width, by_rate) in enumerate(losses.items()):
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(list(by_rate), list(by_rate.values()), color=colour, label=f"width {width}")
            best = best_rate(by_rate)
            axes.plot([best], [by_rate[best]], "o", color=colour)
        axes.set_xscale("log")
        rates = list(next(iter(losses.values())))
        axes.set_xticks(rates, [f"{rate:.2g}" for rate in rates], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_yscale("log")
        axes.set_xlabel("learning rate")
        axes.set_title(title, fontsize=10)
        axes.tick_params(labelsize=7)
    panels[0].set_ylabel("held-out loss")
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].yaxis.set_minor_formatter("{x:g}")
    panels[1].legend(fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=90)
    Image.open(drawn).convert("RGB").quantize(24).save(file, optimize=True)


@click.command(help=__doc__)
@click.option("--model", type=click.Choice(MODELS), default="gpt", show_default=True)
@click.option("--widths", default="64,128,256", show_default=True, help="The first is the base.")
@click.option("--lowest", default=0.001, show_default=True, help="The lowest rate.")
@click.option("--rates", "count", default=7, show_default=True, help="How many rates.")
@click.option("--steps", default=100, show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--seeds", default=1, show_default=True)
@click.option("--plot", type=Path, help="Draws the losses into this file.")
@click.option("--json", "as_json", is_flag=True)
def main(
    model: str,
    widths: str,
    lowest: float,
    count: int,
    steps: int,
    batch: int,
    seeds: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    transferred, plain = measure(
        model,
        [int(word) for word in widths.split(",")],
        [lowest * 2**index for index in range(count)],
        seeds=seeds,
        steps=steps,
        batch=batch,
    )
    if plot is not None:
        draw(transferred, plain, plot)
    results = {
        "with": {"losses": transferred, "drift": drift(transferred)},
        "without": {"losses": plain, "drift": drift(plain)},
    }
    rows = [*rows_of(transferred, "with"), *rows_of(plain, "without")]
    show("width-transfer", results, rows, as_json=as_json)
    if not as_json:
        print(
            f"\nbest rates span {drift(transferred)} points of the grid with width_transfer, "
            f"{drift(plain)} without"
        )


if __name__ == "__main__":
    main()
