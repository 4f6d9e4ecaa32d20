"""The planner beside published figures: training runs of MPT models, and whether their micro-batches are said to fit.

The runs are GPT-2s in all but name (learned positions, LayerNorm, GELU, a head tied to the embedding), trained under
FSDP with 16-bit arithmetic and a fused loss. Each row's model is read like any task's, with two blocks; the others are
counted. The constants of constants.yaml are few and physical: per GPU family the share of the peak that products and
attention reach, that memory reaches, what overlapping costs, and what the trainer takes per step. They were fitted by
least squares on the logarithm of tokens/s of the rows that are not held out.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from app.errors import UserError
from app.planner.device import device
from app.planner.estimate import Estimate, Estimator
from app.planner.layouts import Candidate
from app.planner.machine import Machine
from app.planner.plan import GIB
from app.planner.read import Reader
from app.tasks.base import Task
from strategies import registry
from strategies.layout import choose
from strategies.options import Options

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
    reshards: bool
    """FULL_SHARD, and not SHARD_GRAD_OP."""
    checkpointing: bool
    tokens_per_second: float
    """Of all GPUs together."""

    @property
    def is_held_out(self) -> bool:
        """Kept for checking, by a rule that looks at no result: about half of them, and all in fp8."""
        chosen = (self.d_model // 256 + self.sequence // 512 + self.gpus // 8 + self.micro_batch) % 2 == 0
        return chosen or self.precision != "bf16"

    def __str__(self) -> str:
        said = f"{self.model} {self.sequence} × {self.micro_batch} on {self.gpus} {self.gpu} {self.precision}"
        return said + (" recomputed" if self.checkpointing else "")


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
        raise UserError(f"{path} is not a table of published runs: {error} is missing or not a number") from error


def _row(entry: dict[str, str]) -> Published:
    gpus = int(entry["gpus"])
    return Published(
        model=entry["model"],
        d_model=int(entry["d_model"]),
        n_layers=int(entry["n_layers"]),
        n_heads=int(entry["n_heads"]),
        vocab_size=int(entry["vocab_size"]),
        sequence=int(entry["seq_len"]),
        gpus=gpus,
        gpu=entry["gpu"].replace("_", "-"),
        micro_batch=int(entry["micro_batch_size"]),
        micro_batches=int(entry["grad_accum"]),
        precision="fp8" if entry["precision"].endswith("fp8") else "bf16",
        reshards=entry["sharding"] == "FULL_SHARD",
        checkpointing=entry["activation_checkpointing"] == "True",
        tokens_per_second=float(entry["tokens_per_s_per_gpu"]) * gpus,
    )


class _InPlaceCrossEntropy(torch.autograd.Function):
    """The runs' fused loss: only the 16-bit logits are kept, and their gradient is written over them."""

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

    unit, float_output = "tokens", False

    def __init__(self, d_model: int, n_heads: int, vocab_size: int, sequence: int) -> None:
        self.sequence_length, self.n_heads = sequence, n_heads
        sizes = {"n_embd": d_model, "n_layer": 2, "n_head": n_heads, "vocab_size": vocab_size, "n_positions": sequence}
        no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.config: dict[str, Any] = {**sizes, **no_dropout, "activation_function": "gelu", "use_cache": False}

    def build_model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(**self.config))

    def train_data(self) -> Dataset[Any]:
        tokens = torch.zeros(8, self.sequence_length, dtype=torch.long)
        return TensorDataset(tokens, tokens)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return _InPlaceCrossEntropy.apply(model(batch[0]).logits.flatten(0, 1), batch[1].flatten())

    def items(self, batch: Any) -> int:
        return batch[1].numel()


@functools.lru_cache(maxsize=256)
def reader_of(d_model: int, n_heads: int, vocab_size: int, sequence: int) -> Reader:
    return Reader(PublishedTask(d_model, n_heads, vocab_size, sequence), tensor=False)


def planned(row: Published) -> Estimate:
    """The one layout that the row is."""
    layout = choose(registry.by_degrees("dp_shard").name, row.gpus)
    on = device(row.gpu)
    machine = Machine(replace(on, step=on.trainer), row.gpus, 8, BETWEEN_NODES[row.gpu.partition("-")[0]])
    reader = reader_of(row.d_model, row.n_heads, row.vocab_size, row.sequence).with_blocks(row.n_layers)
    # the runs' FSDP gathers for every micro-batch and reduces gradients of every micro-batch, in 16 bits
    options = Options(reduce_dtype="bf16", reshard_after_forward=row.reshards, accumulate_sharded=True)
    mode = "full" if row.checkpointing else "none"
    candidate = Candidate(
        layout, registry.data_strategy(layout), row.micro_batch, row.micro_batches, mode, row.precision
    )
    return Estimator(reader, machine, options).estimate(candidate)


@dataclass(frozen=True)
class Compared:
    row: Published
    plan: Estimate

    @property
    def tokens_per_second(self) -> float:
        row = self.row
        return row.micro_batch * row.micro_batches * row.gpus * row.sequence / self.plan.step_seconds

    @property
    def error(self) -> float:
        return self.tokens_per_second / self.row.tokens_per_second - 1


def median_error(compared: list[Compared], held_out: bool) -> float:
    return statistics.median([abs(one.error) for one in compared if one.row.is_held_out == held_out] or [math.nan])


def report(path: str, as_json: bool = False) -> str:
    """The comparison as text, or as JSON: errors of the rows that constants were fitted on, and of the others."""
    compared = [Compared(row, planned(row)) for row in rows_of(path)]
    medians = {name: median_error(compared, out) for name, out in (("fitted", False), ("held out", True))}
    refused = sum(not one.plan.fits for one in compared)
    if as_json:
        rows = [
            asdict(one.row)
            | {"predicted_tokens_per_second": one.tokens_per_second, "predicted_memory_bytes": one.plan.memory_bytes}
            | {"fits": one.plan.fits, "held_out": one.row.is_held_out}
            for one in compared
        ]
        return json.dumps({"rows": rows, "median_error": medians, "not_fitting": refused})
    lines = [f"{'run':42s} {'tokens/s':>11s} {'predicted':>11s}  error     GiB"]
    for one in compared:
        lines.append(
            f"{one.row!s:42s} {one.row.tokens_per_second:11,.0f} {one.tokens_per_second:11,.0f} "
            f"{100 * one.error:+5.0f}% {one.plan.memory_bytes / GIB:7.1f}{'' if one.plan.fits else '  does not fit'}"
        )
    lines += [f"{name}: median error {100 * error:.1f} % of tokens per second" for name, error in medians.items()]
    return "\n".join([*lines, f"{refused} of {len(compared)} published micro-batches do not fit by prediction"])
