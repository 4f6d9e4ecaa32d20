"""`gpu`: tokens/s, model FLOP/s utilization and peak memory of a GPT in bf16, beside plain PyTorch and beside the plan.

    python -m experiments.benchmarks gpu [--model 1.3b] [--precision fp8]

One process, one GPU (or the CPU, with --model tiny), no Ray and no MLflow. By hand means as torchtitan has it: float32
parameters under autocast, each block compiled, scaled dot product attention, fused AdamW, the loss over all logits
compiled, gradients clipped, tokens already on the device. Ours is a run as `trireme train` makes it, its loader
included, in bf16 too or, asked with --precision, with float8 products in its blocks. They take turns, block by block,
and nothing waits for the device but the ends of a block.

Model FLOP/s utilization (MFU, Chowdhery et al. 2022, appendix B) = tokens/s · (6·N + 12·L·D·T) / peak: N parameters
without the embedding, L layers of width D, T tokens in a sequence, the datasheet's dense peak of bf16
(cluster/hardware.yaml), with fp8 too, so that both stand side by side.
Half of the second term is not computed under a causal mask; the last column of rates leaves it out.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import torch
import torch.nn.functional as F

from experiments.benchmarks.machine import table
from experiments.benchmarks.ours import Ours
from strategies import float8
from strategies.layout import LayoutError

GIB = 2.0**30


@dataclass(frozen=True)
class Shape:
    """A GPT, and how many sequences of how many tokens a step takes."""

    d_model: int
    n_layers: int
    n_heads: int
    sequence_length: int
    batch: int
    vocab_size: int = 50304

    def model(self) -> dict[str, int]:
        return {"d_model": self.d_model, "n_layers": self.n_layers, "n_heads": self.n_heads}

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * self.sequence_length

    def flops(self, parameters: int, *, causal: bool) -> float:
        """Of a step, forward and backward; parameters: without the embedding."""
        attention = (6 if causal else 12) * self.n_layers * self.d_model * self.sequence_length
        return self.tokens * (6.0 * parameters + attention)


SHAPES = {
    "124m": Shape(768, 12, 12, 1024, 32),
    "1.3b": Shape(2048, 24, 16, 2048, 8),
    "tiny": Shape(64, 2, 2, 64, 4, vocab_size=256),
}


class ByHand:
    """One step at a time; `tokens`: (samples, T + 1), int64, on the device."""

    def __init__(self, shape: Shape, tokens: torch.Tensor, *, compiled: bool) -> None:
        from app.models.gpt import GPT

        torch.manual_seed(0)
        self.shape, self.tokens, self.device = shape, tokens, tokens.device
        with torch.device(self.device):
            self.model = GPT(vocab_size=shape.vocab_size, **shape.model())  # type: ignore[arg-type]
        self.loss: Callable[..., torch.Tensor] = lambda logits, targets: F.cross_entropy(logits.float(), targets)
        if compiled:
            for block in self.model.blocks.values():
                block.compile()
            self.loss = torch.compile(self.loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
        self.done = 0

    def advance(self) -> None:
        begin = self.done * self.shape.batch % (len(self.tokens) - self.shape.batch)
        rows = self.tokens[begin : begin + self.shape.batch]
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(rows[:, :-1])
            loss = self.loss(logits.flatten(0, 1), rows[:, 1:].flatten())
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1


def ours(
    shape: Shape,
    folder: str,
    steps: int,
    device: torch.device,
    *,
    compiled: bool,
    precision: str,
    more: tuple[str, ...],
) -> Ours:
    from app.config_io import load_config

    model = ", ".join(f"{name}: {value}" for name, value in shape.model().items())
    vocabulary = f"vocab_size: {shape.vocab_size}, sequence_length: {shape.sequence_length}"
    words = [
        "task=language_modelling",
        f"task_args={{data: python, tokenizer: bytes, {vocabulary}, {model}}}",
        "strategy=single",
        f"train={{global_batch_size: {shape.batch}, steps: {steps}, precision: {precision}, clip_norm: 1.0}}",
        f"train.compile={str(compiled).lower()}",
        "train.noise_scale_every=null",
        "optimizer={name: adamw, lr: 1.0e-4, weight_decay: 0.1}",
        f"run={{name: gpu, storage: {folder}}}",
    ]
    return Ours(load_config([], [*words, *more]), device=device)


def predicted(run: Ours) -> tuple[float, float]:
    """Seconds a step and bytes that the planner expects."""
    from app.planner.auto import predict
    from app.planner.machine import running
    from app.planner.read import Reader
    from app.tasks import load_task

    config = run.job.config
    task = load_task(config.task, config.task_args)
    found = predict(config, task, run.job.layout, running(1), Reader(task))
    return found.step_seconds, found.memory_bytes


class Memory:
    """Bytes that each side holds and reaches, though both live in one process; zeros where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def building(self, name: str, build: Callable[[], Any]) -> Any:
        """What `build` makes, with a first step taken, so that the optimizer's state is there."""
        before = self._now()
        made = build()
        made.advance()
        self.held[name] = self._now() - before
        return made

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def note(self, name: str) -> None:
        if self.device.type == "cuda":
            others = sum(held for side, held in self.held.items() if side != name)
            self.peak[name] = max(self.peak.get(name, 0), torch.cuda.max_memory_allocated(self.device) - others)


