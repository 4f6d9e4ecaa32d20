"""What a sweep remembers, in its folder.

    FOLDER/sweep.json            what the sweep is, and its MLflow run
    FOLDER/TRIAL/                the run of each trial: see app/run/manifest.py
    FOLDER/TRIAL/trial.json      the trial's values, its reports, and how it ended
    FOLDER/TRIAL/reports.jsonl   the reports of a running trial since trial.json was written

One process writes these files, the sweep's driver. When the same command is run again, they say
which trials have ended, which are to be continued, and what Tune's searcher and scheduler knew.

`trial.json` is replaced in one step and is on the disk before the driver goes on, at the beginning
and at the end of a trial. A report is a line more, for which the driver does not wait: it is kept
if the driver is killed, and if the machine loses its newest lines, the trial reports those
evaluations again, which its checkpoint holds.
"""

import contextlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from app.storage.storage import Storage
from experiments.study import load_manifest

FILE = "trial.json"
REPORTS = "reports.jsonl"
ENDED = ("finished", "reached", "pruned", "diverged", "failed")
"""How a trial may end.

Its steps are done; the target is reached; the scheduler stopped it; its numbers were no longer
finite; something broke, and the next start tries it again.
"""
FAILURES = ("diverged", "failed")
BATCH = "train.global_batch_size"
RATE = "optimizer.lr"
WORKERS = "workers"
SEED = "train.seed"


class Report(TypedDict, total=False):
    """An evaluation of a trial; empty before the first one.

    Attributes:
        step: The optimizer steps so far.
        samples: The samples so far.
        seconds: The seconds of training so far, of all starts together.
        metrics: The metrics by name.
        workers: The number of workers.
        steps: The steps of the whole trial.
        losses: (step, training loss) since the report before, where trials are compared by them.
    """

    step: int
    samples: int
    seconds: float
    metrics: dict[str, float]
    workers: int
    steps: int
    losses: list[tuple[int, float]]


@dataclass
class Trial:
    """One point of the search space, and what became of it.

    Attributes:
        index: Its number in the sweep.
        name: The name of its folder and its run.
        values: The point: values by key.
        status: "running", or one of `ENDED`.
        message: Why it ended so.
        reports: Its evaluations.
        confirms: The trial of the search whose values it repeats with another seed; "" for the
            trials of the search.
        beyond: Whether its learning rate was added beyond those of the grid.
    """

    index: int
    name: str
    values: dict[str, Any]
    status: str = "running"
    message: str = ""
    reports: list[Report] = field(default_factory=list)
    confirms: str = ""
    beyond: bool = False

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def last(self) -> Report:
        """The last report; empty before the first one."""
        return self.reports[-1] if self.reports else Report()

    @property
    def samples_left(self) -> int:
        """About how many samples the trial had left at its last report."""
        last = self.last
        if not last.get("step"):
            return 0
        return round(last["samples"] * (last["steps"] / last["step"] - 1))

    def curve(self, metric: str, over: str = "step") -> list[tuple[float, float]]:
        """The course of a metric.

        Args:
            metric: Its name.
            over: Over what: "step", "samples" or "seconds".

        Returns:
            (position, value) of every report that has the metric.
        """
        points = []
        for report in self.reports:
            metrics = report["metrics"]
            if metric in metrics:
                points.append((_position(report, over), metrics[metric]))
        return points


def _position(report: Report, over: str) -> float:
    match over:
        case "step":
            return report["step"]
        case "samples":
            return report["samples"]
        case "seconds":
            return report["seconds"]
    raise ValueError(f"a curve is over step, samples or seconds, not {over!r}")


def load_trial(folder: Path) -> Trial | None:
    """The trial in a folder; None if there is none yet."""
    try:
        trial = Trial(**json.loads((folder / FILE).read_text()))
    except FileNotFoundError:
        return None
    try:
        lines = (folder / REPORTS).read_bytes().splitlines()
    except FileNotFoundError:
        return trial
    for line in lines:
        with contextlib.suppress(ValueError):  # the machine lost a part of it
            report = json.loads(line)
            if report["step"] > trial.last.get("step", 0):
                trial.reports.append(report)
    return trial


class TrialStore:
    """A sweep's folder with its trials.

    Args:
        folder: The folder.
        name: The sweep's name.
        about: What makes it this sweep (`Sweep.identity`).

    Attributes:
        manifest: What sweep.json holds.
        trials: All trials by name, in the order of their indices.

    Raises:
        UserError: The folder holds another sweep.
    """

    def __init__(self, folder: Path, name: str, about: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = load_manifest(folder, kind="sweep", name=name, about=about)
        loaded = [load_trial(file.parent) for file in folder.glob(f"*/{FILE}")]
        trials = [trial for trial in loaded if trial is not None]
        trials.sort(key=lambda trial: trial.index)
        self.trials = {trial.name: trial for trial in trials}

    def save(self, trial: Trial) -> None:
        """Writes a trial into its folder; it is on the disk when this returns."""
        self.trials[trial.name] = trial
        text = json.dumps(asdict(trial), indent=1, default=float)
        Storage(self.folder / trial.name).write_bytes(FILE, text.encode())
        (self.folder / trial.name / REPORTS).unlink(missing_ok=True)

    def add_report(self, trial: Trial, report: Report) -> None:
        """Adds a report to a trial that was saved, without waiting for the disk."""
        trial.reports.append(report)
        # The line break comes first, so that a line that was cut off does not spoil this one.
        line = "\n" + json.dumps(report, default=float)
        with (self.folder / trial.name / REPORTS).open("a") as file:
            file.write(line)

    @property
    def ended(self) -> list[Trial]:
        return [trial for trial in self.trials.values() if trial.ended]

    @property
    def searched(self) -> list[Trial]:
        """The trials of the search."""
        return [trial for trial in self.trials.values() if not trial.confirms and not trial.beyond]

    @property
    def beyond(self) -> list[Trial]:
        """The trials with learning rates beyond those of the grid."""
        return [trial for trial in self.trials.values() if trial.beyond]

    @property
    def confirming(self) -> list[Trial]:
        """The trials that train the best settings again."""
        return [trial for trial in self.trials.values() if trial.confirms]

    def retry_failed(self) -> None:
        """Marks failed trials as running: Tune starts them again, each from its checkpoint."""
        for trial in self.ended:
            if trial.status == "failed":
                trial.status = "running"
                trial.message = ""
                self.save(trial)


def setting_of(values: dict[str, Any]) -> str:
    """What trials have in common that differ only in their seed."""
    return str(sorted((key, str(value)) for key, value in values.items() if key != SEED))


def trial_name(index: int, values: dict[str, Any]) -> str:
    """A trial's name with its batch size and learning rate, such as `t003-b64-lr0.003`."""
    name = f"t{index:03d}"
    if BATCH in values:
        name += f"-b{values[BATCH]}"
    if RATE in values:
        name += f"-lr{values[RATE]:.3g}".replace("+", "")
    return name
