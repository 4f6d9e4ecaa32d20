"""`one-gpu`: trainings on one GPU beside what the plan says of their step and memory.

The trainings are in one_gpu.yaml. With --measure they are run on the GPU that is here, one after
another in one process, and a line for each is added to one_gpu.csv, with what the plan said before.
Without it, each line is planned anew for its GPU, which need not be here.
"""

import csv
import dataclasses
import gc
import io
import json
import math
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import yaml

from app.config import Config
from app.config.io import from_dict
from app.errors import UserError
from app.planner.advice import predict
from app.planner.estimate import Estimate
from app.planner.machine import MachineOptions, find_machine
from app.planner.plan import GIB
from app.tasks import load_task
from experiments.benchmarks.gpu_first.check import CheckContext
from experiments.benchmarks.gpu_first.training import make_training
from experiments.benchmarks.harness import measure_in_turns, show
from strategies.layout import choose

FOLDER = Path(__file__).parent
TRAININGS = FOLDER / "one_gpu.yaml"
MEASURED = FOLDER / "one_gpu.csv"
VOCABULARY = 50304
"""Words of a GPT's vocabulary."""
BLOCKS = 3
BLOCK_SECONDS = 0.7
TRAIN_KEYS = ("precision", "compile", "activation_checkpointing")


@dataclass(frozen=True)
class Line:
    """A line of one_gpu.csv.

    Attributes:
        name: Of the training, in one_gpu.yaml.
        gpu: Its name in cluster/hardware.yaml.
        torch: The version of torch.
        commit: Of the repository, when it was measured.
        planned_ms: What the plan at that commit said of a step, milliseconds.
        planned_gib: The same of the tensors' memory, GiB.
        ms: Of a step, the median of blocks of steps.
        gib: The most that torch had allocated, without what it had before the model was made.
        first_s: Seconds of the first step, which compiles.
        remark: Why there are no figures, or why they are not compared; "" if they are.
    """

    name: str
    gpu: str
    torch: str
    commit: str
    planned_ms: float
    planned_gib: float
    ms: float
    gib: float
    first_s: float
    remark: str = ""

    @property
    def is_compared(self) -> bool:
        return math.isfinite(self.ms) and not self.remark


def trainings() -> dict[str, dict[str, Any]]:
    """The trainings of one_gpu.yaml, by name."""
    return dict(yaml.safe_load(TRAININGS.read_text())["rows"])


def lines() -> list[Line]:
    """What was measured."""
    if not MEASURED.exists():
        return []
    texts = {"name", "gpu", "torch", "commit", "remark"}
    measured = []
    with MEASURED.open(newline="") as file:
        for values in csv.DictReader(file):
            typed = {key: value if key in texts else float(value) for key, value in values.items()}
            measured.append(Line(**typed))  # type: ignore[arg-type]
    return measured


# --- the configuration of a training --------------------------------------------------------------


def config_of(training: Mapping[str, Any], folder: Path, *, weights: bool) -> Config:
    """The configuration of a training.

    Args:
        training: Its values in one_gpu.yaml.
        folder: For the files that it reads, which are written if they are not there, and its run.
        weights: Whether it needs numbers in the model that adapters are added to.
    """
    train = {key: training[key] for key in TRAIN_KEYS if key in training}
    return from_dict(
        {
            **_task(training, folder, weights=weights),
            "strategy": "single",
            "run": {"name": "one_gpu", "storage": str(folder)},
            "train": {
                "steps": 10_000,
                "clip_norm": 1.0,
                "micro_batch_size": training["batch"],
                "global_batch_size": training["batch"] * training.get("micro_batches", 1),
                **train,
            },
            "optimizer": {"lr": 1e-5, "weight_decay": 0.1},
            "checkpoint": {"every_seconds": None},
        }
    )


def _task(training: Mapping[str, Any], folder: Path, *, weights: bool) -> dict[str, Any]:
    """The keys `task` and `task_args`."""
    if "gpt" in training:
        d_model, n_layers, n_heads = training["gpt"]
        args = {
            "data": str(_write_tokens(folder, VOCABULARY)),
            "vocab_size": VOCABULARY,
            "sequence_length": training["length"],
            "d_model": d_model,
            "n_layers": n_layers,
            "n_heads": n_heads,
            "eval_samples": 1,
        }
        if "mixture" in training:
            args["mixture"] = dict(training["mixture"])
        return {"task": "language_modelling", "task_args": args}
    written = yaml.safe_load(TRAININGS.read_text())["models"][training["model"]]
    args = {"eval_samples": 1}
    if "images" in training:
        args["data"] = str(_write_images(folder, *training["images"]))
    else:
        args["data"] = str(_write_tokens(folder, written["vocab_size"]))
        args["sequence_length"] = training["length"]
        args["token_dtype"] = "uint32"
    if "lora" in training:
        args["lora"] = dict(training["lora"])
        args["model"] = str(_write_model(folder, training["model"], written, weights=weights))
        args["pretrained"] = True
        args["tokenizer"] = "bytes"  # the folder has none, and the data are tokens already
    else:
        sizes = dict(written)
        args["model"] = sizes.pop("model_type")
        if "images" in training:
            sizes.pop("image_size", None)  # the data say it
            sizes.pop("num_channels", None)
        args["config"] = sizes
    return {"task": "huggingface", "task_args": args}


