"""Launcher: Ray Train's TorchTrainer starts the workers, watches them, and sets up their process group.

Events go through `inbox.py`. Checkpoints are ours too, so a restart is a new worker group that finds the newest commit
by itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.execution.callback import ControllerCallback

from app.driver import Driver
from app.errors import Interrupted
from app.job import Job, Place
from app.launchers.inbox import InboxChannel, hear, open_inbox, work
from app.launchers.restart import Failures, until_done
from app.pending import remove_groups_of, selector
from app.storage import Storage

POLL_SECONDS = 0.1
END_SECONDS = 10.0
# Ray Train's controller looks at its workers at this interval, and a group ends no sooner than it looks.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION", "0")


def worker_main(loop: dict[str, Any]) -> None:
    """What every Ray Train worker runs."""
    from ray.train import get_context
    from ray.train.torch import get_device

    context = get_context()
    place = Place(context.get_world_rank(), context.get_world_size(), context.get_local_rank(), get_device())
    work(loop["job"], place, InboxChannel(loop["inbox"], place.rank), context.get_node_rank())


class Introduce(ControllerCallback):
    """Tells the driver who Ray Train's controller is, so that its workers can be ended while they start."""

    def __init__(self, inbox: Any) -> None:
        self.inbox = inbox

    def after_controller_start(self, train_run_context: Any) -> None:
        self.inbox.put.remote([{"type": "controller", "actor": ray.get_runtime_context().current_actor}])


def launch(job: Job, driver: Driver, *, workers: int, per_worker: dict[str, float]) -> None:
    """Trains, starting the workers again after a failure as long as `app.faults.decide` says so.

    Raises: see `app.launchers.restart.until_done`.
    """
    until_done(job, driver, lambda number: _attempt(job, driver, workers, per_worker, number))


def _attempt(job: Job, driver: Driver, workers: int, per_worker: dict[str, float], number: int) -> Failures:
    """One worker group's life, and what ended it."""
    inbox = open_inbox()
    use_gpu = per_worker.get("GPU", 0) > 0
    tell: Any = [Introduce(inbox)]
    where: dict[str, Any] = {"label_selector": selector(job.config.cluster.exclude_nodes)}
    trainer = TorchTrainer(
        worker_main,
        train_loop_config={"job": job, "inbox": inbox},
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=use_gpu,
            resources_per_worker=per_worker,
            **where,
        ),
        run_config=RunConfig(name=f"{job.attempt}-{number}", storage_path=_train_folder(job.folder), callbacks=tell),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
    )
    ended: list[BaseException | None] = []

    def fit() -> None:
        try:
            trainer.fit()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=fit, daemon=True, name="fit")
    driver.controller = None
    thread.start()
    try:
        while thread.is_alive():
            hear(inbox, driver)
            driver.check_start()
            thread.join(POLL_SECONDS)
        hear(inbox, driver)
    except Interrupted:
        _end(thread, inbox, driver)
        raise
    finally:
        ray.kill(inbox)
    return failures(ended[0])


def _end(thread: threading.Thread, inbox: Any, driver: Driver) -> None:
    """Ends workers that are still starting: with their controller, as soon as that has said who it is."""
    until = time.monotonic() + END_SECONDS
    while driver.controller is None and thread.is_alive() and time.monotonic() < until:
        hear(inbox, driver)
        thread.join(POLL_SECONDS)
    if driver.controller is not None:
        ray.kill(driver.controller)
        thread.join(END_SECONDS)
        remove_groups_of(driver.controller._actor_id.hex())
    hear(inbox, driver)  # what this cost


def failures(error: BaseException | None) -> Failures:
    """What Ray Train raised, by rank."""
    if error is None:
        return {}
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        return {rank: getattr(cause, "_base_exc", cause) for rank, cause in error.worker_failures.items()}
    cause = getattr(error, "controller_failure", error)
    return {None: getattr(cause, "_base_exc", cause)}


def clean_up(folder: str) -> None:
    """Removes what Ray Train left in the run's folder; nothing of it is needed again."""
    with contextlib.suppress(OSError):
        Storage(_train_folder(folder)).remove_tree()


def _train_folder(folder: str) -> str:
    """Where Ray Train keeps its own few files; every node must see it, so it is in the run's folder."""
    return f"{folder}/.ray_train"
