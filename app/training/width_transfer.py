"""Rates and initial weights that hold for a model of any width (µP).

Yang et al. 2022, "Tensor Programs V", 2203.03466, table 3: the formulation without multipliers in
forward, so that the model itself does not change. A base model is trained as configured. In a wider
model each number below is that of the base model, times a power of how much fan_in and fan_out of
the tensor have grown (`in` and `out`):

    kind      what grows    initial std    Adam's rate    SGD's rate
    input     out           1              1              out
    hidden    in and out    1/√in          1/in           out/in
    output    in            1/in           1/in           1/in

Embeddings, biases and norms are of the kind input, and so is any other parameter that grows in one
dimension and is not the weight of a layer, such as a table of positions. A weight decay that acts
as rate · decay is divided by what the rate is multiplied by, so that it shrinks weights of every
width equally fast.

Muon's updates are orthogonal. What they add to an activation grows with the update's largest
singular value, which is to be √(fan_out / fan_in) (Yang, Simon and Bernstein 2023, 2310.17813).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from app.errors import UserError

KEY = "optimizer.width_transfer"
ADAPTIVE = (
    *("adadelta", "adagrad", "adam", "adamax", "adamw", "adamw8bit", "nadam", "radam", "rmsprop"),
)
"""Optimizers whose update does not change if all gradients are multiplied by a number."""
GRADIENT_DESCENT = ("asgd", "sgd")
NOT_TRANSFERABLE = {
    "adafactor": "whose steps already follow the size of the weights",
    "rprop": "which finds the step of each weight itself",
}
HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim", "kv_channels")
"""What models call the size of an attention head."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
INPUT = "input"
HIDDEN = "hidden"
OUTPUT = "output"
SAME = "same"


@dataclass(frozen=True, kw_only=True)
class Fans:
    """How many numbers a tensor combines for one output, and how many outputs it has.

    Args:
        shape: Of the tensor.
        fan_in: 1 for biases and norms.
        fan_out: Its outputs.
    """

    shape: tuple[int, ...]
    fan_in: int
    fan_out: int


@dataclass(frozen=True, kw_only=True)
class TensorWidth:
    """A tensor beside the one of the same name in the base model.

    Args:
        fans: Of the tensor.
        base: Of the base model's.
        initial: What the model's own initial weights are multiplied by.
    """

    fans: Fans
    base: Fans
    initial: float = 1.0

    @property
    def in_growth(self) -> float:
        """How much fan_in has grown."""
        return self.fans.fan_in / self.base.fan_in

    @property
    def out_growth(self) -> float:
        """How much fan_out has grown."""
        return self.fans.fan_out / self.base.fan_out

    @property
    def kind(self) -> str:
        """input, hidden or output; same if the tensor is of one size in both models."""
        if self.in_growth == 1:
            return SAME if self.out_growth == 1 else INPUT
        return OUTPUT if self.out_growth == 1 else HIDDEN

    @property
    def initial_growth(self) -> float:
        """What the standard deviation of the base model's initial weights is to be multiplied by.

        It is 1 for inputs, whose fan_in has not grown.
        """
        return self.in_growth ** (-1.0 if self.kind == OUTPUT else -0.5)


Widths = Mapping[str, TensorWidth]
"""By the name of the parameter; {} if nothing is transferred."""


# --- rates ----------------------------------------------------------------------------------------


def rate_factor(optimizer: str, width: TensorWidth, arguments: Mapping[str, Any]) -> float:
    """What the learning rate of a tensor is multiplied by.

    Args:
        optimizer: The name of the optimizer that updates it.
        width: The tensor.
        arguments: Of the optimizer.
    """
    if width.kind == SAME:
        return 1.0
    if optimizer in GRADIENT_DESCENT:
        return width.out_growth / width.in_growth
    if optimizer == "muon":
        adjustment = arguments.get("adjust_lr_fn")
        return _muon_rate(width.fans, adjustment) / _muon_rate(width.base, adjustment)
    return 1 / width.in_growth


def _muon_rate(fans: Fans, adjustment: str | None) -> float:
    """√(fan_out / fan_in), divided by what torch's Muon multiplies the rate of this shape by."""
    rows, columns = fans.shape
    adjusted = math.sqrt(max(1, rows / columns))
    if adjustment == "match_rms_adamw":
        adjusted = math.sqrt(max(rows, columns))  # times a number that is the same for all shapes
    return math.sqrt(fans.fan_out / fans.fan_in) / adjusted


