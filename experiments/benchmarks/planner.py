"""`python -m experiments.benchmarks.planner`: how right plans are, and plans to look at.

    … check [--out FILE.json]            this machine: calibrated on some configurations, predicted and measured others
    … published TABLE.csv                published runs: half fitted, half not
    … plans [--picture FILE.png]         GPTs of 1.3 to 405 billion parameters on 1 to 4,096 H100, a Llama, a ResNet

`check` takes about six minutes and wants the machine to itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

GPTS = {
    "1.3B": {"d_model": 2048, "n_layers": 24, "n_heads": 16, "sequence_length": 2048},
    "7B": {"d_model": 4096, "n_layers": 32, "n_heads": 32, "sequence_length": 4096},
    "70B": {"d_model": 8192, "n_layers": 80, "n_heads": 64, "sequence_length": 4096},
    "405B": {"d_model": 16384, "n_layers": 126, "n_heads": 128, "sequence_length": 8192},
}
GPUS = (1, 8, 64, 512, 4096)
BATCH = 4096
OTHERS = {
    "Llama 8B (transformers)": [
        "task=huggingface",
        "task_args={model: llama, config: {hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, "
        "num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 128256}, data: python, tokenizer: bytes, "
        "sequence_length: 4096}",
    ],
    "ResNet": [
        "task=image_classification",
        "task_args={data: mnist, model: resnet}",
    ],
}


def plans(picture: str | None) -> None:
    """Prints a table of the best layouts, and draws time against memory."""
    from app.config_io import load_config
    from app.planner import show
    from app.planner.plan import make_plan
    from app.planner.read import Reader
    from app.planner.where import machine_of
    from app.tasks import load_task
    from cluster.shape import of_gpus

    drawn: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = [("model", "GPUs", *show.COLUMNS)]
    models = {
        name: ["task=language_modelling", f"task_args={json.dumps({'data': 'python', 'vocab_size': 50368, **args})}"]
        for name, args in GPTS.items()
    }
    for name, overrides in (models | OTHERS).items():
        config = load_config(
            [], [*overrides, "train.precision=bf16", "train.steps=100000", f"train.global_batch_size={BATCH}"]
        )
        reader = Reader(load_task(config.task, config.task_args))
        for gpus in GPUS if name in GPTS else (1, 8, 64):
            machine = machine_of(of_gpus(gpus, "h100-80gb", min(8, gpus), "3200Gb"), gpus)
            plan = make_plan(config, reader.task, machine, given=frozenset({"train.precision"}), reader=reader)
            best = plan.best()
            shown = show.cells(plan.layout(int(plan.order[0])))
            rows.append((name, f"{gpus:,}", *(shown if best is not None else ("fits nowhere", *shown[1:]))))
            if name in GPTS:
                drawn[f"{name} on {gpus:,} H100"] = plan
    print("\n".join(show.aligned(rows)))
    if picture:
        show.picture(drawn, picture)
        print(f"drawn: {picture}")


def check(out: str | None) -> None:
    from app.planner import check as planner_check

    found = planner_check.run(lambda text: print(text, file=sys.stderr, flush=True))
    if out:
        Path(out).write_text(json.dumps(found, indent=1))
    print(planner_check.text(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["check", "published", "plans"])
    parser.add_argument("table", nargs="?")
    parser.add_argument("--out")
    parser.add_argument("--picture")
    asked = parser.parse_args()
    if asked.what == "check":
        check(asked.out)
    elif asked.what == "plans":
        plans(asked.picture)
    else:
        from app.planner.published import report

        if not asked.table:
            parser.error("published needs the table's path")
        print(report(asked.table))


if __name__ == "__main__":
    main()
