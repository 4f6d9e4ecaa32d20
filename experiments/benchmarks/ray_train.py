"""`ray_train`: a step of ours, and of Ray Train used as its documentation has it, beside the same written by hand.

    python -m experiments.benchmarks ray_train [--model mnist]

All live in the same two workers of a plain `TorchTrainer`, one process group, and take turns, block by block, in the
order A B C C B A (ours.py). Ray Train's side is `prepare_model`, `prepare_data_loader` and a `report` after each epoch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from experiments.benchmarks.abba import beside, in_turns
from experiments.benchmarks.machine import table
from experiments.benchmarks.ours import Ours
from experiments.benchmarks.record import FOLDER, Ratio, keep
from experiments.benchmarks.step import BLOCK_STEPS, OURS

BY_HAND, PLAIN, TRIREME = "by hand", "Ray Train", "Trireme"


def run(model: str, blocks: int) -> dict[str, Any]:
    """Median milliseconds per step of each, and its ratio to the hand-written one with a 95 % interval."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        ray.init(address="local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": env})
        try:
            TorchTrainer(
                _worker,
                train_loop_config={"model": model, "blocks": blocks, "folder": folder, "out": str(out)},
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(storage_path=folder),
            ).fit()
        finally:
            ray.shutdown()
        times = json.loads(out.read_text())
    return beside(times, BY_HAND)


def _worker(how: dict[str, Any]) -> None:
    from app.config_io import load_config
    from experiments.benchmarks.plain import MODELS

    name, each = how["model"], BLOCK_STEPS[how["model"]]
    steps = each * (how["blocks"] + 2)
    where = ["strategy=ddp", f"train.steps={steps + 1}", "run.name=ours", f"run.storage={how['folder']}"]
    ours = Ours(load_config([], [*OURS[name], *where]), tracked=True).build()
    sides = {
        BY_HAND: MODELS[name](steps, "ddp").advance,
        PLAIN: _as_documented(MODELS[name](steps, "single")),
        TRIREME: ours.advance,
    }
    times = in_turns(sides, how["blocks"], each)
    ours.close()
    if ours.rank == 0:
        Path(how["out"]).write_text(json.dumps(times))


def _as_documented(plain: Any) -> Callable[[], None]:
    """A step as Ray's guide to TorchTrainer writes it, with the hand-written training's model, data and optimizer."""
    import torch.nn.functional as F
    from ray import train
    from ray.train.torch import prepare_data_loader, prepare_model
    from torch.utils.data import DataLoader, TensorDataset

    model = prepare_model(plain.model)
    data = TensorDataset(plain.inputs, plain.targets)
    loader: Any = prepare_data_loader(DataLoader(data, plain.how.batch // plain.world, shuffle=True, drop_last=True))

    def batches() -> Iterator[tuple[Any, Any]]:
        epoch = 0
        while True:
            loader.sampler.set_epoch(epoch)
            yield from loader
            train.report({"epoch": epoch})
            epoch += 1

    each = batches()

    def advance() -> None:
        inputs, targets = next(each)
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        plain.optimizer.zero_grad()
        loss.backward()
        plain.optimizer.step()

    return advance


@click.command()
@click.option("--model", default="mnist", show_default=True, type=click.Choice(list(OURS)))
@click.option("--blocks", default=40, type=click.IntRange(1), show_default=True, help="Blocks of steps per side.")
@click.option("--json", "as_json", is_flag=True)
@click.option("--results", default=str(FOLDER), show_default=True, help="Folder that the ratios are kept in.")
def main(model: str, blocks: int, as_json: bool, results: str) -> None:
    """A step of ours and of Ray Train used plainly, beside the same by hand."""
    found = run(model, blocks)
    others = {f"{model}, ddp, {name}": Ratio.of(r, blocks) for name, r in found.items() if name != BY_HAND}
    keep("ray_train", others, Path(results))
    if as_json:
        click.echo(json.dumps(found))
        return
    heads = [f"{model}, ddp, in Ray Train's workers", "ms", "ratio", "95 % interval"]
    rows = []
    for name, r in found.items():
        low, high = r["interval"]
        rows.append([name, f"{r['ms']:.2f}", f"{r['ratio']:.3f}", f"{low:.3f} to {high:.3f}"])
    click.echo(table(heads, rows))


if __name__ == "__main__":
    from experiments.benchmarks.ray_train import main as command  # so that workers find `_worker` by its module

    command()
