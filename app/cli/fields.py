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
    "summary.seconds": "Seconds of training in this start of the run.",
    "summary.rate": "Speed of all workers together, in `summary.unit` per second.",
    "summary.unit": "What `summary.rate` counts, such as samples or tokens.",
    "summary.metrics.*": "The newest value of each metric.",
    "summary.resumed_from": "The step of the checkpoint that was continued; null without one.",
    "summary.stopped": "Whether training ended before `summary.steps`.",
    "summary.parameters": "The number of parameters of the model.",
    "summary.trained_parameters": "The number of parameters that are trained.",
    "summary.memory_bytes": "The peak memory of the worker that used most.",
    "summary.memory_bytes_before": "What the worker used before the model was built.",
    "summary.batch.first": "With train.batch_schedule=auto: the global batch at the beginning.",
    "summary.batch.last": "The global batch at the end.",
    "summary.batch.decisions.": "app.training.batch_growth:Decision",
    "summary.batch.dropped_samples": "Samples of the branches that were dropped.",
    "summary.batch.dropped_share": "The same as a share of the run's samples.",
    "summary.batch.dropped_steps": "Steps of the branches that were dropped.",
    "summary.batch.dropped_seconds": "Seconds that training these branches took.",
    "summary.dollars": "What all starts of the run have cost; null without prices.",
    "summary.plan.*": "Predicted and measured figures, by the names that MLflow has.",
    "summary.first_step_seconds": "Time from the command to the end of this start's first step.",
    "summary.total_seconds": "Time from the command to the end of training.",
    "mlflow.run_id": "MLflow's id of the run.",
    "mlflow.url": "The address of the run's page.",
    "mlflow.complete": "Whether MLflow has everything.",
}
_JOB = {
    "status": "How the job stands or ended.",
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
        "ranks[].*": "For each rank, seconds per step and the operators that take longest.",
        "folder": "Where the traces are.",
        "*": "The other fields of profile.json.",
    },
    "report": {"status": "complete.", "page": "The path of the page."},
    "config": {"*": "The keys of an experiment file: `trireme config` explains each."},
    "parity": {
        "rows[].row": "The strategy and its degrees.",
        "rows[].workers": "The number of workers.",
        "rows[].variant": "Other differences from the experiment.",
        "rows[].after": "The row whose checkpoint is continued; null for none.",
        "rows[].verdict": "SAME, DIFFERS, REFUSED or FAILED.",
        "rows[].why": "Why it was refused or has failed.",
        "rows[].notes[]": "Remarks for a person.",
        "rows[].allowed.": "experiments.parity.curves:Difference",
        "rows[].difference.": "experiments.parity.curves:Difference",
        "rows[].seconds": "How long the row took, in seconds.",
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
        "runs[].entry.each.*": "The amount of this resource.",
        "runs[].entry.env.*": "The value of this variable.",
        "runs[].starts_in_seconds": "Time until its expected start; null if that is not known.",
    },
    "queue resume": {"sent": "How many runs were sent again."},
    "queue quota": {"workers_by_user.*": "How many workers this user may have at once."},
    "queue enter": {"*": "The fields of `trireme train`, which this command becomes."},
    "doctor": {
        "findings[].": "app.doctor.checks:Finding",
        "findings[].critical": "Whether a run fails, or is much slower, because of it.",
        "facts.": "app.doctor.checks:ClusterFacts",
        "facts.nodes[].": "app.doctor.checks:NodeFacts",
        "facts.nodes[].gpus[].": "app.doctor.checks:GpuFacts",
        "facts.nodes[].versions.*": "The version of this package.",
        "facts.nodes[].interfaces.*": "The address of this interface.",
        "facts.nodes[].unreachable.*": "Why this node cannot be reached.",
        "facts.rings[].": "app.doctor.checks:RingFacts",
        "keys[]": "Only with --exclude-bad: the key=value that keeps a run off the bad nodes.",
    },
    "plan": {
        "chosen": "The layout that `trireme train` would choose; null if none fits.",
        "chosen.strategy": "Its strategy.",
        "chosen.keys[]": "Its keys, as key=value for `trireme train`.",
        "chosen.reason": "Its figures, and how it compares.",
        "rejected.*": "Why the best layout of this strategy is not chosen, or why there is none.",
        "advice[]": "Sentences for a person.",
        "count": "How many layouts there are.",
        "fitting": "How many of them fit.",
        "layouts[]": "The best ones (--top), the best first.",
        "layouts[].strategy": "The name of the strategy.",
        "layouts[].parallel.*": "Degrees and other keys below `parallel`; null is the default.",
        "layouts[].micro_batch_size": "Samples that a worker computes at once.",
        "layouts[].micro_batches": "The number of micro-batches of a worker in a step.",
        "layouts[].activation_checkpointing": "none, selective or full.",
        "layouts[].activation_offloading": "Whether activations are kept in host memory.",
        "layouts[].precision": "The precision of matrix products.",
        "layouts[].memory_bytes": "The peak memory of the fullest GPU.",
        "layouts[].memory_bytes_by_part.*": "The share of this part, in bytes.",
        "layouts[].step_seconds": "The time of an optimizer step.",
        "layouts[].step_seconds_by_part.*": "The share of this part, in seconds.",
        "layouts[].samples_per_second": "The speed of all workers together.",
        "layouts[].*_per_second": "The same in the task's unit, such as tokens.",
        "layouts[].*_per_second_range[]": "The limits between which 80 % of runs are.",
        "layouts[].mfu": "Model FLOPs utilization: the share of the GPUs' peak, 0 to 1.",
        "layouts[].dollars_per_step": "The cost at list prices; null without prices.",
        "layouts[].dollars_per_run": "The cost at list prices; null without prices or train.steps.",
        "layouts[].energy_kwh_per_run": "The energy at the GPUs' nominal power.",
        "layouts[].fits": "Whether it is expected to fit into memory.",
        "layouts[].chance_of_fitting": "The probability that it fits, 0 to 1.",
        "layouts[].unmeasured[]": "The features with which no run has been measured.",
        "layouts[].verdict": "fits, close, or too large.",
        "layouts[].host_memory_share": "The share of host memory that offloading takes, or null.",
        "layouts[].host_memory_bytes": "The memory of each host that offloading takes.",
        "kernels.*": "Figures of the first layout, compiled and eager; empty on CPUs.",
        "kernels.*.step_seconds": "The time of a step.",
        "kernels.*.memory_bytes": "The memory of the fullest GPU.",
        "fused_attention": "The first layout with fused attention; null if it has it, or on CPUs.",
        "fused_attention.write": "The key that asks for it.",
        "fused_attention.step_seconds": "The time of a step.",
        "fused_attention.memory_bytes": "The memory of the fullest GPU.",
        "other_trainers[].assume": "The value of --assume that stands for this trainer.",
        "other_trainers[].faster": "The share by which the first layout would be faster with it.",
        "remedies[]": "What to try where nothing fits, in order.",
        "remedies[].name": "The name of the remedy.",
        "remedies[].keys": "The key=value to write for it.",
        "remedies[].gpus": "The number of GPUs for which it is planned.",
        "remedies[].fits": "Whether it is enough.",
        "remedies[].reason": "Why it cannot be taken; null if it can.",
        "remedies[].strategy": "The strategy of its best layout.",
        "remedies[].memory_bytes": "The memory of its fullest GPU.",
        "remedies[].host_memory_bytes": "The memory of each host that it takes.",
        "remedies[].step_seconds": "The time of a step.",
        "model.parameters": "The number of parameters.",
        "model.trained_parameters": "The number of parameters that are trained.",
        "model.blocks": "The number of repeated blocks.",
        "model.note": 'What could not be read; "" if all could.',
        "machine.gpu": "Its name in cluster/hardware.yaml.",
        "machine.gpus": "The number of GPUs.",
        "machine.gpus_per_node": "The number of GPUs in one node.",
        "machine.memory_bytes": "The memory of one GPU.",
        "machine.usable_bytes": "The memory of one GPU that training can use.",
        "machine.link_within_bytes_per_second": "The rate from one GPU to another of its node.",
        "machine.link_across_bytes_per_second": "The rate from one node to another.",
        "machine.dollars_per_gpu_hour": "The list price; null if it is not known.",
        "machine.calibrated": "Whether `trireme calibrate` has measured it.",
        "machine.corrected": "How measured runs correct this plan, in a sentence; or null.",
        "machine.assumed": "What is assumed because it is not known; null if nothing is.",
        "max_batch.predicted": "With --max-batch: the largest micro-batch that the plan predicts.",
        "max_batch.largest": "The largest micro-batch that ran; null if none did.",
        "max_batch.share": "The worker's whole share of the batch.",
        "max_batch.tries[].micro_batch_size": "The micro-batch that was tried.",
        "max_batch.tries[].": "app.planner.trial:Trial",
    },
    "calibrate": {
        "gpu": "The name of the GPU.",
        "file": "Where the figures are kept.",
        "constants.*": "FLOP/s, bytes/s, seconds and shares, as app/planner/device.py names them.",
        "dropped[]": "Only with --drop-corrections: the runs that had measured the corrections.",
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
        "seconds": "How long the cluster took to become ready.",
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
