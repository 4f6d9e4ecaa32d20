"""`peers`: a step of Accelerate, Lightning Fabric and Lightning Trainer beside the same written by hand.

    make peers && python -m experiments.benchmarks peers [--model mnist]

All live in the same two torchrun processes, in the environment that `make peers` makes (peers.txt), with the same
model, data and optimizer, and take turns block by block, in the order A B C D D C B A. One side at a time runs:
Trainer's loop, which cannot be left, has a thread of its own that stands still in the others' turns (turns.py), so
that all sides' collectives have one order; blocks begin with a barrier in a group of its own. The hand-written one also
sets the learning rate and averages the loss every tenth step, which flatters the others. `step` does the same with
ours beside the hand-written one, so the two tables share their unit; `ray_train` has Ray Train's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.turns import TakesTurns

BLOCK_STEPS = {"mnist": 40, "gpt": 10, "gpt-10m": 2}
SIDES = ("by hand", "Accelerate", "Fabric", "Trainer")
PYTHON = ".venv-peers/bin/python"


def run(model: str, blocks: int, python: str) -> dict[str, Any]:
    """Median milliseconds per step of each, and its ratio to the hand-written one with a 95 % interval."""
    from experiments.benchmarks.abba import beside

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "experiments.benchmarks.peers", model, str(blocks), str(out)]
        subprocess.run(
            command,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.getcwd()},
        )
        times = json.loads(out.read_text())
    return beside(times, "by hand")


# --- one of the two processes, in the peers' environment --------------------------------------------------------


def worker(model: str, blocks: int, out: str) -> None:
    import torch.distributed as dist

    from experiments.benchmarks.abba import in_blocks
    from experiments.benchmarks.plain import MODELS

    dist.init_process_group("gloo")
    start = dist.new_group(backend="gloo")
    each = BLOCK_STEPS[model]
    steps = each * (blocks + 2)  # Trainer must not come to its end, which has collectives of its own
    advances = {name: MAKERS[name](MODELS[model](steps, WRAP.get(name, "single")), each) for name in SIDES}
    times = in_blocks(advances, blocks, each, lambda: dist.barrier(group=start))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(times))
    dist.barrier(group=start)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that shuts down around them; Trainer's is held


def by_hand(plain: Any, each: int) -> Callable[[int], None]:
    def advance(count: int) -> None:
        for _ in range(count):
            plain.advance()

    return advance


def accelerate(plain: Any, each: int) -> Callable[[int], None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain.model, plain.optimizer = accelerator.prepare(plain.model, plain.optimizer)
    return _steps(plain, accelerator.backward)


def fabric(plain: Any, each: int) -> Callable[[int], None]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    plain.model, plain.optimizer = fabric.setup(plain.model, plain.optimizer)
    return _steps(plain, fabric.backward)


def _steps(plain: Any, backward: Callable[[Any], None]) -> Callable[[int], None]:
    """A step as these libraries' documentation writes it."""
    import torch.nn.functional as F

    def advance(count: int) -> None:
        for _ in range(count):
            index = next(plain.indices)
            logits = plain.model(plain.inputs[index])
            loss = F.cross_entropy(logits.flatten(0, -2), plain.targets[index].flatten())
            backward(loss)
            plain.optimizer.step()
            plain.optimizer.zero_grad()

    return advance


def trainer(plain: Any, each: int) -> Callable[[int], None]:
    """`Trainer.fit`, held before the first batch of every block until it is asked for."""
    import lightning
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = plain.model

        def training_step(self, batch: Any, _: int) -> Any:
            inputs, targets = batch
            return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())

        def configure_optimizers(self) -> Any:
            return plain.optimizer

    class Held(lightning.Callback):
        def __init__(self, pause: Callable[[], None]) -> None:
            self.pause = pause

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if number % each == 0:
                self.pause()

    batches: Any = _Batches(plain)
    data: Any = DataLoader(batches, batch_size=None)

    def fit(pause: Callable[[], None]) -> None:
        lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_steps=plain.how.steps,
            callbacks=[Held(pause)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        ).fit(Module(), data)

    turns = TakesTurns(fit)
    return lambda count: turns.advance()


class _Batches:
    """The hand-written training's batches, as a data set whose samples are batches."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __len__(self) -> int:
        return self.plain.how.steps

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        if number >= len(self):
            raise IndexError(number)
        index = next(self.plain.indices)
        return self.plain.inputs[index], self.plain.targets[index]


MAKERS: dict[str, Callable[[Any, int], Callable[[int], None]]] = {
    "by hand": by_hand,
    "Accelerate": accelerate,
    "Fabric": fabric,
    "Trainer": trainer,
}
WRAP = {"by hand": "ddp"}
"""The libraries put DDP on the model themselves."""


@click.command()
@click.option("--model", default="mnist", show_default=True, type=click.Choice(list(BLOCK_STEPS)))
@click.option("--blocks", default=40, type=click.IntRange(1), show_default=True, help="Blocks of steps per side.")
@click.option("--python", default=PYTHON, show_default=True, help="Python of `make peers`.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--results", default="experiments/benchmarks/results", show_default=True, help="Folder for the ratios.")
def main(model: str, blocks: int, python: str, as_json: bool, results: str) -> None:
    """A step of Accelerate, Fabric and Trainer beside the same by hand."""
    if not Path(python).exists():
        raise click.ClickException(f"there is no {python}: `make peers` makes it")
    from experiments.benchmarks.machine import machine
    from experiments.benchmarks.record import Ratio, keep

    found = run(model, blocks, python)
    others = {name: r for name, r in found.items() if name != "by hand"}
    ratios = {f"{model}, ddp, {name}": Ratio.of(r, blocks) for name, r in others.items()}
    keep("peers", ratios, Path(results))
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"{machine()}\n\n| {model}, ddp | ms per step | ratio | 95 % interval |\n|---|---|---|---|")
    for name, r in found.items():
        low, high = r["interval"]
        click.echo(f"| {name} | {r['ms']:.2f} | {r['ratio']:.3f} | {low:.3f} to {high:.3f} |")


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        main()
