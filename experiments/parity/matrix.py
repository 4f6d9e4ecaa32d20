"""The parity matrix on this machine: every row against one device, and every row's checkpoint under every row.

All rows run on GPUs or all on the CPU. Each row has processes of its own, forked from one that has imported torch. A
row that its layout refuses answers with that sentence; one that raises anything else has failed, and the matrix goes
on.

In float32 the bound is `Row.tolerance`. In 16 bits one device differs from itself when the samples of its batches are
in another order, which rounds at other places, and a row is one more sample of that noise: it may differ by `MARGIN`
times the most that one device did in `ORDERS`, or by the rounding of one number. The differences grow from step to step
until two trainings have nothing in common, so only the first `NARROW_STEPS` are compared. Sharded rows compute
everything in 16 bits, which is noisier (strategies/precision.py): they are compared with one device that does the same.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.func import functional_call

from app.run.abort import abort
from experiments.parity.curves import Batch, Curve, Difference, Trial, bounds, difference, train
from experiments.parity.rows import ROWS, SINGLE, Row
from strategies import one_process, registry
from strategies.blocks import find_blocks, separable
from strategies.layout import LayoutError
from strategies.parallel import WholeStep
from strategies.parallelize import Options
from strategies.precision import DTYPES, cast_calls
from strategies.tree import tree_leaves, tree_map

MakeTrial = Callable[[], Trial]

EVERYTHING = "accumulated, clipped, recomputed"
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    EVERYTHING: ({"micro_batches": 2, "clip": 0.5}, {"activation_checkpointing": "full"}),
    "bf16": ({"micro_batches": 2, "clip": 0.5}, {"precision": "bf16"}),
}
"""Name → changes to the trial, and to the options."""

NARROW_STEPS = 8
ORDERS = range(12)
"""Seeds of the other orders of a batch's samples."""
MARGIN = 2.0
"""The largest of 12 such differences is exceeded by one in 13."""

PEER_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Call:
    """One training of a row. order: one of ORDERS. by_parameters: of one device, all of it in 16 bits, as sharded rows
    compute. load, save: the second or the first half only, from or to this checkpoint."""

    row: Row
    variant: str
    order: int | None = None
    by_parameters: bool = False
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
        return self.found is not None and self.found.within(self.bound)

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
    truth = OneDevice(trials, dict.fromkeys([*names, *([EVERYTHING] if checkpoints else [])]))
    calls = [Call(row, variant) for row in rows for variant in names]
    with tempfile.TemporaryDirectory(prefix="trireme-parity-") as folder:
        halves = [Call(row, EVERYTHING, save=f"{folder}/{i}") for i, row in enumerate([SINGLE, *rows])]
        ended = trials.run(calls + (halves if checkpoints else []))
        good = {call.save: call.row for call, result in ended if call.save and result.curve}
        pairs = trials.run([Call(row, EVERYTHING, load=place) for row in good.values() for place in good])
    results = [truth.compared(call, result) for call, result in ended if not call.save]
    results += [replace(result, after=call.row) for call, result in ended if call.save and not result.curve]
    return results + [replace(truth.compared(call, result), after=good[call.load]) for call, result in pairs]


class OneDevice:
    """The curves of one device that rows are compared with, and in 16 bits by how much they may differ."""

    def __init__(self, trials: Trials, variants: Iterable[str]) -> None:
        self.precision = {name: trials.variant(name)[1].precision for name in variants}
        calls = [Call(SINGLE, name) for name in self.precision]
        narrow = [name for name, bits in self.precision.items() if bits != "fp32"]
        calls += [Call(SINGLE, name, by_parameters=True) for name in narrow]
        orders = [replace(call, order=order) for call in calls if call.variant in narrow for order in ORDERS]
        self.runs: list[tuple[Call, Curve]] = []
        self.without: dict[str, str] = {}  # variants in 16 bits that one device does not train, and why
        for call, result in trials.run(calls + orders):
            if result.refused:
                raise LayoutError(result.refused)
            if result.curve is not None:
                self.runs.append((call, result.curve))
            elif call.variant in narrow:
                self.without[call.variant] = f"one device does not train this in 16 bits: {result.error}"
            else:
                raise RuntimeError(f"one device does not train this: {result.error}")

    def compared(self, call: Call, result: Result) -> Result:
        if result.curve is None:
            return result
        if call.variant in self.without:
            return replace(result, error=self.without[call.variant])
        dims, precision = call.row.layout.dims, self.precision[call.variant]
        whole = precision != "fp32" and dims.dp_shard > 1 and dims.pp == 1
        truth, *others = [c for own, c in self.runs if (own.variant, own.by_parameters) == (call.variant, whole)]
        steps = len(result.curve.losses)  # the last of them, after a checkpoint
        found = difference(Curve(truth.losses[-steps:], truth.norms[-steps:], truth.weights), result.curve)
        return replace(result, found=found, limit=_limit(precision, truth, others) if others else None)


