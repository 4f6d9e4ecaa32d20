"""How much of the peak of its GPUs a training uses: model FLOP/s utilization (MFU).

    MFU = samples/s · FLOPs of a sample / (GPUs · peak of one GPU)

Chowdhery et al. 2022, appendix B. If the model is a transformer over tokens,

    FLOPs of a token = 6·N + 12·L·D·T

with L blocks of width D and T tokens in a sequence. N is the number of parameters, except that

- tables of embeddings do not count, since they are looked up and not multiplied, unless the table
  is also the weight of the head;
- of a mixture's E experts, of which k compute for a token, k/E count;
- of frozen parameters two thirds count.

Forward is a third of the FLOPs, and backward two thirds. Attention counts in full, though causal
attention needs half of it. What activation checkpointing computes again does not count.

For any other model, torch.utils.flop_counter counts the products of a forward and a backward on the
meta device, with the same conventions; nothing is computed.

The peak is that of the GPU's datasheet for dense products (cluster/hardware.yaml), in the precision
of the training. For fp8, in which only the products of the blocks are computed, it is the peak of
bf16, so that the two can be compared.
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
    """FLOPs of one token, forward and backward.

    Args:
        parameters: N above.
        layers: L above.
        width: D above.
        length: T above.
    """
    return 6.0 * parameters + 12.0 * layers * width * length


def sample_flops(task: Task) -> float | None:
    """FLOPs of one sample, forward and backward; None if the model's code needs real numbers."""
    with contextlib.suppress(Exception):  # a model's own code may raise anything on meta
        with torch.device("meta"):
            model = build_model(task)
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        sequence_length: int | None = getattr(task, "sequence_length", None)
        if not (task.heads() and sequence_length and tables):
            return _count_flops(task, model)
        token_flops = transformer_flops(
            parameters=multiplied_parameters(model),
            layers=len(find_blocks(model, task.blocks(model))),
            width=tables[0].embedding_dim,
            length=sequence_length,
        )
        return (task.tokens_per_sample or sequence_length) * token_flops
    return None


def multiplied_parameters(model: nn.Module) -> int:
    """N above."""
    multiplied: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(owner, nn.Embedding):
            multiplied[id(parameter)] = parameter
    counts = {key: parameter.numel() for key, parameter in multiplied.items()}
    for owner in model.modules():
        multiplied_numel = getattr(owner, "multiplied_numel", None)
        if isinstance(multiplied_numel, int):  # its parameter is not the numbers, but their bytes
            counts |= {
                id(p): multiplied_numel
                for p in owner.parameters(recurse=False)
                if not p.is_floating_point() and not p.is_complex()
            }
    for mixture in find_mixtures(model):
        for parameter in mixture.experts.parameters(recurse=False):
            counts[id(parameter)] = parameter.numel() * mixture.top_k // mixture.count
    for key, parameter in multiplied.items():
        if not parameter.requires_grad:
            counts[key] = counts[key] * 2 // 3
    return sum(counts.values())


def _count_flops(task: Task, model: nn.Module) -> float:
    data = task.train_data()
    samples = length(data) or 2  # a stream has no length
    batch = fetch(data, [(index % samples, index) for index in range(2)])
    on_meta = map_tensors(lambda tensor: tensor.to("meta"), batch)
    with FlopCounterMode(display=False) as counter:
        task.loss(model, on_meta).backward()
    return counter.get_total_flops() / rows(batch)


@dataclass(frozen=True)
class Utilization:
    """Computes the utilization of the GPUs from the speed.

    Args:
        flops: FLOPs of one sample.
        peak: FLOP/s of one GPU.
        gpus: The number of GPUs.
    """

    flops: float
    peak: float
    gpus: int

    @classmethod
    def of(cls, task: Task, layout: Layout, place: Place, *, precision: str) -> Utilization | None:
        """The utilization of a training; all GPUs are taken to be like this one.

        Args:
            task: What is trained.
            layout: How.
            place: This rank's place.
            precision: Of the products.

        Returns:
            None on ranks other than 0, on a CPU, if the GPU's peak is not known, and if the FLOPs
            cannot be counted.
        """
        if place.device.type != "cuda" or place.rank != 0:
            return None
        peak = peak_flops(torch.cuda.get_device_name(place.device), precision)
        flops = sample_flops(task) if peak else None
        if not peak or not flops:
            return None
        gpus = place.world_size
        if any(record.several_devices for record in registry.records(layout.name)):
            gpus *= len(worker_devices(place.device))
        return cls(flops, peak, gpus)

    def mfu(self, samples_per_second: float) -> float:
        """The share of the peak, 0 to 1."""
        return samples_per_second * self.flops / (self.gpus * self.peak)


def peak_flops(name: str, precision: str) -> float | None:
    """FLOP/s of a GPU.

    Args:
        name: As its driver calls it.
        precision: fp32, bf16, fp16 or fp8.

    Returns:
        None if cluster/hardware.yaml does not have the GPU.
    """
    from cluster.hardware import HardwareError, find_gpu  # needs PyYAML

    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    try:
        return find_gpu(name).rate("bf16" if precision == "fp8" else precision)
    except HardwareError:
        return None
