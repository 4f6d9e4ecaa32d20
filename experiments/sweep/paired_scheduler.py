"""`scheduler: paired` for Ray Tune: stops trials that are shown to be worse; see paired.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from experiments.sweep.paired import Branch, Comparisons, better_branch
from experiments.sweep.trials import RATE

if TYPE_CHECKING:
    from ray.tune.experiment import Trial


class PairedScheduler(FIFOScheduler):
    """Compares each report of a trial with the trials of the same batch size and seed.

    https://docs.ray.io/en/latest/tune/api/schedulers.html

    Args:
        comparisons: What the sweep can compare.
    """

    def __init__(self, comparisons: Comparisons) -> None:
        super().__init__()
        self.comparisons = comparisons
        self._groups: dict[str, dict[str, Branch]] = {}
        """Trials by name, by all of their values but the learning rate."""

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Whether a trial goes on after a report."""
        report = result["report"]
        if not report:
            return TrialScheduler.CONTINUE
        others = {key: value for key, value in trial.config.items() if key != RATE}
        group = self._groups.setdefault(str(sorted(others.items())), {})
        branch = group.setdefault(
            str(trial), Branch(rate=float(trial.config[RATE]), last_step=report["steps"])
        )
        branch.losses |= {int(step): loss for step, loss in report.get("losses", ())}
        if report["step"] >= report["steps"]:
            return TrialScheduler.CONTINUE
        rivals = [other for name, other in group.items() if name != str(trial)]
        if better_branch(branch, rivals, self.comparisons) is None:
            return TrialScheduler.CONTINUE
        return TrialScheduler.STOP
