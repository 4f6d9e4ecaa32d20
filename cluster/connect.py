"""Reaches the Ray cluster that is meant, or starts Ray on this machine, and says what the cluster has."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import ClusterError
from cluster.environment import set_defaults, shared
from cluster.temporary import TemporaryFolder

if TYPE_CHECKING:
    from cluster.shape import ClusterShape, NodeState

_ROOT = str(Path(__file__).resolve().parents[1])
OBJECT_STORE_BYTES = 100_000_000  # of a Ray of one command: tensors never go through it
SETTINGS = {
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",  # else ray.init refuses a variable that a submitted job has set too
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how soon a dead worker is noticed; 2 s by default
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # cluster/preemption.py does it, for clouds as well
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else what a model prints appears twice
}
"""Documented settings of Ray and Ray Train, which are read from the environment, where the user has set none."""
_FOLDERS: list[TemporaryFolder] = []  # of the Ray that this process has started
_log = logging.getLogger(__name__)
_made = False  # whether `connect` has made this process's connection; else it is a notebook's, say


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that this process is connected to, as it was when it was asked.

    shape: with limits and prices where its file is known; else what is alive, and stays so.
    private: this process has started it, for itself.
    """

    nodes: tuple[NodeState, ...]
    shape: ClusterShape
    private: bool = False

    @property
    def gpus(self) -> int:
        return int(sum(node.total.get("GPU", 0) for node in self.nodes))

    @property
    def gpus_of_largest(self) -> int:
        """The most that one node has."""
        return int(max(node.total.get("GPU", 0) for node in self.nodes))

    @property
    def max_resources(self) -> dict[str, float]:
        """What an autoscaler may grow the cluster to; empty where there is none."""
        shape = self.shape
        if not shape.path or shape.provider == "local":  # all on-prem machines are there from the start
            return {}
        most = {
            "CPU": shape.max_on_workers(lambda kind: kind.cpus),
            "GPU": shape.max_on_workers(lambda kind: kind.gpus),
        }
        return {name: amount for name, amount in most.items() if amount}


def connect(preload: str = "", worker_setup: str = "") -> Cluster:
    """Connects to RAY_ADDRESS, else to the cluster running on this machine, else starts Ray here. Workers import from
    this process' current folder too.

    preload: module with what workers need, from processes with which they are forked where `cluster/fast_start` can be
        used; "": workers start by themselves.
    worker_setup: "module.function" that each worker's process calls first, where something else on Ray's search path
        has the name of one of Trireme's packages; "": nothing has.
    Raises:
        ClusterError: there is an address, and no cluster answers there or it does not let this process in.
    """
    global _made
    if getattr(sys.modules.get("ray"), "is_initialized", bool)():  # without importing it
        return describe()
    variables, found = _share_environment(first=bool(worker_setup)), address()
    if found:
        _check_reachable(found)
    warm = _fast_start() if preload else None
    if warm and found:  # others import, while this process does
        warm.warm_up_node(found, preload)
    elif warm:
        warm.PRIVATE.warm_up(preload)
    import ray

    options: dict[str, Any] = {
        "namespace": "trireme",
        "log_to_driver": False,  # workers write to files of their own; Ray would show every line of all of them
        "logging_level": logging.ERROR,
    }
    try:
        if found:  # ray.init finds it as `address` does, and its token
            asked = warm.runtime_env(preload) if warm else {}
            ray.init(runtime_env={"env_vars": variables, **asked, **_setup(worker_setup)}, **options)
        else:
            # Its processes inherit the environment: without a runtime_env the workers that Ray starts ahead are used.
            if worker_setup:
                options["runtime_env"] = _setup(worker_setup)
            _FOLDERS.append(TemporaryFolder())
            folder = str(_FOLDERS[-1].path)
            head = warm.PRIVATE.start(OBJECT_STORE_BYTES, folder) if warm else None
            if warm and head:
                ray.init(address=head, **options)
                warm.PRIVATE.guard()
            else:
                local: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
                ray.init("local", _temp_dir=folder, **local, **options)
    except Exception as error:  # where it does not start in time Ray raises just that
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if found and not isinstance(error, (OSError, RuntimeError, ValueError)):
            raise
        if found:
            raise ClusterError(
                f"the Ray cluster at {found} does not let this process in ({first}): its token may be missing here, "
                "wrong or expired (~/.ray/auth_token, RAY_AUTH_MODE=token), its Ray another version, or this machine "
                "not one of its nodes (then `trireme submit` sends a job there)"
            ) from error
        raise ClusterError(f"Ray does not start on this machine; try again when it is less busy: {first}") from error
    _made = True
    return describe(private=not found)


def disconnect() -> None:
    """Leaves the cluster, or ends the Ray that `connect` started; a connection that was there before stays."""
    global _made
    if not _made:
        return
    import ray

    _made = False

    ray.shutdown()
    if warm := _fast_start():
        warm.PRIVATE.end()
    while _FOLDERS:
        _FOLDERS.pop().remove()


