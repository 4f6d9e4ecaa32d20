"""Compares every strategy with one device on one model: equal, refused before it starts, or wrong.

A rival is a strategy with some configuration. It runs as a run does: `app.run.prepare.prepare` in
this process, as in a driver, then the loop's `Training` (parallelize, optimizer, forward, backward
and clipping) for a few steps, in this process or on the warm ranks of tests/pool.py. A rival that
fails after `prepare` has accepted it is as wrong as one with other results.
"""

from __future__ import annotations

import contextlib
import enum
import io
import linecache
import os
import random
import re
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from app.config import Config
from app.config.io import with_values
from app.errors import UserError
from app.run import prepare as preparation
from app.run.first_step import FirstStep, take_first_step
from app.run.prepare import prepare
from app.tasks.base import Task
from experiments.parity.curves import Curve, Difference, bounds, difference
from strategies.layout import LayoutError
from tests.generated.grammar import Model
from tests.pool import DistributedFailure, run_distributed

STEPS = 3
BATCH = 8
MODULE = "generated_model"
COARSE = 3e-3
"""Tolerance where a part of the model has 16 bits."""
MAGNIFIED = 3.0
"""A difference is rounding up to this many times rounding's effect on one device."""
TIMEOUT = 30.0
"""Seconds that ranks may take for all rivals of a model."""
PATIENCE = 4
"""How many times as long a second try may take before it counts as a hang."""
GRACE = 3.0
"""Seconds in which the other ranks must end after one has failed."""


@dataclass(frozen=True)
class Rival:
    """A strategy that is compared with one device.

    Args:
        name: Its name in tables.
        strategy: The strategy's name in the configuration.
        workers: The number of workers; a single one trains in this process.
        values: Further values of the configuration, by dotted key.
        tolerance: The largest relative difference of the loss, in float32.
        splits_batch: Whether results may depend on how a batch is split.
        domains: The domains of models that it is for; empty for all.
    """

    name: str
    strategy: str
    workers: int = 2
    values: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 5e-6
    splits_batch: bool = True
    domains: tuple[str, ...] = ()


def _pipeline(
    schedule: str,
    stages: int = 2,
    strategy: str = "pipeline",
    workers: int = 2,
    **extra_values: Any,
) -> Rival:
    values = {
        "parallel.pp": stages,
        "parallel.schedule": schedule,
        "train.micro_batch_size": 2,
        **extra_values,
    }
    name = f"{strategy} {schedule}"
    return Rival(name, strategy, workers, values)


_MICRO = {"train.micro_batch_size": 2}
_FULL = {"train.activation_checkpointing": "full"}
RIVALS: tuple[Rival, ...] = (
    Rival("ddp", "ddp"),
    Rival("fsdp", "fsdp"),
    Rival("zero1", "zero1"),
    Rival("zero2", "zero2", values=_MICRO),
    Rival("tensor", "tensor", tolerance=2e-5, splits_batch=False),
    _pipeline("1f1b"),
    _pipeline("zbv"),
    _pipeline("gpipe"),
    _pipeline("interleaved_1f1b", **{"parallel.chunks": 2}),
    Rival("context", "context", domains=("tokens",), splits_batch=False),
    Rival("fsdp offload", "fsdp", values={"parallel.offload": True, **_MICRO}),
    Rival("ddp micro", "ddp", values=_MICRO),
    Rival("ddp checkpointing", "ddp", values=_FULL),
    Rival("fsdp checkpointing", "fsdp", values=_FULL),
    Rival("ddp_model_parallel", "ddp_model_parallel"),
    Rival("single micro", "single", 1, _MICRO),
    Rival("single checkpointing", "single", 1, _FULL, splits_batch=False),
    Rival(
        "single selective",
        "single",
        1,
        {"train.activation_checkpointing": "selective"},
        splits_batch=False,
    ),
    Rival("model_parallel", "model_parallel", 1, splits_batch=False),
    Rival("dp", "dp", 1, splits_batch=False),
)
WIDE: tuple[Rival, ...] = (
    Rival("ddp 4", "ddp", 4),
    Rival("fsdp 4", "fsdp", 4),
    Rival("hsdp 4", "hsdp", 4, {"parallel.dp_shard": 2}),
    Rival("ddp+tensor", "ddp+tensor", 4, {"parallel.tp": 2}, tolerance=2e-5),
    Rival("fsdp+tensor", "fsdp+tensor", 4, {"parallel.tp": 2}, tolerance=2e-5),
    _pipeline("1f1b", strategy="ddp+pipeline", workers=4),
    _pipeline("zb_h1", strategy="fsdp+pipeline", workers=4),
    Rival(
        "tensor+pipeline",
        "tensor+pipeline",
        4,
        {"parallel.tp": 2, "parallel.pp": 2, "train.micro_batch_size": 2},
        tolerance=2e-5,
    ),
    Rival("fsdp+context", "fsdp+context", 4, {"parallel.cp": 2}, domains=("tokens",)),
)
"""On four ranks."""
ALWAYS = ("ddp", "fsdp", "tensor", "pipeline 1f1b")
"""Every model meets these; of the others it meets some, drawn."""


