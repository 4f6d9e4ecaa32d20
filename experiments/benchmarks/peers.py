"""`peers`: a step of Accelerate, Lightning Fabric and Lightning Trainer beside the same written by hand.

All live in the same two torchrun processes, in the environment that `make peers` makes (peers.txt), with the same
model, data and optimizer, and take turns (harness.py). Trainer's loop cannot be left, so it is the one that runs: a
callback takes the others' turns between two of its blocks. The hand-written side also sets the learning rate and
averages the loss every tenth step, which flatters the others. `step` has ours beside the same hand-written side.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from experiments.benchmarks.harness import answer, beside, interleaved, ratio_row, show, torchrun
from experiments.benchmarks.step import BLOCK_STEPS

PYTHON = ".venv-peers/bin/python"


def _worker(model: str, blocks: int) -> NoReturn:
    """One of the two processes, in the peers' environment."""
    import torch.distributed as dist

    from experiments.benchmarks.plain import MODELS

    dist.init_process_group("gloo")
    each = BLOCK_STEPS[model]
    total = 2 * each * (blocks + 2)  # Trainer is left before its end, which has collectives of its own

    def made(wrap: str = "single") -> Any:  # the libraries put DDP on the model themselves
        return MODELS[model](total, wrap)

    steps: dict[str, Callable[[], object] | None] = {"by hand": made("ddp").advance}
    steps |= {"Accelerate": _accelerate(made()), "Fabric": _fabric(made()), "Trainer": None}
    times: dict[str, list[float]] = {}
    between = dist.new_group(backend="gloo")
    _trainer(made(), each, interleaved(times, steps, blocks, each, lambda: dist.barrier(group=between)), times)
    raise AssertionError("Trainer came to its end before the last block")


def _accelerate(plain: Any) -> Callable[[], None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain.model, plain.optimizer = accelerator.prepare(plain.model, plain.optimizer)
    return _step(plain, accelerator.backward)


def _fabric(plain: Any) -> Callable[[], None]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    plain.model, plain.optimizer = fabric.setup(plain.model, plain.optimizer)
    return _step(plain, fabric.backward)


def _step(plain: Any, backward: Callable[[Any], None]) -> Callable[[], None]:
    """A step as these libraries' documentation writes it."""
    import torch.nn.functional as F

    def advance() -> None:
        index = next(plain.indices)
        logits = plain.model(plain.inputs[index])
        backward(F.cross_entropy(logits.flatten(0, -2), plain.targets[index].flatten()))
        plain.optimizer.step()
        plain.optimizer.zero_grad()

    return advance


def _trainer(plain: Any, each: int, others: Any, times: dict[str, list[float]]) -> None:
    """`Trainer.fit`; before the first batch of every block the others have their turns, and at the end answer."""
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

    class Turns(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if number % each == 0 and next(others, others) is others:
                answer(times)

    class Batches:
        def __len__(self) -> int:
            return plain.steps

        def __getitem__(self, number: int) -> tuple[Any, Any]:
            if number >= len(self):
                raise IndexError(number)
            index = next(plain.indices)
            return plain.inputs[index], plain.targets[index]

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fit: Any = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=plain.steps,
        callbacks=[Turns()],
        enable_model_summary=False,
        use_distributed_sampler=False,
        **quiet,
    )
    batches: Any = Batches()
    fit.fit(Module(), DataLoader(batches, batch_size=None))


@click.command()
@click.option("--model", default="mnist", show_default=True, type=click.Choice(list(BLOCK_STEPS)))
@click.option("--blocks", default=40, type=click.IntRange(1), show_default=True, help="Blocks of steps per side.")
@click.option("--python", default=PYTHON, show_default=True, help="Python of `make peers`.")
@click.option("--json", "as_json", is_flag=True)
def main(model: str, blocks: int, python: str, as_json: bool) -> None:
    """A step of Accelerate, Fabric and Trainer beside the same by hand."""
    if not Path(python).exists():
        raise click.ClickException(f"there is no {python}: `make peers` makes it")
    found = beside(torchrun("experiments.benchmarks.peers", model, blocks, python=python), "by hand")
    rows = [ratio_row(f"{model}, ddp: {name}", found, "by hand", name) for name in found if name != "by hand"]
    show("peers", found, rows, as_json)


if __name__ == "__main__":
    _worker(sys.argv[1], int(sys.argv[2]))
