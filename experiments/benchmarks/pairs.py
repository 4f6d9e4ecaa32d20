"""`pairs`: two trainings of ours that differ in one thing, and what that thing costs a step (`tracking`, `saving`).

Both live in the same two torchrun processes and one process group, and take turns block by block (abba.py). There are
several such launches, and in every other one the sides are built in the other order: two equal sides differ, by
3 % at most, with where in memory they happen to lie. What a side does in the background is done in its own turns: its
writer process (what feeds MLflow) stands still in the other's, by SIGSTOP, and a save under way at the end of a block
is waited for. So its cost is counted whole, and rather too high: in a run nobody waits for either.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.abba import beside, in_blocks
from experiments.benchmarks.machine import table
from experiments.benchmarks.ours import Ours, torchrun
from experiments.benchmarks.record import FOLDER, Ratio, keep
from experiments.benchmarks.step import BLOCK_STEPS, OURS

NEVER = ["checkpoint.every_seconds=null", "checkpoint.every_steps=null", f"train.log_every={10**9}"]
SAVE_EVERY = 50
LAUNCHES = 4


@dataclass(frozen=True)
class Pair:
    """What is compared, on top of NEVER; period: steps that a block is a multiple of, begun in their middle."""

    sides: dict[str, list[str]]
    at_most: float
    period: int = 1

    @property
    def names(self) -> tuple[str, str]:
        """(the side without, the side with)."""
        without, added = self.sides
        return without, added

    def steps(self, model: str) -> int:
        """Of a block."""
        return -(-BLOCK_STEPS[model] // self.period) * self.period


PAIRS = {
    # Both compute the gradient's norm, because clipping needs it, not tracking.
    "tracking": Pair(
        {"none": ["train.clip_norm=1e9"], "every step": ["train.clip_norm=1e9", "train.log_every=1"]}, at_most=1.01
    ),
    "saving": Pair({"none": [], "every 50 steps": [f"checkpoint.every_steps={SAVE_EVERY}"]}, 1.05, SAVE_EVERY),
}


def run(name: str, model: str, blocks: int) -> dict[str, Any]:
    """Median milliseconds per step of both sides, and their ratio with a 95 % interval."""
    names = PAIRS[name].names
    times: dict[str, list[float]] = {side: [] for side in names}
    each = 2 * -(-blocks // (2 * LAUNCHES))
    for launch in range(LAUNCHES):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            torchrun("experiments.benchmarks.pairs", name, model, str(each), str(launch), folder, str(out))
            for side, seconds in json.loads(out.read_text()).items():
                times[side] += seconds
    sides = beside(times, names[0])
    added = sides[names[1]]
    ms = {side: sides[side]["ms"] for side in names}
    return {"ms": ms, "ratio": added["ratio"], "interval": added["interval"], "blocks": each * LAUNCHES}


def worker(name: str, model: str, blocks: int, launch: int, folder: str, out: str) -> None:
    """One of the two processes; launch: its number, from 0."""
    import torch.distributed as dist

    from app.config_io import load_config

    dist.init_process_group("gloo")
    pair, each = PAIRS[name], PAIRS[name].steps(model)
    steps = each * (blocks + 3)
    sides: dict[str, Side] = {}
    order = list(pair.sides.items())
    for number, (side, keys) in enumerate(reversed(order) if launch % 2 else order):
        where = [f"run.name={name}-{number}", f"run.storage={folder}/{number}"]
        how = [*NEVER, "strategy=ddp", f"train.steps={steps}", *keys, *where]
        sides[side] = Side(Ours(load_config([], [*OURS[model], *how]), tracked=True).build())
    for each_side in sides.values():
        each_side.begin(pair.period // 2)
    times = in_blocks({side: one.block for side, one in sides.items()}, blocks, each, dist.barrier)
    for one in sides.values():
        one.close()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


class Side:
    """A training whose background is at work in its own blocks only."""

    def __init__(self, run: Ours) -> None:
        self.run = run

    def begin(self, steps: int) -> None:
        """Waits until its writer has reached MLflow, trains a few steps and stands still."""
        tracker = self.run.channel.tracker if self.run.tracked else None
        end = time.monotonic() + 60
        while tracker is not None and tracker.run_id is None:
            if time.monotonic() > end:
                raise RuntimeError("the tracking writer did not reach MLflow within 60 s")
            time.sleep(0.05)
        self.block(steps)

    def block(self, steps: int) -> None:
        self._signal(signal.SIGCONT)
        for _ in range(steps):
            self.run.advance()
        self.run.training.kept.checkpointer.wait()
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self.run.close()

    def _signal(self, number: int) -> None:
        pid = self.run.channel.tracker.writer_pid if self.run.tracked else None
        if pid is not None:
            os.kill(pid, number)


def command(name: str, default: str) -> click.Command:
    """`python -m experiments.benchmarks NAME`."""
    pair = PAIRS[name]

    @click.command(
        help=f"A step with {pair.names[1]} beside one with {pair.names[0]}; asked: × {pair.at_most} at most."
    )
    @click.option("--model", default=default, show_default=True, type=click.Choice(list(OURS)))
    @click.option("--blocks", default=40, type=click.IntRange(1), show_default=True, help="Blocks of steps per side.")
    @click.option("--json", "as_json", is_flag=True)
    @click.option("--results", default=str(FOLDER), show_default=True, help="Folder that the ratio is kept in.")
    def main(model: str, blocks: int, as_json: bool, results: str) -> None:
        found = run(name, model, blocks)
        ratio = Ratio.of(found, found["blocks"], pair.at_most)
        keep(name, {f"{model}, ddp, {pair.names[1]}": ratio}, Path(results))
        if as_json:
            click.echo(json.dumps(found))
            return
        heads = [f"{model}, {name}", *(f"{side}, ms" for side in reversed(pair.names)), "ratio", "95 % interval"]
        low, high = found["interval"]
        figures = [f"{found['ms'][side]:.2f}" for side in reversed(pair.names)]
        click.echo(table(heads, [["step", *figures, f"{found['ratio']:.3f}", f"{low:.3f} to {high:.3f}"]]))

    return main


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6])
