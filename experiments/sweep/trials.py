"""What a sweep remembers, in its folder.

FOLDER/sweep.json         what the sweep is, and its MLflow run
FOLDER/TRIAL/             each trial's run: see app/run/manifest.py
FOLDER/TRIAL/trial.json   its values, what it has reported, how it ended

One process writes these, the sweep's driver, each file in one step. When the same command is run again, they say which
trials have ended, which are to continue, and what Tune's searcher and scheduler knew.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray import tune

from app.config_io import flatten
from app.console import Console, duration
from app.errors import UserError
from app.storage import Storage
from experiments.sweep.analysis import Trial
from experiments.sweep.spec import Sweep

FILE = "trial.json"


def load_trial(folder: Path) -> Trial | None:
    """None where there is none yet."""
    try:
        return Trial(**json.loads((folder / FILE).read_text()))
    except FileNotFoundError:
        return None


class TrialStore:
    """A sweep's folder.

    identity: what makes this sweep itself (`Sweep.identity`).
    Raises:
        UserError: the folder holds something else.
    """

    def __init__(self, folder: Path, name: str, identity: dict[str, Any]) -> None:
        self.folder = folder
        self.head = self._open(name, json.loads(json.dumps(identity, default=str)))
        found = [load_trial(file.parent) for file in sorted(folder.glob(f"*/{FILE}"))]
        self.trials = {trial.name: trial for trial in sorted(filter(None, found), key=lambda trial: trial.index)}

    def _open(self, name: str, identity: dict[str, Any]) -> dict[str, Any]:
        try:
            head = json.loads((self.folder / "sweep.json").read_text())
        except FileNotFoundError:
            return {"name": name, "uid": uuid.uuid4().hex, "created": time.time(), "about": identity}
        except ValueError as error:
            raise UserError(f"{self.folder}/sweep.json is damaged ({error}): use another name") from error
        before, now = flatten(head["about"]), flatten(identity)
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                raise UserError(
                    f"the sweep {name!r} in {self.folder} was begun with another {key.removeprefix('experiment.')} "
                    f"({before.get(key)!r}, and now {now.get(key)!r}): run it as it was, or give this one a name of "
                    "its own (name=…)"
                )
        return head

    def save_head(self) -> None:
        Storage(self.folder).write_bytes("sweep.json", json.dumps(self.head, indent=1).encode())

    def save(self, trial: Trial) -> None:
        self.trials[trial.name] = trial
        text = json.dumps(asdict(trial), indent=1, default=float)
        Storage(self.folder / trial.name).write_bytes(FILE, text.encode())

    @property
    def ended(self) -> list[Trial]:
        return [trial for trial in self.trials.values() if trial.ended]


def trial_name(index: int, values: dict[str, Any]) -> str:
    """`t003-b64-lr0.003`: what is searched first of all is in the name."""
    name = f"t{index:03d}"
    if "train.global_batch_size" in values:
        name += f"-b{values['train.global_batch_size']}"
    if "optimizer.lr" in values:
        name += f"-lr{values['optimizer.lr']:.3g}".replace("+", "")
    return name


class Observer(tune.Callback, tune.Stopper):
    """Tune's callback, which keeps what trials report; its stopper, once a person has stopped the sweep or no trial
    reports what it compares; and the trials' names."""

    def __init__(self, sweep: Sweep, store: TrialStore, console: Console) -> None:
        self.sweep, self.store, self.console = sweep, store, console
        self.began = time.monotonic()
        self.known = list(store.trials.values())  # of earlier starts, which Tune is given first
        self.named = 0
        self.running: set[str] = set()  # Tune's ids
        self.ending: set[str] | None = None  # those that ran when a person stopped the sweep, and still save
        self.problem: UserError | None = None  # why the whole sweep ends

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune keeps a copy for Tuner.restore, which nothing here uses: the store remembers

    def __deepcopy__(self, memo: dict[int, Any]) -> Observer:
        return self  # wherever Tune asks, it asks this one

    # --- what Tune asks -------------------------------------------------------------------------------------------

    def name(self, trial: Any) -> str:
        """A new trial's name; called once for each, in order."""
        self.named += 1
        if self.named <= len(self.known):
            return self.known[self.named - 1].name
        index = self.named - 1 + (self.known[-1].index + 1 - len(self.known) if self.known else 0)
        return trial_name(index, trial.config)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.problem is not None or (self.ending is not None and not self.ending & self.running)

    @property
    def stopping(self) -> bool:
        return self.ending is not None

    # --- what Tune tells ------------------------------------------------------------------------------------------

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.running.add(trial.trial_id)
        if str(trial) not in self.store.trials:
            self.store.save(Trial(int(str(trial)[1:].split("-")[0]), str(trial), dict(trial.config)))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        record, report = self.store.trials[str(trial)], result["report"]
        if record.ended or not report or report["step"] <= record.last.get("step", 0):
            return  # what an earlier start has reported
        record.values = dict(trial.config)  # which population-based training changes
        record.reports.append(report)
        self.store.save(record)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        record, result = self.store.trials[str(trial)], trial.last_result or {}
        self.running.discard(trial.trial_id)
        status, message = result.get("status", ""), result.get("message", "")
        if status == "wrong metric":
            self.problem = UserError(message)
        elif not record.ended and status != "stopped" and not (self.stopping and not status):
            self._end(record, *(status, message) if status else self._stopped(record))

    def _stopped(self, record: Trial) -> tuple[str, str]:
        """How a trial ended that the scheduler stopped."""
        last = record.last
        if self.sweep.stop_at_target and self.sweep.reached(last["metrics"].get(self.sweep.metric)):
            return "reached", ""
        if last["step"] >= last["steps"]:
            return "finished", ""
        return "pruned", f"stopped early by {self.sweep.scheduler} after step {last['step']:,}"

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """The trial's process died, and again when it was started once more."""
        record = self.store.trials[str(trial)]
        self.running.discard(trial.trial_id)
        if not record.ended and not self.stopping:
            self._end(record, "failed", "its process died: logs/sweep.log of the sweep's folder has its last output")

    def _end(self, record: Trial, status: str, message: str) -> None:
        record.status, record.message = status, message
        self.store.save(record)
        value = record.last.get("metrics", {}).get(self.sweep.metric)
        shown = f"{self.sweep.metric} {value:.4g}" if value is not None else "no report"
        how = "" if status == "finished" else f" ({message or status})"
        counted = f"{len(self.store.ended)}/{self.sweep.count}"
        self.console.say(f"{counted}  {record.name}: {shown}{how}  {duration(time.monotonic() - self.began)}")
