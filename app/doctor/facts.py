"""What doctor knows: plain facts per GPU, node and link, without any judgement. `checks` judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GpuFacts:
    """One GPU, as the driver (nvidia-smi) sees it, and what a matrix product on it gave."""

    index: int
    name: str = ""
    memory_total: int = 0  # bytes
    memory_used: int = 0  # bytes, before doctor used any
    processes: tuple[str, ...] = ()  # "4711 python 10.2 GB": processes on it
    ecc_errors: int = 0  # uncorrected, since the last restart
    throttled: tuple[str, ...] = ()  # reasons that slow it now: "thermal", "power brake"
    temperature: float = 0.0  # °C
    mig: bool = False
    xids: tuple[str, ...] = ()  # the driver's error numbers in the kernel's log
    flops: float | None = None  # FLOP/s of a bf16 matrix product, measured; None where it was not


@dataclass(frozen=True)
class NodeFacts:
    """One node. `problem`: why it could not be looked at; then nothing else is known."""

    node_id: str
    address: str
    host: str = ""
    head: bool = False
    problem: str = ""
    # what Ray and torch believe
    ray_gpus: float = 0.0
    torch_gpus: int | None = None  # None: torch was not asked, since there is no sign of a GPU
    torch_cuda: str | None = None  # CUDA that torch was built for; None: a CPU build, or not asked
    torch_error: str = ""
    visible: str | None = None  # CUDA_VISIBLE_DEVICES of the probe; None: unset
    # what the machine has
    pci_gpus: int = 0  # NVIDIA display controllers on the PCI bus
    device_files: int = 0  # /dev/nvidia0, 1, …
    driver_loaded: bool = False  # /proc/driver/nvidia/version exists
    driver: str = ""
    driver_cuda: str = ""  # the newest CUDA that the driver serves
    smi_error: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    # versions
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    nccl: str = ""
    # limits of the system
    shm_bytes: int = 64 * 2**30
    open_files: int = 65536
    disk_free: int = 10**12
    disk_path: str = "/tmp"
    memory_available: int = 10**12
    skew: float = 0.0  # seconds its clock is ahead of the driver's
    flops: float | None = None  # FLOP/s of an fp32 matrix product per second of CPU time, one thread
    # network
    interfaces: Mapping[str, str] = field(default_factory=dict)  # name -> IPv4 address, those that are up
    speeds: Mapping[str, float] = field(default_factory=dict)  # name -> bytes/s the card says it does
    asked_interfaces: Mapping[str, str] = field(default_factory=dict)  # NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME
    resolves_to: str | None = "?"  # what its host name resolves to there; None: nothing
    # services
    storage_problem: str = ""
    storage_seen: tuple[str, ...] | None = None  # node ids whose marks it sees in the storage; None: not looked
    mlflow_problem: str = ""

    @property
    def who(self) -> str:
        name = self.host if self.host and self.host != self.address else ""
        return f"{self.address} ({name})" if name else self.address


@dataclass(frozen=True)
class LinkFacts:
    """One link, one direction. Across nodes: TCP between two addresses; within: between two GPUs of a node."""

    source: str  # node id
    target: str  # node id
    rate: float | None = None  # bytes/s; None: nothing came through
    problem: str = ""  # "timed out", "refused"
    gpus: tuple[int, int] | None = None  # within one node: from which GPU to which


@dataclass(frozen=True)
class RingFacts:
    """One all-reduce: over the GPUs of a node, over all nodes, or between the first GPUs of two."""

    nodes: tuple[str, ...]  # node ids
    ranks: int
    backend: str  # nccl or gloo
    rate: float | None = None  # bytes/s that left each rank; None: it did not work
    expected: float | None = None  # bytes/s that the hardware gives; None: nobody knows
    share: float = 0.5  # of `expected`, below which it is low
    problem: str = ""

    @property
    def low(self) -> bool:
        return self.rate is not None and self.expected is not None and self.rate < self.share * self.expected


@dataclass(frozen=True)
class ClusterFacts:
    """Everything that was found out in one look."""

    nodes: tuple[NodeFacts, ...]
    links: tuple[LinkFacts, ...] = ()
    storage: str = ""
    mlflow: str = ""
    link_expected: float | None = None  # bytes/s across nodes, by the cluster's file
    seconds: float = 0.0
    rings: tuple[RingFacts, ...] = ()

    def node(self, node_id: str) -> NodeFacts:
        return next(node for node in self.nodes if node.node_id == node_id)

    @property
    def answered(self) -> list[NodeFacts]:
        return [node for node in self.nodes if not node.problem]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, in words, with what to do."""

    code: str  # hidden_gpus, disk_full, …
    sentence: str
    mend: str
    nodes: tuple[str, ...] = ()  # ids of the nodes it concerns
    grave: bool = True  # whether a run on such a node would fail or be much slower

    def __str__(self) -> str:
        return f"{self.sentence}: {self.mend}"
