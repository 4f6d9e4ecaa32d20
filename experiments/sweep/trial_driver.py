"""A trial's driver: the driver of every run, that also reports to Tune and is stopped by it."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import checkpoint
from app.config import Config
from app.errors import UserError
from app.lease import read_lease
from app.run.driver import Driver
from app.run.manifest import Run, run_folder
from app.run.prepare import Prepared
from app.tracking.tracker import Delivery, Tracker
from experiments.sweep.tracking import STOP_FILE, LogConsole

if TYPE_CHECKING:
    from experiments.sweep.trial import Session

REACHED = "the target is reached"
"""Why a trial is stopped that has done what it was for: its run counts as finished."""


class TrialDriver(Driver):
    """Evaluations become reports; metrics go to the spool only; signals are the sweep's business."""

    def __init__(self, run: Run, session: Session, prepared: Prepared) -> None:
        setting = session.setting
        super().__init__(run, prepared.config, LogConsole(run.local_folder / "logs" / "driver.log"), setting.settings)
        self.session, self.prepared = session, prepared
        self.metric = setting.sweep.metric
        self.why = ""
        self.stop_file = Path(setting.folder) / STOP_FILE
        self.loop_began = 0.0
        self.latest: dict[str, float] = {}
        tags = {"trireme.sweep": setting.sweep.name, "trireme.trial": str(session.index)}
        self.tracker = self.trial_tracker = TrialTracker(
            run.local_folder / "tracking",
            setting.settings,
            run_name=run.manifest.name,
            run_uid=run.manifest.uid,
            enabled=run.config.tracking.enabled,
            tags={**run.config.tracking.tags, **tags},
            parent=Path(setting.folder) / "tracking",
        )

    def ask_to_stop(self, why: str) -> None:
        """Saves and stops, for this reason."""
        self.why = self.why or why
        self.trial_tracker.why = self.why
        self.stopping = max(self.stopping, 1)

    def stop_requested(self) -> bool:
        if not self.stopping and self.stop_file.exists():
            self.ask_to_stop("the sweep was stopped")
        return super().stop_requested()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        yield

    def _on_start(self, event: dict[str, Any]) -> None:
        super()._on_start(event)
        self.loop_began = event["time"]

    def _on_metrics(self, event: dict[str, Any]) -> None:
        super()._on_metrics(event)
        self.latest |= event["values"]
        if self.metric in event["values"] or any(name.startswith("eval/") for name in event["values"]):
            train = self.run.config.train
            self.session.say(
                step=event["step"],
                samples=event["step"] * train.global_batch_size,
                seconds=max(0.0, event["time"] - self.loop_began) if self.loop_began else 0.0,
                metrics=dict(self.latest),
                steps=self.prepared.steps,
                first_step=(self.first_step_at or time.time()) - self.session.began,
                workers=self.prepared.layout.dims.world_size,
            )


class TrialTracker(Tracker):
    """Ends a run whose target is reached as finished, and says who stopped the others."""

    why = ""

    def finish(self, status: str, *, message: str = "", timeout: float = 15.0) -> Delivery:
        if self.why and status == "KILLED":
            status, message = ("FINISHED" if self.why == REACHED else status), f"{self.why}: {message}"
        return super().finish(status, message=message, timeout=timeout)


def wait_for_lease(run: Run, seconds: float) -> None:
    """Waits until an earlier start of this trial is gone: Ray takes a moment to end the processes of a dead driver.

    Raises:
        UserError: it is still there.
    """
    until = time.monotonic() + seconds
    while read_lease(run.storage) is not None:
        try:
            run.refuse_if_held(lambda text: None)
            return
        except UserError:
            if time.monotonic() > until:
                raise
        time.sleep(0.2)


def checkpoint_at(config: Config, step: int, seconds: float = 20.0) -> dict[str, Any]:
    """Where a trial's checkpoint of that step is, or the last before it; waits for one that is being written."""
    folder = f"{run_folder(config).url}/checkpoints"
    until = time.monotonic() + seconds
    while True:
        good = [commit for commit in checkpoint.commits(folder) if not checkpoint.verify(commit, by="size")]
        if any(commit.step >= step for commit in good) or time.monotonic() > until:
            break
        time.sleep(0.1)
    if not good:
        return {"run": config.run.name, "folder": "", "step": 0}
    commit = next((commit for commit in good if commit.step <= step), good[-1])
    return {"run": config.run.name, "folder": commit.path, "step": commit.step}


def take_over(run: Run, pointer: dict[str, Any]) -> None:
    """Replaces a trial's checkpoints by a copy of another's: weights, optimizer, position in the data.

    Raises:
        UserError: that checkpoint is no longer there.
    """
    if not run.storage.is_local:
        raise UserError("scheduler pbt copies checkpoints between trials, which needs run.storage to be a folder")
    source = Path(pointer["folder"])
    own = run.storage.local_path / "checkpoints"
    fresh = own.with_name(".taken-over")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        shutil.copytree(source, fresh / source.name)
    except OSError as error:
        raise UserError(f"the checkpoint {source} cannot be copied: {error}") from error
    shutil.rmtree(own, ignore_errors=True)
    fresh.rename(own)
    run.manifest.status = "stopped"  # it may have come to its end before it was to become another
