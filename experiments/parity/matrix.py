"""The parity matrix on this machine: every row against one device, and every row's checkpoint under every row.

All rows run on GPUs or all on the CPU. Each row has processes of its own, forked from one that has imported torch. A
row that its layout refuses answers with that sentence; one that raises anything else has failed, and the matrix goes
on.

In float32 the bound is `Row.tolerance`. In 16 bits the same training with the samples of its batches in another order
rounds at other places, and the difference grows from step to step: this is one device's drift, and the row's own
(sharded rows compute everything in 16 bits, and are noisier: strategies/precision.py). A row may be off by both
together, or by the rounding of one number if that is more.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from experiments.parity.curves import Curve, Difference, Trial, bounds, difference, train
from experiments.parity.rows import ROWS, SINGLE, Row
from strategies import devices, registry
from strategies.layout import LayoutError
from strategies.parallelize import Options
from strategies.tree import tree_map

MakeTrial = Callable[[], Trial]

EVERYTHING = "accumulated, clipped, recomputed"
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    EVERYTHING: ({"micro_batches": 2, "clip": 0.5}, {"activation_checkpointing": "full"}),
    "bf16": ({"micro_batches": 2, "clip": 0.5}, {"precision": "bf16"}),
}
"""Name → changes to the trial, and to the options."""

ROUNDING = 2.0**-9
"""Of one number to bfloat16, relative."""

PEER_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Call:
    """One training of a row. load, save: the second or the first half only, from or to this checkpoint."""

    row: Row
    variant: str
    load: str = ""
    save: str = ""


@dataclass(frozen=True)
class Result:
    """What a training came to, and how far it was from one device's.

    found: None where there is no curve: refused holds the sentence of a layout that cannot do this, error whatever else
    was raised. after: the row whose checkpoint was continued. drift: in 16 bits, what it differs from itself by. limit:
    what is allowed, if not the row's own tolerance.
    """

    row: Row
    variant: str
    found: Difference | None = None
    seconds: float = 0.0
    after: Row | None = None
    refused: str = ""
    error: str = ""
    curve: Curve | None = None
    drift: Difference | None = None
    limit: Difference | None = None

    @property
    def bound(self) -> Difference:
        return self.limit or bounds(self.row.tolerance)

    @property
    def passed(self) -> bool:
        return self.found is not None and self.found.inside(self.bound)

    @property
    def verdict(self) -> str:
        """ok, REFUSED, FAILED or DIFFERS."""
        if self.found is None:
            return "REFUSED" if self.refused else "FAILED"
        return "ok" if self.passed else "DIFFERS"


def run(
    make: MakeTrial,
    rows: Iterable[Row] = ROWS,
    *,
    options: Options | None = None,
    variants: Iterable[str] | None = None,
    checkpoints: bool = False,
) -> list[Result]:
    """Trains every row in every variant and compares; then, with `checkpoints`, every ordered pair of rows.

    make: gives the trial; picklable (at the top level of a module), as it is called in the workers. options: of every
    row. variants: names of VARIANTS; None: all, but for bf16 where the options have a precision already.
    Raises:
        LayoutError: one device cannot train this, so there is nothing to compare with.
    """
    rows, options = list(rows), options or Options()
    names = list(variants or (name for name in VARIANTS if name != "bf16" or options.precision == "fp32"))
    most = max((row.workers for row in rows), default=1)
    trials = Trials(make, options, "cuda" if torch.cuda.device_count() >= most else "cpu")
    begin = [Call(SINGLE, name) for name in dict.fromkeys([*names, *([EVERYTHING] if checkpoints else [])])]
    truths: dict[str, Result] = {}
    for call, result in trials.run(begin):
        if result.refused:
            raise LayoutError(result.refused)
        if result.error:
            raise RuntimeError(f"one device does not train this: {result.error}")
        truths[call.variant] = result
    calls = [Call(row, variant) for row in rows for variant in names]
    with tempfile.TemporaryDirectory(prefix="trireme-parity-") as folder:
        halves = [Call(row, EVERYTHING, save=f"{folder}/{i}") for i, row in enumerate([SINGLE, *rows])]
        ended = trials.run(calls + (halves if checkpoints else []))
        good = {call.save: call.row for call, result in ended if call.save and result.curve}
        pairs = trials.run([Call(row, EVERYTHING, load=place) for row in good.values() for place in good])
    results = [_compared(result, truths[call.variant]) for call, result in ended if not call.save]
    results += [replace(result, after=call.row) for call, result in ended if call.save and not result.curve]
    return results + [_compared(replace(r, after=good[call.load]), truths[EVERYTHING]) for call, r in pairs]


def _compared(result: Result, truth: Result) -> Result:
    curve, whole = result.curve, truth.curve
    if curve is None or whole is None:
        return result
    steps = len(curve.losses)  # the last of them, after a checkpoint
    found = difference(Curve(whole.losses[-steps:], whole.norms[-steps:], whole.weights), curve)
    limit = None
    if result.drift and truth.drift:
        pairs = zip(astuple(bounds(ROUNDING)), astuple(result.drift), astuple(truth.drift), strict=True)
        limit = Difference(*(max(least, own + one_device) for least, own, one_device in pairs))
    return replace(result, found=found, limit=limit, curve=replace(curve, weights={}))


# --- in processes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trials:
    """What all calls share. make: gives the trial. options: that the variants change. device_type: of all rows."""

    make: MakeTrial
    options: Options
    device_type: str

    def variant(self, name: str) -> tuple[Trial, Options]:
        changes, options = VARIANTS[name]
        return replace(self.make(), **changes), replace(self.options, **options)

    def run(self, calls: list[Call]) -> list[tuple[Call, Result]]:
        """The calls of each row in processes of its own; with the first that raises, those of the row after it fail."""
        multiprocessing.set_forkserver_preload(["experiments.parity.matrix"])
        ended: list[tuple[Call, Result]] = []
        for name in dict.fromkeys(str(call.row) for call in calls):
            own = [call for call in calls if str(call.row) == name]
            ended += zip(own, self._together(own))
        return ended

    def _together(self, calls: list[Call]) -> list[Result]:
        raised, workers = "its processes ended", calls[0].row.workers
        with tempfile.TemporaryDirectory(prefix="trireme-parity-") as folder:
            try:
                processes.start_processes(_worker, (self, calls, folder), nprocs=workers, start_method="forkserver")
            except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
                raised = str(error).strip().splitlines()[-1]
            paths = [(call, Path(folder, str(number))) for number, call in enumerate(calls)]
            return [
                torch.load(path, weights_only=False) if path.exists() else Result(call.row, call.variant, error=raised)
                for call, path in paths
            ]


def _worker(rank: int, trials: Trials, calls: list[Call], folder: str) -> None:
    workers, device = calls[0].row.workers, torch.device("cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers)}
    if trials.device_type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        several = any(record.several_devices for record in registry.written(calls[0].row.name))
        device = torch.device("cuda", devices.home(several, rank, workers, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    if workers > 1:
        store = dist.FileStore(f"{folder}/store", workers)
        backend = "cpu:gloo,cuda:nccl" if trials.device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=PEER_TIMEOUT)
    for number, call in enumerate(calls):
        result = _trained(trials, call, device)
        if workers > 1:
            dist.barrier()  # a result counts once every rank has come through
        if rank == 0:
            torch.save(result, Path(folder, "part"))
            os.replace(Path(folder, "part"), Path(folder, str(number)))
    if workers > 1:
        dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that shuts down around them


def _trained(trials: Trials, call: Call, device: torch.device) -> Result:
    began, curve, drift, refused, error = time.monotonic(), None, None, "", ""
    trial, options = call.row.applied(*trials.variant(call.variant))
    half = trial.steps // 2
    how = {"steps": range(half if call.load else 0, half if call.save else trial.steps)}

    def run(trial: Trial) -> Curve:
        return train(trial, call.row.layout, options, device, load=call.load, save=call.save, **how)

    try:
        curve = run(trial)
        if options.precision != "fp32" and not call.save:
            drifts = [astuple(difference(curve, run(_reordered(trial, shift)))) for shift in (0, 1, 2)]
            drift = Difference(*map(max, zip(*drifts, strict=True)))
    except LayoutError as refusal:
        refused = str(refusal)
    except Exception:
        if call.row.workers > 1:  # the other ranks may be waiting for this one: end them all
            raise
        error = traceback.format_exc(limit=-1).strip().splitlines()[-1]
    seconds = time.monotonic() - began
    return Result(call.row, call.variant, None, seconds, None, refused, error, curve, drift)


def _reordered(trial: Trial, shift: int) -> Trial:
    """The rows of each batch shifted round, or (0) the other way round."""
    batch = trial.batch
    return replace(trial, batch=lambda step: tree_map(lambda t: t.roll(shift, 0) if shift else t.flip(0), batch(step)))
