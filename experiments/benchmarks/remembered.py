"""`python -m experiments.benchmarks.remembered [--json]`: published runs that llm_foundry.csv has not, beside plans.

The figures are written down from memory of the pages named (remembered.yaml): what they say of the planner is worth as
much as that memory. Each run's layout is held, as `trireme plan … key=value` holds it; what the page does not tell
(a micro-batch, say) is left to the plan. No constant is fitted on them.

The models are Trireme's own GPT with the run's widths, so a run whose trainer fused more is expected to be faster than
its plan. Two of a model's layers are read and the others counted, like published.py's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

RUNS = Path(__file__).with_name("remembered.yaml")


def stretched(reader: Any, layers: int) -> None:
    """The reader's model of two alike blocks becomes one of `layers`."""
    model = reader.model
    first, second = model.blocks
    inside = [p for p in model.size.parameters if p.name.startswith(second + ".")]
    parameters = [p for p in model.size.parameters if p not in inside]
    blocks = [first, *(f"{second}.{i}" for i in range(layers - 1))]
    for name in blocks[1:]:
        parameters += [replace(p, name=p.name.replace(second, name, 1), unit=name) for p in inside]
    costs = {way: replace(found, order=[found.order[0]] * layers) for way, found in model.costs.items()}
    reader.model = replace(model, blocks=blocks, size=replace(model.size, parameters=tuple(parameters)), costs=costs)


def seconds_of(run: dict[str, Any]) -> float:
    """Seconds per step, from what the page gives: them, tokens/s per GPU, or TFLOP/s per GPU by Megatron's formula."""
    figure, batch, length = run["figure"], run["batch"], run["model"]["sequence_length"]
    if "seconds" in figure:
        return float(figure["seconds"])
    if "tokens" in figure:
        return batch * length / (figure["tokens"] * run["gpus"])
    width, layers, words = (run["model"][key] for key in ("d_model", "n_layers", "vocab_size"))
    passes = 96 if figure.get("recomputed") else 72
    flops = passes * batch * length * layers * width**2 * (1 + length / (6 * width) + words / (16 * layers * width))
    return float(flops / (figure["tflops"] * 1e12 * run["gpus"]))


def planned(run: dict[str, Any]) -> dict[str, Any]:
    """The best layout of those that the run's keys leave open."""
    from app.config_io import load_config
    from app.planner.plan import make_plan
    from app.planner.read import Reader
    from app.planner.where import machine_of
    from app.tasks import load_task
    from cluster.shape import of_gpus

    keys = {"train.precision": "bf16", **run["keys"]}
    model = {"data": "python", **run["model"], "n_layers": 2}
    overrides = [
        "task=language_modelling",
        f"task_args={json.dumps(model)}",
        "train.steps=1",
        f"train.global_batch_size={run['batch']}",
    ]
    overrides += [f"{key}={value}" for key, value in keys.items()]
    config = load_config([], overrides)
    machine = machine_of(of_gpus(run["gpus"], run["gpu"], min(8, run["gpus"]), run["network"]), run["gpus"])
    reader = Reader(load_task(config.task, config.task_args), sequence_parallel=config.parallel.sequence_parallel)
    for way in ("cast on a GPU", "autocast on a GPU", "plain on a GPU"):
        if keys["train.precision"] == "fp32" or way[0] != "p":
            reader.read(way)
    stretched(reader, run["model"]["n_layers"])
    plan = make_plan(config, reader.task, machine, given=frozenset(keys), reader=reader, corrected=False)
    return plan.layout(int(plan.order[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    rows, errors = [], []
    for run in yaml.safe_load(RUNS.read_text()):
        if asked.only not in run["name"]:
            continue
        layout, published = planned(run), seconds_of(run)
        error = layout["step_seconds"] / published - 1
        errors.append(abs(error))
        rows.append({"name": run["name"], "published": published, "error": error, "layout": layout})
        if not asked.json:
            share = {name: round(100 * s / layout["step_seconds"]) for name, s in layout["seconds"].items()}
            told = " ".join(f"{name} {percent} %" for name, percent in share.items() if percent)
            print(
                f"{run['name']:46s} {published:8.3f} s {layout['step_seconds']:8.3f} s {100 * error:+5.0f} % "
                f"{layout['memory_bytes'] / 2**30:6.1f} GiB{'' if layout['fits'] else ' !'}  micro-batch "
                f"{layout['micro_batch_size']}: {told}",
                flush=True,
            )
    if asked.json:
        print(json.dumps(rows))
    else:
        print(f"{len(errors)} runs, median error {100 * float(np.median(errors)):.1f} %")


if __name__ == "__main__":
    main()
