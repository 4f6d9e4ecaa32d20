"""Launcher: the processes that torchrun or Slurm has started, each of which runs `trireme train`.

Rank 0 is the driver too: it supervises in its main thread, trains in another thread, and hands the
job to the other ranks. Heartbeats, questions and answers go through a store of torch.distributed.
Failed ranks are not restarted from here: torchrun's --max-restarts does that, and the same command
continues.
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
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from app import names as program_names
from app.config import Config
from app.console.terminal import worker_output
from app.errors import Interrupted, UserError
from app.launchers.aggregator import ANSWER_SECONDS, Answer, Beat, LastHeard
from app.launchers.heartbeats import (
    SILENT,
    SILENT_SECONDS,
    HeartbeatThread,
    Reply,
    with_ranks,
)
from app.launchers.local import LocalWorkers, TrainingThread
from app.launchers.recovery import oom_kills
from app.launchers.store import TIMEOUT as STORE_TIMEOUT
from app.launchers.store import open_store
from app.launchers.threads import take_share_of_node
from app.launchers.workers import Poll, Status, kill_process
from app.run.abort import abort, write_line
from app.run.stopping import SIGNALS
from app.training import loop
from app.training.events import Event, WorkerInfo, WorkerStarted
from app.training.job import Heartbeat, Job, Place, SilentChannel
from strategies import registry
from strategies.one_process import first_gpu_of_worker

KEYS_AT_ONCE = 1000
"""How many keys of the store are read in one round trip."""
PORT_KEY = "trireme/port"
"""Under this key torchrun's store has the port of rank 0's."""
DRIVER_KEY = "trireme/driver"
"""Under this key the store in which ranks meet has rank 0's process."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What torchrun, or else Slurm, says about this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Reads it from environment variables.

        Raises:
            UserError: Neither torchrun nor Slurm has started this process.
        """
        if all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            world_size = int(environ["WORLD_SIZE"])
            return cls(
                rank=int(environ["RANK"]),
                world_size=world_size,
                local_rank=int(environ["LOCAL_RANK"]),
                local_world_size=int(environ.get("LOCAL_WORLD_SIZE", world_size)),
            )
        if all(name in environ for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
            return cls(
                rank=int(environ["SLURM_PROCID"]),
                world_size=int(environ["SLURM_NTASKS"]),
                local_rank=int(environ["SLURM_LOCALID"]),
                local_world_size=_tasks_of_node(environ),
            )
        raise UserError(
            "launcher=torchrun finds neither RANK nor SLURM_PROCID in the environment: start with "
            f"torchrun --nproc-per-node 2 -m {program_names.module()} train EXPERIMENT.yaml, or "
            "write launcher=ray"
        )


def _tasks_of_node(environ: Mapping[str, str]) -> int:
    """How many tasks Slurm has started on this node.

    Slurm writes 4(x2),3 for three nodes with 4, 4 and 3 tasks.
    """
    if "SLURM_NTASKS_PER_NODE" in environ:
        return int(environ["SLURM_NTASKS_PER_NODE"])
    step_tasks = environ.get("SLURM_STEP_TASKS_PER_NODE")
    written = step_tasks or environ.get("SLURM_TASKS_PER_NODE", "")
    tasks_by_node: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", written):
        tasks_by_node += [int(tasks)] * int(nodes or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    if node < len(tasks_by_node):
        return tasks_by_node[node]
    return int(environ["SLURM_NTASKS"])


def own_device(environment: Environment, strategy: str) -> torch.device:
    """Chooses this process's device, and makes it the current one.

    Args:
        environment: Of this process.
        strategy: As it is written. Some strategies use several devices in each process.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    uses_several = any(record.several_devices for record in registry.known_records(strategy))
    gpu = first_gpu_of_worker(
        uses_several,
        environment.local_rank,
        environment.local_world_size,
        torch.cuda.device_count(),
    )
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    return device


def require_own_gpu(device: torch.device, environment: Environment, store: dist.Store) -> None:
    """Checks that no two processes use one GPU; collective over all processes.

    Args:
        device: Of this process.
        environment: Of this process.
        store: Of all processes.

    Raises:
        UserError: Two processes would use one GPU, which NCCL refuses in its first collective.
    """
    uuid = torch.cuda.get_device_properties(device).uuid
    users = torch.tensor(store.add(f"gpu/{uuid}", 1))
    dist.all_reduce(users, op=dist.ReduceOp.MAX)
    if users > 1:
        raise UserError(
            f"{users} processes would use one GPU: process {environment.rank} is one of "
            f"{environment.local_world_size} on its node and sees {torch.cuda.device_count()} "
            "GPUs: start one process for each GPU (torchrun --nproc-per-node, "
            "srun --ntasks-per-node), or with a GPU each (srun --gpus-per-task 1)"
        )


