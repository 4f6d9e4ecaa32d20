"""Checks of speed and memory: the kernels that run, a GPT beside plain PyTorch and beside the plan."""

import gc
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from app.models.cross_entropy import eager_chunk_loss, fusible_chunk_loss
from app.models.gpt import GPT
from app.training.job import memory_bytes
from experiments.benchmarks.gpt import OPTIONS, SHAPES, ByHand, Shape
from experiments.benchmarks.gpu_first.check import Here, NotHere
from experiments.benchmarks.gpu_first.training import config, planned, training
from experiments.benchmarks.harness import measure_in_turns

LONGEST = 40
BLOCKS, BLOCK_SECONDS = 5, 2.0
ATTENTION = re.compile(r"flash|fmha|cudnn.*sdpa", re.IGNORECASE)
OPTIMIZER = re.compile(r"fused_?adam", re.IGNORECASE)
PRODUCT = re.compile(r"gemm|nvjet|cutlass|wgmma|cublas", re.IGNORECASE)
IN_BF16 = re.compile(r"bf16|bfloat16|nvjet_(sm\d+_)?t", re.IGNORECASE)
"""cuBLAS of CUDA 12.8 on names its bf16 kernels nvjet_t…."""


def _profiled(here: Here, function: Callable[[], object], times: int) -> list[dict[str, Any]]:
    """The kernels of `times` calls, longest first (of a CPU: the operators); ms: of one call."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if here.on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(times):
            function()
        here.wait()
    rows = []
    for event in profiler.key_averages():
        if not here.on_gpu or str(event.device_type).endswith("CUDA"):
            taken = event.self_device_time_total if here.on_gpu else event.self_cpu_time_total
            rows.append({"name": event.key, "calls": event.count / times, "ms": taken / 1e3 / times})
    total = sum(row["ms"] for row in rows) or 1.0
    rows.sort(key=lambda row: -row["ms"])
    return [row | {"share": round(row["ms"] / total, 4)} for row in rows]


def loss_chunks(here: Here) -> None:
    """One chunk of the loss over a large vocabulary, compiled as on a GPU and operation by operation."""
    if not here.on_gpu and shutil.which("g++") is None:
        raise NotHere("torch.compile needs a C++ compiler for a CPU")
    rows, words = (2048, 50304) if here.on_gpu else (64, 9000)
    seconds = 6 * rows * words / here.datasheet().bandwidth
    here.expect_speed("ms", 0.0, 2e3 * seconds, "at most twice the time of 6 bytes a logit at the planner's bandwidth")
    here.expect_speed("times_faster", 1.8, 6.0, "18 bytes a logit or more are moved without, 6 to 10 with")
    here.expect("difference", 0.0, 2**-8, "one rounding to bfloat16 of a number below 1")
    logits = torch.randn(rows, words, device=here.device).bfloat16()
    targets = torch.randint(words, (rows,), device=here.device)
    compiled, taken, extra = torch.compile(fusible_chunk_loss, fullgraph=True), {}, {}
    for name, function in (("compiled", compiled), ("one by one", eager_chunk_loss)):
        taken[name] = here.seconds_of(lambda function=function: function(logits, targets))  # type: ignore[misc]
        if here.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function(logits, targets)
            extra[name] = torch.cuda.max_memory_allocated() - before
    (_, slope), (_, truth) = compiled(logits, targets), eager_chunk_loss(logits, targets)
    here.found(ms=1e3 * taken["compiled"], times_faster=taken["one by one"] / taken["compiled"], extra_bytes=extra)
    here.found(difference=float((slope.float() - truth).abs().max()))


def speed(here: Here, options: str = "default", precision: str = "bf16", compiled: bool = True) -> None:
    """A run's own steps beside plain PyTorch's in bf16, one after the other, as both at once do not fit; then the
    kernels of both."""
    shape = SHAPES[here.model]
    here.expect_speed("over_by_hand", 0.7, 1.05, "the same products; our loss is in chunks, our loader runs beside")
    rows = torch.randint(shape.vocab_size, (8 * shape.batch, shape.sequence_length + 1), device=here.device)
    advance = ByHand(shape, rows, compiled=here.on_gpu and compiled).advance
    by_hand = _taken(here, advance)
    here.found(by_hand=by_hand, longest_by_hand=_kernels(_profiled(here, advance, 2))["longest"])
    del advance
    seconds = alone(here, options, precision, compiled)
    here.found(over_by_hand=seconds / by_hand["seconds"])


def alone(
    here: Here,
    options: str = "default",
    precision: str = "bf16",
    compiled: bool = True,
    micro_batches: int | None = None,
) -> float:
    """A run's own steps, beside the plan, and their kernels. MFU is of bf16's peak.

    Args:
        options: of the model, a name in `OPTIONS`.
        precision: of the arithmetic.
        compiled: whether blocks are compiled, on a GPU.
        micro_batches: of a step; None: what the shape has.

    Returns:
        Seconds of a step.
    """
    shape, folder = SHAPES[here.model], os.environ["TMPDIR"]
    if micro_batches is not None:
        shape = replace(shape, micro_batches=micro_batches)
    made = config(shape, folder, OPTIONS[options], compile=here.on_gpu and compiled, precision=precision)
    plan, peak = planned(made), here.datasheet().gpu.rate("bf16")
    with torch.device("meta"):
        sizes: Any = shape.model()
        parameters = sum(p.numel() for p in GPT(vocab_size=shape.vocab_size, **sizes).parameters())
    flops = shape.flops(parameters - shape.vocab_size * shape.d_model)
    expected, (least, most) = flops / plan.step_seconds / peak, plan.speed_range
    why = "the planner, with its own range of speeds"
    here.expect_speed("ms_a_step", 1e3 * plan.step_seconds / most, 1e3 * plan.step_seconds / least, why)
    here.expect_speed("mfu", least * expected, most * expected, "the same; (6N + 12LDT) tokens/s / peak of bf16")
    if here.on_gpu:
        here.expect("bytes", 0.9 * plan.memory_bytes, 1.1 * plan.memory_bytes, "the planner, within 10 %")
    why = "scaled_dot_product_attention of causal bf16 heads chooses flash attention or cuDNN's"
    here.expect("attention_kernels", 1, None, why)
    here.expect("fused_optimizer_kernels", 1, None, "AdamW is made with fused=True (app/training/optimizer.py)")
    if here.on_gpu and precision == "bf16":
        here.expect("bf16_share_of_products", 0.98, 1.0, "autocast: no product but small ones is in float32")
    here.found(planned={"ms_a_step": 1e3 * plan.step_seconds, "parts": plan.seconds, "memory": plan.memory})
    gc.collect()
    if here.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # else what was trained by hand before would count as the run's beginning
    run = training(here, made)
    batches: Any = run.batches()

    def step() -> None:
        run.step(next(batches))

    ours = _taken(here, step)
    seconds = ours["seconds"]
    here.found(ms_a_step=1e3 * seconds, tokens_per_second=shape.tokens / seconds, mfu=flops / seconds / peak)
    here.found(ours=ours, bytes=ours.get("bytes", 0.0) - run.memory_before, parameters=parameters)
    here.found(**_kernels(_profiled(here, step, 2)))
    batches.close()
    return seconds


def _kernels(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """rows: of `_profiled`."""
    found: dict[str, Any] = {
        "attention_kernels": sum(bool(ATTENTION.search(row["name"])) for row in rows),
        "fused_optimizer_kernels": sum(bool(OPTIMIZER.search(row["name"])) for row in rows),
        "longest": [row | {"name": row["name"][:120], "ms": round(row["ms"], 4)} for row in rows[:LONGEST]],
    }
    products = [row for row in rows if PRODUCT.search(row["name"]) and not ATTENTION.search(row["name"])]
    if time := sum(row["ms"] for row in products):
        found["bf16_share_of_products"] = sum(r["ms"] for r in products if IN_BF16.search(r["name"])) / time
    return found


def _taken(here: Here, step: Callable[[], object]) -> dict[str, float]:
    """Seconds of a step: of five blocks the median, least and most; of the first one, which compiles; and on a GPU the
    bytes that all of them take at most."""
    gc.collect()
    if here.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    step()
    here.wait()
    first = time.perf_counter() - begun
    step()
    here.wait()
    begun = time.perf_counter()
    step()
    here.wait()
    each = max(1, min(10, round(BLOCK_SECONDS / (time.perf_counter() - begun))))
    count = BLOCKS if here.on_gpu else 2
    times = measure_in_turns({"": step}, blocks=count, steps_per_block=each, synchronize=here.wait)
    blocks = times[""]
    found = {"seconds": statistics.median(blocks), "least": min(blocks), "most": max(blocks), "first": first}
    return found | ({"bytes": torch.cuda.max_memory_allocated()} if here.on_gpu else {})


# --- memory -------------------------------------------------------------------------------------------------------


def larger(shape: Shape, times: int) -> Shape:
    return replace(shape, batch=times * shape.batch)


def memory(here: Here, mode: str, times: int) -> None:
    """Peak memory beside the planner's; what it does not see fitting must run out, and be no worse than that.

    mode: of activation checkpointing. times: this many of the shape's batches at once."""
    folder = os.environ["TMPDIR"]
    made = config(larger(SHAPES[here.model], times), folder, activation_checkpointing=mode)
    plan = planned(made)
    here.expect("ran_out", int(not plan.fits), int(not plan.fits), "the planner: whether it fits")
    if plan.fits and here.on_gpu:
        here.expect("memory_bytes", 0.9 * plan.memory_bytes, 1.1 * plan.memory_bytes, "the planner, within 10 %")
    here.found(planned_bytes=plan.memory_bytes, parts=plan.memory, capacity=plan.capacity)
    try:
        run = training(here, made)
        batches: Any = run.batches()
        for _ in range(3):
            run.step(next(batches))
        here.wait()
        here.found(ran_out=0, memory_bytes=memory_bytes(here.device) - run.memory_before)
        if here.on_gpu:
            here.found(reserved_bytes=torch.cuda.max_memory_reserved())
    except torch.OutOfMemoryError as error:
        here.found(ran_out=1, said=str(error)[:300])
    # The process must be able to go on after it: what a sweep or `plan --max-batch` relies on.
    here.found(after=float(torch.ones(8, device=here.device).sum()))
