"""Mixed precision: store numbers in float32, and multiply matrices in 16 or 8 bits.

Trained parameters, gradients, optimizer state and loss stay float32 (the others: frozen.py). Matrix
products run in bfloat16 (8 bits of exponent, so that nothing overflows) or float16 (5 bits: small
gradients underflow, so the training loop scales the loss). Micikevicius et al. 2018,
https://arxiv.org/abs/1710.03740; https://docs.pytorch.org/docs/stable/amp.html.

How the cast happens depends on the layout:

- replicated parameters (single, ddp, tensor): `torch.autocast` around forward casts operation by
  operation;
- sharded parameters (zero*, fsdp, hsdp): `fully_shard`'s `MixedPrecisionPolicy` casts the shards
  *before* they are gathered, which halves that communication, and reduces gradients in
  `reduce_dtype`. Everything inside the module then runs in 16 bits, norms included (`cast_calls`).
  The module's output comes back as float32 for the loss, unless `float_output` is false: a loss
  that accepts 16 bits saves a float32 copy of the logits.

With train.weight_dtype=bf16 every layout computes as sharded ones do. Replicated and sharded
layouts round in different places, so their results agree to bfloat16's rounding (2⁻⁸ relative per
number), not bit by bit. Sharded ones also add up the residual stream in 16 bits, so their results
are noisier (experiments/parity/matrix.py).

**fp8**: linear layers multiply in 8 bits, which some GPUs do twice as fast as in 16. A float8
number has few bits, so each tensor is scaled to use all of them, by its own largest magnitude at
that moment ("dynamic scaling per tensor"; Micikevicius et al. 2022,
https://arxiv.org/abs/2209.05433):

    s(x) = max of the type / max|x|        q(x) = round(x · s(x))        x ≈ q(x) / s(x)

    forward    y  = q(x)·q(W)ᵀ / (s(x)·s(W))       x, W in e4m3 (4 bits of exponent, 3 of mantissa,
                                                   up to 448)
    backward   dx = q(dy)·q(W) / (s(dy)·s(W))      dy in e5m2 (up to 57,344), because gradients
               dW = q(dy)ᵀ·q(x) / (s(dy)·s(x))     have the wider range

Products come back as bfloat16 (`torch.nn.functional.scaled_mm`). They are added up in float32. The
forward, unlike the gradients, uses Hopper's fast accumulation, whose partial sums have fewer bits
(as torchao does, https://github.com/pytorch/ao). Everything else is as with train.precision=bf16:
parameters, gradients and optimizer state in float32; norms, attention, embedding and head in 16
bits.

Choose it for large models on an H100 or newer, with train.compile (scaling makes a few passes over
each tensor, which compiling fuses), once bf16 trains well: e4m3 rounds a number by up to 2⁻⁴ of
itself, bfloat16 by up to 2⁻⁸. The cost of scaling grows with a layer's width and that of the
product with its square, so narrow layers gain nothing. A GPT of 1.3 billion parameters takes 469 ms
a step on an H100 instead of 561 ms in bf16, and a fifth less memory
(experiments/benchmarks/RESULTS.md, the first H100).

Only linear layers of the blocks change, and of these only the ones whose sizes are divisible by 16,
as the hardware requires. Of a layer that is split over workers (tensor), each worker changes its
own slice; a layer that every worker keeps whole stays in bfloat16. A call whose number of rows is
not divisible by 16 is computed in bfloat16. A worker scales by the magnitudes of its own slice, so
two layouts agree to float8's rounding.
"""

import contextlib
from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import MixedPrecisionPolicy

from strategies.dims import LayoutError
from strategies.grad_sync import local
from strategies.tree import tree_leaves, tree_map

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}
"""The type of matrix products. With fp8, those that `use_float8` does not change have it."""


