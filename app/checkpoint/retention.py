"""Which checkpoints of a run are kept, and removing the others."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from app.checkpoint import evaluations
from app.checkpoint.commit import Commit, Mode, remove, superfluous
from app.checkpoint.forks import needed_by_forks
from app.checkpoint.ranks import describe
from app.storage.storage import Storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept.

    Args:
        keep_last: How many of the newest checkpoints.
        keep_best: Whether the one with the best metric.
        mode: Whether a large or a small metric is good.
        metric: Its name among the results of evaluations beside training (evaluations.py).
        keeps_waiting: Whether those that wait for such an evaluation.
    """

    keep_last: int = 2
    keep_best: bool = True
    mode: Mode = "min"
    metric: str = "loss"
    keeps_waiting: bool = False

    def outdated(self, commits: list[Commit], results: evaluations.Evaluations) -> list[Commit]:
        """The commits to remove, the oldest first.

        Args:
            commits: The newest first.
            results: Those of evaluations beside training.
        """
        values = {
            step: value if value is not None and math.isfinite(value) else None
            for step, value in results.values(self.metric).items()
        }
        waiting = evaluations.waiting(commits, results) if self.keeps_waiting else []
        return superfluous(
            commits,
            keep_last=self.keep_last,
            keep_best=self.keep_best,
            mode=self.mode,
            late_metrics=values,
            needed=[commit.path for commit in waiting],
        )


def prune(storage: Storage, commits: Sequence[Commit], retention: Retention) -> None:
    """Remove the checkpoints that are no longer kept, nor needed by a fork.

    Args:
        storage: The folder of checkpoints.
        commits: All of them, the newest first.
        retention: What is kept.
    """
    try:
        outdated = retention.outdated(list(commits), evaluations.read(storage))
        needed_names = needed_by_forks(storage) if outdated else set()
    except Exception as error:  # each object store library has its own exceptions
        _log.warning("no old checkpoint is removed (%s)", describe(error))
        return
    for commit in outdated:
        if commit.path.rpartition("/")[2] in needed_names:
            continue
        try:
            remove(commit.storage)
        except Exception as error:  # each object store library has its own exceptions
            _log.warning(
                "the old checkpoint %s could not be removed (%s)", commit.path, describe(error)
            )
