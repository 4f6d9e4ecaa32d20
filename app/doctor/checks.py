"""Doctor's facts (plain values for each GPU, node and all-reduce), and what is wrong with them.

The checks are pure functions from facts to findings. Each threshold is beside the check that uses
it, with its reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from app.console.terminal import size
from app.run.versions import newer

WARNINGS = frozenset(
    (
        "unused_gpus",
        "no_gpu_metrics",
        "other_driver",
        "newer_version",
        "all_reduce",
        "slow_all_reduce",
    )
)
"""Codes of findings with which a run works and is not much slower."""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """One GPU, as the driver (nvidia-smi) sees it, and the speed of a matrix product on it.

    Args:
        index: The driver's index of the GPU.
        name: Its product name.
        memory_total: Bytes.
        memory_used: Bytes, before doctor used any.
        processes: Other processes that compute on it, such as "4711 python 10240 MiB".
        ecc_errors: Uncorrected memory errors since the last restart.
        throttled: Reasons that slow it down now: "thermal", "power brake".
        temperature: °C.
        mig: Whether it is divided by MIG.
        flops: FLOP/s of a bf16 matrix product; None if that was not measured.
    """

    index: int
    name: str = ""
    memory_total: int = 0
    memory_used: int = 0
    processes: tuple[str, ...] = ()
    ecc_errors: int = 0
    throttled: tuple[str, ...] = ()
    temperature: float = 0.0
    mig: bool = False
    flops: float | None = None


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One node.

    Args:
        node_id: Ray's id of the node.
        address: Its IPv4 address in the cluster.
        host: Its own name.
        head: Whether it is the cluster's head.
        problem: Why the node does not answer; then nothing below is known.
        ray_gpus: How many GPUs Ray counts.
        torch_gpus: How many GPUs torch sees; None if torch was not asked, because nothing points to
            a GPU.
        torch_cuda: The CUDA version that torch was built for; None for a CPU build, or if torch was
            not asked.
        torch_error: Why torch sees no GPU.
        visible: CUDA_VISIBLE_DEVICES of the probe; None if it is not set.
        pci_gpus: NVIDIA display controllers on the PCI bus.
        driver_cuda: The newest CUDA version that the driver supports.
        smi_error: Why nvidia-smi shows no GPU.
        metrics_problem: Why a run cannot record the GPUs' load, memory and power.
        gpus: The GPUs that the driver shows.
        versions: Versions of Python, packages, NCCL and the driver, by name; "" for a package that
            is not installed.
        shm_bytes: The size of /dev/shm.
        disk_free: Free bytes in `disk_path`.
        disk_path: Where Ray keeps its files.
        interfaces: The IPv4 address of each network interface.
        gloo_interface: GLOO_SOCKET_IFNAME.
        resolves_to: The address that the node's own name resolves to; None for none.
        unreachable: For each node that this one cannot connect to, by id, why not.
        storage_problem: Why the node cannot write to the storage.
        storage_seen: Ids of the nodes whose marks it sees in the storage; None if it was not asked.
    """

    node_id: str
    address: str
    host: str = ""
    head: bool = False
    problem: str = ""
    # --- what Ray and torch see ---
    ray_gpus: float = 0.0
    torch_gpus: int | None = None
    torch_cuda: str | None = None
    torch_error: str = ""
    visible: str | None = None
    # --- what the machine has ---
    pci_gpus: int = 0
    driver_cuda: str = ""
    smi_error: str = ""
    metrics_problem: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    # --- limits of the system ---
    shm_bytes: int = 64 * 2**30
    disk_free: int = 10**12
    disk_path: str = "/tmp"
    # --- network ---
    interfaces: Mapping[str, str] = field(default_factory=dict)
    gloo_interface: str = ""
    resolves_to: str | None = "?"
    unreachable: Mapping[str, str] = field(default_factory=dict)
    # --- storage ---
    storage_problem: str = ""
    storage_seen: tuple[str, ...] | None = None

    def __str__(self) -> str:
        has_other_name = self.host and self.host != self.address
        return f"{self.address} ({self.host})" if has_other_name else self.address

    @property
    def interface(self) -> str:
        """The name of the network interface that has the node's address; "" if none has."""
        for name, address in self.interfaces.items():
            if address == self.address:
                return name
        return ""


