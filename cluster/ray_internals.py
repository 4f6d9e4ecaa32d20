"""What Trireme needs of Ray's internals, because Ray documents no way to it.

No other file touches them. Each function says why there is no public way, and what happens where
the name is missing (in another version of Ray): the program continues, slower or with less
information.
tests/cluster/test_ray_internals.py takes each name away.
"""

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any


def available_resources_per_node() -> dict[str, dict[str, float]]:
    """Free resources of each living node by its id, in Ray's units.

    Why: `ray.available_resources()` is the sum over all nodes, which does not tell whether any one
    node has room for a bundle.
    Missing: each node's total less what placement groups reserve there; actors and tasks outside of
    a group are not seen.
    """
    import ray

    try:
        from ray._private.state import available_resources_per_node

        return available_resources_per_node()
    except (ImportError, AttributeError):
        pass
    free: dict[str, dict[str, float]] = {}
    for node in ray.nodes():
        if node["Alive"]:
            free[node["NodeID"]] = dict(node["Resources"])
    for group in ray.util.placement_group_table().values():
        if group["state"] != "CREATED":
            continue
        for number, bundle in group["bundles"].items():
            node_id = group["bundles_to_node_id"][number]
            room = free.get(node_id, {})
            for name, amount in bundle.items():
                room[name] = room.get(name, 0.0) - amount
    return free


def raylet_pid(environ: Mapping[str, str] = os.environ) -> int:
    """The process id of the raylet that started this process; 0 where none has.

    For the command of a submitted job it is the raylet that started the worker which runs the job.
    Why: Ray has no call that tells it, and none before a job has connected.
    Missing: 0; the number of threads in the environment then counts as the user's, not as Ray's.
    """
    return int(environ.get("RAY_RAYLET_PID", "0"))


def draining_nodes() -> dict[str, float]:
    """Ids of the nodes that Ray drains, each with the Unix time of its end; 0 where it has none.

    Why: no documented call says that a node is drained before it is dead.
    Missing: no node is known to be drained; a machine that its cloud takes back is still announced
    by the cloud (`cluster/preemption.py`).
    """
    try:
        from ray._private.state import state

        deadlines_ms = state.get_draining_nodes()
        return {node_id: deadline / 1000 for node_id, deadline in deadlines_ms.items()}
    except (ImportError, AttributeError):
        return {}


START_SECONDS = 180
"""How long a Ray of one command may take to start, in place of Ray's 30 s, while its raylet lives.

A raylet itself gives up when its agents have imported for 30 s.
"""


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """Has ray.init wait for the node that it starts while the raylet lives, up to `START_SECONDS`.

    Why: ray.init gives up after 30 s, which cannot be set.
    Missing: it gives up after 30 s.
    """
    services: Any = importlib.import_module("ray._private.services")
    original = getattr(services, "get_node", None)
    if original is None:
        yield
        return
    until = time.monotonic() + START_SECONDS

    def get_node(*arguments: Any, **named: Any) -> Any:
        while True:
            try:
                return original(*arguments, **named)
            except RuntimeError:
                if time.monotonic() > until or not _raylet_lives():
                    raise
                time.sleep(0.1)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = original


def _raylet_lives() -> bool:
    """Whether this process has a raylet that has not ended."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def kill_at_shutdown() -> None:
    """Has ray.shutdown end the Ray that this process has started by SIGKILL at once.

    Why: ray.shutdown sends SIGTERM to one process after the other and waits for a second each, and
    these processes block SIGTERM (`cluster/detached.py`).
    Missing: it waits, and then sends SIGKILL.
    """
    try:
        from ray._private import worker

        node: Any = worker._global_node
        kill_all_processes = node.kill_all_processes
    except (ImportError, AttributeError):
        return

    def kill_at_once(*arguments: Any, **named: Any) -> None:
        kill_all_processes(check_alive=False, allow_graceful=False)

    node.kill_all_processes = kill_at_once
