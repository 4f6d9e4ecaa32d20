"""Launcher: Ray Train's TorchTrainer starts the workers, watches them, and sets up their process group.

Events go through `inbox.py`. Checkpoints are ours too, so a restart is a new worker group that finds the newest commit
by itself.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchConfig

from app.errors import Interrupted
from app.job import Job, Place
from app.launchers import answers, flight
from app.launchers.elastic import Elastic
from app.launchers.failure_policy import Kind
from app.launchers.inbox import InboxChannel, hear, open_inbox, work
from app.launchers.member import kill_at
from app.launchers.restart import Failures, NoRoom, WorkerLost, until_done
from app.launchers.room import selector
from app.launchers.trainer import Trainer
from app.launchers.unheard import Unheard
from app.launchers.watching import Stuck, Watching, gather
from app.run.driver import Driver
from app.storage import Storage

POLL_SECONDS = 0.1
END_SECONDS = 10.0


def worker_main(loop: dict[str, Any]) -> None:
    """What every Ray Train worker runs."""
    from ray.train import get_context
    from ray.train.torch import get_device

    context = get_context()
    place = Place(context.get_world_rank(), context.get_world_size(), context.get_local_rank(), get_device())
    channel = InboxChannel(loop["inbox"], place.rank)
    answers.NOW.begin(channel)
    work(loop["job"], place, channel, context.get_node_rank())


def launch(
    job: Job, driver: Driver, *, workers: int, per_worker: dict[str, float], elastic: Elastic | None = None
) -> None:
    """Trains, starting the workers again after a failure as long as `app.launchers.failure_policy.decide` says so.

    elastic: how to go on with other numbers of workers; None: it stays `workers`.
    Raises: see `app.launchers.restart.until_done`.
    """
    assert workers == job.layout.dims.world_size
    until_done(job, driver, lambda job, number: _attempt(job, driver, per_worker, number, elastic), elastic)


def _attempt(job: Job, driver: Driver, per_worker: dict[str, float], number: int, elastic: Elastic | None) -> Failures:
    """One worker group's life, and what ended it."""
    inbox = open_inbox()
    trainer = _trainer(job, inbox, per_worker, number, grows=elastic is None or elastic.growing)
    ended: list[BaseException | None] = []

    def fit() -> None:
        try:
            trainer.fit()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=fit, daemon=True, name="fit")
    watching = Watching(job.config, lambda what: _ask(what, driver))
    unheard = Unheard(job.config.fault.hang_seconds)
    stuck: dict[int | None, BaseException] = {}
    thread.start()
    try:
        while thread.is_alive():
            if hear(inbox, driver):
                watching.heard()
            driver.check_start()
            _end_unheard(unheard, driver)
            if not stuck and not driver.summary and (found := watching.look()):
                stuck = _end_stuck(found, watching, driver)
            if elastic is not None and not _keeps_size(job, driver, elastic):
                _end(thread, trainer, inbox, driver)
                return {None: NoRoom("the workers' places have not come back")}
            thread.join(POLL_SECONDS)
        hear(inbox, driver)
    except Interrupted:
        _end(thread, trainer, inbox, driver)
        raise
    finally:
        ray.kill(inbox)
    if ended[0] is not None and unheard.ended and not driver.progressed:
        stuck = {None: WorkerLost(unheard.ended[0], Kind.HUNG)}
    return stuck if stuck and ended[0] is not None else failures(ended[0])


def _end_unheard(unheard: Unheard, driver: Driver) -> None:
    """Ends workers that are stopped while they start."""
    if driver.progressed:
        return
    known = driver.whereabouts.ranks.values()
    for sentence in unheard.look({(where.node, where.pid) for where in known}):
        driver.console.say(f"{sentence}; ending it")


def _keeps_size(job: Job, driver: Driver, elastic: Elastic) -> bool:
    """Looks for room for more workers while training goes on, and whether there still is some for those that start."""
    if driver.starting:
        return not elastic.lacks(job)
    if driver.more is None:
        driver.more = elastic.more(job)
    return True


def _trainer(job: Job, inbox: Any, per_worker: dict[str, float], number: int, *, grows: bool) -> Trainer:
    use_gpu = per_worker.get("GPU", 0) > 0
    where: dict[str, Any] = {"label_selector": selector(job.config.cluster.exclude_nodes)}
    return Trainer(
        worker_main,
        train_loop_config={"job": job, "inbox": inbox},
        scaling_config=ScalingConfig(
            num_workers=job.layout.dims.world_size,
            use_gpu=use_gpu,
            resources_per_worker=per_worker,
            **where,
        ),
        run_config=RunConfig(name=f"{job.attempt}-{number}", storage_path=_train_folder(job.folder)),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
        grows=grows,
    )


def _ask(what: str, driver: Driver) -> dict[int, Any]:
    """Asks every worker's actor, whose own thread is free while another one trains. Nothing where one is known to be
    dead: Ray Train will end the others."""
    question = {"beat": answers.beat, "stack": answers.stack, "flight": flight.record}[what]
    calls = {rank: where.actor.execute.remote(question) for rank, where in driver.whereabouts.ranks.items()}
    found = gather(calls)
    silent = [calls[rank] for rank, answer in found.items() if answer is None]
    return {} if any(_is_dead(call) for call in silent) else found


def _is_dead(call: Any) -> bool:
    try:
        ray.get(call, timeout=0)
    except ray.exceptions.RayActorError:
        return True
    except ray.exceptions.RayError:
        return False
    return False


def _end_stuck(found: Stuck, watching: Watching, driver: Driver) -> dict[int | None, BaseException]:
    """Keeps where everybody stands with the run, and kills those that hold it up: Ray Train then ends the others."""
    ranks = driver.whereabouts.ranks
    driver.lost()
    watching.keep(driver, lambda rank: str(ranks[rank]))
    for rank in {found.rank} | found.dumb:
        kill_at(ranks[rank].node, ranks[rank].pid)
    return {found.rank: WorkerLost(f"{ranks[found.rank]} {found.why}", Kind.HUNG)}


def _end(thread: threading.Thread, trainer: Trainer, inbox: Any, driver: Driver) -> None:
    """Ends workers that are still starting."""
    trainer.end()
    thread.join(END_SECONDS)
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
