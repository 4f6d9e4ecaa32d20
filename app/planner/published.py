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
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
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
from strategies.dims import Options
from strategies.layout import choose

BETWEEN_NODES = {"h100": 3200e9 / 8, "a100": 1600e9 / 8}
"""Bytes/s of a node, as the runs' pages say: 3.2 Tb/s of InfiniBand, 1.6 Tb/s of RoCE."""
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
    machine = Machine(replace(on, step=on.trainer), gpus, 8, BETWEEN_NODES[gpu.partition("-")[0]])
    candidate = Candidate(layout, size, count, mode, precision)
    reader = reader_of(width, heads, words, length).with_blocks(layers)
    plan = Estimator(reader, machine, options).estimate(candidate)
    chosen = (width // 256 + length // 512 + gpus // 8 + size) % 2 == 0
    return Compared(
        f"{entry['model']} {length} × {size} on {gpus} {gpu} {precision}{' recomputed' if mode == 'full' else ''}",
        chosen or precision != "bf16",
        float(reached) * gpus,
        size * count * gpus * length / plan.step_seconds,
        plan,
    )


def report(path: str) -> tuple[dict[str, Any], str]:
    """The comparison as figures and as text: errors of the rows that constants were fitted on, and of the others.

    Raises:
        UserError: no such file, or not such a table.
    """
    try:
        with open(path, newline="") as file:
            compared = [compare(entry) for entry in csv.DictReader(file)]
    except OSError as error:
        raise UserError(f"the published figures {path} cannot be read: {error.strerror}") from error
    except (KeyError, ValueError) as error:
        raise UserError(f"{path} is not a table of published runs: {error} is missing or not a number") from error
    figures: dict[str, Any] = {"rows": len(compared), "not_fitting": sum(not one.plan.fits for one in compared)}
    lines, errors = [f"{'run':42s} {'tokens/s':>11s} {'predicted':>11s}  error     GiB"], defaultdict[bool, Any](list)
    for one in compared:
        off = one.predicted / one.tokens_per_second - 1
        errors[one.is_held_out].append(abs(off))
        lines.append(
            f"{one.name:42s} {one.tokens_per_second:11,.0f} {one.predicted:11,.0f} {100 * off:+5.0f}% "
            f"{one.plan.memory_bytes / GIB:7.1f}{'' if one.plan.fits else '  does not fit'}"
        )
    for name, held_out in (("fitted", False), ("held out", True)):
        figures[name] = statistics.median(errors[held_out] or [math.nan])
        lines.append(f"{name}: median error {100 * figures[name]:.1f} % of tokens per second")
    lines.append(f"{figures['not_fitting']} of {len(compared)} published micro-batches do not fit by prediction")
    return figures, "\n".join(lines)
