"""`trireme plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from app.cli.common import Invocation, experiment_arguments, read, split, verb

if TYPE_CHECKING:
    from app.config import Config

LAYOUT = ("strategy", "parallel.dp_replicate", "parallel.dp_shard", "parallel.tp", "parallel.pp", "parallel.offload")
"""Keys that --max-batch keeps as the file has them, beside precision, recomputation and a pipeline's schedule."""


@verb("plan")
@experiment_arguments
@click.option("--cluster", help="A cluster's file (or the name of one of Trireme's own, such as aws).")
@click.option("--gpus", type=int, help="Plan for this number of GPUs, which need not exist.")
@click.option("--gpu", help="Which, as in cluster/hardware.yaml: h100-80gb, rtx-4090, cpu, …")
@click.option("--gpus-per-node", "per_node", type=int, help="GPUs of one node. Default: 8.")
@click.option("--interconnect", help="Between nodes: 400Gb (bits per second and node), 50GB (bytes).")
@click.option("--rank-by", "rank", default="time", show_default=True, help="time, cost or memory.")
@click.option("--top", default=None, type=int, help="Layouts shown (8; as JSON 100; 0: all).")
@click.option("--write", help="Write the best layout as an experiment that `trireme train` takes.")
@click.option("--picture", help="Draw time against memory of all layouts into this file (PNG, SVG or PDF).")
@click.option("--max-batch", is_flag=True, help="Find the largest micro-batch that runs here, in new processes.")
@click.option("--published", help="Compare the planner with a table of published runs.")
def command(cli: Invocation, arguments: tuple[str, ...], **options: Any) -> None:
    """Predict which layouts of an experiment fit, how fast they train and at what cost, before anything starts.

    \b
    trireme plan experiments/gpt.yaml --gpus 64 --gpu h100-80gb --interconnect 3200Gb
    trireme plan experiments/gpt.yaml --cluster aws strategy=fsdp train.micro_batch_size=4

    A key given as key=value is fixed; what the file says of strategy, degrees and micro-batch is not. Without --cluster
    and --gpus the plan is for the Ray cluster that `trireme train` would use, else for this machine. --max-batch fixes
    all that the file says of the layout but the micro-batch; with it, --write writes the largest that runs.
    """
    if options["published"]:
        from app.planner.published import report

        return cli.console.result(report(options["published"], cli.as_json))
    _plan(cli, arguments, options)


def _plan(cli: Invocation, arguments: tuple[str, ...], options: dict[str, Any]) -> None:
    from app.errors import UserError
    from app.planner import output
    from app.planner.machine import Asked, find, require_here
    from app.planner.plan import make_plan
    from app.tasks import load_task

    config, console = read(arguments), cli.console
    given = frozenset(key.partition("=")[0].strip() for key in split(arguments)[1])
    machine = find(
        Asked(*(options[key] for key in ("cluster", "gpus", "gpu", "per_node", "interconnect"))), config.workers
    )
    if options["max_batch"]:
        require_here(machine, "--max-batch")
        given = (given | _fixed_by_file(config)) - {"train.micro_batch_size"}
    console.status("reading the model")
    plan = make_plan(config, load_task(config.task, config.task_args), machine, given=given, rank=options["rank"])
    row, found = plan.best, {}
    if not cli.as_json:
        console.result(output.text(plan, options["top"] or 8))
    if options["max_batch"]:
        from app.planner.trial import max_batch

        console.status("trying micro-batches in new processes")
        sentence, row, found["max_batch"] = max_batch(plan)
        if not cli.as_json:
            console.result(sentence)
    top = 100 if options["top"] is None else options["top"] or len(plan.rows)
    cli.answer(output.as_json(plan, top) | found)
    if options["write"]:
        if row is None and found:
            raise UserError(f"--write {options['write']}: no micro-batch that was tried runs, so nothing is written")
        console.say(output.write(plan, options["write"], row))
    if options["picture"]:
        output.picture({f"{machine.world} × {machine.device.gpu.name}": plan}, options["picture"])
        console.say(f"drawn: {options['picture']}")


def _fixed_by_file(config: Config) -> set[str]:
    """The keys by which a configuration says which layout is meant."""
    keys = {"train.activation_checkpointing", "train.precision"}
    for key in LAYOUT:
        section, _, name = key.rpartition(".")
        value = getattr(getattr(config, section) if section else config, name)
        keys |= {key} if value not in (None, "auto") else set()
    if (config.parallel.pp or 1) > 1:
        keys |= {"parallel.schedule", "parallel.chunks"}
    return keys
