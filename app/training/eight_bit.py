"""AdamW whose two moments are kept in 8 bits (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861).

256 numbers that follow one another in a row of a matrix share a scale, the largest of them (fewer
where 256 does not divide the row). Each is kept as the nearest of 256 numbers between -1 and 1 (0
and 1 for squares), which lie the closer together the smaller they are. So a parameter has 2.03
bytes of state instead of 8. Every step computes in float32: only what waits for the next step is
rounded.

What `torchao.optim.AdamW8bit` computes on one device, this computes to the bit where blocks are the
same (a test compares them). It is not used itself, because its blocks run on from row to row of
what a *worker* holds, and small shards are not rounded: so another number of workers would train
another model, and could not read the state. Here blocks are parts of rows of the whole matrix, and
the state is made of ordinary tensors that are split as the parameter is. So every layout rounds
alike, and reads every other's checkpoints.

Left in float32 are parameters of one dimension, and those whose rows 32 does not divide. A
convolution's row is what belongs to one output channel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.errors import UserError
from app.training.whole_matrix import ByParameter
from strategies.costs import EIGHT_BIT_BLOCK, eight_bit_block, row_length
from strategies.grad_sync import local

MOMENTS = ("exp_avg", "exp_avg_sq")
SMALLEST_SCALE = 1e-12
EXPONENTS = 7
"""Decades over which the numbers of 8 bits are spread."""
PIECE = 2**24
"""Numbers that are updated at once, which bounds the memory of what is computed in float32."""


class AdamW8bit(ByParameter):
    """AdamW with moments in 8 bits, over parameters that may be split; workers exchange nothing.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Times the rate, what a step shrinks weights by.
        block_size: The most numbers of a row that share a scale.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block_size: int = EIGHT_BIT_BLOCK,
    ) -> None:
        if not (isinstance(block_size, int) and block_size > 0):
            raise ValueError(f"block_size is {block_size}, but it must be a number of weights")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.block_size = block_size
        for group in self.param_groups:
            for parameter in group["params"]:
                self._require_whole_blocks(parameter)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state |= self._zeros(parameter)
        state["step"] += 1
        moments = {name: _real(local(value)) for name, value in state.items() if name != "step"}
        own_part = _real(local(parameter.detach()))
        own_gradient = _real(local(gradient))
        levels = {name: _levels(name, own_part.device) for name in MOMENTS}
        update = _compiled_update() if own_part.device.type == "cuda" else _update_piece
        for rows in _pieces(own_part):
            update(
                own_part[rows],
                own_gradient[rows],
                {name: moment[rows] for name, moment in moments.items()},
                levels=levels,
                step=state["step"],
                # A number would be compiled into the code, and compiled again when it changes.
                lr=torch.tensor(group["lr"], dtype=torch.float32),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )

    # --- state ------------------------------------------------------------------------------------

    def _zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """The moments of a parameter before its first step."""
        moments: dict[str, Tensor] = {}
        for name in MOMENTS:
            if self._block(parameter):
                moments[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                moments[f"{name}_scale"] = self._zero_scales(parameter)
            else:
                dtype = parameter.dtype if parameter.is_complex() else torch.float32
                moments[name] = torch.zeros_like(parameter, dtype=dtype)
        return moments

    def _block(self, parameter: Tensor) -> int:
        """How many numbers share a scale; 0: the moments are in float32."""
        if not parameter.is_floating_point():
            return 0
        return eight_bit_block(tuple(parameter.shape), self.block_size)

    def _zero_scales(self, parameter: Tensor) -> Tensor:
        """A scale for each block, split as the parameter is."""
        block = self._block(parameter)
        own_part = local(parameter.detach())
        shape = _scale_shape(own_part, block)
        scales = torch.zeros(shape, dtype=torch.float32, device=own_part.device)
        if not isinstance(parameter, DTensor):
            return scales
        whole_shape = _scale_shape(parameter, block)
        distributed = DTensor.from_local(
            scales,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=torch.Size(whole_shape),
            stride=torch.empty(whole_shape, device="meta").stride(),
        )
        return distributed.to(parameter.device)  # if it is offloaded, its mesh is of other devices

    def _require_whole_blocks(self, parameter: Tensor) -> None:
        """Check that no block is on several workers.

        Raises:
            UserError: One is.
        """
        block = self._block(parameter)
        if not (isinstance(parameter, DTensor) and block):
            return
        ways = 1
        for mesh_dim, placement in enumerate(parameter.placements):
            dim = getattr(placement, "dim", None)
            if dim is not None and dim >= (1 if parameter.dim() > 3 else parameter.dim() - 1):
                ways *= parameter.device_mesh.size(mesh_dim)
        shape = tuple(parameter.shape)
        length = row_length(shape)
        if length % (ways * block):
            fitting = math.gcd(length // ways, block)
            raise UserError(
                f"optimizer.name=adamw8bit rounds {block} numbers of a row together, but this "
                f"layout splits the rows of a parameter of {shape} into {ways} parts: write "
                f"optimizer.args={{block_size: {fitting}}}, or optimizer.name=adamw"
            )


# --- a step ---------------------------------------------------------------------------------------


def _scale_shape(parameter: Tensor, block: int) -> tuple[int, ...]:
    length = row_length(tuple(parameter.shape))
    rows = parameter.shape[:1] if parameter.dim() > 3 else parameter.shape[:-1]
    return (*rows, length // block)


def _real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of numbers, which are updated one by one."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _pieces(tensor: Tensor) -> list[Any]:
    """Indices of its rows, a few at a time."""
    if tensor.dim() == 0:
        return [...]
    rows = max(1, PIECE // max(1, tensor[:1].numel()))
    return [slice(start, start + rows) for start in range(0, tensor.size(0), rows)]


def _update_piece(
    parameter: Tensor,
    gradient: Tensor,
    moments: dict[str, Tensor],
    *,
    levels: dict[str, Tensor],
    step: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW's step of some rows of a parameter, in place.

    Args:
        parameter: The rows, (rows, …).
        gradient: Theirs.
        moments: exp_avg and exp_avg_sq, and where these have 8 bits exp_avg_scale and
            exp_avg_sq_scale, (rows, …, blocks).
        levels: The numbers that the 8 bits of each moment stand for.
        step: The number of the step, 0-dimensional.
        lr: The learning rate, 0-dimensional.
        beta1: The decay rate of the first moment.
        beta2: That of the second.
        eps: Added to the root of the second moment.
        weight_decay: Times the rate, what the weights shrink by.
    """
    gradient = gradient.float()
    value = parameter.float()
    value = value - lr * weight_decay * value
    mean = _read(moments, "exp_avg", levels).lerp(gradient, 1 - beta1)
    square = _read(moments, "exp_avg_sq", levels).lerp(gradient.square(), 1 - beta2)
    _write(moments, "exp_avg", mean, levels)
    _write(moments, "exp_avg_sq", square, levels)
    bias1 = 1 - beta1**step
    bias2 = 1 - beta2**step
    denominator = square.sqrt() / bias2.sqrt() + eps
    parameter.copy_(value - lr * (mean / bias1) / denominator)


@functools.cache
def _compiled_update() -> Callable[..., None]:
    """The step as few kernels, which read and write each number about once.

    It is compiled once for a kind of shape. Where there are more kinds than torch compiles a
    function for, it runs the others as they are.
    """
    return torch.compile(_update_piece, dynamic=True)


def _read(moments: dict[str, Tensor], name: str, levels: dict[str, Tensor]) -> Tensor:
    """A moment in float32."""
    moment = moments[name]
    scale = moments.get(f"{name}_scale")
    if scale is None:
        return moment
    blocks = levels[name][moment.int()].reshape(*scale.shape, -1) * scale.unsqueeze(-1)
    return blocks.reshape(moment.shape)


def _write(moments: dict[str, Tensor], name: str, value: Tensor, levels: dict[str, Tensor]) -> None:
    """Keep a moment; in 8 bits, the nearest of the numbers that there are."""
    scale = moments.get(f"{name}_scale")
    if scale is None:
        moments[name].copy_(value)
        return
    numbers = levels[name]
    blocks = value.reshape(*scale.shape, -1)
    largest = blocks.abs().amax(-1).clip(SMALLEST_SCALE)
    blocks = blocks / largest.unsqueeze(-1)
    below = (torch.bucketize(blocks, numbers, out_int32=True, right=True) - 1).clip(min=0)
    above = (below + 1).clip(max=len(numbers) - 1)
    distance = numbers[above] - numbers[below]
    codes = torch.where(blocks - numbers[below] >= distance * 0.5, above, below)
    scale.copy_(largest)
    moments[name].copy_(codes.reshape(value.shape))


@functools.cache
def _levels(name: str, device: torch.device) -> Tensor:
    """The 256 numbers of a moment, in order.

    In each decade below 1 there are twice as many as in the one below it, evenly spaced; and there
    are 0 and 1. The first moment has half of them on either side of 0.
    """
    is_signed = name == "exp_avg"
    levels = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        count = 2**exponent if is_signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1, count + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        decade = 10 ** (exponent - EXPONENTS + 1)
        levels += (decade * middles).tolist()
        if is_signed:
            levels += (-decade * middles).tolist()
    return torch.tensor(sorted(levels), dtype=torch.float32, device=device)
