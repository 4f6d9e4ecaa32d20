"""`trireme sweep`: from a sweep file to its trials, its answer and its page; run again, it goes on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.config_io import flatten, to_dict, to_yaml
from app.console import Console
from app.errors import RunFailed
from app.launchers import PRELOAD
from app.masking import mask_tree
from app.tracking.spool import State
from app.tracking.tracker import Tracker
from cluster.connect import connect, disconnect
from experiments.report.build import write
from experiments.study import own_folder, tracked
from experiments.sweep.analysis import ENDED, ranked
from experiments.sweep.answer import Answer, next_run, work_out
from experiments.sweep.page import content
from experiments.sweep.spec import Sweep
from experiments.sweep.trials import TrialStore


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
        left, tuning = len(store.ended) < found.count, None
        try:
            if left:
                console.status("reading the data and starting Ray")
                longest, cluster = found.longest(), connect(PRELOAD)
                from experiments.sweep.tuning import prepare, run_trials  # imports Ray, which is to be connected first

                tuning = prepare(found, store, cluster, longest)
            store.save_head()
            with tracked(found.experiment, folder, store.head, "sweep", console) as tracker:
                about = {key: value for key, value in store.head["about"].items() if key != "experiment"}
                tracker.params(flatten({"sweep": about}))
                if tuning:
                    run_trials(found, store, console, *tuning)
                answer, page = _conclude(found, store, console, tracker)
        finally:
            if left:
                disconnect()
    ended = Counter(trial.status for trial in store.trials.values())
    counts = {status: ended[status] for status in ENDED}
    run_id = State.load(folder / "tracking").run_id
    return Outcome("finished", found.name, str(folder), answer.best, counts, answer.soonest, str(page), run_id)


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
