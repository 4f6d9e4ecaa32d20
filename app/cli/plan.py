"""`trireme plan` and `trireme calibrate`: what would run, how fast, and the measurements behind it."""

import os
from pathlib import Path
from typing import Any

import click

from app.cli.common import Invocation, experiment_arguments, read, split, verb
from app.config import Config
from app.errors import UserError


@verb("plan")
@experiment_arguments
@click.option("--cluster", metavar="FILE", help="A cluster's file, or the name of one of Trireme's own, such as aws.")
@click.option("--gpus", type=int, metavar="N", help="Plan for N GPUs, which need not exist.")
@click.option("--gpu", metavar="NAME", help="Such as rtx-4090, cpu, or h100-80gb:hbm=2.4TB/s,power=500W.")
@click.option("--gpus-per-node", "per_node", type=int, metavar="N", help="GPUs of one node. Default: 8.")
@click.option("--interconnect", metavar="RATE", help="Between nodes, per node: 400Gb (bits/s) or 50GB (bytes/s).")
@click.option("--assume", multiple=True, metavar="NAME=VALUE", help="Instead of what --assumptions lists.")
@click.option("--top", default=None, type=int, metavar="N", help="Layouts to show, 0 for all. Default: 5, in JSON 100.")
@click.option("--why", is_flag=True, help="Say of each strategy why it is, or is not, the best.")
@click.option("--assumptions", is_flag=True, help="Show what the devices are taken to reach; --assume changes it.")
@click.option("--picture", "chart", metavar="FILE", help="Draw speed by number of GPUs, and memory; .png or .svg.")
@click.option("--write", metavar="FILE", help="Write the best layout as an experiment for `trireme train`.")
@click.option("--max-batch", is_flag=True, help="Find the largest micro-batch that runs here, in new processes.")
def plan(cli: Invocation, arguments: tuple[str, ...], **options: Any) -> None:
    """Predict which layouts of an experiment fit, how fast they train and at what cost, before anything starts.

    \b
    trireme plan experiments/gpt.yaml --gpus 64 --gpu h100-80gb --interconnect 3200Gb
    trireme plan experiments/gpt.yaml --cluster aws strategy=fsdp train.micro_batch_size=4

    A key given as key=value stays as it is; strategy, degrees and micro-batch of the file do not. Without --cluster and
    --gpus the plan is for the Ray cluster that `trireme train` would use, or for this machine. --max-batch keeps the
    file's layout and tries micro-batches; with it, --write writes the largest that runs.
    """
    from app.planner import output
    from app.planner.chart import SUFFIXES, draw
    from app.planner.machine import MachineOptions, find_machine, require_here
    from app.planner.stand_in import plan_experiment

    config, console = read(arguments), cli.console
    _require_writable("--picture", options["chart"], SUFFIXES)
    _require_writable("--write", options["write"], ())
    given = frozenset(key.partition("=")[0].strip() for key in split(arguments)[1])
    asked = ("cluster", "gpus", "gpu", "per_node", "interconnect", "assume")
    machine = find_machine(MachineOptions(**{key: options[key] for key in asked}), config.workers)
    if options["max_batch"]:
        require_here(machine, "--max-batch")
        given = (given | _fixed_by_file(config)) - {"train.micro_batch_size"}
    with console.if_slow("reading the model"):
        plan = plan_experiment(config, machine, given, needs_data="--max-batch" if options["max_batch"] else "")
    row, found, top = plan.best, {}, options["top"]
    if top is None:
        top = 100 if cli.as_json else 5
    if not cli.as_json:
        shown = output.text(
            plan,
            top or len(plan.rows),
            with_reasons=options["why"],
            with_assumptions=options["assumptions"],
        )
        console.result(shown)
    if options["max_batch"]:
        from app.planner.trial import max_batch

        console.status("trying micro-batches in new processes")
        sentence, row, found["max_batch"] = max_batch(plan)
        if not cli.as_json:
            console.result(sentence)
    if cli.as_json:
        cli.answer(output.as_json(plan, top or len(plan.rows)) | found)
    if options["chart"]:
        draw(plan, options["chart"], top or len(plan.rows))
        console.say(f"drawn in {options['chart']}")
    if options["write"]:
        if row is None and found:
            raise UserError(f"--write {options['write']}: no micro-batch that was tried runs, so nothing is written")
        console.say(output.write(plan, options["write"], row))


def _require_writable(option: str, path: str | None, suffixes: tuple[str, ...]) -> None:
    """Raises UserError where a file of another kind is asked for, or none can be written there."""
    if path is None:
        return
    file = Path(path)
    if suffixes and file.suffix not in suffixes:
        raise UserError(f"{option} {path}: write a file that ends in {' or '.join(suffixes)}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"{option} {path} cannot be written: name a file in a folder that is there and can be written")


def _fixed_by_file(config: Config) -> set[str]:
    """The keys by which a configuration says which layout is meant."""
    from app.config.io import flatten, to_dict
    from strategies.dims import DEGREES

    values = flatten(to_dict(config))
    layout = ("strategy", *(f"parallel.{name}" for name in DEGREES), "parallel.offload")
    keys = {key for key in layout if values[key] not in (None, "auto")}
    keys |= {"parallel.schedule", "parallel.chunks"} if (config.parallel.pp or 1) > 1 else set()
    return keys | {"train.activation_checkpointing", "train.precision"}


def _figures(value: Any) -> str:
    """A figure as a person reads it, or several by name."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_figures(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@verb("calibrate")
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes per node. Default: one per GPU, else 4."
)
def calibrate(cli: Invocation, workers: int | None) -> None:
    """Measure what devices and links reach, and keep it for plans. It takes half a minute.

    Measures one node of the Ray cluster that `trireme train` would use, and the link between two; without a cluster,
    this machine. A GPU that is not in cluster/hardware.yaml is added to ~/.config/trireme/hardware.yaml. The figures
    are kept in ~/.cache/trireme/planner.
    """
    import torch

    from app.planner.calibrate import calibrate as measure
    from app.planner.calibrate import calibrate_cluster, keep
    from app.planner.machine import connected_shape

    cli.console.status("measuring")
    if connected_shape() is not None:
        found = calibrate_cluster(workers)
    else:
        count = torch.cuda.device_count()
        found = measure(min(workers or count, count) if count else workers or 4)
    name, path = keep(found)
    lines = [f"  {key}: {_figures(value)}" for key, value in found.items() if key != "gpu"]
    cli.answer({**found, "gpu": name, "file": str(path)}, "\n".join([name, *lines, f"kept in {path}"]))