# --- cluster/fast_start: this is the only place that knows of it -----------------------------------------------------


def _fast_start() -> Any:
    """The accelerator where its folder is there and was tested with what is installed, else None."""
    try:
        from cluster.fast_start import warm
    except ImportError:
        return None
    reason = warm.why_not()
    if reason:
        _log.info("Ray starts without cluster/fast_start: %s", reason)
    return None if reason else warm


def run_forked(words: Sequence[str], preload: str, worker_setup: str = "") -> int | None:
    """Runs `trireme WORDS` in a process that has everything imported, where it will use a cluster of which this machine
    is a node; its exit code, None where there is no such process and the command must run by itself. worker_setup: as
    `connect` has it."""
    found = address()
    warm = _fast_start() if found else None
    if warm is None:
        return None
    _share_environment(first=bool(worker_setup))
    return warm.run_forked(words, found, preload)


def kept_warm() -> list[dict[str, Any]]:
    """What is kept alive on this machine between commands, for this user: see `warm.kept`."""
    try:
        from cluster.fast_start import warm
    except ImportError:
        return []
    return warm.kept()


def end_warm(server: dict[str, Any]) -> bool:
    """Ends one of `kept_warm`, with workers that were forked from it; whether it is gone."""
    from cluster.fast_start import warm

    return warm.end(server)


def _share_environment(*, first: bool) -> dict[str, str]:
    """Sets what all processes of a job are to have (one fork server serves all); what Ray is to pass on.

    Args:
        first: Whether Trireme's own folder comes before the current one, which has packages of the same names.
    """
    folders = [_ROOT, os.getcwd()] if first else [os.getcwd()]
    parts = [*folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep), _ROOT]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, parts)))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    set_defaults()
    return shared()


def _setup(worker_setup: str) -> dict[str, Any]:
    """The field of a runtime environment by which workers call a function first; empty where the job has its own.

    https://docs.ray.io/en/latest/ray-core/api/doc/ray.runtime_env.RuntimeEnv.html
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}").get("runtime_env") or {}
    if not worker_setup or job.get("worker_process_setup_hook"):
        return {}
    return {"worker_process_setup_hook": worker_setup}


# --- which cluster ----------------------------------------------------------------------------------------------------


def address() -> str | None:
    """Where `connect` finds a cluster; None if there is none, and it would start Ray here."""
    return os.environ.get("RAY_ADDRESS") or running_here()


def running_here() -> str | None:
    """Address of the cluster that this user's `ray start` joined this machine to, if it still answers. Another user's
    processes of Ray on this machine let nobody else in: Ray ends a process that tries, without a word."""
    try:
        noted = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
        if noted.stat().st_uid != os.getuid():
            return None
        found = noted.read_text().strip()
        host, _, port = found.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return found
    except (OSError, ValueError):
        return None  # none was started, or it was left behind by a cluster that is gone


def _check_reachable(found: str) -> None:
    """Raises ClusterError where ray.init would try for minutes: nothing listens there, or it is not a Ray cluster."""
    if found.startswith(("http://", "https://")):
        raise ClusterError(
            f"RAY_ADDRESS={found} is a job server: `trireme submit` sends jobs there; for this command unset it, or "
            "write the HOST:PORT that `ray start` printed"
        )
    host, _, port = found.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # auto, local, and what only Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {found} ({error}): `ray start --head` starts one, or unset RAY_ADDRESS"
        ) from error
    if _is_of_another_user(port):
        raise ClusterError(
            f"the Ray of {found} on this machine was started by another user, and lets nobody else in: "
            "`trireme submit` sends a job there, or unset RAY_ADDRESS"
        )


def _is_of_another_user(port: str) -> bool:
    """Whether this machine's raylet of the cluster with that port is not this user's: its sockets are closed to others,
    and Ray ends a process that tries, without a word."""
    import psutil

    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = process.info["cmdline"] or [""], process.info["uids"]
        known = next((word for word in words if word.startswith("--gcs-address=")), "")
        if words[0].endswith("/raylet") and known.endswith(f":{port}") and os.getuid() not in (0, uids.real):
            return True
    return False


def describe(*, private: bool = False) -> Cluster:
    """The cluster that this process is connected to. Its file is TRIREME_CLUSTER, or what `ray up` leaves on the head,
    where jobs run.

    private: Ray was started by this process, and is of no file.
    """
    from cluster.files import bootstrap_config, cluster_file, read_cluster
    from cluster.shape import living_nodes, of_nodes

    nodes, file = living_nodes(), None if private else cluster_file()
    shape = read_cluster(file) if file else None if private else bootstrap_config()
    return Cluster(tuple(nodes), shape or of_nodes(nodes), private)
