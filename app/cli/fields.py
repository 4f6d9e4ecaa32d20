"""`trireme fields`: what each command's JSON document contains, and what exit codes mean.

A class among the meanings stands for its fields, whose meanings are in its docstring.
"""

import importlib
import inspect
import re
from collections.abc import Iterator

import click

from app.cli.common import Invocation, verb
from app.cli.document import NAMES
from app.errors import EXIT_CODES, UserError, nearest
from cluster.shape import align_columns

RUN_STATE = "app.run.look:RunState"
SHAPE = "cluster.shape:ClusterShape"
NODE_TYPE = "cluster.shape:NodeType"
ERRORS = {
    "error": "What went wrong, in one sentence. Absent from the document of exit code 0.",
    "exit_code": "The command's exit code. Absent if it is 0.",
    "status": "failed, refused or stopped, if the command has not got as far as an answer.",
}
"""Fields of every document."""

_TRAINED = {
    "": "app.run.manifest:Outcome",
    "summary.step": "The last optimizer step.",
    "summary.steps": "Optimizer steps in all.",
    "summary.seconds": "Of training, in this start of the run.",
    "summary.rate": "`summary.unit` per second, of all workers.",
    "summary.unit": "What `summary.rate` counts, such as samples or tokens.",
    "summary.metrics.*": "The newest value of each metric.",
    "summary.resumed_from": "The step of the checkpoint that was continued; null without one.",
    "summary.stopped": "Whether training ended before `summary.steps`.",
    "summary.parameters": "Of the model.",
    "summary.trained_parameters": "Those that are trained.",
    "summary.memory_bytes": "Of the worker with most, at its peak.",
    "summary.memory_bytes_before": "Of that, before the model was built.",
    "summary.batch.first": "With train.batch_schedule=auto: the global batch at the beginning.",
    "summary.batch.last": "The same at the end.",
    "summary.batch.decisions.": "app.training.batch_growth:Decision",
    "summary.batch.dropped_samples": "Samples of branches that were dropped.",
    "summary.batch.dropped_share": "The same as a share of the run's samples.",
    "summary.batch.dropped_steps": "Steps of branches that were dropped.",
    "summary.batch.dropped_seconds": "Seconds of training in them.",
    "summary.dollars": "What all starts of the run have cost; null without prices.",
    "summary.plan.*": "Predicted figures beside measured ones, as in MLflow.",
    "summary.first_step_seconds": "From the command to the end of this start's first step.",
    "summary.total_seconds": "From the command to the end of training.",
    "mlflow.run_id": "MLflow's id of the run.",
    "mlflow.url": "The address of the run's page.",
    "mlflow.complete": "Whether MLflow has everything.",
}
_JOB = {
    "status": "What became of the job.",
    "job": "Ray's id of the job.",
}
FIELDS: dict[str, dict[str, str]] = {
    "train": _TRAINED,
    "fork": _TRAINED,
    "sweep": {
        "": "experiments.sweep.run:Outcome",
        "best.": "experiments.sweep.answer:BestTrial",
        "best.values.*": "A key and its value.",
        "recommendation.": "experiments.sweep.answer:SoonestTrial",
        "recommendation.values.*": "A key and its value.",
        "trials.*": "How many trials have this state.",
    },
    "scale": {
        "": "experiments.scale.run:Outcome",
        "points[].": "experiments.scale.manifest:Point",
        "laws.*.": "experiments.scale.laws:Law",
        "laws.*.values.*": "A constant of the law.",
        "laws.*.costs.*": "The cost on this number of workers.",
        "verdicts.*": "A sentence about this strategy.",
    },
    "runs": {"runs[].": RUN_STATE, "runs[].progress.*": "", "runs[].evaluated.*": ""},
    "watch": {"": RUN_STATE, "progress.*": "", "evaluated.*": ""},
    "compare": {
        "comparisons[].": "app.results.compare:Difference",
        "comparisons[].verdict": "better (lower), worse, within noise, or undecided.",
    },
    "profile": {
        "steps[]": "The first and the last profiled step.",
        "ranks[].*": "Of a rank: seconds per step, and the operators that take longest.",
        "folder": "Where the traces are.",
        "*": "What else profile.json has.",
    },
    "report": {"status": "complete.", "page": "The path of the page."},
    "config": {"*": "The keys of an experiment file: `trireme config` explains each."},
    "parity": {
        "rows[].row": "The strategy and its degrees.",
        "rows[].workers": "The number of workers.",
        "rows[].variant": "What else differs from the experiment.",
        "rows[].after": "The row whose checkpoint is continued; null for none.",
        "rows[].verdict": "SAME, DIFFERS, REFUSED or FAILED.",
        "rows[].why": "Why it was refused or has failed.",
        "rows[].notes[]": "What a person should know.",
        "rows[].allowed.": "experiments.parity.curves:Difference",
        "rows[].difference.": "experiments.parity.curves:Difference",
        "rows[].seconds": "How long the row took.",
    },
    "coordinate-check": {
        "": "experiments.coordinate_check:Check",
        "transferred[].": "experiments.coordinate_check:Row",
        "plain[].": "experiments.coordinate_check:Row",
    },
    "export": {"status": "complete.", "": "app.results.export:Exported"},
    "generate": {
        "status": "complete.",
        "step": "The step of the checkpoint.",
        "texts[]": "Each text with its continuation.",
    },
    "sync": {
        "status": "complete.",
        "run_id": "MLflow's id of the run.",
        "url": "The address of the run's page.",
    },
    "submit run": {
        **_JOB,
        "command": "What the job runs, with --dry-run.",
        "manifest.*": "The manifest for Kueue, with --queue and a RayJob's manifest as --cluster.",
    },
    "submit logs": _JOB,
    "submit stop": _JOB,
    "queue list": {
        "runs[].": "app.submit.queue:Row",
        "runs[].entry.": "app.submit.queue:Entry",
        "runs[].entry.each.*": "An amount.",
        "runs[].entry.env.*": "A value.",
        "runs[].starts_in_seconds": "When it is expected to start; null if that is not known.",
    },
    "queue resume": {"sent": "How many runs were sent again."},
    "queue quota": {"workers_by_user.*": "How many workers this user may have at once."},
    "queue enter": {"*": "As of `trireme train`, which it becomes."},
    "doctor": {
        "findings[].": "app.doctor.checks:Finding",
        "findings[].critical": "Whether a run fails, or is much slower, because of it.",
        "facts.": "app.doctor.checks:ClusterFacts",
        "facts.nodes[].": "app.doctor.checks:NodeFacts",
        "facts.nodes[].gpus[].": "app.doctor.checks:GpuFacts",
        "facts.nodes[].versions.*": "A version.",
        "facts.nodes[].interfaces.*": "An address.",
        "facts.nodes[].unreachable.*": "A reason.",
        "facts.rings[].": "app.doctor.checks:RingFacts",
        "keys[]": "With --exclude-bad only: what keeps a run off the bad nodes, as key=value.",
    },
    "plan": {
        "chosen": "What `trireme train` would take; null if nothing fits.",
        "chosen.strategy": "Its strategy.",
        "chosen.keys[]": "Its keys, as key=value for `trireme train`.",
        "chosen.reason": "Its figures, and how it compares.",
        "rejected.*": "Why the best layout of this strategy is not chosen, or why there is none.",
        "advice[]": "Sentences for a person.",
        "count": "How many layouts there are.",
        "fitting": "How many of them fit.",
        "layouts[]": "The best ones (--top), the best first.",
        "layouts[].strategy": "Its name.",
        "layouts[].parallel.*": "Degrees and other keys below `parallel`; null is the default.",
        "layouts[].micro_batch_size": "Samples at once.",
        "layouts[].micro_batches": "How often in a step.",
        "layouts[].activation_checkpointing": "none, selective or full.",
        "layouts[].activation_offloading": "Whether activations wait in host memory.",
        "layouts[].precision": "Of the products.",
        "layouts[].memory_bytes": "Of the fullest GPU, at its peak.",
        "layouts[].memory_bytes_by_part.*": "What this part of it takes.",
        "layouts[].step_seconds": "Of an optimizer step.",
        "layouts[].step_seconds_by_part.*": "What this part of it takes.",
        "layouts[].samples_per_second": "Of all workers.",
        "layouts[].*_per_second": "Of all workers, in the task's unit, such as tokens.",
        "layouts[].*_per_second_range[]": "Between these two lie 80 % of runs.",
        "layouts[].mfu": "The share of the GPUs' peak, 0 to 1.",
        "layouts[].dollars_per_step": "At list prices; null without prices.",
        "layouts[].dollars_per_run": "At list prices; null without prices or without train.steps.",
        "layouts[].energy_kwh_per_run": "At the GPUs' nominal power.",
        "layouts[].fits": "Whether it is expected to fit.",
        "layouts[].chance_of_fitting": "0 to 1.",
        "layouts[].unmeasured[]": "What of its kind no run has been measured with.",
        "layouts[].verdict": "fits, close, or too large.",
        "layouts[].host_memory_share": "Of each host's memory, by offloading; null if not known.",
        "layouts[].host_memory_bytes": "Of each host, by offloading.",
        "kernels.*": "The first layout compiled, and eager; empty on CPUs.",
        "kernels.*.step_seconds": "Of a step.",
        "kernels.*.memory_bytes": "Of the fullest GPU.",
        "fused_attention": "The first layout with one; null where it has one, or on CPUs.",
        "fused_attention.write": "The key that asks for it.",
        "fused_attention.step_seconds": "Of a step.",
        "fused_attention.memory_bytes": "Of the fullest GPU.",
        "other_trainers[].assume": "What --assume says of it.",
        "other_trainers[].faster": "The share by which the first layout would be faster with it.",
        "remedies[]": "What to try where nothing fits, in order.",
        "remedies[].name": "What it is.",
        "remedies[].keys": "What to write for it.",
        "remedies[].gpus": "For how many GPUs it is planned.",
        "remedies[].fits": "Whether it is enough.",
        "remedies[].reason": "Why it cannot be taken; null if it can.",
        "remedies[].strategy": "Of its best layout.",
        "remedies[].memory_bytes": "Of its fullest GPU.",
        "remedies[].host_memory_bytes": "Of each host.",
        "remedies[].step_seconds": "Of a step.",
        "model.parameters": "Their number.",
        "model.trained_parameters": "Those that are trained.",
        "model.blocks": "The number of repeated blocks.",
        "model.note": 'What could not be read; "" if all could.',
        "machine.gpu": "Its name in cluster/hardware.yaml.",
        "machine.gpus": "Their number.",
        "machine.gpus_per_node": "Of these in one node.",
        "machine.memory_bytes": "Of one GPU.",
        "machine.usable_bytes": "Of these for training.",
        "machine.link_within_bytes_per_second": "From one GPU to another of its node.",
        "machine.link_across_bytes_per_second": "From one node to another.",
        "machine.dollars_per_gpu_hour": "List price; null if not known.",
        "machine.calibrated": "Whether `trireme calibrate` has measured it.",
        "machine.corrected": "What a run has measured here, as a sentence; null for nothing.",
        "machine.assumed": "What is not known and assumed; null for nothing.",
        "max_batch.predicted": "With --max-batch: the largest micro-batch by the plan.",
        "max_batch.largest": "The largest that ran; null if none did.",
        "max_batch.share": "The worker's whole share of the batch.",
        "max_batch.tries[].micro_batch_size": "That was tried.",
        "max_batch.tries[].": "app.planner.trial:Trial",
    },
    "calibrate": {
        "gpu": "Its name.",
        "file": "Where the figures are kept.",
        "constants.*": "FLOP/s, bytes/s, seconds and shares, as app/planner/device.py names them.",
        "dropped[]": "With --drop-corrections only: the runs that had measured them.",
    },
    "cluster list": {
        "clusters.*.": SHAPE,
        "clusters.*.head.": NODE_TYPE,
        "clusters.*.workers[].": NODE_TYPE,
    },
    "cluster show": {"": SHAPE, "head.": NODE_TYPE, "workers[].": NODE_TYPE},
    "cluster validate": {"mistakes.*[]": "The mistakes of this file, a sentence each."},
    "cluster up": {
        "status": "up.",
        "seconds": "Until it was ready.",
        "": "cluster.launch:Status",
        "alive[].*": "A node: ip, head, resources, type.",
    },
    "cluster down": {"status": "down."},
    "cluster status": {
        "": "cluster.launch:Status",
        "alive[].*": "A node: ip, head, resources, type.",
    },
    "fields": {
        "fields.*": "By command, what each field of its document means.",
        "exit_codes.*": "What each exit code means.",
    },
}
"""For each command the fields of its document.

In a path `[]` is any item of a list, and `*` any name. The name of a class stands for its fields.
"""


