"""`trireme train`: from a configuration to a finished, resumed, stopped or failed run."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from app import names
from app.config import Config
from app.config.check import unfit_for_training
from app.config.task_source import refuse_wrong_task
from app.console.terminal import Console, log_labels
from app.errors import UserError
from app.launchers.crash_notice import announce_crash
from app.run.background import BackgroundWork
from app.run.manifest import Outcome, Run, run_folder, under_free_name
from app.tracking.settings import Settings, resolve_tracking
from app.tracking.tracker import WriterProcess
from app.tracking.trackers import require_trackers
from app.training.events import WorkerInfo
from cluster.environment import set_defaults

if TYPE_CHECKING:
    from app.launchers.torchrun import Ranks
    from app.launchers.workers import Workers
    from app.tasks.base import Task
    from app.training.job import Job
    from cluster.connect import Cluster


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run, as a launcher gets it.

    Args:
        run: The run.
        config: The configuration as it was written.
        console: Where a person sees what happens.
        settings: Where the run is tracked.
        writer: Writes to MLflow once there is something, and imports until then.
    """

    run: Run
    config: Config
    console: Console
    settings: Settings
    writer: WriterProcess


Launch = Callable[[Start], Outcome]
"""Trains a run with one launcher."""


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

    Args:
        config: The configuration as it was written.
        console: Where a person sees what happens.
        again: Train a run that has finished once more under a new name, instead of saying that it
            has finished.
        take_over: Take the run over from another start that trains it now; that start then ends.
        verbose: Leave everything on the terminal that Ray and others print.
        restart: Executes this program anew in place of this process, for when the Ray that it has
            started is gone; None ends the run instead.

    Raises:
        UserError: Nothing was started, or what was started cannot continue with these inputs.
        RunFailed: Training failed; its last good checkpoint is intact.
        Interrupted: Stopped by Ctrl-C, SIGTERM or SIGHUP, after saving.
    """
    _require_trainable(config)
    require_trackers(config.tracking.also)
    if again:
        config = under_free_name(config)
    launcher = chosen_launcher(config)
    if config.budget is not None and launcher not in ("ray", "actors"):
        raise UserError(
            f"budget is {config.budget:g}, but costs are not counted with launcher={launcher}: "
            "write launcher=ray"
        )
    if config.train.eval_separate and launcher not in ("ray", "actors"):
        raise UserError(
            "train.eval_separate evaluates in a worker of its own in Ray, but there is no Ray with "
            f"launcher={launcher}: write launcher=ray, or leave train.eval_separate out"
        )
    if config.plan.follow and launcher not in ("ray", "actors"):
        raise UserError(
            "plan.follow starts the workers again with another layout, which launcher="
            f"{launcher} cannot do: write launcher=ray, or leave plan.follow out"
        )
    set_defaults()
    if launcher == "torchrun":
        return _under_torchrun(config, console, take_over)
    if launcher == "local":
        return _in_a_run(
            config,
            console,
            verbose=verbose,
            take_over=take_over,
            process_name=_worker_0(),
            launch=_in_this_process,
        )
    return _in_a_run(
        config,
        console,
        verbose=verbose,
        take_over=take_over,
        process_name=f"the driver, process {os.getpid()} on {socket.gethostname()},",
        launch=partial(_in_ray, restart),
    )


def _require_trainable(config: Config) -> None:
    """Checks that a valid configuration has what training needs.

    Raises:
        UserError: The task, the run's name or the length of the training is missing, the length is
            given twice, or evaluations cannot be meant so; a sentence for each, and first of all
            what is wrong with the task as far as its source shows that.
    """
    mistakes = unfit_for_training(config)
    if config.task:
        try:
            refuse_wrong_task(config.task, config.task_args)
        except UserError as error:
            mistakes.insert(0, str(error))
    if mistakes:
        raise UserError("\n".join(mistakes))


def chosen_launcher(config: Config) -> str:
    """The launcher to use.

    `auto` means torchrun if this process is one of several that torchrun or Slurm's srun started,
    and otherwise Ray. The script of an sbatch job has Slurm's variables too, but is no step of
    several tasks, so it begins a run in Ray.
    """
    if config.launcher != "auto":
        return config.launcher
    is_rank_of_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    step_tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    is_one_of_several_tasks = "SLURM_PROCID" in os.environ and step_tasks != "1"
    # Whether Ray's workers are plain actors or Ray Train's is decided by RayLaunch.
    return "torchrun" if is_rank_of_torchrun or is_one_of_several_tasks else "ray"


def _in_a_run(
    config: Config,
    console: Console,
    *,
    verbose: bool,
    take_over: bool,
    process_name: str,
    launch: Launch,
) -> Outcome:
    """Opens the run, sends this process's output to the run's log, and launches the training.

    Args:
        config: See `train`.
        console: See `train`.
        verbose: See `train`.
        take_over: See `train`.
        process_name: What this process is, for the sentence about its crash.
        launch: Trains the run.
    """
    run = Run(config)
    settings = resolve_tracking(config.tracking, run.folder.rpartition("/")[0])
    log = run.local_folder / "logs" / "driver.log"
    writer = WriterProcess(run.spool, settings.uri)
    try:
        if take_over:
            run.storage.check_writable()
            run.take_over(console.say)
        else:
            # A driver on this machine is seen at once, before anything starts.
            run.lease.refuse_if_held(seconds=0.0)
        if config.train.steps is not None:
            # Before torch and Ray are imported, which takes longer than anything else here.
            outcome = run.outcome_if_finished(config.train.steps, console.say)
            if outcome is not None:
                return outcome
        run.storage.check_writable()
        if config.checkpoint.fork:
            from app.run.fork import find_origin  # imports torch, which starts without need of it

            find_origin(config, run, config.train.steps)
        with contextlib.ExitStack() as stack:
            if not verbose:
                labels = log_labels(config, run.attempt, "driver")
                stack.enter_context(console.capture(log, labels))
            stack.enter_context(announce_crash(process_name, log, console.error_stream))
            console.waits_for("the data to be read and the run to be laid out")
            if config.tracking.enabled:
                # Seconds of importing, for which there is a processor while Ray starts.
                writer.import_ahead()
            start = Start(run=run, config=config, console=console, settings=settings, writer=writer)
            return launch(start)
    finally:
        writer.dismiss()
        console.waits_for("")
        run.forget_if_never_opened()


def _worker_0() -> str:
    """This process as messages name the worker of rank 0, where that trains in the driver."""
    return str(WorkerInfo(rank=0, pid=os.getpid(), ip=socket.gethostname(), node="", oom_kills=0))


# --- without Ray ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes that a run without Ray trains in; they exist already.

    Args:
        workers: Their interface for the supervisor.
        world_size: How many there are.
        on_this_machine: How many of them run on this machine.
        description: What they are, for a person.
    """

    workers: Workers
    world_size: int
    on_this_machine: int
    description: str


