"""The rows of published.csv, and the model that a run trained: a decoder with the run's sizes.

By a hash of a row's address and settings half of the rows are for the fit (fit.py), and half unseen by it.
"""

from __future__ import annotations

import csv
import functools
import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from app.planner.read import Reader
from app.tasks.base import Task

TABLE, SOURCES = (Path(__file__).with_name(f"published{end}") for end in (".csv", "_sources.yaml"))

LATER = ("llm-foundry",)
"""Sources of which nothing is for the fit."""


@dataclass(frozen=True)
class Run:
    """A row. 0 where a figure is not told."""

    source: str
    model: str
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_hidden: int
    gated: int
    vocab_size: int
    tied: int
    attention: str  # flash, or softmax: scores in memory, their softmax one kernel
    kernels: str  # fused, as torch.compile does; eager, a norm being one kernel; plain, a norm being several
    sequence: int
    gpu: str
    per_node: int
    network_gbit: float
    gpus: int
    data: str  # what data-parallel workers do: fsdp, hsdp, zero1 or ddp
    tp: int
    pp: int
    chunks: int
    cp: int
    sequence_parallel: int
    micro_batch: int
    global_batch: int
    precision: str
    recompute: str
    reduce: str  # what gradients add up and are sent in
    overlap: int  # whether tensor parallelism's communication overlaps products (asynchronous tensor parallelism)
    step_seconds: float
    memory_gib: float
    flash: float = 1.0  # the speed of its attention's kernel beside FlashAttention-2's
    again: float = 0.0  # share of products that its selective recomputation computes again
    beside_gib: float = 0.0  # of `memory_gib`, what a plan does not count: the process, buffers of its trainer's
    fragments: float = 0.0  # share of what its torch had reserved that held no tensor; 0: as planned
    loss: str = "16 bits"  # what a step keeps of logits; float32: them and their softmax in 32 bits too

    @property
    def is_unseen(self) -> bool:
        """Not for the fit."""
        if any(word in self.source for word in LATER):
            return True
        settings = repr(astuple(self)[: list(self.__dataclass_fields__).index("step_seconds")])
        return hashlib.sha256(settings.encode()).digest()[0] % 2 == 1

    @property
    def kind(self) -> str:
        """Of layouts that err alike."""
        split = [name for name in ("cp", "tp", "pp") if getattr(self, name) > 1]
        return "+".join(split) or "data"

    @property
    def name(self) -> str:
        degrees = " ".join(f"{name}={getattr(self, name)}" for name in ("tp", "pp", "cp") if getattr(self, name) > 1)
        size = f"{self.micro_batch}×{self.sequence}" if self.micro_batch else str(self.sequence)
        again = "" if self.recompute == "none" else f" {self.recompute}"
        return f"{self.model} {size} on {self.gpus} {self.gpu.partition(':')[0]} {degrees} {self.precision}{again}"


def runs(path: str | Path = TABLE) -> list[Run]:
    """The rows of a table.

    Raises:
        KeyError, ValueError: a column is missing, or not a number.
    """
    with open(path, newline="") as file:
        entries = list(csv.DictReader(file))
    sources = yaml.safe_load(SOURCES.read_text())
    return [_run(entry if "network_gbit" in entry else _of_llm_foundry(entry), sources) for entry in entries]


def _run(entry: dict[str, Any], sources: dict[str, Any]) -> Run:
    kinds: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str}
    columns = [field for field in fields(Run) if field.name in entry]
    run = Run(**{column.name: kinds[str(column.type)](entry[column.name] or 0) for column in columns})
    said = sources.get(run.source, {"address": run.source})
    return replace(run, source=said["address"], **said.get("runs", {}))


def _of_llm_foundry(entry: dict[str, str]) -> dict[str, Any]:
    """MPT models: GPT-2s in all but name, under FSDP. The pages name their networks: InfiniBand and RoCE."""
    width, gpus, micro_batch = int(entry["d_model"]), int(entry["gpus"]), int(entry["micro_batch_size"])
    batch, sequence = micro_batch * gpus * int(entry["grad_accum"]), int(entry["seq_len"])
    rate, gpu = float(entry["tokens_per_s_per_gpu"]), entry["gpu"].replace("_", "-")
    return {
        **{key: entry[key] for key in ("model", "d_model", "n_layers", "n_heads", "vocab_size", "gpus")},
        **{"source": "llm-foundry", "n_kv_heads": entry["n_heads"], "d_hidden": 4 * width, "gated": 0, "tied": 1},
        **{"attention": "flash", "kernels": "eager", "sequence": sequence, "gpu": gpu, "per_node": 8, "cp": 1},
        **{"network_gbit": 3200 if gpu.startswith("h100") else 1600, "tp": 1, "pp": 1, "chunks": 1},
        **{
            "reduce": "bf16",
            "overlap": 0,
            "data": "fsdp" if entry["sharding"] == "FULL_SHARD" else "zero2",
            "sequence_parallel": 1,
        },
        **{"micro_batch": micro_batch, "global_batch": batch, "memory_gib": 0},
        "precision": "fp8" if entry["precision"].endswith("fp8") else "bf16",
        "recompute": "full" if entry["activation_checkpointing"] == "True" else "none",
        "step_seconds": batch * sequence / (rate * gpus),
    }