class Kind(enum.StrEnum):
    """The result of a comparison."""

    EQUAL = "equal"
    REFUSED = "refused"
    # Other results, as a note says: samples of a batch depend on one another, or calls are counted.
    NOTED = "noted"
    # Trained, with random numbers that depend on how the batch is split.
    RANDOM = "random"
    WRONG = "WRONG"


@dataclass(frozen=True)
class Verdict:
    """The result of one rival; verdicts with the same signature are taken for the same mistake."""

    kind: Kind
    text: str = ""
    signature: str = ""


class Invalid(Exception):
    """A model that one device does not train."""


# --- one training run -----------------------------------------------------------------------------


def _train(rank: int, job: Any, folder: str) -> None:
    """Trains a few steps as a run does; rank 0 writes the results."""
    from app.training.job import Place, SilentChannel
    from app.training.loop import Training
    from app.training.persistence import NullPersistence

    world_size = job.layout.dims.world_size
    place = Place(rank=rank, world_size=world_size, local_rank=rank, device=torch.device("cpu"))
    training = Training(job, place, SilentChannel(), persistence_class=NullPersistence)
    try:
        batches = training.batches()
        try:
            for micro_batches in batches:
                training.step(micro_batches)
        finally:
            batches.close()
        result = training.sync.agree(STEPS, stop=False, save=False)
        weights = training.parallel.full_model_state()
        if rank == 0:
            losses = [entry.loss for entry in result.logged]
            norms = [
                float(entry.grad_norm) for entry in result.logged if entry.grad_norm is not None
            ]
            torch.save((losses, norms, weights, training.parallel.notes), f"{folder}.new")
            os.replace(f"{folder}.new", f"{folder}/{job.attempt}.pt")
    finally:
        training.close()


def _train_all(rank: int, source: str, jobs: Sequence[Any], folder: str, double: bool) -> str:
    """Trains one job after the other up to the first that raises, and returns its error.

    Where all ranks raise, they end in good order and the processes can be used again. A rank that
    waits in vain for the others raises, which ends the processes.
    """
    with _module(source, double):
        for job in jobs:
            failure = ""
            try:
                with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                    warnings.simplefilter("ignore")
                    _train(rank, job, folder)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            mark = Path(folder, f"{job.attempt}.{rank}")
            mark.with_suffix(f".{rank}-new").write_text(failure)
            mark.with_suffix(f".{rank}-new").rename(mark)
            failures = _marks(folder, job, failure)
            if any(failures):
                return next(filter(None, failures))
    return ""


def _marks(folder: str, job: Any, failure: str) -> list[str]:
    """The error of each rank, or "", once all have ended the job."""
    marks = [Path(folder, f"{job.attempt}.{rank}") for rank in range(job.layout.dims.world_size)]
    deadline = time.monotonic() + (GRACE if failure else TIMEOUT)
    while not all(mark.exists() for mark in marks):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{failure or 'nothing wrong here'} (and another rank has not ended)"
            )
        if not failure and any(mark.exists() and mark.read_text() for mark in marks):
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.002)
    return [mark.read_text() for mark in marks]


