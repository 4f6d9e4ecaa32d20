"""The whole parity matrix on this machine: every row against one device, and every row's checkpoint under every row.

Processes are started once per number of workers and run all rows of it. What they cannot say in numbers (a row that
raised) they say in a sentence, and the matrix goes on. `trireme parity` calls `run` and prints `table`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from strategies import parity, reshard
from strategies.compose import Options
from strategies.dims import LayoutError
from strategies.parity import Curve, Difference, Trial
from strategies.rows import ROWS, Row

MakeTrial = Callable[[], Trial]

VARIANTS: dict[str, tuple[dict[str, Any], Options]] = {
    "plain": ({}, Options()),
    "accumulated, clipped, recomputed": (
        {"micro_batches": 2, "clip": 0.5},
        Options(activation_checkpointing="full"),
    ),
}
"""Name → changes to the trial, and options."""


@dataclass(frozen=True)
class Call:
    """One run of a row: in full, its first half, or the rest from another row's checkpoint."""

    row: Row
    variant: str
    kind: str = "train"
    folder: str = ""


@dataclass(frozen=True)
class Result:
    """How far a row was from one device. after: the row whose checkpoint it continued. error: why it has no numbers."""

    row: Row
    variant: str
    found: Difference | None
    seconds: float
    after: Row | None = None
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.found is not None and self.found.within(self.row.tolerance)


@dataclass
class Answer:
    """What rank 0 sends back for a call."""

    curve: Curve | None = None
    seconds: float = 0.0
    error: str = ""


SINGLE = Row("single", 1)


def run(make: MakeTrial, rows: Iterable[Row] = ROWS, *, checkpoints: bool = False) -> list[Result]:
    """Trains every row in every variant and compares; then, with `checkpoints`, every ordered pair of rows.

    make: gives the trial; picklable (at the top level of a module), as it is called in the workers.
    """
    rows = list(rows)
    calls = [Call(row, variant) for row in rows for variant in VARIANTS]
    truth = {call.variant: answer.curve for call, answer in _execute(make, [Call(SINGLE, v) for v in VARIANTS])}
    results = [_compared(call, answer, truth[call.variant]) for call, answer in _execute(make, calls)]
    return results + (_checkpoints(make, rows, truth) if checkpoints else [])


def _checkpoints(make: MakeTrial, rows: list[Row], truth: dict[str, Curve | None]) -> list[Result]:
    variant = list(VARIANTS)[-1]
    whole, half = truth[variant], make().steps // 2
    assert whole is not None
    rest = Curve(whole.losses[half:], whole.norms[half:], whole.weights)
    everyone = [SINGLE, *rows]
    with tempfile.TemporaryDirectory(prefix="trireme-parity-") as folder:
        places = {str(Path(folder) / str(i)): row for i, row in enumerate(everyone)}
        for call, answer in _execute(make, [Call(row, variant, "begin", place) for place, row in places.items()]):
            if answer.error:
                return [Result(call.row, variant, None, answer.seconds, after=call.row, error=answer.error)]
        calls = [Call(row, variant, "resume", place) for row in everyone for place in places]
        found = _execute(make, calls)
    return [dataclasses.replace(_compared(call, answer, rest), after=places[call.folder]) for call, answer in found]


def _compared(call: Call, answer: Answer, truth: Curve | None) -> Result:
    found = parity.difference(truth, answer.curve) if truth is not None and answer.curve is not None else None
    return Result(call.row, call.variant, found, answer.seconds, error=answer.error)


def table(results: list[Result]) -> str:
    """The results as text: one line per row and variant, the worst pair per row for checkpoints."""
    lines = [f"{'row':<44} {'variant':<34} {'loss':>8} {'norm':>8} {'weights':>8} {'s':>6}"]
    pairs: dict[str, list[Result]] = {}
    for result in results:
        if result.after is not None:
            pairs.setdefault(str(result.row), []).append(result)
        else:
            lines.append(_line(str(result.row), result.variant, result))
    for name, several in pairs.items():
        worst = max(several, key=lambda r: float("inf") if r.found is None else r.found.loss)
        lines.append(_line(name, f"after {len(several)} others' checkpoints", worst))
    return "\n".join(lines)


def _line(name: str, what: str, result: Result) -> str:
    mark = "" if result.passed else "  DIFFERS"
    if result.found is None:
        return f"{name:<44} {what:<34} {result.error}{mark}"
    found = result.found
    return f"{name:<44} {what:<34} {found.loss:8.1e} {found.norm:8.1e} {found.weights:8.1e} {result.seconds:6.1f}{mark}"


# --- processes --------------------------------------------------------------------------------------------------


def _execute(make: MakeTrial, calls: list[Call]) -> list[tuple[Call, Answer]]:
    """Runs the calls, those of one number of workers in one set of processes; answers in the order of the calls."""
    answers: dict[int, Answer] = {}
    for workers in sorted({call.row.workers for call in calls}):
        chosen = [i for i, call in enumerate(calls) if call.row.workers == workers]
        with tempfile.TemporaryDirectory(prefix="trireme-parity-") as folder:
            arguments = (workers, make, [calls[i] for i in chosen], folder)
            multiprocessing.start_processes(_worker, arguments, nprocs=workers, start_method="spawn")
            given = torch.load(Path(folder) / "answers", weights_only=False)
        answers.update(zip(chosen, given, strict=True))
    return [(call, answers[i]) for i, call in enumerate(calls)]


def _worker(rank: int, workers: int, make: MakeTrial, calls: list[Call], folder: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    cuda = torch.cuda.device_count() >= workers
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if workers > 1:
        store = dist.FileStore(f"{folder}/store", workers)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=workers)
    answers = [_answer(make(), call, device) for call in calls]
    if rank == 0:
        torch.save(answers, Path(folder) / "answers")
    if workers > 1:
        dist.barrier()
        dist.destroy_process_group()
    _leave()


def _leave() -> None:
    """Ends this process at once: gloo's threads sometimes abort an interpreter that shuts down around them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _answer(trial: Trial, call: Call, device: torch.device) -> Answer:
    changes, options = VARIANTS[call.variant]
    trial, options = call.row.applied(dataclasses.replace(trial, **changes), options)
    begun, half, layout = time.monotonic(), trial.steps // 2, call.row.layout
    answer = Answer()
    try:
        if call.kind == "begin":
            reshard.begin(trial, layout, options, device, call.folder, half)
        elif call.kind == "resume":
            answer.curve = reshard.resume(trial, layout, options, device, call.folder, half)
        else:
            answer.curve = parity.train(trial, layout, options, device)
    except LayoutError as error:
        answer.error = str(error)
    except Exception:
        if call.row.workers > 1:  # the other ranks may be waiting for this one: end them all
            raise
        answer.error = traceback.format_exc(limit=-1).strip().splitlines()[-1]
    answer.seconds = time.monotonic() - begun
    return answer