# --- the model that a run trained ---------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and feed-forward, one product for q, k and v, and one for both of a gated layer's first."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        width, size = run.d_model, run.d_model // run.n_heads
        self.plain = run.kernels == "plain"
        self.size, self.gated, self.flash = size, run.gated, run.attention == "flash"
        self.groups = run.n_heads // run.n_kv_heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (run.n_heads + 2 * run.n_kv_heads) * size, bias=False)
        self.out = nn.Linear(run.n_heads * size, width, bias=False)
        self.up = nn.Linear(width, run.d_hidden * (1 + run.gated), bias=False)
        self.down = nn.Linear(run.d_hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv_BHTK = self.qkv(_normed(self.attn_norm, x_BTD, self.plain)).unflatten(-1, (-1, self.size)).transpose(1, 2)
        kv_heads = qkv_BHTK.size(1) // (self.groups + 2)
        q, k, v = qkv_BHTK.split([self.groups * kv_heads, kv_heads, kv_heads], 1)
        attended = self._attend(q, k, v).transpose(1, 2).flatten(2)
        x_BTD = x_BTD + self.out(attended)
        h = self.up(_normed(self.mlp_norm, x_BTD, self.plain))
        h = F.silu(h[..., : h.size(-1) // 2]) * h[..., h.size(-1) // 2 :] if self.gated else F.gelu(h)
        return x_BTD + self.down(h)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.flash:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def _normed(norm: nn.Module, x: Tensor, plain: bool = False) -> Tensor:
    """In the type of what comes in, as the runs' kernels do."""
    if plain:
        wide = x.float()
        return norm.weight.to(x.dtype) * (wide * wide.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()).to(x.dtype)  # type: ignore[operator,union-attr]
    return F.rms_norm(x, (x.size(-1),), norm.weight.to(x.dtype))  # type: ignore[arg-type]


class Decoder(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.embed = nn.Embedding(run.vocab_size, run.d_model)
        self.blocks = nn.ModuleList(Block(run) for _ in range(run.n_layers))
        self.norm = nn.RMSNorm(run.d_model)
        self.head = nn.Linear(run.d_model, run.vocab_size, bias=False)
        self.tied = run.tied
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        if torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(_normed(self.norm, x_BTD))


TENSOR_PLAN = {
    **{"embed": "embedding", "norm": "sequence", "head": "head"},
    **{f"blocks.*.{name}": "sequence" for name in ("attn_norm", "mlp_norm")},
    **{f"blocks.*.{name}": "colwise" for name in ("qkv", "up")},
    **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
}


class _FusedLoss(torch.autograd.Function):
    """Only the 16-bit logits are kept, and their gradient is written over them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.amax(1).float().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return logits.detach().mul_(1.0), None


class PublishedTask(Task):
    """A run's model and its loss."""

    unit, float_output = "tokens", False

    def __init__(self, run: Run) -> None:
        self.run, self.sequence_length = run, run.sequence

    def build_model(self) -> nn.Module:
        return Decoder(self.run)

    def train_data(self) -> Dataset[Any]:
        tokens = torch.zeros(8, self.sequence_length, dtype=torch.long)
        return TensorDataset(tokens, tokens)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0]).flatten(0, 1)
        split = torch.overrides.has_torch_function((logits,))  # over the vocabulary
        if self.run.loss == "float32":
            logits = logits.float()
        plain = split or self.run.loss == "float32"
        return (F.cross_entropy if plain else _FusedLoss.apply)(logits, batch[1].flatten())

    def items(self, batch: Any) -> int:
        return batch[1].numel()

    def heads(self) -> int:
        return self.run.n_kv_heads

    def tensor_plan(self, model: nn.Module) -> dict[str, str]:
        return TENSOR_PLAN


@functools.cache
def _reader(model: Run) -> Reader:
    return Reader(PublishedTask(model), sequence_parallel=bool(model.sequence_parallel))


MODEL = (
    *("d_model", "n_layers", "n_heads", "n_kv_heads", "d_hidden", "gated", "vocab_size", "tied", "attention"),
    *("sequence", "sequence_parallel", "loss"),
)
"""What a run's model depends on, and on whether its kernels are plain."""


def reader_of(run: Run) -> Reader:
    """The run's model, read once for all runs that differ in their layout alone."""
    others = {field.name: type(getattr(run, field.name))() for field in fields(Run) if field.name not in MODEL}
    return _reader(replace(run, **(others | {"kernels": "plain" if run.kernels == "plain" else ""})))
