"""`trireme sweep`: runs trials, works out the answer, writes the page; run again, it continues."""

import json
from collections import Counter
from collections.abc import Sequence
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
from app.errors import RunFailed, UserError
from app.run.fork import origin_name
from app.tracking.spool import State
from app.tracking.tracker import Tracker
from cluster.connect import connect, disconnect
from experiments.report.page import write_page
from experiments.study import locked_folder, save_manifest, tracked_study
from experiments.sweep import analysis
from experiments.sweep.answer import Answer, BestTrial, SoonestTrial, work_out
from experiments.sweep.budget import BudgetSpent
from experiments.sweep.confirmation import plan_confirmation
from experiments.sweep.page import content
from experiments.sweep.spec import SOONEST, Sweep
from experiments.sweep.trials import BATCH, ENDED, RATE, SEED, Trial, TrialStore
from experiments.sweep.widening import plan_beyond


@dataclass(kw_only=True)
class Outcome:
    """The outcome of `trireme sweep`; `--json` prints it.

    Attributes:
        status: "finished", "incomplete" if trials failed, or "stopped" if the budget was spent
            before all had ended.
        sweep: The sweep's name.
        folder: Its folder.
        best: The trial with the best value.
        trials: How many trials ended in which way.
        recommendation: The trial that reached the target first.
        page: The path of the page.
        mlflow_run_id: The id of the sweep's MLflow run.
        message: How many trials failed, why the first of them did, and what to do, or that the
            budget is spent; "" if neither.
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
        has_trials_left = not _has_ended(spec, store)
        trials: Trials | None = None
        spent = ""
        _check_samples(spec)
        try:
            if has_trials_left:
                console.status("reading the data and starting Ray")
                trials = Trials(spec, store, console)
            save_manifest(folder, "sweep", store.manifest)
            if spec.fork and has_trials_left:
                hold(find(spec.fork), str(folder), until_released=True)
                console.say(_of_fork(spec))
            if has_trials_left and str(spec.budget):
                console.say(f"budget: at most {spec.budget}, over all starts together")
            with tracked_study(
                experiment, folder, store.manifest, kind="sweep", console=console
            ) as tracker:
                about = dict(store.manifest["about"])
                del about["experiment"]  # config.yaml has it
                tracker.params(flatten({"sweep": about}))
                if trials is not None:
                    try:
                        trials.search()
                        trials.widen()
                        trials.confirm()
                    except BudgetSpent as error:
                        spent = str(error)
                        disconnect()  # also from trials that have not ended in time
                        if not analysis.rank_trials(store.trials.values(), spec):
                            raise
                answer, page = _conclude(spec, store, console, tracker=tracker)
            if spec.fork and _has_ended(spec, store):
                release(spec.fork, str(folder))
        finally:
            if has_trials_left:
                disconnect()
    return _outcome(spec, store, answer, page=page, spent=spent)


class Trials:
    """Runs the trials of a sweep: those of the search, then the best settings with other seeds.

    Args:
        spec: The sweep.
        store: Keeps what trials report.
        console: Writes to the terminal.

    Raises:
        UserError: Nothing can be started.
        LayoutError: Likewise.
        ClusterError: Likewise.
    """

    def __init__(self, spec: Sweep, store: TrialStore, console: Console) -> None:
        self.spec = spec
        self.store = store
        self.console = console
        self.longest = spec.longest()
        self.cluster = connect(worker_setup=names.worker_setup())
        # It imports Ray, which must be connected first.
        from experiments.sweep import tuning

        self.tuning = tuning
        self.search_tuning = tuning.prepare(
            spec, store.searched, self.cluster, longest=self.longest
        )

    def search(self) -> None:
        """Runs the trials of the search that have not ended."""
        spec = self.spec
        ended = sum(trial.ended for trial in self.store.searched)
        of_which = f", of which {ended} have ended" if ended else ""
        then = ""
        if spec.rates_beyond:
            rates = "rate" if spec.rates_beyond == 1 else "rates"
            then = (
                f"; then up to {spec.rates_beyond} {rates} beyond the grid, where its last is best"
            )
        if spec.settings_to_confirm:
            then += f"; then the {_best_in_words(spec)}"
        self.console.say(f"sweeping {spec.name}: {spec.count} trials{of_which}{then}")
        if ended < spec.count:
            self.tuning.run_trials(spec, self.store, self.console, tuning=self.search_tuning)

    def widen(self) -> None:
        """Tries learning rates beyond the grid, as long as the last one is the best."""
        store = self.store
        while True:
            left = [trial for trial in store.beyond if not trial.ended]
            if not left:
                left = plan_beyond(self.spec, store.trials.values())
            if not left:
                return
            for trial in left:
                store.save(trial)
            self.console.say(f"the last rate is the best: {_beyond_in_words(left)}")
            self._try(left)

    def confirm(self) -> None:
        """Trains the best settings again with other seeds."""
        spec = self.spec
        store = self.store
        for trial in plan_confirmation(spec, store.trials.values()):
            store.save(trial)
        confirming = store.confirming
        if all(trial.ended for trial in confirming):
            return
        self.console.say(f"confirming the {_best_in_words(spec)}: {len(confirming)} trials")
        self._try(confirming)

    def _try(self, trials: Sequence[Trial]) -> None:
        """Runs these trials, of which some may have ended."""
        sweep = self.spec.trying(trials)
        tuning = self.tuning.prepare(sweep, trials, self.cluster, longest=self.longest)
        self.tuning.run_trials(sweep, self.store, self.console, tuning=tuning)


def _best_in_words(spec: Sweep) -> str:
    settings = spec.settings_to_confirm
    seeds = spec.confirm_seeds
    each = " each" if settings > 1 else ""
    return (
        f"best {f'{settings} settings' if settings > 1 else 'setting'} again with {seeds} other "
        f"seed{'s' if seeds > 1 else ''}{each}"
    )


def _beyond_in_words(trials: Sequence[Trial]) -> str:
    """The cells of trials beyond the grid."""
    rates: dict[int, float] = {int(trial.values[BATCH]): trial.values[RATE] for trial in trials}
    cells = [f"{rate:.3g} at batch size {batch}" for batch, rate in rates.items()]
    return f"{len(trials)} more trials, with {', '.join(cells)}"


def _has_ended(spec: Sweep, store: TrialStore) -> bool:
    """Whether no trial is left, of the search, beyond its grid, or of what confirms it."""
    if sum(trial.ended for trial in store.searched) < spec.count:
        return False
    if plan_beyond(spec, store.trials.values()):
        return False
    if not all(trial.ended for trial in store.beyond):
        return False
    if plan_confirmation(spec, store.trials.values()):
        return False
    return all(trial.ended for trial in store.confirming)


def _check_samples(spec: Sweep) -> None:
    """Checks that the trials are within the budget in samples.

    Raises:
        UserError: They are not.
    """
    most = spec.budget.samples
    if most is None:
        return
    samples = spec.all_samples()
    if samples > most:
        advice = "leave values out of the space"
        if spec.fork:
            advice += f", or write samples: {max(1, (spec.samples or 0) * most // samples)}"
        raise UserError(
            f"the trials of {spec.name} would see {samples:,} samples, and budget.samples is "
            f"{most:,}: {advice}"
        )


def _of_fork(spec: Sweep) -> str:
    """What the trials of a fork will see, for a person."""
    more = spec.samples_beyond()
    beyond = f", and up to {more:,} more at rates beyond the grid" if more else ""
    return (
        f"{spec.count} trials continue {origin_name(spec.fork)} for {spec.samples:,} samples each, "
        f"{spec.all_samples():,} in all{beyond}"
    )


def _outcome(spec: Sweep, store: TrialStore, answer: Answer, *, page: Path, spent: str) -> Outcome:
    counts = Counter(trial.status for trial in store.trials.values())
    failed = [trial for trial in store.trials.values() if trial.status == "failed"]
    message = spent
    if failed and not spent:
        first = failed[0]
        problem = f"{len(failed)} of {len(store.trials)} trials failed"
        message = f"{problem}, the first {first.name}: {first.message}"
        message += "; run the same command again to try them again"
    return Outcome(
        status="stopped" if spent else "incomplete" if failed else "finished",
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
        raise RunFailed(f"{problem}; the first failed with: {reason}")
    answer = work_out(spec, store)
    answer_file = store.folder / "answer.json"
    answer_file.write_text(json.dumps(asdict(answer), indent=1, default=str))
    next_file = store.folder / "next.yaml"
    next_file.write_text(to_yaml(mask_tree(to_dict(next_run(spec, store, answer)))))
    page = write_page(store.folder, content(spec, store, answer))
    best = answer.best
    best_values = {f"best.{key}": str(value) for key, value in best["values"].items()}
    tracker.tags({"trireme.best_trial": best["trial"], **best_values})
    metrics = {f"best/{spec.metric}": best["mean"], **answer.figures}
    tracker.metrics(len(store.ended), metrics)
    for file in (page, answer_file, next_file):
        tracker.artifact(file)
    for line in [*answer.sentences, f"next      trireme train {next_file}"]:
        console.say(f"  {line}")
    return answer, page


def next_run(spec: Sweep, store: TrialStore, answer: Answer) -> Config:
    """The configuration of the run to train next: that of the best trial.

    Where several seeds have judged settings, it is the best one by them. Where the soonest is
    wanted, it is the one that reached the target first. After branches it goes on from their
    checkpoint to the end of the run, over its own next samples.
    """
    name = answer.best["trial"]
    if spec.next == SOONEST:
        if answer.confirmation is not None:
            name = answer.confirmation.best.trial
        elif answer.soonest is not None:
            name = answer.soonest["trial"]
    values: dict[str, Any] = store.trials[name].values
    experiment = spec.experiment
    if spec.fork:
        spec = spec.to_the_end()
        values = {key: value for key, value in values.items() if key != SEED}
    config = spec.config(values, name=f"{spec.name}-next", storage=experiment.run.storage)
    return with_values(config, {"tracking.log_model": experiment.tracking.log_model})
