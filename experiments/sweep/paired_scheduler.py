"""`scheduler: paired` for Ray Tune: stops trials that are shown to be worse; see paired.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from experiments.sweep.paired import Branch, Comparisons, better_branch
from experiments.sweep.trials import RATE, SEED

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
        self._stopped: set[str] = set()
        """Settings, which are values without the seed, with a trial that was stopped."""

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Whether a trial goes on after a report.

        Args:
            tune_controller: Tune's.
            trial: Tune's trial.
            result: What the trial has given to Tune (`TuneResult`), flattened.
        """
        group = self._groups.setdefault(_without(RATE, trial.config), {})
        branch = group.setdefault(
            str(trial), Branch(rate=float(trial.config[RATE]), last_step=result["steps"])
        )
        branch.losses |= {int(step): loss for step, loss in result["losses"]}
        if result["step"] >= branch.last_step:
            return TrialScheduler.CONTINUE
        setting = _without(SEED, trial.config)
        others = [other for name, other in group.items() if name != str(trial)]
        if setting not in self._stopped and not better_branch(branch, others, self.comparisons):
            return TrialScheduler.CONTINUE
        self._stopped.add(setting)
        return TrialScheduler.STOP


def _without(key: str, values: dict[str, Any]) -> str:
    """What trials have in common that differ in one key alone."""
    return str(sorted(item for item in values.items() if item[0] != key))
