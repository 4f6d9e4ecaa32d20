"""`memory`: the peak of memory of small trainings on this machine's CPUs beside what a plan says.

The trainings are in memory.yaml. A worker is the loop of a run, in a process of its own that
torch's profiler watches from the first tensor on: its memory events are what the allocator hands
out and takes back. The peak is that of the steps, on the rank with most, less what the data have
(they are on the host where a GPU trains). *Process*: what a process takes besides, by the kernel's
count: libraries that are read, threads, gloo's buffers, what malloc keeps; a plan has none of it.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch.profiler import ProfilerActivity, profile, record_function

from app.config import Config
from app.config.io import load_config
from app.errors import RunFailed, UserError
from app.planner.advice import predict, reader_of
from app.planner.machine import cpus
from app.planner.processes import in_processes
from app.planner.read import Reader
from app.tasks import load_task
from app.training.job import Job, Place, SilentChannel, memory_bytes
from app.training.loop import Training
from experiments.benchmarks.harness import show
from strategies.dims import DEGREES
from strategies.layout import Layout, choose

TRAININGS = Path(__file__).with_name("memory.yaml")
COMMON = (
    "train.global_batch_size=8",
    "train.clip_norm=1.0",
    "train.data_workers=0",
    "checkpoint.every_seconds=null",
    "optimizer.lr=1e-4",
)
"""Keys of every training."""
VOCABULARY = 2048
IMAGES = (64, 3, 32, 32)
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""The model whose weights are on disk, for adapters."""
STEPS = 3
"""Optimizer steps; the optimizer's state is there from the second."""
TIMEOUT = 600.0
MIB = 2**20
COLUMNS = ("training", "plan, MiB", "allocator, MiB", "error")
"""Of the table; --json has more."""
MARK = "memory: data are read"
FIRST_STEP = "memory: a step"


@dataclass(frozen=True)
class Measured:
    """What the worker with most memory had.

    Attributes:
        tensors: Bytes that the allocator had handed out at the worst moment of the steps, without
            the data.
        building: The same of all that came before the first step.
        data: Bytes of the data.
        process: Bytes that the process has taken since it began, beyond these.
    """

    tensors: float
    building: float
    data: float
    process: float


def trainings() -> dict[str, tuple[int, list[str]]]:
    """The trainings of memory.yaml: by name, the number of workers, and the keys."""
    content = yaml.safe_load(TRAININGS.read_text())
    by_name = {}
    for name, (task, workers, keys) in content["rows"].items():
        of_task = content["tasks"][task]
        task_args = json.dumps(of_task["task_args"])
        words = [f"task={of_task['task']}", f"task_args={task_args}", *keys.split()]
        by_name[name] = workers, [*COMMON, *words]
    return by_name


def write_files(folder: Path) -> None:
    """The files that the trainings read."""
    numbers = np.random.default_rng(0)
    tokens = numbers.integers(VOCABULARY, size=20_000, dtype=np.uint16)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    images = numbers.integers(256, size=IMAGES, dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(len(images)) % 10)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **LLAMA)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "llama")


def config_of(keys: Sequence[str], workers: int, folder: Path) -> tuple[Config, Layout]:
    """The configuration and the layout of a training."""
    words = [key.replace("{folder}", str(folder)) for key in keys]
    words += [f"workers={workers}", "run.name=memory", f"run.storage={folder}/runs"]
    config = load_config([], words)
    degrees = {name: getattr(config.parallel, name) for name in DEGREES}
    return config, choose(config.strategy, workers, **degrees)


# --- in a worker ----------------------------------------------------------------------------------


