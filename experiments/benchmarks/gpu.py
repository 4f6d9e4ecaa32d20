"""`gpu`: tokens/s, model FLOP/s utilization and peak memory of a GPT in bf16, beside plain PyTorch and beside the plan.

One process, one GPU (or the CPU, with --model tiny), no Ray and no MLflow. By hand: gpt.py. Ours is the loop as a
worker runs it, its loader included, in bf16 too or, with train.precision=fp8, with float8 products in its blocks. They
take turns (harness.py), and only the ends of a block wait for the device.

Model FLOP/s utilization (MFU) is what app/flops.py counts for it, of bf16's peak with fp8 too.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import click
import torch

from experiments.benchmarks.gpt import SHAPES, ByHand, Shape
from experiments.benchmarks.harness import Ours, measured, show
from strategies.layout import LayoutError

GIB = 2.0**30


def _config(shape: Shape, folder: str, steps: int, compiled: bool, keys: tuple[str, ...]) -> Any:
    from app.config_io import load_config

    model = ", ".join(f"{name}: {value}" for name, value in shape.model().items())
    vocabulary = f"vocab_size: {shape.vocab_size}, sequence_length: {shape.sequence_length}"
    words = [
        "task=language_modelling",
        f"task_args={{data: python, tokenizer: bytes, {vocabulary}, {model}}}",
        "strategy=single",
        f"train={{steps: {steps}, precision: bf16, clip_norm: 1.0, micro_batch_size: {shape.batch}}}",
        f"train.global_batch_size={shape.batch * shape.micro_batches}",
        f"train.compile={str(compiled).lower()}",
        "train.noise_scale_every=null",
        "optimizer={name: adamw, lr: 1.0e-4, weight_decay: 0.1}",
        f"run={{name: gpu, storage: {folder}}}",
    ]
    return load_config([], [*words, *keys])


def _predicted(run: Ours) -> dict[str, float]:
    """Seconds a step and bytes that the planner expects, and the device's peak in FLOP/s."""
    from app.planner.advice import predict
    from app.planner.machine import running
    from app.tasks import load_task

    task, here = load_task(run.config.task, run.config.task_args), running(1)
    found = predict(run.config, task, run.job.layout, here)
    return {"seconds": found.step_seconds, "bytes": found.memory_bytes, "peak_flops": here.device.gpu.rate("bf16")}


def run(name: str, blocks: int, steps: int, compiled: bool, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """Seconds a step of either side, by block, and what follows from them."""
    shape, on_gpu = SHAPES[name], torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    peak: dict[str, int] = {}

    def started(side: str, build: Callable[[], Any]) -> Any:
        """What `build` makes, with its first steps taken; notes the memory that it reaches, though both sides live in
        one process."""
        before = torch.cuda.memory_allocated() if on_gpu else 0
        made = build()
        for _ in range(3):
            made.advance()
            wait()
            if on_gpu:
                peak[side] = torch.cuda.max_memory_allocated() - before
                torch.cuda.reset_peak_memory_stats()
        return made

    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(_config(shape, folder, steps * (blocks + 4), compiled, keys), device)
        plan = _predicted(ours)
        windows = torch.randint(256, (64 * shape.batch, shape.sequence_length + 1), device=device)
        by_hand = started("by hand", lambda: ByHand(shape, windows, compiled=compiled))
        started("trireme", ours.build)
        times = measured({"by hand": by_hand.advance, "trireme": ours.advance}, blocks, steps, wait)
        ours.close()
    parameters = sum(p.numel() for p in by_hand.model.parameters()) - shape.vocab_size * shape.d_model
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "parameters": parameters,
        "flops": shape.flops(parameters),
        "tokens": shape.tokens,
        "seconds": times,
        "bytes": peak,
        "predicted": plan,
    }


def rows(name: str, found: dict[str, Any]) -> list[dict[str, str]]:
    plan, made = found["predicted"], []
    sides = {side: statistics.median(seconds) for side, seconds in found["seconds"].items()}
    for side, seconds in (sides | {"predicted": plan["seconds"]}).items():
        reached = (found["bytes"] | {"predicted": plan["bytes"]}).get(side)
        row = {f"GPT, {found['device']}": f"{name}, {side}", "ms a step": f"{1e3 * seconds:.1f}"}
        row |= {"tokens/s": f"{found['tokens'] / seconds:,.0f}"}
        row |= {"MFU": f"{found['flops'] / seconds / plan['peak_flops']:.1%}"}
        row |= {"peak GiB": f"{reached / GIB:.1f}" if reached else ""}
        made.append(row | {"time ÷ by hand": f"{seconds / sides['by hand']:.3f}"})
    return made


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(SHAPES)), help="Default: 124m and 1.3b.")
@click.option("--blocks", default=10, type=click.IntRange(1), show_default=True, help="Blocks of steps per side.")
@click.option("--steps", default=10, type=click.IntRange(1), show_default=True, help="Steps of a block.")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True)
@click.option("--json", "as_json", is_flag=True)
@click.argument("keys", nargs=-1)
def main(
    models: tuple[str, ...], blocks: int, steps: int, compiled: bool, as_json: bool, keys: tuple[str, ...]
) -> None:
    """A GPT in bf16 on one device, ours beside plain PyTorch. KEYS: of an experiment, such as train.precision=fp8; they
    change ours alone."""
    if not models and not torch.cuda.is_available():
        raise click.UsageError("there is no GPU here: on a CPU write --model tiny")
    try:
        found = {name: run(name, blocks, steps, compiled, keys) for name in models or ("124m", "1.3b")}
    except LayoutError as error:
        raise click.ClickException(str(error)) from None
    show("gpu", found, [row for name, one in found.items() for row in rows(name, one)], as_json)
