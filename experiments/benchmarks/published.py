"""`published`: the planner beside published training runs of MPT models: tokens/s, and whether micro-batches fit.

The runs are GPT-2s in all but name (learned positions, LayerNorm, GELU, a head tied to the embedding), trained under
FSDP with 16-bit arithmetic and a fused loss. The constants of app/planner/constants.yaml are few and physical: per GPU
family the share of the peak that products and attention reach, that memory reaches, and what overlapping costs. They
were fitted, with what the runs' own trainer takes per step, by least squares on the logarithm of tokens/s of the rows
that are not held out.
"""

from __future__ import annotations

import csv
import functools
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from app.planner.device import device
from app.planner.estimate import Estimate, Estimator
from app.planner.layouts import Candidate
from app.planner.machine import Machine
from app.planner.plan import GIB
from app.planner.read import Reader
from app.tasks.base import Task
from experiments.benchmarks.harness import show
from strategies import registry
from strategies.dims import Options
from strategies.layout import choose

BETWEEN_NODES = {"h100": 3200e9 / 8, "a100": 1600e9 / 8}
"""Bytes/s of a node, as the runs' pages say: 3.2 Tb/s of InfiniBand, 1.6 Tb/s of RoCE."""
TRAINER = {"h100": 0.108, "a100": 0.0758}
"""Seconds of a step of the runs' own trainer that nothing hides."""
COLUMNS = ("d_model", "n_layers", "n_heads", "vocab_size", "seq_len", "gpus", "micro_batch_size", "grad_accum")


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
    """A GPT-2 of transformers, and the runs' loss."""

    unit, float_output = "tokens", False

    def __init__(self, d_model: int, n_layers: int, n_heads: int, vocab_size: int, sequence: int) -> None:
        self.sequence_length = sequence
        sizes = {
            "n_embd": d_model,
            "n_layer": n_layers,
            "n_head": n_heads,
            "vocab_size": vocab_size,
            "n_positions": sequence,
        }
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

    def heads(self) -> int:
        return 1  # it was never split over tensor-parallel workers


@functools.lru_cache(maxsize=256)
def reader_of(*sizes: int) -> Reader:
    return Reader(PublishedTask(*sizes))


@dataclass(frozen=True)
class Compared:
    """One row of the table, beside what the planner predicts of it."""

    name: str
    is_held_out: bool
    """Kept for checking, by a rule that looks at no result: about half of them, and all in fp8."""
    tokens_per_second: float
    predicted: float
    plan: Estimate


def compare(entry: dict[str, str]) -> Compared:
    """The one layout that the row is, planned.

    Raises:
        KeyError, ValueError: a column is missing, or not a number.
    """
    width, layers, heads, words, length, gpus, size, count = (int(entry[key]) for key in COLUMNS)
    gpu, precision = entry["gpu"].replace("_", "-"), "fp8" if entry["precision"].endswith("fp8") else "bf16"
    mode, reached = ("full" if entry["activation_checkpointing"] == "True" else "none"), entry["tokens_per_s_per_gpu"]
    # the runs' FSDP gathers for every micro-batch and reduces gradients of every micro-batch, in 16 bits
    reshards = entry["sharding"] == "FULL_SHARD"
    options = Options(reduce_dtype="bf16", reshard_after_forward=reshards, accumulate_sharded=True)
    layout, on = choose(registry.by_degrees("dp_shard").name, gpus), device(gpu)
    family = gpu.partition("-")[0]
    machine = Machine(replace(on, step=TRAINER[family]), gpus, 8, BETWEEN_NODES[family])
    candidate = Candidate(layout, size, count, mode, precision)
    plan = Estimator(reader_of(width, layers, heads, words, length), machine, options).estimate(candidate)
    chosen = (width // 256 + length // 512 + gpus // 8 + size) % 2 == 0
    return Compared(
        f"{entry['model']} {length} × {size} on {gpus} {gpu} {precision}{' recomputed' if mode == 'full' else ''}",
        chosen or precision != "bf16",
        float(reached) * gpus,
        size * count * gpus * length / plan.step_seconds,
        plan,
    )


@click.command(help=__doc__)
@click.argument("table", type=click.Path(exists=True))
@click.option("--json", "as_json", is_flag=True)
def main(table: str, as_json: bool) -> None:
    with open(table, newline="") as file:
        compared = [compare(entry) for entry in csv.DictReader(file)]
    found: dict[str, Any] = {"rows": len(compared), "not_fitting": sum(not one.plan.fits for one in compared)}
    errors = defaultdict[bool, Any](list)
    for one in compared:
        errors[one.is_held_out].append(abs(one.predicted / one.tokens_per_second - 1))
    found["median error"] = {
        ("held out" if held_out else "fitted"): statistics.median(own) for held_out, own in sorted(errors.items())
    }
    rows = [
        {
            "run": one.name,
            "tokens/s": f"{one.tokens_per_second:,.0f}",
            "predicted": f"{one.predicted:,.0f}",
            "error": f"{100 * (one.predicted / one.tokens_per_second - 1):+.0f} %",
            "GiB": f"{one.plan.memory_bytes / GIB:.1f}{'' if one.plan.fits else ', does not fit'}",
        }
        for one in compared
    ]
    show("published", found, rows, as_json)
    if not as_json:
        errors_text = ", ".join(f"{100 * error:.1f} % ({name})" for name, error in found["median error"].items())
        click.echo(f"\nmedian error of tokens/s: {errors_text}; do not fit by prediction: {found['not_fitting']}")
