"""What Trireme needs of Ray's internals, because Ray documents no way to it. No other file touches them.

Each entry says why there is no public way and what happens where the name is missing (another Ray version): the program
continues, slower or with less information. tests/cluster/test_ray_internals.py takes each name away.
"""

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any


def available_resources_per_node() -> dict[str, dict[str, float]]:
    """Free resources of each living node by its id, in Ray's units.

    Why: `ray.available_resources()` is the sum over all nodes, from which it does not follow whether any one node can
    hold a bundle. Missing: each node's total less what placement groups hold there, so that actors and tasks outside
    of a group are not seen.
    """
    import ray

    try:
        from ray._private.state import available_resources_per_node

        return available_resources_per_node()
    except (ImportError, AttributeError):
        free: dict[str, dict[str, float]] = {n["NodeID"]: dict(n["Resources"]) for n in ray.nodes() if n["Alive"]}
    for group in ray.util.placement_group_table().values():
        for number, bundle in group["bundles"].items() if group["state"] == "CREATED" else ():
            room = free.get(group["bundles_to_node_id"][number], {})
            for name, amount in bundle.items():
                room[name] = room.get(name, 0.0) - amount
    return free


def raylet_pid(environ: Mapping[str, str] = os.environ) -> int:
    """Of the raylet that started this process or, for the command of a submitted job, the worker that runs it; else 0.

    Why: Ray has no call that tells it, and none before a job has connected. Missing: 0: the number of threads in the
    environment counts as the user's, though it may be Ray's.
    """
    return int(environ.get("RAY_RAYLET_PID", "0"))


def draining_nodes() -> dict[str, float]:
    """Ids of the nodes that Ray drains, each with the Unix time at which it ends; 0 where no time was given.

    Why: no documented call says that a node is drained before it is dead. Missing: none is known to be drained; a
    machine that its cloud takes back is still announced by the cloud (`cluster/preemption.py`).
    """
    try:
        from ray._private.state import state

        return {node: deadline / 1000 for node, deadline in state.get_draining_nodes().items()}
    except (ImportError, AttributeError):
        return {}


START_SECONDS = 180
"""How long a lean head may take to start, in place of Ray's 30 s, while its raylet lives. A raylet itself gives up when
its agents have imported for 30 s."""


def start_lean_head(object_store_bytes: int, setup_worker: str, folder: str) -> Any:
    """Starts a Ray head on this machine of a GCS server and a raylet with its agents only: no API server, no monitor of
    an autoscaler, no monitor of log files, and agents that look seldom. Returns an object with `gcs_address` and
    `kill_all_processes()`; the processes end with this one, however it ends. To be called in the main thread.

    Why: `ray.init` and `ray start` start all of them, and wait a second and a half for the API server first. Missing:
    raises ImportError or AttributeError, and `cluster/fast_start` leaves it to `ray.init`.

    setup_worker: the Python file that the raylet starts for each worker, in place of Ray's own. folder: for its files.
    """
    from ray._private.authentication import authentication_token_setup as authentication
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class LeanNode(Node):
        def start_api_server(self, **options: Any) -> None:
            self._webui_url = ""

    settings: dict[str, Any] = {
        # By default a process per core is kept ready for ever, and looks for signals a hundred times a second.
        "num_workers_soft_limit": 0,
        "idle_worker_killing_time_threshold_ms": 10_000,
        "event_stats": False,
        "metrics_report_interval_ms": 60_000,
    }
    parts: dict[str, Any] = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    params = RayParams(
        object_store_memory=object_store_bytes,
        dashboard_agent_listen_port=0,  # any: the usual one may be another Ray's
        env_vars={"REPORTER_UPDATE_INTERVAL_MS": "60000"},
        setup_worker_path=setup_worker,
        temp_dir=folder,
        _system_config=settings,
        **parts,
    )
    authentication.enable_token_auth_by_default()
    authentication.ensure_token_if_auth_enabled(settings, create_token_if_missing=True)
    with _patience():
        return LeanNode(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """While it lasts a node that has been started is waited for as long as its raylet lives and `START_SECONDS`; where
    Ray has no such function, for the 30 s that stand in its code."""
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


@contextlib.contextmanager
def actor_ids_from_system() -> Iterator[None]:
    """While it lasts Ray draws the id of each class that is declared an actor's from the operating system, not from its
    own generator: once that was used, its state, and what is drawn next, is the same in all forks of the process.

    Why: Ray has no way to seed its generator. Missing: nothing is done, and forks of a process that imported classes of
    actors draw the same ids; `cluster/fast_start` forks with versions only that have the name.
    """
    try:
        actor: Any = importlib.import_module("ray.actor")
        kind = actor.ActorClassID
    except (ImportError, AttributeError):
        yield
        return

    class FromSystem:
        @staticmethod
        def from_random() -> Any:
            return kind(os.urandom(kind.size()))

    actor.ActorClassID = FromSystem
    try:
        yield
    finally:
        actor.ActorClassID = kind
