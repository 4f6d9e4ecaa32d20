"""Runs of matrix rows in processes of their own: new ones for every number of workers, every `CALLS` of them, and after
one has raised.

A row that a layout refuses answers with that sentence; one that raises anything else ends its processes, which may be
waiting for one another, answers with the error, and the rows after it get new ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from experiments.parity import curves, drift, reshard
from experiments.parity.curves import Curve, Trial
from experiments.parity.rows import Row
from strategies import devices, registry
from strategies.layout import LayoutError
from strategies.parallelize import Options

MakeTrial = Callable[[], Trial]
Changes = tuple[dict[str, Any], dict[str, Any]]

EVERYTHING = "accumulated, clipped, recomputed"
VARIANTS: dict[str, Changes] = {
    "plain": ({}, {}),
    EVERYTHING: ({"micro_batches": 2, "clip": 0.5}, {"activation_checkpointing": "full"}),
    "bf16": ({"micro_batches": 2, "clip": 0.5}, {"precision": "bf16"}),
}
"""Name → changes to the trial, and to the options."""

CALLS = 40
"""Made by one set of processes: every layout makes groups, whose threads (of gloo, three for each) stay."""

FIRST_SECONDS = 3.0
"""For a rank that has lost its peers: the one at fault ends before it, and what that one says is taken."""

PATIENCE = datetime.timedelta(minutes=10)
"""For a rank that does not come, before its peers give the row up."""


@dataclass(frozen=True)
class Call:
    """One run of a row: in full, its first half ("begin"), the rest from another row's checkpoint ("resume"), or on one
    device one of drift.KINDS."""

    row: Row
    variant: str
    kind: str = "train"
    folder: str = ""


@dataclass
class Answer:
    """What rank 0 sends back for a call."""

    curve: Curve | None = None
    seconds: float = 0.0
    refused: str = ""
    error: str = ""


@dataclass(frozen=True)
class How:
    """What all calls share. make: gives the trial. options: that the variants change. device_type: of all rows."""

    make: MakeTrial
    options: Options
    device_type: str

    def variant(self, name: str) -> tuple[Trial, Options]:
        changes, options = VARIANTS[name]
        return dataclasses.replace(self.make(), **changes), dataclasses.replace(self.options, **options)


def execute(how: How, calls: list[Call]) -> list[tuple[Call, Answer]]:
    """Runs the calls, those of one number of workers in one set of processes; answers in the order of the calls."""
    answers: dict[int, Answer] = {}
    for workers in sorted({call.row.workers for call in calls}):
        waiting = [i for i, call in enumerate(calls) if call.row.workers == workers]
        while waiting:  # a call that raised has ended its processes: new ones for those after it
            given = _together(workers, how, [calls[i] for i in waiting[:CALLS]])
            answers.update(zip(waiting, given))
            waiting = waiting[len(given) :]
    return [(call, answers[i]) for i, call in enumerate(calls)]


def _together(workers: int, how: How, calls: list[Call]) -> list[Answer]:
    """The calls in one set of processes, up to and including the first that raised."""
    raised = ""
    with tempfile.TemporaryDirectory(prefix="trireme-parity-") as folder:
        try:
            multiprocessing.start_processes(
                _worker, (workers, how, calls, folder), nprocs=workers, start_method="spawn"
            )
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            raised = str(error).strip().splitlines()[-1]
        given = [torch.load(path, weights_only=False) for path in _answers(folder)]
    return given if len(given) == len(calls) else [*given, Answer(error=raised or "its processes ended")]


def _answers(folder: str) -> Iterator[Path]:
    number = 0
    while (path := Path(folder) / f"answer-{number}").exists():
        yield path
        number += 1


def _worker(rank: int, workers: int, how: How, calls: list[Call], folder: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers)}
    torch.backends.cudnn.allow_tf32 = False
    # Said once by every process: that shards on two sides are gathered one side at a time (they are, at the end), that
    # a loss which changes a view in place loses gradients (then the row differs), and that one process saves alone.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    if workers > 1:
        store = dist.FileStore(f"{folder}/store", workers)
        backend = "cpu:gloo,cuda:nccl" if how.device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=PATIENCE)
    for number, call in enumerate(calls):
        device = torch.device("cpu")
        if how.device_type == "cuda":
            several = any(record.several_devices for record in registry.written(call.row.name))
            device = torch.device("cuda", devices.home(several, rank, workers, torch.cuda.device_count()))
            torch.cuda.set_device(device)
        answer = _answer(how, call, device)
        if workers > 1:
            dist.barrier()  # an answer counts once every rank has come through
        if rank == 0:
            torch.save(answer, Path(folder) / "answer.part")
            os.replace(Path(folder) / "answer.part", Path(folder) / f"answer-{number}")
    if workers > 1:
        dist.barrier()
        dist.destroy_process_group()
    _leave()


def _leave() -> None:
    """Ends this process at once: gloo's threads sometimes abort an interpreter that shuts down around them."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _answer(how: How, call: Call, device: torch.device) -> Answer:
    trial, options = call.row.applied(*how.variant(call.variant))
    begun, half, layout = time.monotonic(), trial.steps // 2, call.row.layout
    answer = Answer()
    try:
        if call.kind == "begin":
            reshard.begin(trial, layout, options, device, call.folder, half)
        elif call.kind == "resume":
            answer.curve = reshard.resume(trial, layout, options, device, call.folder, half)
        else:
            trial, options = drift.changed(call.kind, trial, options)
            answer.curve = curves.train(trial, layout, options, device)
    except LayoutError as error:
        answer.refused = str(error)
    except ConnectionError:  # lost its peers: whoever made them go is to be heard first
        time.sleep(FIRST_SECONDS)
        raise
    except Exception:
        if call.row.workers > 1:  # the other ranks may be waiting for this one: end them all
            raise
        answer.error = traceback.format_exc(limit=-1).strip().splitlines()[-1]
    answer.seconds = time.monotonic() - begun
    return answer
