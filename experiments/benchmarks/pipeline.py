"""`pipeline`: our schedules beside torch.distributed.pipelining's.

Two processes, a GPT of 8 blocks (width 256, 128 tokens), AdamW; all sides take turns, a step each (harness.py).
`torch …` is stage and schedule as its documentation has them, written by hand; `ours …` is `parallelize`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from experiments.benchmarks.harness import answer, beside, measured, ratio_row, show, torchrun

BLOCKS, WIDTH, TOKENS, VOCABULARY, ROWS, STAGES = 8, 256, 128, 256, 2, 2
TORCH = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}
"""Schedule → torch's class, and stages per process."""
OURS = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_h2": 1, "zbv": 1}
"""Schedule → chunks."""
PAIRS = [(f"ours {name}", f"torch {name}") for name in TORCH] + [
    (f"ours {name}", "ours 1f1b") for name in ("zb_h1", "zb_h2", "zbv")
]


def _worker(micro_batches: int, rounds: int) -> NoReturn:
    import torch.distributed as dist

    from strategies.collectives import keep_freed_memory

    keep_freed_memory()  # for every side, as Trireme's workers do
    dist.init_process_group("gloo")
    sides = {f"torch {name}": _torch(name, micro_batches, dist.get_rank()) for name in TORCH}
    sides |= {f"ours {name}": _ours(name, micro_batches) for name in OURS}

    times = measured(sides, rounds, 1, dist.barrier)
    answer(times)


def _build() -> Any:
    import torch

    from app.models.gpt import GPT

    torch.manual_seed(0)
    return GPT(VOCABULARY, d_model=WIDTH, n_layers=BLOCKS, n_heads=4)


def _loss(logits: Any, targets: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _batch(micro_batches: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (micro_batches * ROWS, TOKENS + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _stepping(forward_backward: Callable[[], object], parameters: Any) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def step() -> None:
        forward_backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _part(model: Any, part: int, parts: int) -> Any:
    """By hand: a stage's blocks, with the embedding before the first and the head after the last."""
    from torch import nn

    size = BLOCKS // parts
    layers = list(model.blocks.values())[part * size : (part + 1) * size]
    if part == 0:
        layers.insert(0, model.embed)
    if part == parts - 1:
        layers += [model.norm, model.head]
    return nn.Sequential(*layers)


def _torch(name: str, micro_batches: int, rank: int) -> Callable[[], None]:
    import torch
    import torch.distributed.pipelining as pipelining
    from torch import nn

    kind, chunks = TORCH[name]
    parts, model, (x, y) = STAGES * chunks, _build(), _batch(micro_batches)
    own = [rank] if chunks == 1 else [rank, parts - 1 - rank] if name == "zbv" else [rank, STAGES + rank]
    stages = [pipelining.PipelineStage(_part(model, p, parts), p, parts, torch.device("cpu")) for p in own]
    schedule = getattr(pipelining, kind)(stages[0] if chunks == 1 else stages, micro_batches, loss_fn=_loss)
    given = (x,) if 0 in own else ()
    target = {"target": y, "losses": []} if parts - 1 in own else {}
    parameters = nn.ModuleList([stage.submod for stage in stages]).parameters()
    return _stepping(lambda: schedule.step(*given, **target), parameters)


def _ours(name: str, micro_batches: int) -> Callable[[], None]:
    import torch

    from strategies.parallelize import Options, choose, parallelize

    def loss(model: Any, batch: Any) -> Any:
        return _loss(model(batch[0]), batch[1])

    batches = list(zip(*(tensor.chunk(micro_batches) for tensor in _batch(micro_batches))))
    equal = (BLOCKS // STAGES,) * STAGES if OURS[name] == 1 and name != "zbv" else None
    options = Options(schedule=name, chunks=OURS[name], stages=equal)
    cpu, layout = torch.device("cpu"), choose("pipeline", STAGES)
    parallel = parallelize(_build, layout, options, device=cpu, example=(loss, batches[0]))
    weights = [1 / micro_batches] * micro_batches
    return _stepping(lambda: parallel.forward_backward(batches, weights, loss), parallel.parameters())


@click.command()
@click.option("--rounds", default=30, type=click.IntRange(1), show_default=True)
@click.option("--micro-batches", default=8, type=click.IntRange(2), show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(rounds: int, micro_batches: int, as_json: bool) -> None:
    """Our schedules beside torch's, in two processes of one machine."""
    times = torchrun("experiments.benchmarks.pipeline", micro_batches, rounds)
    rows = [ratio_row(f"{side} / {base}", beside(times, base), base, side) for side, base in PAIRS]
    show("pipeline", times, rows, as_json)


if __name__ == "__main__":
    _worker(int(sys.argv[1]), int(sys.argv[2]))