def _train(
    rank: int, device: torch.device, keys: list[str], workers: int, folder: str
) -> list[float]:
    """Trains in one of the processes.

    Returns:
        The fields of `Measured`, each the most of all ranks.
    """
    config, layout = config_of(keys, workers, Path(folder))
    before = memory_bytes(device)
    job = Job(
        config=config,
        layout=layout,
        folder=f"{folder}/runs/memory",
        attempt="memory",
        run_uid="",
        steps=STEPS,
        cwd=os.getcwd(),
    )
    place = Place(rank=rank, world_size=workers, local_rank=rank, device=device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        data = load_task(config.task, config.task_args).train_data()
        with record_function(MARK):
            del data
        training = Training(job, place, SilentChannel())
        for micro_batches in training.batches():
            with record_function(FIRST_STEP):
                training.step(micro_batches)
        resident = memory_bytes(device) - before
        training.close()
    measured = _read(profiler, resident)
    most = torch.tensor(measured, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return [float(value) for value in most]


def _read(profiler: profile, resident: float) -> list[float]:
    """The fields of `Measured` of this process.

    Args:
        profiler: Has watched it.
        resident: Bytes by which its resident memory has grown.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    starts: dict[str, float] = {}
    for event in events:
        if event.get("name") in (MARK, FIRST_STEP):
            starts.setdefault(event["name"], event["ts"])
    sizes = sorted(
        (event["ts"], event["args"]["Total Allocated"])
        for event in events
        if event.get("name") == "[memory]"
    )
    data = [size for at, size in sizes if at <= starts[MARK]]
    building = [size for at, size in sizes if at <= starts[FIRST_STEP]]
    steps = [size for at, size in sizes if at > starts[FIRST_STEP]]
    data_bytes = data[-1] if data else 0
    return [
        max(steps) - data_bytes,
        max(building) - data_bytes,
        data_bytes,
        resident - max(max(steps), max(building)),
    ]


# --- comparing ------------------------------------------------------------------------------------


def measure(names: Sequence[str], folder: Path) -> Iterator[tuple[str, Measured | str]]:
    """Measures trainings one after another; yields a sentence for one that fails."""
    for name in names:
        workers, keys = trainings()[name]
        try:
            values = in_processes(
                _train, workers, keys, workers, str(folder), timeout=TIMEOUT, start_method="fork"
            )
            click.echo(f"{name}: {values[0] / MIB:.1f} MiB", err=True)
            yield name, Measured(*values)
        except RunFailed as error:
            click.echo(f"{name}: {error}", err=True)
            yield name, str(error)


def row_of(
    name: str, measured: Measured, folder: Path, readers: dict[str, Reader]
) -> tuple[dict[str, str], float]:
    """A line of the table, and the relative error of the plan.

    Args:
        name: The training.
        measured: What it had.
        folder: With its files.
        readers: Those of models that were planned before.
    """
    workers, keys = trainings()[name]
    config, layout = config_of(keys, workers, folder)
    machine = cpus(workers)
    key = json.dumps([config.task, config.task_args, workers, config.train.weight_dtype])
    if key not in readers:
        task = load_task(config.task, config.task_args)
        readers[key] = reader_of(config, task, machine)
    reader = readers[key]
    plan = predict(config, reader.task, layout, machine, reader)
    error = plan.allocated_bytes / measured.tensors - 1
    parts = [f"{part} {size / MIB:.1f}" for part, size in plan.memory.items() if size]
    row = {
        "training": name,
        "workers": str(workers),
        "plan, MiB": f"{plan.allocated_bytes / MIB:.1f}",
        "allocator, MiB": f"{measured.tensors / MIB:.1f}",
        "error": f"{100 * error:+.1f} %",
        "building, MiB": f"{measured.building / MIB:.1f}",
        "data, MiB": f"{measured.data / MIB:.1f}",
        "process, MiB": f"{measured.process / MIB:.0f}",
        "parts of the plan": ", ".join(parts),
    }
    return row, error


@click.command(help=__doc__)
@click.option("--only", "only", multiple=True, help="The name of a training.")
@click.option("--json", "as_json", is_flag=True)
def main(only: tuple[str, ...], as_json: bool) -> None:
    known = trainings()
    for name in only:
        if name not in known:
            raise UserError(f"--only {name}: memory.yaml has {', '.join(known)}")
    torch.set_num_threads(1)
    rows = []
    errors = []
    readers: dict[str, Reader] = {}
    with tempfile.TemporaryDirectory(prefix="trireme-memory-") as path:
        folder = Path(path)
        write_files(folder)
        # All processes are forked before this one plans, which starts threads.
        measured = list(measure(only or list(known), folder))
        for name, result in measured:
            if isinstance(result, str):
                rows.append({"training": name, "error": result[:70]})
                continue
            row, error = row_of(name, result, folder, readers)
            rows.append(row)
            errors.append(error)
    lines = [{key: row.get(key, "") for key in COLUMNS} for row in rows]
    figures = summary(errors)
    show("memory", {"rows": rows, **figures}, lines, as_json=as_json)
    if figures and not as_json:
        processes = [float(row["process, MiB"]) for row in rows if "process, MiB" in row]
        click.echo(
            f"plan: off by {100 * figures['median']:.1f} % in the median, "
            f"{100 * figures['ninetieth']:.1f} % at the 90th percentile, bias "
            f"{100 * figures['bias']:+.1f} %; a process takes {min(processes):.0f} to "
            f"{max(processes):.0f} MiB besides"
        )


def summary(errors: Sequence[float]) -> dict[str, float]:
    """The median and 90th percentile of the errors' sizes, and the median error."""
    if not errors:
        return {}
    sizes = sorted(map(abs, errors))
    return {
        "median": statistics.median(sizes),
        "ninetieth": sizes[-(-9 * len(sizes) // 10) - 1],
        "bias": statistics.median(errors),
    }


if __name__ == "__main__":
    main()
