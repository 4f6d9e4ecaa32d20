"""`costs`: what a rank holds of each row, measured, beside what the row's own cost function says.

Parameters, gradients and optimizer state are the bytes of the storages behind them, after a real step; they must be the
function's to the byte, padding included. Activations are the storages that forward saves for backward, but for the
parameters; the function reads them off the model under fake tensors, and must be within 10 %. Everything on rank 0,
which holds most.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

from experiments.benchmarks.machine import machine
from experiments.parity.rows import ROWS, Row

BATCH, LENGTH = 16, 64
SHAPE = {"d_model": 64, "n_layers": 4, "n_heads": 4}
PARTS = ("parameters", "gradients", "optimizer", "activations")
EXACT = PARTS[:3]
WITHIN = 0.10


def _task() -> Any:
    from app.tasks.language import LanguageModelling

    return LanguageModelling(data="python", sequence_length=LENGTH, **SHAPE)  # type: ignore[arg-type]


def predicted(row: Row) -> dict[str, int]:
    """Bytes by the row's cost function."""
    from app.planner.read import PLAIN, Reader, sized
    from strategies.estimate import cost

    layout = row.layout
    model = Reader(_task()).read(PLAIN)
    share = BATCH // layout.dims.dp
    found = {part: int(getattr(cost(layout, sized(model, share)), part)) for part in PARTS}
    if layout.dims.tp > 1:  # read off the split model, which saves gathered copies that a whole one does not need
        found["activations"] = sized(model, share, tp=layout.dims.tp).activation_bytes
    return found


def _stored(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors' local parts."""
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local if t.numel()}.values())


class Saved:
    """Counts what forward saves for backward, but for parameters, whole or gathered."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.storages: dict[int, Any] = {}  # kept, so that no identity is used twice

    def pack(self, tensor: Tensor) -> Tensor:
        local = getattr(tensor, "_local_tensor", tensor)
        self.storages[local.untyped_storage()._cdata] = local.untyped_storage()
        return tensor

    def bytes(self, weights: set[int]) -> int:
        return sum(storage.nbytes() for which, storage in self.storages.items() if which not in weights)


def _weights(module: nn.Module) -> set[int]:
    """Storages of the parameters that the module computes with just now. (By identity: fsdp frees the memory of what
    it has gathered, and activations come to lie there.)"""
    held = [p for owner in module.modules() for p in owner._parameters.values() if p is not None]
    return {getattr(p, "_local_tensor", p).untyped_storage()._cdata for p in held}


def measured(row: Row) -> dict[str, int]:
    """Bytes that this rank really holds; collective over the row's ranks."""
    from app.data.loader import fetch
    from app.randomness import seed_everything
    from strategies.parallelize import parallelize

    task = _task()

    def build() -> nn.Module:
        seed_everything(0)
        return task.build_model()

    parallel = parallelize(
        build, row.layout, device=torch.device("cpu"), blocks=task.blocks, tensor_plan=task.tensor_plan
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
    rank = row.layout.dims.data_rank(dist.get_rank()) if row.workers > 1 else 0
    batch = fetch(task.train_data(), [(i, i) for i in range(BATCH)])
    own = tuple(tensor.chunk(row.layout.dims.dp)[rank] for tensor in batch)
    saved, weights = Saved(parallel.inner), set[int]()
    for owner in parallel.inner.modules():  # gathered parameters are there while their module computes
        owner.register_forward_pre_hook(lambda module, _: weights.update(_weights(module)))

    def loss(module: nn.Module, rows: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            value = task.loss(module, rows)
        found["activations"] = saved.bytes(weights)
        return value

    found: dict[str, int] = {}
    parallel.forward_backward([own], [1 / row.layout.dims.dp], loss)
    found["gradients"] = _stored([p.grad for p in parallel.parameters() if p.grad is not None])
    optimizer.step()
    found["parameters"] = _stored(list(parallel.parameters()))
    found["optimizer"] = _stored([value for state in optimizer.state.values() for value in state.values()])
    return {part: found[part] for part in PARTS}


def _worker(rank: int, workers: int, rows: list[Row], folder: str) -> None:
    import os

    torch.set_num_threads(1)
    if workers > 1:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", workers), rank=rank, world_size=workers)
    found = [measured(row) for row in rows]
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    if workers > 1:
        dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that shuts down around them


def run(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """Row → part → measured and predicted bytes."""
    found: dict[str, dict[str, Any]] = {}
    for workers in sorted({row.workers for row in rows}):
        chosen = [row for row in rows if row.workers == workers]
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.start_processes(_worker, (workers, chosen, folder), nprocs=workers, start_method="spawn")
            answers = json.loads(Path(folder, "found").read_text())
        for row, answer in zip(chosen, answers, strict=True):
            expected = predicted(row)
            found[str(row)] = {part: {"measured": answer[part], "function": expected[part]} for part in PARTS}
    return found


def off(part: str, figures: dict[str, int]) -> bool:
    """Whether the function is not what was measured: to the byte, or for activations within 10 %."""
    measured, function = figures["measured"], figures["function"]
    return measured != function if part in EXACT else abs(function - measured) > WITHIN * measured


def table(found: dict[str, dict[str, Any]]) -> str:
    """Bytes, measured; the function's beside it where it is not the same."""
    lines = [f"| bytes of rank 0 | {' | '.join(PARTS)} |", "|---|" + "--:|" * len(PARTS)]
    for name, parts in found.items():
        cells = []
        for part, figures in parts.items():
            measured, function = figures["measured"], figures["function"]
            beside = "" if measured == function else f" (function {function:,}, {function / measured - 1:+.1%})"
            cells.append(f"{measured:,}{beside}{' WRONG' if off(part, figures) else ''}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command()
@click.option("--workers", type=click.Choice(["1", "2", "4"]), help="Only rows of so many workers. Default: all.")
@click.option("--json", "as_json", is_flag=True)
def main(workers: str | None, as_json: bool) -> None:
    """What a rank holds of each row, measured, beside the row's own cost function. (Pipelines: `memory`.)"""
    rows = [Row("single", 1), *(row for row in ROWS if row.layout.dims.pp == 1)]
    found = run([row for row in rows if workers in (None, str(row.workers))])
    click.echo(json.dumps(found) if as_json else f"{machine()}\n\n{table(found)}")
    wrong = [name for name, parts in found.items() if any(off(part, figures) for part, figures in parts.items())]
    if wrong:
        raise click.ClickException(f"{len(wrong)} of {len(found)} rows hold something else, the first {wrong[0]}")


if __name__ == "__main__":
    main()
