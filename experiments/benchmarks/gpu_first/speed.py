"""Checks of speed and memory: the kernels that run, and a GPT beside plain PyTorch and the plan."""

import gc
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from app.models.cross_entropy import eager_chunk_loss, fusible_chunk_loss
from app.models.gpt import GPT
from app.planner.estimate import Estimate
from app.training.job import memory_bytes
from experiments.benchmarks.gpt import OPTIONS, SHAPES, ByHand, Shape
from experiments.benchmarks.gpu_first.check import CannotRun, CheckContext
from experiments.benchmarks.gpu_first.training import estimate_of, make_config, make_training
from experiments.benchmarks.harness import measure_in_turns

MAX_KERNELS = 40
"""How many kernels are written, the longest ones."""
BLOCKS = 5
"""Blocks of steps that are measured on a GPU."""
BLOCK_SECONDS = 2.0
ATTENTION = re.compile(r"flash|fmha|cudnn.*sdpa", re.IGNORECASE)
OPTIMIZER = re.compile(r"fused_?adam", re.IGNORECASE)
PRODUCT = re.compile(r"gemm|nvjet|cutlass|wgmma|cublas", re.IGNORECASE)
BF16_PRODUCT = re.compile(r"bf16|bfloat16|nvjet_(sm\d+_)?t", re.IGNORECASE)
"""From CUDA 12.8 on, cuBLAS names its bf16 kernels nvjet_t…."""


# --- kernels --------------------------------------------------------------------------------------


def _profile(
    context: CheckContext, function: Callable[[], object], calls: int
) -> list[dict[str, Any]]:
    """The kernels of a function, the longest ones first; of a CPU, its operators.

    Returns:
        For each kernel its name, and for one call of the function the number of its calls, their
        time (ms), and their share of the time of all kernels.
    """
    activities = [ProfilerActivity.CPU]
    if context.on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(calls):
            function()
        context.synchronize()
    kernels = []
    for event in profiler.key_averages():
        if context.on_gpu and not str(event.device_type).endswith("CUDA"):
            continue
        microseconds = event.self_device_time_total if context.on_gpu else event.self_cpu_time_total
        kernel = {
            "name": event.key,
            "calls": event.count / calls,
            "ms": microseconds / 1e3 / calls,
        }
        kernels.append(kernel)
    total_ms = sum(kernel["ms"] for kernel in kernels) or 1.0
    for kernel in kernels:
        kernel["share"] = round(kernel["ms"] / total_ms, 4)
    return sorted(kernels, key=lambda kernel: -kernel["ms"])


