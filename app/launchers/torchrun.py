"""Launcher: the processes that torchrun or Slurm has started. Every one of them runs `trireme train`.

Rank 0 does what the driver does elsewhere (the run's folder, MLflow, the console) and hands the job to the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from app import loop
from app.config import Config
from app.console import Console
from app.errors import Interrupted, UserError
from app.heartbeat import Beat
from app.job import Job, Place
from app.launchers import answers, flight
from app.launchers.output import worker_output
from app.launchers.siblings import watched
from app.launchers.store_watch import FirstRank, StoreWatch
from app.run.driver import Driver
from app.run.lifecycle import Outcome, carry_out, run_storage
from app.run.manifest import Run
from app.run.model_check import check_devices
from app.run.prepare import prepare, read_task
from app.run.remarks import gpus_of_this_machine, with_remarks
from app.storage import Storage
from app.tracking.settings import resolve_tracking
from app.tracking.system import SystemSampler
from strategies import registry
from strategies.devices import home


@dataclass(frozen=True)
class Environment:
    """What torchrun, or else Slurm, says of this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def read(cls, environ: Any = os.environ) -> Environment:
        """Raises UserError where neither has started this process."""
        for names in (
            ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
            ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
        ):
            if all(name in environ for name in names[:3]):
                rank, size, local = (int(environ[name]) for name in names[:3])
                return cls(rank, size, local, int(environ.get(names[3], size)))
        raise UserError(
            "launcher=torchrun finds neither RANK nor SLURM_PROCID in the environment: start with "
            "torchrun --nproc-per-node 2 -m app train EXPERIMENT.yaml, or write launcher=ray"
        )


MEET = timedelta(minutes=30)
"""How long ranks wait for one another."""
ANSWER_SECONDS = 3.0
PORT = "trireme/port"


class Silence:
    """The Channel of every rank but 0: nothing to say, but a signal may ask this process to stop."""

    def __init__(self) -> None:
        self.stopping = False
        self.beat = Beat()

    def emit(self, event: dict[str, Any]) -> None:
        return

    def stop_requested(self) -> bool:
        return self.stopping

    def follow(self, beat: Beat) -> None:
        self.beat = beat


def own_store(rank: int) -> dist.Store:
    """Where the ranks meet: a store of this attempt's own.

    torchrun's agent (torch 2.13) gives every restart the store of the first start, where ranks find the addresses of
    processes that are dead, and fail to connect to them. So its store only tells the port of another one, which rank 0
    opens; a port of a start before answers no more, and then the next one is waited for.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return dist.TCPStore(host, port, is_master=rank == 0, multi_tenant=True, timeout=MEET)
    agents = dist.TCPStore(host, port, is_master=False, timeout=MEET)
    if rank == 0:
        own = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=MEET)
        agents.set(PORT, str(own.port))
        return own
    until = time.monotonic() + MEET.total_seconds()
    while True:
        there = (host, int(agents.get(PORT)))
        try:
            socket.create_connection(there, timeout=ANSWER_SECONDS).close()  # a store would try for long, and print it
            return dist.TCPStore(*there, is_master=False, timeout=MEET)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def train(config: Config, console: Console) -> Outcome:
    """Trains in the processes there are; the outcome is rank 0's, and the others' says the same in short."""
    here = Environment.read()
    if config.workers not in ("auto", str(here.world_size)):
        raise UserError(f"workers={config.workers}, but torchrun has started {here.world_size}: leave workers out")
    os.environ |= {"RANK": str(here.rank), "WORLD_SIZE": str(here.world_size), "LOCAL_RANK": str(here.local_rank)}
    os.environ["LOCAL_WORLD_SIZE"] = str(here.local_world_size)
    several = any(record.several_devices for record in registry.written(config.strategy))
    gpu = home(several, here.local_rank, here.local_world_size, torch.cuda.device_count())
    device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise UserError("MASTER_ADDR and MASTER_PORT are not set: torchrun sets them; under Slurm export both")
    flight.switch_on()
    with watched(config.fault.hang_seconds):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=own_store(here.rank),
            rank=here.rank,
            world_size=here.world_size,
        )
    try:
        place = Place(here.rank, here.world_size, here.local_rank, device)
        if here.rank == 0:
            return _first_rank(config, console, place, here.local_world_size)
        return _other_rank(config, place)
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _first_rank(config: Config, console: Console, place: Place, per_node: int) -> Outcome:
    told = False

    def tell(what: Job | Exception | None) -> None:
        nonlocal told
        told = True
        dist.broadcast_object_list([what], src=0)

    def launch(job: Job) -> None:
        tell(job)
        sampler = SystemSampler(driver.tracker.emit, "node-0", config.tracking.system_metrics_every)
        watch = StoreWatch(job, 0, place.world_size, driver)
        channel = FirstRank(driver, watch)
        answers.NOW.begin(channel)
        try:
            summary = loop.train(job, place, channel)
        finally:
            answers.NOW.end()
            watch.close()
            sampler.close()
        driver.emit({"type": "done", "summary": summary})
        if summary["stopped"]:
            raise Interrupted(f"stopped after step {summary['step']:,}")

    try:
        run = Run(config)
        settings = resolve_tracking(config.tracking, run_storage(run))
        run.storage.check_writable()
        with console.capture(run.local_folder / "logs" / "driver.log"):
            check_devices(config, torch.cuda.device_count())
            prepared = prepare(
                config,
                read_task(config),
                place.world_size,
                devices_per_node=per_node,
            )
            gpus = torch.cuda.device_count()
            used = gpus_of_this_machine(prepared.layout, per_node, gpus)
            prepared = with_remarks(prepared, workers=place.world_size, gpus=gpus, gpus_used=used, pool="this machine")
            driver = Driver(run, console, settings)
            kind = "GPU" if place.device.type == "cuda" else "CPU"
            outcome = carry_out(driver, prepared, launch, f"{place.world_size} {kind} processes of torchrun")
        if not told:
            tell(None)  # finished already
        return outcome
    except Exception as error:
        if not told:
            tell(error)
        raise


def _other_rank(config: Config, place: Place) -> Outcome:
    heard: list[Any] = [None]
    dist.broadcast_object_list(heard, src=0)
    job = heard[0]
    if isinstance(job, Exception):
        raise job
    if job is None:
        return Outcome("already_finished", config.run.name, "", {}, {})
    channel = Silence()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(channel, "stopping", True))
    watch = StoreWatch(job, place.rank, place.world_size, None)
    answers.NOW.begin(channel)
    try:
        with worker_output(Storage(job.folder), place.rank):
            summary = loop.train(job, place, channel)
    finally:
        answers.NOW.end()
        watch.close()
    if summary["stopped"]:
        raise Interrupted(f"stopped after step {summary['step']:,}")
    return Outcome("finished", config.run.name, job.folder, summary, {})