def autocast(
    precision: str, device_type: str, weight_dtype: str = "fp32"
) -> Callable[[], AbstractContextManager[object]]:
    """A maker of the context that casts inside a forward, for replicated parameters.

    Weights in 16 bits need none: the model's calls are cast (`cast_calls`), under every layout.
    """
    if precision == "fp32" or weight_dtype != "fp32":
        return contextlib.nullcontext
    dtype = DTYPES[precision]
    return lambda: torch.autocast(device_type, dtype=dtype)


def shard_policies(
    precision: str, reduce_dtype: str
) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """What `fully_shard` casts, for sharded parameters.

    Returns:
        The policy of a block, and the policy of the whole step. The step's input is the batch,
        targets included, and is not cast.
    """
    compute_dtype = None if precision == "fp32" else DTYPES[precision]
    if compute_dtype is None and reduce_dtype == "fp32":
        gradient_dtype = None
    else:
        gradient_dtype = DTYPES[reduce_dtype]
    block_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=gradient_dtype)
    step_policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=gradient_dtype, cast_forward_inputs=False
    )
    return block_policy, step_policy


def cast_calls(
    module: nn.Module,
    precision: str,
    float_output: bool,
    *,
    whole: Set[nn.Parameter] = frozenset(),
) -> None:
    """Make a model with sharded parameters cast its inputs to 16 bits and its output to float32.

    Inside the model, the inputs of every layer with parameters of its own are cast too, as autocast
    does for replicated parameters: a float32 mask times an embedding is float32. If the first call
    of a layer needs no cast, its later calls are not checked.

    Args:
        module: The model; hooks are added in place.
        precision: A key of `DTYPES`; with fp32 nothing is cast.
        float_output: Whether to cast the output to float32.
        whole: Parameters that are not sharded, which keep their type. A layer that has such only
            computes in their type.
    """
    if precision == "fp32":
        return
    for layer in module.modules():
        own_parameters = list(layer.parameters(recurse=False))
        if layer is module or own_parameters:
            _InputCast(layer, _computing_type(own_parameters, precision, whole))
    if float_output:
        module.register_forward_hook(lambda _, __, output: _cast(output, torch.float32))


def _computing_type(
    own_parameters: list[nn.Parameter], precision: str, whole: Set[nn.Parameter]
) -> torch.dtype:
    """The type that a layer computes in: 16 bits, or that of its parameters if nothing casts it."""
    types = {parameter.dtype for parameter in own_parameters}
    is_whole = set(own_parameters) <= whole
    # A number times a tensor has the tensor's type.
    is_array = any(parameter.dim() for parameter in own_parameters)
    if is_whole and is_array and len(types) == 1:
        (own_type,) = types
        if own_type.is_floating_point:
            return own_type
    return DTYPES[precision]


