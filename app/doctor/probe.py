"""What doctor runs on a node: a probe of it, and a rank of an all-reduce.

This module is sent to the nodes by value, and imports nothing else of Trireme. It answers with
plain values, or empty ones: a machine without GPUs, nvidia-smi or /proc is a fact, not an error.
"""

import contextlib
import glob
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from xml.etree import ElementTree

PACKAGES = ("ray", "torch", "numpy", "mlflow")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"  # the beginning of the class of display controllers on the PCI bus
THROTTLE_REASONS = {
    "thermal": {"hw_thermal_slowdown", "sw_thermal_slowdown"},
    "power brake": {"hw_power_brake_slowdown"},
}
"""For each reason in words, what nvidia-smi calls it."""
MAX_REASON = 200  # characters of an error message
CONNECT_SECONDS = 3
SMI_SECONDS = 30
PRODUCT_SIZE = 4096  # rows and columns of the matrices that are multiplied
PRODUCTS = 10  # matrix products in one measurement
MEASUREMENTS = 7
RING_BYTES = {"nccl": 256 << 20, "gloo": 16 << 20}
"""How much data an all-reduce has, by backend."""
RING_TIMES = 5
JOIN_SECONDS = 25


class Probe:
    """An actor on one node. Its methods are called on all nodes at once."""

    def facts(self, ray_gpus: float, disk: str, storage: str, mark: str) -> dict[str, Any]:
        """The node's facts, by the names of `NodeFacts`, and a `port`.

        Other nodes can connect to the port until the probe ends: the kernel accepts for it.

        Args:
            ray_gpus: How many GPUs Ray counts on the node.
            disk: The folder in which Ray works.
            storage: A folder or URL to write to; "" for none.
            mark: The name of the file to write into the storage.
        """
        node_facts = {**machine_facts(disk), **network_facts()}
        gpu_facts = gpus(ray_gpus)
        versions = {**packages(), **gpu_facts["versions"]}
        self.server = socket.create_server(("", 0), backlog=256)
        return {
            **node_facts,
            **gpu_facts,
            "versions": versions,
            "storage_problem": write_mark(storage, mark),
            "port": self.server.getsockname()[1],
        }

    def unreachable(self, peers: dict[str, tuple[str, int]]) -> dict[str, str]:
        """The nodes that this one cannot connect to, by id, and why not.

        Args:
            peers: The address and the port of each other node, by id.
        """
        with ThreadPoolExecutor(32) as pool:
            problems = dict(zip(peers, pool.map(_connection_problem, peers.values())))
        return {node_id: problem for node_id, problem in problems.items() if problem}

    def marks(self, storage: str, prefix: str) -> list[str] | None:
        """Ids of the nodes whose marks this node sees; None if it cannot read the storage.

        Args:
            storage: The folder or URL.
            prefix: What the names of marks begin with; the id follows.
        """
        try:
            file_system, path = _storage(storage)
            names = [os.path.basename(name) for name in file_system.ls(path, detail=False)]
        except Exception:  # each object store has its own errors
            return None
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def remove_mark(self, storage: str, mark: str) -> None:
        """Remove this node's mark from the storage."""
        file_system, path = _storage(storage)
        file_system.rm_file(f"{path}/{mark}")


def _connection_problem(peer: tuple[str, int]) -> str:
    """Why no connection to an address and a port can be made; "" if it can."""
    try:
        socket.create_connection(peer, timeout=CONNECT_SECONDS).close()
        return ""
    except OSError as error:
        return (error.strerror or str(error)).lower()


# --- the system ---


def machine_facts(disk: str) -> dict[str, Any]:
    """The host's name, shared memory and free disk, by the names of `NodeFacts`.

    Args:
        disk: A folder on the disk, which need not exist yet.
    """
    while not os.path.isdir(disk):
        disk = os.path.dirname(disk) or "/"
    has_shm = os.path.isdir("/dev/shm")
    return {
        "host": socket.gethostname(),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if has_shm else 0,
        "disk_free": shutil.disk_usage(disk).free,
        "disk_path": disk,
    }