def _longest(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest kernels, with short names and rounded times."""
    longest = []
    for kernel in kernels[:MAX_KERNELS]:
        longest.append({**kernel, "name": kernel["name"][:120], "ms": round(kernel["ms"], 4)})
    return longest


def _kernel_figures(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """What is found about the kernels of a step."""
    attention = [kernel for kernel in kernels if ATTENTION.search(kernel["name"])]
    optimizer = [kernel for kernel in kernels if OPTIMIZER.search(kernel["name"])]
    figures: dict[str, Any] = {
        "attention_kernels": len(attention),
        "fused_optimizer_kernels": len(optimizer),
        "longest": _longest(kernels),
    }
    products_ms = 0.0
    bf16_products_ms = 0.0
    for kernel in kernels:
        name = kernel["name"]
        if PRODUCT.search(name) and not ATTENTION.search(name):
            products_ms += kernel["ms"]
            if BF16_PRODUCT.search(name):
                bf16_products_ms += kernel["ms"]
    if products_ms:
        figures["bf16_share_of_products"] = bf16_products_ms / products_ms
    return figures


def loss_chunks(context: CheckContext) -> None:
    """One chunk of the loss over a large vocabulary, compiled and operation by operation."""
    if not context.on_gpu and shutil.which("g++") is None:
        raise CannotRun("torch.compile needs a C++ compiler for a CPU")
    rows, words = (2048, 50304) if context.on_gpu else (64, 9000)
    seconds_for_6_bytes = 6 * rows * words / context.datasheet().bandwidth
    context.expect_speed(
        "ms",
        0.0,
        2e3 * seconds_for_6_bytes,
        why="at most twice the time of 6 bytes a logit at the planner's bandwidth",
    )
    context.expect_speed(
        "times_faster",
        1.8,
        6.0,
        why="18 bytes a logit or more are moved without, 6 to 10 with",
    )
    context.expect("difference", 0.0, 2**-8, why="one rounding to bfloat16 of a number below 1")
    logits = torch.randn(rows, words, device=context.device).bfloat16()
    targets = torch.randint(words, (rows,), device=context.device)
    compiled = torch.compile(fusible_chunk_loss, fullgraph=True)
    seconds = {}
    extra_bytes = {}
    for name, function in (("compiled", compiled), ("one by one", eager_chunk_loss)):
        seconds[name] = context.seconds_of(lambda function=function: function(logits, targets))  # type: ignore[misc]
        if context.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            bytes_before = torch.cuda.memory_allocated()
            function(logits, targets)
            extra_bytes[name] = torch.cuda.max_memory_allocated() - bytes_before
    _, gradient = compiled(logits, targets)
    _, expected_gradient = eager_chunk_loss(logits, targets)
    difference = float((gradient.float() - expected_gradient).abs().max())
    context.measured(
        ms=1e3 * seconds["compiled"],
        times_faster=seconds["one by one"] / seconds["compiled"],
        extra_bytes=extra_bytes,
        difference=difference,
    )


# --- speed ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run's own steps are taken.

    Attributes:
        options: Options of the model, a name in `OPTIONS`.
        precision: The arithmetic.
        compiled: Whether blocks are compiled, on a GPU.
        micro_batches: The micro-batches of a step; None for those of the shape.
    """

    options: str = "default"
    precision: str = "bf16"
    compiled: bool = True
    micro_batches: int | None = None


def speed(
    context: CheckContext,
    options: str = "default",
    precision: str = "bf16",
    compiled: bool = True,
) -> None:
    """A run's own steps beside those of plain PyTorch in bf16, and the kernels of both.

    One is measured after the other, because both do not fit at once.
    """
    shape = SHAPES[context.model]
    context.expect_speed(
        "over_by_hand",
        0.7,
        1.05,
        why="the same products; our loss is in chunks, our loader runs beside",
    )
    size = (8 * shape.batch, shape.sequence_length + 1)
    rows = torch.randint(shape.vocab_size, size, device=context.device)
    step = ByHand(shape, rows, compiled=context.on_gpu and compiled).advance
    by_hand = _measure_steps(context, step)
    kernels = _profile(context, step, 2)
    context.measured(by_hand=by_hand, longest_by_hand=_longest(kernels))
    del step
    run_options = RunOptions(options=options, precision=precision, compiled=compiled)
    seconds = _measure_run(context, run_options)
    context.measured(over_by_hand=seconds / by_hand["seconds"])


def alone(
    context: CheckContext,
    options: str = "default",
    precision: str = "bf16",
    compiled: bool = True,
    micro_batches: int | None = None,
) -> None:
    """A run's own steps beside the plan, and their kernels; see `RunOptions`."""
    run_options = RunOptions(
        options=options, precision=precision, compiled=compiled, micro_batches=micro_batches
    )
    _measure_run(context, run_options)


def _measure_run(context: CheckContext, options: RunOptions) -> float:
    """Measure a run's own steps, beside the plan, and their kernels. MFU is of bf16's peak.

    Returns:
        The seconds of a step.
    """
    shape = SHAPES[context.model]
    if options.micro_batches is not None:
        shape = replace(shape, micro_batches=options.micro_batches)
    config = make_config(
        shape,
        os.environ["TMPDIR"],
        OPTIONS[options.options],
        compile=context.on_gpu and options.compiled,
        precision=options.precision,
    )
    parameters = _count_parameters(shape)
    flops = shape.flops(parameters - shape.vocab_size * shape.d_model)
    peak = context.datasheet().gpu.rate("bf16")
    estimate = estimate_of(config)
    _expect_of_run(context, estimate, mfu=flops / estimate.step_seconds / peak)
    if context.on_gpu and options.precision == "bf16":
        context.expect(
            "bf16_share_of_products",
            0.98,
            1.0,
            why="autocast: no product but small ones is in float32",
        )
    planned = {
        "ms_a_step": 1e3 * estimate.step_seconds,
        "parts": estimate.seconds,
        "memory": estimate.memory,
    }
    context.measured(planned=planned)
    # What was trained by hand before must not count as the memory that the run starts with.
    _free_memory(context)
    run = make_training(context, config)
    batches: Any = run.batches()

    def step() -> None:
        run.step(next(batches))

    measured = _measure_steps(context, step)
    seconds = measured["seconds"]
    context.measured(
        ms_a_step=1e3 * seconds,
        tokens_per_second=shape.tokens / seconds,
        mfu=flops / seconds / peak,
        ours=measured,
        bytes=measured.get("bytes", 0.0) - run.memory_before,
        parameters=parameters,
    )
    context.measured(**_kernel_figures(_profile(context, step, 2)))
    batches.close()
    return seconds


def _count_parameters(shape: Shape) -> int:
    with torch.device("meta"):
        sizes: Any = shape.model()
        model = GPT(vocab_size=shape.vocab_size, **sizes)
    return sum(parameter.numel() for parameter in model.parameters())


def _expect_of_run(context: CheckContext, estimate: Estimate, *, mfu: float) -> None:
    """Write what is expected of a run's own steps.

    Args:
        context: Where the check runs.
        estimate: The planner's.
        mfu: The MFU at the speed that the planner expects.
    """
    least_speed, most_speed = estimate.speed_range
    ms = 1e3 * estimate.step_seconds
    context.expect_speed(
        "ms_a_step",
        ms / most_speed,
        ms / least_speed,
        why="the planner, with its own range of speeds",
    )
    context.expect_speed(
        "mfu",
        least_speed * mfu,
        most_speed * mfu,
        why="the same; (6N + 12LDT) tokens/s / peak of bf16",
    )
    if context.on_gpu:
        context.expect(
            "bytes",
            0.9 * estimate.memory_bytes,
            1.1 * estimate.memory_bytes,
            why="the planner, within 10 %",
        )
    context.expect(
        "attention_kernels",
        1,
        None,
        why="scaled_dot_product_attention of causal bf16 heads chooses flash attention or cuDNN's",
    )
    context.expect(
        "fused_optimizer_kernels",
        1,
        None,
        why="AdamW is made with fused=True (app/training/optimizer.py)",
    )


def _free_memory(context: CheckContext) -> None:
    """Free memory that nothing uses, and forget how much was used."""
    gc.collect()
    if context.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _seconds_of_step(context: CheckContext, step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    context.synchronize()
    return time.perf_counter() - start


def _measure_steps(context: CheckContext, step: Callable[[], object]) -> dict[str, float]:
    """Measure steps.

    Returns:
        Seconds of a step: of several blocks the median, the least and the most, and of the first
        step, which compiles. On a GPU also the most bytes that they use.
    """
    _free_memory(context)
    first = _seconds_of_step(context, step)
    _seconds_of_step(context, step)
    usual = _seconds_of_step(context, step)
    times = measure_in_turns(
        {"": step},
        blocks=BLOCKS if context.on_gpu else 2,
        steps_per_block=max(1, min(10, round(BLOCK_SECONDS / usual))),
        synchronize=context.synchronize,
    )
    seconds = times[""]
    measured = {
        "seconds": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "first": first,
    }
    if context.on_gpu:
        measured["bytes"] = torch.cuda.max_memory_allocated()
    return measured


# --- memory ---------------------------------------------------------------------------------------


def with_larger_batch(shape: Shape, times: int) -> Shape:
    return replace(shape, batch=times * shape.batch)


def memory(context: CheckContext, mode: str, times: int) -> None:
    """Peak memory beside the planner's. What does not fit by the plan must run out of memory.

    Args:
        context: Where the check runs.
        mode: The mode of activation checkpointing.
        times: How many of the shape's batches there are at once.
    """
    shape = with_larger_batch(SHAPES[context.model], times)
    config = make_config(shape, os.environ["TMPDIR"], activation_checkpointing=mode)
    estimate = estimate_of(config)
    runs_out = int(not estimate.fits)
    context.expect("ran_out", runs_out, runs_out, why="the planner: whether it fits")
    if estimate.fits and context.on_gpu:
        context.expect(
            "memory_bytes",
            0.9 * estimate.memory_bytes,
            1.1 * estimate.memory_bytes,
            why="the planner, within 10 %",
        )
    context.measured(
        planned_bytes=estimate.memory_bytes, parts=estimate.memory, capacity=estimate.capacity
    )
    try:
        run = make_training(context, config)
        batches: Any = run.batches()
        for _ in range(3):
            run.step(next(batches))
        context.synchronize()
        context.measured(ran_out=0, memory_bytes=memory_bytes(context.device) - run.memory_before)
        if context.on_gpu:
            context.measured(reserved_bytes=torch.cuda.max_memory_reserved())
    except torch.OutOfMemoryError as error:
        context.measured(ran_out=1, said=str(error)[:300])
    # The process must be able to continue, as a sweep and `plan --max-batch` do.
    context.measured(after=float(torch.ones(8, device=context.device).sum()))
