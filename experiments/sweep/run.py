"""`trireme sweep`: from a sweep file to its trials, its answer, and its page; run again, it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.config_io import flatten, to_yaml
from app.console import Console, duration
from app.errors import Interrupted, RunFailed, UserError
from app.masking import mask_uri
from app.run.manifest import run_folder
from app.storage import Storage
from app.tracking.settings import Settings, resolve_tracking, ui_command
from app.tracking.spool import State, take_lock
from app.tracking.tracker import Tracker
from experiments.sweep.ledger import Ledger, Trial
from experiments.sweep.spec import Sweep
from experiments.sweep.tracking import STOP_FILE, report

if TYPE_CHECKING:
    from experiments.sweep.ready import Ready


@dataclass
class Outcome:
    """What became of `trireme sweep`; `--json` prints it."""

    status: str  # finished
    sweep: str
    folder: str
    best: dict[str, Any] | None
    trials: dict[str, int]  # how many ended in which way
    recommendation: dict[str, Any] | None
    page: str
    mlflow_run_id: str | None


def sweep(found: Sweep, console: Console, *, verbose: bool = False) -> Outcome:
    """Runs what is left of a sweep, and says what was learnt.

    Raises:
        UserError: nothing was started, or the sweep cannot go on with what it was given.
        RunFailed: no trial succeeded.
        Interrupted: stopped by Ctrl-C or SIGTERM; running trials have saved.
    """
    own = replace(found.base.run, name=found.name)
    base = replace(found.base, run=own)
    folder = run_folder(base)
    if not folder.is_local:
        raise UserError(
            f"run.storage is {found.base.run.storage}, but a sweep keeps its ledger in a folder: write a local path or "
            "one on NFS"
        )
    folder.check_writable()
    ledger = Ledger(folder.url, found.name, found.about())
    settings = resolve_tracking(found.base.tracking, Storage(base.run.storage))
    with _only_one(folder.local_path):
        log = folder.local_path / "logs" / "sweep.log"
        with contextlib.nullcontext() if verbose else console.capture(log):
            return _Work(found, ledger, folder, settings, console).do()


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    lock = take_lock(folder, "sweep")
    if lock is None:
        raise UserError(f"the sweep in {folder} is being run by another process: wait for it, or give this one a name")
    try:
        yield
    finally:
        os.close(lock)


class _Work:
    """One start of a sweep."""

    def __init__(self, found: Sweep, ledger: Ledger, folder: Storage, settings: Settings, console: Console) -> None:
        self.sweep, self.ledger, self.folder, self.settings, self.console = found, ledger, folder, settings, console
        self.began = time.monotonic()
        self.asked_to_stop = False
        self.overseer: Any = None

    def do(self) -> Outcome:
        count, name = self.sweep.count, self.sweep.name
        over = len(self.ledger.ended) >= count
        if over and self.ledger.head.get("answered"):
            self.console.say(f"all {count} trials of {name} have ended already; here is the answer")
            return self._answer(None)
        from experiments.sweep.ready import ENVIRONMENT, make_ready

        os.environ.update(ENVIRONMENT)
        setup = None if over else make_ready(self.sweep, self.ledger, self.console)
        tracker = self._begin_tracking()
        status, message = "FAILED", ""
        try:
            if setup is not None:
                self._tune(setup)
            outcome = self._answer(tracker)
            self.ledger.save_head(answered=True)
            status, message = "FINISHED", f"{len(self.ledger.ended)} trials"
            return outcome
        except (Interrupted, KeyboardInterrupt) as error:
            status, message = "KILLED", str(error) or "stopped at once"
            raise Interrupted(message) from None
        except BaseException as error:
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise
        finally:
            self._end_tracking(tracker, status, message)
            from cluster.connect import disconnect

            disconnect()

    # --- tracking ---------------------------------------------------------------------------------------------------

    def _begin_tracking(self) -> Tracker:
        head = self.ledger.head
        self.ledger.save_head()
        tracker = Tracker(
            self.folder.local_path / "tracking",
            self.settings,
            run_name=self.sweep.name,
            run_uid=head["uid"],
            enabled=self.sweep.base.tracking.enabled,
            tags={"trireme.kind": "sweep", **self.sweep.base.tracking.tags},
        )
        tracker.start()
        about = {key: value for key, value in head["about"].items() if key != "experiment"}
        tracker.params(flatten({"sweep": about}))
        tracker.text(to_yaml(self.sweep.base), "experiment.yaml")
        return tracker

    # --- during ---------------------------------------------------------------------------------------------------

    def _tune(self, setup: Ready) -> None:
        from ray import tune

        from experiments.sweep.oversee import Overseer
        from experiments.sweep.trial import NAME, Setting, TrialProcess, tune_resources

        sweep, at_once = self.sweep, setup.at_once
        os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(at_once)
        shown = replace(self.settings, uri=mask_uri(self.settings.uri))
        uid, command = self.ledger.head["uid"], tuple(sys.argv)
        setting = Setting(sweep, self.folder.url, shown, uid, setup.gpus, os.getcwd(), command)
        self.overseer = Overseer(sweep, self.ledger, setup.scheduler, self._said)

        def resources(config: dict[str, Any]) -> Any:
            values = {key: value for key, value in config.items() if not key.startswith("_")}
            return tune.PlacementGroupFactory([tune_resources(sweep, values, setup.gpus)])

        left = sweep.count - len(self.ledger.ended)
        done = f", {len(self.ledger.ended)} of them have ended already" if self.ledger.ended else ""
        self.console.say(f"sweeping {sweep.name}: {sweep.count} trials{done}; {min(at_once, left)} at once")
        assert NAME.startswith("_")
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(TrialProcess, setting=setting), resources),
            tune_config=tune.TuneConfig(
                search_alg=setup.searcher, scheduler=self.overseer, num_samples=-1, reuse_actors=True
            ),
            run_config=tune.RunConfig(
                name=".tune",
                storage_path=self.folder.url,
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=min(1, sweep.base.fault.max_restarts)),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )
        (self.folder.local_path / STOP_FILE).unlink(missing_ok=True)
        with self._signals(setup):
            try:
                tuner.fit()
            except (UserError, Interrupted):
                raise
            except Exception as error:
                if not self.asked_to_stop and self.overseer.problem is None:
                    raise RunFailed(f"Ray Tune gave up: {str(error).strip().splitlines()[-1]}") from error
        self.folder.remove_tree(".tune")
        self._bury()
        if self.overseer.problem is not None:
            raise self.overseer.problem
        if self.asked_to_stop:
            raise Interrupted(
                f"stopped with {len(self.ledger.ended)} of {sweep.count} trials ended: run the same command again to "
                "go on"
            )

    @contextlib.contextmanager
    def _signals(self, setup: Ready) -> Iterator[None]:
        """Ctrl-C and SIGTERM: Tune stops its trials, each of which saves; a second one ends everything at once."""

        def ask(number: int, frame: object) -> None:
            if self.asked_to_stop:
                raise KeyboardInterrupt
            self.asked_to_stop = self.overseer.stopped = True
            self.console.say("stopping: running trials save a checkpoint first (once more to stop at once)")
            setup.searcher.over = True
            (self.folder.local_path / STOP_FILE).touch()  # trials look whether it is there

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _bury(self) -> None:
        """Trials whose process died could not say so: their runs, in MLflow and in their folders, end as failed."""
        for trial in self.ledger.ended:
            run = self.folder.join(trial.name)
            if not trial.message.startswith("its process died") or not run.exists("run.json"):
                continue
            manifest = json.loads(run.read_bytes("run.json"))
            if manifest["status"] != "failed":
                run.write_bytes("run.json", json.dumps({**manifest, "status": "failed"}, indent=1).encode())
                run.remove("lease.json")
                report(run.local_path / "tracking", {"type": "finish", "status": "FAILED", "message": trial.message})

    def _said(self, trial: Trial, what: str) -> None:
        """Something new of a trial: one line."""
        sweep, ended = self.sweep, len(self.ledger.ended)
        if what and what != "stopped":
            last = trial.last.get("metrics", {}).get(sweep.metric)
            value = f"{sweep.metric} {last:.4g}" if last is not None else "no report"
            how = "" if trial.status == "finished" else f" ({trial.message or trial.status})"
            passed = time.monotonic() - self.began
            self.console.say(f"{ended}/{sweep.count}  {trial.name}: {value}{how}  {duration(passed)}")
        else:
            best = best_trial(sweep, self.ledger)
            if best is not None:
                self.console.status(
                    f"{ended}/{sweep.count} trials; best {sweep.metric} {best[1]:.4g} by {best[0].name}"
                )

    # --- after ----------------------------------------------------------------------------------------------------

    def _answer(self, tracker: Tracker | None) -> Outcome:
        from experiments.sweep import answer

        best = best_trial(self.sweep, self.ledger)
        counts = {
            status: sum(trial.status == status for trial in self.ledger.trials.values())
            for status in ("finished", "reached", "pruned", "failed")
        }
        if best is None:
            first = next((trial.message for trial in self.ledger.ended if trial.message), "no reason known")
            raise RunFailed(f"no trial of {self.sweep.name} gave a finite {self.sweep.metric}; the first said: {first}")
        found = answer.work_out(self.sweep, self.ledger)
        page = answer.write(self.sweep, self.ledger, found, self.folder.local_path)
        if tracker is not None:
            self._tell_mlflow(tracker, best, found, page)
        for line in found.sentences:
            self.console.say(f"  {line}")
        self.console.say(f"  next      trireme train {self.folder.local_path / answer.NEXT}")
        self.console.say(f"  stored    {self.folder.url}")
        self.console.say(f"  page      {page}")
        if self.sweep.base.tracking.enabled:
            self.console.say(f"  MLflow    {ui_command(self.settings)}")
        run_id = State.load(self.folder.local_path / "tracking").run_id
        shown = {"trial": best[0].name, "values": best[0].values, self.sweep.metric: best[1]}
        return Outcome(
            "finished", self.sweep.name, self.folder.url, shown, counts, found.recommended, str(page), run_id
        )

    def _tell_mlflow(self, tracker: Tracker, best: tuple[Trial, float], found: Any, page: Path) -> None:
        trial, value = best
        tracker.tags({"trireme.best_trial": trial.name})
        tracker.tags({f"best.{key}": str(v) for key, v in trial.values.items()})
        tracker.metrics(len(self.ledger.ended), {f"best/{self.sweep.metric}": value, **found.figures})
        for other in self.ledger.trials.values():
            spool = self.folder.local_path / other.name / "tracking"
            mark = "true" if other is trial else "false"
            if spool.is_dir() and (other is trial or (spool / "was-best").exists()):
                report(spool, {"type": "tags", "values": {"trireme.best": mark}})
                (spool / "was-best").touch()
        for plot in sorted((self.folder.local_path / "plots").glob("*")):
            tracker.artifact(plot, "plots")
        tracker.artifact(page)
        from experiments.sweep.answer import NEXT

        for name in ("answer.json", NEXT):
            tracker.artifact(self.folder.local_path / name)

    def _end_tracking(self, tracker: Tracker, status: str, message: str) -> None:
        self.console.status("handing the last metrics to MLflow")
        delivery = tracker.finish(status, message=message, timeout=self.sweep.base.tracking.flush_timeout)
        if not delivery.complete:
            self.console.say(
                f"note: some metrics have not reached MLflow yet ({delivery.problem}): run the same command again to "
                "deliver them"
            )


def best_trial(sweep: Sweep, ledger: Ledger) -> tuple[Trial, float] | None:
    """The trial with the best value of the metric at any report, and that value."""
    import math

    found: list[tuple[Trial, float]] = []
    for trial in ledger.trials.values():
        values = [value for _, value in trial.curve(sweep.metric) if math.isfinite(value)]
        if values and trial.status != "failed":
            found.append((trial, min(values) if sweep.mode == "min" else max(values)))
    pick: Callable[..., Any] = min if sweep.mode == "min" else max
    return pick(found, key=lambda pair: pair[1]) if found else None
