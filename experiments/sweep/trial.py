"""One trial: a whole Trireme run, driven from the process in which Ray Tune keeps it.

That process holds the warm workers, and outlives a trial: Tune hands it the next one (`reset_config`). With one worker
it is the worker itself; with more they are an `ActorGroup`, or, cold, those that Ray Train starts. Training goes on in
a thread; `step` waits for its next report.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import tune

from app.config import Config
from app.config_io import with_values
from app.errors import Interrupted, RunFailed, UserError
from app.tracking.settings import Settings
from experiments.sweep.slots import DRIVER, Need, Resources
from experiments.sweep.spec import Sweep

INDEX, NAME = "_trial", "_name"
"""Keys of a Tune configuration that are none of the experiment's."""
VALUE, TIME, REPORT = "value", "at", "report"
"""Names under which schedulers and searchers see the metric and what trials are compared at."""
LEASE_SECONDS = 90.0
"""How long to wait for an earlier start of the same trial to be gone."""


@dataclass(frozen=True)
class Setting:
    """What all trials of a sweep share."""

    sweep: Sweep
    folder: str  # the sweep's, in the storage
    settings: Settings  # of tracking; its URI without a password, since only the deliverer speaks with MLflow
    uid: str
    gpus: bool
    cwd: str
    command: tuple[str, ...] = ()  # the sweep's, which a trial's MLflow run names as its own


def how(config: Config, sweep: Sweep) -> str:
    """Where a trial's workers are: process, group or torchtrainer."""
    if config.launcher == "local":
        return "process"
    if config.launcher == "ray" or (config.launcher == "auto" and not sweep.warm):
        return "torchtrainer"
    return "process" if config.launcher == "auto" and int(config.workers) == 1 else "group"


def need(config: Config, gpus: bool) -> Need:
    """What a trial takes of the cluster."""
    per_worker = dict(config.resources_per_worker) or ({"GPU": 1.0} if gpus else {"CPU": 1.0})
    return Need.of(int(config.workers), per_worker)


def tune_resources(sweep: Sweep, values: dict[str, Any], gpus: bool) -> Resources:
    """What Tune reserves for the trial's process: the worker's share where it is the worker, else nearly nothing."""
    config = sweep.config(values, "trial", "runs")
    if how(config, sweep) != "process":
        return dict(DRIVER)
    return {"CPU": 0.0, **dict(need(config, gpus).per_worker)}