@dataclass(frozen=True, kw_only=True)
class RingFacts:
    """An all-reduce within a node, over all nodes, or between the first GPUs of two neighbours.

    Args:
        nodes: The ids of the nodes.
        ranks: The number of ranks.
        backend: nccl or gloo; "" if it did not come to that.
        rate: Bytes/s that left each rank; None if the all-reduce did not work.
        expected: Bytes/s that the hardware can reach; None if that is not known.
        problem: Why it did not work.
        exchange: Bytes/s that left each rank in an all-to-all, which experts and Ulysses wait for.
    """

    nodes: tuple[str, ...]
    ranks: int
    backend: str
    rate: float | None = None
    expected: float | None = None
    problem: str = ""
    exchange: float | None = None

    @property
    def is_slow(self) -> bool:
        """Whether it is below half of the hardware's rate, which tuning alone does not explain."""
        if self.rate is None or self.expected is None:
            return False
        return self.rate < 0.5 * self.expected


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """Everything that doctor found out about a cluster.

    Args:
        nodes: Its nodes.
        rings: The all-reduces that were measured.
        storage: The folder or URL that every node should write to; "" if it was not checked.
        link_expected: Bytes/s between nodes by the cluster's file; None if it does not say.
    """

    nodes: tuple[NodeFacts, ...]
    rings: tuple[RingFacts, ...] = ()
    storage: str = ""
    link_expected: float | None = None

    def node(self, node_id: str) -> NodeFacts:
        """The node with this id."""
        return next(node for node in self.nodes if node.node_id == node_id)

    @property
    def answered(self) -> list[NodeFacts]:
        """The nodes that have answered."""
        return [node for node in self.nodes if not node.problem]


# --- findings ---


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with a GPU or a node.

    Args:
        code: A name for scripts, such as hidden_gpus or disk_full.
        predicate: The rest of a sentence that begins with the GPU or the node.
        remedy: What to do.
    """

    code: str
    predicate: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Args:
        code: A name for scripts, such as hidden_gpus or disk_full.
        sentence: What is wrong.
        remedy: What to do.
        nodes: The ids of the nodes that have it.
    """

    code: str
    sentence: str
    remedy: str
    nodes: tuple[str, ...] = ()

    @property
    def critical(self) -> bool:
        """Whether a run on such a node would fail or be much slower."""
        return self.code not in WARNINGS


