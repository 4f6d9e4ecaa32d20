"""`python -m experiments.benchmarks sweep bookkeeping warm asha noise rate`: what sweeping costs, and if it is right.

bookkeeping   200 trials of one second on two slots, through our searcher, scheduler and ledger; the ideal is 100 s
warm          from a trial's start to its first step, on two warm workers, beside workers that Ray Train starts anew
asha          64 random trials of digits trained in full, and ASHA over the curves they left (trainings are
              deterministic, so replaying a curve gives what training again would); per seed the loss and the compute
noise         the noise scale where it is known in closed form, and what measuring it costs a step
rate          the learning rate that the fitted rule recommends at a batch size that was not swept, and its optimum

Every figure is printed as JSON, and then beside its limit; the exit status is 1 where one does not hold.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.abba import in_turns
from experiments.benchmarks.ours import Ours
from experiments.benchmarks.told import Said, replay, report, sweep_of

NAMES = ("bookkeeping", "warm", "asha", "noise", "rate")
Limit = tuple[str, Callable[[dict[str, Any]], float], float, str]
LIMITS: dict[str, list[Limit]] = {
    "bookkeeping": [("time over the ideal", lambda f: f["over"], 0.10, "{:.1%}")],
    "warm": [("seconds to a warm trial's first step", lambda f: f["warm"]["median_of_others"], 1.0, "{:.2f}")],
    "asha": [
        ("loss over the best of all, median of seeds", lambda f: f["median_loss_over_best"], 0.005, "{:.2%}"),
        ("share of their compute, median of seeds", lambda f: f["median_compute"], 0.25, "{:.1%}"),
    ],
    "noise": [
        ("error against the closed form", lambda f: f["error"], 0.05, "{:.1%}"),
        ("cost, every 50th step measured", lambda f: f["of_all_at_50"], 0.01, "{:.2%}"),
    ],
    "rate": [("steps of √2 from the optimum", lambda f: f["steps_of_sqrt2"], 1.0, "{:.2f}")],
}
"""Per benchmark: what, its figure, the most that it may be, how it is written."""


@click.command()
@click.argument("names", nargs=-1, required=True, type=click.Choice(NAMES))
@click.option("--trials", default=200, show_default=True, help="Of bookkeeping.")
@click.option("--seeds", default=5, show_default=True, help="Of asha.")
@click.option("--random", "drawn", default=64, show_default=True, help="Random trials per seed of asha.")
@click.option("--reduction", default=4, show_default=True, help="Of asha: one of so many goes on at a rung.")
@click.option("--first-rung", default=16, show_default=True, help="Of asha: after this part of the longest trial.")
@click.option("--repeats", default=3, show_default=True, help="Trainings per point of rate, each with another seed.")
def main(
    names: tuple[str, ...], trials: int, seeds: int, drawn: int, reduction: int, first_rung: int, repeats: int
) -> None:
    """What sweeping costs, and whether what it says is right; prints JSON and verdicts."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "bookkeeping": lambda: bookkeeping(trials),
        "warm": lambda: {"warm": first_steps(True), "cold": first_steps(False)},
        "asha": lambda: asha(seeds, drawn, reduction, first_rung),
        "noise": lambda: noise_accuracy() | noise_cost(),
        "rate": lambda: rate(repeats),
    }
    found = {name: run[name]() for name in dict.fromkeys(names)}
    click.echo(json.dumps(found, indent=1))
    kept = True
    for name, figures in found.items():
        for what, figure, most, form in LIMITS[name]:
            value = figure(figures)
            kept = kept and value <= most
            verdict = "holds" if value <= most else "DOES NOT HOLD"
            click.echo(f"{name}: {what}: {form.format(value)}, at most {form.format(most)}: {verdict}")
    sys.exit(0 if kept else 1)


