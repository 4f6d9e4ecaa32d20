"""`peers`: a step of Accelerate, Lightning Fabric and Lightning Trainer beside the same written by hand.

    make peers && python -m experiments.benchmarks peers [--model mnist] [--strategy ddp]

All live in the same two torchrun processes, in the environment that `make peers` makes (peers.txt), with the same
model, data and optimizer, and take turns block by block, forwards and backwards. The hand-written one also sets the
learning rate and averages the loss every tenth step, which flatters the others. `step` does the same with
ours beside the hand-written one, so the two tables share their unit. Plain Ray Train is the hand-written step itself in
processes that Ray has started: it differs in `start` alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

BLOCK_STEPS = {"mnist": 40, "gpt": 10, "gpt-10m": 2}
SIDES = ("by hand", "Accelerate", "Fabric", "Trainer")
PYTHON = ".venv-peers/bin/python"


def run(model: str, strategy: str, blocks: int, python: str) -> dict[str, Any]:
    """Median milliseconds per step of each, and its ratio to the hand-written one with a 95 % interval."""
    from experiments.benchmarks.step import interval

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "experiments.benchmarks.peers", model, strategy, str(blocks), str(out)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()})
        times = json.loads(out.read_text())
    base = times["by hand"]
    return {
        name: {
            "ms": 1e3 * statistics.median(own),
            "ratio": statistics.median(own) / statistics.median(base),
            "interval": interval(base, own),
        }
        for name, own in times.items()
    }


# --- one of the two processes, in the peers' environment --------------------------------------------------------


def worker(model: str, strategy: str, blocks: int, out: str) -> None:
    import torch.distributed as dist

    from experiments.benchmarks.plain import MODELS

    dist.init_process_group("gloo")
    each = BLOCK_STEPS[model]
    steps = each * (blocks + 1)
    makers: dict[str, Callable[[Any, int], Callable[[int], None]]] = {
        "by hand": by_hand,
        "Accelerate": accelerate,
        "Fabric": fabric,
        "Trainer": trainer,
    }
    wrap = {"by hand": strategy}
    advances = {name: makers[name](MODELS[model](steps, wrap.get(name, "single")), each) for name in SIDES}
    times: dict[str, list[float]] = {name: [] for name in advances}
    for number in range(-1, blocks):
        for name in list(advances) if number % 2 else list(reversed(advances)):
            dist.barrier()
            begun = time.perf_counter()
            advances[name](each)
            if number >= 0:
                times[name].append((time.perf_counter() - begun) / each)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(times))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that shuts down around them


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
    """`Trainer.fit` in a thread, which a callback holds after every block until the next one is asked for."""
    import lightning
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    go, done = threading.Semaphore(0), threading.Semaphore(0)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = plain.model

        def training_step(self, batch: Any, _: int) -> Any:
            inputs, targets = batch
            return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())

        def configure_optimizers(self) -> Any:
            return plain.optimizer

    class Turns(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if number % each == 0:
                go.acquire()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            if number % each == each - 1:
                done.release()

    batches: Any = _Batches(plain)
    data: Any = DataLoader(batches, batch_size=None)
    fitting = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=plain.how.steps,
        callbacks=[Turns()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    threading.Thread(target=fitting.fit, args=(Module(), data), daemon=True).start()

    def advance(count: int) -> None:
        go.release()
        if not done.acquire(timeout=600):
            raise RuntimeError("Lightning's Trainer did not finish its steps within 10 minutes")

    return advance


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


@click.command()
@click.option("--model", default="mnist", show_default=True, type=click.Choice(list(BLOCK_STEPS)))
@click.option("--strategy", default="ddp", show_default=True, type=click.Choice(["ddp"]))
@click.option("--blocks", default=40, show_default=True, help="Blocks of steps per side.")
@click.option("--python", default=PYTHON, show_default=True, help="Python of `make peers`.")
@click.option("--json", "as_json", is_flag=True)
def main(model: str, strategy: str, blocks: int, python: str, as_json: bool) -> None:
    """A step of Accelerate, Fabric and Trainer beside the same by hand."""
    if not Path(python).exists():
        raise click.ClickException(f"there is no {python}: `make peers` makes it")
    found = run(model, strategy, blocks, python)
    if as_json:
        click.echo(json.dumps(found))
        return
    from experiments.benchmarks.machine import machine

    click.echo(f"{machine()}\n\n| {model}, {strategy} | ms per step | ratio | 95 % interval |\n|---|---|---|---|")
    for name, r in found.items():
        low, high = r["interval"]
        click.echo(f"| {name} | {r['ms']:.2f} | {r['ratio']:.3f} | {low:.3f} to {high:.3f} |")


if __name__ == "__main__":
    if "RANK" in os.environ:
        worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
