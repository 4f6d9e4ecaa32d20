"""What facts mean: one small function per fault, facts in, findings out. A new check is a function and a row in TABLE.

Thresholds stand beside the check that uses them, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from app.console import size
from app.doctor import gpu_checks, network_checks
from app.doctor.facts import ClusterFacts, Finding, NodeFacts

Check = Callable[[ClusterFacts], Iterator[Finding]]


def silent(facts: ClusterFacts) -> Iterator[Finding]:
    for node in facts.nodes:
        if node.problem:
            yield Finding(
                "no_answer",
                f"{node.who} does not answer: {node.problem}",
                "look at its raylet (/tmp/ray/session_latest/logs/raylet.err there), or start Ray on it again",
                (node.node_id,),
            )


def versions(facts: ClusterFacts) -> Iterator[Finding]:
    """Ray refuses another Python or Ray; another torch or NCCL hangs or answers wrongly in the first collective."""
    columns: list[tuple[str, Callable[[NodeFacts], str]]] = [
        ("Python", lambda n: ".".join(n.python.split(".")[:2])),
        *[(name, lambda n, name=name: n.packages.get(name, "")) for name in ("ray", "torch", "numpy", "mlflow")],
        ("NCCL", lambda n: n.nccl),
        ("the NVIDIA driver", lambda n: n.driver),
    ]
    for what, version in columns:
        having = [node for node in facts.answered if version(node) or what not in ("NCCL", "the NVIDIA driver")]
        counts = Counter(version(node) for node in having)
        if len(counts) < 2:
            continue
        head = next((version(node) for node in having if node.head), "")
        usual = head or counts.most_common(1)[0][0]
        for node in having:
            if version(node) != usual:
                yield Finding(
                    "other_version",
                    f"{node.who} has {what} {version(node) or '(none)'}, and the head {usual or 'has none'}",
                    "install the same constraints.txt on every node"
                    if what != "the NVIDIA driver"
                    else "install the same driver on every node",
                    (node.node_id,),
                    grave=what != "the NVIDIA driver",
                )


def _per_node(
    code: str, wrong: Callable[[NodeFacts], bool], says: Callable[[NodeFacts], str], mend: str, *, grave: bool = True
) -> Check:
    """A check that looks at each node by itself."""

    def check(facts: ClusterFacts) -> Iterator[Finding]:
        for node in facts.answered:
            if wrong(node):
                yield Finding(code, says(node), mend, (node.node_id,), grave=grave)

    return check


# NCCL and data loaders keep their buffers in /dev/shm; Docker gives 64 MB.
shared_memory = _per_node(
    "small_shm",
    lambda node: node.shm_bytes < 1_000_000_000,
    lambda node: f"{node.who} has only {size(node.shm_bytes)} of shared memory (/dev/shm)",
    "start its container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir of medium Memory)",
)

# Ray holds a socket per peer and worker; with 1,024 it stops at some hundred actors.
open_files = _per_node(
    "few_files",
    lambda node: node.open_files < 4096,
    lambda node: f"a process on {node.who} may open only {node.open_files:,} files",
    "run `ulimit -n 65536` before `ray start`, or set nofile in /etc/security/limits.conf",
    grave=False,
)

# Ray spills and logs there, and refuses work from 95 % on.
disk = _per_node(
    "disk_full",
    lambda node: node.disk_free < 2_000_000_000,
    lambda node: f"{node.who} has {size(node.disk_free)} free in {node.disk_path}, where Ray works",
    "make room there, or start Ray with --temp-dir on a larger disk",
)

memory = _per_node(
    "little_memory",
    lambda node: node.memory_available < 1_000_000_000,
    lambda node: f"{node.who} has {size(node.memory_available)} of memory left",
    "end what takes it (`ps aux --sort=-rss | head`), or give it less work",
)

# Leases, tokens and object stores compare clocks; 5 s is far beyond what NTP leaves.
clock = _per_node(
    "clock",
    lambda node: abs(node.skew) > 5.0,
    lambda node: f"the clock of {node.who} is {abs(node.skew):.0f} s {'ahead' if node.skew > 0 else 'behind'}",
    "run chrony or systemd-timesyncd on it",
)


def slow_node(facts: ClusterFacts) -> Iterator[Finding]:
    """A gang waits for its slowest. Half of the peers' median is not noise, since CPU time is what is counted."""
    measured = [node for node in facts.answered if node.flops]
    if len(measured) < 3:
        return
    usual = sorted(node.flops or 0.0 for node in measured)[len(measured) // 2]
    for node in measured:
        if (node.flops or 0.0) < 0.5 * usual:
            yield Finding(
                "slow_node",
                f"{node.who} multiplies matrices at {(node.flops or 0) / 1e9:.1f} GFLOP/s, the others at "
                f"{usual / 1e9:.1f}",
                "look for thermal or power limits and for other work on it, or leave it out (--exclude-bad)",
                (node.node_id,),
            )


def storage(facts: ClusterFacts) -> Iterator[Finding]:
    for node in facts.answered:
        if node.storage_problem:
            yield Finding(
                "storage",
                f"{node.who} cannot write to {facts.storage}: {node.storage_problem}",
                "mount it there at the same path, with the right to write",
                (node.node_id,),
            )
    writing = {node.node_id for node in facts.answered if not node.storage_problem and node.storage_seen is not None}
    for node in facts.answered:
        if node.node_id in writing and not node.storage_problem:
            lost = writing - set(node.storage_seen or ())
            if lost:
                other = facts.node(sorted(lost)[0])
                yield Finding(
                    "storage_differs",
                    f"{facts.storage} on {node.who} is not that of {other.who}: each sees only its own files",
                    "mount one shared folder on both, or use s3:// or gs://",
                    (node.node_id,),
                )


def mlflow(facts: ClusterFacts) -> Iterator[Finding]:
    bad = [node for node in facts.answered if node.mlflow_problem]
    if bad:
        where = "no node" if len(bad) == len(facts.answered) else ", ".join(node.who for node in bad)
        said = f"reaches MLflow at {facts.mlflow}" if where == "no node" else f"cannot reach MLflow at {facts.mlflow}"
        yield Finding(
            "mlflow",
            f"{where} {said}: {bad[0].mlflow_problem}",
            "start the server or correct tracking.uri; until then metrics are kept on disk (`trireme sync` delivers)",
            tuple(node.node_id for node in bad),
            grave=False,
        )


TABLE: tuple[Check, ...] = (
    silent,
    *gpu_checks.TABLE,
    versions,
    shared_memory,
    open_files,
    disk,
    memory,
    clock,
    slow_node,
    *network_checks.TABLE,
    storage,
    mlflow,
)


def judge(facts: ClusterFacts) -> list[Finding]:
    """Everything that is wrong, the grave first."""
    found = [finding for check in TABLE for finding in check(facts)]
    return sorted(found, key=lambda finding: not finding.grave)


def bad_nodes(findings: list[Finding]) -> list[str]:
    """Ids of nodes on which a run would fail or crawl, in the order they were found."""
    return list(dict.fromkeys(node for finding in findings if finding.grave for node in finding.nodes))