def run(
    name: str, blocks: int, steps: int, *, compiled: bool, precision: str = "bf16", more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Median seconds a step of either side, and what follows from them."""
    from app.planner.machine import running

    shape = SHAPES[name]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    memory = Memory(device)
    times: dict[str, list[float]] = {"by hand": [], "trireme": []}
    with tempfile.TemporaryDirectory() as folder:
        made = ours(shape, folder, steps * (blocks + 4), device, compiled=compiled, precision=precision, more=more)
        plan = predicted(made)
        windows = torch.randint(256, (64 * shape.batch, shape.sequence_length + 1), device=device)
        sides = {
            "by hand": memory.building("by hand", lambda: ByHand(shape, windows, compiled=compiled)),
            "trireme": memory.building("trireme", made.build),
        }
        for number in range(-1, blocks):
            for side in list(sides) if number % 2 else list(reversed(sides)):
                memory.reset()
                seconds = _block(sides[side].advance, steps, device)
                memory.note(side)
                if number >= 0:
                    times[side].append(seconds)
        parameters = sum(p.numel() for p in sides["by hand"].model.parameters()) - shape.vocab_size * shape.d_model
        made.close()
    gpu = running(1).device.gpu
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "parameters": parameters,
        "flops": {"mfu": shape.flops(parameters, causal=False), "causal": shape.flops(parameters, causal=True)},
        "peak_flops": gpu.rate("bf16"),
        "tokens": shape.tokens,
        "seconds": times,
        "bytes": memory.peak,
        "predicted": {"seconds": plan[0], "bytes": plan[1]},
    }


def _block(advance: Callable[[], None], steps: int, device: torch.device) -> float:
    _wait(device)
    begun = time.perf_counter()
    for _ in range(steps):
        advance()
    _wait(device)
    return (time.perf_counter() - begun) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def shown(found: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown."""
    rows = []
    for name, one in found.items():
        sides = {side: statistics.median(seconds) for side, seconds in one["seconds"].items()}
        sides["predicted"] = one["predicted"]["seconds"]
        held = one["bytes"] | {"predicted": one["predicted"]["bytes"]}
        for side, seconds in sides.items():
            rate = {key: count / seconds / one["peak_flops"] for key, count in one["flops"].items()}
            figures = [f"{1e3 * seconds:.1f}", f"{one['tokens'] / seconds:,.0f}", f"{100 * rate['mfu']:.1f} %"]
            bytes_held = f"{held[side] / GIB:.1f}" if side in held else ""
            ratio = f"{seconds / sides['by hand']:.3f}"
            rows.append([name, side, *figures, f"{100 * rate['causal']:.1f} %", bytes_held, ratio])
    heads = ["GPT", "", "ms a step", "tokens/s", "MFU", "MFU, causal", "peak GiB", "time ÷ by hand"]
    return table(heads, rows, about=f"; {next(iter(found.values()))['device']}")


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(SHAPES)), help="Default: 124m and 1.3b.")
@click.option("--blocks", default=10, type=click.IntRange(1), show_default=True, help="Blocks of steps per side.")
@click.option("--steps", default=10, show_default=True, help="Steps of a block.")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True)
@click.option("--precision", default="bf16", show_default=True, type=click.Choice(["bf16", "fp8"]), help="Of ours.")
@click.option("--json", "as_json", is_flag=True)
@click.argument("more", nargs=-1)
def main(
    models: tuple[str, ...],
    blocks: int,
    steps: int,
    compiled: bool,
    precision: str,
    as_json: bool,
    more: tuple[str, ...],
) -> None:
    """A GPT in bf16 on one device, ours beside plain PyTorch. MORE: keys of an experiment that change ours alone."""
    if not models and not torch.cuda.is_available():
        raise click.UsageError("there is no GPU here: on a CPU write --model tiny")
    names = list(models) or ["124m", "1.3b"]
    if precision == "fp8":
        float8.require(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found = {name: run(name, blocks, steps, compiled=compiled, precision=precision, more=more) for name in names}
    click.echo(json.dumps(found) if as_json else shown(found))


if __name__ == "__main__":
    try:
        main()
    except LayoutError as error:
        raise SystemExit(str(error)) from None
