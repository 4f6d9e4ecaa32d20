"""`recomputation`: what activation checkpointing costs the host, which launches the operations.

The models are so small that hardly anything is computed. What a step takes is what the host takes
to call operations, as on a GPU that waits for it. The table has microseconds for each operation of
a forward: of a forward without checkpointing, and what is added to forward and to backward (again)
by blocks that are recomputed as a whole (full) or but for the results of products and attention
(selective). What is added to backward contains calling the operations again.

The planner has these figures, without the call, as `checkpointing` in app/planner/constants.yaml.
They do not hold for compiled blocks, whose checkpointing is part of the compiled code.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn

from app.models.gpt import GPT
from app.models.mixture import MixtureGPT
from experiments.benchmarks.harness import show
from strategies import activation_checkpointing
from strategies.torch_internals import OperationMode

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


class Counter(OperationMode):  # type: ignore[misc]
    """Counts the operations that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operations += 1
        return operation(*args, **(kwargs or {}))


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


def count_operations(name: str, *, in_bf16: bool) -> int:
    """How many operations a forward without checkpointing calls.

    Args:
        name: Of `MODELS`.
        in_bf16: Whether forward runs under autocast.
    """
    counter = Counter()
    tokens = torch.randint(VOCAB_SIZE, (1, TOKENS))
    with counter, torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
        build(name, "none")(tokens)
    return counter.operations


def added(times: dict[str, HostTimes], operations: int) -> dict[str, HostTimes]:
    """Seconds for each operation of a forward that checkpointing adds, by mode.

    Args:
        times: As `measure` returns them.
        operations: Of a forward.
    """
    plain = times["none"]
    return {
        mode: HostTimes(
            (times[mode].forward - plain.forward) / operations,
            (times[mode].backward - plain.backward) / operations,
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
            in_bf16 = precision == "bf16"
            operations = count_operations(name, in_bf16=in_bf16)
            times = measure(name, in_bf16=in_bf16, steps=steps)
            row = {
                "model": f"{name}, {precision}",
                "a plain forward, µs": f"{1e6 * times['none'].forward / operations:.1f}",
            }
            for mode, seconds in added(times, operations).items():
                row[f"{mode}: forward"] = f"+{1e6 * seconds.forward:.1f}"
                row[f"{mode}: again"] = f"+{1e6 * seconds.backward:.1f}"
                figures[f"{name}, {precision}, {mode}"] = seconds._asdict()
            rows.append(row)
    show("recomputation", figures, rows, as_json=as_json)
