"""What a cluster is doing: nodes that are up, that are starting, that failed and why, and what it costs by the hour.

Asked of Ray by its documented commands: `ray list nodes`, and `ray status -v` for what the autoscaler does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import ClusterError, ray_file
from cluster.files import read_cluster
from cluster.pending import AutoscalerReport
from cluster.remote import Result, last_line, login_of, run
from cluster.shape import ClusterShape

RAY = str(Path(sys.executable).with_name("ray"))
ASK = (
    "ray list nodes --format=json --limit=10000 --timeout=10 --address=http://127.0.0.1:{dashboard} && "
    "ray status -v --address=127.0.0.1:{gcs}"
)
TOKEN_REFUSED = re.compile(r"\b40[13]\b|[Aa]uthentication|[Uu]nauthenticated|[Tt]oken")


@dataclass(frozen=True)
class Status:
    """A cluster at one moment. Texts are for a person."""

    name: str
    reachable: bool
    problem: str = ""  # why it could not be asked
    alive: list[dict[str, Any]] = field(default_factory=list)  # ip, head, resources, type
    starting: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    dollars_per_hour: float | None = None
    unpriced: int = 0  # living nodes whose price is not known

    def lines(self) -> list[str]:
        if not self.reachable:
            return [f"{self.name} is not up: {self.problem}"]
        gpus = sum(node["resources"].get("GPU", 0) for node in self.alive)
        found = [f"{self.name}: {len(self.alive)} node{'s' if len(self.alive) != 1 else ''} up, {gpus:g} GPUs"]
        for node in self.alive:
            r = node["resources"]
            kind = "head" if node["head"] else node["type"] or "worker"
            found.append(f"  {node['ip']:<16} {kind:<14} {r.get('CPU', 0):g} CPUs, {r.get('GPU', 0):g} GPUs")
        found += [f"  starting  {text}" for text in self.starting]
        found += [f"  failed    {text}" for text in self.failed]
        if self.dollars_per_hour is not None:
            more = f", and {self.unpriced} nodes whose price is not known" if self.unpriced else ""
            found.append(f"  costs     ${self.dollars_per_hour:.2f} an hour{more}")
        else:
            found.append("  costs     not known: write price_per_hour under metadata.trireme.nodes of the file")
        return found


def status_of(data: Mapping[str, Any], file: str) -> Status:
    """Asks the head of a cluster; never raises for one that is down."""
    name = data["cluster_name"]
    command = ASK.format(dashboard=ray_file.dashboard_port(data), gcs=ray_file.gcs_port(data))
    if ray_file.is_this_machine(data):
        done = subprocess.run(command, shell=True, env=ray_environment(), capture_output=True, text=True, timeout=60)
        result = Result("this machine", done.returncode, done.stdout, done.stderr)
    else:
        try:
            result = run(login_of(data), head_host(data, file), command)
        except ClusterError as error:
            return Status(name, False, str(error))
    return read_status(name, result, read_cluster(file))


def ray_environment() -> dict[str, str]:
    """This environment with the Python of ours first, so that `ray` is its Ray."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def head_host(data: Mapping[str, Any], file: str) -> str:
    """Address of the head: the file's, or the cloud's answer.

    Raises:
        ClusterError: the cloud has no head of this cluster, or cannot be asked.
    """
    if data["provider"]["type"] == "local":
        return data["provider"]["head_ip"]
    done = subprocess.run([RAY, "get-head-ip", file], capture_output=True, text=True, timeout=120)
    found = [line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"[\d.]+|[0-9a-f:]{3,}", line.strip())]
    if done.returncode or not found:
        why = last_line(done.stderr or done.stdout)
        raise ClusterError(f"the head of {data['cluster_name']} cannot be found: {why}")
    return found[-1]


def read_status(name: str, result: Result, shape: ClusterShape | None) -> Status:
    """What the head's two commands printed, put together. Pure."""
    match = re.search(r"^\[\{.*\}\]$", result.out, re.MULTILINE)
    if result.problem or not match:
        if TOKEN_REFUSED.search(result.err):
            problem = "its Ray refuses the token in ~/.ray/auth_token there, which is not the one that it started with"
            return Status(name, False, problem)
        return Status(name, False, result.problem or f"Ray does not answer on its head ({last_line(result.err)})")
    alive = [
        {
            "ip": row["node_ip"],
            "head": bool(row.get("is_head_node")),
            "resources": row.get("resources_total") or {},
            "type": (row.get("labels") or {}).get("ray.io/node-group", ""),
        }
        for row in json.loads(match[0])
        if row.get("state") == "ALIVE"
    ]
    pending, failed = autoscaler_report(result.out[match.end() :])
    dollars, unpriced = hourly(shape, alive) if shape else (None, 0)
    return Status(name, True, "", alive, pending, failed, dollars, unpriced)


def autoscaler_now() -> AutoscalerReport:
    """What the autoscaler of the connected cluster reports, as far as it answers. Takes a second or two."""
    import ray

    command = ["ray", "status", "-v", f"--address={ray.get_runtime_context().gcs_address}"]
    try:
        done = subprocess.run(command, env=ray_environment(), capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return AutoscalerReport(True)
    return AutoscalerReport(True, *map(tuple, autoscaler_report(done.stdout)))


def autoscaler_report(text: str) -> tuple[list[str], list[str]]:
    """Nodes that are starting, and those that failed or that the cloud refused, from what `ray status -v` prints of an
    autoscaler of either version. Pure."""
    found: dict[str, list[str]] = {"Pending:": [], "Recent failures:": []}
    section = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            section = line.strip()
        elif section in found and not line.strip().startswith("(no "):
            found[section].append(line.strip())
    return found["Pending:"], found["Recent failures:"]


def hourly(shape: ClusterShape, alive: list[dict[str, Any]]) -> tuple[float | None, int]:
    """Dollars an hour of the living nodes, and how many have no price. None if none has one."""
    prices = [price_of(shape, node["type"], head=node["head"]) for node in alive]
    known = [price for price in prices if price is not None]
    return sum(known) if known else None, len(prices) - len(known)


def price_of(shape: ClusterShape, kind: str, *, head: bool) -> float | None:
    """Dollars an hour of one node: of its type's name, else of the only worker type there is."""
    if head:
        return shape.head.price_per_hour
    found = shape.named(kind)
    if found is None and len(shape.workers) == 1:
        found = shape.workers[0]
    return found.price_per_hour if found else None
