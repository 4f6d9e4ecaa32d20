"""Doctor's facts, plain values per GPU, node and all-reduce, and what they mean: facts in, findings out. Each threshold
stands beside the check that uses it, with the reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from app.console.terminal import size
from app.run.versions import newer

WARNINGS = ("unused_gpus", "no_gpu_metrics", "other_driver", "newer_version", "all_reduce", "slow_all_reduce")
Problem = tuple[str, str, str]
"""Code, the rest of a sentence that begins with the GPU or the node, and what to do."""


@dataclass(frozen=True)
class GpuFacts:
    """One GPU, as the driver (nvidia-smi) sees it, and what a matrix product on it gave."""

    index: int
    name: str = ""
    memory_total: int = 0  # bytes
    memory_used: int = 0  # bytes, before doctor used any
    processes: tuple[str, ...] = ()  # "4711 python 10240 MiB": other processes that compute on it
    ecc_errors: int = 0  # uncorrected, since the last restart
    throttled: tuple[str, ...] = ()  # reasons that slow it now: "thermal", "power brake"
    temperature: float = 0.0  # °C
    mig: bool = False
    flops: float | None = None  # FLOP/s of a bf16 matrix product, measured; None where it was not


@dataclass(frozen=True)
class NodeFacts:
    """One node. `problem`: why it does not answer; then nothing else is known."""

    node_id: str
    address: str
    host: str = ""
    head: bool = False
    problem: str = ""
    # what Ray and torch see
    ray_gpus: float = 0.0
    torch_gpus: int | None = None  # None: torch was not asked, since there is no sign of a GPU
    torch_cuda: str | None = None  # CUDA that torch was built for; None: a CPU build, or not asked
    torch_error: str = ""
    visible: str | None = None  # CUDA_VISIBLE_DEVICES of the probe; None: unset
    # what the machine has
    pci_gpus: int = 0  # NVIDIA display controllers on the PCI bus
    driver_cuda: str = ""  # the newest CUDA that the driver supports
    smi_error: str = ""
    metrics_problem: str = ""  # why a run there cannot record the GPUs' load, memory and power
    gpus: tuple[GpuFacts, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # of Python, packages, NCCL, the driver; "": none
    # limits of the system
    shm_bytes: int = 64 * 2**30
    disk_free: int = 10**12
    disk_path: str = "/tmp"
    # network
    interfaces: Mapping[str, str] = field(default_factory=dict)  # name -> IPv4 address
    gloo_interface: str = ""  # GLOO_SOCKET_IFNAME
    resolves_to: str | None = "?"  # what its host name resolves to there; None: nothing
    unreachable: Mapping[str, str] = field(default_factory=dict)  # ids of nodes that it cannot connect to -> why
    # storage
    storage_problem: str = ""
    storage_seen: tuple[str, ...] | None = None  # ids of nodes whose marks it sees in the storage; None: not asked

    def __str__(self) -> str:
        return f"{self.address} ({self.host})" if self.host and self.host != self.address else self.address

    @property
    def interface(self) -> str:
        """Name of the network interface that has the node's address."""
        return next((name for name, address in self.interfaces.items() if address == self.address), "")


@dataclass(frozen=True)
class RingFacts:
    """One all-reduce: over the GPUs of a node, over all nodes, or between the first GPUs of two neighbours."""

    nodes: tuple[str, ...]  # node ids
    ranks: int
    backend: str  # nccl or gloo
    rate: float | None = None  # bytes/s that left each rank; None: it did not work
    expected: float | None = None  # bytes/s that the hardware gives; None: not known
    problem: str = ""
    exchange: float | None = None  # bytes/s that left each rank in an all-to-all, which experts and Ulysses wait for

    @property
    def is_slow(self) -> bool:
        """Below half of the hardware's rate, which is more than tuning explains."""
        return self.rate is not None and self.expected is not None and self.rate < 0.5 * self.expected


