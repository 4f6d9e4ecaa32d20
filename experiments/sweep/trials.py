"""What a sweep remembers, in its folder.

FOLDER/sweep.json         what the sweep is, and its MLflow run
FOLDER/TRIAL/             each trial's run: see app/run/manifest.py
FOLDER/TRIAL/trial.json   its values, what it has reported, how it ended

One process writes these, the sweep's driver, each file in one step. When the same command is run again, they say which
trials have ended, which are to continue, and what Tune's searcher and scheduler knew.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.storage.storage import Storage
from experiments.study import open_head

FILE = "trial.json"
ENDED = ("finished", "reached", "pruned", "diverged", "failed")
"""How a trial may end: its steps are done; the target is reached; the scheduler stopped it; its numbers were no longer
finite; something broke, and the next start tries it again."""
FAILURES = ("diverged", "failed")
BATCH, RATE, WORKERS, SEED = "train.global_batch_size", "optimizer.lr", "workers", "train.seed"


@dataclass
class Trial:
    """One point of the space and what became of it."""

    index: int
    name: str
    values: dict[str, Any]
    status: str = "running"  # or one of ENDED
    message: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)
    """{"step", "samples", "seconds" (of training, all starts together), "metrics": {…}, "workers", "steps" (of all)}"""

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def last(self) -> dict[str, Any]:
        return self.reports[-1] if self.reports else {}

    def curve(self, metric: str, over: str = "step") -> list[tuple[float, float]]:
        """(step, value) of every report that has the metric."""
        return [(r[over], r["metrics"][metric]) for r in self.reports if metric in r["metrics"]]


def load_trial(folder: Path) -> Trial | None:
    """None where there is none yet."""
    try:
        return Trial(**json.loads((folder / FILE).read_text()))
    except FileNotFoundError:
        return None


class TrialStore:
    """A sweep's folder.

    about: what makes this sweep itself (`Sweep.identity`).
    Raises:
        UserError: the folder holds another sweep.
    """

    def __init__(self, folder: Path, name: str, about: dict[str, Any]) -> None:
        self.folder, self.head = folder, open_head(folder, "sweep", name, about)
        found = [load_trial(file.parent) for file in sorted(folder.glob(f"*/{FILE}"))]
        self.trials = {trial.name: trial for trial in sorted(filter(None, found), key=lambda trial: trial.index)}

    def save(self, trial: Trial) -> None:
        self.trials[trial.name] = trial
        text = json.dumps(asdict(trial), indent=1, default=float)
        Storage(self.folder / trial.name).write_bytes(FILE, text.encode())

    @property
    def ended(self) -> list[Trial]:
        return [trial for trial in self.trials.values() if trial.ended]

    def retry_failed(self) -> None:
        """From now on failed trials are under way: Tune starts them again, and each continues from its checkpoint."""
        for trial in self.ended:
            if trial.status == "failed":
                trial.status, trial.message = "running", ""
                self.save(trial)


def trial_name(index: int, values: dict[str, Any]) -> str:
    """`t003-b64-lr0.003`: what is searched first of all is in the name."""
    name = f"t{index:03d}"
    if BATCH in values:
        name += f"-b{values[BATCH]}"
    if RATE in values:
        name += f"-lr{values[RATE]:.3g}".replace("+", "")
    return name
