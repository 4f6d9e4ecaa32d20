"""`operators`: what the options of a GPT change in a step, counted: operators launched, bytes moved, bytes kept.

A micro-batch's forward and backward in bf16 under autocast, nothing compiled, is watched by the planner's watcher
(app/planner/trace.py) on shapes alone: as a GPU's kernels would see it, with attention and a norm as one kernel each,
the loss in chunks. Products and attention are bound by their arithmetic; all others by the bytes that they move, so
these are what time is lost to. `gpu first` takes the same variants' time (gpu_first/speed.py).
"""

from __future__ import annotations

from typing import Any

import click
import torch
from torch import Tensor, nn

from app.models.gpt import GPT
from app.planner.trace import AFTER, BEFORE, watch
from experiments.benchmarks.gpt import OPTIONS, SHAPES, Shape
from experiments.benchmarks.harness import show
from strategies.torch_internals import fake_mode


def counted(shape: Shape, options: dict[str, bool]) -> dict[str, float]:
    """Of a micro-batch: operators launched, of these products; bytes that those other than products and attention
    move, that products do, and that are kept for backward."""
    with torch.device("meta"):
        sizes: dict[str, Any] = {**shape.model(), **options}
        model = GPT(shape.vocab_size, **sizes)

    def loss(module: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(tokens, tokens)

    with fake_mode():  # type: ignore[union-attr]
        model.to_empty(device="cpu")
        tokens = torch.zeros(shape.batch, shape.sequence_length, dtype=torch.long)
        trace = watch(model, [f"blocks.{name}" for name in model.blocks], loss)
    found = dict.fromkeys(("operators", "products", "moved", "moved by products", "kept"), 0.0)
    for name in (BEFORE, *trace.order, AFTER):
        values = trace.parts[name].values
        for phase in ("forward", "backward"):
            products = trace.parts[name].products[phase]
            found["operators"] += values[f"operations_{phase}"]
            found["products"] += len(products)
            found["moved"] += values[f"moved_{phase}"]
            found["moved by products"] += sum(2 * (m * n + m * k + n * k) * many for m, n, k, many in products)
        found["kept"] += values["saved"]
    return found


@click.command()
@click.option("--json", "as_json", is_flag=True)
def main(as_json: bool) -> None:
    """What the options of a GPT change in a step: operators launched, bytes moved and kept."""
    found = {name: {said: counted(SHAPES[name], given) for said, given in OPTIONS.items()} for name in ("124m", "1.3b")}
    rows = []
    for name, variants in found.items():
        for said, values in variants.items():
            share = values["moved"] / variants["default"]["moved"]
            row = {"a micro-batch": f"{name}, {said}", "operators": f"{values['operators']:,.0f}"}
            row |= {"of these products": f"{values['products']:,.0f}", "moved, GB": f"{values['moved'] / 1e9:.1f}"}
            row |= {"of default": f"{share:.2f}", "by products, GB": f"{values['moved by products'] / 1e9:.1f}"}
            rows.append(row | {"kept, GB": f"{values['kept'] / 1e9:.1f}"})
    show("operators", found, rows, as_json)
