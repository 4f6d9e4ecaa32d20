"""`trireme sweep`: runs trials, works out the answer, writes the page; run again, it continues."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app import names
from app.checkpoint import find
from app.checkpoint.forks import hold, release
from app.config import Config
from app.config.io import flatten, to_dict, to_yaml, with_values
from app.console.masking import mask_tree
from app.console.terminal import Console
from app.errors import RunFailed
from app.run.fork import origin_name
from app.tracking.spool import State
from app.tracking.tracker import Tracker
from cluster.connect import connect, disconnect
from experiments.report.page import write_page
from experiments.study import locked_folder, save_manifest, tracked_study
from experiments.sweep import analysis
from experiments.sweep.answer import Answer, BestTrial, SoonestTrial, work_out
from experiments.sweep.page import content
from experiments.sweep.spec import Sweep
from experiments.sweep.trials import ENDED, TrialStore


@dataclass(kw_only=True)
class Outcome:
    """What became of `trireme sweep`; `--json` prints it.

    Attributes:
        status: "finished", or "incomplete" if trials failed.
        sweep: The sweep's name.
        folder: Its folder.
        best: The trial with the best value.
        trials: How many trials ended in which way.
        recommendation: The trial that reached the target first.
        page: The path of the page.
        mlflow_run_id: The id of the sweep's MLflow run.
        message: How many trials failed, why the first of them did, and what to do; "" if none did.
    """

    status: str
    sweep: str
    folder: str
    best: BestTrial
    trials: dict[str, int]
    recommendation: SoonestTrial | None
    page: str
    mlflow_run_id: str | None
    message: str = ""


def sweep(spec: Sweep, console: Console, *, verbose: bool = False) -> Outcome:
    """Runs the trials of a sweep that have not ended, and works out the answer.

    Args:
        spec: The sweep.
        console: Writes to the terminal.
        verbose: Whether Ray's and the workers' output goes to the terminal too.

    Raises:
        UserError: Nothing was started, or the sweep cannot continue with what it was given.
        LayoutError: Nothing was started.
        ClusterError: Nothing was started.
        RunFailed: No trial succeeded.
        Interrupted: Stopped by Ctrl-C or SIGTERM; running trials have saved.
    """
    experiment = spec.experiment
    with locked_folder(
        experiment, spec.name, kind="sweep", console=console, verbose=verbose
    ) as folder:
        store = TrialStore(folder, spec.name, spec.identity())
        store.retry_failed()
        has_trials_left = len(store.ended) < spec.count
        tuning = None
        try:
            if has_trials_left:
                console.status("reading the data and starting Ray")
                longest = spec.longest()
                cluster = connect(worker_setup=names.worker_setup())
                # It imports Ray, which must be connected first.
                from experiments.sweep.tuning import prepare, run_trials

                tuning = prepare(spec, store, cluster, longest=longest)
            save_manifest(folder, "sweep", store.manifest)
            if spec.fork and has_trials_left:
                hold(find(spec.fork), str(folder), until_released=True)
                console.say(_budget(spec))
            with tracked_study(
                experiment, folder, store.manifest, kind="sweep", console=console
            ) as tracker:
                about = dict(store.manifest["about"])
                del about["experiment"]  # config.yaml has it
                tracker.params(flatten({"sweep": about}))
                if tuning is not None:
                    run_trials(spec, store, console, tuning=tuning)
                answer, page = _conclude(spec, store, console, tracker=tracker)
            if spec.fork and len(store.ended) == spec.count:
                release(spec.fork, str(folder))
        finally:
            if has_trials_left:
                disconnect()
    return _outcome(spec, store, answer, page=page)


def _budget(spec: Sweep) -> str:
    """What the trials of a fork will see, for a person."""
    assert spec.samples is not None
    total = spec.count * spec.samples
    return (
        f"{spec.count} trials continue {origin_name(spec.fork)} for {spec.samples:,} samples each, "
        f"{total:,} in all"
    )


def _outcome(spec: Sweep, store: TrialStore, answer: Answer, *, page: Path) -> Outcome:
    counts = Counter(trial.status for trial in store.trials.values())
    failed = [trial for trial in store.trials.values() if trial.status == "failed"]
    message = ""
    if failed:
        first = failed[0]
        problem = f"{len(failed)} of {spec.count} trials failed"
        message = f"{problem}, the first {first.name}: {first.message}"
        message += "; run the same command again to try them again"
    return Outcome(
        status="incomplete" if failed else "finished",
        sweep=spec.name,
        folder=str(store.folder),
        best=answer.best,
        trials={status: counts[status] for status in ENDED},
        recommendation=answer.soonest,
        page=str(page),
        mlflow_run_id=State.load(store.folder / "tracking").run_id,
        message=message,
    )


def _conclude(
    spec: Sweep,
    store: TrialStore,
    console: Console,
    *,
    tracker: Tracker,
) -> tuple[Answer, Path]:
    """Works out the answer, and writes answer.json, next.yaml and the page.

    Returns:
        The answer, and the path of the page.

    Raises:
        RunFailed: No trial succeeded.
    """
    if not analysis.rank_trials(store.trials.values(), spec):
        messages = [trial.message for trial in store.ended if trial.message]
        reason = messages[0] if messages else "no reason known"
        problem = f"no trial of {spec.name} gave a finite {spec.metric}"
        raise RunFailed(f"{problem}; the first said: {reason}")
    answer = work_out(spec, store)
    answer_file = store.folder / "answer.json"
    answer_file.write_text(json.dumps(asdict(answer), indent=1, default=str))
    next_file = store.folder / "next.yaml"
    next_file.write_text(to_yaml(mask_tree(to_dict(next_run(spec, store, answer)))))
    page = write_page(store.folder, content(spec, store, answer))
    best = answer.best
    best_values = {f"best.{key}": str(value) for key, value in best["values"].items()}
    tracker.tags({"trireme.best_trial": best["trial"], **best_values})
    metrics = {f"best/{spec.metric}": best["value"], **answer.figures}
    tracker.metrics(len(store.ended), metrics)
    for file in (page, answer_file, next_file):
        tracker.artifact(file)
    for line in [*answer.sentences, f"next      trireme train {next_file}"]:
        console.say(f"  {line}")
    return answer, page


def next_run(spec: Sweep, store: TrialStore, answer: Answer) -> Config:
    """The configuration of the run to train next.

    It is that of the trial that reached the target first, otherwise that of the best trial.
    """
    name = answer.soonest["trial"] if answer.soonest else answer.best["trial"]
    values: dict[str, Any] = store.trials[name].values
    experiment = spec.experiment
    config = spec.config(values, name=f"{spec.name}-next", storage=experiment.run.storage)
    return with_values(config, {"tracking.log_model": experiment.tracking.log_model})
