"""Mixed precision: float32 where numbers are kept, 16 bits where they are multiplied, or 8.

Parameters, gradients, optimizer state and loss stay float32; matrix products run in bfloat16 (8
bits of exponent: never overflows, nothing else to do) or float16 (5 bits: gradients underflow, so
the loop scales the loss). Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740;
https://docs.pytorch.org/docs/stable/amp.html.

Two ways, by layout:

- replicated parameters (single, ddp, tensor): `torch.autocast` around forward casts operation by
  operation;
- sharded parameters (zero*, fsdp, hsdp): `fully_shard`'s `MixedPrecisionPolicy` casts the shards
  *before* they are gathered, which halves that communication, and reduces gradients in
  `reduce_dtype`. Everything inside then runs in 16 bits, norms included (`cast_calls`), and the
  module's output comes back as float32 for the loss (unless `float_output` is false: a loss that
  takes 16 bits spares a float32 copy of the logits).

The two round at different places, so they agree to bfloat16's rounding (2⁻⁸ relative per number),
not bit by bit; the second, which also adds up the residual stream in 16 bits, is the noisier one
(experiments/parity/matrix.py).

**fp8**: linear layers that multiply in 8 bits, for GPUs that do that twice as fast as in 16. A
float8 number has few bits, so each tensor is scaled to fill them, by its own largest magnitude of
just now ("dynamic", per tensor; Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433):

    s(x) = max of the type / max|x|        q(x) = round(x · s(x))        x ≈ q(x) / s(x)

    forward    y  = q(x)·q(W)ᵀ / (s(x)·s(W))        e4m3 (4 bits of exponent, 3 of mantissa: up to
    448) backward   dx = q(dy)·q(W) / (s(dy)·s(W))       dy in e5m2 (up to 57,344), as gradients
    spread wider
               dW = q(dy)ᵀ·q(x) / (s(dy)·s(x))

Products come back as bfloat16 (`torch.nn.functional.scaled_mm`). They are added up in float32; in
forward, not for gradients, with Hopper's fast accumulation, whose partial sums have fewer bits
(torchao's choice too, https://github.com/pytorch/ao). Everything else is as with
train.precision=bf16: parameters, gradients and optimizer state float32, norms, attention, embedding
and head 16 bits.

Choose it for large models on an H100 or newer, with train.compile (the scaling is a few passes over
each tensor, which compiling fuses), once bf16 trains well: a number is rounded by up to 2⁻⁴ of
itself instead of 2⁻⁹. Scaling grows with a layer's width and the product with its square, so where
layers are narrow nothing is gained. A GPT of 1.3 billion parameters takes 469 ms a step on an H100,
561 ms in bf16, and a fifth less memory (experiments/benchmarks/RESULTS.md, the first H100).

Only the linear layers of the blocks are changed, and of these those whose sizes 16 divides, as the
hardware wants it; of a layer that is split over workers (tensor), each worker's part; one that they
all have whole stays in bfloat16. A call with a number of rows that 16 does not divide is computed
in bfloat16. A worker scales by what it has itself, so two layouts agree to float8's rounding.
"""

import contextlib
from collections.abc import Callable
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
"""fp8 is bf16 but for what `use_float8` changes."""


def autocast(precision: str, device_type: str) -> Callable[[], AbstractContextManager[object]]:
    """What to wrap forward in, for replicated parameters."""
    if precision == "fp32":
        return contextlib.nullcontext
    dtype = DTYPES[precision]
    return lambda: torch.autocast(device_type, dtype=dtype)


def shard_policies(
    precision: str, reduce_dtype: str
) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """What `fully_shard` casts, for sharded parameters: of a block, and of the whole step, whose batch (targets are in
    it) stays as it is."""
    compute = None if precision == "fp32" else DTYPES[precision]
    reduce = None if compute is None and reduce_dtype == "fp32" else DTYPES[reduce_dtype]
    return MixedPrecisionPolicy(compute, reduce), MixedPrecisionPolicy(
        compute, reduce, cast_forward_inputs=False
    )


