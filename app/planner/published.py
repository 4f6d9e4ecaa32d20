"""The planner beside published figures: training runs of MPT models, and whether their micro-batches are said to fit.

The runs are GPT-2s in all but name (learned positions, LayerNorm, GELU, a head tied to the embedding), trained under
FSDP with 16-bit arithmetic and a fused loss. Each row's model is read like any task's: two blocks are built, of which
one is watched, and the others counted. The same model as an experiment is experiments/gpt2.yaml with
`task_args.config={n_embd: …, n_layer: …, n_head: …, vocab_size: 50368, n_positions: …, activation_function: gelu}`.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.errors import UserError
from app.planner.evaluate import Evaluated, Machine, Settings, evaluate
from app.planner.rates import Rates, rates
from app.planner.read import CAST, GPU, ModelRead, Reader
from app.planner.table import CHECKPOINTING, DATA, PRECISIONS, Table
from app.tasks.base import Task

BETWEEN_NODES = {"h100": 3200e9 / 8, "a100": 1600e9 / 8}
"""Bytes/s of a node, as the runs' pages say: 3.2 Tb/s of InfiniBand, 1.6 Tb/s of RoCE."""


@dataclass(frozen=True)
class Published:
    """One row: what was run, and what it reached."""

    model: str
    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    sequence: int
    gpus: int
    gpu: str
    micro_batch: int
    micro_batches: int
    precision: str
    sharding: str
    checkpointing: bool
    tokens_per_second: float
    """Of all GPUs together."""
    parameters: int


def rows_of(path: str | Path) -> list[Published]:
    """Reads a table such as llm_foundry.csv.

    Raises:
        UserError: no such file, or not such a table.
    """
    try:
        with open(path, newline="") as file:
            return [_row(entry) for entry in csv.DictReader(file)]
    except OSError as error:
        raise UserError(f"the published figures {path} cannot be read: {error.strerror}") from error
    except (KeyError, ValueError) as error:
        raise UserError(f"{path} is not a table of published runs: {error} is missing or no number") from error


def _row(entry: dict[str, str]) -> Published:
    numbers = {
        name: int(entry[key])
        for name, key in (
            ("d_model", "d_model"),
            ("n_layers", "n_layers"),
            ("n_heads", "n_heads"),
            ("vocab_size", "vocab_size"),
            ("sequence", "seq_len"),
            ("gpus", "gpus"),
            ("micro_batch", "micro_batch_size"),
            ("micro_batches", "grad_accum"),
            ("parameters", "parameters"),
        )
    }
    return Published(
        model=entry["model"],
        gpu=entry["gpu"].replace("_", "-"),
        precision="fp8" if entry["precision"].endswith("fp8") else "bf16",
        sharding=entry["sharding"],
        checkpointing=entry["activation_checkpointing"] == "True",
        tokens_per_second=float(entry["tokens_per_s_per_gpu"]) * numbers["gpus"],
        **numbers,
    )


class _Tokens(Dataset[Any]):
    def __init__(self, sequence: int) -> None:
        self.sequence = sequence

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(self.sequence, dtype=torch.long), torch.zeros(self.sequence, dtype=torch.long)


class _InPlaceCrossEntropy(torch.autograd.Function):
    """The runs' fused loss: nothing but the 16-bit logits is kept, and their gradient is written over them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.amax(1).float().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return logits.detach().mul_(1.0), None


class PublishedTask(Task):
    """A GPT-2 of transformers with two blocks, and the runs' loss."""

    unit = "tokens"
    float_output = False

    def __init__(self, *, d_model: int, n_heads: int, vocab_size: int, sequence: int) -> None:
        from transformers import GPT2Config

        self.sequence_length, self.n_heads = sequence, n_heads
        self.config = GPT2Config(
            n_embd=d_model,
            n_layer=2,
            n_head=n_heads,
            vocab_size=vocab_size,
            n_positions=sequence,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )

    def build_model(self) -> nn.Module:
        from transformers import GPT2LMHeadModel

        return GPT2LMHeadModel(self.config)

    def train_data(self) -> Dataset[Any]:
        return _Tokens(self.sequence_length)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0]).logits
        return _InPlaceCrossEntropy.apply(logits.flatten(0, 1), batch[1].flatten())

    def items(self, batch: Any) -> int:
        return batch[1].numel()


