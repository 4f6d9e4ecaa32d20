"""How much of its GPUs' peak a training uses: model FLOP/s utilization (MFU), and what is counted for it.

    MFU = samples/s · FLOPs of a sample / (GPUs · peak of one)          Chowdhery et al. 2022, appendix B
    FLOPs of a token = 6·N + 12·L·D·T                                   where the model is a transformer over tokens

N: all parameters but tables of embeddings, which are looked up and not multiplied (one that is the head's weight too
counts), k/E of a mixture's E experts, of which k compute for a token, and two thirds of what is frozen; L blocks of
width D; T tokens in a sequence. Forward is a third of it, backward two; attention counts whole, though a causal one
needs half; what activation checkpointing computes again does not count. Of any other model torch.utils.flop_counter
counts the products of a forward and backward on the meta device, with the same conventions: nothing is computed. The
peak is the datasheet's for dense products (cluster/hardware.yaml) at the precision that is trained in; of fp8, where
only the blocks' products are, bf16's, so that both stand side by side.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from app.data.loader import fetch, length, map_tensors, rows
from app.tasks.base import Task
from app.tasks.build import build_model
from app.training.job import Place
from strategies import registry
from strategies.blocks import find_blocks
from strategies.layout import Layout
from strategies.mixtures import find_mixtures
from strategies.one_process import worker_devices


def transformer_flops(parameters: int, layers: int, width: int, length: int) -> float:
    """FLOPs of one token, forward and backward. parameters: N above."""
    return 6.0 * parameters + 12.0 * layers * width * length


def sample_flops(task: Task) -> float | None:
    """FLOPs of one sample, forward and backward; None where the model's code cannot run without numbers."""
    with contextlib.suppress(Exception):  # whatever a model's own code does with values
        with torch.device("meta"):
            model = build_model(task)
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        length: int | None = getattr(task, "sequence_length", None)
        if task.heads() and length and tables:
            blocks = len(find_blocks(model, task.blocks(model)))
            return length * transformer_flops(multiplied(model), blocks, tables[0].embedding_dim, length)
        return _counted(task, model)
    return None


def multiplied(model: nn.Module) -> int:
    """N above."""
    owners = [(name.rpartition(".")[0], p) for name, p in model.named_parameters(remove_duplicate=False)]
    used = {id(p): p for owner, p in owners if not isinstance(model.get_submodule(owner), nn.Embedding)}
    numbers = {key: p.numel() if p.requires_grad else p.numel() * 2 // 3 for key, p in used.items()}
    for found in find_mixtures(model):
        numbers |= {id(p): p.numel() * found.top_k // found.count for p in found.experts.parameters(recurse=False)}
    return sum(numbers.values())


def _counted(task: Task, model: nn.Module) -> float:
    data = task.train_data()
    batch = fetch(data, [(i % (length(data) or 2), i) for i in range(2)])
    with FlopCounterMode(display=False) as counter:
        task.loss(model.train(), map_tensors(lambda t: t.to("meta"), batch)).backward()
    return counter.get_total_flops() / rows(batch)


@dataclass(frozen=True)
class Utilization:
    """flops: of one sample. peak: FLOP/s of one GPU."""

    flops: float
    peak: float
    gpus: int

    @classmethod
    def of(cls, task: Task, layout: Layout, place: Place, precision: str) -> Utilization | None:
        """None where the device is no GPU, or one whose peak is not known, or FLOPs cannot be counted. All GPUs are
        taken to be like this one."""
        if place.device.type != "cuda" or place.rank:  # rank 0 tells
            return None
        peak = peak_flops(torch.cuda.get_device_name(place.device), precision)
        flops = sample_flops(task) if peak else None
        several = any(record.several_devices for record in registry.records(layout.name))
        gpus = place.world_size * (len(worker_devices(place.device)) if several else 1)
        return cls(flops, peak, gpus) if peak and flops else None

    def mfu(self, samples_per_second: float) -> float:
        """The share of the peak, 0 to 1."""
        return samples_per_second * self.flops / (self.gpus * self.peak)


def peak_flops(name: str, precision: str) -> float | None:
    """FLOP/s of a GPU of this name, as its driver calls it; None where the catalogue lacks it."""
    from cluster.hardware import HardwareError, gpu  # not at the top: it needs PyYAML

    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    try:
        return gpu(name).rate("bf16" if precision == "fp8" else precision)
    except HardwareError:
        return None
