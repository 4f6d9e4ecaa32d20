"""Whether a rate that is found at one width holds at others: how activations grow with the width.

The coordinate check of Yang et al. 2022 (2203.03466, appendix D.1). Models of several widths take a
few steps on one batch, in this process. Where the rates of all tensors fit the width, a step
changes what each block gives by as much in a wide model as in a narrow one; elsewhere the change
grows or vanishes by a power of the width, which is printed for each block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from app.config import Config
from app.data.loader import fetch
from app.data.mixture import order_of
from app.data.randomness import seed_everything
from app.data.stream import is_stream
from app.errors import UserError
from app.run.base_model import arguments_of, grown, is_part_of, merged, widths_of
from app.run.prepare import read_task
from app.tasks.base import Task
from app.tasks.build import build_model
from app.training.optimizer import build_optimizer, hidden_matrices
from app.training.width_transfer import KEY, Widths, scale_initial_weights
from strategies.blocks import find_blocks
from strategies.tree import tree_leaves

MOST_GROWTH = 0.3
"""A power of the width. A rate that does not follow the width shows as ½ or 1."""
LEAST_GROWTH = -0.7
"""An output's first changes shrink like its initial values, by a power of -½ (2203.03466)."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one module gives after some steps, by width.

    Args:
        module: Its name.
        step: How many steps were taken.
        sizes: The mean absolute activation by width.
        growth: The power of the width that it follows.
        change_growth: The power of the width that its mean absolute change since the beginning
            follows; None before the first step.
    """

    module: str
    step: int
    sizes: dict[int, float]
    growth: float
    change_growth: float | None


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of a coordinate check.

    Args:
        transferred: The rows with optimizer.width_transfer.
        plain: Those without.
        holds: Whether no change grows or vanishes with it.
        verdict: A sentence that says so.
    """

    transferred: list[Row]
    plain: list[Row]
    holds: bool
    verdict: str


def check(config: Config, widths: Sequence[int], *, steps: int) -> Check:
    """Train models of several widths for a few steps, with width_transfer and without.

    Args:
        config: The experiment.
        widths: Values of the first number in optimizer.width_transfer.base. Its other numbers grow
            in proportion.
        steps: How many steps.

    Raises:
        UserError: The experiment does not say what the width is, or has no such widths.
    """
    if len(set(widths)) < 2 or min(widths) < 1:
        raise UserError(
            f"--widths is {','.join(map(str, widths))}: write two or more, such as 64,128"
        )
    configs = at_widths(config, widths)
    transferred: dict[int, _Activations] = {}
    plain: dict[int, _Activations] = {}
    for width, of_width in configs.items():
        task = read_task(of_width)
        transferred[width] = _activations(of_width, task, widths_of(of_width, task), steps=steps)
        plain[width] = _activations(of_width, task, {}, steps=steps)
    rows = _rows(transferred)
    holds, verdict = _judge(rows)
    return Check(transferred=rows, plain=_rows(plain), holds=holds, verdict=verdict)


def at_widths(config: Config, widths: Sequence[int]) -> dict[int, Config]:
    """The experiment at several widths, by width; see `check`.

    Raises:
        UserError: The experiment does not say what the width is, or has no such widths.
    """
    base = config.optimizer.width_transfer.get("base") or {}
    first = _first_number(base)
    if first is None:
        raise UserError(
            f"the experiment has no {KEY}, which says what the width is: "
            f"write for instance '{KEY}={{base: {{d_model: 64, n_heads: 1}}}}'"
        )
    arguments = arguments_of(config, read_task(config))
    if is_part_of(base, arguments):  # the experiment is the base model, of which all grows
        arguments = {}
    return {
        width: replace(
            config, task_args=merged(config.task_args, grown(base, arguments, width / first))
        )
        for width in sorted(set(widths))
    }


def _first_number(values: Mapping[str, Any]) -> float | None:
    for value in values.values():
        if isinstance(value, Mapping):
            number = _first_number(value)
            if number is not None:
                return number
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, (int, float)) and not isinstance(first, bool):
            return float(first)
    return None


# --- a few steps ----------------------------------------------------------------------------------

_Activations = dict[tuple[str, int], tuple[float, float]]
"""By module and step, the mean absolute activation and the mean absolute change since step 0."""