def fields_of(command: str) -> dict[str, str]:
    """The fields of a command's document, with their meanings.

    Args:
        command: Such as "runs" or "cluster up".
    """
    meanings: dict[str, str] = {}
    for path, meaning in FIELDS[command].items():
        if ":" in meaning and " " not in meaning:
            meanings |= {f"{path}{name}": text for name, text in _documented(meaning)}
        else:
            meanings[path] = meaning
    return {**meanings, **ERRORS, **meanings}


def _documented(reference: str) -> Iterator[tuple[str, str]]:
    """The fields of a class in its document, with the meanings in the class's docstring.

    Args:
        reference: MODULE:CLASS.
    """
    module, _, name = reference.partition(":")
    documented = getattr(importlib.import_module(module), name)
    docstring = inspect.cleandoc(documented.__doc__ or "") + "\n"
    section = re.search(r"^(Args|Attributes):\n((?:    .*\n|\n)+)", docstring, re.M)
    lines = section[2] if section else ""
    for field, text in re.findall(r"^ {4}(\w+): ((?:.+\n)(?: {8}.+\n)*)", lines, re.M):
        yield NAMES.get(name, {}).get(field, field), " ".join(text.split()).replace("None", "null")


@verb("fields")
@click.argument("words", nargs=-1, metavar="[COMMAND]")
def fields(cli: Invocation, words: tuple[str, ...]) -> None:
    """Show the fields of each command's --json, and the exit codes.

    \b
    trireme fields plan
    trireme fields cluster status --json

    In a path `[]` is any item of a list, and `*` any name.
    """
    name = " ".join(words)
    chosen = [command for command in FIELDS if not name or f"{command} ".startswith(f"{name} ")]
    if not chosen:
        raise UserError(
            f"there is no command {name!r}{nearest(name, FIELDS)}: `trireme fields` lists them"
        )
    meanings = {command: fields_of(command) for command in chosen}
    lines = []
    for command, by_path in meanings.items():
        lines += [f"trireme {command} --json", *align_columns([*by_path.items()]), ""]
    lines += ["Exit codes", *(f"{code:>5}  {text}" for code, text in EXIT_CODES.items())]
    cli.answer({"fields": meanings, "exit_codes": EXIT_CODES}, "\n".join(lines))