def bookkeeping(trials: int) -> dict[str, float]:
    """Seconds for so many one-second trials on two slots, the start of Ray left out."""
    sweep = sweep_of(f"optimizer.lr: {{linspace: [0.001, 1.0, {trials}]}}", ["concurrent=2"])
    with tempfile.TemporaryDirectory() as folder:
        ledger, seconds = replay(sweep, Path(folder), lambda index: [(1.0, report(1, 1.0))])
    assert len(ledger.ended) == trials
    return {"seconds": seconds, "ideal": trials / 2, "over": seconds / (trials / 2) - 1}


def first_steps(warm: bool) -> dict[str, Any]:
    """Seconds from a trial's start to its first step: the first trial of a sweep, and the median of the others."""
    from app.console import Console
    from experiments.sweep.run import sweep as run

    overrides = ["workers=2", "strategy=ddp", "train.steps=30", f"warm={str(warm).lower()}"]
    with tempfile.TemporaryDirectory() as folder:
        space = f"optimizer.lr: [{', '.join(str(0.001 * (i + 1)) for i in range(6 if warm else 3))}]"
        sweep = sweep_of(space, [*overrides, f"run.storage={folder}", "reports=2"])
        outcome = run(sweep, Console(quiet=True))
        lines = (Path(outcome.folder) / "ledger.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    first: dict[int, float] = {}
    for event in events:
        if event["event"] == "report":
            first.setdefault(event["index"], event["report"]["first_step"])
    times = list(first.values())
    return {"first_trial": times[0], "median_of_others": statistics.median(times[1:]), "all": times}


def asha(seeds: int, drawn: int, reduction: int, first_rung: int) -> dict[str, Any]:
    """Per seed: the best loss of all random trials, ASHA's, and the share of their compute that ASHA spent."""
    rows = []
    for seed in range(seeds):
        space = "optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}\n  train.global_batch_size: [16, 32, 64, 128]"
        more = ["searcher=random", f"trials={drawn}", f"seed={seed}", "train.epochs=8", "reports=16", "time=samples"]
        more.append("schedule.name=constant")  # where rates fall to nothing at the end, a report on the way says little
        rows.append(_asha_once(space, more, seed, reduction, first_rung))
    return {
        "seeds": rows,
        "median_loss_over_best": statistics.median(row["asha"] / row["best"] - 1 for row in rows),
        "median_compute": statistics.median(row["compute"] for row in rows),
    }


def _asha_once(space: str, more: list[str], seed: int, reduction: int, first_rung: int) -> dict[str, Any]:
    from app.console import Console
    from experiments.sweep.ledger import Ledger
    from experiments.sweep.run import sweep as run

    with tempfile.TemporaryDirectory() as folder:
        full = sweep_of(space, [*more, f"run.storage={folder}", f"train.seed={seed}"])
        outcome = run(full, Console(quiet=True))
        curves = {t.index: t.reports for t in Ledger(outcome.folder, full.name, full.about()).trials.values()}
        length = max(reports[-1]["samples"] for reports in curves.values() if reports)
        rule = f"scheduler={{name: asha, reduction_factor: {reduction}, grace: {length // first_rung}}}"
        halving = sweep_of(space, [*more, f"train.seed={seed}", rule])
        halving.concurrent = 2

        def recorded(index: int) -> Said:
            return [(0.0, report) for report in curves.get(index, [])]

        ledger, _ = replay(halving, Path(folder) / "asha", recorded, length)
    metric = full.metric

    def best(reports: list[list[dict[str, Any]]]) -> float:
        values = [r["metrics"][metric] for one in reports for r in one if math.isfinite(r["metrics"][metric])]
        return min(values)

    spent = sum(trial.last["samples"] for trial in ledger.trials.values() if trial.reports)
    total = sum(reports[-1]["samples"] for reports in curves.values() if reports)
    found = best([trial.reports for trial in ledger.trials.values()])
    return {"seed": seed, "best": best(list(curves.values())), "asha": found, "compute": spent / total}


def noise_accuracy(dim: int = 40, steps: int = 150, batch: int = 240) -> dict[str, float]:
    """A model whose gradient at a sample is that sample, so that tr(Σ) and |G|² are the data's own variance and mean;
    the noise scale measured from micro-batches on one worker, over several data sets; the largest error."""
    import torch
    from torch import nn

    from app.noise_scale import Estimate, NoiseScale
    from strategies.parallelize import Options, choose, parallelize

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(dim))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w

    errors = []
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        data = 0.35 + torch.linspace(0.2, 2.0, dim) * torch.randn(steps * batch, dim, generator=draw)
        known = float(data.double().var(0).sum() / data.double().mean(0).square().sum())
        parallel = parallelize(Line, choose("single", 1), Options(), device=torch.device("cpu"))
        noise = NoiseScale(parallel, 1, batch)
        noise.estimate = Estimate(window=steps)
        for step in range(steps):
            parts = list(data[step * batch : (step + 1) * batch].chunk(4))
            noise.forward_backward(parts, [len(p) / batch for p in parts], lambda model, x: model(x).mean())
            for parameter in parallel.parameters():
                parameter.grad = None
        noise.values()
        value = noise.estimate.value()
        errors.append(abs(value[0] / known - 1) if value else math.inf)
    return {"error": max(errors), "median_error": statistics.median(errors)}


