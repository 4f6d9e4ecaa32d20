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
    gpus: tuple[GpuFacts, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # of Python, packages, NCCL, the driver; "": none
    # limits of the system
    shm_bytes: int = 64 * 2**30
    open_files: int = 65536
    disk_free: int = 10**12
    disk_path: str = "/tmp"
    memory_available: int = 10**12
    # network
    interfaces: Mapping[str, str] = field(default_factory=dict)  # name -> IPv4 address, those that are up
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

    @property
    def is_slow(self) -> bool:
        """Below what tuning explains: half of the hardware's rate, a quarter where a CPU copies."""
        share = 0.5 if self.backend == "nccl" else 0.25
        return self.rate is not None and self.expected is not None and self.rate < share * self.expected


@dataclass(frozen=True)
class ClusterFacts:
    """Everything that one look found out."""

    nodes: tuple[NodeFacts, ...]
    rings: tuple[RingFacts, ...] = ()
    storage: str = ""
    link_expected: float | None = None  # bytes/s across nodes, by the cluster's file
    seconds: float = 0.0

    def node(self, node_id: str) -> NodeFacts:
        return next(node for node in self.nodes if node.node_id == node_id)

    @property
    def answered(self) -> list[NodeFacts]:
        return [node for node in self.nodes if not node.problem]