class Ranks:
    """This process among those that were started: its place, the process group, and a store.

    Creating it is collective over all processes.

    Args:
        config: The configuration as it was written.

    Attributes:
        info: This process.
        driver_info: Rank 0's process.

    Raises:
        UserError: The environment is not torchrun's or Slurm's, or contradicts the configuration.
    """

    def __init__(self, config: Config) -> None:
        environment = Environment.read()
        self.environment = environment
        _check_environment(config, environment)
        os.environ["RANK"] = str(environment.rank)
        os.environ["WORLD_SIZE"] = str(environment.world_size)
        os.environ["LOCAL_RANK"] = str(environment.local_rank)
        os.environ["LOCAL_WORLD_SIZE"] = str(environment.local_world_size)
        device = own_device(environment, config.strategy)
        has_gpu = device.type == "cuda"
        if has_gpu:
            take_share_of_node(environment.local_world_size)
        self.store = _open_store(environment.rank)
        self.info = WorkerInfo(
            rank=environment.rank,
            pid=os.getpid(),
            ip=socket.gethostname(),
            node="",
            oom_kills=oom_kills(),
        )
        if environment.rank == 0:
            self.store.set(DRIVER_KEY, json.dumps(asdict(self.info)))
        # Read now: once rank 0 is stopped, a store in its process does not answer.
        self.driver_info = WorkerInfo(**json.loads(self.store.get(DRIVER_KEY)))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
            store=self.store,
            rank=environment.rank,
            world_size=environment.world_size,
        )
        if has_gpu:
            try:
                require_own_gpu(device, environment, self.store)
            except UserError:
                self.leave()
                raise
        self.place = Place(
            rank=environment.rank,
            world_size=environment.world_size,
            local_rank=environment.local_rank,
            device=device,
        )

    def leave(self) -> None:
        """Leaves the process group."""
        # If DDP's Reducer were the last to hold the group, it could wait for gloo's threads for
        # ever.
        gc.collect()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _check_environment(config: Config, environment: Environment) -> None:
    """Checks that the number of workers is right, and that ranks can meet.

    Raises:
        UserError: It is wrong, or they cannot.
    """
    if config.workers not in ("auto", str(environment.world_size)):
        raise UserError(
            f"workers={config.workers}, but torchrun has started {environment.world_size}: leave "
            "workers out"
        )
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise UserError(
            "MASTER_ADDR and MASTER_PORT are not set: torchrun sets them; under Slurm export both"
        )


def _open_store(rank: int) -> dist.Store:
    """Opens a store for this attempt alone, in which ranks meet.

    torchrun's agent gives every restart the store of the first start, where ranks would find the
    addresses of dead processes. So its store only holds the port of another one, which rank 0
    opens. The port of an earlier attempt does not answer any more; other ranks then wait for the
    next one.
    """
    host, port = _master()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return dist.TCPStore(
            host, port, is_master=rank == 0, multi_tenant=True, timeout=STORE_TIMEOUT
        )
    agent_store = dist.TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT)
    if rank == 0:
        store = open_store(host)
        agent_store.set(PORT_KEY, str(store.port))
        return store
    deadline = time.monotonic() + STORE_TIMEOUT.total_seconds()
    while True:
        store_port = int(agent_store.get(PORT_KEY))
        try:
            # A store itself would try for long, and print that it cannot connect.
            socket.create_connection((host, store_port), timeout=ANSWER_SECONDS).close()
            return dist.TCPStore(host, store_port, is_master=False, timeout=STORE_TIMEOUT)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _master() -> tuple[str, int]:
    """Host and port of torchrun's own store.

    Some launchers write an IPv6 address with brackets, which torch does not accept.
    """
    return os.environ["MASTER_ADDR"].strip("[]"), int(os.environ["MASTER_PORT"])


