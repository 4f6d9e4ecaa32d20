"""Reaches the Ray cluster that is meant, or starts Ray on this machine, and says what the cluster has."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import ClusterError
from cluster.fast_start.head import bare_head
from cluster.fast_start.warm import OWN, STUB, python_path, runtime_env

OF_ONE_COMMAND = {
    # By default a process per core is kept ready for ever, each of which looks for signals a hundred times a second.
    "num_workers_soft_limit": 0,
    "idle_worker_killing_time_threshold_ms": 10_000,
    # Nobody reads these.
    "event_stats": False,
    "metrics_report_interval_ms": 60_000,
}
"""What a Ray of one command's own is told, so that it idles for less (`python -m experiments.benchmarks idle`)."""


@dataclass(frozen=True)
class Cluster:
    """What Ray believes there is: totals over the nodes that are alive, in Ray's resource units."""

    address: str
    nodes: int
    resources: Mapping[str, float]
    largest: Mapping[str, float]  # per resource, the most that one node has
    limits: Mapping[str, float]  # what an autoscaler may grow the cluster to; empty where there is none
    started_here: bool

    @property
    def gpus(self) -> int:
        return int(self.resources.get("GPU", 0))


def connect(keep_warm: float = 0.0) -> Cluster:
    """Connects to RAY_ADDRESS, else to the cluster running on this machine, else starts Ray here.

    Workers import from this process' current folder too.

    keep_warm: seconds that a node of a cluster keeps a process with everything imported, from which workers are forked
        (`cluster.fast_start.warm`), after its last one has ended; 0: workers start by themselves.
    Raises:
        ClusterError: there is an address, and nobody answers there or lets this process in.
    """
    import ray

    if ray.is_initialized():
        return describe(started_here=False)
    options: dict[str, Any] = {
        "namespace": "trireme",
        "log_to_driver": False,  # workers write to files of their own; Ray would show every line of everybody
        "configure_logging": True,
        "logging_level": logging.ERROR,
    }
    found = address()
    if found:
        _check_reachable(found)
    try:
        if found:
            asked = {"env_vars": {"PYTHONPATH": python_path()}, **runtime_env(keep_warm)}
            ray.init(address=found, runtime_env=asked, **options)
        else:
            # An own small Ray, with a small object store, since tensors never go through it. Its
            # processes inherit the environment; a runtime_env would keep the workers that Ray starts ahead unused.
            os.environ["PYTHONPATH"] = python_path()
            if keep_warm:
                OWN.begin()
            else:
                OWN.end()
            with bare_head(STUB if OWN.pid else ""):
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=100_000_000,
                    _system_config=OF_ONE_COMMAND,
                    **options,
                )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if found:
            raise ClusterError(
                f"the Ray cluster at {found} does not let this process in ({first}): its token may be missing here, "
                "wrong or expired (~/.ray/auth_token, RAY_AUTH_MODE=token), its Ray another version, or this machine "
                "none of its nodes (then `trireme submit` sends a job there)"
            ) from error
        raise ClusterError(f"Ray does not start on this machine: {first}") from error
    return describe(started_here=not found)


def disconnect() -> None:
    """Leaves the cluster, or ends the Ray that `connect` started, and what its workers were forked from."""
    import ray

    ray.shutdown()
    OWN.end()


def address() -> str | None:
    """Where `connect` finds a cluster; None if there is none, and it would start Ray here."""
    return os.environ.get("RAY_ADDRESS") or running_here()


def _check_reachable(found: str) -> None:
    """Raises ClusterError where ray.init would try for minutes: nobody listens, or it is no cluster's address."""
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


def describe(*, started_here: bool) -> Cluster:
    """The cluster that this process is connected to."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    largest: dict[str, float] = {}
    for node in nodes:
        for name, amount in node["Resources"].items():
            largest[name] = max(largest.get(name, 0.0), amount)
    address = ray.get_runtime_context().gcs_address
    return Cluster(address, len(nodes), dict(ray.cluster_resources()), largest, _limits(address), started_here)


def _limits(address: str) -> dict[str, float]:
    """What an autoscaler may grow the cluster to, by resource.

    Ray's own tables say it on Anyscale only. Elsewhere: the cluster's file where TRIREME_CLUSTER names one, else the
    configuration that the autoscaler on this machine was started with (jobs run on the head, and so does it).
    """
    from ray._private.state import state

    from cluster.shape import cluster_file, read_cluster

    told = {name: float(most) for name, most in (state.get_max_resources_from_cluster_config() or {}).items()}
    file = cluster_file()
    if told or not file:
        return told or limits_of(_autoscaler_config(address))
    shape = read_cluster(file)
    if shape.provider == "local":
        return {}
    rows = [({"CPU": kind.cpus, "GPU": float(kind.gpus)}, kind.max_nodes) for kind in shape.workers]
    return _most(rows, shape.max_workers)


def limits_of(config: Mapping[str, Any]) -> dict[str, float]:
    """The same from a configuration of Ray's launcher; empty where nothing grows."""
    total, head = config.get("max_workers", 0), config.get("head_node_type")
    rows = [
        (kind.get("resources") or {}, min(kind.get("max_workers", total), total))
        for name, kind in (config.get("available_node_types") or {}).items()
        if name != head
    ]
    return _most(rows, total)


def _most(rows: Sequence[tuple[Mapping[str, float], int]], nodes: int | None) -> dict[str, float]:
    """The most of each resource on at most `nodes` nodes; rows: resources of one node, and how many there may be."""
    found = {}
    for name in {name for resources, _ in rows for name in resources}:
        left = nodes if nodes is not None else sum(most for _, most in rows)
        amount = 0.0
        for each, most in sorted(((resources.get(name, 0.0), most) for resources, most in rows), reverse=True):
            amount, left = amount + each * min(most, left), left - min(most, left)
        if amount:
            found[name] = amount
    return found


def _autoscaler_config(address: str) -> dict[str, Any]:
    """What this machine's autoscaler of the cluster at `address` was started with; empty where there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            file = next((word.partition("=")[2] for word in words if word.startswith("--autoscaling-config=")), "")
            if file and any(word == f"--gcs-address={address}" for word in words):
                found = yaml.safe_load(Path(file).expanduser().read_text())
                return found if isinstance(found, dict) else {}
        except (OSError, yaml.YAMLError):
            continue
    return {}


def check_fits(cluster: Cluster, workers: int, per_worker: Mapping[str, float]) -> None:
    """Raises ClusterError if the cluster can never give `workers` bundles of `per_worker`.

    An autoscaling cluster may yet get what is missing, so what counts there is its limit, as Ray was told it.
    """
    for name, amount in per_worker.items():
        if amount <= 0:
            continue
        total, most = cluster.resources.get(name, 0.0), cluster.largest.get(name, 0.0)
        if name in cluster.limits:
            total, most = max(total, cluster.limits[name]), max(most, amount)
        room = int(total / amount + 1e-9) if most >= amount else 0
        if room < workers:
            has = f"{total:g} {name} in all" if cluster.nodes == 1 else f"{total:g} {name} on {cluster.nodes} nodes"
            raise ClusterError(
                f"{workers} workers of {amount:g} {name} each do not fit on this cluster, which has {has}: write "
                f"workers={room or 1} or a smaller resources_per_worker.{name}"
            )


def running_here() -> str | None:
    """Address of the cluster that `ray start` joined this machine to, if it still answers."""
    from ray._private.utils import read_ray_address

    address = read_ray_address()
    if not address:
        return None
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1.0):
            return address
    except (OSError, ValueError):
        return None  # left behind by a cluster that is gone