def packages() -> dict[str, str]:
    """The versions of Python and of `PACKAGES`; "" for a package that is not installed."""
    from importlib import metadata

    major, minor, _ = platform.python_version_tuple()
    versions = {"Python": f"{major}.{minor}"}
    for name in PACKAGES:
        versions[name] = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def network_facts() -> dict[str, Any]:
    """IPv4 addresses and what the host's own name resolves to, by the names of `NodeFacts`."""
    import psutil

    interfaces = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                interfaces[name] = address.address
    resolves_to = None
    with contextlib.suppress(OSError):
        resolves_to = socket.gethostbyname(socket.gethostname())
    return {
        "interfaces": interfaces,
        "resolves_to": resolves_to,
        "gloo_interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }


# --- GPUs ---


def gpus(ray_gpus: float) -> dict[str, Any]:
    """What the machine, the driver and torch know of GPUs, by the names of `NodeFacts`.

    Args:
        ray_gpus: How many GPUs Ray counts on the node.
    """
    facts: dict[str, Any] = {
        "pci_gpus": _count_controllers(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "versions": {},
        **smi(),
    }
    if facts["gpus"] or ray_gpus:
        ask_torch(facts)
    facts["metrics_problem"] = nvml_problem() if facts["gpus"] else ""
    return facts


def _count_controllers() -> int:
    """The number of NVIDIA display controllers on the PCI bus."""
    count = 0
    for device in glob.glob("/sys/bus/pci/devices/*"):
        is_nvidia = _read(f"{device}/vendor").strip() == NVIDIA_VENDOR
        if is_nvidia and _read(f"{device}/class").startswith(DISPLAY_CLASS):
            count += 1
    return count


def _read(path: str) -> str:
    """The content of a file; "" if it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def nvml_problem() -> str:
    """Why a run could not record the GPUs' load, memory and power; "" if it can."""
    try:
        import pynvml

        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
        return ""
    except Exception as error:  # NVMLError exists only where pynvml does
        return _reason(error)


def _reason(error: Exception) -> str:
    message = str(error) or type(error).__name__
    return message.splitlines()[0][:MAX_REASON]


def smi() -> dict[str, Any]:
    """What the driver knows, by the names of `NodeFacts`.

    CUDA_VISIBLE_DEVICES does not change it.
    """
    command = ["nvidia-smi", "-q", "-x"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
    except FileNotFoundError:
        return {"gpus": [], "smi_error": "there is no nvidia-smi"}
    except subprocess.TimeoutExpired:
        return {"gpus": [], "smi_error": "nvidia-smi hangs"}
    if result.returncode:
        lines = (result.stdout + result.stderr).strip().splitlines() or ["no reason given"]
        return {"gpus": [], "smi_error": lines[0][:MAX_REASON]}
    log = ElementTree.fromstring(result.stdout)
    rows = [_gpu_facts(index, gpu) for index, gpu in enumerate(log.findall("gpu"))]
    versions = {}
    if rows:
        versions["the NVIDIA driver"] = log.findtext("driver_version", "")
    return {"gpus": rows, "driver_cuda": log.findtext("cuda_version", ""), "versions": versions}


def _gpu_facts(index: int, gpu: ElementTree.Element) -> dict[str, Any]:
    """One GPU in the output of nvidia-smi, by the names of `GpuFacts`."""
    mebibyte = 2**20
    return {
        "index": index,
        "name": gpu.findtext("product_name", ""),
        "memory_total": int(_number(gpu.findtext("fb_memory_usage/total")) * mebibyte),
        "memory_used": int(_number(gpu.findtext("fb_memory_usage/used")) * mebibyte),
        "processes": _other_processes(gpu),
        "ecc_errors": _uncorrected_errors(gpu),
        "throttled": _throttle_reasons(gpu),
        "temperature": _number(gpu.findtext("temperature/gpu_temp")),
        "mig": gpu.findtext("mig_mode/current_mig") == "Enabled",
    }


def _number(text: str | None) -> float:
    """The number at the beginning of a text such as "81559 MiB"; 0 for "N/A"."""
    match = re.match(r"\s*-?\d+(\.\d+)?", text or "")
    return float(match[0]) if match else 0.0


def _other_processes(gpu: ElementTree.Element) -> tuple[str, ...]:
    """The processes that compute on a GPU, but for this one."""
    descriptions = []
    for process in gpu.findall("processes/process_info"):
        computes = "C" in process.findtext("type", "")
        pid = process.findtext("pid")
        if computes and pid != str(os.getpid()):
            program = os.path.basename(process.findtext("process_name", "").partition(" ")[0])
            descriptions.append(f"{pid} {program} {process.findtext('used_memory', '')}")
    return tuple(descriptions)


def _uncorrected_errors(gpu: ElementTree.Element) -> int:
    """The number of memory errors since the last restart that could not be corrected."""
    total = 0.0
    for errors in gpu.findall("ecc_errors/volatile/*"):
        # Older drivers count them as double_bit.
        if "uncorrectable" in errors.tag or errors.tag == "double_bit":
            total += _number(errors.findtext("total") or errors.text)
    return int(total)


def _throttle_reasons(gpu: ElementTree.Element) -> tuple[str, ...]:
    """The reasons that slow a GPU down now."""
    active = set()
    for state in gpu.iter():
        # clocks_event_reason_X; older drivers write clocks_throttle_reason_X.
        _, separator, name = state.tag.partition("_reason_")
        if separator and (state.text or "").strip() == "Active":
            active.add(name)
    return tuple(reason for reason, names in THROTTLE_REASONS.items() if active & names)


def ask_torch(facts: dict[str, Any]) -> None:
    """Add what torch sees, and how fast each idle GPU multiplies matrices.

    Args:
        facts: The facts of `gpus` so far.
    """
    try:
        import torch

        facts["torch_cuda"] = torch.version.cuda
        facts["torch_gpus"] = torch.cuda.device_count()
        torch.cuda.init()
        facts["versions"]["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:
        facts["torch_error"] = _reason(error)
        return
    has_order_of_driver = facts["visible"] is None
    if has_order_of_driver:
        for row, index in zip(facts["gpus"], range(facts["torch_gpus"])):
            row["flops"] = None if row["processes"] else gpu_flops(index)


def gpu_flops(index: int) -> float | None:
    """FLOP/s of a bf16 matrix product, the best of several; None if it fails.

    Args:
        index: torch's index of the GPU.
    """
    import torch

    best_seconds = float("inf")
    try:
        shape = (PRODUCT_SIZE, PRODUCT_SIZE)
        matrix = torch.randn(shape, device=f"cuda:{index}", dtype=torch.bfloat16)
        for _ in range(MEASUREMENTS):  # of which the first warms up
            torch.cuda.synchronize(index)
            started_at = time.perf_counter()
            for _ in range(PRODUCTS):
                matrix @ matrix
            torch.cuda.synchronize(index)
            best_seconds = min(best_seconds, time.perf_counter() - started_at)
        flops_of_product = 2 * PRODUCT_SIZE**3
        return PRODUCTS * flops_of_product / best_seconds
    except Exception:
        return None
    finally:
        torch.cuda.empty_cache()


# --- storage ---


def _storage(storage: str) -> tuple[Any, str]:
    """The file system of a folder or URL, without its cache, and the path in it."""
    import fsspec

    file_system, path = fsspec.core.url_to_fs(storage)
    file_system.invalidate_cache()
    return file_system, path


def write_mark(storage: str, mark: str) -> str:
    """Write a file into the storage.

    Args:
        storage: The folder or URL; "" for none.
        mark: The name of the file.

    Returns:
        Why it cannot be written; "" if it is.
    """
    if not storage:
        return ""
    try:
        file_system, path = _storage(storage)
        is_folder = "://" not in storage
        if is_folder:
            os.makedirs(path, exist_ok=True)
        file_system.pipe(f"{path}/{mark}", b"doctor")
        return ""
    except Exception as error:  # each object store has its own errors
        return _reason(error)


# --- all-reduce ---


class RingRank:
    """The actor of one rank of an all-reduce.

    Args:
        gpu: The driver's index of its GPU; None means the CPU.
        interface: The network interface by which gloo's peers find it; "" for gloo's choice.
    """

    def __init__(self, gpu: int | None, interface: str) -> None:
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        import torch

        self.torch = torch
        self.backend = "gloo" if gpu is None else "nccl"
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        self.store: Any = None

    def open(self, address: str) -> tuple[str, int]:
        """On the first rank: open the store through which the ranks find one another.

        Args:
            address: The address of this node.

        Returns:
            (address, port) of the store.
        """
        from torch.distributed import TCPStore

        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def join(self, rank: int, ranks: int, store: tuple[str, int]) -> str:
        """Join the process group of all ranks, and return its backend.

        Args:
            rank: The number of this rank.
            ranks: How many there are.
            store: What `open` returned on the first rank.
        """
        import torch.distributed as dist

        if self.backend == "nccl":
            self.torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=JOIN_SECONDS)
        host, port = store
        opened = self.store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
        dist.init_process_group(
            self.backend, store=opened, rank=rank, world_size=ranks, timeout=timeout
        )
        numbers = RING_BYTES[self.backend] // 4  # of float32
        self.data = self.torch.randn(numbers, device=self.device)
        return self.backend

    def rate(self, groups: list[list[int]]) -> tuple[float, float] | None:
        """Measure an all-reduce and an all-to-all of this rank's group.

        Every rank calls this with the same groups. In a ring of n ranks 2 (n-1)/n of the data
        leaves each rank for an all-reduce, and (n-1)/n for an all-to-all.

        Args:
            groups: Disjoint groups of ranks.

        Returns:
            Bytes/s that leave this rank in the all-reduce and in the all-to-all; None if it is in
            none of the groups.
        """
        import torch.distributed as dist

        # Every rank takes part in making each process group, also those that it is not in.
        process_groups = [dist.new_group(ranks) for ranks in groups]
        group_numbers = [number for number, ranks in enumerate(groups) if dist.get_rank() in ranks]
        if not group_numbers:
            return None
        group = process_groups[group_numbers[0]]
        size = len(groups[group_numbers[0]])
        data = self.data[: len(self.data) // size * size]
        received = self.torch.empty_like(data)
        sent_bytes = (size - 1) / size * data.nbytes
        # A maximum, because repeated sums of the same data would overflow.
        reduce_seconds = self._best_seconds(
            lambda: dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)
        )
        exchange_seconds = self._best_seconds(
            lambda: dist.all_to_all_single(received, data, group=group)
        )
        return 2 * sent_bytes / reduce_seconds, sent_bytes / exchange_seconds

    def _best_seconds(self, collective: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(RING_TIMES + 1):  # of which the first connects the ranks
            self._synchronize()
            started_at = time.perf_counter()
            collective()
            self._synchronize()
            best = min(best, time.perf_counter() - started_at)
        return best

    def _synchronize(self) -> None:
        if self.backend == "nccl":
            self.torch.cuda.synchronize(self.device)
