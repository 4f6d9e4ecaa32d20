"""`trireme plan`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from app.cli.common import experiment_arguments, read, sentences, split
from app.console import Console

if TYPE_CHECKING:
    from app.planner.plan import Plan
    from app.planner.tries import Found


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
@click.option("--schedule", "show_schedule", is_flag=True, help="Draw the best pipeline's schedule; --picture gets it.")
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
    --cluster and --gpus the plan is for the Ray cluster that `trireme train` would use, else for this machine.
    --max-batch holds all that the file says of the layout but the micro-batch; --write after --probe or --max-batch
    writes what they found.
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
    from app.errors import UserError
    from app.planner import actions, show, tries
    from app.planner.calibration import learned
    from app.planner.plan import make_plan, model_name
    from app.planner.where import Asked, find, refuse_elsewhere
    from app.run.prepare import read_task

    config = read(arguments)
    given = frozenset(key.partition("=")[0].strip() for key in split(arguments)[1])
    asked = Asked(*(options[key] for key in ("cluster", "gpus", "gpu", "per_node", "interconnect")))
    machine = learned(find(asked, config.workers), model_name(config))
    for option in ("probe", "max_batch"):
        if options[option]:
            refuse_elsewhere(machine, f"--{option.replace('_', '-')}")
    if options["max_batch"]:
        given = (given | tries.written(config)) - {"train.micro_batch_size"}
    console.status("reading the model")
    plan = make_plan(config, read_task(config), machine, given=given, rank=options["rank"])
    if not options["as_json"]:
        console.result(show.text(plan, options["top"] or 8))
    found = _tried(plan, options, console)
    if options["as_json"]:
        top = 100 if options["top"] is None else options["top"] or len(plan.order)
        tried = {name: one.json for name, one in found.items()}
        console.result(json.dumps(actions.as_json(plan, top) | tried))
    if options["write"]:
        decided = found.get("max_batch") or found.get("probe")
        if decided and decided.row is None:
            raise UserError(f"--write {options['write']}: nothing of what was tried runs, so nothing is written")
        console.say(actions.write(plan, options["write"], *((decided.row, decided.size) if decided else ())))
    if options["picture"] and not options["show_schedule"]:
        show.picture({f"{plan.machine.world} × {machine.device.gpu.name}": plan}, options["picture"])
        console.say(f"drawn: {options['picture']}")
    if options["show_schedule"]:
        console.result(actions.schedule(plan, options["picture"]))
        if options["picture"]:
            console.say(f"drawn: {options['picture']}")


def _tried(plan: Plan, options: dict[str, Any], console: Console) -> dict[str, Found]:
    """What was asked to be tried, by option."""
    from app.planner import tries

    found = {}
    for option, attempt in (("max_batch", tries.max_batch), ("probe", tries.probe)):
        if options[option]:
            console.status("trying layouts in new processes")
            found[option] = attempt(plan)
            if not options["as_json"]:
                console.result(found[option].text)
    return found