class Session:
    """One start of one trial."""

    def __init__(self, setting: Setting, index: int, name: str, values: dict[str, Any], workers: Workers) -> None:
        self.setting, self.index, self.name, self.values, self.workers = setting, index, name, values, workers
        self.config = setting.sweep.config(values, name, setting.folder)
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self.began = time.time()
        self.thread: threading.Thread | None = None
        self.driver: Any = None
        self.halted = ""  # why, once somebody has asked for it
        self.copy_from: dict[str, Any] | None = None
        self.told = 0  # step of the report that Tune had last
        self.asked = threading.Event()
        # Copying a trial is copying what Tune knows of it: one that is its own worker waits for Tune at every report.
        self.in_step = setting.sweep.scheduler == "pbt" and how(self.config, setting.sweep) == "process"

    def next(self) -> dict[str, Any]:
        """The next report; training begins with the first call."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, daemon=True, name=f"trial-{self.index}")
            self.thread.start()
        if self.reports.empty():
            self.asked.set()
        report = self.reports.get()
        self.told = json.loads(report[REPORT])["step"]
        return report

    def halt(self, why: str) -> None:
        """Saves and stops; returns when the workers are free."""
        self.halted = self.halted or why
        if self.driver is not None:
            self.driver.ask_to_stop(why)
        self.asked.set()
        if self.thread is not None:
            self.thread.join()

    def say(self, **report: Any) -> None:
        self.asked.clear()
        # As one text, since Tune takes nested results apart; and without "done", with which it would ask nobody.
        self.reports.put({REPORT: json.dumps({"start": self.began, "ended": False, **report})})
        while self.in_step and not report.get("ended") and not self.halted and not self.asked.wait(0.1):
            pass

    def _run(self) -> None:
        status, message, summary = "finished", "", dict[str, Any]()
        try:
            summary = self._train()
        except Interrupted as error:
            status, message = "stopped", str(error)
        except Exception as error:
            known = isinstance(error, UserError | RunFailed) or type(error).__name__ in ("LayoutError", "ClusterError")
            first = (str(error).strip().splitlines() or [""])[0]
            status, message = "failed", first if known else f"{type(error).__name__}: {first}"
            self._log_traceback()
        done: dict[str, Any] = {"step": summary.get("step", 0), "metrics": dict(summary.get("metrics", {}))}
        if status == "finished":  # of a run that had finished already, this is all there is
            done |= {"samples": done["step"] * self.config.train.global_batch_size, "steps": done["step"]}
            done["workers"] = int(self.config.workers)
        self.say(ended=True, status=status, message=message, **done)

    def _log_traceback(self) -> None:
        import traceback

        if self.driver is not None:
            self.driver.console.say(traceback.format_exc())

    def _train(self) -> dict[str, Any]:
        import ray

        from app.run.cost import meter_for
        from app.run.lifecycle import train_run
        from app.run.manifest import Run
        from app.run.prepare import prepare
        from experiments.sweep.trial_driver import TrialDriver, take_over, wait_for_lease

        config, sweep = self.config, self.setting.sweep
        each = need(config, self.setting.gpus)
        task = self.workers.task(config)
        prepared = prepare(config, task, each.workers, devices_per_node=None)
        config = prepared.config
        if sweep.reports:
            config = with_values(config, {"train.eval_every": max(1, math.ceil(prepared.steps / sweep.reports))})
        if sweep.scheduler == "pbt":
            every = config.train.eval_every
            config = with_values(config, {"checkpoint.every_steps": every, "checkpoint.keep_last": 4})
        prepared = replace(prepared, config=config)
        self.config = config
        run = Run(config)
        wait_for_lease(run, LEASE_SECONDS)
        if self.copy_from:
            take_over(run, self.copy_from)
        self.driver = driver = TrialDriver(run, self, prepared)
        if self.halted:
            raise Interrupted(self.halted)
        if ray.is_initialized():
            driver.meter = meter_for(config, run.storage, each.workers, dict(each.per_worker))
        kind = "group" if prepared.layout.dims.pp > 1 else how(config, sweep)
        outcome = train_run(driver, prepared, kind, lambda job: self.workers.launch(kind, each, job, driver))
        return outcome.summary


class Workers:
    """The warm workers of a trial process, and what it remembers from trial to trial."""

    def __init__(self) -> None:
        self.tasks: dict[str, Any] = {}

    def task(self, config: Config) -> Any:
        """The task with its data looked at; the last one is kept, since most sweeps have one."""
        from app.run.prepare import read_task

        key = json.dumps([config.task, config.task_args], default=str, sort_keys=True)
        if key not in self.tasks:
            self.tasks = {key: read_task(config)}
        return self.tasks[key]

    def launch(self, kind: str, each: Need, job: Any, driver: Any) -> None:
        """Trains a job to its end."""
        from app.launchers.local import LocalWorkers
        from app.launchers.supervisor import Supervisor

        if kind == "process":
            Supervisor(LocalWorkers(), driver).run(job)
            return
        from app.launchers.actors import ActorWorkers
        from app.launchers.ray_train import RayTrainWorkers
        from app.launchers.ray_workers import ray_nodes
        from cluster.connect import describe

        per_worker = dict(each.per_worker)
        workers: Any
        if kind == "torchtrainer":
            workers = RayTrainWorkers(per_worker)
        else:
            workers = ActorWorkers(per_worker, describe(started_here=False))
        try:
            Supervisor(workers, driver, nodes=ray_nodes()).run(job)
        finally:
            workers.close()

    def close(self) -> None: ...


class TrialProcess(tune.Trainable):
    """What Tune keeps: it is given one trial after another."""

    def setup(self, config: dict[str, Any], setting: Setting | None = None) -> None:
        assert setting is not None
        self.setting = setting
        sys.argv = list(setting.command) or sys.argv
        if os.path.isdir(setting.cwd):
            os.chdir(setting.cwd)
            if setting.cwd not in sys.path:
                sys.path.insert(0, setting.cwd)
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.workers = Workers()
        self.session: Session | None = None
        self._take(config)
        import app.loop  # noqa: F401  what takes seconds, before the first trial begins

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial."""
        assert self.session is not None
        self.session.halt("stopped for the next trial")
        self._take(new_config)
        return True

    def _take(self, config: dict[str, Any]) -> None:
        values = {key: value for key, value in config.items() if key not in (INDEX, NAME)}
        self.session = Session(self.setting, config[INDEX], config[NAME], values, self.workers)

    def step(self) -> dict[str, Any]:
        assert self.session is not None
        return self.session.next()

    def halt(self, why: str) -> None:
        """Asks the trial to stop; called when the scheduler has decided so, and does not wait."""
        if self.session is not None and self.session.driver is not None:
            self.session.driver.ask_to_stop(why)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Population-based training copies trials: what is kept is where the checkpoint of the last report is."""
        from experiments.sweep.trial_driver import checkpoint_at

        assert self.session is not None
        self.session.asked.set()  # the checkpoint comes after the report
        pointer = checkpoint_at(self.session.config, self.session.told)
        (Path(checkpoint_dir) / "pointer.json").write_text(json.dumps(pointer))

    def load_checkpoint(self, checkpoint: Any) -> None:
        pointer = json.loads((Path(str(checkpoint)) / "pointer.json").read_text())
        assert self.session is not None
        if pointer["folder"] and pointer["run"] != self.session.name:
            self.session.copy_from = pointer

    def cleanup(self) -> None:
        if self.session is not None:
            self.session.halt("stopped")
        self.workers.close()
