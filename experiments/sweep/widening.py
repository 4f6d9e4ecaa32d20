"""Learning rates beyond a grid of branches: where the best one is the last that was tried.

The best rate of a grid's edge is a bound and no answer: a better one may lie beyond it. So a batch
size that may still be chosen gets another rate there, with all seeds, and another after that if the
new one is the best again. Then batch sizes that are worse at the rates that were tried get theirs:
until their best rates are inside, they leave the critical batch open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from experiments.sweep import analysis
from experiments.sweep.branches import Cell, Losses, edges_of, losses_of
from experiments.sweep.search import Values
from experiments.sweep.spec import Sweep
from experiments.sweep.trials import BATCH, RATE, SEED, Trial, trial_name


def plan_beyond(sweep: Sweep, trials: Iterable[Trial]) -> list[Trial]:
    """The next trials beyond the grid, as far as budget.samples allows.

    Args:
        sweep: Says how many rates a batch size may get.
        trials: All trials of the sweep; those of the grid have ended.

    Returns:
        Trials that have not run yet; [] while others of their kind have not ended.
    """
    all_trials = list(trials)
    ranked = analysis.rank_trials([each for each in all_trials if not each.confirms], sweep)
    earlier = [each for each in all_trials if each.beyond]
    if not sweep.rates_beyond or not ranked or not all(each.ended for each in earlier):
        return []
    others = {
        key: value for key, value in ranked[0][1].values.items() if key not in (BATCH, RATE, SEED)
    }
    losses = losses_of(all_trials, sweep, others)
    seeds: Sequence[object] = sweep.space[SEED].values if SEED in sweep.space else ()
    left = None
    if sweep.budget.samples is not None:
        spent = sum(sweep.samples_of_branch(each.values) for each in earlier)
        left = sweep.budget.samples - sweep.all_samples() - spent
    index = max(each.index for each in all_trials) + 1
    planned: list[Trial] = []
    for batch, rate in cells_beyond(losses, _added(earlier), most=sweep.rates_beyond):
        point: Values = {**others, BATCH: batch, RATE: rate}
        values = [{key: (point | {SEED: seed})[key] for key in sweep.space} for seed in seeds]
        values = values or [{key: point[key] for key in sweep.space}]
        if left is not None:
            left -= len(values) * sweep.samples_of_branch(values[0])
            if left < 0:
                break
        for each in values:
            planned.append(Trial(index, trial_name(index, each), each, beyond=True))
            index += 1
    return planned


def _added(trials: Iterable[Trial]) -> dict[int, int]:
    """How many rates each batch size got beyond the grid."""
    cells = {(int(trial.values[BATCH]), trial.values[RATE]) for trial in trials}
    return {batch: sum(each == batch for each, _ in cells) for batch, _ in cells}


def cells_beyond(losses: Losses, added: Mapping[int, int], *, most: int) -> list[Cell]:
    """The cells to try next beyond a grid, that of the best batch size first.

    Those of batch sizes that are worse than another follow when no others are left.

    Args:
        losses: Of all branches.
        added: How many rates each batch size got beyond the grid already.
        most: How many it may get.
    """
    edges = [edge for edge in edges_of(losses) if added.get(edge.batch, 0) < most]
    may_be_chosen = [edge for edge in edges if not edge.is_worse]
    return [(edge.batch, edge.beyond) for edge in may_be_chosen or edges]