def _activations(config: Config, task: Task, widths: Widths, *, steps: int) -> _Activations:
    """What the modules of a new model give, before each of a few steps and after the last."""
    seed = config.train.seed
    batch = batch_of(config, task, 0)
    model, blocks, optimizer = new_model(config, task, widths)
    first: dict[str, Tensor] = {}
    result: _Activations = {}
    for step in range(steps + 1):
        seed_everything(seed)  # the same dropout in every step
        with _recorded(model, blocks) as outputs:
            loss = task.loss(model, batch)
        for name, output in outputs.items():
            before = first.setdefault(name, output)
            size = float(output.abs().mean())
            result[name, step] = (size, float((output - before).abs().mean()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return result


def new_model(
    config: Config, task: Task, widths: Widths
) -> tuple[nn.Module, list[str], torch.optim.Optimizer]:
    """A task's model with its initial weights, the names of its blocks, and its optimizer.

    Args:
        config: Has the seed and the optimizer.
        task: The task.
        widths: For optimizer.width_transfer; {} goes without.
    """
    seed_everything(config.train.seed)
    model = build_model(task)
    scale_initial_weights(model, widths)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    blocks = find_blocks(model, task.blocks(model))
    optimizer = build_optimizer(
        config.optimizer,
        [parameter for _, parameter in trained],
        names={parameter: name for name, parameter in trained},
        hidden=hidden_matrices(model, blocks),
        widths=widths,
    )
    return model, blocks, optimizer


def batch_of(config: Config, task: Task, step: int) -> Any:
    """The global batch of a step, counted from 0; of a micro-batch's size if that is set.

    Raises:
        UserError: The data is a stream.
    """
    data = task.train_data()
    if is_stream(data):
        raise UserError("a coordinate check needs a map-style data set, not a stream")
    size = config.train.micro_batch_size or config.train.global_batch_size
    start = step * size
    indices = order_of(data, config.train.seed).indices(start, size).tolist()
    return fetch(data, list(zip(indices, range(start, start + size), strict=True)))


@contextmanager
def _recorded(model: nn.Module, blocks: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """What the blocks give, and the layers beside them, when the model is called."""
    outputs: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{block}.") for block in blocks)
        is_layer = not list(module.children()) and bool(list(module.parameters()))
        if name in blocks or (is_layer and not is_inside):

            def record(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                if tensors and tensors[0].is_floating_point():
                    outputs[name] = tensors[0].detach().float()

            handles.append(module.register_forward_hook(record))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


# --- what it says ---------------------------------------------------------------------------------


def _rows(by_width: Mapping[int, _Activations]) -> list[Row]:
    keys = list(next(iter(by_width.values())))
    rows = []
    for module, step in keys:
        values = {width: activations[module, step] for width, activations in by_width.items()}
        changes = {width: change for width, (_, change) in values.items()}
        sizes = {width: size for width, (size, _) in values.items()}
        rows.append(
            Row(
                module=module,
                step=step,
                sizes=sizes,
                growth=growth(sizes),
                change_growth=growth(changes) if step else None,
            )
        )
    return sorted(rows, key=lambda row: ([r[0] for r in keys].index(row.module), row.step))


def growth(values: Mapping[int, float]) -> float:
    """The power of the width that values follow: the slope of their logarithms, by least squares.

    Args:
        values: By width, at least two.

    Returns:
        nan if a value is 0 or not finite.
    """
    if not all(math.isfinite(value) and value > 0 for value in values.values()):
        return math.nan
    x = torch.tensor([math.log(width) for width in values], dtype=torch.float64)
    y = torch.tensor([math.log(value) for value in values.values()], dtype=torch.float64)
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())


def _judge(rows: Sequence[Row]) -> tuple[bool, str]:
    last_step = max(row.step for row in rows)
    changes = [
        (row.change_growth, row.module)
        for row in rows
        if row.step == last_step and row.change_growth is not None
    ]
    finite = [(power, module) for power, module in changes if math.isfinite(power)]
    if not finite or len(finite) < len(changes):
        return False, "undecided: some outputs do not change, or are not finite"
    most, growing = max(finite)
    least, vanishing = min(finite)
    if most > MOST_GROWTH:
        return False, (
            f"the rate does not hold: what {last_step} steps change in {growing} grows with the "
            f"width, by a power of {most:+.2f}"
        )
    if least < LEAST_GROWTH:
        return False, (
            f"the rate does not hold: what {last_step} steps change in {vanishing} vanishes with "
            f"the width, by a power of {least:+.2f}"
        )
    return True, (
        f"the rate holds: what {last_step} steps change follows the width by a power of "
        f"{least:+.2f} to {most:+.2f}"
    )


def table(outcome: Check) -> str:
    """The check for a person."""
    lines = []
    parts = (("with", outcome.transferred), ("without", outcome.plain))
    for word, rows in parts:
        widths = list(rows[0].sizes)
        heads = "".join(f"{width:>10}" for width in widths)
        lines.append(f"{word} width_transfer: mean |activation| at each width")
        lines.append(f"{'':24}{'step':>6}{heads}{'growth':>10}{'of change':>11}")
        for row in rows:
            sizes = "".join(f"{size:>10.4g}" for size in row.sizes.values())
            change = "" if row.change_growth is None else f"{row.change_growth:+.2f}"
            name = row.module if row.step == 0 else ""
            lines.append(f"{name:24}{row.step:>6}{sizes}{row.growth:>+10.2f}{change:>11}")
        lines.append("")
    return "\n".join([*lines, outcome.verdict])