class StoreHeartbeat:
    """Sends a rank's heartbeats through the store, and obeys what it finds there.

    Keys of the store:

    - `info/RANK`: a WorkerInfo
    - `beat/RANK`: the newest heartbeat
    - `question`: a number and a question; numbers of ranks follow, if only these are to answer
    - `answer/NUMBER/RANK`: an answer to the question of this number
    - `end`: host:pid of processes to end

    Ranks other than 0 end if rank 0's heartbeat stands still or cannot be read, because rank 0 is
    the driver; torchrun or Slurm then starts all ranks again.

    Args:
        job: What is trained.
        ranks: This process's place among the others.
        heartbeat: What the worker does and how far it is.
        thread: The id of the thread that trains; None means this one.
        on_lost: Called in a thread, with a sentence, when rank 0's heartbeat stands still; None on
            rank 0 itself.
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
        self.rank = ranks.place.rank
        self.store = _heartbeat_store(job, ranks)
        self.info = ranks.info
        self.store.set(f"info/{self.rank}", json.dumps(asdict(self.info)))
        self.silent_seconds = max(SILENT_SECONDS, SILENT * job.config.fault.hang_seconds)
        self.driver_beat = b""
        """Rank 0's newest heartbeat."""
        self.driver_beat_clock = time.monotonic()
        """Since when that has been the newest."""
        self.driver_info = ranks.driver_info
        self.count = 0
        self.closed = threading.Event()
        self.thread = HeartbeatThread(
            heartbeat, self.send, lambda reply: None, thread, rank=self.rank
        )
        if on_lost is not None and job.config.fault.hang_seconds > 0:
            watch = threading.Thread(
                target=self._watch_driver, args=(on_lost,), daemon=True, name="watch"
            )
            watch.start()

    def close(self) -> None:
        """Sends no more heartbeats, and watches rank 0 no more."""
        self.closed.set()
        self.thread.close()

    def send(self, beat: Beat, answer: Answer | None) -> Reply:
        """Sends a heartbeat and an answer, and returns what rank 0 asks."""
        self.count += 1
        self.store.set(f"beat/{self.rank}", json.dumps((self.count, beat)))
        if answer is not None:
            answered, text = answer
            self.store.set(f"answer/{answered}/{self.rank}", text)
            self.store.add(f"answers/{answered}", 1)
        self._end_processes()
        if self.rank:
            self._read_driver_beat()
        if not self.store.check(["question"]):
            return Reply()
        number, question = self.store.get("question").decode().split(maxsplit=1)
        return Reply(question=question, number=int(number))

    def _end_processes(self) -> None:
        """Ends the processes of this host that rank 0 wants to end."""
        if not self.store.check(["end"]):
            return
        prefix = f"{self.info.ip}:"
        for process in self.store.get("end").decode().split():
            if process.startswith(prefix):
                kill_process(int(process.removeprefix(prefix)))

    def _read_driver_beat(self) -> None:
        if not self.store.check(["beat/0"]):
            return
        beat = self.store.get("beat/0")
        if beat == self.driver_beat:
            return
        self.driver_beat = beat
        self.driver_beat_clock = time.monotonic()

    def _watch_driver(self, on_lost: Callable[[str], None]) -> None:
        """Runs in a thread of its own, because a call of the store may not return."""
        while not self.closed.wait(1.0):
            if time.monotonic() - self.driver_beat_clock <= self.silent_seconds:
                continue
            if self.driver_info.ip == self.info.ip:
                kill_process(self.driver_info.pid)
            on_lost(
                f"worker 0 is stopped or cannot be reached for {self.silent_seconds:.0f} s: "
                "ending; run the same command again to continue"
            )
            return