def _write_tokens(folder: Path, vocabulary: int) -> Path:
    """A file of random tokens."""
    file = folder / f"{vocabulary}.bin"
    if not file.exists():
        kind = np.uint16 if vocabulary == VOCABULARY else np.uint32
        tokens = np.random.default_rng(0).integers(vocabulary, size=400_000, dtype=kind)
        file.write_bytes(tokens.tobytes())
    return file


def _write_images(folder: Path, channels: int, side: int, classes: int) -> Path:
    """A file of random images, at least one of each class."""
    file = folder / f"{channels}x{side}x{classes}.npz"
    if not file.exists():
        numbers = np.random.default_rng(0)
        images = numbers.integers(256, size=(classes + 32, channels, side, side), dtype=np.uint8)
        labels = np.arange(classes + 32) % classes
        np.savez(file, images=images, labels=labels)
    return file


def _write_model(folder: Path, name: str, written: dict[str, Any], *, weights: bool) -> Path:
    """A folder with a model's configuration, and its weights or an empty file in their place."""
    path = folder / f"{name}{'' if weights else '-empty'}"
    if path.exists():
        return path
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(written)
    model_config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    if weights:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
        model.save_pretrained(path)
        return path
    model_config.architectures = [f"{model_config.model_type.capitalize()}ForCausalLM"]
    model_config.save_pretrained(path)
    (path / "model.safetensors").touch()  # a plan reads no numbers
    return path


# --- measuring ------------------------------------------------------------------------------------


def measure(names: Sequence[str], *, seconds: float, folder: Path) -> Iterator[Line]:
    """Measure trainings, until too little time is left.

    Args:
        names: Of trainings.
        seconds: No training starts after this many.
        folder: For files.

    Yields:
        A line for each training, as soon as it is known.
    """
    start = time.monotonic()
    rows = trainings()
    machine = find_machine(MachineOptions(), "1")
    for name in names:
        if time.monotonic() - start > seconds:
            click.echo(f"{name}: no time is left")
            continue
        _free_memory()
        line = Line(
            name=name,
            gpu=machine.device.gpu.name,
            torch=torch.__version__,
            commit=_commit(),
            planned_ms=math.nan,
            planned_gib=math.nan,
            ms=math.nan,
            gib=math.nan,
            first_s=math.nan,
        )
        try:
            config = config_of(rows[name], folder, weights=True)
            task = load_task(config.task, config.task_args)
            line = _with_plan(line, predict(config, task, choose("single", 1), machine))
            yield _measured(line, config)
        except Exception as error:
            traceback.print_exc()
            yield dataclasses.replace(line, remark=f"{type(error).__name__}: {error}"[:200])


def _with_plan(line: Line, estimate: Estimate) -> Line:
    """The line with what the plan says of the training."""
    return dataclasses.replace(
        line,
        planned_ms=round(1e3 * estimate.step_seconds, 2),
        planned_gib=round(estimate.allocated_bytes / GIB, 3),
    )