def cast_calls(module: nn.Module, precision: str, float_output: bool) -> None:
    """Casts what the model is called with to 16 bits, and its output to float32 again, unless not wanted.

    Within it casts what a layer with parameters of its own is called with, as autocast does for
    replicated ones: a float32 mask times an embedding is float32. A layer that needs none in its
    first call is left alone from then on.
    """
    if precision == "fp32":
        return
    for layer in module.modules():
        if layer is module or any(True for _ in layer.parameters(recurse=False)):
            _Narrowing(layer, DTYPES[precision])
    if float_output:
        module.register_forward_hook(lambda _, __, output: _cast(output, torch.float32))


class _Narrowing:
    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.handle = layer.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if any(
            _is_float(leaf) and leaf.dtype != self.dtype for leaf in tree_leaves((args, kwargs))
        ):
            return _cast(args, self.dtype), _cast(kwargs, self.dtype)
        if not torch.compiler.is_compiling():
            self.handle.remove()
        return None


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda value: value.to(dtype) if _is_float(value) else value, values)


class Product:
    """The products of a linear layer and of its backward, for layers that are split (tensor) to take others (fp8)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(…, K), (N, K) and (N) → (…, N)."""
        return F.linear(x, weight, bias)

    @staticmethod
    def of_input(gradient: Tensor, weight: Tensor) -> Tensor:
        """(…, N) and (N, K) → (…, K)."""
        return gradient.matmul(weight)

    @staticmethod
    def of_weight(gradient: Tensor, x: Tensor) -> Tensor:
        """(…, N) and (…, K) → (N, K)."""
        return gradient.flatten(0, -2).T.matmul(x.flatten(0, -2))


# --- float8 ---------------------------------------------------------------------------------------

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
LEAST = (8, 9)
"""Compute capability of the first GPUs that have it (Ada; Hopper is 9.0)."""


def require_float8(device: torch.device) -> None:
    """Raises LayoutError, one sentence, if the device has no float8 products."""
    if device.type != "cuda":
        raise LayoutError(
            "train.precision=fp8 needs GPUs, but the workers have none: write train.precision=bf16"
        )
    found = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or found < LEAST:
        raise LayoutError(
            f"train.precision=fp8 needs an NVIDIA GPU of compute capability {LEAST[0]}.{LEAST[1]} "
            f"or newer (Ada, Hopper), but {torch.cuda.get_device_name(device)} has "
            f"{found[0]}.{found[1]}: write train.precision=bf16"
        )


def use_float8(module: nn.Module, blocks: list[str]) -> tuple[str, ...]:
    """Lets the linear layers of the blocks (of the whole module if there are none) compute in float8, in place: names
    and parameters stay. Returns remarks for the user.

    Raises:
        LayoutError: none of them can.
    """
    inside = (layer for name in blocks or [""] for layer in module.get_submodule(name).modules())
    layers = dict.fromkeys(layer for layer in inside if _is_linear(layer))
    chosen = [
        layer for layer in layers if not any(size % MULTIPLE for size in _own_weight(layer).shape)
    ]
    if not chosen:
        raise LayoutError(
            "train.precision=fp8, but the model's blocks have no linear layer whose sizes "
            f"{MULTIPLE} divides: write train.precision=bf16"
        )
    for layer in chosen:
        if type(layer) is nn.Linear:
            layer.__class__ = Float8Linear
        else:
            vars(layer).update(_product=Float8Product)
    if len(chosen) == len(layers):
        return ()
    left = len(layers) - len(chosen)
    return (
        f"{left} of the blocks' {len(layers)} linear layers compute in bfloat16, because "
        f"{MULTIPLE} does not divide their sizes; the others in float8",
    )


def _is_linear(layer: nn.Module) -> bool:
    """A subclass computes in its own way, but for those of tensor parallelism, which have a product."""
    return type(layer) is nn.Linear or (
        "_product" in vars(layer) and type(layer).__bases__ == (nn.Linear,)
    )


def _own_weight(layer: nn.Module) -> Tensor:
    return local(nn.Module.__getattr__(layer, "weight"))  # not by its name, which may gather it


