"""`trireme scale`: measures an experiment at several numbers of workers and says what more of them would bring."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.config import Config
from app.config_io import flatten, to_dict, to_yaml, with_values
from app.console import Console
from app.errors import Interrupted, UserError
from app.masking import mask_tree
from app.run.manifest import run_folder
from app.storage import Storage
from app.tracking.settings import resolve_tracking, ui_command
from app.tracking.tracker import Tracker
from experiments.scale import fits
from experiments.scale.plan import MEASURES, Plan, check, point_of, predicted, times_of


@dataclass
class Outcome:
    """What became of `trireme scale`; `--json` prints it."""

    status: str
    study: str
    folder: str
    points: list[dict[str, Any]]
    laws: dict[str, Any]
    verdicts: dict[str, str]
    page: str
    mlflow: dict[str, Any] = field(default_factory=dict)


def scale(config: Config, plan: Plan, console: Console, *, verbose: bool = False) -> Outcome:
    """Measures what is not measured yet, fits, writes the page.

    Raises:
        UserError: before anything starts.
        RunFailed: a point could not be measured.
    """
    from app.run.prepare import read_task

    check(config, plan)
    console.status("reading the data")
    kind = "weak" if plan.weak else "strong"
    task = read_task(config)
    for strategy, workers in plan.keys:  # what is wrong with a point is said now
        point_of(config, plan, task, strategy, workers)
    config = with_values(config, {"run.name": f"{config.run.name}-{kind}-scaling"})
    folder = run_folder(config)
    if not folder.is_local:
        raise UserError(f"run.storage is {config.run.storage}, but a study is kept in a folder: write a local path")
    folder.check_writable()
    with contextlib.nullcontext() if verbose else console.capture(folder.local_path / "logs" / "study.log"):
        return _Study(config, plan, task, folder, console).do()


class _Study:
    def __init__(self, config: Config, plan: Plan, task: Any, folder: Storage, console: Console) -> None:
        self.config, self.plan, self.task, self.folder, self.console = config, plan, task, folder, console
        self.settings = resolve_tracking(config.tracking, folder.url.rsplit("/", 1)[0])
        self.head = self._open()

    # --- what is kept -----------------------------------------------------------------------------------------------

    def _open(self) -> dict[str, Any]:
        """The study as it was left, where it is the same study."""
        tree = to_dict(self.config)
        about = {key: tree[key] for key in tree if key not in ("run", "tracking", "fault", "checkpoint")}
        about = json.loads(json.dumps({"experiment": about, "weak": self.plan.weak, "measures": MEASURES}, default=str))
        try:
            head = json.loads(self.folder.read_bytes("study.json"))
            if head["about"] == about:
                return head
        except (FileNotFoundError, ValueError, KeyError):
            pass
        return {
            "name": self.config.run.name,
            "uid": uuid.uuid4().hex,
            "created": time.time(),
            "about": about,
            "points": [],
        }

    def _save(self) -> None:
        self.folder.write_bytes("study.json", json.dumps(self.head, indent=1, default=str).encode())

    # --- the work ---------------------------------------------------------------------------------------------------

    def do(self) -> Outcome:
        self.console.status("starting Ray")
        tracker = self._tracker()
        status, message = "FAILED", ""
        try:
            self._measure(tracker)
            self.head["laws"], self.head["verdicts"] = self._conclude()
            self._save()
            page = self._page()
            self._tell(tracker, page)
            status = "FINISHED"
        except (Interrupted, KeyboardInterrupt) as error:
            status, message = "KILLED", str(error)
            raise Interrupted("stopped: run the same command again to measure what is left") from None
        except BaseException as error:
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise
        finally:
            delivery = tracker.finish(status, message=message, timeout=self.config.tracking.flush_timeout)
        self.console.say(f"  stored    {self.folder.url}")
        self.console.say(f"  page      {page}")
        if self.config.tracking.enabled:
            self.console.say(f"  MLflow    {ui_command(self.settings)}")
        mlflow = {"run_id": delivery.run_id, "url": delivery.url, "complete": delivery.complete}
        points, laws = self.head["points"], self.head["laws"]
        return Outcome(
            "finished", self.head["name"], self.folder.url, points, laws, self.head["verdicts"], str(page), mlflow
        )

    def _tracker(self) -> Tracker:
        tracker = Tracker(
            self.folder.local_path / "tracking",
            self.settings,
            run_name=self.head["name"],
            run_uid=self.head["uid"],
            enabled=self.config.tracking.enabled,
            tags={"trireme.kind": "scaling study", **self.config.tracking.tags},
        )
        tracker.start()
        tracker.params(flatten(to_dict(self.config)))
        tracker.text(to_yaml(mask_tree(to_dict(self.config))), "config.yaml")
        return tracker

    def _measure(self, tracker: Tracker) -> None:
        from app.launchers import PRELOAD
        from cluster.connect import connect, disconnect
        from cluster.files import connected
        from cluster.pending import check_feasible

        self._save()
        cluster = connect(PRELOAD)
        try:
            gpu = cluster.gpus >= max(self.plan.workers)
            per_worker = dict(self.config.resources_per_worker) or ({"GPU": 1.0} if gpu else {"CPU": 1.0})
            check_feasible(connected(private=cluster.started_here), max(self.plan.workers), per_worker)
            jobs = {key: self._prepared(*key) for key in self.plan.keys}
            self.head["price"] = self._price(per_worker)
            for number in range(self.plan.repeats):
                keys = self.plan.keys if number % 2 == 0 else self.plan.keys[::-1]  # so that drift cancels
                for strategy, workers in keys:
                    if not self._has(strategy, workers, number):
                        self._point(jobs[strategy, workers], strategy, workers, number, per_worker, tracker)
        finally:
            disconnect()

    def _has(self, strategy: str, workers: int, number: int) -> bool:
        wanted = (strategy, workers, number)
        return any((p["strategy"], p["workers"], p["repeat"]) == wanted for p in self.head["points"])

    def _price(self, per_worker: dict[str, float]) -> float | None:
        """Of one worker for an hour: as given, else as the cluster's file or the list of prices says."""
        from app.run.cost import Prices

        if self.plan.price is not None:
            return self.plan.price
        known = Prices(self.config).rate(1, per_worker)
        return known.dollars_per_hour if known else None

    def _prepared(self, strategy: str, workers: int) -> Callable[[], Any]:
        """What makes the job of a point."""
        from app.job import Job

        config, prepared = point_of(self.config, self.plan, self.task, strategy, workers)
        samples, seconds = prepared.steps * config.train.global_batch_size, predicted(config, self.task, prepared)
        known = {"layout": str(prepared.layout), "samples": samples, "predicted": seconds}

        def make() -> tuple[Any, Path, dict[str, Any]]:
            from experiments.scale.point import steps_of

            attempt = uuid.uuid4().hex[:8]
            scratch = self.folder.local_path / f".point-{attempt}"  # where checkpoints of a run would be
            steps = steps_of((self.plan.blocks, self.plan.steps))
            job = Job(config, prepared.layout, str(scratch), attempt, "scale", steps, os.getcwd(), may_rebalance=False)
            return job, scratch, known

        return make

    def _point(
        self, make: Any, strategy: str, workers: int, number: int, per_worker: dict[str, float], tracker: Tracker
    ) -> None:
        from experiments.scale import point
        from experiments.scale.parts import measured

        self.console.status(f"measuring {strategy} on {workers} workers, {number + 1} of {self.plan.repeats}")
        job, scratch, known = make()
        # Without a lease no checkpoint is committed.
        lease = {"attempt": job.attempt, "host": "", "pid": os.getpid(), "process_started": 0.0, "time": time.time()}
        Storage(f"{scratch}/together").write_bytes("lease.json", json.dumps(lease).encode())
        try:
            told = point.run(job, workers, per_worker, (self.plan.blocks, self.plan.steps))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        found, batch = measured(told, job.config), job.config.train.global_batch_size
        entry = {"strategy": strategy, "workers": workers, "repeat": number, "batch": batch, **asdict(found)}
        self.head["points"].append(entry | known)
        self._save()
        parts = {"step": found.step, "computing": found.computing, "bubble": found.bubble, "data": found.data}
        parts |= {"checkpoint": found.stall, "balance": found.balance}
        if found.communication is not None:
            parts["communication"] = found.communication
        tracker.metrics(number, {f"scale/{strategy}/{workers}/{name}": value for name, value in parts.items()})
        shown = f"{1e3 * found.step:.1f} ms per step, {batch / found.step:,.0f} samples/s"
        self.console.say(f"{strategy}, {workers} worker{'s' if workers > 1 else ''}, {number + 1}: {shown}")
        unknown = f"what {strategy} sends could not be measured ({told[0].unknown})" if told[0].unknown else ""
        for note in filter(None, (found.why, unknown)):
            self.console.say(f"  note: {note}")

    # --- what it means ------------------------------------------------------------------------------------------------

    def _conclude(self) -> tuple[dict[str, Any], dict[str, str]]:
        laws: dict[str, Any] = {}
        verdicts: dict[str, str] = {}
        for strategy in self.plan.strategies:
            times = times_of(self.head["points"], strategy)
            found = fits.fit_laws(times, self.plan.weak)
            if not found:
                verdicts[strategy] = "Without a point of one worker nothing is fitted: add 1 to --workers."
                self.console.say(f"  {strategy}: {verdicts[strategy]}")
                continue
            usl = found[-1]
            one = next(p for p in self.head["points"] if (p["strategy"], p["workers"]) == (strategy, 1))
            steps = one["samples"] / one["batch"]
            verdicts[strategy] = fits.verdict(usl, times, self.plan.weak)
            laws[strategy] = {
                "laws": [asdict(law) for law in found],
                "forecast": [asdict(f) for f in fits.forecast(usl, times, self.plan.weak, steps)],
                "most_useful": fits.most_useful(usl),
            }
            self._say(strategy, times, verdicts[strategy])
        return laws, verdicts

    def _say(self, strategy: str, times: dict[int, list[float]], verdict: str) -> None:
        for n, gain in fits.throughput(times, self.plan.weak).items():
            self.console.say(
                f"  {strategy} on {n}: {1e3 * statistics.median(times[n]):.1f} ms per step, speed-up {gain:.2f}, "
                f"efficiency {gain / n:.0%}"
            )
        self.console.say(f"  {strategy}: {verdict}")

    def _page(self) -> Path:
        from experiments.report.build import write
        from experiments.scale import page

        return write(self.folder.local_path, page.content(self.head, self.folder.local_path))

    def _tell(self, tracker: Tracker, page: Path) -> None:
        for strategy, found in self.head["laws"].items():
            values = {f"{law['name']}_{k}": v[0] for law in found["laws"] for k, v in law["parameters"].items()}
            tracker.metrics(0, {f"scale/{strategy}/{key}": value for key, value in values.items()})
        tracker.tags({f"trireme.verdict.{s}": text for s, text in self.head["verdicts"].items()})
        tracker.artifact(page)
        tracker.artifact(self.folder.local_path / "study.json")