class _InputCast:
    """A hook that casts a layer's inputs, and removes itself if the first call needs no cast."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.handle = layer.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        leaves = tree_leaves((args, kwargs))
        if any(_is_float(leaf) and leaf.dtype != self.dtype for leaf in leaves):
            return _cast(args, self.dtype), _cast(kwargs, self.dtype)
        if not torch.compiler.is_compiling():
            self.handle.remove()
        return None


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda value: value.to(dtype) if _is_float(value) else value, values)


class Product:
    """The matrix products of a linear layer's forward and backward, in the type of their inputs.

    Layers that are split over workers (tensor) call these, so that fp8 can replace them.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(…, K), (N, K) and (N) → (…, N)."""
        return F.linear(x, weight, bias)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
        """(…, N) and (N, K) → (…, K)."""
        return gradient.matmul(weight)

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
        """(…, N) and (…, K) → (N, K)."""
        return gradient.flatten(0, -2).T.matmul(x.flatten(0, -2))


# --- float8 ---------------------------------------------------------------------------------------

FORWARD_DTYPE = torch.float8_e4m3fn
GRADIENT_DTYPE = torch.float8_e5m2
SIZE_MULTIPLE = 16
"""What the hardware requires the sizes of float8 products to be divisible by."""
MINIMUM_CAPABILITY = (8, 9)
"""The compute capability of the first GPUs with float8 products (Ada; Hopper is 9.0)."""


def require_float8(device: torch.device) -> None:
    """Check that a device has float8 products.

    Raises:
        LayoutError: It has none.
    """
    if device.type != "cuda":
        raise LayoutError(
            "train.precision=fp8 needs GPUs, but the workers have none: write train.precision=bf16"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or (major, minor) < MINIMUM_CAPABILITY:
        least_major, least_minor = MINIMUM_CAPABILITY
        raise LayoutError(
            f"train.precision=fp8 needs an NVIDIA GPU of compute capability {least_major}."
            f"{least_minor} or newer (Ada, Hopper), but {torch.cuda.get_device_name(device)} has "
            f"{major}.{minor}: write train.precision=bf16"
        )


def use_float8(module: nn.Module, blocks: list[str]) -> tuple[str, ...]:
    """Make the linear layers of the blocks compute in float8.

    The layers change in place; their names and parameters stay.

    Args:
        module: The model, already split over workers if it is to be.
        blocks: The names of its repeating blocks. Without any, all linear layers change.

    Returns:
        Remarks for the user.

    Raises:
        LayoutError: No linear layer can compute in float8.
    """
    block_modules = [module.get_submodule(name) for name in blocks or [""]]
    parts = (part for block in block_modules for part in block.modules())
    layers = list(dict.fromkeys(part for part in parts if _is_linear(part)))
    float8_layers = [layer for layer in layers if _sizes_allow_float8(layer)]
    if not float8_layers:
        raise LayoutError(
            "train.precision=fp8, but the model's blocks have no linear layer whose sizes "
            f"{SIZE_MULTIPLE} divides: write train.precision=bf16"
        )
    for layer in float8_layers:
        if type(layer) is nn.Linear:
            layer.__class__ = Float8Linear
        else:
            vars(layer)["_product"] = Float8Product
    bfloat16_count = len(layers) - len(float8_layers)
    if not bfloat16_count:
        return ()
    return (
        f"{bfloat16_count} of the blocks' {len(layers)} linear layers compute in bfloat16, because "
        f"{SIZE_MULTIPLE} does not divide their sizes; the others in float8",
    )


def _is_linear(layer: nn.Module) -> bool:
    """Whether a layer computes as `nn.Linear` does.

    A subclass may compute something else. The subclasses of tensor parallelism do not: they have a
    `_product`.
    """
    if type(layer) is nn.Linear:
        return True
    return "_product" in vars(layer) and type(layer).__bases__ == (nn.Linear,)


def _sizes_allow_float8(layer: nn.Module) -> bool:
    """Whether both sizes of this worker's slice of the weight are divisible by `SIZE_MULTIPLE`."""
    # `layer.weight` may be a property that gathers the weight from other workers.
    weight = local(nn.Module.__getattr__(layer, "weight"))
    return all(size % SIZE_MULTIPLE == 0 for size in weight.shape)


class Float8Linear(nn.Linear):
    """A linear layer, (…, in) → (…, out) bfloat16; an `nn.Linear` whose class was changed."""

    def forward(self, x: Tensor) -> Tensor:
        return Float8Product.forward(x, self.weight, self.bias)


