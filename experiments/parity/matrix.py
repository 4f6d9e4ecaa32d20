"""The parity matrix on this machine: every row against one device, and every row's checkpoint under every row.

All rows run on GPUs or all on the CPU. Each row has processes of its own, forked from one that has imported torch. A
row that its layout refuses answers with that sentence; one that raises anything else has failed, and the matrix goes
on. In float32 the bound is `Row.tolerance`, in 16 bits what one device differs from itself by (drift.py).
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from experiments.parity import drift
from experiments.parity.curves import Curve, Difference, Trial, bounds, difference, train
from experiments.parity.rows import ROWS, SINGLE, Row
from strategies import devices, registry
from strategies.layout import LayoutError
from strategies.parallelize import Options

MakeTrial = Callable[[], Trial]

EVERYTHING = "accumulated, clipped, recomputed"
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    EVERYTHING: ({"micro_batches": 2, "clip": 0.5}, {"activation_checkpointing": "full"}),
    "bf16": ({"micro_batches": 2, "clip": 0.5}, {"precision": "bf16"}),
}
"""Name → changes to the trial, and to the options."""

PEER_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Call:
    """One training of a row. kind: of one device, one of drift.KINDS. load, save: the second or the first half only,
    from or to this checkpoint."""

    row: Row
    variant: str
    kind: str = ""
    load: str = ""
    save: str = ""


@dataclass(frozen=True)
class Result:
    """What a training came to, and how far it was from one device's.

    found: None where there is no curve: refused holds the sentence of a layout that cannot do this, error whatever else
    was raised. after: the row whose checkpoint was continued. limit: what is allowed, if not the row's own tolerance.
    """

    row: Row
    variant: str
    found: Difference | None = None
    seconds: float = 0.0
    after: Row | None = None
    refused: str = ""
    error: str = ""
    curve: Curve | None = None
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
    truth = OneDevice(trials, [*names, *([EVERYTHING] if checkpoints and EVERYTHING not in names else [])])
    calls = [Call(row, variant) for row in rows for variant in names]
    with tempfile.TemporaryDirectory(prefix="trireme-parity-") as folder:
        begin = [Call(row, EVERYTHING, save=f"{folder}/{i}") for i, row in enumerate([SINGLE, *rows])]
        ended = trials.run(calls + (begin if checkpoints else []))
        good = {call.save: call.row for call, result in ended if call.save and result.curve}
        pairs = trials.run([Call(row, EVERYTHING, load=place) for row in good.values() for place in good])
    results = [truth.compared(call, result) for call, result in ended if not call.save]
    results += [replace(result, after=call.row) for call, result in ended if call.save and not result.curve]
    return results + [replace(truth.compared(call, result), after=good[call.load]) for call, result in pairs]


class OneDevice:
    """What rows are compared with: one device's curves of each variant, by kind of run, and in 16 bits the bounds."""

    def __init__(self, trials: Trials, variants: list[str]) -> None:
        self.precision = {name: trials.variant(name)[1].precision for name in variants}
        self.curves: dict[str, dict[str, Curve]] = {name: {} for name in variants}
        kinds = {name: ("", *(drift.KINDS if bits != "fp32" else ())) for name, bits in self.precision.items()}
        for call, result in trials.run([Call(SINGLE, name, kind) for name in variants for kind in kinds[name]]):
            if result.refused and not call.kind.endswith("halved"):  # of a small batch there may be no more parts
                raise LayoutError(result.refused)
            if result.error:
                raise RuntimeError(f"one device does not train this: {result.error}")
            if result.curve:
                self.curves[call.variant][call.kind] = result.curve
        narrow = [name for name, bits in self.precision.items() if bits != "fp32"]
        self.limits = {name: drift.limits(self.precision[name], self.curves[name]) for name in narrow}

    def compared(self, call: Call, result: Result) -> Result:
        if result.curve is None:
            return result
        kind = drift.truth_of(call.row, self.precision[call.variant])
        truth, steps = self.curves[call.variant][kind], len(result.curve.losses)  # the last of them, after a checkpoint
        found = difference(Curve(truth.losses[-steps:], truth.norms[-steps:], truth.weights), result.curve)
        return replace(result, found=found, limit=self.limits.get(call.variant, {}).get(kind))


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
    began, curve, refused, error = time.monotonic(), None, "", ""
    trial, options = call.row.applied(*trials.variant(call.variant))
    steps = range(trial.steps // 2 if call.load else 0, trial.steps // 2 if call.save else trial.steps)
    try:
        trial, options = drift.changed(call.kind, trial, options)
        curve = train(trial, call.row.layout, options, device, steps=steps, load=call.load, save=call.save)
    except LayoutError as refusal:
        refused = str(refusal)
    except Exception:
        if call.row.workers > 1:  # the other ranks may be waiting for this one: end them all
            raise
        error = traceback.format_exc(limit=-1).strip().splitlines()[-1]
    seconds = time.monotonic() - began
    return Result(call.row, call.variant, None, seconds, refused=refused, error=error, curve=curve)