@dataclass(frozen=True)
class ClusterFacts:
    """Everything that one look found out."""

    nodes: tuple[NodeFacts, ...]
    rings: tuple[RingFacts, ...] = ()
    storage: str = ""
    link_expected: float | None = None  # bytes/s across nodes, by the cluster's file

    def node(self, node_id: str) -> NodeFacts:
        return next(node for node in self.nodes if node.node_id == node_id)

    @property
    def answered(self) -> list[NodeFacts]:
        return [node for node in self.nodes if not node.problem]


# --- judgement -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, in words, with what to do."""

    code: str  # hidden_gpus, disk_full, …
    sentence: str
    remedy: str
    nodes: tuple[str, ...] = ()  # ids of the nodes it concerns

    @property
    def critical(self) -> bool:
        """Whether a run on such a node would fail or be much slower."""
        return self.code not in WARNINGS


def gpu_problems(gpu: GpuFacts) -> Iterator[Problem]:
    if gpu.mig:
        said = "is split by MIG, and NCCL does not work between its slices"
        yield "mig", said, "turn it off: `nvidia-smi -mig 0` there"
    if gpu.ecc_errors:
        remedy = "restart the machine; if they come again, have the GPU replaced"
        yield "ecc", f"has {gpu.ecc_errors} memory errors that could not be corrected", remedy
    if gpu.throttled:
        said = f"is slowed down ({', '.join(gpu.throttled)}) at {gpu.temperature:.0f} °C"
        yield "throttled", said, "look at its cooling and its power supply"
    if gpu.processes:
        remedy = "wait for it or end it; a run beside it gets less memory and time"
        yield "busy_gpu", f"is in use by another process ({'; '.join(gpu.processes[:2])})", remedy
    elif gpu.memory_used > max(1.5e9, 0.03 * gpu.memory_total):  # the driver alone takes some hundred MB
        said = f"has {size(gpu.memory_used)} of {size(gpu.memory_total)} in use by a process that is not visible there"
        remedy = "a process of another container, or one that died: `nvidia-smi --gpu-reset`, or restart the machine"
        yield "memory_taken", said, remedy


def node_problems(node: NodeFacts) -> Iterator[Problem]:
    count = len(node.gpus)
    usable, sees_none = node.torch_gpus or 0, count > 0 and not node.torch_gpus and node.visible is None
    if node.pci_gpus and not count:
        said = f"has {node.pci_gpus} NVIDIA GPUs, but the driver shows none ({node.smi_error or 'no reason given'})"
        remedy = "install or restart the driver; start a container with --gpus all (Kubernetes: nvidia.com/gpu)"
        yield "no_driver", said, remedy
    if node.visible is not None and usable < count:  # leaked from a shell into `ray start`
        said = f"has {count} GPUs, but CUDA_VISIBLE_DEVICES={node.visible!r} shows only {usable}"
        yield "hidden_gpus", said, "unset it before `ray start` on that node; Ray sets it for each worker itself"
    if sees_none and not node.torch_cuda:
        remedy = "install torch for CUDA: https://pytorch.org/get-started/locally"
        yield "cpu_torch", f"has {count} GPUs, but its torch is built for CPUs only", remedy
    elif sees_none:
        said = f"has {count} GPUs, but torch sees none ({node.torch_error or 'no reason given'})"
        remedy = f"its driver supports CUDA {node.driver_cuda}, its torch needs {node.torch_cuda}: update one of them"
        yield "torch_blind", said, remedy
    elif node.ray_gpus > usable or (node.ray_gpus < usable and not node.head):  # a head may keep its own from Ray
        said = f"has {usable} usable GPUs, but Ray counts {node.ray_gpus:g}"
        code = "ray_gpus" if node.ray_gpus > usable else "unused_gpus"
        yield code, said, "leave --num-gpus out of its `ray start`, so that Ray counts them itself"
    if node.metrics_problem:
        said = f"has {count} GPUs whose load, memory and power no run can record ({node.metrics_problem})"
        yield "no_gpu_metrics", said, "`pip install nvidia-ml-py` there"
    if node.shm_bytes < 1e9:  # NCCL and data loaders keep their buffers there; Docker gives 64 MB
        remedy = "start its container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir of medium Memory)"
        yield "small_shm", f"has only {size(node.shm_bytes)} of shared memory (/dev/shm)", remedy
    if node.disk_free < 2e9:  # Ray refuses work from 95 % on
        said = f"has {size(node.disk_free)} free in {node.disk_path}, where Ray works"
        yield "disk_full", said, "make room there, or start Ray with --temp-dir on a larger disk"
    if node.storage_problem:
        remedy = "mount it there at the same path, with the right to write"
        yield "storage", f"cannot write to the storage: {node.storage_problem}", remedy


