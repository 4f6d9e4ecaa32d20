"""The parity matrix on this machine: every row is compared with one device.

With checkpoints, every row also continues the checkpoint of every row.

All rows run on GPUs, or all on the CPU. Each row has processes of its own, forked from one that has
imported torch. A row that its layout refuses has that sentence as its result; one that raises
anything else has failed, and the matrix continues with the next one.

In float32 the bound is `Row.tolerance`. In 16 bits one device differs from itself when the samples
of its batches are in another order, because it then rounds at other places. A row is one more
sample of that noise: it may differ by `MARGIN` times the most that one device did in `ORDERS`, or
by the rounding of one number. The differences grow from step to step until two trainings have
nothing in common, so that only the first `LOW_PRECISION_STEPS` are compared. Sharded rows compute
everything in 16 bits, which is noisier (strategies/precision.py): they are compared with one device
that does the same.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, astuple, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from app.data import loader
from app.errors import RunFailed
from app.planner.processes import run_to_the_end
from app.run.abort import abort
from app.tasks.base import Update
from experiments.parity.curves import (
    Batch,
    Curve,
    Difference,
    Trial,
    bounds,
    difference,
    take_samples,
    train,
)
from experiments.parity.rows import ROWS, SINGLE, Row
from strategies import one_process, registry
from strategies.blocks import find_blocks, separable
from strategies.layout import LayoutError
from strategies.parallel import Loss, WholeStep
from strategies.parallelize import Options
from strategies.precision import DTYPES, cast_calls
from strategies.tree import tree_map

MakeTrial = Callable[[], Trial]

EVERYTHING = "accumulated, clipped, recomputed"
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    EVERYTHING: ({"micro_batches": 2, "clip": 0.5}, {"activation_checkpointing": "full"}),
    "bf16": ({"micro_batches": 2, "clip": 0.5}, {"precision": "bf16"}),
}
"""By name, the changes to the trial and those to the options."""

LOW_PRECISION_STEPS = 8
"""Steps that are compared in 16 bits."""
ORDERS = range(12)
"""Seeds of the other orders of a batch's samples."""
MARGIN = 2.0
"""The largest of 12 such differences is exceeded by one in 13."""

PEER_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class RowRun:
    """One training of a row.

    Attributes:
        row: The row.
        variant: A name of `VARIANTS`.
        order: The seed of another order of each batch's samples; None for the trial's own order.
        all_low_precision: Whether one device computes everything in 16 bits, as sharded rows do.
        load: The folder of a checkpoint: only the second half of the steps is trained, from it.
        save: The folder for a checkpoint: only the first half of the steps is trained, up to it.
    """

    row: Row
    variant: str
    _: KW_ONLY
    order: int | None = None
    all_low_precision: bool = False
    load: str = ""
    save: str = ""


@dataclass(frozen=True)
class Result:
    """What became of a training, and how far it is from one device's.

    Attributes:
        row: The row.
        variant: A name of `VARIANTS`.
        difference: How far it is from one device; None if it has no curve.
        seconds: How long it took.
        after: The row whose checkpoint was continued; None if none was.
        refused: Why the layout cannot train this; "" if it can.
        error: What else was raised.
        curve: Its curve, if it has one.
        limit: What may differ, if it is not the row's own tolerance.
    """

    row: Row
    variant: str
    _: KW_ONLY
    difference: Difference | None = None
    seconds: float = 0.0
    after: Row | None = None
    refused: str = ""
    error: str = ""
    curve: Curve | None = None
    limit: Difference | None = None

    @property
    def bound(self) -> Difference:
        """What may differ."""
        return self.limit or bounds(self.row.tolerance)

    @property
    def passed(self) -> bool:
        return self.difference is not None and self.difference.within(self.bound)

    @property
    def verdict(self) -> str:
        """ok, REFUSED, FAILED or DIFFERS."""
        if self.difference is None:
            return "REFUSED" if self.refused else "FAILED"
        return "ok" if self.passed else "DIFFERS"


@dataclass(frozen=True)
class Progress:
    """Hears how far the matrix is.

    Attributes:
        begins: Called with what is trained next, such as "fsdp (dp_shard 2), row 3 of 34".
        ends: Called with that, and what became of it.
    """

    begins: Callable[[str], object] = lambda text: None
    ends: Callable[[str], object] = lambda text: None


