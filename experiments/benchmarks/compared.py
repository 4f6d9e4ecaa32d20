"""A published run beside what the plain `trireme plan` command says of its model and layout.

What is read of a model takes seconds, so that it is kept in Trireme's cache, under a name that
changes with the code that reads and with the versions of torch and transformers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.config.io import load_config
from app.data.files import cached
from app.planner.assumptions import apply_assumptions
from app.planner.device import Device
from app.planner.estimate import Estimate
from app.planner.machine import MachineOptions, find_machine
from app.planner.plan import GIB, Plan
from app.planner.ranges import Traits
from app.planner.read import CAST, Reader
from app.planner.stand_in import plan_experiment
from app.run.endings import USER_ERRORS
from experiments.benchmarks.published_runs import Run


@dataclass(frozen=True)
class Compared:
    """A run, and what the plan says of it.

    Attributes:
        run: The run.
        plan: The plan, of the strategy that the run had if there is one, or of the fastest with the
            same degrees; None if the command refuses to make one.
        refusal: Why it does.
        context: Bytes that the plan takes a process and its libraries to have on the card.
    """

    run: Run
    plan: Estimate | None
    refusal: str = ""
    context: float = 0.0

    @property
    def has_speed(self) -> bool:
        """Whether there are two speeds to compare."""
        return self.plan is not None and bool(self.run.step_seconds)

    @property
    def error(self) -> float:
        """The relative error of tokens/s: 0.1 is a tenth too fast."""
        assert self.plan is not None
        return self.run.step_seconds / self.plan.step_seconds - 1

    @property
    def is_inside(self) -> bool:
        """Whether the published speed is inside the range that the plan shows."""
        assert self.plan is not None
        low, high = self.plan.speed_range
        return low <= 1 / (1 + self.error) <= high

    @property
    def memory_gib(self) -> float:
        """What the plan says of the peak that the run's source has published, GiB."""
        assert self.plan is not None
        planned = self.plan.memory_bytes
        if self.run.peak == "allocated":
            planned = self.plan.allocated_bytes
        elif self.run.peak == "card":
            planned += self.context
        return planned / GIB

    @property
    def memory_error(self) -> float:
        """The relative error of the memory, for a run that tells it."""
        return self.memory_gib / self.run.memory_gib - 1


_READERS: dict[str, Reader] = {}
"""The readers of models, for all runs that differ in their layout alone."""
ROOT = Path(__file__).parents[2]
READING = (
    "app/models/*.py",
    "app/tasks/**/*.py",
    "strategies/**/*.py",
    "app/planner/flex.py",
    "app/planner/fused.py",
    "app/planner/fusion.py",
    "app/planner/fitting.py",
    "app/planner/model_costs.py",
    "app/planner/part_trace.py",
    "app/planner/read.py",
    "app/planner/recorder.py",
    "app/planner/saved_storages.py",
    "app/planner/skeleton.py",
    "app/planner/storages.py",
    "app/planner/trace.py",
    "app/planner/traced_blocks.py",
)
"""The files that decide what is read of a model."""


@dataclass(frozen=True)
class Prepared:
    """A run's plan, which can be made again with other constants.

    Attributes:
        run: The run.
        plan: The plan; None if the command refuses to make one.
        refusal: Why it does.
    """

    run: Run
    plan: Plan | None
    refusal: str = ""

    @property
    def traits(self) -> Traits:
        """What the error of its plan depends on."""
        assert self.plan is not None
        return self.plan.estimator.traits(self.plan.rows[0].candidate)

    def compare(
        self,
        change: Callable[[Device], Device] | None = None,
        *,
        described: bool = False,
    ) -> Compared:
        """The run beside its plan.

        Args:
            change: Returns the device with other constants.
            described: Whether the command has the --assume options with which a user of the run's
                trainer would describe it.
        """
        if self.plan is None:
            return Compared(self.run, None, self.refusal)
        estimator = self.plan.estimator
        device = estimator.machine.device
        if change is not None:
            device = change(device)
        if described:
            device = apply_assumptions(device, self.run.assumptions)
        # The stages of a pipeline hardly depend on the constants, and take time to find.
        has_equal_stages = described and self.run.has_equal_stages
        of_stages = {
            stages: estimator.changed(
                device,
                _equal(stages) if has_equal_stages else stages,
                watched_stage=0 if described and self.run.logs_rank_0 else None,
            )
            for stages in {row.stages for row in self.plan.rows}
        }
        estimates = [of_stages[row.stages].estimate(row.candidate) for row in self.plan.rows]

        # The command plans every strategy with the run's degrees; a single worker has none.
        of_run = [row for row in estimates if row.candidate.strategy.name == self.run.data]
        fastest = min(of_run or estimates, key=lambda row: (not row.fits, row.step_seconds))
        context = device.context
        if described:
            context = dict(self.run.described).get("context_gib", context / GIB) * GIB
        return Compared(self.run, fastest, context=context)


def _equal(stages: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """As many blocks in each chunk of a pipeline, if they can be divided so."""
    if stages is None or sum(stages) % len(stages):
        return stages
    return (sum(stages) // len(stages),) * len(stages)


def prepare(run: Run) -> Prepared:
    """The plan of the run's command; runs of one model share what was read of it."""
    words, options = run.command()
    if not run.sequence:
        return Prepared(run, None, "the sequence's length was not published")
    keys = frozenset(word.partition("=")[0] for word in words)
    try:
        config = load_config([], words)
        machine = find_machine(MachineOptions(**options), config.workers)
        key = _reading_of(run, is_on_cpu=machine.device.is_cpu)
        if key not in _READERS:
            _READERS[key] = _kept_reader(
                key, lambda: _read(run, plan_experiment(config, machine, keys))
            )
        plan = plan_experiment(config, machine, keys, reader=_READERS[key])
    except USER_ERRORS as error:
        return Prepared(run, None, str(error))
    return Prepared(run, plan)


def _reading_of(run: Run, *, is_on_cpu: bool) -> str:
    """What decides what is read of a run's model, as JSON."""
    is_sharded = run.data not in ("", "ddp") and run.gpus > run.tp * run.pp * run.cp
    has_pipeline = run.pp > 1
    settings = [
        *(run.task, run.task_args, is_on_cpu, run.precision == "fp32"),
        *(run.sequence_parallel, run.tp > 1, is_sharded, has_pipeline),
    ]
    if run.keys:
        settings.append(run.keys)
    if dict(run.described).get("shared_copies"):
        settings.append("shared_copies")
    return json.dumps(settings)


def _read(run: Run, plan: Plan) -> Reader:
    """The reader of a run's model, which has read what the run's described trainer computes too."""
    if dict(run.described).get("shared_copies"):
        plan.reader.costs(CAST, whole_model=run.tp * run.pp == 1)
    return plan.reader


def _kept_reader(key: str, read: Callable[[], Reader]) -> Reader:
    """The reader of a model, from the cache if it was read before.

    Args:
        key: What decides what is read.
        read: Reads the model.
    """

    def make(path: Path) -> None:
        path.write_bytes(pickle.dumps(read()))

    digest = hashlib.sha256((key + _versions()).encode()).hexdigest()[:16]
    reader: Reader = pickle.loads(cached(f"read-{digest}.pickle", make).read_bytes())
    return reader


@functools.cache
def _versions() -> str:
    """A digest of the code that reads models, and the versions of its libraries."""
    digest = hashlib.sha256()
    for pattern in READING:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    libraries = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    return " ".join([digest.hexdigest(), *libraries])
