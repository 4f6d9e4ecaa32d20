"""`trireme sweep`: from a sweep file to its trials, its answer and its page; run again, it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ray import tune

from app.config_io import flatten, to_dict, to_yaml
from app.console import Console
from app.errors import Interrupted, RunFailed
from app.launchers import PRELOAD
from app.masking import mask_tree, mask_uri
from app.run.cost import Prices, check_budget
from app.tracking.settings import resolve_tracking
from app.tracking.spool import State
from app.tracking.tracker import Tracker
from cluster.connect import connect, disconnect
from cluster.files import connected
from cluster.pending import check_feasible
from experiments.report.build import write
from experiments.study import own_folder, tracked
from experiments.sweep.analysis import ENDED, ranked
from experiments.sweep.answer import Answer, next_run, work_out
from experiments.sweep.page import content
from experiments.sweep.search import scheduler_of, searcher_of
from experiments.sweep.spec import Sweep
from experiments.sweep.trial import STOP_FILE, Setting, TrialActor, resources
from experiments.sweep.trials import Observer, TrialStore

ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the trials' folders and MLflow have what they would write
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_MAX_PENDING_TRIALS_PG": "16",  # by default 200 placement groups wait, also for what others use
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Settings of Tune (docs.ray.io, tune/api/env.html)."""


@dataclass
class Outcome:
    """What became of `trireme sweep`; `--json` prints it."""

    status: str  # finished
    sweep: str
    folder: str
    best: dict[str, Any]
    trials: dict[str, int]  # how many ended in which way
    recommendation: dict[str, Any] | None
    page: str
    mlflow_run_id: str | None


def sweep(found: Sweep, console: Console, *, verbose: bool = False) -> Outcome:
    """Runs what is left of a sweep, and says what was learnt.

    Raises:
        UserError, LayoutError, ClusterError: nothing was started, or the sweep cannot go on with what it was given.
        RunFailed: no trial succeeded.
        Interrupted: stopped by Ctrl-C or SIGTERM; running trials have saved.
    """
    with own_folder(found.experiment, found.name, "sweep", console, verbose=verbose) as folder:
        store = TrialStore(folder, found.name, found.identity())
        try:
            tuning = _prepare(found, store, console) if len(store.ended) < found.count else None
            store.save_head()
            with tracked(found.experiment, folder, store.head, "sweep", console) as tracker:
                about = {key: value for key, value in store.head["about"].items() if key != "experiment"}
                tracker.params(flatten({"sweep": about}))
                if tuning:
                    _tune(found, store, console, *tuning)
                answer, page = _conclude(found, store, console, tracker)
        finally:
            disconnect()
    ended = Counter(trial.status for trial in store.trials.values())
    counts = {status: ended[status] for status in ENDED}
    run_id = State.load(folder / "tracking").run_id
    return Outcome("finished", found.name, str(folder), answer.best, counts, answer.soonest, str(page), run_id)


def _prepare(found: Sweep, store: TrialStore, console: Console) -> tuple[Any, Any, bool]:
    """Searcher, scheduler, and whether trials use GPUs. Finds what is wrong with cluster, task or batch."""
    os.environ.update(ENVIRONMENT)
    console.status("reading the data and starting Ray")
    experiment, longest = found.experiment, found.longest()
    every = max(1, longest // found.reports) if found.reports else experiment.train.eval_every or longest
    scheduler = scheduler_of(found, longest, every)
    known = [trial.values for trial in store.trials.values()]  # first those of earlier starts, in their order
    searcher = searcher_of(found, known + [values for values in found.points or () if values not in known])
    cluster = connect(PRELOAD)
    gpus, shape = cluster.gpus > 0, connected(private=cluster.started_here)
    for config in found.configs():
        each = resources(config, gpus)[-1]
        check_feasible(shape, int(config.workers), each)
    check_budget(experiment.budget, Prices(experiment).rate(int(config.workers), each))
    return searcher, scheduler, gpus


def _tune(found: Sweep, store: TrialStore, console: Console, searcher: Any, scheduler: Any, gpus: bool) -> None:
    """Runs trials to their ends.

    Raises:
        UserError: no trial reports what the sweep compares.
        Interrupted: a person stopped it, and running trials have saved.
    """
    folder, done = store.folder, len(store.ended)
    console.say(f"sweeping {found.name}: {found.count} trials{f', of which {done} have ended' if done else ''}")
    observer = Observer(found, store, console)
    settings = resolve_tracking(found.experiment.tracking, str(folder.parent))
    shown = replace(settings, uri=mask_uri(settings.uri))
    setting = Setting(found, folder, shown, gpus, os.getcwd(), tuple(sys.argv))

    def bundles(values: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory(resources(found.config(values, "trial", "runs"), gpus))

    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(TrialActor, setting=setting), bundles),
        param_space={key: domain.for_tune() for key, domain in found.space.items()},
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=scheduler,
            num_samples=found.count,
            reuse_actors=True,
            trial_name_creator=observer.name,
            trial_dirname_creator=str,
        ),
        run_config=tune.RunConfig(
            name=".tune",
            storage_path=str(folder),
            verbose=0,
            stop=observer,
            callbacks=[observer],
            failure_config=tune.FailureConfig(max_failures=min(1, found.experiment.fault.max_restarts)),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )
    (folder / STOP_FILE).unlink(missing_ok=True)
    with _signals(observer, folder / STOP_FILE, console):
        try:
            tuner.fit()
        except tune.TuneError as error:
            if observer.problem is None and not observer.stopping:
                raise RunFailed(f"Ray Tune gave up: {str(error).strip().splitlines()[-1]}") from error
    shutil.rmtree(folder / ".tune", ignore_errors=True)  # trial.json and each run's folder are what is kept
    if observer.problem is not None:
        raise observer.problem
    if observer.stopping:
        raise Interrupted(f"stopped with {len(store.ended)} of {found.count} trials ended")


@contextlib.contextmanager
def _signals(observer: Observer, stop_file: Path, console: Console) -> Iterator[None]:
    """Ctrl-C and SIGTERM: running trials save and stop; a second one ends everything at once."""

    def ask(number: int, frame: object) -> None:
        if observer.stopping:
            raise KeyboardInterrupt
        observer.ending = set(observer.running)
        console.say("stopping: running trials save a checkpoint first (once more to stop at once)")
        stop_file.touch()  # trials look for it

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _conclude(found: Sweep, store: TrialStore, console: Console, tracker: Tracker) -> tuple[Answer, Path]:
    """Works out the answer, and writes answer.json, next.yaml and the page. Raises RunFailed: no trial succeeded."""
    if not ranked(store.trials.values(), found):
        first = next((trial.message for trial in store.ended if trial.message), "no reason known")
        raise RunFailed(f"no trial of {found.name} gave a finite {found.metric}; the first said: {first}")
    folder, answer = store.folder, work_out(found, store)
    (folder / "answer.json").write_text(json.dumps(asdict(answer), indent=1, default=str))
    (folder / "next.yaml").write_text(to_yaml(mask_tree(to_dict(next_run(found, store, answer)))))
    page, best = write(folder, content(found, store, answer)), answer.best
    tags = {f"best.{key}": str(value) for key, value in best["values"].items()}
    tracker.tags({"trireme.best_trial": best["trial"], **tags})
    tracker.metrics(len(store.ended), {f"best/{found.metric}": best["value"], **answer.figures})
    for file in (page, folder / "answer.json", folder / "next.yaml", folder / "plots"):
        tracker.artifact(file)
    for line in [*answer.sentences, f"next      trireme train {folder / 'next.yaml'}"]:
        console.say(f"  {line}")
    return answer, page
