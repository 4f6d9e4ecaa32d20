"""`trireme plan` and `trireme calibrate`: predicted speed and memory, and measurements for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from app.cli.common import (
    Invocation,
    experiment_arguments,
    files_and_overrides,
    read_experiment,
    verb,
)
from app.config import Config
from app.config.task_source import refuse_wrong_task
from app.errors import UserError

if TYPE_CHECKING:
    from app.planner.estimate import Estimate
    from app.planner.plan import Plan

TOP_IN_TEXT = 5
TOP_IN_JSON = 100
"""How many layouts are shown by default."""


@verb("plan")
@experiment_arguments
@click.option(
    "--cluster",
    metavar="FILE",
    help="A cluster's file, or the name of one of Trireme's own, such as aws.",
)
@click.option("--gpus", type=int, metavar="N", help="Plan for N GPUs, which need not exist.")
@click.option(
    "--gpu", metavar="NAME", help="Such as rtx-4090, cpu, or h100-80gb:hbm=2.4TB/s,power=500W."
)
@click.option(
    "--gpus-per-node",
    "per_node",
    type=int,
    metavar="N",
    help="GPUs of one node. Default: 8.",
)
@click.option(
    "--interconnect",
    metavar="RATE",
    help="Between nodes, per node: 400Gb (bits/s) or 50GB (bytes/s).",
)
@click.option(
    "--assume",
    multiple=True,
    metavar="NAME=VALUE",
    help="Instead of what --assumptions lists.",
)
@click.option(
    "--top",
    default=None,
    type=int,
    metavar="N",
    help="Layouts to show, 0 for all. Default: 5, in JSON 100.",
)
@click.option("--why", is_flag=True, help="Explain why each strategy is, or is not, the best.")
@click.option(
    "--assumptions",
    is_flag=True,
    help="Show the speeds that devices are assumed to reach; --assume changes them.",
)
@click.option(
    "--picture",
    "chart_file",
    metavar="FILE",
    help="Draw speed by number of GPUs, and memory; .png or .svg.",
)
@click.option(
    "--write",
    "experiment_file",
    metavar="FILE",
    help="Write the best layout as an experiment for `trireme train`.",
)
@click.option(
    "--max-batch",
    is_flag=True,
    help="Find the largest micro-batch that runs here, in new processes.",
)
def plan(
    cli: Invocation,
    arguments: tuple[str, ...],
    cluster: str | None,
    gpus: int | None,
    gpu: str | None,
    per_node: int | None,
    interconnect: str | None,
    assume: tuple[str, ...],
    top: int | None,
    why: bool,
    assumptions: bool,
    chart_file: str | None,
    experiment_file: str | None,
    max_batch: bool,
) -> None:
    """Predict which layouts of an experiment fit, how fast they train and at what cost, before
    anything starts.

    \b
    trireme plan experiments/gpt.yaml --gpus 64 --gpu h100-80gb --interconnect 3200Gb
    trireme plan experiments/gpt.yaml --cluster aws strategy=fsdp train.micro_batch_size=4

    A key given as key=value stays as it is; strategy, degrees and micro-batch of the file do not.
    Without --cluster and --gpus the plan is for the Ray cluster that `trireme train` would use, or
    for this machine. --max-batch keeps the file's layout and tries micro-batches; with it, --write
    writes the largest that runs.
    """
    config = read_experiment(arguments)
    refuse_wrong_task(config.task, config.task_args, needs_data=False)
    # These import torch, which takes seconds.
    from app.planner import output
    from app.planner.chart import SUFFIXES
    from app.planner.machine import MachineOptions, find_machine, require_here
    from app.planner.stand_in import plan_experiment

    _require_writable("--picture", chart_file, SUFFIXES)
    _require_writable("--write", experiment_file, ())
    request = MachineOptions(
        cluster=cluster,
        gpus=gpus,
        gpu=gpu,
        per_node=per_node,
        interconnect=interconnect,
        assume=assume,
    )
    machine = find_machine(request, config.workers)
    _, overrides = files_and_overrides(arguments)
    fixed_keys = frozenset(override.partition("=")[0].strip() for override in overrides)
    if max_batch:
        require_here(machine, "--max-batch")
        fixed_keys = (fixed_keys | _layout_keys(config)) - {"train.micro_batch_size"}
    with cli.console.if_slow("reading the model"):
        result = plan_experiment(
            config, machine, fixed_keys, needs_data="--max-batch" if max_batch else ""
        )
    if top is None:
        top = TOP_IN_JSON if cli.as_json else TOP_IN_TEXT
    rows_shown = top or len(result.rows)
    if not cli.as_json:
        text = output.text(result, rows_shown, with_reasons=why, with_assumptions=assumptions)
        cli.console.result(text)
    best = result.best
    figures: dict[str, Any] = {}
    if max_batch:
        best, figures = _try_micro_batches(cli, result)
    if cli.as_json:
        cli.answer({**output.as_json(result, rows_shown), **figures})
    if chart_file:
        from app.planner.chart import draw

        draw(result, chart_file, rows_shown)
        cli.console.say(f"drawn in {chart_file}")
    if experiment_file:
        if max_batch and best is None:
            raise UserError(
                f"--write {experiment_file}: no micro-batch that was tried runs, "
                "so nothing is written"
            )
        cli.console.say(output.write(result, experiment_file, best))


def _try_micro_batches(cli: Invocation, plan: Plan) -> tuple[Estimate | None, dict[str, Any]]:
    """Find the largest micro-batch that runs here.

    Returns:
        The layout with that micro-batch, None if none runs; and what --json adds to its answer.
    """
    from app.planner.trial import max_batch

    cli.console.status("trying micro-batches in new processes")
    sentence, layout, figures = max_batch(plan)
    if not cli.as_json:
        cli.console.result(sentence)
    return layout, {"max_batch": figures}


def _require_writable(option: str, path: str | None, suffixes: tuple[str, ...]) -> None:
    """Check, before minutes are spent on a plan, that a file can be written.

    Args:
        option: The option that names the file, for messages.
        path: The file; None if the option was not given.
        suffixes: The suffixes that the file may have; empty for any.

    Raises:
        UserError: The file has another suffix or cannot be written.
    """
    if path is None:
        return
    file = Path(path)
    if suffixes and file.suffix not in suffixes:
        raise UserError(f"{option} {path}: write a file that ends in {' or '.join(suffixes)}")
    written_to = file if file.exists() else file.parent
    if file.is_dir() or not os.access(written_to, os.W_OK):
        raise UserError(
            f"{option} {path} cannot be written: "
            "name a file in a folder that is there and can be written"
        )


def _layout_keys(config: Config) -> set[str]:
    """The keys with which a configuration decides its layout."""
    from app.config.io import flatten, to_dict
    from strategies.dims import DEGREES

    values = flatten(to_dict(config))
    optional = ["strategy", *(f"parallel.{name}" for name in DEGREES), "parallel.offload"]
    keys = {key for key in optional if values[key] not in (None, "auto")}
    if (config.parallel.pp or 1) > 1:
        keys |= {"parallel.schedule", "parallel.chunks"}
    return keys | {"train.activation_checkpointing", "train.precision"}


@verb("calibrate")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes per node. Default: one per GPU, else 4.",
)
@click.option(
    "--drop-corrections",
    is_flag=True,
    help="Measure nothing, and forget what runs have measured beside their plans.",
)
def calibrate(cli: Invocation, workers: int | None, drop_corrections: bool) -> None:
    """Measure what devices and links reach, and keep it for plans. It takes half a minute.

    Measures one node of the Ray cluster that `trireme train` would use, and the link between two;
    without a cluster, this machine. A GPU that is not in cluster/hardware.yaml is added to
    ~/.config/trireme/hardware.yaml. The figures are kept in ~/.cache/trireme/planner, as are the
    corrections by part of runs whose speed was outside of their plan's range.
    """
    if drop_corrections:
        _drop_corrections(cli)
        return
    from app.planner.calibrate import calibrate as calibrate_machine
    from app.planner.calibrate import calibrate_cluster, keep
    from app.planner.machine import connected_shape

    cli.console.status("measuring")
    if connected_shape() is not None:
        constants = calibrate_cluster(workers)
    else:
        constants = calibrate_machine(_local_workers(workers))
    gpu_name, path = keep(constants)
    lines = [gpu_name]
    lines += [f"  {key}: {_readable(value)}" for key, value in constants.items() if key != "gpu"]
    lines.append(f"kept in {path}")
    cli.answer({"gpu": gpu_name, "file": str(path), "constants": constants}, "\n".join(lines))


def _drop_corrections(cli: Invocation) -> None:
    from app.planner.corrections import drop_corrections
    from app.planner.measurements import gpus_with_measured_values

    dropped = [correction.run for correction in drop_corrections(gpus_with_measured_values())]
    runs = ", ".join(dropped)
    sentence = f"dropped what {runs} measured" if dropped else "there are no corrections"
    cli.answer({"dropped": dropped}, sentence)


def _local_workers(requested: int | None) -> int:
    """How many processes measure this machine: at most one for each GPU, on CPUs 4 by default."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus:
        return min(requested or gpus, gpus)
    return requested or 4


def _readable(value: object) -> str:
    """A figure for a person, or several figures with their names."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_readable(figure)}" for name, figure in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