def run_matrix(
    make_trial: MakeTrial,
    rows: Iterable[Row] = ROWS,
    *,
    options: Options | None = None,
    variants: Iterable[str] | None = None,
    checkpoints: bool = False,
    progress: Progress | None = None,
) -> list[Result]:
    """Trains every row in every variant, and compares it with one device.

    Args:
        make_trial: Makes what is trained. It is called in the workers, and so must be a function at
            the top level of a module, or a partial of one.
        rows: The rows.
        options: How all layouts behave.
        variants: Names of `VARIANTS`; None for all, without bf16 if the options have a precision of
            16 bits already.
        checkpoints: Whether every row also continues the checkpoint of every row, and of one
            device.
        progress: Hears how far it is; None: nobody does.

    Raises:
        LayoutError: One device cannot train this, so that there is nothing to compare with.
        RuntimeError: Likewise, for another reason.
    """
    rows = list(rows)
    options = options or Options()
    if variants is None:
        has_float32 = options.precision == "fp32"
        variants = [name for name in VARIANTS if name != "bf16" or has_float32]
    variants = list(variants)
    most_workers = max((row.workers for row in rows), default=1)
    has_gpus = torch.cuda.device_count() >= most_workers
    progress = progress or Progress()
    runner = Runner(make_trial, options, device_type="cuda" if has_gpus else "cpu")
    needed_variants = [*variants, EVERYTHING] if checkpoints else variants
    reference = Reference(runner, dict.fromkeys(needed_variants), progress)
    runs = [RowRun(row, variant) for row in rows for variant in variants]
    results = []
    unsaved = []
    saved_by = {}
    second_halves = []
    with tempfile.TemporaryDirectory(prefix="trireme-parity-") as folder:
        if checkpoints:
            # The first halves run beside the other trainings of their row, in the same processes.
            for number, row in enumerate([SINGLE, *rows]):
                runs.append(RowRun(row, EVERYTHING, save=f"{folder}/{number}"))
        for heading, ended in runner.run(runs, progress):
            of_row = []
            for run, result in ended:
                if not run.save:
                    of_row.append(reference.compare(run, result))
                elif result.curve is None:
                    unsaved.append(replace(result, after=run.row))
                else:
                    saved_by[run.save] = run.row
            progress.ends(f"{heading}: {_outcome(of_row)}")
            results += of_row
        for row in saved_by.values():
            second_halves += [RowRun(row, EVERYTHING, load=path) for path in saved_by]
        results += unsaved
        for heading, ended in runner.run(second_halves, progress):
            of_row = []
            for run, result in ended:
                compared = reference.compare(run, result)
                of_row.append(replace(compared, after=saved_by[run.load]))
            progress.ends(f"{heading} after {len(of_row)} others: {_outcome(of_row)}")
            results += of_row
    return results


def _outcome(results: Sequence[Result]) -> str:
    """What became of a row's trainings, in a word, and how long they took."""
    verdicts = [result.verdict for result in results]
    seconds = sum(result.seconds for result in results)
    for verdict in ("FAILED", "DIFFERS", "REFUSED", "ok"):
        if verdict in verdicts:
            return f"{verdict} ({seconds:.0f} s)"
    return "trained"  # up to a checkpoint only


class Reference:
    """The curves of one device with which rows are compared.

    In 16 bits there are several, which show by how much one device differs from itself.

    Args:
        runner: Trains one device.
        variants: Names of `VARIANTS`.
        progress: Hears when one device is trained.

    Raises:
        LayoutError: One device cannot train this.
        RuntimeError: Likewise, for another reason.
    """

    def __init__(self, runner: Runner, variants: Iterable[str], progress: Progress) -> None:
        self.precision = {name: runner.variant(name)[1].precision for name in variants}
        self.curves: list[tuple[RowRun, Curve]] = []
        # Why one device does not train a variant in 16 bits.
        self.failures: dict[str, str] = {}
        (_, ended), *_ = runner.run(self._runs(), progress)  # of one row
        for run, result in ended:
            if result.refused:
                raise LayoutError(result.refused)
            if result.curve is not None:
                self.curves.append((run, result.curve))
            elif self._is_low_precision(run.variant):
                problem = "one device does not train this in 16 bits"
                self.failures[run.variant] = f"{problem}: {result.error}"
            else:
                raise RuntimeError(f"one device does not train this: {result.error}")

    def _is_low_precision(self, variant: str) -> bool:
        return self.precision[variant] != "fp32"

    def _runs(self) -> list[RowRun]:
        """The trainings of one device; of each kind, the first has the trial's own order."""
        runs = [RowRun(SINGLE, variant) for variant in self.precision]
        for variant in self.precision:
            if self._is_low_precision(variant):
                runs.append(RowRun(SINGLE, variant, all_low_precision=True))
        reordered = []
        for run in runs:
            if self._is_low_precision(run.variant):
                reordered += [replace(run, order=order) for order in ORDERS]
        return runs + reordered

    def compare(self, run: RowRun, result: Result) -> Result:
        """The result with its difference from one device, and the limit of that."""
        if result.curve is None:
            return result
        if run.variant in self.failures:
            return replace(result, error=self.failures[run.variant])
        dims = run.row.layout.dims
        precision = self.precision[run.variant]
        is_sharded = dims.dp_shard > 1 and dims.pp == 1
        all_low_precision = is_sharded and self._is_low_precision(run.variant)
        reference, *reordered = [
            curve
            for reference_run, curve in self.curves
            if reference_run.variant == run.variant
            and reference_run.all_low_precision == all_low_precision
        ]
        steps = len(result.curve.losses)  # after a checkpoint these are the last steps
        last_steps = replace(
            reference, losses=reference.losses[-steps:], norms=reference.norms[-steps:]
        )
        limit = _limit(precision, reference, reordered) if reordered else None
        return replace(result, difference=difference(last_steps, result.curve), limit=limit)