def _measured(line: Line, config: Config) -> Line:
    """The line with what a run's own loop takes."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    context = CheckContext(device_type, line.name, io.StringIO())
    training = make_training(context, config)
    batches: Any = training.batches()

    def step() -> None:
        training.step(next(batches))

    first_seconds = _seconds(context, step)
    _seconds(context, step)
    usual = _seconds(context, step)
    times = measure_in_turns(
        {"": step},
        blocks=BLOCKS,
        steps_per_block=max(1, min(50, round(BLOCK_SECONDS / usual))),
        synchronize=context.synchronize,
    )
    used = torch.cuda.max_memory_allocated() if context.on_gpu else math.nan
    batches.close()
    return dataclasses.replace(
        line,
        ms=round(1e3 * statistics.median(times[""]), 2),
        gib=round((used - training.memory_before) / GIB, 3),
        first_s=round(first_seconds, 1),
    )


def _seconds(context: CheckContext, step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    context.synchronize()
    return time.perf_counter() - start


def _free_memory() -> None:
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _commit() -> str:
    words = ["git", "-C", str(FOLDER), "rev-parse", "--short", "HEAD"]
    git = subprocess.run(words, capture_output=True, text=True, check=False)
    return git.stdout.strip() or "?"


# --- comparing ------------------------------------------------------------------------------------


def compare(measured: Iterable[Line], folder: Path) -> Iterator[tuple[dict[str, str], Line, Line]]:
    """Plan what was measured anew, for the GPU that it was measured on.

    Args:
        measured: Lines of one_gpu.csv.
        folder: For files.

    Yields:
        (a row to print, the measured line, the same line with what the plan says now)
    """
    rows = trainings()
    for line in measured:
        if not line.is_compared:
            continue
        machine = find_machine(MachineOptions(gpu=line.gpu, gpus=1), "1")
        config = config_of(rows[line.name], folder, weights=False)
        task = load_task(config.task, config.task_args)
        estimate = predict(config, task, choose("single", 1), machine)
        now = _with_plan(line, estimate)
        low, high = estimate.speed_range
        is_inside = low <= now.planned_ms / line.ms <= high
        row = {
            "set": rows[line.name]["set"],
            "training": line.name,
            "GPU": line.gpu,
            "ms": f"{line.ms:.1f}",
            "planned": f"{now.planned_ms:.1f}",
            "error": f"{100 * (now.planned_ms / line.ms - 1):+.0f} %",
            "before": f"{100 * (line.planned_ms / line.ms - 1):+.0f} %",
            "range": f"{low:.2f} to {high:.2f} of the speed",
            "inside": "yes" if is_inside else "no",
            "GiB": f"{line.gib:.2f}",
            "planned GiB": f"{now.planned_gib:.2f}",
            "memory error": f"{100 * (now.planned_gib / line.gib - 1):+.0f} %",
            "memory before": f"{100 * (line.planned_gib / line.gib - 1):+.0f} %",
        }
        yield row, line, now


def _summary(compared: Sequence[tuple[dict[str, str], Line, Line]]) -> Iterator[str]:
    for name in dict.fromkeys(row["set"] for row, _, _ in compared):
        of_set = [(line, now) for row, line, now in compared if row["set"] == name]
        inside = sum(row["inside"] == "yes" for row, _, _ in compared if row["set"] == name)
        speed = [now.planned_ms / line.ms - 1 for line, now in of_set]
        memory = [now.planned_gib / line.gib - 1 for line, now in of_set]
        speed_before = [line.planned_ms / line.ms - 1 for line, _ in of_set]
        memory_before = [line.planned_gib / line.gib - 1 for line, _ in of_set]
        yield (
            f"{name}, {len(of_set)} trainings: step {_errors(speed)}, "
            f"{inside} inside the 80 % range, memory {_errors(memory)}; "
            f"planned before it was measured: step {_errors(speed_before)}, "
            f"memory {_errors(memory_before)}"
        )


def _errors(errors: Sequence[float]) -> str:
    median = statistics.median(map(abs, errors))
    bias = statistics.median(errors)
    return f"off by {100 * median:.0f} % in the median (bias {100 * bias:+.0f} %)"


@click.command(help=__doc__)
@click.option("--measure", "measures", is_flag=True, help="Measure on the GPU that is here.")
@click.option("--only", "only", multiple=True, help="A training, or first or fresh: a set.")
@click.option("--seconds", type=float, default=math.inf, help="No training starts after these.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("/tmp/one_gpu"),
    help="For random tokens, images and weights.",
)
@click.option("--out", type=click.Path(path_type=Path), default=MEASURED, help="For measurements.")
def main(measures: bool, only: tuple[str, ...], seconds: float, folder: Path, out: Path) -> None:
    rows = trainings()
    for word in only:
        if word not in rows and word not in {row["set"] for row in rows.values()}:
            raise UserError(f"--only {word}: one_gpu.yaml has {', '.join(rows)}")
    names = [name for name in rows if not only or name in only or rows[name]["set"] in only]
    folder.mkdir(parents=True, exist_ok=True)
    if not measures:
        compared = list(compare([line for line in lines() if line.name in names], folder))
        table = [row for row, _, _ in compared]
        show("one-gpu", table, table, as_json=False)
        for sentence in _summary(compared):
            click.echo(sentence)
        return
    is_new = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(
            file, [field.name for field in dataclasses.fields(Line)], lineterminator="\n"
        )
        if is_new:
            writer.writeheader()
        for line in measure(names, seconds=seconds, folder=folder):
            writer.writerow(dataclasses.asdict(line))
            file.flush()
            click.echo(json.dumps(dataclasses.asdict(line)))
