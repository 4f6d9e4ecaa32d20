"""Frozen linear layers in 4 or 8 bits beside adapters (QLoRA: Dettmers et al. 2023, 2305.14314).

    nf4     blocks of 64 weights share a scale, and each weight is one of 16 numbers that are spaced
            as a normal distribution is; scales are kept in 8 bits: 0.52 bytes a weight
    int8    each row of the matrix has a scale: 1 byte a weight, and 4 a row

torchao rounds (https://docs.pytorch.org/ao), on any device. Forward and backward each compute the
weight of one layer again, in float32, and multiply it in the type of products; it is not kept.

Layers with adapters are quantized, or all linear layers but the last, as bitsandbytes does
(`task_args.lora.quantize_layers`).

All that torchao keeps of a layer is one parameter of bytes. So every layout treats it as it does
any frozen parameter: ddp copies it, sharded ones gather whole bytes (precision casts no integers),
pipelines place it, and a checkpoint has it once. Under tensor parallelism every worker has it whole
and computes the layer on all of its input.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.errors import UserError
from app.models.linear import product_dtype
from strategies.mixtures import find_mixtures

METHODS = ("nf4", "int8")
LAYERS = ("adapted", "all")
"""Which linear layers are quantized: those with adapters, or all but the last."""
BLOCK = 64
"""Weights that share a scale in nf4."""
SCALES_BLOCK = 256
"""Scales that share a scale of their own, if they can be divided into as many."""
LEVELS = 16
FLOAT_BYTES = 4


@contextlib.contextmanager
def without_warnings_of_torchao() -> Iterator[None]:
    """Import torchao, or what imports it, without warnings that a user can do nothing about.

    It warns of kernels that it was not built for and that are not used here, and torch warns of how
    torchao registers its enums.
    """
    loggers = [logging.getLogger(name) for name in ("torchao", "torch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def library() -> Any:
    """torchao's quantization.

    Raises:
        UserError: It is not installed.
    """
    try:
        with without_warnings_of_torchao():
            import torchao.quantization
    except ImportError as error:
        raise UserError(
            "task_args.lora.quantize needs the package torchao, which is not installed: "
            "run pip install 'trireme[finetuning]'"
        ) from error
    return torchao.quantization


def quantize_layers(model: nn.Module, method: str, layers: str = "adapted") -> None:
    """Replace, in place, linear layers of a model with adapters by quantized ones.

    Args:
        model: A model with adapters, for real or on the meta device.
        method: One of `METHODS`.
        layers: One of `LAYERS`.

    Raises:
        UserError: No layer can be quantized, or all are to be and the model has experts, which are
            no linear layers.
    """
    if layers == "all":
        _require_no_experts(model)
    slots = [slot for slot in _linear_slots(model, layers) if can_be_quantized(slot[2], method)]
    if not slots:
        raise UserError(
            f"task_args.lora.quantize is {method}, but no linear layer with adapters can be "
            f"quantized (nf4 takes those whose size {BLOCK} divides): leave it out"
        )
    for owner, name, layer in slots:
        setattr(owner, name, QuantizedLinear(cast("nn.Linear", layer), method))


def restore_layers(model: nn.Module) -> None:
    """Replace, in place, quantized layers by linear ones of the same numbers, to be merged."""
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if isinstance(layer, QuantizedLinear):
                setattr(owner, name, layer.restored())


def _linear_slots(model: nn.Module, layers: str) -> list[tuple[nn.Module, str, nn.Module]]:
    """(owner, name in it, layer) of the layers that are to be quantized, if they can be.

    `original_module` is what peft keeps beside a head that it trains; nothing computes with it.
    """
    last = getattr(model, "get_output_embeddings", lambda: None)()
    return [
        (owner, name, layer)
        for owner in model.modules()
        for name, layer in owner.named_children()
        if name == "base_layer"
        or (layers == "all" and layer is not last and name != "original_module")
    ]


def _require_no_experts(model: nn.Module) -> None:
    """Raises UserError if a model has experts, whose weights are no linear layers."""
    for mixture in find_mixtures(model):
        raise UserError(
            f"task_args.lora.quantize_layers is all, but the experts of {mixture.name} are no "
            "linear layers, which cannot be quantized: write adapted"
        )


def can_be_quantized(layer: nn.Module, method: str) -> bool:
    """Whether a layer is a plain linear one, of a size that the method takes."""
    if type(layer) is not nn.Linear or layer.weight.requires_grad:
        return False
    return method == "int8" or layer.weight.numel() % BLOCK == 0


class QuantizedLinear(nn.Module):
    """A frozen linear layer, (…, in) → (…, out), whose weight is kept in 4 or 8 bits.

    Args:
        layer: The layer in float32; on the meta device only its shape counts.
        method: One of `METHODS`.
    """

    def __init__(self, layer: nn.Linear, method: str) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.method = method
        self.bias = layer.bias
        packed = _pack(layer.weight.detach(), method)
        self.packed = nn.Parameter(packed, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The weight as products use it, (out, in) float32."""
        return self.unpack(self.packed)

    @property
    def multiplied_numel(self) -> int:
        """The number of weights, which is not that of the bytes."""
        return self.in_features * self.out_features

    def unpack(self, packed: Tensor) -> Tensor:
        """The weight that bytes stand for, (out, in) float32."""
        unpack = _unpack_nf4 if self.method == "nf4" else _unpack_int8
        return unpack(packed, self.out_features, self.in_features)

    def restored(self) -> nn.Linear:
        """A linear layer of the same numbers."""
        layer = nn.Linear(
            self.in_features, self.out_features, bias=self.bias is not None, device="meta"
        )
        layer.weight = nn.Parameter(self.weight.detach(), requires_grad=False)
        layer.bias = self.bias
        return layer

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        dtype = product_dtype(x)
        y = _Product.apply(x.to(dtype), self.packed, self.unpack)
        return y if self.bias is None else y + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.method}"


