"""`profile`: where a step's time goes, operator by operator: ours beside the same strategy written by hand.

    python -m experiments.benchmarks profile [--model gpt] [--strategy ddp]

Both live in the same two torchrun processes, as in `step`. torch.profiler watches some steps of each on rank 0. An
operator's time is its own, without what it calls, in the thread that trains; what is left of the step is in no
operator: Python, autograd's bookkeeping, and waiting for the other ranks. Watching takes time itself, more the more
operators there are; so the step without it, measured just before in turns, stands above. Counts do not depend on how
busy the machine is, times do; how much longer a step is as a whole is for `step` to say.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.abba import in_turns
from experiments.benchmarks.machine import table
from experiments.benchmarks.ours import Ours, torchrun
from experiments.benchmarks.plain import PROCESSES, WRAPS
from experiments.benchmarks.step import BLOCK_STEPS, DEGREES, OURS

SIDES = ("by hand", "Trireme")
STEP = "one step"
BLOCKS = 6


def run(model: str, strategy: str, steps: int) -> dict[str, Any]:
    """Per side: "ms" of a step unwatched, "watched_ms", and "operators": name → [ms, calls] of a step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        arguments = (model, strategy, str(steps), folder, str(out))
        torchrun("experiments.benchmarks.operators", *arguments, processes=PROCESSES.get(strategy, 2))
        return json.loads(out.read_text())


def worker(model: str, strategy: str, steps: int, folder: str, out: str) -> None:
    """One of the processes."""
    import torch.distributed as dist

    from app.config_io import load_config
    from experiments.benchmarks.plain import MODELS

    dist.init_process_group("gloo")
    each = BLOCK_STEPS[model]
    total = each * (BLOCKS + 2) + steps + 2
    how = [f"strategy={strategy}", *DEGREES.get(strategy, []), f"train.steps={total}"]
    config = load_config([], [*OURS[model], *how, "run.name=ours", f"run.storage={folder}"])
    ours = Ours(config, tracked=True).build()
    advances: dict[str, Callable[[], Any]] = {
        "by hand": MODELS[model](total, strategy).advance,
        "Trireme": ours.advance,
    }
    times = in_turns(advances, BLOCKS, each)
    found = {}
    for side, advance in advances.items():
        dist.barrier()
        found[side] = {"ms": 1e3 * statistics.median(times[side]), **_watched(advance, steps, ours.rank == 0)}
    ours.close()
    if ours.rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _watched(advance: Callable[[], Any], steps: int, watching: bool) -> dict[str, Any]:
    """Steps under the profiler, of which the first, which sets it up, is left out; elsewhere only the steps."""
    from torch.profiler import ProfilerActivity, profile, record_function

    if not watching:
        for _ in range(steps + 1):
            advance()
        return {}
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        advance()
        for _ in range(steps):
            with record_function(STEP):
                advance()
    return summary(profiler.events() or [], steps)


def summary(events: Iterable[Any], steps: int) -> dict[str, Any]:
    """Of torch.profiler's events: milliseconds of a step, and of it each operator's own, with its calls."""
    events = list(events)
    whole = [event for event in events if event.name == STEP]
    thread = whole[0].thread
    spans = [(event.time_range.start, event.time_range.end) for event in whole]
    operators: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        begun = event.time_range.start
        if event.thread == thread and _is_operator(event.name) and any(a <= begun < b for a, b in spans):
            operators[event.name][0] += event.self_cpu_time_total / 1e3 / steps
            operators[event.name][1] += 1 / steps
    watched = sum(end - begin for begin, end in spans) / 1e3 / steps
    return {"watched_ms": watched, "operators": dict(operators)}


def _is_operator(name: str) -> bool:
    """Not autograd's nodes, optimizers' steps, fully_shard's phases: what operators are called from."""
    return "::" in name and not name.startswith(("autograd::", "torch::autograd::", "FSDP::"))


def shown(found: dict[str, dict[str, Any]], title: str, top: int) -> str:
    """Markdown: the operators that take most on either side."""
    sides = [found[side] for side in SIDES]
    names = {name for side in sides for name in side["operators"]}

    def of(side: dict[str, Any], name: str) -> list[float]:
        return side["operators"].get(name, [0.0, 0.0])

    names_by_time = sorted(names, key=lambda name: -max(of(side, name)[0] for side in sides))
    rows = [
        [
            f"`{name}`",
            *(figure for side in sides for figure in (f"{of(side, name)[0]:.2f}", f"{of(side, name)[1]:.1f}")),
        ]
        for name in names_by_time[:top]
    ]
    rest = names_by_time[top:]
    rows.append(
        [f"{len(rest)} other operators"]
        + [f for side in sides for f in (f"{sum(of(side, n)[0] for n in rest):.2f}", f"{_calls(side, rest):.1f}")]
    )
    outside = [side["watched_ms"] - sum(own for own, _ in side["operators"].values()) for side in sides]
    rows.append(["**in no operator**", *(f for own in outside for f in (f"**{own:.2f}**", ""))])
    rows.append(["a step, watched", *(f for side in sides for f in (f"{side['watched_ms']:.2f}", ""))])
    rows.append(["a step, not watched", *(f for side in sides for f in (f"{side['ms']:.2f}", ""))])
    heads = [title, *(f"{side}, {what}" for side in SIDES for what in ("ms", "calls"))]
    return table(heads, rows)


def _calls(side: dict[str, Any], names: list[str]) -> float:
    return sum(side["operators"][name][1] for name in names if name in side["operators"])


@click.command()
@click.option("--model", default="mnist", show_default=True, type=click.Choice(list(OURS)))
@click.option("--strategy", default="ddp", show_default=True, type=click.Choice(list(WRAPS)), help="mnist: ddp only.")
@click.option("--steps", default=20, show_default=True, help="Steps that are watched.")
@click.option("--top", default=12, show_default=True, help="Operators that are named.")
@click.option("--json", "as_json", is_flag=True)
def main(model: str, strategy: str, steps: int, top: int, as_json: bool) -> None:
    """Where a step's time goes, ours beside the same by hand."""
    if model == "mnist" and strategy != "ddp":
        raise click.ClickException("mnist is for ddp only: write --model gpt")
    found = run(model, strategy, steps)
    click.echo(json.dumps(found) if as_json else shown(found, f"{model}, {strategy}, rank 0", top))


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        main()
