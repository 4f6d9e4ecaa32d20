"""One worker process of an `ActorGroup`: torch and the loop imported once, runs one after another.

A run is one Ray call. Another thread of the process answers the supervisor meanwhile: how far it is, where it stands,
and "let go", when a peer is gone and this process sits in a collective that will never end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.heartbeat import Beat
from app.job import Job, Place
from app.launchers import answers, flight, sigterm
from app.launchers.inbox import InboxChannel, work
from app.launchers.whereabouts import kill

PROCESS_GROUP_SECONDS = 1800.0
"""The supervisor ends what hangs long before this."""


@dataclass(frozen=True)
class Hello:
    """What a process says of itself once torch and the loop are imported."""

    pid: int
    node_id: str
    ip: str
    gpus: tuple[str, ...]  # ids of the GPUs that Ray gave it


@dataclass(frozen=True)
class Seat:
    """A member's place in one run."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    store: tuple[str, int]  # host and port of rank 0's store
    use_gpu: bool


@ray.remote(concurrency_groups={"watch": 2}, max_restarts=0, max_task_retries=0)  # type: ignore[call-overload]
class Member:
    def __init__(self) -> None:
        import app.loop  # noqa: F401  what takes seconds, done before anybody waits for it

        sigterm.EAR.install()
        flight.switch_on()
        self.opened_before: set[int] = set()
        self.store: Any = None

    def hello(self) -> Hello:
        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Hello(os.getpid(), context.get_node_id(), ray.util.get_node_ip_address(), gpus)

    def adopt(self, gpus: tuple[str, ...]) -> None:
        """Takes over a dead member's GPUs, which Ray has not given this process. CUDA is not initialised yet."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    def open_store(self) -> tuple[str, int]:
        """Rank 0's part of a run that is about to begin: where its peers find one another."""
        from torch.distributed import TCPStore

        self.opened_before = _listening()
        host = ray.util.get_node_ip_address()
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def run(self, job: Job, seat: Seat, inbox: Any) -> None:
        """One run, from forming the process group to leaving it; raises what training raises."""
        import torch

        if seat.rank:
            self.opened_before = _listening()
        channel = InboxChannel(inbox, seat.rank)
        answers.NOW.begin(channel)
        device = torch.device("cuda", 0) if seat.use_gpu else torch.device("cpu")
        try:
            self._join(seat)
            place = Place(seat.rank, seat.world_size, seat.local_rank, device)
            work(job, place, channel, seat.node_rank)
            torch.distributed.barrier()  # nobody tears its connections down while another rank still uses them
        finally:
            answers.NOW.end()
            self._leave()

    def _join(self, seat: Seat) -> None:
        import torch
        import torch.distributed as dist

        if interface := _interface(ray.util.get_node_ip_address()):
            # Without it gloo takes the address that the host's own name resolves to, which may be 127.0.1.1.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ |= {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.world_size), "LOCAL_RANK": str(seat.local_rank)}
        host, port = seat.store
        store = self.store if seat.rank == 0 else dist.TCPStore(host, port, is_master=False)
        if seat.use_gpu:
            torch.cuda.set_device(0)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if seat.use_gpu else "gloo",
            store=store,
            rank=seat.rank,
            world_size=seat.world_size,
            timeout=timedelta(seconds=PROCESS_GROUP_SECONDS),
        )

    def _leave(self) -> None:
        import torch
        import torch.distributed as dist

        from strategies.initialization import forget_meshes

        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # of a group whose peers are gone
                dist.destroy_process_group()
        self.store = None
        forget_meshes()
        torch.use_deterministic_algorithms(False)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    # --- answered while a run is under way ----------------------------------------------------------------------

    @ray.method(concurrency_group="watch")
    def beat(self) -> tuple[Beat, bool]:
        return answers.beat()

    @ray.method(concurrency_group="watch")
    def stack(self) -> str:
        return answers.stack()

    @ray.method(concurrency_group="watch")
    def flight(self) -> str:
        return flight.record()

    @ray.method(concurrency_group="watch")
    def let_go(self) -> int:
        """Makes every collective of the run fail now; the number of connections that were cut."""
        import torch.distributed as dist

        if answers.NOW.thread and dist.is_initialized() and dist.get_backend() != "gloo":
            with contextlib.suppress(Exception):  # gloo's groups have no abort
                dist.distributed_c10d._abort_process_group()
        return _cut(self.opened_before) if answers.NOW.thread else 0

    @ray.method(concurrency_group="watch")
    def end(self, pid: int) -> None:
        """Kills a process of this node."""
        kill(pid)


@ray.remote(num_cpus=0)
def kill_there(pid: int) -> None:
    kill(pid)


def kill_at(node: str, pid: int) -> None:
    """Ends a process of the node with this id; does not wait for it."""
    if node == ray.get_runtime_context().get_node_id():
        kill(pid)
        return
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    with contextlib.suppress(ray.exceptions.RayError):
        kill_there.options(scheduling_strategy=there).remote(pid)


def _interface(ip: str) -> str | None:
    """Name of the network interface that has this address."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return name
    return None


def _listening() -> set[int]:
    """TCP ports that this process listens on."""
    import psutil

    found = psutil.Process().net_connections(kind="tcp")
    return {entry.laddr.port for entry in found if entry.status == psutil.CONN_LISTEN}


def _cut(before: set[int]) -> int:
    """Shuts the connections down that came in on ports opened since `before`: those of gloo and of rank 0's store.

    gloo waits for a peer until a time-out, and has no way to be told otherwise; a connection that ends is an error at
    once. Each pair of ranks has one end that was accepted, so all are cut when every rank does this.
    """
    import psutil

    entries = psutil.Process().net_connections(kind="tcp")
    ports = {entry.laddr.port for entry in entries if entry.status == psutil.CONN_LISTEN} - before
    count = 0
    for entry in entries:
        if entry.status == psutil.CONN_ESTABLISHED and entry.laddr.port in ports:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(entry.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
