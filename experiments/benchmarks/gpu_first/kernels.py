"""Checks of the kernels that a GPT of 1.3 B parameters is made of: its products, its attention, and what the GPU draws.

What these take, added up, is the least that a step can take.
"""

import contextlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.models.gpt import GPT
from experiments.benchmarks.gpt import SHAPES, Shape
from experiments.benchmarks.gpu_first.check import Here, NotHere

MULTIPLE = 256
"""Sizes that are multiples of it fill whole tiles of a Hopper GPU's products."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
QUERIED = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,clocks_throttle_reasons.active"


def _shape(here: Here) -> Shape:
    return SHAPES["1.3b" if here.on_gpu and here.model != "tiny" else "tiny"]


def shapes(here: Here) -> None:
    """Each product of a block and of the head in bf16, three times: of forward, for the input's gradient and for the
    weight's; then sizes that could replace them: projections as one product, and a hidden size that fills tiles."""
    shape = _shape(here)
    with torch.device("meta"):
        model: Any = GPT(shape.vocab_size, **shape.model())  # type: ignore[arg-type]
    hidden: int = model.blocks["0"].mlp.gate.out_features
    rounded = -(-hidden // MULTIPLE) * MULTIPLE
    width, rows = shape.d_model, shape.batch * shape.sequence_length
    here.expect_speed(
        "least_tflops", 350.0, 850.0, "an H100 of this image gave 798 at 8192³; the thinnest product here is 2048 deep"
    )
    rates: dict[str, dict[str, float]] = {}
    for name, of_rows, into, outof in (
        ("q, k, v or out", rows, width, width),
        ("gate or up", rows, width, hidden),
        ("down", rows, hidden, width),
        ("head, a chunk", rows // 8, width, shape.vocab_size),
        ("q, k, v as one", rows, width, 3 * width),
        ("gate, up as one", rows, width, 2 * hidden),
        (f"gate or up of {rounded}", rows, width, rounded),
        (f"down of {rounded}", rows, rounded, width),
        (f"gate, up of {rounded} as one", rows, width, 2 * rounded),
    ):
        rates[name] = _rates(here, of_rows, into, outof)
        here.found(products=rates)
    usual = list(rates.values())[:3]
    here.found(least_tflops=min(value for each in usual for name, value in each.items() if name != "ms"))


def _rates(here: Here, rows: int, into: int, outof: int) -> dict[str, float]:
    """TFLOP/s of a linear layer's three products, and the milliseconds of all three."""
    x, weight, slope = (
        torch.randn(*size, device=here.device).bfloat16() for size in ((rows, into), (outof, into), (rows, outof))
    )
    products: dict[str, Callable[[], torch.Tensor]] = {
        "forward": lambda: F.linear(x, weight),
        "to_input": lambda: slope @ weight,
        "to_weight": lambda: slope.t() @ x,
    }
    seconds = {name: here.seconds_of(product) for name, product in products.items()}
    flops = 2.0 * rows * into * outof
    found = {name: round(flops / taken / 1e12, 4) for name, taken in seconds.items()}
    return found | {"ms": round(1e3 * sum(seconds.values()), 4)}


def attention(here: Here) -> None:
    """Causal attention of a block, forward and backward, by each of torch's kernels, and by the one that it chooses."""
    shape = _shape(here)
    here.expect_speed("cudnn_over_flash_forward", 0.4, 1.0, "published: 631 TFLOP/s beside flash 2's 329, forward")
    here.expect_speed("chosen_over_best", 0.95, 1.1, "torch 2.11 asks cuDNN first on Hopper GPUs")
    sizes = (shape.batch, shape.n_heads, shape.sequence_length, shape.d_model // shape.n_heads)
    q, k, v = (torch.randn(sizes, device=here.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    flops = 2.0 * sizes[0] * sizes[1] * sizes[2] ** 2 * sizes[3]  # two products, half of each is masked
    slope = torch.randn_like(q)
    found: dict[str, dict[str, Any]] = {}
    for name in ("chosen", *(BACKENDS if here.on_gpu else ())):
        with contextlib.nullcontext() if name == "chosen" else sdpa_kernel(BACKENDS[name]):
            try:
                forward = here.seconds_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
                both = here.seconds_of(lambda: _forward_backward((q, k, v), slope))
            except RuntimeError as error:
                found[name] = {"error": str(error)[:200]}
                continue
        tflops = {"forward": flops / forward / 1e12, "both": 3.5 * flops / both / 1e12}
        found[name] = {"forward_ms": 1e3 * forward, "both_ms": 1e3 * both, "tflops": tflops}
        here.found(kernels=found)
    times = {name: values["both_ms"] for name, values in found.items() if "both_ms" in values}
    if {"cudnn", "flash"} <= times.keys():
        here.found(cudnn_over_flash_forward=found["cudnn"]["forward_ms"] / found["flash"]["forward_ms"])
    elif not here.on_gpu:
        here.found(cudnn_over_flash_forward=1.0)
    here.found(chosen_over_best=times["chosen"] / min(times.values()))


def _forward_backward(qkv: tuple[torch.Tensor, ...], slope: torch.Tensor) -> None:
    q, k, v = qkv
    torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), qkv, slope)


def power(here: Here) -> None:
    """Clock, power and why the clock is held down, idle and after two seconds of products, as nvidia-smi says them.
    Nothing is changed."""
    here.expect("clock_under_load", 0.6, 1.0, "of the highest clock; 700 W hold an H100 at about 0.75 in products")
    idle = _asked()
    x = torch.randn(8192, 8192, device=here.device).bfloat16()
    y = torch.empty_like(x)
    begun, count = time.monotonic(), 0
    loaded: dict[str, str] = {}
    while not loaded:
        for _ in range(200):
            torch.mm(x, x, out=y)
        count += 200
        if time.monotonic() - begun > 2.0:
            loaded = _asked()
        else:
            here.wait()
    here.wait()
    here.found(idle=idle, loaded=loaded, tflops=count * 2 * 8192**3 / (time.monotonic() - begun) / 1e12)
    here.found(clock_under_load=float(loaded["clocks.sm"]) / float(loaded["clocks.max.sm"]))


def _asked() -> dict[str, str]:
    words = ["nvidia-smi", f"--query-gpu={QUERIED}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotHere(f"nvidia-smi does not answer: {error}") from error
    return dict(zip(QUERIED.split(","), (value.strip() for value in done.stdout.split(","))))