def drift(reference: Curve, reordered: Sequence[Curve]) -> Difference:
    """How far a row may be from one device in 16 bits.

    Args:
        reference: The curve of one device.
        reordered: Its curves with the samples of each batch in other orders.
    """
    differences = [difference(reference, curve) for curve in reordered]
    return Difference(
        loss=MARGIN * max(each.loss for each in differences),
        norm=MARGIN * max(each.norm for each in differences),
        weights=MARGIN * max(each.weights for each in differences),
    )


def _limit(precision: str, reference: Curve, reordered: Sequence[Curve]) -> Difference:
    """The drift of one device, but at least the rounding of one number."""
    rounding = bounds(torch.finfo(DTYPES[precision]).eps / 2)
    return Difference(*map(max, astuple(rounding), astuple(drift(reference, reordered))))


# --- in processes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runner:
    """Trains rows in processes of their own.

    Attributes:
        make_trial: Makes what is trained.
        options: How layouts behave, before a variant changes them.
        device_type: The device of all rows: "cuda" or "cpu".
    """

    make_trial: MakeTrial
    options: Options
    device_type: str

    def variant(self, name: str) -> tuple[Trial, Options]:
        """The trial and the options of a variant."""
        trial_changes, option_changes = VARIANTS[name]
        trial = replace(self.make_trial(), **trial_changes)
        options = replace(self.options, **option_changes)
        if options.precision != "fp32":
            trial = replace(trial, steps=min(trial.steps, LOW_PRECISION_STEPS))
        return trial, options

    def run(
        self, runs: Sequence[RowRun], progress: Progress
    ) -> Iterator[tuple[str, list[tuple[RowRun, Result]]]]:
        """Trains; the runs of each row share processes.

        Once a run of a row raises an error, the later ones of that row fail too.

        Args:
            runs: What is trained.
            progress: Hears when a row begins.

        Yields:
            (the row and its number in words, what became of its runs) when a row has ended
        """
        multiprocessing.set_forkserver_preload(["experiments.parity.matrix"])
        runs_of_rows: dict[str, list[RowRun]] = {}
        for run in runs:
            runs_of_rows.setdefault(str(run.row), []).append(run)
        for number, (row, runs_of_row) in enumerate(runs_of_rows.items(), start=1):
            place = f", row {number} of {len(runs_of_rows)}" if len(runs_of_rows) > 1 else ""
            heading = f"{row}{place}"
            progress.begins(heading)
            yield heading, list(zip(runs_of_row, self._run_row(runs_of_row)))

    def _run_row(self, runs: Sequence[RowRun]) -> list[Result]:
        """The results of the runs of one row."""
        error = "its processes ended"
        with tempfile.TemporaryDirectory(prefix="trireme-parity-") as folder:
            try:
                run_to_the_end(
                    _worker,
                    runs[0].row.workers,
                    self,
                    runs,
                    folder,
                    start_method="forkserver",
                )
            except RunFailed as failure:
                error = str(failure)
            results = []
            for number, run in enumerate(runs):
                file = Path(folder, str(number))
                if file.exists():
                    results.append(torch.load(file, weights_only=False))
                else:
                    results.append(Result(run.row, run.variant, error=error))
        return results


def error_line(trace: str) -> str:
    """The line of a traceback that says what was raised, of which the message may have more."""
    lines = trace.strip().splitlines()
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return [*lines, *raised][-1]


