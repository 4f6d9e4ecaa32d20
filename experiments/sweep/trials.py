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

from app.config_io import flatten
from app.errors import UserError
from app.storage import Storage
from experiments.sweep.analysis import Trial

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
