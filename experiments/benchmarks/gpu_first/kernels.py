"""Checks of the kernels that a GPT of 1.3 billion parameters consists of.

These are its products and its attention, whose times, added up, are the least that a step can take;
and the power that the GPU draws.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.models.gpt import GPT
from experiments.benchmarks.gpt import SHAPES, Shape
from experiments.benchmarks.gpu_first.check import CannotRun, CheckContext

TILE = 256
"""Sizes that are multiples of this fill whole tiles of a Hopper GPU's products."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
NVIDIA_SMI_FIELDS = (
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
)


def _shape(context: CheckContext) -> Shape:
    is_large = context.on_gpu and context.model != "tiny"
    return SHAPES["1.3b" if is_large else "tiny"]


# --- products -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer that is called with some rows."""

    name: str
    rows: int
    inputs: int
    outputs: int


def _layers_of_model(shape: Shape, hidden: int) -> tuple[LinearLayer, ...]:
    """The layers of a block. They are also the ones that `least_tflops` is about."""
    width = shape.d_model
    rows = shape.batch * shape.sequence_length
    return (
        LinearLayer("q, k, v or out", rows, width, width),
        LinearLayer("gate or up", rows, width, hidden),
        LinearLayer("down", rows, hidden, width),
    )


def _other_layers(shape: Shape, hidden: int) -> tuple[LinearLayer, ...]:
    """The head, and layers that could replace those of a block.

    These compute several projections as one product, or have a hidden size that fills tiles.
    """
    width = shape.d_model
    rows = shape.batch * shape.sequence_length
    rounded = -(-hidden // TILE) * TILE
    return (
        LinearLayer("head, a chunk", rows // 8, width, shape.vocab_size),
        LinearLayer("q, k, v as one", rows, width, 3 * width),
        LinearLayer("gate, up as one", rows, width, 2 * hidden),
        LinearLayer(f"gate or up of {rounded}", rows, width, rounded),
        LinearLayer(f"down of {rounded}", rows, rounded, width),
        LinearLayer(f"gate, up of {rounded} as one", rows, width, 2 * rounded),
    )


def shapes(context: CheckContext) -> None:
    """The three bf16 products of each layer: of forward, and for the gradients of both inputs."""
    shape = _shape(context)
    with torch.device("meta"):
        model: Any = GPT(shape.vocab_size, **shape.model())  # type: ignore[arg-type]
    hidden: int = model.blocks["0"].mlp.gate.out_features
    context.expect_speed(
        "least_tflops",
        350.0,
        850.0,
        why="an H100 of this image gave 798 at 8192³; the thinnest product here is 2048 deep",
    )
    layers_of_model = _layers_of_model(shape, hidden)
    rates: dict[str, dict[str, float]] = {}
    for layer in (*layers_of_model, *_other_layers(shape, hidden)):
        rates[layer.name] = _rates(context, layer)
        context.measured(products=rates)
    tflops = []
    for layer in layers_of_model:
        tflops += [rate for name, rate in rates[layer.name].items() if name != "ms"]
    context.measured(least_tflops=min(tflops))


def _rates(context: CheckContext, layer: LinearLayer) -> dict[str, float]:
    """TFLOP/s of a layer's three products, and the milliseconds of all three."""

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=context.device).bfloat16()

    x = random(layer.rows, layer.inputs)
    weight = random(layer.outputs, layer.inputs)
    gradient = random(layer.rows, layer.outputs)
    products: dict[str, Callable[[], torch.Tensor]] = {
        "forward": lambda: F.linear(x, weight),
        "to_input": lambda: gradient @ weight,
        "to_weight": lambda: gradient.t() @ x,
    }
    flops = 2.0 * layer.rows * layer.inputs * layer.outputs
    rates = {}
    total_seconds = 0.0
    for name, product in products.items():
        seconds = context.seconds_of(product)
        rates[name] = round(flops / seconds / 1e12, 4)
        total_seconds += seconds
    rates["ms"] = round(1e3 * total_seconds, 4)
    return rates


# --- attention ------------------------------------------------------------------------------------

CHOSEN = "chosen"
"""The name of the kernel that torch chooses."""


def attention(context: CheckContext) -> None:
    """Causal attention of a block, forward and backward, by each of torch's kernels.

    Also by the kernel that torch chooses.
    """
    shape = _shape(context)
    context.expect_speed(
        "cudnn_over_flash_forward",
        0.4,
        1.0,
        why="published: 631 TFLOP/s beside flash 2's 329, forward",
    )
    context.expect_speed(
        "chosen_over_best", 0.95, 1.1, why="torch 2.11 asks cuDNN first on Hopper GPUs"
    )
    size = (
        shape.batch,
        shape.n_heads,
        shape.sequence_length,
        shape.d_model // shape.n_heads,
    )
    q, k, v = (
        torch.randn(size, device=context.device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.randn_like(q)
    batch, heads, tokens, head_width = size
    flops = 2.0 * batch * heads * tokens**2 * head_width  # two products, half of each is masked
    kernels: dict[str, dict[str, Any]] = {}
    for name in (CHOSEN, *(BACKENDS if context.on_gpu else ())):
        with contextlib.nullcontext() if name == CHOSEN else sdpa_kernel(BACKENDS[name]):
            try:
                forward_seconds = context.seconds_of(
                    lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
                )
                both_seconds = context.seconds_of(lambda: _forward_backward((q, k, v), gradient))
            except RuntimeError as error:
                kernels[name] = {"error": str(error)[:200]}
                continue
        kernels[name] = {
            "forward_ms": 1e3 * forward_seconds,
            "both_ms": 1e3 * both_seconds,
            "tflops": {
                "forward": flops / forward_seconds / 1e12,
                "both": 3.5 * flops / both_seconds / 1e12,
            },
        }
        context.measured(kernels=kernels)
    ms_by_kernel = {name: times["both_ms"] for name, times in kernels.items() if "both_ms" in times}
    if "cudnn" in ms_by_kernel and "flash" in ms_by_kernel:
        cudnn_ms = kernels["cudnn"]["forward_ms"]
        flash_ms = kernels["flash"]["forward_ms"]
        context.measured(cudnn_over_flash_forward=cudnn_ms / flash_ms)
    elif not context.on_gpu:
        context.measured(cudnn_over_flash_forward=1.0)
    context.measured(chosen_over_best=ms_by_kernel[CHOSEN] / min(ms_by_kernel.values()))


def _forward_backward(qkv: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> None:
    q, k, v = qkv
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.autograd.grad(output, qkv, gradient)


# --- power ----------------------------------------------------------------------------------------


def power(context: CheckContext) -> None:
    """Clock and power, idle and after two seconds of products, and why the clock is held down.

    nvidia-smi says them. Nothing is changed.
    """
    context.expect(
        "clock_under_load",
        0.6,
        1.0,
        why="of the highest clock; 700 W hold an H100 at about 0.75 in products",
    )
    idle = _ask_nvidia_smi()
    x = torch.randn(8192, 8192, device=context.device).bfloat16()
    y = torch.empty_like(x)
    start = time.monotonic()
    count = 0
    loaded: dict[str, str] = {}
    while not loaded:
        for _ in range(200):
            torch.mm(x, x, out=y)
        count += 200
        if time.monotonic() - start > 2.0:
            loaded = _ask_nvidia_smi()
        else:
            context.synchronize()
    context.synchronize()
    flops = count * 2 * 8192**3
    context.measured(idle=idle, loaded=loaded, tflops=flops / (time.monotonic() - start) / 1e12)
    clock = float(loaded["clocks.sm"])
    highest_clock = float(loaded["clocks.max.sm"])
    context.measured(clock_under_load=clock / highest_clock)


def _ask_nvidia_smi() -> dict[str, str]:
    """The fields of the first GPU."""
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(NVIDIA_SMI_FIELDS)}",
        "--format=csv,noheader,nounits",
        "--id=0",
    ]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotRun(f"nvidia-smi does not answer: {error}") from error
    values = [value.strip() for value in process.stdout.split(",")]
    return dict(zip(NVIDIA_SMI_FIELDS, values))
