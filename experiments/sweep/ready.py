"""Everything that can be wrong with cluster, task, batch, searcher and scheduler, found before a trial starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.console import Console
from app.errors import UserError
from experiments.sweep.ledger import Ledger
from experiments.sweep.spec import Sweep

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "100000000",  # the ledger remembers
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""What Tune reads from the environment of the driver, when it is imported."""


@dataclass
class Ready:
    """What Tune is given."""

    scheduler: Any
    searcher: Any
    gpus: bool
    at_once: int  # trials, as the cluster is now


def make_ready(sweep: Sweep, ledger: Ledger, console: Console) -> Ready:
    """Connects to Ray, removes what a killed sweep left there, and checks.

    Raises:
        UserError, LayoutError, ClusterError: one sentence.
    """
    from app.launchers import PRELOAD
    from app.run.cost import Prices, check_budget
    from cluster.connect import connect
    from experiments.sweep import oversee, search, slots
    from experiments.sweep.trial import need

    console.status("reading the data and starting Ray")
    longest = _longest(sweep)
    every = max(1, longest // sweep.reports) if sweep.reports else sweep.base.train.eval_every or longest
    scheduler = oversee.scheduler_of(sweep, longest, every)
    searcher = search.searcher_of(sweep)
    cluster = connect(PRELOAD)
    if removed := slots.remove_leftovers():
        console.say(f"note: removed {removed} placement groups that a sweep before this one left")
    gpus = cluster.gpus > 0

    def needs(values: dict[str, Any]) -> slots.Need:
        return need(sweep.config(values, "trial", "runs"), gpus)

    nodes = slots.nodes_now()
    every_need = list(dict.fromkeys(needs(values) for values in sweep.points or [{}]))
    slots.refuse_what_never_fits(nodes, dict(cluster.max_resources), every_need)
    if sweep.base.budget is not None:
        check_budget(sweep.base.budget, Prices(sweep.base).rate(every_need[0].workers, dict(every_need[0].per_worker)))
    at_once = min(slots.at_once(nodes, one, most=64) for one in every_need) or 1
    at_once = min(at_once, sweep.concurrent or at_once, sweep.count)
    asks = search.Next(sweep, ledger, searcher, needs, slots.nodes_now, dict(cluster.max_resources))
    return Ready(scheduler, asks, gpus, at_once)


def _longest(sweep: Sweep) -> int:
    """Steps (or samples) of the longest trial, every distinct layout and batch checked on the way."""
    from app.run.prepare import prepare, read_task

    def size(config: Any) -> int:
        return config.train.global_batch_size if sweep.time == "samples" else 1

    if any(key.split(".")[0] in ("task", "task_args") for key in sweep.space):
        if sweep.base.train.steps:
            return sweep.base.train.steps * size(sweep.base)
        if sweep.scheduler != "none":
            raise UserError(f"scheduler {sweep.scheduler} needs to know how long trials are: write train.steps")
        return 1
    task, alike = read_task(sweep.base), {}
    for values in sweep.points or [{}]:
        config = sweep.config(values, "trial", "runs")
        alike[config.train.global_batch_size, config.workers, config.strategy, str(config.train)] = config
    return max(
        prepare(config, task, int(config.workers), devices_per_node=None).steps * size(config)
        for config in alike.values()
    )