@functools.lru_cache(maxsize=256)
def model_of(d_model: int, n_layers: int, n_heads: int, vocab_size: int, sequence: int) -> ModelRead:
    """The row's model, read off a GPT-2 with two blocks, of which the second stands for all others."""
    task = PublishedTask(d_model=d_model, n_heads=n_heads, vocab_size=vocab_size, sequence=sequence)
    read = Reader(task, tensor=False).read(CAST + GPU)
    costs, (first, second) = read.costs[CAST + GPU], read.blocks
    parameters = [p for p in read.size.parameters if not p.name.startswith(second + ".")]
    block = [p for p in read.size.parameters if p.name.startswith(second + ".")]
    blocks = [first, *(f"{second}.{i}" for i in range(n_layers - 1))]
    for name in blocks[1:]:
        parameters += [dataclasses.replace(p, name=p.name.replace(second, name, 1), unit=name) for p in block]
    return dataclasses.replace(
        read,
        blocks=blocks,
        size=dataclasses.replace(read.size, parameters=tuple(parameters)),
        costs={CAST + GPU: dataclasses.replace(costs, order=[costs.order[0]] * n_layers)},
    )


def planned(row: Published, device: Rates) -> Evaluated:
    """The one layout that the row is, planned."""
    table = Table(
        data=np.array([DATA.index("fsdp" if row.sharding == "FULL_SHARD" else "zero2")]),
        dp_replicate=np.array([1]),
        dp_shard=np.array([row.gpus]),
        tp=np.array([1]),
        pp=np.array([1]),
        micro_batch=np.array([row.micro_batch]),
        micro_batches=np.array([row.micro_batches]),
        checkpointing=np.array([CHECKPOINTING.index("full" if row.checkpointing else "none")]),
        precision=np.array([PRECISIONS.index(row.precision)]),
        schedule=np.array([0]),
        chunks=np.array([1]),
        offload=np.array([False]),
    )
    model = model_of(row.d_model, row.n_layers, row.n_heads, row.vocab_size, row.sequence)
    device = dataclasses.replace(device, step=device.trainer)
    machine = Machine(device, row.gpus, 8, BETWEEN_NODES[row.gpu.split("-")[0]])
    # the runs' FSDP gathers for every micro-batch and reduces gradients of every micro-batch, in 16 bits
    settings = Settings(reduce_bf16=True, reshard_after_forward=row.sharding == "FULL_SHARD", accumulate_sharded=True)
    return evaluate(lambda way: model, table, machine, settings)


@dataclass(frozen=True)
class Compared:
    row: Published
    tokens_per_second: float
    memory: float
    fits: bool

    @property
    def error(self) -> float:
        return self.tokens_per_second / self.row.tokens_per_second - 1


def compare(rows: list[Published], devices: dict[str, Rates] | None = None) -> list[Compared]:
    """Each row's tokens/s and memory, predicted."""
    found = []
    for row in rows:
        device = (devices or {}).get(row.gpu) or rates(row.gpu)
        plan = planned(row, device)
        tokens = row.micro_batch * row.micro_batches * row.gpus * row.sequence
        capacity = device.gpu.memory_bytes - device.context
        needed = float(plan.bytes[0])
        found.append(Compared(row, tokens / float(plan.step[0]), needed, needed <= capacity))
    return found


def is_held_out(row: Published) -> bool:
    """Whether a row is kept for checking: by a rule that looks at no result. About half of them."""
    return (row.d_model // 256 + row.sequence // 512 + row.gpus // 8 + row.micro_batch) % 2 == 0


def report(path: str, as_json: bool = False) -> str:
    """The comparison as text, or as JSON: errors of the rows that constants were fitted on, and of the others."""
    compared = compare(rows_of(path))
    parts = {
        "fitted": [c for c in compared if not is_held_out(c.row) and c.row.precision == "bf16"],
        "held out": [c for c in compared if is_held_out(c.row) or c.row.precision != "bf16"],
    }
    figures = {name: float(np.median([abs(c.error) for c in part])) for name, part in parts.items() if part}
    refused = [c for c in compared if not c.fits]
    if as_json:
        rows = [
            {
                **dataclasses.asdict(c.row),
                "predicted_tokens_per_second": c.tokens_per_second,
                "predicted_memory_bytes": int(c.memory),
                "fits": c.fits,
                "held_out": c in parts["held out"],
            }
            for c in compared
        ]
        return json.dumps({"rows": rows, "median_error": figures, "not_fitting": len(refused)})
    lines = [f"{'run':42s} {'tokens/s':>11s} {'predicted':>11s}  error     GiB"]
    for c in compared:
        row = c.row
        name = f"{row.model} {row.sequence} × {row.micro_batch} on {row.gpus} {row.gpu} {row.precision}"
        name += " recomputed" if row.checkpointing else ""
        lines.append(
            f"{name:42s} {row.tokens_per_second:11,.0f} {c.tokens_per_second:11,.0f} {100 * c.error:+5.0f}% "
            f"{c.memory / 2**30:7.1f}" + ("" if c.fits else "  said not to fit")
        )
    for name, median in figures.items():
        lines.append(f"{name}: {len(parts[name])} runs, median error {100 * median:.1f} %")
    lines.append(f"{len(refused)} of {len(compared)} micro-batches are said not to fit")
    return "\n".join(lines)