class TorchrunWorkers(LocalWorkers):
    """All ranks, as rank 0 sees them.

    Args:
        ranks: This process's place among the others.
        tell_job: Hands the job to the other ranks.
    """

    def __init__(self, ranks: Ranks, tell_job: Callable[[Job], None]) -> None:
        super().__init__()
        self.ranks = ranks
        self.world_size = ranks.place.world_size
        self.tell_job = tell_job
        self.heartbeat: StoreHeartbeat | None = None
        self.infos: dict[int, WorkerInfo] = {}
        self.beats: dict[int, bytes] = {}
        """The newest heartbeat of each rank that has begun, as it is in the store."""
        self.heard = LastHeard[int]()
        self.silent: frozenset[int] = frozenset()
        """Ranks that have begun and do not answer."""
        self.read_clock = 0.0
        self.question = 0
        """The number of the newest question."""

    def start(self, job: Job) -> None:
        """See `Workers`."""
        self.tell_job(job)
        self.training = TrainingThread(job, self.ranks.place, self.channel)
        self.heartbeat = StoreHeartbeat(
            job,
            self.ranks,
            self.channel.heartbeat,
            thread=self.training.thread.ident,
        )
        self.store = _heartbeat_store(job, self.ranks)  # a connection for each thread

    def poll(self, stop: bool) -> Poll:
        """See `Workers`."""
        poll = super().poll(stop)
        now = time.monotonic()
        # The more ranks, the longer reading takes, and the more seldom it is done.
        missing = self.world_size - len(self.infos)
        read_seconds = 0.25 + missing / 1000 + self.world_size / 10_000
        if poll.ended is None and now - self.read_clock > read_seconds:
            self.read_clock = now
            poll.events += self._read_infos()
            poll.statuses = self._read_beats()
        poll.silent = self.silent
        return poll

    def _read_infos(self) -> list[Event]:
        """Events for ranks that are new."""
        if len(self.infos) == self.world_size:
            return []
        missing = [rank for rank in range(self.world_size) if rank not in self.infos]
        keys = [f"beat/{rank}" for rank in missing]
        if self.store.check(keys):
            new_ranks = missing
        else:
            new_ranks = [rank for rank, key in zip(missing, keys) if self.store.check([key])]
        events: list[Event] = []
        texts = self._get([f"info/{rank}" for rank in new_ranks])
        for rank, text in zip(new_ranks, texts, strict=True):
            self.infos[rank] = WorkerInfo(**json.loads(text))
            events.append(WorkerStarted(info=self.infos[rank]))
        return events

    def _read_beats(self) -> dict[int, Status]:
        """The status of each rank of which it is new; notes which do not answer."""
        statuses: dict[int, Status] = {}
        ranks = list(self.infos)
        texts = self._get([f"beat/{rank}" for rank in ranks])
        # After reading, which may take a while: no rank is silent because the driver is slow.
        now = time.monotonic()
        for rank, text in zip(ranks, texts, strict=True):
            if self.beats.get(rank) == text:
                continue
            self.beats[rank] = text
            self.heard.heard(rank, now)
            _, beat = json.loads(text)
            statuses[rank] = Status.of(beat)
        self.silent = frozenset(self.heard.silent(now, ANSWER_SECONDS))
        return statuses

    def _get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that exist, in few round trips."""
        values: list[bytes] = []
        for start in range(0, len(keys), KEYS_AT_ONCE):
            values += self.store.multi_get(keys[start : start + KEYS_AT_ONCE])
        return values

    def ask(self, question: str, ranks: Collection[int] = ()) -> dict[int, str]:
        """See `Workers`."""
        store = self.store
        self.question += 1
        number = self.question
        store.set("question", f"{number} {with_ranks(question, ranks)}")
        asked = list(ranks or range(self.world_size))
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and store.add(f"answers/{number}", 0) < len(asked):
            time.sleep(0.05)
        # A rank that could not be sure of its answer's arrival has sent, and counted, it again.
        if not store.check([f"answer/{number}/{rank}" for rank in asked]):
            asked = [rank for rank in asked if store.check([f"answer/{number}/{rank}"])]
        texts = self._get([f"answer/{number}/{rank}" for rank in asked])
        return {rank: text.decode() for rank, text in zip(asked, texts, strict=True)}

    def kill(self, infos: list[WorkerInfo]) -> None:
        """Ends processes of this host, and has other hosts end theirs; torchrun ends the rest."""
        assert self.heartbeat is not None
        self.store.set("end", " ".join(f"{info.ip}:{info.pid}" for info in infos))
        for info in infos:
            if info.ip == self.heartbeat.info.ip and info.pid != os.getpid():
                kill_process(info.pid)

    def stop(self) -> None:
        """Sends no more heartbeats."""
        if self.heartbeat is not None:
            self.heartbeat.close()


def tell(message: Job | Exception | None) -> None:
    """Tells the other ranks what to do; collective.

    Args:
        message: The job, or why there is none; None if the run has finished already.
    """
    dist.broadcast_object_list([message], src=0)


def train_as_other_rank(ranks: Ranks) -> dict[str, Any] | None:
    """Trains on a rank other than 0; collective.

    Returns:
        The summary; None if the run has finished already.

    Raises:
        Interrupted: The run was asked to stop.
        Exception: What rank 0 has told, or training raises.
    """
    message: list[Any] = [None]
    dist.broadcast_object_list(message, src=0)
    job = message[0]
    if isinstance(job, Exception):
        raise job
    if job is None:
        return None
    channel = SilentChannel()
    _stop_on_signals(channel)
    terminal = os.dup(2)  # before the worker's output goes to its log

    def on_lost(sentence: str) -> None:
        abort(1, f"trireme: {sentence}", say=partial(write_line, descriptor=terminal))

    heartbeat = StoreHeartbeat(job, ranks, channel.heartbeat, on_lost=on_lost)
    try:
        with worker_output(job, ranks.place.rank):
            summary = loop.train(job, ranks.place, channel)
    finally:
        heartbeat.close()
    if summary["stopped"]:
        raise Interrupted(f"stopped after step {summary['step']:,}")
    return summary


def _stop_on_signals(channel: SilentChannel) -> None:
    """From now on signals ask training to save and stop."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        channel.stopping = True

    for number in SIGNALS:
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # under nohup the run is to outlive its terminal
        signal.signal(number, on_signal)


def _heartbeat_store(job: Job, ranks: Ranks) -> dist.Store:
    """A new connection to a store for heartbeats.

    It is torchrun's own, in its agent's process, or else that of the process group.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: dist.Store = dist.TCPStore(*_master(), is_master=False)
    else:
        store = ranks.store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
    return dist.PrefixStore(f"watch/{job.attempt}", store)
