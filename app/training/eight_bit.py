"""AdamW whose two moments are kept in 8 bits (Dettmers et al. 2021, https://arxiv.org/abs/2110.02861).

A row of a matrix is divided into blocks of 256 consecutive numbers (fewer where 256 does not divide
the row). The numbers of a block share a scale, the largest magnitude among them. Divided by it,
each is stored as the nearest of 256 levels between -1 and 1 (between 0 and 1 for squares), which
are closer together near 0. So a parameter has 2.03 bytes of state instead of 8. Every step computes
in float32; only what is kept until the next step is rounded.

On one device, and where blocks are the same, this computes what `torchao.optim.AdamW8bit` computes,
to the bit (a test compares them). torchao's class itself is not used, because its blocks continue
from row to row of what a *worker* holds, and small shards are not rounded. So with another number
of workers it would train another model, and could not load the state. Here blocks are parts of rows
of the whole matrix, and the state consists of ordinary tensors that are split as the parameter is.
So all layouts round in the same way, and can load each other's checkpoints.

The moments stay in float32 for parameters of one dimension, and for those whose rows 32 does not
divide. A row of a convolution is what belongs to one output channel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.errors import UserError
from app.training.narrow_adamw import MOMENTS, NarrowAdamW
from strategies.costs import EIGHT_BIT_BLOCK, eight_bit_block, row_length
from strategies.grad_sync import local

EXPONENTS = 7
"""Decades over which the 256 levels are spread."""


class AdamW8bit(NarrowAdamW):
    """AdamW with moments in 8 bits, over parameters that may be split; workers exchange nothing.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: A step shrinks weights by the rate times this.
        block_size: The most numbers of a row that share a scale.
        names: See NarrowAdamW.
        seed: See NarrowAdamW.
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
        names: Mapping[Tensor, str] | None = None,
        seed: int = 0,
    ) -> None:
        if not (isinstance(block_size, int) and block_size > 0):
            raise ValueError(f"block_size is {block_size}, but it must be a number of weights")
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            names=names,
            seed=seed,
        )
        self.block_size = block_size
        for group in self.param_groups:
            for parameter in group["params"]:
                self._require_whole_blocks(parameter)

    def _levels(self, device: torch.device) -> dict[str, Tensor]:
        return {name: _numbers(name, device) for name in MOMENTS}

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


def _scale_shape(parameter: Tensor, block: int) -> tuple[int, ...]:
    length = row_length(tuple(parameter.shape))
    rows = parameter.shape[:1] if parameter.dim() > 3 else parameter.shape[:-1]
    return (*rows, length // block)


@functools.cache
def _numbers(name: str, device: torch.device) -> Tensor:
    """The 256 levels of a moment, in ascending order.

    They are 0, 1, and evenly spaced numbers in each decade below 1, twice as many as in the decade
    below it. For the first moment, which has a sign, half of them are negative.
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
