"""The results of evaluating committed checkpoints, where that happens beside training.

    <checkpoints>/evaluations.json    an entry for each evaluated step, in the order of steps

A marker never changes, so a result that comes after the commit is kept in this file. The meta of a
checkpoint that waits for its evaluation has a plan: in which batches the held-out data is read, so
that the numbers do not depend on the layout that trains later, nor on the worker that evaluates.

The run's driver alone writes the file, as a whole. The first rank reads it to decide which
checkpoints are removed, and whether training ends early.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from app.checkpoint.commit import Commit
from app.errors import UserError
from app.storage.storage import Storage

FILE = "evaluations.json"
PLAN = "evaluation"
"""The key of the plan in a commit's meta."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the held-out data is read in an evaluation of a checkpoint.

    Args:
        batch_size: Samples of a batch.
        shares: In how many shares the data is read, one after another: as many as there were
            data-parallel workers, each of which would have read one.
    """

    batch_size: int
    shares: int

    def to_meta(self) -> dict[str, Any]:
        """What a commit's meta has under `PLAN`."""
        return asdict(self)

    @classmethod
    def of(cls, commit: Commit) -> Plan:
        """The plan of a checkpoint that has one."""
        return cls(**commit.meta[PLAN])


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of one evaluation.

    Args:
        step: Of the checkpoint.
        time: When the result came, in Unix seconds.
        metrics: By name.
        stops: Whether the task's `stop_early` has said then that training is to end.
    """

    step: int
    time: float
    metrics: dict[str, float]
    stops: bool = False


@dataclass(frozen=True)
class Evaluations:
    """All results of a run so far.

    Args:
        results: In the order of steps.
        ended: Whether training is to end early, by these.
    """

    results: tuple[Evaluation, ...] = field(default_factory=tuple)
    ended: bool = False

    @property
    def steps(self) -> set[int]:
        """The steps that were evaluated."""
        return {result.step for result in self.results}

    def with_result(self, result: Evaluation) -> Evaluations:
        """These and one more; a step that has a result already keeps it."""
        if result.step in self.steps:
            return self
        results = sorted((*self.results, result), key=lambda each: each.step)
        return Evaluations(tuple(results), self.ended)

    def values(self, metric: str) -> dict[int, float | None]:
        """One metric by step; None where an evaluation has not given it."""
        return {result.step: result.metrics.get(metric) for result in self.results}


def read(folder: str | Storage) -> Evaluations:
    """The results in a folder of checkpoints; none if there is no file.

    Raises:
        UserError: The file is damaged.
    """
    storage = folder if isinstance(folder, Storage) else Storage(folder)
    try:
        values = json.loads(storage.read_bytes(FILE))
        results = tuple(Evaluation(**entry) for entry in values["results"])
        return Evaluations(results, bool(values["ended"]))
    except FileNotFoundError:
        return Evaluations()
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{storage.join(FILE)} is damaged ({error}): remove it, and the checkpoints that are "
            "still there are evaluated again"
        ) from error


def write(folder: str | Storage, evaluations: Evaluations) -> None:
    """Replace the results in a folder of checkpoints."""
    storage = folder if isinstance(folder, Storage) else Storage(folder)
    values = {
        "results": [asdict(result) for result in evaluations.results],
        "ended": evaluations.ended,
    }
    storage.write_bytes(FILE, json.dumps(values).encode())


def waiting(commits: Iterable[Commit], evaluations: Evaluations) -> list[Commit]:
    """The checkpoints whose evaluation is still to come, in the order of steps.

    Of several of one step, as after a damaged checkpoint was skipped, it is the newest.

    Args:
        commits: In any order.
        evaluations: The results so far.
    """
    by_step: dict[int, Commit] = {}
    for commit in sorted(commits, key=lambda commit: commit.sequence):
        if PLAN in commit.meta and commit.step not in evaluations.steps:
            by_step[commit.step] = commit
    return [by_step[step] for step in sorted(by_step)]


def all_metrics(
    before: Sequence[Mapping[str, float]], evaluations: Evaluations
) -> list[Mapping[str, float]]:
    """The metrics of every evaluation of a run, the newest last.

    Args:
        before: Of evaluations that came before all of these: by training itself, or of the run
            that a fork continues.
        evaluations: The results.
    """
    return [*before, *(result.metrics for result in evaluations.results)]