def _end_with_parent() -> None:
    """Ends this rank when the process that started it has ended.

    torch.multiprocessing ends no ranks if it is killed while it starts them.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    abort(1)


def _worker(rank: int, runner: Runner, runs: Sequence[RowRun], folder: str) -> None:
    """One rank of a row: trains, and on rank 0 writes each result into the folder."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    row = runs[0].row
    device = _set_up_rank(rank, row, device_type=runner.device_type)
    if row.workers > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if runner.device_type == "cuda" else "gloo",
            store=dist.FileStore(f"{folder}/store", row.workers),
            rank=rank,
            world_size=row.workers,
            timeout=PEER_TIMEOUT,
        )
    for number, run in enumerate(runs):
        result = train_row(runner, run, device)
        if row.workers > 1:
            dist.barrier()  # a result counts only if every rank has come through
        if rank == 0:
            part = Path(folder, "part")
            torch.save(result, part)
            part.replace(Path(folder, str(number)))
    if row.workers > 1:
        dist.barrier()
    abort(0)  # gloo's threads sometimes crash an interpreter that shuts down around them


def _set_up_rank(rank: int, row: Row, *, device_type: str) -> torch.device:
    """Sets the environment and the threads of a rank.

    Returns:
        Its device.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // row.workers))
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(row.workers)
    if device_type == "cpu":
        return torch.device("cpu")
    torch.backends.cudnn.allow_tf32 = False
    records = registry.known_records(row.name)
    has_several_devices = any(record.several_devices for record in records)
    index = one_process.first_gpu_of_worker(
        has_several_devices, rank, row.workers, torch.cuda.device_count()
    )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def train_row(runner: Runner, run: RowRun, device: torch.device) -> Result:
    """Trains one run of a row in this process; a collective of its ranks.

    Returns:
        The result, without its difference from one device.

    Raises:
        Exception: Whatever was raised on several workers, so that the ranks that may wait for this
            one are ended too.
    """
    started = time.monotonic()
    trial, options = run.row.adapt(*runner.variant(run.variant))
    first_step = trial.steps // 2 if run.load else 0
    end_step = trial.steps // 2 if run.save else trial.steps
    if run.order is not None:
        trial = reordered(trial, run.order)
    if run.all_low_precision:
        trial = computed_in(options.precision, trial, float_output=options.float_output)
        # Recomputation changes no number.
        options = replace(options, precision="fp32", activation_checkpointing="none")
    curve = None
    refused = ""
    error = ""
    try:
        curve = train(
            trial,
            run.row.layout,
            options,
            device,
            steps=range(first_step, end_step),
            load=run.load,
            save=run.save,
        )
    except LayoutError as refusal:
        refused = str(refusal)
    except Exception:
        if run.row.workers > 1:
            raise
        error = error_line(traceback.format_exc(limit=-1))
    return Result(
        run.row,
        run.variant,
        seconds=time.monotonic() - started,
        refused=refused,
        error=error,
        curve=curve,
    )


def reordered(trial: Trial, seed: int) -> Trial:
    """The trial with the samples of each batch in another order."""

    def batch(step: int) -> Batch:
        samples = trial.batch(step)
        generator = torch.Generator().manual_seed(seed)
        return take_samples(samples, torch.randperm(loader.rows(samples), generator=generator))

    return replace(trial, batch=batch)


def computed_in(precision: str, trial: Trial, *, float_output: bool) -> Trial:
    """The trial on one device, computed as sharded rows compute it.

    Parameters are in 16 bits, and so are the floating-point tensors that the model, the units of
    its sharding and its layers are called with.

    Args:
        precision: "bf16" or "fp16".
        trial: The trial.
        float_output: Whether the model's output is cast to float32 again.
    """

    def lower(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to(DTYPES[precision])
        return leaf

    def lower_all(tree: Any) -> Any:
        return tree_map(lower, tree)

    def lower_arguments(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return lower_all(args), lower_all(kwargs)

    def build() -> nn.Module:
        module = trial.build()
        names = trial.blocks(module) if callable(trial.blocks) else trial.blocks
        blocks = find_blocks(module, names)
        for name in separable(module, blocks):
            unit = module.get_submodule(name)
            unit.register_forward_pre_hook(lower_arguments, with_kwargs=True)
        cast_calls(module, precision, float_output)
        return module

    def lowered(loss: Loss, module: nn.Module, batch: Batch) -> torch.Tensor:
        parameters = {}
        for name, parameter in module.named_parameters():
            parameters[f"module.{name}"] = lower_all(parameter)
        return functional_call(WholeStep(module), parameters, (loss, batch))

    @cache  # a loss is the same function in every step
    def lowered_loss(loss: Loss) -> Loss:
        return partial(lowered, loss)

    def training_step(update: Update) -> None:
        assert trial.training_step is not None
        trial.training_step(lambda loss, optimizer="": update(lowered_loss(loss), optimizer))

    return replace(
        trial,
        build=build,
        loss=lowered_loss(trial.loss),
        training_step=None if trial.training_step is None else training_step,
    )