def judge(facts: ClusterFacts) -> list[Finding]:
    """Everything that is wrong with a cluster, the critical findings first."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    return sorted(findings, key=lambda finding: not finding.critical)


def bad_nodes(findings: list[Finding]) -> list[str]:
    """The ids of the nodes on which a run would fail or be much slower, in order of finding."""
    critical = [finding for finding in findings if finding.critical]
    return list(dict.fromkeys(node for finding in critical for node in finding.nodes))


# --- checks of a GPU or a node by itself ---


def check_each(facts: ClusterFacts) -> Iterator[Finding]:
    """Check each node, and each of its GPUs, by itself."""
    for node in facts.nodes:
        if node.problem:
            yield Finding(
                code="no_answer",
                sentence=f"{node} does not answer: {node.problem}",
                remedy=(
                    "look at its raylet (session_latest/logs/raylet.err there, in the --temp-dir "
                    "that Ray was started with, /tmp/ray by default), or start Ray on it again"
                ),
                nodes=(node.node_id,),
            )
            continue
        for problem in (
            *driver_problems(node),
            *torch_problems(node),
            *system_problems(node),
        ):
            yield _finding(str(node), problem, node)
        for gpu in node.gpus:
            for problem in gpu_problems(gpu):
                yield _finding(f"GPU {gpu.index} ({gpu.name}) of {node}", problem, node)


def _finding(subject: str, problem: Problem, node: NodeFacts) -> Finding:
    return Finding(
        code=problem.code,
        sentence=f"{subject} {problem.predicate}",
        remedy=problem.remedy,
        nodes=(node.node_id,),
    )


def gpu_problems(gpu: GpuFacts) -> Iterator[Problem]:
    """What is wrong with a GPU."""
    if gpu.mig:
        yield Problem(
            code="mig",
            predicate="is split by MIG, and NCCL does not work between its slices",
            remedy="turn it off: `nvidia-smi -mig 0` there",
        )
    if gpu.ecc_errors:
        yield Problem(
            code="ecc",
            predicate=f"has {gpu.ecc_errors} memory errors that could not be corrected",
            remedy="restart the machine; if they come again, have the GPU replaced",
        )
    if gpu.throttled:
        reasons = ", ".join(gpu.throttled)
        yield Problem(
            code="throttled",
            predicate=f"is slowed down ({reasons}) at {gpu.temperature:.0f} °C",
            remedy="look at its cooling and its power supply",
        )
    memory_of_driver = max(1.5e9, 0.03 * gpu.memory_total)  # it takes some hundred MB
    if gpu.processes:
        yield Problem(
            code="busy_gpu",
            predicate=f"is in use by another process ({'; '.join(gpu.processes[:2])})",
            remedy="wait for it or end it; a run beside it gets less memory and time",
        )
    elif gpu.memory_used > memory_of_driver:
        yield Problem(
            code="memory_taken",
            predicate=(
                f"has {size(gpu.memory_used)} of {size(gpu.memory_total)} in use "
                "by a process that is not visible there"
            ),
            remedy=(
                "a process of another container, or one that died: `nvidia-smi --gpu-reset`, "
                "or restart the machine"
            ),
        )


def driver_problems(node: NodeFacts) -> Iterator[Problem]:
    """GPUs that the driver does not show, or that are hidden from processes."""
    count = len(node.gpus)
    usable = node.torch_gpus or 0
    if node.pci_gpus and not count:
        yield Problem(
            code="no_driver",
            predicate=(
                f"has {node.pci_gpus} NVIDIA GPUs, but the driver shows none "
                f"({node.smi_error or 'no reason given'})"
            ),
            remedy=(
                "install or restart the driver; "
                "start a container with --gpus all (Kubernetes: nvidia.com/gpu)"
            ),
        )
    # The variable was set in the shell in which `ray start` was called.
    if node.visible is not None and usable < count:
        yield Problem(
            code="hidden_gpus",
            predicate=(
                f"has {count} GPUs, but CUDA_VISIBLE_DEVICES={node.visible!r} shows only {usable}"
            ),
            remedy=("unset it before `ray start` on that node; Ray sets it for each worker itself"),
        )


def torch_problems(node: NodeFacts) -> Iterator[Problem]:
    """GPUs that torch cannot use, that Ray does not count, or that no run can record."""
    count = len(node.gpus)
    usable = node.torch_gpus or 0
    torch_sees_none = count > 0 and usable == 0 and node.visible is None
    if torch_sees_none and not node.torch_cuda:
        yield Problem(
            code="cpu_torch",
            predicate=f"has {count} GPUs, but its torch is built for CPUs only",
            remedy="install torch for CUDA: https://pytorch.org/get-started/locally",
        )
    elif torch_sees_none:
        yield Problem(
            code="torch_blind",
            predicate=(
                f"has {count} GPUs, but torch sees none ({node.torch_error or 'no reason given'})"
            ),
            remedy=(
                f"its driver supports CUDA {node.driver_cuda}, "
                f"its torch needs {node.torch_cuda}: update one of them"
            ),
        )
    else:
        has_too_many = node.ray_gpus > usable
        has_too_few = node.ray_gpus < usable and not node.head  # a head may keep its GPUs from Ray
        if has_too_many or has_too_few:
            yield Problem(
                code="ray_gpus" if has_too_many else "unused_gpus",
                predicate=f"has {usable} usable GPUs, but Ray counts {node.ray_gpus:g}",
                remedy="leave --num-gpus out of its `ray start`, so that Ray counts them itself",
            )
    if node.metrics_problem:
        yield Problem(
            code="no_gpu_metrics",
            predicate=(
                f"has {count} GPUs whose load, memory and power no run can record "
                f"({node.metrics_problem})"
            ),
            remedy="`pip install nvidia-ml-py` there",
        )


def system_problems(node: NodeFacts) -> Iterator[Problem]:
    """Too little shared memory or disk, or a storage that cannot be written to."""
    # NCCL and data loaders keep their buffers in shared memory. Docker gives 64 MB.
    if node.shm_bytes < 1e9:
        yield Problem(
            code="small_shm",
            predicate=f"has only {size(node.shm_bytes)} of shared memory (/dev/shm)",
            remedy=(
                "start its container with --shm-size=16g or --ipc=host "
                "(Kubernetes: an emptyDir of medium Memory)"
            ),
        )
    # Ray refuses work when its disk is 95 % full.
    if node.disk_free < 2e9:
        yield Problem(
            code="disk_full",
            predicate=f"has {size(node.disk_free)} free in {node.disk_path}, where Ray works",
            remedy="make room there, or start Ray with --temp-dir on a larger disk",
        )
    if node.storage_problem:
        yield Problem(
            code="storage",
            predicate=f"cannot write to the storage: {node.storage_problem}",
            remedy="mount it there at the same path, with the right to write",
        )


# --- checks of nodes beside one another ---


def check_gpu_speed(facts: ClusterFacts) -> Iterator[Finding]:
    """Compare each GPU's speed with GPUs of the same name, since all wait for the slowest.

    Differences between sound GPUs are below 15 %.
    """
    measured = [(node, gpu, gpu.flops) for node in facts.answered for gpu in node.gpus if gpu.flops]
    for node, gpu, flops in measured:
        peers = sorted(peer_flops for _, peer, peer_flops in measured if peer.name == gpu.name)
        median = peers[len(peers) // 2]
        if flops < 0.85 * median:
            yield Finding(
                code="slow_gpu",
                sentence=(
                    f"GPU {gpu.index} ({gpu.name}) of {node} multiplies matrices at "
                    f"{flops / 1e12:.0f} TFLOP/s, its peers at {median / 1e12:.0f}"
                ),
                remedy=(
                    "look at its clocks and power limit (`nvidia-smi -q -d PERFORMANCE,POWER`), "
                    "or leave the node out"
                ),
                nodes=(node.node_id,),
            )


def check_versions(facts: ClusterFacts) -> Iterator[Finding]:
    """Compare each node's versions with the head's, or with what most nodes have.

    Ray refuses another Python or Ray. Another torch or NCCL hangs or is wrong in the first
    collective.
    """
    names = dict.fromkeys(name for node in facts.answered for name in node.versions)
    for name in names:
        nodes = [node for node in facts.answered if name in node.versions]
        usual = _usual_version(name, nodes)
        for sentence in newer({name: usual}):
            yield Finding(
                code="newer_version",
                sentence=sentence,
                remedy="if something breaks, install the tested one: constraints.txt",
            )
        for node in nodes:
            version = node.versions[name]
            if version != usual:
                yield Finding(
                    code="other_driver" if "driver" in name else "other_version",
                    sentence=(f"{node} has {name} {version or '(none)'}, other nodes have {usual}"),
                    remedy=(
                        "install the same versions on every node: constraints.txt, and one driver"
                    ),
                    nodes=(node.node_id,),
                )


def _usual_version(name: str, nodes: list[NodeFacts]) -> str:
    for node in nodes:
        if node.head and node.versions[name]:
            return node.versions[name]
    return Counter(node.versions[name] for node in nodes).most_common(1)[0][0]


def check_links(facts: ClusterFacts) -> Iterator[Finding]:
    """Find nodes that cannot connect to one another.

    There is one finding for a node that no other can connect to, else one for each pair of nodes.
    """
    cut_links = [
        (source, target, reason)
        for source in facts.answered
        for target, reason in source.unreachable.items()
    ]
    cut_counts = Counter(target for _, target, _ in cut_links)
    other_nodes = len(facts.answered) - 1
    isolated = {
        target for target, count in cut_counts.items() if count == other_nodes and count > 1
    }
    reported: set[frozenset[str]] = set()
    for source, target, reason in cut_links:
        is_isolated = target in isolated
        if not is_isolated and source.node_id in isolated:
            continue  # the isolated node has a finding of its own
        ends = frozenset([target] if is_isolated else [source.node_id, target])
        if ends in reported:
            continue
        reported.add(ends)
        subject = "no other node can" if is_isolated else f"{source} cannot"
        yield Finding(
            code="cut_link",
            sentence=f"{subject} connect to {facts.node(target)}: {reason}",
            remedy=(
                "look at its cable, its route and the firewall: "
                "all TCP ports must be open between the nodes"
            ),
            nodes=(target,),
        )


def check_host_names(facts: ClusterFacts) -> Iterator[Finding]:
    """Find nodes whose own name does not resolve to an address that others can connect to.

    gloo gives its peers the address that the host's own name resolves to, unless an interface is
    named.
    """
    if len(facts.nodes) < 2:
        return
    for node in facts.answered:
        address = node.resolves_to
        is_loopback = address is not None and address.startswith("127.")
        if address is None or (is_loopback and not node.gloo_interface):
            yield Finding(
                code="host_name",
                sentence=(
                    f"{node} resolves its own name to {address or 'nothing'}, "
                    "where its peers cannot connect"
                ),
                remedy=(
                    f"write `{node.address} {node.host}` into its /etc/hosts, "
                    "or set GLOO_SOCKET_IFNAME"
                ),
                nodes=(node.node_id,),
            )


def check_storage(facts: ClusterFacts) -> Iterator[Finding]:
    """Find nodes that do not see what other nodes have written to the storage."""
    writers = {
        node.node_id
        for node in facts.answered
        if not node.storage_problem and node.storage_seen is not None
    }
    for node in facts.answered:
        if node.node_id not in writers:
            continue
        unseen = sorted(writers - set(node.storage_seen or ()))
        if unseen:
            yield Finding(
                code="storage_differs",
                sentence=(
                    f"{facts.storage} on {node} is not that of {facts.node(unseen[0])}: "
                    "each sees only its own files"
                ),
                remedy="mount one shared folder on both, or use s3:// or gs://",
                nodes=(node.node_id,),
            )


def check_all_reduce(facts: ClusterFacts) -> Iterator[Finding]:
    """Find all-reduces that do not work or are slow, and the links that make them slow."""
    most_nodes = max((len(ring.nodes) for ring in facts.rings), default=0)
    pairs = [ring for ring in facts.rings if 1 < len(ring.nodes) < most_nodes]
    slow_pairs = list(_slow_pairs(facts, pairs))
    for ring in facts.rings:
        if ring in pairs:
            continue
        is_within_node = len(ring.nodes) == 1
        if is_within_node:
            place = f"within {facts.node(ring.nodes[0])}"
        else:
            place = f"over {ring.ranks} workers on {most_nodes} nodes"
        if ring.problem:
            yield Finding(
                code="all_reduce",
                sentence=f"all-reduce {place} does not work: {ring.problem}",
                remedy="run with NCCL_DEBUG=INFO: it says which connection fails",
            )
        elif ring.is_slow and (is_within_node or not slow_pairs):
            yield Finding(
                code="slow_all_reduce",
                sentence=(
                    f"all-reduce {place} moves {_rate(ring.rate)}, "
                    f"where the hardware gives {_rate(ring.expected)}"
                ),
                remedy=(
                    "NCCL may use the wrong interface, or no EFA, InfiniBand or NVLink: "
                    "NCCL_DEBUG=INFO says which"
                ),
                nodes=ring.nodes if is_within_node else (),
            )
    yield from slow_pairs


def _slow_pairs(facts: ClusterFacts, pairs: list[RingFacts]) -> Iterator[Finding]:
    """Findings for neighbours below half of the best pair.

    A node that is slow with both of its neighbours is blamed, else the second node of a pair.
    """
    best = max((ring.rate or 0.0 for ring in pairs), default=0.0)
    slow = [ring for ring in pairs if (ring.rate or 0.0) < 0.5 * best]
    slow_counts = Counter(node for ring in slow for node in ring.nodes)
    slow_with_both = [node for node, count in slow_counts.items() if count > 1]
    blamed = list(slow_with_both)
    for ring in slow:
        if not set(ring.nodes) & set(slow_with_both):
            blamed.append(ring.nodes[1])
    for node_id in blamed:
        rings = [ring for ring in slow if node_id in ring.nodes]
        peers = [str(facts.node(peer)) for ring in rings for peer in ring.nodes if peer != node_id]
        rate = max(ring.rate or 0.0 for ring in rings)
        yield Finding(
            code="slow_pair",
            sentence=(
                f"all-reduce between {facts.node(node_id)} and {' and '.join(peers)} "
                f"moves {_rate(rate)}, between others {_rate(best)}"
            ),
            remedy=(
                "look at cables, ports and drivers (`ibstat`, `fi_info`), "
                "or leave the node out (--exclude-bad)"
            ),
            nodes=(node_id,),
        )


def _rate(rate: float | None) -> str:
    return f"{(rate or 0.0) / 1e9:.3g} GB/s"


CHECKS = (
    check_each,
    check_gpu_speed,
    check_versions,
    check_links,
    check_host_names,
    check_storage,
    check_all_reduce,
)