@contextlib.contextmanager
def _module(source: str, double: bool = False) -> Iterator[types.ModuleType]:
    """Makes the text an importable module as long as the context lasts."""
    module = types.ModuleType(MODULE)
    module.__file__ = f"<{MODULE}>"
    linecache.cache[module.__file__] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        module.__file__,
    )
    before = torch.get_default_dtype()
    sys.modules[MODULE] = module
    try:
        if double:
            torch.set_default_dtype(torch.float64)
        exec(compile(source, module.__file__, "exec"), vars(module))
        yield module
    finally:
        torch.set_default_dtype(before)
        sys.modules.pop(MODULE, None)


# --- compared with one device ---------------------------------------------------------------------


class Comparison:
    """One model on one device, and its rivals.

    Args:
        model: The model.
        double: Whether it trains in float64, to tell rounding from mistakes; else in float32.

    Raises:
        Invalid: The model does not train on one device.
    """

    def __init__(self, model: Model, double: bool = False) -> None:
        self.model = model
        self.double = double
        self.source = model.source()
        if double:
            self.source = self.source.replace("torch.bfloat16", "torch.float64")
            self.source = self.source.replace(".float()", ".double()").replace("cfloat", "cdouble")
        config = dict(model.config())
        self.coarse = bool(config.pop("coarse", False))
        self.changes = config
        self.random = any(feature.random for feature in model.features)
        self.couples = model.couples
        self.counts = any(feature.counts for feature in model.features)
        self._first_steps: dict[tuple[Any, ...], FirstStep] = {}
        outcome = self._prepared(Rival("single", "single", 1))
        if isinstance(outcome, Verdict):
            raise Invalid(outcome.text)
        with tempfile.TemporaryDirectory(prefix="generated-") as folder:
            try:
                curve = self._here(outcome[0], folder)
            except Exception as error:
                raise Invalid(f"{type(error).__name__}: {error}") from error
        self.truth = curve

    def verdicts(self, rivals: Sequence[Rival]) -> dict[str, Verdict]:
        """The verdict on each rival, by its name."""
        verdict_by_rival: dict[str, Verdict] = {}
        jobs_by_rival: dict[str, tuple[Rival, Any, tuple[str, ...]]] = {}
        for rival in rivals:
            if rival.domains and self.model.choice_by_axis["domain"] not in rival.domains:
                continue
            outcome = self._prepared(rival)
            if isinstance(outcome, Verdict):
                verdict_by_rival[rival.name] = outcome
            else:
                jobs_by_rival[rival.name] = (rival, *outcome)
        for name, curve in self._trained(
            {name: (rival.workers, job) for name, (rival, job, _) in jobs_by_rival.items()}
        ):
            rival, _, notes = jobs_by_rival[name]
            if not isinstance(curve, Verdict):
                verdict_by_rival[name] = self._judged(rival, curve, notes)
            elif self._overflows_by_rounding(rival, curve):
                verdict_by_rival[name] = Verdict(Kind.EQUAL, "but for rounding: equal in float64")
            else:
                verdict_by_rival[name] = curve
        return {
            rival.name: verdict_by_rival[rival.name]
            for rival in rivals
            if rival.name in verdict_by_rival
        }

    def _prepared(self, rival: Rival) -> tuple[Any, tuple[str, ...]] | Verdict:
        """The job that workers would get, with the user's notes; or a verdict that refuses it."""
        from app.training.job import Job

        values = {
            "task": f"{MODULE}:Model",
            "strategy": rival.strategy,
            "workers": str(rival.workers),
            "train.steps": STEPS,
            "train.global_batch_size": BATCH,
            "train.log_every": 1,
            "optimizer.lr": 1e-2,
            "optimizer.eps": 1e-5,
            **self.changes,
            **rival.values,
        }
        config = with_values(Config(), values)
        with _module(self.source, self.double) as module:
            try:
                task: Task = module.Model()
                torch.manual_seed(0)
                with (
                    warnings.catch_warnings(),
                    mock.patch.object(preparation, "take_first_step", self._first_step),
                ):
                    warnings.simplefilter("ignore")
                    per_node = rival.workers if rival.workers > 1 else None
                    prepared = prepare(config, task, rival.workers, devices_per_node=per_node)
            except (UserError, LayoutError) as error:
                return Verdict(Kind.REFUSED, str(error))
            except Exception as error:
                text = f"prepare: {type(error).__name__}: {error}"
                return Verdict(Kind.WRONG, text, _signature(text))
        job = Job(
            config=prepared.config,
            layout=prepared.layout,
            folder="/nowhere",
            attempt=_file(rival.name),
            run_uid="",
            steps=STEPS,
            cwd=os.getcwd(),
        )
        return job, prepared.notes

    def _first_step(self, config: Config, task: Task) -> FirstStep:
        """What the first step shows: once for all rivals, but for the keys that it reads."""
        train = config.train
        key = (train.seed, train.activation_checkpointing, train.activation_offloading)
        if key not in self._first_steps:
            self._first_steps[key] = take_first_step(config, task)
        return self._first_steps[key]

    def _here(self, job: Any, folder: str) -> Curve:
        with _module(self.source, self.double), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _train(0, job, folder)
        return _read(folder, job)

    def _trained(self, jobs: dict[str, tuple[int, Any]]) -> Iterator[tuple[str, Curve | Verdict]]:
        """Trains all jobs, those of several ranks together; a job without results has failed."""
        with tempfile.TemporaryDirectory(prefix="generated-") as folder:
            for name, (workers, job) in jobs.items():
                if workers == 1:
                    try:
                        yield name, self._here(job, folder)
                    except Exception as error:
                        text = f"{type(error).__name__}: {error}"
                        yield name, Verdict(Kind.WRONG, text, _signature(text))
            for workers in sorted({workers for workers, _ in jobs.values() if workers > 1}):
                remaining = [
                    (name, job) for name, (needed, job) in jobs.items() if needed == workers
                ]
                timeout = TIMEOUT
                while remaining:
                    try:
                        (failure, *_) = run_distributed(
                            _train_all,
                            workers,
                            self.source,
                            [job for _, job in remaining],
                            folder,
                            self.double,
                            timeout=timeout,
                        )
                    except DistributedFailure as error:
                        if "did not start" in str(error):
                            raise
                        failure = _last_words(str(error))
                        is_slow = "did not end within" in failure and timeout == TIMEOUT
                    else:
                        is_slow = False
                    done = [
                        name
                        for name, job in remaining
                        if Path(folder, f"{job.attempt}.pt").exists()
                    ]
                    for name, job in remaining:
                        if name in done:
                            yield name, _read(folder, job)
                    remaining = [(name, job) for name, job in remaining if name not in done]
                    if remaining and is_slow:
                        # The machine may be busy with other work: try again, and wait longer.
                        timeout = PATIENCE * TIMEOUT
                        for mark in Path(folder).glob(f"{remaining[0][1].attempt}.*"):
                            mark.unlink()
                    elif remaining:
                        yield remaining.pop(0)[0], Verdict(Kind.WRONG, failure, _signature(failure))

    def _judged(self, rival: Rival, curve: Curve, notes: tuple[str, ...]) -> Verdict:
        is_coarse = self.coarse and not self.double
        tolerance = max(rival.tolerance, COARSE) if is_coarse else rival.tolerance
        distance = difference(self.truth, curve)
        if distance.within(tolerance):
            return Verdict(Kind.EQUAL)
        if self.random:
            return Verdict(Kind.RANDOM)
        every_note = (*notes, *curve.notes)

        on_batches = [
            note for note in every_note if "batch" in note.lower() or "sample" in note.lower()
        ]
        on_state = [
            note
            for note in every_note
            if "changes the buffer" in note or "how often it is called" in note
        ]
        if self.couples and rival.splits_batch and on_batches:
            return Verdict(Kind.NOTED, on_batches[0])
        if self.counts and rival.splits_batch and on_state:
            return Verdict(Kind.NOTED, on_state[0])
        if not self.double and self._is_rounding(rival, distance, tolerance):
            return Verdict(Kind.EQUAL, "but for rounding: equal in float64")
        return Verdict(Kind.WRONG, self._told(distance, curve), "other numbers")

    def _is_rounding(self, rival: Rival, distance: Difference, tolerance: float) -> bool:
        """Whether a difference that is not large vanishes when the whole model uses float64.

        In 16 bits some models magnify rounding within three steps beyond any fixed bound. There, a
        difference is not large either if one device in 16 bits differs as much from one in 64.
        """
        is_small = distance.within((30 if self.coarse else 1000) * tolerance)
        if not (is_small or self.coarse):
            return False
        try:
            exact = Comparison(self.model, double=True)
        except Invalid:
            return False
        magnified = difference(exact.truth, self.truth)
        limit = Difference(*(MAGNIFIED * value for value in vars(magnified).values()))
        if not (is_small or distance.within(limit)):
            return False
        # A coupling of samples may be smaller than what 16 bits show, and noted in 64 only.
        return exact.verdicts([rival])[rival.name].kind in (Kind.EQUAL, Kind.NOTED)

    def _overflows_by_rounding(self, rival: Rival, verdict: Verdict) -> bool:
        """Whether numbers become infinite in 16 bits alone, where rounding decides that."""
        if not self.coarse or self.double or not verdict.text.startswith("NonFiniteError"):
            return False
        try:
            exact = Comparison(self.model, double=True)
        except Invalid:
            return False
        return exact.verdicts([rival])[rival.name].kind is Kind.EQUAL

    def _told(self, distance: Difference, curve: Curve) -> str:
        figures = ", ".join(f"{name} {value:.1e}" for name, value in vars(distance).items())
        losses = [
            f"{loss:.5f} for {expected_loss:.5f}"
            for loss, expected_loss in zip(curve.losses, self.truth.losses)
        ]
        missing = sorted(self.truth.weights.keys() ^ curve.weights.keys())
        names = f"; names differ: {', '.join(missing[:4])}" if missing else ""
        return f"apart by {figures}; losses {', '.join(losses)}{names}"


