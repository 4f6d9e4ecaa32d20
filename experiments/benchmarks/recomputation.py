"""`recomputation`: what activation checkpointing costs the host, which launches the operations.

The models are so small that hardly anything is computed. What a step takes is what the host takes
to launch operations, as on a GPU that waits for it. The host's time is given in forwards of a model
without checkpointing: that of a forward, and what recomputation adds to backward, for blocks that
are recomputed as a whole (full) or but for the results of products and attention (selective).

The planner has these figures as `checkpointing` in app/planner/constants.yaml. They do not hold for
compiled blocks, whose checkpointing is part of the compiled code.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import click
import torch
from torch import Tensor, nn

from app.models.gpt import GPT
from app.models.mixture import MixtureGPT
from experiments.benchmarks.harness import show
from strategies import activation_checkpointing

MODES = ("none", "full", "selective")
VOCAB_SIZE = 64
TOKENS = 8
BLOCKS = 12
MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt": GPT,
    "mixture": functools.partial(MixtureGPT, n_experts=4, top_k=2),
}
PRECISIONS = ("fp32", "bf16")
WARM_UP_STEPS = 5


class HostTimes(NamedTuple):
    """Seconds of the host.

    Args:
        forward: Of a forward.
        backward: Of a backward, with recomputation.
    """

    forward: float
    backward: float


def build(name: str, mode: str) -> nn.Module:
    """A model whose blocks are checkpointed.

    Args:
        name: Of `MODELS`.
        mode: Of `MODES`.
    """
    torch.manual_seed(0)
    model = MODELS[name](VOCAB_SIZE, d_model=32, n_layers=BLOCKS, n_heads=2)
    blocks = [f"blocks.{number}" for number in range(BLOCKS)]
    activation_checkpointing.apply(model, blocks, mode)
    return model


def step(model: nn.Module, tokens: Tensor, *, in_bf16: bool) -> HostTimes:
    """Takes one step without an optimizer.

    Args:
        model: The model.
        tokens: (1, T)
        in_bf16: Whether forward runs under autocast.
    """
    start = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
        loss = model(tokens).float().square().mean()
    between = time.process_time()
    loss.backward()
    end = time.process_time()
    model.zero_grad(set_to_none=True)
    return HostTimes(between - start, end - between)


def measure(name: str, *, in_bf16: bool, steps: int) -> dict[str, HostTimes]:
    """The median times of a model by mode; modes take turns.

    Args:
        name: Of `MODELS`.
        in_bf16: Whether forward runs under autocast.
        steps: The number of steps that count.
    """
    tokens = torch.randint(VOCAB_SIZE, (1, TOKENS))
    models = {mode: build(name, mode) for mode in MODES}
    times: dict[str, list[HostTimes]] = {mode: [] for mode in MODES}
    for _ in range(WARM_UP_STEPS + steps):
        for mode, model in models.items():
            times[mode].append(step(model, tokens, in_bf16=in_bf16))
    return {
        mode: HostTimes(*map(statistics.median, zip(*of_mode[WARM_UP_STEPS:])))
        for mode, of_mode in times.items()
    }


def ratios(times: dict[str, HostTimes]) -> dict[str, HostTimes]:
    """The times of a forward and of recomputation, in forwards without checkpointing, by mode.

    Args:
        times: As `measure` returns them.
    """
    plain = times["none"]
    return {
        mode: HostTimes(
            times[mode].forward / plain.forward,
            (times[mode].backward - plain.backward) / plain.forward,
        )
        for mode in MODES[1:]
    }


@click.command()
@click.option("--steps", default=40, type=click.IntRange(1), show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(steps: int, as_json: bool) -> None:
    """What activation checkpointing costs the host, which launches the operations."""
    torch.set_num_threads(1)
    rows = []
    figures = {}
    for name in MODELS:
        for precision in PRECISIONS:
            times = measure(name, in_bf16=precision == "bf16", steps=steps)
            row = {
                "model": f"{name}, {precision}",
                "plain forward, ms": f"{1e3 * times['none'].forward:.2f}",
            }
            for mode, ratio in ratios(times).items():
                row[f"{mode}: forward"] = f"{ratio.forward:.2f}"
                row[f"{mode}: again"] = f"{ratio.backward:.2f}"
                figures[f"{name}, {precision}, {mode}"] = ratio._asdict()
            rows.append(row)
    show("recomputation", figures, rows, as_json=as_json)
