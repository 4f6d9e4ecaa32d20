"""What a sweep remembers: every trial, every report, every end, appended as it happens.

FOLDER/sweep.json      what the sweep is, and its MLflow run
FOLDER/ledger.jsonl    one line per event: trial, report, end
FOLDER/TRIAL/          each trial's run: see app/run/manifest.py

One process writes it, the sweep's driver; a line that a dying driver left half written is skipped. When the same
command is run again the ledger says which trials have ended (they are not run again), which were under way (they
continue), and what the scheduler and the searcher were told.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from app.errors import UserError
from app.storage import Storage

ENDED = ("finished", "reached", "pruned", "failed")
"""How a trial may end: its steps are done; the target is reached; the scheduler stopped it; it crashed or diverged."""


@dataclass
class Trial:
    """One point of the space and what became of it."""

    index: int
    name: str
    values: dict[str, Any]
    status: str = "running"  # or one of ENDED
    message: str = ""
    reports: list[dict[str, Any]] = field(default_factory=list)
    """{"step", "samples", "seconds" (of training, all starts together), "metrics": {…}, "workers", "steps",
    "first_step" (seconds from the trial's present start to its first step)}"""
    starts: int = 0

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def last(self) -> dict[str, Any]:
        return self.reports[-1] if self.reports else {}

    def curve(self, metric: str, over: str = "step") -> list[tuple[float, float]]:
        """(step, value) of every report that has the metric."""
        return [(r[over], r["metrics"][metric]) for r in self.reports if metric in r["metrics"]]


class Ledger:
    """The sweep's memory, in its folder.

    about: what makes this sweep itself (`Sweep.about`).
    Raises:
        UserError: the folder holds another sweep.
    """

    def __init__(self, folder: str, name: str, about: dict[str, Any]) -> None:
        self.storage = Storage(folder)
        self.trials: dict[int, Trial] = {}
        self.order: list[tuple[int, dict[str, Any]]] = []  # every report, in the order in which they came
        self._lines: list[str] = []
        self.head = self._open(name, json.loads(json.dumps(about, default=str)))
        for event in self._events():
            self._apply(event)

    def _open(self, name: str, about: dict[str, Any]) -> dict[str, Any]:
        try:
            head = json.loads(self.storage.read_bytes("sweep.json"))
        except FileNotFoundError:
            if self.storage.exists("run.json"):
                raise UserError(f"{self.storage.url} holds a run, not a sweep: use another name") from None
            return {"name": name, "uid": uuid.uuid4().hex, "created": time.time(), "about": about}
        except ValueError as error:
            raise UserError(f"{self.storage.url}/sweep.json is damaged ({error}): use another name") from error
        if (key := _first_difference(_of_today(head["about"]), _of_today(about))) is not None:
            raise UserError(
                f"the sweep {name!r} in {self.storage.url} was begun with another {key}: run it as it was, or give "
                "this one a name of its own (name=…)"
            )
        return head

    def save_head(self, **more: Any) -> None:
        self.head |= more
        self.storage.write_bytes("sweep.json", json.dumps(self.head, indent=1, default=str).encode())

    # --- events -------------------------------------------------------------------------------------------------

    def begin(self, index: int, name: str, values: dict[str, Any]) -> Trial:
        """A trial starts, or starts again (population-based training changes its values on the way)."""
        self._append({"event": "trial", "index": index, "name": name, "values": values, "time": time.time()})
        return self.trials[index]

    def report(self, index: int, report: dict[str, Any]) -> None:
        self._append({"event": "report", "index": index, "report": report})

    def end(self, index: int, status: str, message: str = "") -> None:
        self._append({"event": "end", "index": index, "status": status, "message": message, "time": time.time()})

    def _append(self, event: dict[str, Any]) -> None:
        self._apply(json.loads(json.dumps(event, default=float)))
        line = json.dumps(event, default=float) + "\n"
        if self.storage.is_local:
            self.storage.make()
            with (self.storage.local_path / "ledger.jsonl").open("a") as file:
                file.write(line)
        else:  # object stores do not append
            self._lines.append(line)
            self.storage.write_bytes("ledger.jsonl", "".join(self._lines).encode())

    def _apply(self, event: dict[str, Any]) -> None:
        index = event["index"]
        if event["event"] == "trial":
            trial = self.trials.setdefault(index, Trial(index, event["name"], event["values"]))
            trial.values, trial.starts = event["values"], trial.starts + 1
        elif event["event"] == "report":
            self.trials[index].reports.append(event["report"])
            self.order.append((index, event["report"]))
        elif event["event"] == "end":
            self.trials[index].status, self.trials[index].message = event["status"], event["message"]

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            text = self.storage.read_bytes("ledger.jsonl").decode(errors="replace")
        except FileNotFoundError:
            return
        if text and not text.endswith("\n") and self.storage.is_local:
            with (self.storage.local_path / "ledger.jsonl").open("a") as file:
                file.write("\n")  # so that our first line is not glued to what a dying driver left
        for line in text.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            self._lines.append(line + "\n")
            yield event

    # --- looking ------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> list[Trial]:
        return [trial for trial in self.trials.values() if trial.ended]

    @property
    def under_way(self) -> list[Trial]:
        return [trial for trial in self.trials.values() if not trial.ended]


def _of_today(about: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of configuration keys that this version has and the one that wrote it had not."""
    from app.config_io import from_dict, to_dict

    try:
        whole = to_dict(from_dict(about["experiment"], source="a sweep that was begun"))
    except (KeyError, UserError):  # it has keys that are gone, which is then what is said
        return about
    filled = {key: value for key, value in whole.items() if key in about["experiment"]}
    return {**about, "experiment": json.loads(json.dumps(filled, default=str))}


def _first_difference(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> str | None:
    for key in [*before, *(k for k in now if k not in before)]:
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if (inner := _first_difference(a, b, f"{prefix}{key}.")) is not None:
                return inner
        elif a != b:
            return f"{prefix}{key} ({a!r}, and now {b!r})".removeprefix("experiment.")
    return None