def drift(truth: Curve, others: list[Curve]) -> Difference:
    """How far one device is from itself: `MARGIN` times the most that the others, of other orders, are from `truth`."""
    drifts = zip(*(astuple(difference(truth, other)) for other in others))
    return Difference(*(MARGIN * max(each) for each in drifts))


def _limit(precision: str, truth: Curve, others: list[Curve]) -> Difference:
    least = bounds(torch.finfo(DTYPES[precision]).eps / 2)
    return Difference(*map(max, astuple(least), astuple(drift(truth, others))))


# --- in processes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trials:
    """What all calls share. make: gives the trial. options: that the variants change. device_type: of all rows."""

    make: MakeTrial
    options: Options
    device_type: str

    def variant(self, name: str) -> tuple[Trial, Options]:
        changes, changed = VARIANTS[name]
        trial, options = replace(self.make(), **changes), replace(self.options, **changed)
        steps = trial.steps if options.precision == "fp32" else min(trial.steps, NARROW_STEPS)
        return replace(trial, steps=steps), options

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
                given = {"nprocs": workers, "daemon": True, "start_method": "forkserver"}
                processes.start_processes(_worker, (self, calls, folder), **given)
            except (processes.ProcessRaisedException, processes.ProcessExitedException) as error:
                raised = str(error).strip().splitlines()[-1]
            paths = [(call, Path(folder, str(number))) for number, call in enumerate(calls)]
            return [
                torch.load(path, weights_only=False) if path.exists() else Result(call.row, call.variant, error=raised)
                for call, path in paths
            ]


def _end_with_parent() -> None:
    """One that was killed while it started ranks ends none of them."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    abort(1)


def _worker(rank: int, trials: Trials, calls: list[Call], folder: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    workers, device = calls[0].row.workers, torch.device("cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers)}
    if trials.device_type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        several = any(record.several_devices for record in registry.known_records(calls[0].row.name))
        device = torch.device(
            "cuda", one_process.first_gpu_of_worker(several, rank, workers, torch.cuda.device_count())
        )
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
    abort(0)  # gloo's threads sometimes abort an interpreter that shuts down around them


def _trained(trials: Trials, call: Call, device: torch.device) -> Result:
    began, curve, refused, error = time.monotonic(), None, "", ""
    trial, options = call.row.applied(*trials.variant(call.variant))
    steps = range(trial.steps // 2 if call.load else 0, trial.steps // 2 if call.save else trial.steps)
    if call.order is not None:
        trial = _reordered(trial, call.order)
    if call.by_parameters:
        trial = computed_in(options.precision, trial, float_output=options.float_output)
        options = replace(options, precision="fp32", activation_checkpointing="none")  # no number depends on the latter
    try:
        curve = train(trial, call.row.layout, options, device, steps=steps, load=call.load, save=call.save)
    except LayoutError as refusal:
        refused = str(refusal)
    except Exception:
        if call.row.workers > 1:  # the other ranks may be waiting for this one: end them all
            raise
        error = traceback.format_exc(limit=-1).strip().splitlines()[-1]
    seconds = time.monotonic() - began
    return Result(call.row, call.variant, None, seconds, None, refused, error, curve)


def _reordered(trial: Trial, seed: int) -> Trial:
    def batch(step: int) -> Batch:
        samples = trial.batch(step)
        order = torch.randperm(len(tree_leaves(samples)[0]), generator=torch.Generator().manual_seed(seed))
        return tree_map(lambda tensor: tensor[order], samples)

    return replace(trial, batch=batch)


def computed_in(precision: str, trial: Trial, *, float_output: bool) -> Trial:
    """The trial on one device as sharded rows compute it: parameters in 16 bits, and so the floating-point tensors that
    the model, the units of its sharding and its layers are called with."""

    def lower(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(DTYPES[precision]) if is_float else value

    def narrow(tree: Any) -> Any:
        return tree_map(lower, tree)

    def build() -> nn.Module:
        module = trial.build()
        blocks = find_blocks(module, trial.blocks(module) if callable(trial.blocks) else trial.blocks)
        for unit in map(module.get_submodule, separable(module, blocks)):
            unit.register_forward_pre_hook(lambda _, args, named: (narrow(args), narrow(named)), with_kwargs=True)
        cast_calls(module, precision, float_output)
        return module

    def loss(module: nn.Module, batch: Batch) -> torch.Tensor:
        weights = {f"module.{name}": narrow(parameter) for name, parameter in module.named_parameters()}
        return functional_call(WholeStep(module), weights, (trial.loss, batch))

    return replace(trial, build=build, loss=loss)
