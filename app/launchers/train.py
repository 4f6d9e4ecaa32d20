"""`trireme train`: from a configuration to a finished, resumed, stopped or failed run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from app import names
from app.config import Config
from app.config.check import check_trainable
from app.console.terminal import Console, log_labels
from app.errors import UserError
from app.run.manifest import Outcome, Run, under_free_name
from app.tracking.settings import Settings, resolve_tracking
from cluster.environment import set_defaults

if TYPE_CHECKING:
    from app.launchers.workers import Workers
    from app.tasks.base import Task


def train(
    config: Config,
    console: Console,
    *,
    again: bool = False,
    take_over: bool = False,
    verbose: bool = False,
    restart: Callable[[], object] | None = None,
) -> Outcome:
    """Trains until done, continuing where an earlier call of the same run stopped.

    again: when the run has finished, train it once more under a new name, instead of saying that it has.
    take_over: from another start that trains this run now, which then ends.
    restart: begins this program anew in place of this process, for when its own Ray is gone; None: the run then ends.
    verbose: leave everything on the terminal that Ray and others print.
    Raises:
        UserError: nothing was started, or what was started cannot continue with these inputs.
        RunFailed: training failed; its last good checkpoint is intact.
        Interrupted: stopped by Ctrl-C, SIGTERM or SIGHUP, after saving.
    """
    check_trainable(config)
    if again:
        config = under_free_name(config)
    launcher = chosen_launcher(config)
    if config.budget is not None and launcher not in ("ray", "actors"):
        raise UserError(
            f"budget is {config.budget:g}, but costs are not counted with launcher={launcher}: write launcher=ray"
        )
    set_defaults()
    if launcher == "torchrun":
        return _under_torchrun(config, console, take_over)
    return _in_a_run(
        config, console, verbose, take_over, _in_this_process if launcher == "local" else partial(_in_ray, restart)
    )


def chosen_launcher(config: Config) -> str:
    """`launcher`, with auto resolved: torchrun or Slurm where its environment is found, else Ray."""
    if config.launcher != "auto":
        return config.launcher
    return "torchrun" if "RANK" in os.environ and "WORLD_SIZE" in os.environ else "ray"


Launch = Callable[[Run, Config, Console, Settings], Outcome]


def _in_a_run(config: Config, console: Console, verbose: bool, take_over: bool, launch: Launch) -> Outcome:
    """In the run's folder, its output in the folder's logs."""
    run = Run(config)
    settings = resolve_tracking(config.tracking, run.folder.rpartition("/")[0])
    run.storage.check_writable()
    log, labels = run.local_folder / "logs" / "driver.log", log_labels(config, run.attempt, "driver")
    try:
        if take_over:
            run.take_over(console.say)
        else:
            run.lease.refuse_if_held(seconds=0.0)  # one on this machine is known at once, before anything starts
        with contextlib.nullcontext() if verbose else console.capture(log, labels):
            console.waits_for("the data to be read and the run to be laid out")
            return launch(run, config, console, settings)
    finally:
        console.waits_for("")
        run.forget_if_never_opened()


def _in_this_process(run: Run, config: Config, console: Console, settings: Settings) -> Outcome:
    import torch

    from app.launchers.local import LocalWorkers

    if config.workers not in ("auto", "1"):
        raise UserError(
            f"launcher=local is one process, but workers={config.workers}: write workers=1, launcher=ray, or start "
            f"with torchrun --nproc-per-node {config.workers} -m {names.module()} train …"
        )
    if (config.parallel.pp or 1) > 1 or "pipeline" in config.strategy:
        raise UserError(
            "a pipeline's stages are processes of their own, but launcher=local is one process: write launcher=ray, or "
            "strategy=model_parallel, which puts the blocks on several devices of this one"
        )
    where = f"1 process ({'cuda' if torch.cuda.is_available() else 'cpu'})"
    return _without_ray(LocalWorkers(), 1, 1, where, run, config, console, settings)


def _without_ray(
    workers: Workers,
    world_size: int,
    here: int,
    where: str,
    run: Run,
    config: Config,
    console: Console,
    settings: Settings,
) -> Outcome:
    """With processes that there are already, `here` of them on this machine. where: for a person."""
    import torch

    from app.launchers.supervisor import Supervisor
    from app.run.driver import Driver
    from app.run.lifecycle import train_run
    from app.run.prepare import check_devices, prepare, read_task, with_idle_gpus
    from strategies import registry

    check_devices(config, "cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count()
    prepared = prepare(config, read_task(config), world_size, devices_per_node=here if world_size > 1 else gpus or None)
    several = any(record.several_devices for record in registry.records(prepared.layout.name))
    prepared = with_idle_gpus(prepared, here, max(1, gpus // here) if several else 1, gpus, "this machine")
    driver = Driver(run, prepared.config, console, settings)
    return train_run(driver, prepared, where, Supervisor(workers, driver).run)


def _under_torchrun(config: Config, console: Console, take_over: bool) -> Outcome:
    """In the processes there are; the outcome is rank 0's, and the others' says the same in short."""
    from app.launchers.torchrun import Ranks, TorchrunWorkers, tell, train_as_other_rank

    ranks = Ranks(config)
    world, here = ranks.place.world_size, ranks.here.local_world_size
    if ranks.place.rank:
        summary = train_as_other_rank(ranks)
        status = "already_finished" if summary is None else "finished"
        outcome = Outcome(status, config.run.name, "", summary or {}, {})
    else:
        told: list[Any] = []

        def say(what: Any) -> None:
            if not told:
                told.append(what)
                tell(what)

        kind = "GPU" if ranks.place.device.type == "cuda" else "CPU"
        where = f"{world} {kind} process{'es' if world > 1 else ''} of torchrun"
        launch = partial(_without_ray, TorchrunWorkers(ranks, say), world, here, where)
        try:
            outcome = _in_a_run(config, console, False, take_over, launch)
            say(None)  # where it has finished already, no job was handed out
        except Exception as error:
            say(error)
            raise
    ranks.leave()
    return outcome


def _in_ray(
    restart: Callable[[], object] | None, run: Run, config: Config, console: Console, settings: Settings
) -> Outcome:
    from cluster.connect import address, connect, disconnect

    def read() -> Task:
        from app.run.prepare import read_task

        return read_task(config)

    console.status("reading the data and starting Ray")
    reading = _in_background(read)  # imports torch, while Ray starts its processes
    cluster_address = address()
    where = f"the Ray cluster at {cluster_address} to answer" if cluster_address else "Ray to start on this machine"
    console.waits_for(where)
    cluster = connect(worker_setup=names.worker_setup(), say=console.say)
    try:
        console.waits_for("the data to be read")
        task = reading.result()  # before more is imported: two threads in torch's circular imports can deadlock
        console.waits_for("the run to be laid out and tried in small")
        from app.launchers.ray_launch import RayLaunch

        with contextlib.closing(RayLaunch(cluster, config, console)) as launch:
            from app.run.driver import Driver
            from app.run.lifecycle import train_run

            workers = launch.wait_for_room()
            gpus = launch.per_worker.get("GPU", 0)
            prepared = launch.prepare(task, workers)
            meter = launch.meter(run.storage)
            driver = Driver(run, prepared.config, console, settings, meter=meter, restart=restart)
            where = f"{workers} {'GPU' if gpus else 'CPU'} worker{'s' if workers > 1 else ''} in Ray"
            return train_run(driver, prepared, where, launch.supervisor(driver, prepared, task).run)
    finally:
        disconnect()


def _in_background(function: Callable[[], Any]) -> Future[Any]:
    """Calls it in a thread that does not keep the process from ending."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future
