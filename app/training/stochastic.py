"""Stochastic rounding to bfloat16: right on average, and the same under every layout.

A bfloat16 number has 8 significant bits, so a step smaller than 2⁻⁹ of a weight is lost if the
result is rounded to the nearest number. Here it is rounded at random to the bfloat16 number above
or below it in magnitude, to the nearer one with the higher probability,

    P(away from zero) = (|x| - below) / (above - below)        so E[rounded(x)] = x

and steps that are too small by themselves have their effect over many (Gupta et al. 2015, arXiv
1502.02551; for bfloat16 Zamirai et al. 2020, arXiv 2010.06192). A number that is exact in bfloat16
stays as it is. The method is torchao's: add a random number of 16 bits to the bits of the float32,
then clear the lower 16 bits. If these were f, the sum carries into the upper bits with probability
f / 2¹⁶.

The random bits of a number are a hash of

    (seed, name of the parameter, which of its tensors, step, place in the whole tensor)

and do not depend on a generator's state. So a shard is rounded as the whole is, on any number of
workers, and a run that is resumed continues to the bit. The hash is that of Wellons
(https://github.com/skeeto/hash-prospector), once for each dimension of the tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from strategies.state import shard_bounds

LOWER_BITS = 0xFFFF
UPPER_BITS = -0x10000
"""Of an int32."""


def salt(seed: int, name: str, tensor: str) -> int:
    """A number of 32 bits, with a sign, for the tensors of a parameter.

    Args:
        seed: Of the run.
        name: The parameter's, in the whole model.
        tensor: Which of its tensors: the weight or a moment.
    """
    digest = hashlib.sha256(f"{seed}\0{name}\0{tensor}".encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def coordinates(parameter: Tensor) -> list[Tensor]:
    """The place of what this rank has of a parameter in the whole of it.

    Args:
        parameter: The parameter, which may be split.

    Returns:
        The indices of each dimension, int32 (size,).
    """
    bounds = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        bounds = shard_bounds(parameter)
        parameter = parameter.to_local()
    return [
        torch.arange(first, first + length, dtype=torch.int32, device=parameter.device)
        for first, length in bounds
    ]


def random_bits(salt: Tensor, step: Tensor, places: Sequence[Tensor]) -> Tensor:
    """32 random bits for each number of a tensor, as int32.

    Args:
        salt: From `salt`, int32, 0-dimensional.
        step: The number of the step, 0-dimensional.
        places: From `coordinates`.
    """
    bits = _mixed(salt ^ step.to(torch.int32))
    for place in places:
        bits = _mixed(bits.unsqueeze(-1) ^ place)
    return bits


def _mixed(bits: Tensor) -> Tensor:
    """A permutation of the numbers of 32 bits in which each bit depends on all (lowbias32)."""
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15 & 0x1FFFF)) * -0x7B935975  # 0x846CA68B, as an int32
    return bits ^ (bits >> 16 & 0xFFFF)


def rounded(value: Tensor, bits: Tensor) -> Tensor:
    """A tensor in bfloat16, each number rounded up or down; inf and nan stay what they are.

    Args:
        value: float32.
        bits: Random bits for each number, int32, of which the lower 16 are used.
    """
    moved = ((value.view(torch.int32) + (bits & LOWER_BITS)) & UPPER_BITS).view(torch.float32)
    return torch.where(value.isfinite(), moved, value).to(torch.bfloat16)