class Float8Linear(nn.Linear):
    """A linear layer, (…, in) → (…, out) bfloat16; made of one by changing its class."""

    def forward(self, x: Tensor) -> Tensor:
        return Float8Product.forward(x, self.weight, self.bias)


class Float8Product(Product):
    """The products of a linear layer in float8; those with a number of rows that it cannot have in bfloat16."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, weight = x.to(torch.bfloat16).reshape(-1, x.size(-1)), weight.to(torch.bfloat16)
        bias = None if bias is None else bias.to(torch.bfloat16)
        if _odd(rows):
            y = F.linear(rows, weight, bias)
        else:
            y = _Float8Forward.apply(rows, weight)
            y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    def of_input(gradient: Tensor, weight: Tensor) -> Tensor:
        rows = gradient.flatten(0, -2)
        if _odd(rows):
            return Product.of_input(gradient, weight)
        found = multiply(*quantise(rows, GRADIENT), *quantise(weight.t(), FORWARD))
        return found.view(*gradient.shape[:-1], weight.size(1))

    @staticmethod
    def of_weight(gradient: Tensor, x: Tensor) -> Tensor:
        rows = gradient.flatten(0, -2)
        if _odd(rows):
            return Product.of_weight(gradient, x)
        return multiply(*quantise(rows.t(), GRADIENT), *quantise(x.flatten(0, -2).t(), FORWARD))


def _odd(rows: Tensor) -> bool:
    return not len(rows) or len(rows) % MULTIPLE != 0


class _Float8Forward(torch.autograd.Function):
    """(M, K) bfloat16 and (N, K) bfloat16 → (M, N) bfloat16, whose backward multiplies what forward rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, w8 = quantise(x, FORWARD), quantise(weight, FORWARD)
        ctx.save_for_backward(*x8, *w8)
        return multiply(*x8, *w8, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x8, x_inverse, w8, w_inverse = ctx.saved_tensors
        g8, g_inverse = quantise(gradient, GRADIENT)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = multiply(g8, g_inverse, w8.t().contiguous(), w_inverse)
        if ctx.needs_input_grad[1]:
            to_weight = multiply(g8.t().contiguous(), g_inverse, x8.t().contiguous(), x_inverse)
        return to_x, to_weight


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x in float8, contiguous; what to multiply it by to have x again, 0-d float32 on the device).

    A tensor that holds inf or nan becomes one that holds nan, so that the loop's check sees it.
    """
    most = torch.finfo(dtype).max
    largest = x.detach().abs().amax().float().clamp(min=1e-12)  # of nothing but zeros too
    scaled = (x.float() * (most / largest)).clamp(-most, most)
    return scaled.to(dtype).contiguous(), largest / most


def multiply(
    a8: Tensor, a_inverse: Tensor, b8: Tensor, b_inverse: Tensor, *, fast: bool = False
) -> Tensor:
    """a·bᵀ of float8 matrices, scaled back.

    Args:
        a8: (M, K), contiguous.
        a_inverse: What to multiply `a8` by to have a again.
        b8: (N, K), contiguous: the hardware takes it as columns.
        b_inverse: What to multiply `b8` by to have b again.
        fast: Whether it is added up with fewer bits, which is faster on Hopper GPUs.

    Returns:
        (M, N), bfloat16.
    """
    return _float8_product(a8, a_inverse, b8, b_inverse, fast)


@torch.library.custom_op("trireme::float8_product", mutates_args=())
def _float8_product(
    a8: Tensor, a_inverse: Tensor, b8: Tensor, b_inverse: Tensor, fast: bool
) -> Tensor:
    """torch's own product as one operator.

    torch 2.11's compiler cannot look into `scaled_mm` and would leave the whole backward pass of
    a float8 layer to be run operation by operation, which takes twice as long as bfloat16.
    """
    return F.scaled_mm(
        a8,
        b8.t(),
        a_inverse,
        F.ScalingType.TensorWise,
        b_inverse,
        F.ScalingType.TensorWise,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


@_float8_product.register_fake
def _(a8: Tensor, a_inverse: Tensor, b8: Tensor, b_inverse: Tensor, fast: bool) -> Tensor:
    return a8.new_empty(len(a8), len(b8), dtype=torch.bfloat16)
