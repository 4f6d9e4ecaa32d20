"""`trireme train`: from a configuration to a finished, resumed, stopped or failed run."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from app.config import Config
from app.config_check import check_trainable
from app.config_io import with_values
from app.console import Console
from app.errors import UserError
from app.run.cost import check_launcher
from app.run.lifecycle import Outcome, carry_out, run_storage
from app.run.manifest import Run, free_name
from app.tracking.settings import Settings, resolve_tracking
from strategies import registry

if TYPE_CHECKING:
    from app.job import Job
    from app.launchers.elastic import Elastic
    from app.launchers.room import Reserved
    from app.run.driver import Driver
    from app.run.prepare import Prepared
    from app.tasks.base import Task
    from cluster.connect import Cluster

T = TypeVar("T")


def train(config: Config, console: Console, *, again: bool = False, verbose: bool = False) -> Outcome:
    """Trains until done, continuing where an earlier call of the same run stopped.

    again: when the run has finished, train it once more under a new name, instead of saying that it has.
    verbose: leave everybody's output on the terminal.
    Raises:
        UserError: nothing was started, or what was started cannot go on with these inputs.
        RunFailed: training failed; its last good checkpoint is intact.
        Interrupted: stopped by Ctrl-C or SIGTERM, after saving.
    """
    check_trainable(config)
    if again:
        config = with_values(config, {"run.name": free_name(config)})
    launcher = chosen_launcher(config)
    check_launcher(config, launcher)
    if launcher == "torchrun":
        from app.launchers import torchrun

        return torchrun.train(config, console)
    run = Run(config)
    settings = resolve_tracking(config.tracking, run_storage(run))
    run.storage.check_writable()
    log = run.local_folder / "logs" / "driver.log"
    try:
        with contextlib.nullcontext() if verbose else console.capture(log):
            return (_in_this_process if launcher == "local" else _in_ray)(run, console, settings)
    finally:
        run.forget_if_never_opened()


def chosen_launcher(config: Config) -> str:
    """`launcher`, with auto resolved: torchrun or Slurm where its environment is found, else Ray."""
    if config.launcher != "auto":
        return config.launcher
    return "torchrun" if "RANK" in os.environ and "WORLD_SIZE" in os.environ else "ray"


def _in_this_process(run: Run, console: Console, settings: Settings) -> Outcome:
    import torch

    from app.launchers import local
    from app.run.driver import Driver
    from app.run.model_check import check_devices
    from app.run.prepare import prepare, read_task
    from app.run.remarks import gpus_of_this_machine, with_remarks

    config = run.config
    if config.workers not in ("auto", "1"):
        raise UserError(
            f"launcher=local is one process, but workers={config.workers}: write workers=1, launcher=ray, or start "
            f"with torchrun --nproc-per-node {config.workers} -m app train …"
        )
    if (config.parallel.pp or 1) > 1 or "pipeline" in config.strategy:
        raise UserError(
            "a pipeline's stages are processes of their own, but launcher=local is one process: write launcher=ray, or "
            "strategy=model_parallel, which puts the blocks on several devices of this one"
        )
    task = read_task(config)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count()
    check_devices(config, gpus)
    prepared = prepare(config, task, 1, devices_per_node=gpus or None)
    used = gpus_of_this_machine(prepared.layout, 1, gpus)
    prepared = with_remarks(prepared, workers=1, gpus=gpus, gpus_used=used, pool="this machine")
    driver = Driver(run, console, settings)
    return carry_out(driver, prepared, lambda job: local.launch(job, driver), f"1 process ({device_type})")


def _in_ray(run: Run, console: Console, settings: Settings) -> Outcome:
    from app.launchers.room import Reserved, wait_for_room
    from app.run.cost import meter_for
    from cluster.connect import check_fits, connect, disconnect
    from cluster.fast_start.warm import begin

    config = run.config
    begin(config.cluster.keep_warm_seconds)
    console.status("reading the data and starting Ray")
    # Ray starts its processes while this one imports torch and reads the data.
    reading = Background(lambda: _read(config))
    cluster = connect(config.cluster.keep_warm_seconds)
    room = Reserved(0)
    try:
        task = reading.result()
        workers, per_worker = ask_for(config, cluster)
        if not config.parallel.stage_resources:
            check_fits(cluster, workers, per_worker)
            room = wait_for_room(config, cluster, workers, per_worker, console)
            workers = room.workers
        from app.run.driver import Driver
        from app.run.model_check import check_devices
        from app.run.prepare import prepare
        from app.run.remarks import with_remarks

        gpus = per_worker.get("GPU", 0)
        check_devices(config, gpus)
        per_node = int(cluster.largest.get("GPU", 0) / gpus) if gpus else None
        prepared = prepare(config, task, workers, devices_per_node=per_node)
        elastic = None
        if not config.parallel.stage_resources:
            from app.launchers.elastic import Elastic

            elastic = Elastic(
                config, prepared.config, task, per_worker, per_node, prepared, growing=bool(cluster.limits)
            )
        prepared = with_remarks(prepared, workers=workers, gpus=cluster.gpus, gpus_used=workers * gpus)
        driver = Driver(run, console, settings)
        driver.meter = meter_for(config, run.storage, workers, per_worker)
        kind = "GPU" if gpus else "CPU"
        where = f"{workers} {kind} worker{'s' if workers > 1 else ''} in Ray"
        with _launcher(driver, prepared, cluster, per_worker, room, elastic) as launch:
            return carry_out(driver, prepared, launch, where)
    finally:
        room.give_back()
        disconnect()


@contextlib.contextmanager
def _launcher(
    driver: Driver,
    prepared: Prepared,
    cluster: Cluster,
    per_worker: dict[str, float],
    room: Reserved,
    elastic: Elastic | None,
) -> Iterator[Callable[[Job], None]]:
    """What trains a job in Ray: warm actors where there are stages or they are asked for, else Ray Train's workers."""
    if prepared.layout.dims.pp > 1 or driver.run.config.launcher == "actors":
        from app.launchers import pipeline

        room.give_back()
        group = pipeline.group(driver.run.config, prepared.layout, per_worker, cluster)
        if elastic is not None:
            elastic.reshape = lambda job: group.become(pipeline.group(job.config, job.layout, per_worker, cluster))
        try:
            if not driver.run.finished:
                group.start()  # the processes come up while tracking does
            yield lambda job: group.run(job, driver, elastic)
        finally:
            group.shutdown()
        return
    from app.launchers import ray_train

    workers = prepared.layout.dims.world_size

    def launch(job: Job) -> None:
        room.give_back()
        ray_train.launch(job, driver, workers=workers, per_worker=per_worker, elastic=elastic)

    try:
        yield launch
    finally:
        ray_train.clean_up(driver.run.folder)