def _in_this_process(start: Start) -> Outcome:
    import torch

    from app.launchers.local import LocalWorkers

    config = start.config
    if config.workers not in ("auto", "1"):
        raise UserError(
            f"launcher=local is one process, but workers={config.workers}: write workers=1, "
            f"launcher=ray, or start with torchrun --nproc-per-node {config.workers} "
            f"-m {names.module()} train …"
        )
    if (config.parallel.pp or 1) > 1 or "pipeline" in config.strategy:
        raise UserError(
            "a pipeline's stages are processes of their own, but launcher=local is one process: "
            "write launcher=ray, or strategy=model_parallel, which puts the blocks on several "
            "devices of this one"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    processes = Processes(
        workers=LocalWorkers(),
        world_size=1,
        on_this_machine=1,
        description=f"1 process ({device})",
    )
    return _without_ray(processes, start)


def require_gpus(config: Config, *, workers: int, gpus: int) -> None:
    """Checks that this machine has the GPUs that its workers are to have.

    Args:
        config: The configuration.
        workers: How many workers this machine has.
        gpus: How many GPUs torch sees on it.

    Raises:
        UserError: It has fewer.
    """
    wanted = config.resources_per_worker.get("GPU", 0)
    if wanted * workers > gpus:
        visible = f"{gpus} GPU" if gpus == 1 else f"{gpus or 'no'} GPUs"
        each = "its worker" if workers == 1 else f"each of its {workers} workers"
        raise UserError(
            f"resources_per_worker.GPU is {wanted:g} for {each}, but torch sees {visible} on this "
            "machine: leave it out, or run `trireme doctor`, which says why"
        )


def _without_ray(processes: Processes, start: Start) -> Outcome:
    import torch

    from app.launchers.supervisor import Supervisor
    from app.run.driver import Driver
    from app.run.lifecycle import train_run
    from app.run.prepare import check_devices, prepare, read_task, with_idle_gpus
    from strategies import registry

    config = start.config
    gpus = torch.cuda.device_count()
    require_gpus(config, workers=processes.on_this_machine, gpus=gpus)
    check_devices(config, "cuda" if gpus else "cpu")
    if processes.world_size > 1:
        devices_per_node: int | None = processes.on_this_machine
    else:
        devices_per_node = gpus or None
    task = read_task(config)
    prepared = prepare(config, task, processes.world_size, devices_per_node=devices_per_node)
    strategies = registry.records(prepared.layout.name)
    gpus_per_worker = 1
    if any(strategy.several_devices for strategy in strategies):
        gpus_per_worker = max(1, gpus // processes.on_this_machine)
    prepared = with_idle_gpus(
        prepared,
        workers=processes.on_this_machine,
        gpus_per_worker=gpus_per_worker,
        gpus=gpus,
        pool="this machine",
    )
    driver = Driver(
        start.run,
        prepared.config,
        start.console,
        start.settings,
        prediction=prepared.prediction,
        writer=start.writer,
    )
    follower = None
    if prepared.plan is not None:
        from app.launchers.follow import PlanFollower

        follower = PlanFollower(driver, prepared)
    supervisor = Supervisor(processes.workers, driver, follower=follower)
    return train_run(driver, prepared, processes.description, supervisor.run)


def _under_torchrun(config: Config, console: Console, take_over: bool) -> Outcome:
    """Trains in the processes that torchrun or Slurm has started, of which this is one.

    Returns:
        The outcome; on ranks other than 0 without what MLflow has.
    """
    from app.launchers.torchrun import Ranks, train_as_other_rank

    ranks = Ranks(config)
    if ranks.place.rank:
        summary = train_as_other_rank(ranks)
        status = "already_finished" if summary is None else "finished"
        outcome = Outcome(status, config.run.name, run_folder(config).url, summary or {}, {})
    else:
        outcome = _as_rank_0(ranks, config, console, take_over)
    ranks.leave()
    return outcome


def _as_rank_0(ranks: Ranks, config: Config, console: Console, take_over: bool) -> Outcome:
    """Drives the run, and trains as rank 0."""
    from app.launchers.torchrun import TorchrunWorkers, tell

    has_told = False

    def tell_once(message: Job | Exception | None) -> None:
        nonlocal has_told
        if not has_told:
            has_told = True
            tell(message)

    world_size = ranks.place.world_size
    device_kind = "GPU" if ranks.place.device.type == "cuda" else "CPU"
    plural = "es" if world_size > 1 else ""
    processes = Processes(
        workers=TorchrunWorkers(ranks, tell_once),
        world_size=world_size,
        on_this_machine=ranks.environment.local_world_size,
        description=f"{world_size} {device_kind} process{plural} of torchrun",
    )

    try:
        outcome = _in_a_run(
            config,
            console,
            verbose=False,
            take_over=take_over,
            process_name=_worker_0(),
            launch=partial(_without_ray, processes),
        )
        tell_once(None)  # if the run had finished already, no job was handed out
    except Exception as error:
        tell_once(error)
        raise
    return outcome


# --- with Ray -------------------------------------------------------------------------------------


def _in_ray(restart: Callable[[], object] | None, start: Start) -> Outcome:
    """Connects to Ray while the data is read, and trains there.

    Args:
        restart: See `train`.
        start: The start of the run.
    """
    from cluster.connect import address, connect, disconnect
    from cluster.files import read_cluster

    run = start.run
    config = start.config
    console = start.console
    if config.cluster.file:
        read_cluster(config.cluster.file)  # reports mistakes in the file before Ray starts

    def read() -> Task:
        from app.tasks import check_task

        check_task(config.task, config.task_args)
        from app.run.prepare import read_task

        return read_task(config)

    console.status("reading the data and starting Ray")
    reading = BackgroundWork(read)
    if run.finished:  # how many steps train.epochs are is known once the data is read
        console.waits_for("the data to be read")
        from app.data.loader import length

        steps = config.train.steps_for(length(reading.result().train_data()))
        outcome = run.outcome_if_finished(steps, console.say)
        if outcome is not None:
            return outcome
    cluster_address = address()
    if cluster_address:
        console.waits_for(f"the Ray cluster at {cluster_address} to answer")
    else:
        console.waits_for("Ray to start on this machine")
    try:
        # Ray's processes start, one after the other, while torch is imported and the data is read.
        # Ray is imported before: two threads that import take turns at Python's lock.
        with reading.failure_interrupts():
            cluster = connect(
                worker_setup=names.worker_setup(),
                say=console.say,
                before_start=reading.start,
            )
        console.waits_for("the data to be read")
        # Before more is imported: two threads in torch's circular imports can deadlock.
        task = reading.result()
        return _train_on_cluster(cluster, task, restart, start=start)
    finally:
        disconnect()


def _train_on_cluster(
    cluster: Cluster, task: Task, restart: Callable[[], object] | None, *, start: Start
) -> Outcome:
    """Waits for room on a cluster, chooses the layout, and trains.

    Args:
        cluster: The cluster that this process is connected to.
        task: The task, with its data.
        restart: See `train`.
        start: The start of the run.
    """
    run = start.run
    console = start.console
    console.waits_for("room on the cluster")
    from app.launchers.followed import followed_layout
    from app.launchers.ray_launch import RayLaunch

    with contextlib.closing(RayLaunch(cluster, start.config, console)) as launch:
        workers = launch.wait_for_room()
        launch.start_ahead(workers)
        console.waits_for("the layout to be chosen and tried on a small step")
        from app.run.driver import Driver
        from app.run.lifecycle import train_run

        prepared = launch.prepare(
            task, workers, requirement=followed_layout(start.config, run.storage)
        )
        meter = launch.meter(run.storage)
        driver = Driver(
            run,
            prepared.config,
            console,
            start.settings,
            meter=meter,
            restart=restart,
            prediction=prepared.prediction,
            writer=start.writer,
        )
        supervisor = launch.supervisor(driver, prepared, task)
        return train_run(driver, prepared, launch.description, supervisor.run)
