"""What a cluster is doing: nodes that are up, that are starting, that failed and why, and what it costs by the hour."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import ray_file
from cluster.errors import ClusterError
from cluster.remote import ask, login_of
from cluster.shape import ClusterShape

# Runs on the head, whose dashboard listens on its loopback only.
QUERY = r"""
import json, os, urllib.request
path = os.path.expanduser(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token")
token = open(path).read().strip() if os.path.exists(path) else ""
def get(where):
    request = urllib.request.Request("http://127.0.0.1:PORT" + where)
    if token: request.add_header("Authorization", "Bearer " + token)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer: return json.load(answer)
    except Exception as error: return {"error": f"{type(error).__name__}: {error}"}
print("TRIREME" + json.dumps({"nodes": get("/api/v0/nodes?limit=10000"), "autoscaler": get("/api/cluster_status")}))
"""


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
    unpriced: int = 0  # living nodes whose price nobody has said

    def lines(self) -> list[str]:
        if not self.reachable:
            return [f"{self.name} is not up: {self.problem}"]
        gpus = sum(node["resources"].get("GPU", 0) for node in self.alive)
        count = len(self.alive)
        found = [f"{self.name}: {count} node{'s' if count != 1 else ''} up, {gpus:g} GPUs"]
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


def status_of(data: Mapping[str, Any], file: str = "") -> Status:
    """Asks the head of a cluster; never raises for one that is down."""
    name = data["cluster_name"]
    query = QUERY.replace("PORT", str(dashboard_port(data)))
    if ray_file.is_this_machine(data):
        done = subprocess.run([sys.executable, "-c", query], capture_output=True, text=True, timeout=60)
        text, problem = done.stdout, ""
    else:
        try:
            host = head_host(data, file)
        except ClusterError as error:
            return Status(name, False, str(error))
        answer = ask(login_of(data), host, "python -", stdin=query)
        text, problem = answer.out, answer.problem
    match = re.search(r"^TRIREME(\{.*\})$", text, re.MULTILINE)
    if problem or not match:
        return Status(name, False, problem or "its head does not run Python")
    from cluster.shape import shape_of
    from cluster.source import read_documents

    shape = shape_of(read_documents(file), file) if file else None
    return read_status(name, json.loads(match[1]), shape)


def dashboard_port(data: Mapping[str, Any]) -> int:
    match = re.search(r"--dashboard-port[= ](\d+)", " ".join(data.get("head_start_ray_commands") or []))
    return int(match[1]) if match else 8265


def head_host(data: Mapping[str, Any], file: str) -> str:
    """Address of the head: the file's, or the cloud's answer.

    Raises:
        ClusterError: the cloud has no head of this cluster, or cannot be asked.
    """
    if data["provider"]["type"] == "local":
        return data["provider"]["head_ip"]
    command = [str(Path(sys.executable).with_name("ray")), "get-head-ip", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = [line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"[\d.]+|[0-9a-f:]{3,}", line.strip())]
    if done.returncode or not found:
        said = next((line for line in reversed((done.stderr or done.stdout).splitlines()) if line.strip()), "no answer")
        raise ClusterError(f"the head of {data['cluster_name']} cannot be found: {said.strip()[:200]}")
    return found[-1]


def read_status(name: str, answer: Mapping[str, Any], shape: ClusterShape | None) -> Status:
    """What the head's state API and its autoscaler said, put together. Pure."""
    nodes = answer["nodes"]
    if "error" in nodes and re.search(r"\b40[13]\b", nodes["error"]):
        problem = "its Ray refuses the token in ~/.ray/auth_token there, which is not the one that it was started with"
        return Status(name, False, problem)
    if "error" in nodes:
        return Status(name, False, f"Ray does not answer on its head ({nodes['error']})")
    rows = (((nodes.get("data") or {}).get("result") or {}).get("result")) or []
    alive = [
        {
            "ip": row["node_ip"],
            "head": bool(row.get("is_head_node")),
            "resources": row.get("resources_total") or {},
            "type": (row.get("labels") or {}).get("ray.io/node-group", ""),
        }
        for row in rows
        if row.get("state") == "ALIVE"
    ]
    report = _autoscaler(answer.get("autoscaler") or {})
    starting = [f"{kind} {ip}: {state}" for ip, kind, state in _triples(report.get("pending_nodes"))]
    starting += [f"{count} × {kind}: asked for" for kind, count in (report.get("pending_launches") or {}).items()]
    failed = [f"{kind} {ip}: {_failure(ip, report)}" for ip, kind, *_ in report.get("failed_nodes") or []]
    failed += list(unavailable(report))
    dollars, unpriced = hourly(shape, alive) if shape else (None, 0)
    return Status(name, True, "", alive, starting, failed, dollars, unpriced)


def _autoscaler(answer: Mapping[str, Any]) -> dict[str, Any]:
    status = (answer.get("data") or {}).get("clusterStatus") or {}
    return status.get("autoscalerReport") or {}


def _triples(rows: Any) -> list[tuple[str, str, str]]:
    return [(str(row[0]), str(row[1]), str(row[2]) if len(row) > 2 else "starting") for row in rows or []]


def _failure(ip: str, report: Mapping[str, Any]) -> str:
    return str((report.get("failed_nodes_reason") or {}).get(ip, "its set-up or start command failed (monitor.out)"))


def unavailable(report: Mapping[str, Any]) -> list[str]:
    """The cloud's last refusals: quota, no capacity, wrong credentials; by node type."""
    found = []
    summary = (report.get("node_availability_summary") or {}).get("node_availabilities") or {}
    for kind, entry in summary.items():
        info = entry.get("unavailable_node_information") if isinstance(entry, dict) else None
        if info:
            found.append(f"{kind}: {info.get('category', 'unavailable')}: {str(info.get('description', ''))[:300]}")
    return found


def hourly(shape: ClusterShape, alive: list[dict[str, Any]]) -> tuple[float | None, int]:
    """Dollars an hour of the living nodes, and how many have no price. None if none has one."""
    total, unpriced = 0.0, 0
    for node in alive:
        price = price_of(shape, node["type"], head=node["head"])
        if price is None:
            unpriced += 1
        else:
            total += price
    return (None, unpriced) if unpriced == len(alive) else (total, unpriced)


def price_of(shape: ClusterShape, kind: str, *, head: bool) -> float | None:
    """Dollars an hour of one node: of its type's name, else of the only worker type there is."""
    if head:
        return shape.head.price_per_hour
    found = shape.named(kind)
    if found is None and len(shape.workers) == 1:
        found = shape.workers[0]
    return found.price_per_hour if found else None