def _read(config: Config) -> Task:
    from app.run.prepare import read_task

    return read_task(config)


def ask_for(config: Config, cluster: Cluster) -> tuple[int, dict[str, float]]:
    """How many workers, and the resources of each.

    A strategy of one process is one worker; those that spread over a worker's GPUs ask for all of the largest node's
    (ddp_model_parallel: for two each)."""
    per_worker = dict(config.resources_per_worker)
    if config.workers == "auto":
        per_worker = per_worker or ({"GPU": _gpus_each(config, cluster)} if cluster.gpus else {"CPU": 1.0})
        if any(record.one_process for record in registry.written(config.strategy)):
            return 1, per_worker
        if per_worker.get("GPU"):
            return max(1, int(cluster.gpus / per_worker["GPU"])), per_worker
        return max(2, _degrees(config)), per_worker
    workers = int(config.workers)
    gpus = _gpus_each(config, cluster)
    return workers, per_worker or ({"GPU": gpus} if cluster.gpus >= workers * gpus else {"CPU": 1.0})


def _gpus_each(config: Config, cluster: Cluster) -> float:
    """GPUs of one worker where the configuration does not say."""
    most = max(1.0, cluster.largest.get("GPU", 0.0))
    if config.strategy in ("dp", "model_parallel"):
        return most
    wanted = config.workers == "auto" or cluster.gpus >= 2 * int(config.workers)
    return min(2.0, most) if config.strategy == "ddp_model_parallel" and wanted else 1.0


def _degrees(config: Config) -> int:
    """The workers that the degrees written in the configuration multiply to."""
    wanted = config.parallel
    return math.prod(degree or 1 for degree in (wanted.dp_replicate, wanted.dp_shard, wanted.tp, wanted.pp))


class Background:
    """A function running in a thread; `result` waits for it, and raises what it raised."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None

        def call() -> None:
            try:
                self._value = function()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join()
        if self._error:
            raise self._error
        return self._value
