"""Rounding to 16 bits at random, right in the mean, and the same under every layout.

A bfloat16 number has 8 significant bits, so that a step smaller than 2⁻⁹ of a weight is lost when
it is rounded to the nearest one. Here a number becomes the one above or the one below it in
magnitude, each the likelier the nearer it is,

    P(away from zero) = (|x| - below) / (above - below)        so E[rounded(x)] = x

and what is too small in one step has its effect over many (Gupta et al. 2015, 1502.02551; for
bfloat16 Zamirai et al. 2020, 2010.06192). A number that has 16 bits already stays as it is. As in
torchao, a float32 whose lower 16 bits f are to go gets a random number of 16 bits added, and then
loses them: it is carried into the upper bits with probability f / 2¹⁶.

The random bits of a number are a hash of

    (seed, name of the parameter, which of its tensors, step, place in the whole tensor)

and not of a generator's state. So a shard is rounded as the whole is, on any number of workers, and
a run that is resumed goes on to the bit. The hash is that of Wellons
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