class _Product(torch.autograd.Function):
    """x·Wᵀ, whose backward unpacks W again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, unpack: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.unpack = unpack
        return F.linear(x, unpack(packed).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ ctx.unpack(packed).to(gradient.dtype), None, None


# --- bytes ----------------------------------------------------------------------------------------
#
#     nf4     the 16 levels, the mean scale, a scale of each block of scales (all float32); the
#             scales (int8); two weights a byte
#     int8    a scale of each row (float32); a weight a byte


def _pack(weight: Tensor, method: str) -> Tensor:
    """The bytes of a weight (out, in) float32."""
    size = _packed_size(weight.size(0), weight.size(1), method)
    if weight.is_meta:
        return torch.empty(size, dtype=torch.uint8, device="meta")
    if method == "nf4":
        blocks = _scales_block(weight.numel())
        nf4 = library().to_nf4(weight.float().contiguous(), BLOCK, blocks)
        names = ("nf4", "scaler_mean", "quantization_factor", "quantized_scalers", "quantized_data")
        parts = [getattr(nf4, name) for name in names]
    else:
        layer = nn.Linear(weight.size(1), weight.size(0), bias=False, device="meta")
        layer.weight = nn.Parameter(weight.float().contiguous(), requires_grad=False)
        library().quantize_(layer, library().Int8WeightOnlyConfig(version=2))
        int8: Any = layer.weight
        parts = [int8.scale, int8.qdata]
    packed = torch.cat([_bytes(part.detach()) for part in parts])
    assert packed.numel() == size, "torchao keeps another number of bytes"
    return packed


def _bytes(part: Tensor) -> Tensor:
    flat = torch.empty(part.numel(), dtype=part.dtype, device=part.device)
    return flat.copy_(part.flatten()).view(torch.uint8)


def _packed_size(rows: int, columns: int, method: str) -> int:
    numel = rows * columns
    if method == "int8":
        return FLOAT_BYTES * rows + numel
    scales = numel // BLOCK
    floats = LEVELS + 1 + scales // _scales_block(numel)
    return FLOAT_BYTES * floats + scales + numel // 2


def _scales_block(numel: int) -> int:
    """How many scales share one: the largest power of two up to `SCALES_BLOCK` that divides."""
    block = SCALES_BLOCK
    while (numel // BLOCK) % block:
        block //= 2
    return block


def _unpack_nf4(packed: Tensor, rows: int, columns: int) -> Tensor:
    numel = rows * columns
    scale_count = numel // BLOCK
    float_count = LEVELS + 1 + scale_count // _scales_block(numel)
    floats = packed[: FLOAT_BYTES * float_count].view(torch.float32)
    levels, mean, factors = floats.split([LEVELS, 1, float_count - LEVELS - 1])
    scales8, pairs = packed[FLOAT_BYTES * float_count :].split([scale_count, numel // 2])
    scales = scales8.view(torch.int8).view(len(factors), -1) / factors.unsqueeze(-1) + mean
    numbers = torch.stack([pairs >> 4, pairs & 0b1111], -1).view(scale_count, BLOCK)
    values = levels.index_select(0, numbers.flatten().int()).view(scale_count, BLOCK)
    return (values * scales.view(-1, 1)).view(rows, columns)


def _unpack_int8(packed: Tensor, rows: int, columns: int) -> Tensor:
    scales, numbers = packed.split([FLOAT_BYTES * rows, rows * columns])
    weight = numbers.view(torch.int8).view(rows, columns).float()
    return weight * scales.view(torch.float32).unsqueeze(-1)
