"""Seconds of a step on any number of workers: the planner's, scaled to what branches have taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from experiments.sweep import analysis
from experiments.sweep.spec import Sweep
from experiments.sweep.trials import BATCH, Trial


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is left of a training, and how long its steps would take.

    Args:
        seconds: Of a step, by (batch, workers).
        samples: That the run which was forked has left; those of a branch if it has none.
        price: Dollars per hour of one worker; None if it is not known.
    """

    seconds: dict[tuple[int, int], float]
    samples: int
    price: float | None


def plan_steps(
    sweep: Sweep, trials: Sequence[Trial], *, batches: Sequence[int], counts: Sequence[int]
) -> Planned:
    """Seconds of a step for each batch and number of workers that divides it.

    Args:
        sweep: A sweep of forks.
        trials: Its branches.
        batches: The batch sizes.
        counts: The numbers of workers.

    Returns:
        By the planner, or if it cannot plan this, by the law of what branches have taken.
    """
    assert sweep.samples is not None
    pairs = [(batch, count) for batch in batches for count in counts if batch % count == 0]
    try:
        return _by_planner(sweep, trials, pairs)
    except Exception:  # whatever is wrong with a plan, what was measured is right
        law = analysis.step_time(trials)
    seconds = {}
    if law is not None:
        seconds = {(batch, count): law.seconds(batch, count) for batch, count in pairs}
    return Planned(seconds=seconds, samples=sweep.samples, price=None)


def _by_planner(sweep: Sweep, trials: Sequence[Trial], pairs: Sequence[tuple[int, int]]) -> Planned:
    from app.data.loader import length
    from app.planner.advice import predict
    from app.planner.machine import machine_of_run
    from app.planner.plan import reader_of
    from app.run.prepare import read_task
    from strategies import registry
    from strategies.layout import choose

    task = read_task(sweep.experiment)
    machine = machine_of_run(1)
    reader = reader_of(sweep.experiment, task, machine)

    def planned(batch: int, workers: int) -> float:
        config = sweep.config({BATCH: batch}, name="plan", storage=sweep.experiment.run.storage)
        one_device = registry.by_degrees().name
        strategy = one_device
        if workers > 1:
            is_chosen = config.strategy not in ("auto", one_device)
            strategy = config.strategy if is_chosen else registry.by_degrees("dp_replicate").name
        machine_of_count = machine_of_run(workers)
        layout = choose(strategy, workers, devices_per_node=machine_of_count.per_node)
        return predict(config, task, layout, machine_of_count, reader).step_seconds

    ratios = []
    for trial in trials:
        last = trial.last
        if last.get("seconds", 0.0) > 0 and BATCH in trial.values:
            measured = last["seconds"] / last["step"]
            ratios.append(measured / planned(int(trial.values[BATCH]), last["workers"]))
    scale = median(ratios)
    train = sweep.experiment.train
    end = train.batches.samples_after(train.steps_for(length(task.train_data())))
    return Planned(
        seconds={pair: scale * planned(*pair) for pair in pairs},
        samples=max(0, end - sweep.origin_samples) or sweep.samples or 0,
        price=machine.price_per_hour,
    )
