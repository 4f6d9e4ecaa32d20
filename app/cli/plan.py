"""`trireme plan`."""

from __future__ import annotations

import json
from typing import Any

import click

from app.cli.common import experiment_arguments, read, sentences, split
from app.console import Console


@click.command("plan")
@experiment_arguments
@click.option("--cluster", help="A cluster's file (or the name of one of Trireme's own, such as aws).")
@click.option("--gpus", type=int, help="Plan for so many GPUs that need not exist.")
@click.option("--gpu", help="Which, as in cluster/hardware.yaml: h100-80gb, rtx-4090, cpu, …")
@click.option("--gpus-per-node", "per_node", type=int, help="GPUs of one node. Default: 8.")
@click.option("--interconnect", help="Between nodes: 400Gb (bits per second and node), 50GB (bytes).")
@click.option("--rank-by", "rank", default="time", show_default=True, help="time, cost or memory.")
@click.option("--top", default=None, type=int, help="Layouts shown (8; as JSON 100; 0: all).")
@click.option("--json", "as_json", is_flag=True, help="Print the layouts as JSON, best first.")
@click.option("--write", help="Write the best layout as an experiment that `trireme train` takes.")
@click.option("--picture", help="Draw time against memory of all layouts into this file (PNG, SVG or PDF).")
@click.option("--max-batch", is_flag=True, help="Find the largest micro-batch that fits, and try it in new processes.")
@click.option("--probe", is_flag=True, help="Try the best three for a few steps each, in new processes.")
@click.option("--schedule", "show_schedule", is_flag=True, help="Draw the best pipeline's schedule.")
@click.option("--check", is_flag=True, help="How right the planner is: plan, then measure, on this machine.")
@click.option("--published", help="Hold the planner against a table of published runs.")
@click.option("--history", is_flag=True, help="Predicted and measured, of the runs made so far.")
@click.option("--traceback", is_flag=True, help="Show Python's traceback of an error.")
def command(arguments: tuple[str, ...], **options: Any) -> None:
    """What fits, how fast and how dear: every layout of an experiment on a cluster, before anything is started.

    \b
    trireme plan experiments/gpt.yaml --gpus 64 --gpu h100-80gb --interconnect 3200Gb
    trireme plan experiments/gpt.yaml --cluster aws strategy=fsdp train.micro_batch_size=4

    Any key given as key=value is held fixed; what the file says of strategy, degrees and micro-batch is not. Without
    --cluster and --gpus the plan is for the cluster that RAY_ADDRESS names, else for this machine.
    """
    as_json = options["as_json"]
    console = Console(quiet=as_json)
    with sentences(console, as_json=as_json, traceback=options["traceback"]):
        if options["history"]:
            from app.planner.record import history_text

            return console.result(history_text(as_json))
        if options["published"]:
            from app.planner.published import report

            return console.result(report(options["published"], as_json))
        if options["check"]:
            from app.planner.check import report as check_report

            return console.result(check_report(as_json, console.status))
        _plan(arguments, options, console)


def _plan(arguments: tuple[str, ...], options: dict[str, Any], console: Console) -> None:
    from app.planner import actions, show
    from app.planner.plan import make_plan
    from app.planner.where import Asked, find
    from app.prepare import read_task

    config = read(arguments)
    given = frozenset(key.partition("=")[0].strip() for key in split(arguments)[1])
    asked = Asked(*(options[key] for key in ("cluster", "gpus", "gpu", "per_node", "interconnect")))
    machine = find(asked, config.workers)
    console.status("reading the model")
    plan = make_plan(config, read_task(config), machine, given=given, rank=options["rank"])
    if options["as_json"]:
        top = 100 if options["top"] is None else options["top"] or len(plan.order)
        console.result(json.dumps(actions.as_json(plan, top)))
    else:
        console.result(show.text(plan, options["top"] or 8))
    if options["write"]:
        console.say(actions.write(plan, options["write"]))
    if options["picture"]:
        show.picture({f"{plan.machine.world} × {machine.device.gpu.name}": plan}, options["picture"])
        console.say(f"drawn: {options['picture']}")
    if options["show_schedule"]:
        console.result(actions.schedule(plan))
    if options["max_batch"]:
        console.result(actions.max_batch(plan, given))
    if options["probe"]:
        console.result(actions.probe(plan))