def alone(facts: ClusterFacts) -> Iterator[Finding]:
    """What is wrong with a node or a GPU by itself."""
    for node in facts.nodes:
        if node.problem:
            remedy = (
                "look at its raylet (session_latest/logs/raylet.err there, in the --temp-dir that Ray was started "
                "with, /tmp/ray by default), or start Ray on it again"
            )
            yield Finding("no_answer", f"{node} does not answer: {node.problem}", remedy, (node.node_id,))
            continue
        for code, said, remedy in node_problems(node):
            yield Finding(code, f"{node} {said}", remedy, (node.node_id,))
        for gpu in node.gpus:
            for code, said, remedy in gpu_problems(gpu):
                yield Finding(code, f"GPU {gpu.index} ({gpu.name}) of {node} {said}", remedy, (node.node_id,))


def slow_gpu(facts: ClusterFacts) -> Iterator[Finding]:
    """Compared with its peers of the same name: all wait for the slowest. 15 % is beyond what binning gives."""
    measured = [(node, gpu, gpu.flops) for node in facts.answered for gpu in node.gpus if gpu.flops]
    for node, gpu, rate in measured:
        peers = sorted(flops for _, other, flops in measured if other.name == gpu.name)
        usual = peers[len(peers) // 2]
        if rate < 0.85 * usual:
            who = f"GPU {gpu.index} ({gpu.name}) of {node}"
            said = f"{who} multiplies matrices at {rate / 1e12:.0f} TFLOP/s, its peers at {usual / 1e12:.0f}"
            remedy = "look at its clocks and power limit (`nvidia-smi -q -d PERFORMANCE,POWER`), or leave the node out"
            yield Finding("slow_gpu", said, remedy, (node.node_id,))


def versions(facts: ClusterFacts) -> Iterator[Finding]:
    """Ray refuses another Python or Ray; another torch or NCCL hangs or is wrong in the first collective."""
    for name in dict.fromkeys(name for node in facts.answered for name in node.versions):
        having = [(node, node.versions[name]) for node in facts.answered if name in node.versions]
        of_the_head = next((found for node, found in having if node.head), "")
        usual = of_the_head or Counter(found for _, found in having).most_common(1)[0][0]
        for said in newer({name: usual}):
            yield Finding("newer_version", said, "if something breaks, install the tested one: constraints.txt")
        for node, found in having:
            if found != usual:
                said = f"{node} has {name} {found or '(none)'}, other nodes have {usual}"
                remedy = "install the same versions on every node: constraints.txt, and one driver"
                yield Finding("other_driver" if "driver" in name else "other_version", said, remedy, (node.node_id,))


def unreachable(facts: ClusterFacts) -> Iterator[Finding]:
    """One finding for a node that no other can connect to, else one for each pair."""
    remedy = "look at its cable, its route and the firewall: all TCP ports must be open between the nodes"
    cut = [(source, target, why) for source in facts.answered for target, why in source.unreachable.items()]
    count = Counter(target for _, target, _ in cut)
    isolated = {target for target in count if count[target] == len(facts.answered) - 1 > 1}
    said: set[frozenset[str]] = set()
    for source, target, why in cut:
        ends = frozenset([target] if target in isolated else [source.node_id, target])
        if ends not in said and (target in isolated or source.node_id not in isolated):
            said.add(ends)
            who = "no other node can" if target in isolated else f"{source} cannot"
            yield Finding("cut_link", f"{who} connect to {facts.node(target)}: {why}", remedy, (target,))


def host_name(facts: ClusterFacts) -> Iterator[Finding]:
    """gloo gives its peers the address that the host's own name resolves to, unless an interface is named."""
    for node in facts.answered if len(facts.nodes) > 1 else ():
        if node.resolves_to is None or (node.resolves_to.startswith("127.") and not node.gloo_interface):
            said = f"{node} resolves its own name to {node.resolves_to or 'nothing'}, where its peers cannot connect"
            remedy = f"write `{node.address} {node.host}` into its /etc/hosts, or set GLOO_SOCKET_IFNAME"
            yield Finding("host_name", said, remedy, (node.node_id,))


def storage_differs(facts: ClusterFacts) -> Iterator[Finding]:
    writing = {node.node_id for node in facts.answered if not node.storage_problem and node.storage_seen is not None}
    for node in facts.answered:
        missing = sorted(writing - set(node.storage_seen or ())) if node.node_id in writing else []
        if missing:
            said = f"{facts.storage} on {node} is not that of {facts.node(missing[0])}: each sees only its own files"
            remedy = "mount one shared folder on both, or use s3:// or gs://"
            yield Finding("storage_differs", said, remedy, (node.node_id,))


def all_reduce(facts: ClusterFacts) -> Iterator[Finding]:
    """What training waits for."""
    everywhere = max((len(ring.nodes) for ring in facts.rings), default=0)
    pairs = [ring for ring in facts.rings if 1 < len(ring.nodes) < everywhere]
    blamed = list(_slow_pairs(facts, pairs))
    for ring in (ring for ring in facts.rings if ring not in pairs):
        one = len(ring.nodes) == 1
        where = f"within {facts.node(ring.nodes[0])}" if one else f"over {ring.ranks} workers on {everywhere} nodes"
        if ring.problem:
            remedy = "run with NCCL_DEBUG=INFO: it says which connection fails"
            yield Finding("all_reduce", f"all-reduce {where} does not work: {ring.problem}", remedy)
        elif ring.is_slow and (one or not blamed):
            said = f"all-reduce {where} moves {_rate(ring.rate)}, where the hardware gives {_rate(ring.expected)}"
            remedy = "NCCL may use the wrong interface, or no EFA, InfiniBand or NVLink: NCCL_DEBUG=INFO says which"
            yield Finding("slow_all_reduce", said, remedy, ring.nodes if one else ())
    yield from blamed


def _slow_pairs(facts: ClusterFacts, pairs: list[RingFacts]) -> Iterator[Finding]:
    """Neighbours below half of the best pair; a node that is slow with both its neighbours is blamed."""
    best = max((ring.rate or 0.0 for ring in pairs), default=0.0)
    slow = [ring for ring in pairs if (ring.rate or 0.0) < 0.5 * best]
    twice = [node for node, times in Counter(node for ring in slow for node in ring.nodes).items() if times > 1]
    for node in [*twice, *(ring.nodes[1] for ring in slow if not set(ring.nodes) & set(twice))]:
        own = [ring for ring in slow if node in ring.nodes]
        others = " and ".join(str(facts.node(other)) for ring in own for other in ring.nodes if other != node)
        moved = f"moves {_rate(max(ring.rate or 0.0 for ring in own))}, between others {_rate(best)}"
        said = f"all-reduce between {facts.node(node)} and {others} {moved}"
        remedy = "look at cables, ports and drivers (`ibstat`, `fi_info`), or leave the node out (--exclude-bad)"
        yield Finding("slow_pair", said, remedy, (node,))


def _rate(rate: float | None) -> str:
    return f"{(rate or 0.0) / 1e9:.3g} GB/s"


CHECKS = (alone, slow_gpu, versions, unreachable, host_name, storage_differs, all_reduce)


def judge(facts: ClusterFacts) -> list[Finding]:
    """Everything that is wrong, the critical first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: not finding.critical)


def bad_nodes(findings: list[Finding]) -> list[str]:
    """Ids of nodes on which a run would fail or be much slower, in the order they were found."""
    return list(dict.fromkeys(node for found in findings if found.critical for node in found.nodes))