def _file(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def _read(folder: str, job: Any) -> Curve:
    losses, norms, weights, notes = torch.load(
        Path(folder, f"{job.attempt}.pt"), weights_only=False
    )
    return Curve(losses, norms, weights, notes)


def _last_words(text: str) -> str:
    """The lines of the exception of the first rank that raised."""
    parts = text.split("--- rank ")[1:] or [text]
    lines = [line for line in parts[0].splitlines() if line.strip()]
    raised = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)]
    start = max(raised, default=-1)
    return " ".join(lines[start:] if start >= 0 else lines[-2:])


def _signature(text: str) -> str:
    """The text without parts that differ between models, such as numbers and names."""
    return re.sub(r"0x[0-9a-f]+|[\d.]+|'[^']*'|\"[^\"]*\"|\[[^\]]*\]", "…", text)[:110]


# --- many models ----------------------------------------------------------------------------------


def drawn(seed: int, rivals: Sequence[Rival] = RIVALS, extra: int = 4) -> list[Rival]:
    """The rivals of the model of this seed: some that all models have, and others by chance."""
    generator = random.Random(~seed)
    optional = [rival for rival in rivals if rival.name not in ALWAYS]
    chosen = {rival.name for rival in generator.sample(optional, min(extra, len(optional)))}
    return [rival for rival in rivals if rival.name in ALWAYS or rival.name in chosen]


def shrunk(model: Model, rival: Rival, signature: str) -> tuple[Model, Verdict]:
    """The model with the fewest unusual choices that fails in the same way, and its verdict."""
    smallest = model, Verdict(Kind.WRONG, "", signature)
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in smallest[0].smaller():
            try:
                verdict = Comparison(smaller).verdicts([rival]).get(rival.name)
            except Invalid:
                continue
            is_wrong = verdict is not None and verdict.kind is Kind.WRONG
            if is_wrong and verdict.signature == signature:
                smallest = (smaller, verdict)
                is_smaller = True
                break
    return smallest


__all__ = [
    "RIVALS",
    "WIDE",
    "Comparison",
    "Invalid",
    "Kind",
    "Rival",
    "Verdict",
    "bounds",
    "drawn",
    "shrunk",
]