class Float8Product(Product):
    """The matrix products of a linear layer in float8, or in bfloat16 for other numbers of rows."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.to(torch.bfloat16).reshape(-1, x.size(-1))
        weight = weight.to(torch.bfloat16)
        bias = None if bias is None else bias.to(torch.bfloat16)
        if _row_count_allows_float8(rows):
            y = _Float8Forward.apply(rows, weight)
            y = y if bias is None else y + bias
        else:
            y = F.linear(rows, weight, bias)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
        rows = gradient.flatten(0, -2)
        if not _row_count_allows_float8(rows):
            return Product.input_gradient(gradient, weight)
        gradient8, gradient_scale = quantise(rows, GRADIENT_DTYPE)
        weight8, weight_scale = quantise(weight.t(), FORWARD_DTYPE)
        input_gradient = multiply(
            gradient8, weight8, left_scale=gradient_scale, right_scale=weight_scale
        )
        return input_gradient.view(*gradient.shape[:-1], weight.size(1))

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
        rows = gradient.flatten(0, -2)
        if not _row_count_allows_float8(rows):
            return Product.weight_gradient(gradient, x)
        gradient8, gradient_scale = quantise(rows.t(), GRADIENT_DTYPE)
        x8, x_scale = quantise(x.flatten(0, -2).t(), FORWARD_DTYPE)
        return multiply(gradient8, x8, left_scale=gradient_scale, right_scale=x_scale)


def _row_count_allows_float8(rows: Tensor) -> bool:
    return len(rows) > 0 and len(rows) % SIZE_MULTIPLE == 0


class _Float8Forward(torch.autograd.Function):
    """x (M, K) and weight (N, K), bfloat16 → (M, N) bfloat16.

    The backward multiplies the float8 tensors that the forward multiplied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = quantise(x, FORWARD_DTYPE)
        weight8, weight_scale = quantise(weight, FORWARD_DTYPE)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        return multiply(x8, weight8, left_scale=x_scale, right_scale=weight_scale, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        gradient8, gradient_scale = quantise(gradient, GRADIENT_DTYPE)
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = multiply(
                gradient8,
                weight8.t().contiguous(),
                left_scale=gradient_scale,
                right_scale=weight_scale,
            )
        if ctx.needs_input_grad[1]:
            weight_gradient = multiply(
                gradient8.t().contiguous(),
                x8.t().contiguous(),
                left_scale=gradient_scale,
                right_scale=x_scale,
            )
        return x_gradient, weight_gradient


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round a tensor to float8, scaled by its own largest magnitude.

    A tensor with inf or nan becomes a tensor with nan, so that the training loop's check sees it.

    Args:
        x: Any floating-point tensor.
        dtype: The float8 type.

    Returns:
        The float8 tensor, contiguous, and its scale (0-d float32, on the device). Their product
        approximates `x`.
    """
    dtype_max = torch.finfo(dtype).max
    # The minimum keeps a tensor of zeros from dividing by zero.
    largest = x.detach().abs().amax().float().clamp(min=1e-12)
    scaled = (x.float() * (dtype_max / largest)).clamp(-dtype_max, dtype_max)
    return scaled.to(dtype).contiguous(), largest / dtype_max


def multiply(
    left: Tensor, right: Tensor, *, left_scale: Tensor, right_scale: Tensor, fast: bool = False
) -> Tensor:
    """left · rightᵀ of float8 matrices, scaled back.

    Args:
        left: (M, K), contiguous.
        right: (N, K), contiguous. Its transpose, which the hardware takes column by column, is then
            a view.
        left_scale: The scale that `quantise` returned with `left`.
        right_scale: The scale that `quantise` returned with `right`.
        fast: Whether to add up with fewer bits, which is faster on Hopper.

    Returns:
        (M, N) bfloat16.
    """
    return _float8_product(left, right, left_scale, right_scale, fast)


@torch.library.custom_op("trireme::float8_product", mutates_args=())
def _float8_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, fast: bool
) -> Tensor:
    """torch's own product as one operator.

    torch 2.11's compiler cannot look into `scaled_mm`, and would leave the whole backward pass of a
    float8 layer to be run operation by operation, which takes twice as long as bfloat16.
    """
    return F.scaled_mm(
        left,
        right.t(),
        scale_a=left_scale,
        scale_recipe_a=F.ScalingType.TensorWise,
        scale_b=right_scale,
        scale_recipe_b=F.ScalingType.TensorWise,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


@_float8_product.register_fake
def _(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, fast: bool) -> Tensor:
    return left.new_empty(len(left), len(right), dtype=torch.bfloat16)
