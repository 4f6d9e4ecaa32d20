"""What people train, killed twice under Ray: the run continues, to the last bit.

A row of `ITEMS` is what somebody runs. Two workers train it, one of them is killed, later the
driver is, and the same command is run again.
"""

import json
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.tracking.tracker import sync
from tests.app.tasks.test_kinds import CLIP, KINDS, MODERN, SEGFORMER, WAV2VEC2, WHISPER
from tests.app.tasks.test_tasks_huggingface import GROUPED, SMALL
from tests.app.tracking.test_trackers import scalars
from tests.running import (
    LONG,
    Lines,
    committed,
    disturb,
    mlflow_run,
    same_bits,
    start,
    trireme,
    wait_until,
    weights,
)

STEPS = 60
EVERY = 4
"""Steps between two checkpoints, which are the pace of such small models."""
COMMON = [
    "task=huggingface",
    "workers=2",
    f"train.steps={STEPS}",
    "train.global_batch_size=8",
    "train.eval_every=12",
    "train.log_every=1",
    f"checkpoint.every_steps={EVERY}",
    "tracking.system_metrics_every=0",
]
MEASURED = re.compile(
    r".*(second|bytes|memory|mfu|cost/|fault/|plan/|checkpoint/|pipeline/|data/|load_|time)"
)
"""Metrics that tell of the machine, and differ between two runs."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """What somebody trains.

    Attributes:
        args: The task's arguments; the value of `data` is a file of the fixture `files`.
        words: Further words of the command.
        metrics: Metrics that MLflow must have, beside the losses.
    """

    args: dict[str, Any]
    words: list[str] = field(default_factory=list)
    metrics: set[str] = field(default_factory=set)


def _of_kind(kind: str, config: dict[str, Any], *words: str, **args: Any) -> Item:
    """An item of a row of KINDS, with dropout and whatever else is drawn in a step."""
    return Item(args={"kind": kind, **KINDS[kind], "config": config, **args}, words=[*words])


LLAMA = {"model": "llama", "config": GROUPED, "data": "text.txt", "sequence_length": 16}
ADAPTED = {
    "model": "base",
    "pretrained": True,
    "kind": "instructions",
    "data": "talk.jsonl",
    "sequence_length": 160,
}
PREFERENCES = {
    "model": "llama",
    "config": GROUPED,
    "kind": "preferences",
    "data": "preferred.jsonl",
}
MAMBA = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 256}
DRAWN = {"mask_time_prob": 0.3, "mask_time_length": 2, "hidden_dropout": 0.1}
AUGMENTED = {"apply_spec_augment": True, "mask_time_prob": 0.3, "dropout": 0.1}
ADAPTERS = {"r": 4, "dropout": 0.1}
REWARDS = {"eval/rewards/margins", "train/rewards/margins", "train/logps/rejected"}

ITEMS = {
    "masked_lm with BERT; wsd": _of_kind(
        "masked_lm",
        SMALL,
        "strategy=ddp",
        "schedule.name=wsd",
        "schedule.warmup_steps=5",
        "schedule.decay_steps=20",
    ),
    "masked_lm with ModernBERT; Muon": _of_kind(
        "masked_lm", MODERN, "strategy=fsdp", "optimizer.name=muon", model="modernbert"
    ),
    "token_classification; groups": _of_kind(
        "token_classification",
        SMALL,
        "strategy=zero1",
        "optimizer.weight_decay=0.1",
        'optimizer.groups={"*.bias": {weight_decay: 0, lr: 3e-3}}',
    ),
    "question_answering; adamw8bit": _of_kind(
        "question_answering",
        SMALL | {"intermediate_size": 512},
        "strategy=fsdp",
        "optimizer.name=adamw8bit",
    ),
    "ctc with wav2vec2; TensorBoard": _of_kind(
        "ctc", WAV2VEC2 | DRAWN, "strategy=ddp", "tracking.also=[tensorboard]"
    ),
    "speech_seq2seq with Whisper; activations in host memory": _of_kind(
        "speech_seq2seq",
        WHISPER | AUGMENTED,
        "strategy=fsdp",
        "train.activation_offloading=true",
    ),
    "image_text with CLIP; micro-batches": _of_kind(
        "image_text", CLIP, "strategy=ddp", "train.micro_batch_size=2"
    ),
    "semantic_segmentation; separate evaluation": _of_kind(
        "semantic_segmentation",
        SEGFORMER | {"drop_path_rate": 0.1},
        "strategy=ddp",
        "train.eval_separate=true",
        "train.patience=50",
        "checkpoint.keep_last=1",
        "checkpoint.metric=mean_iou",
        "checkpoint.mode=max",
    ),
    "Mamba": Item(args={**LLAMA, "model": "mamba", "config": MAMBA}, words=["strategy=fsdp"]),
    "LoRA in nf4": Item(
        args={**ADAPTED, "lora": {**ADAPTERS, "quantize": "nf4"}}, words=["strategy=fsdp"]
    ),
    "rsLoRA in int8; Ray Train": Item(
        args={**ADAPTED, "lora": {**ADAPTERS, "quantize": "int8", "use_rslora": True}},
        words=["strategy=ddp", "launcher=ray"],
    ),
    "preferences": Item(
        args=PREFERENCES, words=["strategy=ddp", "optimizer.lr=1e-4"], metrics=REWARDS
    ),
    "preferences with DoRA; Ray Train": Item(
        args={
            **PREFERENCES,
            "model": "base",
            "config": {},
            "pretrained": True,
            "lora": {**ADAPTERS, "use_dora": True},
        },
        words=["strategy=fsdp", "launcher=ray"],
        metrics=REWARDS,
    ),
}


def command(item: Item, folder: Path, name: str, *words: str) -> list[str]:
    """Arguments that train an item in a run of this name."""
    args = {**item.args, "data": str(folder / item.args["data"])}
    if args["model"] == "base":
        args["model"] = str(folder / "base")
    task_args = f"task_args={json.dumps(args)}"
    run = [f"run.name={name}", f"run.storage={folder}"]
    return ["train", *COMMON, task_args, *item.words, *run, *words]


def _metrics(folder: Path, name: str) -> dict[str, list[tuple[int, float]]]:
    """All values of each metric of a run that does not tell of the machine, by its name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run = mlflow_run(folder, name)
    names = sorted(key for key in run.data.metrics if not MEASURED.match(key))
    return {
        key: sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, key))
        for key in names
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ITEMS)
def test_a_killed_run_continues_to_the_last_bit(
    name: str, files: Path, base: Path, ray_environment: dict[str, str]
) -> None:
    item = ITEMS[name]
    words = command(item, files, "run")
    folder = files / "run"
    process = start(words, env=ray_environment)
    lines = Lines(process)
    wait_until(lambda: committed(folder) or process.poll() is not None)
    assert process.poll() is None, lines.text
    disturb(folder, 1, signal.SIGKILL)
    lines.when("starting again from the last checkpoint")
    died_at = committed(folder)[-1]
    wait_until(lambda: committed(folder)[-1] > died_at or process.poll() is not None)
    assert process.poll() is None, lines.text
    process.send_signal(signal.SIGKILL)
    process.wait(LONG)
    run_id = mlflow_run(files, "run").info.run_id
    again = trireme(*words, env=ray_environment).expect()
    resumed_at = int(re.findall(r"continuing after step (\d+)", again.out)[0])
    assert EVERY < resumed_at < STEPS
    truth = command(item, files, "truth", "tracking.log_model=false")
    trireme(*truth, env=ray_environment).expect()

    assert same_bits(weights(folder), weights(files / "truth"))
    metrics = _metrics(files, "run")
    undisturbed = _metrics(files, "truth")
    assert metrics.keys() == undisturbed.keys() >= {"train/loss", "eval/loss"} | item.metrics
    for key, values in metrics.items():
        assert values == undisturbed[key], key
    assert [step for step, _ in metrics["train/loss"]] == [*range(1, STEPS + 1)]
    run = mlflow_run(files, "run")
    assert run.info.run_id == run_id and run.info.status == "FINISHED"
    if "tracking.also=[tensorboard]" in words:
        wait_until(lambda: not sync(folder / "tracking").trackers)  # on a busy machine it is late
        points = scalars(folder, "train/loss")
        assert points == [(step, pytest.approx(loss)) for step, loss in metrics["train/loss"]]
    if "train.eval_separate=true" in words:
        best, _ = max(metrics["eval/mean_iou"], key=lambda point: point[1])
        assert committed(folder) == sorted({best, STEPS})