def noise_cost(blocks: int = 20, each: int = 20, every: int = 50) -> dict[str, float]:
    """What a measured step takes over an ordinary one, in the same process, block by block in turns; and what that is
    of the whole time where every 50th step is measured."""
    import torch

    from app.config_io import load_config

    torch.set_num_threads(1)
    trainings: dict[str, Ours] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, measured in (("with", "1"), ("without", "null")):
            how = [f"train.steps={each * (blocks + 2)}", f"train.noise_scale_every={measured}", "train.eval_every=null"]
            where = ["workers=1", "strategy=single", f"run.name={name}", f"run.storage={folder}"]
            trainings[name] = Ours(load_config(["experiments/mnist.yaml"], [*how, *where])).build()
        times = in_turns({name: training.step for name, training in trainings.items()}, blocks, each)
        for training in trainings.values():
            training.close()
    over = statistics.median(a / b for a, b in zip(times["with"], times["without"])) - 1
    step = 1e3 * statistics.median(times["without"])
    return {"of_a_measured_step": over, f"of_all_at_{every}": over / every, "step_ms": step}


def rate(repeats: int) -> dict[str, Any]:
    """The rule fitted to sweeps of four batch sizes, and the optimum found by sweeping a fifth between them in steps of
    √2; digits, every point trained with several seeds."""
    swept, left_out = [16, 32, 128, 256], 64
    seeds = f"train.seed: {list(range(repeats))}"
    coarse = f"optimizer.lr: {{logspace: [5.0e-4, 6.4e-2, 8]}}\n  train.global_batch_size: {swept}\n  {seeds}"
    fine = f"optimizer.lr: {{logspace: [1.0e-3, 3.2e-2, 11]}}\n  train.global_batch_size: [{left_out}]\n  {seeds}"
    answers = [_answer(space) for space in (coarse, fine)]
    rule, optimum = answers[0].rule, answers[1].rates[0]
    assert rule is not None
    recommended = rule.rate(left_out)
    return {
        "best_rates": {found.batch: found.rate for found in answers[0].rates},
        "exponent": [rule.exponent, rule.low, rule.high],
        "unswept_batch": left_out,
        "recommended": recommended,
        "optimum": optimum.rate,
        "optimum_at_edge": optimum.edge,
        "steps_of_sqrt2": abs(math.log(recommended / optimum.rate)) / math.log(math.sqrt(2)),
    }


def _answer(space: str) -> Any:
    from app.console import Console
    from experiments.sweep.answer import work_out
    from experiments.sweep.ledger import Ledger
    from experiments.sweep.run import sweep as run

    with tempfile.TemporaryDirectory() as folder:
        more = ["train.epochs=8", "reports=16", "schedule.warmup_steps=0", f"run.storage={folder}"]
        sweep = sweep_of(space, more)
        outcome = run(sweep, Console(quiet=True))
        return work_out(sweep, Ledger(outcome.folder, sweep.name, sweep.about()))


if __name__ == "__main__":
    main()
