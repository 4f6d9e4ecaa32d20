"""AdamW whose moments, or whose weights, are kept in fewer bits than 32.

Every step computes in float32; only what is kept until the next step is rounded. This file keeps
moments in float32 or bfloat16, and eight_bit.py in 8 bits. Weights are float32, or bfloat16
(train.weight_dtype). Rounding to bfloat16 is stochastic (stochastic.py). Rounding to the nearest
number would lose most steps of the weights, and of the second moments, which change by only
1 - beta2 of themselves per step.

The arithmetic is that of `torchao.optim`'s AdamW with `bf16_stochastic_round`. That one, however,
rounds moments to the nearest number, and weights by a generator whose numbers depend on the number
of workers.

    bytes a weight          weights and gradients in float32    in bfloat16
    moments in float32      16                                  12
    bfloat16                12                                  8
    8 bits                  10                                  6
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from app.training.stochastic import coordinates, random_bits, rounded, salt
from app.training.whole_matrix import ByParameter
from strategies.grad_sync import local

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHT = "weight"
SMALLEST_SCALE = 1e-12
PIECE = 2**24
"""Elements that are updated at once, which bounds the memory of what is computed in float32."""


class NarrowAdamW(ByParameter):
    """AdamW over parameters that may be split, with few bits; workers exchange nothing.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: A step shrinks weights by the rate times this.
        state_dtype: The type of the moments: float32 or bfloat16.
        names: The parameters' names in the whole model, on which the rounding depends.
        seed: Of the rounding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype = torch.float32,
        names: Mapping[Tensor, str] | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.state_dtype = state_dtype
        self._names = names or {}
        self._seed = seed
        self._salts: dict[Tensor, dict[str, Tensor]] = {}

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state |= self._zeros(parameter)
        state["step"] += 1
        moments = {name: as_real(local(value)) for name, value in state.items() if name != "step"}
        own_part = as_real(local(parameter.detach()))
        own_gradient = as_real(local(gradient))
        levels = self._levels(own_part.device)
        salts = self._salts_of(parameter, own_part, moments)
        places = coordinates(parameter) if salts else []
        update = _compiled_update() if own_part.device.type == "cuda" else update_piece
        for rows in _pieces(own_part):
            update(
                own_part[rows],
                own_gradient[rows],
                {name: moment[rows] for name, moment in moments.items()},
                levels=levels,
                salts=salts,
                places=[places[0][rows], *places[1:]] if places else [],
                step=state["step"],
                # A number would be compiled into the code, and compiled again when it changes.
                lr=torch.tensor(group["lr"], dtype=torch.float32),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )

    def _zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """The moments of a parameter before its first step."""
        dtype = parameter.dtype if parameter.is_complex() else self.state_dtype
        return {name: torch.zeros_like(parameter, dtype=dtype) for name in MOMENTS}

    def _levels(self, device: torch.device) -> dict[str, Tensor]:
        """The values that the codes of moments in 8 bits stand for."""
        return {}

    def _salts_of(
        self, parameter: Tensor, own_part: Tensor, moments: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """For each of a parameter's tensors that is rounded at random, what decides the bits."""
        if parameter not in self._salts:
            name = self._names.get(parameter, "")
            tensors = {WEIGHT: own_part, **moments}
            self._salts[parameter] = {
                key: torch.tensor(salt(self._seed, name, key), dtype=torch.int32).to(
                    own_part.device
                )
                for key, tensor in tensors.items()
                if tensor.dtype == torch.bfloat16
            }
        return self._salts[parameter]


# --- a step ---------------------------------------------------------------------------------------


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of numbers, which are updated one by one."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _pieces(tensor: Tensor) -> list[Any]:
    """Indices of its rows, a few at a time."""
    if tensor.dim() == 0:
        return [...]
    rows = max(1, PIECE // max(1, tensor[:1].numel()))
    return [slice(start, start + rows) for start in range(0, tensor.size(0), rows)]


def update_piece(
    parameter: Tensor,
    gradient: Tensor,
    moments: dict[str, Tensor],
    *,
    levels: dict[str, Tensor],
    salts: dict[str, Tensor],
    places: list[Tensor],
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
        levels: The values that the codes of each moment stand for.
        salts: For the weight and the moments that have bfloat16, what decides the random bits.
        places: Where the rows are in the whole parameter, if there are salts.
        step: The number of the step, 0-dimensional.
        lr: The learning rate, 0-dimensional.
        beta1: The decay rate of the first moment.
        beta2: That of the second.
        eps: Added to the root of the second moment.
        weight_decay: The weights shrink by the rate times this.
    """
    gradient = gradient.float()
    value = parameter.float()
    value = value - lr * weight_decay * value
    mean = _read(moments, "exp_avg", levels).lerp(gradient, 1 - beta1)
    square = _read(moments, "exp_avg_sq", levels).lerp(gradient.square(), 1 - beta2)
    bias1 = 1 - beta1**step
    bias2 = 1 - beta2**step
    denominator = square.sqrt() / bias2.sqrt() + eps
    value = value - lr * (mean / bias1) / denominator
    targets = {WEIGHT: parameter, **{name: moments[name] for name in MOMENTS}}
    results = {WEIGHT: value, "exp_avg": mean, "exp_avg_sq": square}
    for name, result in results.items():
        if name in salts:
            result = rounded(result, random_bits(salts[name], step, places))
        if name in levels and f"{name}_scale" in moments:
            write_codes(moments, name, result, levels[name])
        else:
            targets[name].copy_(result)


@functools.cache
def _compiled_update() -> Callable[..., None]:
    """The step as few kernels, which read and write each number about once.

    torch compiles it once for each kind of shape. If there are more kinds than its limit for one
    function, it runs the others uncompiled.
    """
    return torch.compile(update_piece, dynamic=True)


def _read(moments: dict[str, Tensor], name: str, levels: dict[str, Tensor]) -> Tensor:
    """A moment in float32."""
    moment = moments[name]
    scale = moments.get(f"{name}_scale")
    if scale is None:
        return moment.float()
    blocks = levels[name][moment.int()].reshape(*scale.shape, -1) * scale.unsqueeze(-1)
    return blocks.reshape(moment.shape)


def write_codes(moments: dict[str, Tensor], name: str, value: Tensor, numbers: Tensor) -> None:
    """Store a moment in 8 bits: the code of the nearest level for each number.

    Args:
        moments: The codes of the moment, and the scales of its blocks; both are written.
        name: The moment.
        value: The moment in float32.
        numbers: The 256 levels, in ascending order.
    """
    scale = moments[f"{name}_scale"]
    blocks = value.reshape(*scale.shape, -1)
    largest = blocks.abs().amax(-1).clip(SMALLEST_SCALE)
    blocks = blocks / largest.unsqueeze(-1)
    below = (torch.bucketize(blocks, numbers, out_int32=True, right=True) - 1).clip(min=0)
    above = (below + 1).clip(max=len(numbers) - 1)
    distance = numbers[above] - numbers[below]
    codes = torch.where(blocks - numbers[below] >= distance * 0.5, above, below)
    scale.copy_(largest)
    moments[name].copy_(codes.reshape(value.shape))
