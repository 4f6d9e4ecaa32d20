"""Launcher: the processes that torchrun or Slurm has started. Each of them runs `trireme train`.

Rank 0 is the driver as well: it supervises in its main thread while another trains, and hands the job to the others.
Heartbeats, questions and answers go through a store of torch.distributed. Failed ranks are not started again from here:
torchrun's --max-restarts does that, and the same command continues.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from app import names as program_names
from app.config import Config
from app.console.terminal import worker_output
from app.errors import Interrupted, UserError
from app.launchers.heartbeats import SILENT, SILENT_SECONDS, Beat, HeartbeatThread, Reply
from app.launchers.local import LocalWorkers, TrainingThread
from app.launchers.threads import take_share_of_node
from app.launchers.workers import Poll, Status, kill_process
from app.run.abort import abort, write_line
from app.run.stopping import SIGNALS
from app.training import loop
from app.training.events import Event, WorkerInfo, WorkerStarted
from app.training.job import Heartbeat, Job, Place, SilentChannel
from strategies import registry
from strategies.one_process import first_gpu_of_worker

MEET = timedelta(minutes=30)
"""How long ranks wait for one another."""
ANSWER_SECONDS = 3.0
PORT = "trireme/port"


@dataclass(frozen=True)
class Environment:
    """What torchrun, or else Slurm, says about this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Raises UserError where neither has started this process."""
        if all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            world_size = int(environ["WORLD_SIZE"])
            local_world_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
            return cls(int(environ["RANK"]), world_size, int(environ["LOCAL_RANK"]), local_world_size)
        if all(name in environ for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
            rank, local_rank = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
            return cls(rank, int(environ["SLURM_NTASKS"]), local_rank, _tasks_of_node(environ))
        raise UserError(
            "launcher=torchrun finds neither RANK nor SLURM_PROCID in the environment: start with "
            f"torchrun --nproc-per-node 2 -m {program_names.module()} train EXPERIMENT.yaml, or write launcher=ray"
        )


def _tasks_of_node(environ: Mapping[str, str]) -> int:
    """How many tasks Slurm has started on this node, of which it writes 4(x2),3 for three nodes' 4, 4 and 3."""
    if "SLURM_NTASKS_PER_NODE" in environ:
        return int(environ["SLURM_NTASKS_PER_NODE"])
    written = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    by_node = list[int]()
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", written):
        by_node += [int(tasks)] * int(nodes or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return by_node[node] if node < len(by_node) else int(environ["SLURM_NTASKS"])


def own_device(here: Environment, strategy: str) -> torch.device:
    """The device on which this process begins, which is the current one from here on."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    several = any(record.several_devices for record in registry.known_records(strategy))
    gpu = first_gpu_of_worker(several, here.local_rank, here.local_world_size, torch.cuda.device_count())
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    return device


def require_own_gpu(device: torch.device, here: Environment, store: dist.Store) -> None:
    """Collective over all processes.

    Raises:
        UserError: two processes would compute on one GPU, which NCCL refuses in its first collective.
    """
    uuid = torch.cuda.get_device_properties(device).uuid
    users = store.add(f"gpu/{uuid}", 1)
    most = torch.tensor(users)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if most > 1:
        raise UserError(
            f"{most} processes would use one GPU: process {here.rank} is one of {here.local_world_size} on its node "
            f"and sees {torch.cuda.device_count()} GPUs: start one process for each GPU (torchrun --nproc-per-node, "
            "srun --ntasks-per-node), or with a GPU each (srun --gpus-per-task 1)"
        )


class Ranks:
    """This process among those that were started: its place, the process group, and the store beside it."""

    def __init__(self, config: Config) -> None:
        """Collective over all processes.

        Raises:
            UserError: the environment is not torchrun's or Slurm's, or does not fit the configuration.
        """
        here = self.here = Environment.read()
        if config.workers not in ("auto", str(here.world_size)):
            raise UserError(f"workers={config.workers}, but torchrun has started {here.world_size}: leave workers out")
        if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
            raise UserError("MASTER_ADDR and MASTER_PORT are not set: torchrun sets them; under Slurm export both")
        os.environ |= {"RANK": str(here.rank), "WORLD_SIZE": str(here.world_size), "LOCAL_RANK": str(here.local_rank)}
        os.environ["LOCAL_WORLD_SIZE"] = str(here.local_world_size)
        device = own_device(here, config.strategy)
        if device.type == "cuda":
            take_share_of_node(here.local_world_size)
        self.store: Any = _own_store(here.rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=self.store,
            rank=here.rank,
            world_size=here.world_size,
        )
        if device.type == "cuda":
            try:
                require_own_gpu(device, here, self.store)
            except UserError:
                self.leave()
                raise
        self.place = Place(here.rank, here.world_size, here.local_rank, device)

    def leave(self) -> None:
        gc.collect()  # DDP's Reducer, were it the last to hold the group, could wait for gloo's threads for ever
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _own_store(rank: int) -> dist.Store:
    """Where the ranks meet: a store of this attempt's own.

    torchrun's agent gives every restart the store of the first start, where ranks find the addresses of processes that
    are dead. So its store only tells the port of another one, which rank 0 opens; a port of a start before answers no
    more, and then the next one is waited for.
    """
    host, port = _master()
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


def _master() -> tuple[str, int]:
    """Where torchrun's own store is, an IPv6 address without the brackets that some launchers write."""
    return os.environ["MASTER_ADDR"].strip("[]"), int(os.environ["MASTER_PORT"])


class StoreHeartbeat:
    """A rank's heartbeats through the store, and what it obeys there.

    Keys: `info/RANK`, a WorkerInfo; `beat/RANK`, the newest heartbeat; `question`, a number and what is asked;
    `answer/RANK`; `end`, host:pid of processes to end. Ranks other than 0 end when rank 0's heartbeat
    stands still or cannot be read: it is the driver, and torchrun or Slurm then starts all again.
    """

    def __init__(
        self,
        job: Job,
        ranks: Ranks,
        heartbeat: Heartbeat,
        *,
        thread: int | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Begins to send them.

        Args:
            job: What is trained.
            ranks: This process's place among the others.
            heartbeat: Is sent.
            thread: The one that trains, where it is not the main one.
            on_lost: Called in a thread, with a sentence, when rank 0's heartbeat stands still;
                None on rank 0 itself.
        """
        self.rank = ranks.place.rank
        self.store = _watch_store(job, ranks)
        self.info = WorkerInfo(self.rank, os.getpid(), socket.gethostname(), "")
        self.store.set(f"info/{self.rank}", json.dumps(asdict(self.info)))
        self.patience = max(SILENT_SECONDS, SILENT * job.config.fault.hang_seconds)
        self.first: tuple[bytes, float] = (b"", time.monotonic())  # rank 0's heartbeat, and since when it is that
        self.first_info: WorkerInfo | None = None
        self.count = 0
        self.over = threading.Event()
        self.thread = HeartbeatThread(heartbeat, self.send, lambda reply: None, thread)
        if on_lost is not None and job.config.fault.hang_seconds > 0:
            watch = threading.Thread(target=self._watch_first, args=(on_lost,), daemon=True, name="watch")
            watch.start()

    def close(self) -> None:
        self.over.set()
        self.thread.close()

    def send(self, beat: Beat, answer: tuple[int, str] | None) -> Reply:
        self.count += 1
        self.store.set(f"beat/{self.rank}", json.dumps((self.count, beat)))
        if answer is not None:
            self.store.set(f"answer/{self.rank}", json.dumps(answer))
        if self.store.check(["end"]):
            mine = f"{self.info.ip}:"
            for end in self.store.get("end").decode().split():
                if end.startswith(mine):
                    kill_process(int(end.removeprefix(mine)))
        if self.rank and self.store.check(["beat/0"]) and (now := self.store.get("beat/0")) != self.first[0]:
            self.first = now, time.monotonic()
            self.first_info = self.first_info or WorkerInfo(**json.loads(self.store.get("info/0")))
        if self.store.check(["question"]):
            number, question = self.store.get("question").decode().split()
            return Reply(False, question, int(number))
        return Reply()

    def _watch_first(self, on_lost: Callable[[str], None]) -> None:
        """In a thread of its own, since a call of the store may not return."""
        while not self.over.wait(1.0):
            if time.monotonic() - self.first[1] > self.patience:
                if self.first_info is not None and self.first_info.ip == self.info.ip:
                    kill_process(self.first_info.pid)
                silent = f"worker 0 is stopped or cannot be reached for {self.patience:.0f} s"
                return on_lost(f"{silent}: ending; run the same command again to continue")


class TorchrunWorkers(LocalWorkers):
    """Rank 0's view of all ranks. tell: hands the job to the others."""

    def __init__(self, ranks: Ranks, tell: Callable[[Job], None]) -> None:
        super().__init__()
        self.ranks, self.world_size, self.tell = ranks, ranks.place.world_size, tell
        self.heartbeat: StoreHeartbeat | None = None
        self.infos: dict[int, WorkerInfo] = {}
        self.beats: dict[int, tuple[bytes, float, Beat]] = {}
        self.looked = 0.0
        self.question = 0

    def start(self, job: Job) -> None:
        self.tell(job)
        self.training = TrainingThread(job, self.ranks.place, self.channel)
        self.heartbeat = StoreHeartbeat(
            job,
            self.ranks,
            self.channel.heartbeat,
            thread=self.training.thread.ident,
        )
        self.store = _watch_store(job, self.ranks)  # a connection for each thread

    def poll(self, stop: bool) -> Poll:
        found, now = super().poll(stop), time.monotonic()
        if found.ended is None and now - self.looked > 0.25 + self.world_size / 1000:
            self.looked = now
            found.events += self._read(now)
        found.statuses = {rank: Status(*beat, now - at) for rank, (_, at, beat) in self.beats.items()}
        return found

    def _read(self, now: float) -> list[Event]:
        """Heartbeats, and events for ranks that are new."""
        store, events = self.store, list[Event]()
        for rank in range(self.world_size):
            if rank not in self.infos and store.check([f"info/{rank}"]):
                self.infos[rank] = WorkerInfo(**json.loads(store.get(f"info/{rank}")))
                events.append(WorkerStarted(info=self.infos[rank]))
            if store.check([f"beat/{rank}"]):
                raw = store.get(f"beat/{rank}")
                if rank not in self.beats or self.beats[rank][0] != raw:
                    self.beats[rank] = raw, now, tuple(json.loads(raw)[1])
        return events

    def ask(self, question: str) -> dict[int, str]:
        store = self.store
        self.question += 1
        store.set("question", f"{self.question} {question}")
        found: dict[int, str] = {}
        until = time.monotonic() + ANSWER_SECONDS
        while len(found) < self.world_size and time.monotonic() < until:
            for rank in set(range(self.world_size)) - found.keys():
                if store.check([f"answer/{rank}"]):
                    number, text = json.loads(store.get(f"answer/{rank}"))
                    if number == self.question:
                        found[rank] = text
            time.sleep(0.05)
        return found

    def kill(self, infos: list[WorkerInfo]) -> None:
        """Ends processes of this host, and has the others' neighbours end them; then torchrun ends the rest."""
        assert self.heartbeat is not None
        names = " ".join(f"{info.ip}:{info.pid}" for info in infos)
        self.store.set("end", names)
        for info in infos:
            if info.ip == self.heartbeat.info.ip and info.pid != os.getpid():
                kill_process(info.pid)

    def stop(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.close()


def tell(what: Job | Exception | None) -> None:
    """Rank 0 hands the job to the others; or why there is none; None: the run has finished already. Collective."""
    dist.broadcast_object_list([what], src=0)


def train_as_other_rank(ranks: Ranks) -> dict[str, Any] | None:
    """What ranks other than 0 do; the summary, None where the run has finished already.

    Raises: what rank 0 has told, or training raises; Interrupted when asked to stop.
    """
    received: list[Any] = [None]
    dist.broadcast_object_list(received, src=0)
    job = received[0]
    if isinstance(job, Exception):
        raise job
    if job is None:
        return None
    channel = SilentChannel()
    for number in SIGNALS:
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # as under nohup
        signal.signal(number, lambda *_: setattr(channel, "stopping", True))
    terminal = os.dup(2)  # before the worker's output goes to its log

    def on_lost(sentence: str) -> None:
        abort(1, f"trireme: {sentence}", say=partial(write_line, descriptor=terminal))

    beats = StoreHeartbeat(job, ranks, channel.heartbeat, on_lost=on_lost)
    try:
        with worker_output(job, ranks.place.rank):
            summary = loop.train(job, ranks.place, channel)
    finally:
        beats.close()
    if summary["stopped"]:
        raise Interrupted(f"stopped after step {summary['step']:,}")
    return summary


def _watch_store(job: Job, ranks: Ranks) -> Any:
    """A new connection to torchrun's own store, in its agent's process; where there is none, to the group's."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: Any = dist.TCPStore(*_master(), is_master=False)
    else:
        store = ranks.store.clone()
    return dist.PrefixStore(f"watch/{job.attempt}", store)
