"""`save_cpu`: CPU that a save takes of each rank, in training's thread and in the background.

Two torchrun processes train MNIST and save every 50 steps, as `saving` has them. A rank's time is that of its threads
by the kernel's clock; the median over the saves.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.machine import table
from experiments.benchmarks.ours import Ours, torchrun
from experiments.benchmarks.pairs import NEVER, SAVE_EVERY
from experiments.benchmarks.step import OURS


def worker(saves: int, folder: str, out: str) -> None:
    """One of the two processes."""
    import torch.distributed as dist

    from app.checkpoint.saver import Checkpointer
    from app.config_io import load_config
    from app.persistence import Persistence

    dist.init_process_group("gloo")
    steps = SAVE_EVERY * saves
    how = [*NEVER, "strategy=ddp", f"train.steps={steps + 1}", f"checkpoint.every_steps={SAVE_EVERY}"]
    where = ["run.name=run", f"run.storage={folder}"]
    ours = Ours(load_config([], [*OURS["mnist"], *how, *where]), tracked=True).build()
    before, behind = _timed(Persistence, "save"), _timed(Checkpointer, "_run")
    for _ in range(steps):
        ours.advance()
    ours.training.kept.checkpointer.wait()
    mine = [1e3 * statistics.median(seconds) for seconds in (before, behind)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    ours.close()
    if ours.rank == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


def _timed(owner: type, name: str) -> list[float]:
    """The calling thread's CPU seconds in each call of a method."""
    method: Callable[..., Any] = getattr(owner, name)
    seconds: list[float] = []

    def timed(*args: Any) -> Any:
        begun = time.thread_time()
        try:
            return method(*args)
        finally:
            seconds.append(time.thread_time() - begun)

    setattr(owner, name, timed)
    return seconds


@click.command()
@click.option("--saves", default=40, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(saves: int, as_json: bool) -> None:
    """CPU milliseconds of a save on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        torchrun("experiments.benchmarks.save_cpu", str(saves), folder, str(out))
        found = json.loads(out.read_text())
    if as_json:
        click.echo(json.dumps(found))
        return
    rows = [[f"rank {rank}", f"{before:.1f}", f"{behind:.1f}"] for rank, (before, behind) in enumerate(found)]
    total = sum(map(sum, found))
    click.echo(table(["CPU ms of a save", "training's thread", "background"], [*rows, ["all", f"{total:.1f}", ""]]))


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1].isdigit():
        worker(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    else:
        main()