def decays_with_rate(optimizer: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a step of the optimizer shrinks weights by rate · weight decay.

    Others add the decay to a gradient whose size they then ignore.

    Args:
        optimizer: Its name.
        arguments: Its arguments.
    """
    always = ("adamw", "adamw8bit", "muon", *GRADIENT_DESCENT)
    return optimizer in always or bool(arguments.get("decoupled_weight_decay"))


def require_rule(optimizer: str) -> None:
    """Check that there is a rule for how an optimizer's rate follows the width.

    Raises:
        UserError: There is none.
    """
    if optimizer in (*ADAPTIVE, *GRADIENT_DESCENT, "muon"):
        return
    reason = NOT_TRANSFERABLE.get(optimizer, "for which no rule between rate and width is known")
    raise UserError(f"{KEY} does not work with {optimizer}, {reason}: use adamw, sgd or muon")


# --- initial weights ------------------------------------------------------------------------------


@torch.no_grad()
def scale_initial_weights(model: nn.Module, widths: Widths) -> None:
    """Multiply a new model's weights by `TensorWidth.initial`, in place."""
    for name, parameter in model.named_parameters():
        width = widths.get(name)
        if width is not None and width.initial != 1:
            parameter.mul_(width.initial)


# --- a model beside its base ----------------------------------------------------------------------


def compare(model: nn.Module, base: nn.Module) -> dict[str, TensorWidth]:
    """Each parameter of a model beside the base model's, by name. Both may be on meta.

    Raises:
        UserError: Rates do not transfer between the two models.
    """
    _require_same_names(model, base)
    _require_same_heads(model, base)
    base_parameters = dict(base.named_parameters(remove_duplicate=False))
    widths: dict[str, TensorWidth] = {}
    first_name: dict[Tensor, str] = {}
    for name, owner, parameter in _owned_parameters(model):
        base_shape = tuple(base_parameters[name].shape)
        shape = tuple(parameter.shape)
        if len(shape) != len(base_shape):
            raise UserError(
                f"{KEY}: {name} has the shape {shape}, but {base_shape} in the base model"
            )
        width = _width(owner, shape, base_shape)
        other = first_name.setdefault(parameter, name)
        if other != name and widths[other].kind != width.kind:
            raise UserError(
                f"{KEY}: {other} and {name} are one tensor, which as {widths[other].kind} and as "
                f"{width.kind} would need two rates: untie them"
            )
        if other == name:
            widths[name] = width
    if all(width.kind == SAME for width in widths.values()):
        raise UserError(
            f"{KEY}.base changes the size of no parameter: "
            "write the arguments that decide the width, such as {d_model: 64}"
        )
    return widths


def _require_same_names(model: nn.Module, base: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    base_names = [name for name, _ in base.named_parameters(remove_duplicate=False)]
    for name in names:
        if name not in base_names:
            raise UserError(
                f"{KEY}.base makes a model without the parameter {name}: it may change the width, "
                "but not the number of layers nor their kind"
            )
    for name in base_names:
        if name not in names:
            raise UserError(
                f"{KEY}.base makes a model with the parameter {name}, which the model itself does "
                "not have: it may change the width, but not the number of layers nor their kind"
            )


def _require_same_heads(model: nn.Module, base: nn.Module) -> None:
    """Check that attention heads have one size.

    Scores are divided by the square root of the size. If the size grew with the width, they would
    have to be divided by the size itself.
    """
    base_modules = dict(base.named_modules())
    for name, module in model.named_modules():
        for attribute in HEAD_DIMS:
            size = getattr(module, attribute, None)
            base_size = getattr(base_modules.get(name), attribute, None)
            if isinstance(size, int) and isinstance(base_size, int) and size != base_size:
                raise UserError(
                    f"{KEY}.base makes attention heads of size {base_size}, the model has ones of "
                    f"{size}: let the number of heads grow with the width, and write that of the "
                    "base model into base too"
                )


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str], Tensor]]:
    """Each parameter under all its names, with its module and its name there."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            yield name, (module, attribute), parameter


def _width(
    owner: tuple[nn.Module, str], shape: tuple[int, ...], base_shape: tuple[int, ...]
) -> TensorWidth:
    """A tensor beside the base model's.

    Args:
        owner: Its module, and its name there.
        shape: Of the tensor.
        base_shape: Of the base model's.
    """
    dimensions = _fan_dimensions(*owner, shape)
    if dimensions is None:
        grown = [i for i, size in enumerate(shape) if size != base_shape[i]]
        is_matrix = len(grown) > 1
        # Linear layers' order, as experts have it: (…, out, in).
        dimensions = ((len(shape) - 1,), len(shape) - 2) if is_matrix else ((), (grown or [0])[0])

    def fans(sizes: tuple[int, ...]) -> Fans:
        inputs, output = dimensions
        return Fans(
            shape=sizes,
            fan_in=math.prod(sizes[i] for i in inputs),
            fan_out=sizes[output] if sizes else 1,
        )

    return TensorWidth(fans=fans(shape), base=fans(base_shape))


def _fan_dimensions(
    module: nn.Module, attribute: str, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], int] | None:
    """The dimensions that a layer sums over, and the one of its outputs.

    Returns:
        None if the layer is not known.
    """
    if len(shape) < 2:
        return (), 0
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return (0,), 1
    kernel = tuple(range(2, len(shape)))
    if isinstance(module, TRANSPOSED_CONVOLUTIONS) and attribute == "weight":
        return (0, *kernel), 1
    if isinstance(module, CONVOLUTIONS) and attribute == "weight":
        return (1, *kernel), 0
    if len(shape) > 2:
        return None
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return (1,), 0
    if isinstance(module, nn.MultiheadAttention) and attribute.endswith("proj_weight"):
        return (1,), 0
    if attribute != "weight":
        return None
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    if sizes == (None, None):
        sizes = (getattr(module, "nx", None), getattr(module, "nf", None))  # transformers' Conv1D
    is_embedding = "embed" in type(module).__name__.lower()
    is_transposed = shape == sizes and not isinstance(module, nn.Linear)
    return ((0,), 1) if is_transposed or is_embedding else ((1,), 0)
