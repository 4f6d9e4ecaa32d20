"""What doctor runs on a node: a probe of it, and a rank of an all-reduce. Sent by value, with nothing else of ours.

Everything here answers with plain values or an empty one; a machine without GPUs, without nvidia-smi or without /proc
is not an error but a fact.
"""

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
RING_BYTES = {"nccl": 256 << 20, "gloo": 16 << 20}
RING_TIMES = 5
JOIN_SECONDS = 25


class Probe:
    """The actor. Its methods are called on all nodes at once."""

    def facts(self, ray_gpus: float, disk: str, storage: str, mark: str) -> dict[str, Any]:
        """The node's facts, by the names of `NodeFacts`, and a `port` to which others can connect until the probe ends
        (the kernel answers for it). Writes its mark into the storage."""
        found = machine(disk) | network() | gpus(ray_gpus)
        found["versions"] = packages() | found["versions"]
        self.server = socket.create_server(("", 0), backlog=256)
        return found | {"storage_problem": write_mark(storage, mark), "port": self.server.getsockname()[1]}

    def unreachable(self, peers: dict[str, tuple[str, int]]) -> dict[str, str]:
        """Of peers by node id, those to whose port no connection comes about, and why."""
        with ThreadPoolExecutor(32) as pool:
            problems = dict(zip(peers, pool.map(_connect, peers.values())))
        return {node_id: problem for node_id, problem in problems.items() if problem}

    def marks(self, storage: str, prefix: str) -> list[str] | None:
        """What follows the prefix in the names of the marks there; None where the storage cannot be read."""
        try:
            fs, path = _storage(storage)
            names = [os.path.basename(name) for name in fs.ls(path, detail=False)]
        except Exception:
            return None
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def forget(self, storage: str, mark: str) -> None:
        fs, path = _storage(storage)
        fs.rm_file(f"{path}/{mark}")


def _connect(peer: tuple[str, int]) -> str:
    try:
        socket.create_connection(peer, timeout=3).close()
        return ""
    except OSError as error:
        return (error.strerror or str(error)).lower()


def machine(disk: str) -> dict[str, Any]:
    while not os.path.isdir(disk):
        disk = os.path.dirname(disk) or "/"
    return {
        "host": socket.gethostname(),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        "disk_free": shutil.disk_usage(disk).free,
        "disk_path": disk,
    }


def packages() -> dict[str, str]:
    """Versions of Python and of those packages that it has."""
    from importlib import metadata

    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def network() -> dict[str, Any]:
    """Interfaces with their IPv4 addresses, and what the host's own name resolves to."""
    import psutil

    found = psutil.net_if_addrs()
    addresses = {name: row.address for name, rows in found.items() for row in rows if row.family == socket.AF_INET}
    try:
        resolved: str | None = socket.gethostbyname(socket.gethostname())
    except OSError:
        resolved = None
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return {"interfaces": addresses, "resolves_to": resolved, "gloo_interface": gloo}


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _number(text: str | None) -> float:
    """The number at the beginning of "81559 MiB"; 0 for "N/A"."""
    found = re.match(r"\s*-?\d+(\.\d+)?", text or "")
    return float(found[0]) if found else 0.0


# --- GPUs -----------------------------------------------------------------------------------------------------------


def gpus(ray_gpus: float) -> dict[str, Any]:
    devices = glob.glob("/sys/bus/pci/devices/*")
    controllers = [d for d in devices if _read(f"{d}/vendor").strip() == "0x10de" and _read(f"{d}/class")[:4] == "0x03"]
    found = {"pci_gpus": len(controllers), "visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "versions": {}} | smi()
    if found["gpus"] or ray_gpus:
        ask_torch(found)
    return found | {"metrics_problem": nvml_problem() if found["gpus"] else ""}


def nvml_problem() -> str:
    """Why a run could not record the GPUs' load, memory and power; empty if it can."""
    try:
        import pynvml

        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
        return ""
    except Exception as error:  # NVMLError exists only where pynvml does
        return (str(error) or type(error).__name__).splitlines()[0][:200]


def smi() -> dict[str, Any]:
    """The driver's own view, which CUDA_VISIBLE_DEVICES does not change, by the names of `NodeFacts`."""
    try:
        done = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return {"gpus": [], "smi_error": "there is no nvidia-smi"}
    except subprocess.TimeoutExpired:
        return {"gpus": [], "smi_error": "nvidia-smi hangs"}
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
        return {"gpus": [], "smi_error": said[0][:200]}
    log = ElementTree.fromstring(done.stdout)
    rows = [_gpu(index, gpu) for index, gpu in enumerate(log.findall("gpu"))]
    versions = {"the NVIDIA driver": log.findtext("driver_version", "")} if rows else {}
    return {"gpus": rows, "driver_cuda": log.findtext("cuda_version", ""), "versions": versions}


def _gpu(index: int, gpu: ElementTree.Element) -> dict[str, Any]:
    """By the names of `GpuFacts`. Newer drivers call the throttle reasons event reasons; older ones count ECC errors
    as double_bit."""
    states = {state.tag.partition("_reason_")[2]: state.text for state in gpu.iter() if "_reason_" in state.tag}
    active = {name for name, text in states.items() if (text or "").strip() == "Active"}
    reasons = {"thermal": {"hw_thermal_slowdown", "sw_thermal_slowdown"}, "power brake": {"hw_power_brake_slowdown"}}
    errors = [e for e in gpu.findall("ecc_errors/volatile/*") if "uncorrectable" in e.tag or e.tag == "double_bit"]
    others = [p for p in gpu.findall("processes/process_info") if "C" in p.findtext("type", "")]
    return {
        "index": index,
        "name": gpu.findtext("product_name", ""),
        "memory_total": int(_number(gpu.findtext("fb_memory_usage/total")) * 2**20),
        "memory_used": int(_number(gpu.findtext("fb_memory_usage/used")) * 2**20),
        "processes": tuple(_process(process) for process in others if process.findtext("pid") != str(os.getpid())),
        "ecc_errors": int(sum(_number(error.findtext("total") or error.text) for error in errors)),
        "throttled": tuple(reason for reason, names in reasons.items() if active & names),
        "temperature": _number(gpu.findtext("temperature/gpu_temp")),
        "mig": gpu.findtext("mig_mode/current_mig") == "Enabled",
    }


def _process(process: ElementTree.Element) -> str:
    program = os.path.basename(process.findtext("process_name", "").partition(" ")[0])
    return f"{process.findtext('pid')} {program} {process.findtext('used_memory', '')}"


def ask_torch(found: dict[str, Any]) -> None:
    """Adds what torch sees, and how fast each idle GPU multiplies."""
    try:
        import torch

        found |= {"torch_cuda": torch.version.cuda, "torch_gpus": torch.cuda.device_count()}
        torch.cuda.init()
        found["versions"]["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:
        found["torch_error"] = (str(error) or type(error).__name__).splitlines()[0][:200]
        return
    if found["visible"] is None:  # then torch's order is the driver's
        for row, index in zip(found["gpus"], range(found["torch_gpus"])):
            row["flops"] = None if row["processes"] else gpu_flops(torch, index)


def gpu_flops(torch: Any, index: int) -> float | None:
    """FLOP/s of a bf16 matrix product, the best of six, after warming up."""
    size, best = 4096, float("inf")
    try:
        a = torch.randn(size, size, device=f"cuda:{index}", dtype=torch.bfloat16)
        for _ in range(7):
            torch.cuda.synchronize(index)
            begun = time.perf_counter()
            for _ in range(10):
                a @ a
            torch.cuda.synchronize(index)
            best = min(best, time.perf_counter() - begun)
        return 10 * 2 * size**3 / best
    except Exception:
        return None
    finally:
        torch.cuda.empty_cache()


# --- storage --------------------------------------------------------------------------------------------------------


def _storage(storage: str) -> tuple[Any, str]:
    """The file system of a folder or URL, without what it remembers, and the path in it."""
    import fsspec

    fs, path = fsspec.core.url_to_fs(storage)
    fs.invalidate_cache()
    return fs, path


def write_mark(storage: str, mark: str) -> str:
    """Why nothing can be written to the storage; empty if it can."""
    if not storage:
        return ""
    try:
        fs, path = _storage(storage)
        if "://" not in storage:
            os.makedirs(path, exist_ok=True)
        fs.pipe(f"{path}/{mark}", b"doctor")
        return ""
    except Exception as error:  # each object store has its own
        return (str(error) or type(error).__name__).splitlines()[0][:200]


# --- all-reduce ------------------------------------------------------------------------------------------------------


class RingRank:
    """The actor of one rank. gpu: the driver's index; None: the CPU. interface: where gloo's peers find it."""

    def __init__(self, gpu: int | None, interface: str) -> None:
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        import torch

        self.torch, self.backend = torch, "gloo" if gpu is None else "nccl"
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        self.store: Any = None

    def open(self, address: str) -> tuple[str, int]:
        """The first rank's part: where all find one another."""
        from torch.distributed import TCPStore

        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def join(self, rank: int, ranks: int, store: tuple[str, int]) -> str:
        import torch.distributed as dist

        if self.backend == "nccl":
            self.torch.cuda.set_device(self.device)
        wait = timedelta(seconds=JOIN_SECONDS)
        found = self.store or dist.TCPStore(*store, is_master=False, timeout=wait)
        dist.init_process_group(self.backend, store=found, rank=rank, world_size=ranks, timeout=wait)
        self.data = self.torch.randn(RING_BYTES[self.backend] // 4, device=self.device)
        return self.backend

    def rate(self, groups: list[list[int]]) -> tuple[float, float] | None:
        """Bytes/s that leave each rank while its group reduces, in a ring: 2 (n-1)/n of the data; and while it sends
        all to all: (n-1)/n. Every rank calls this with the same disjoint groups; None where it is in none of them."""
        import torch.distributed as dist

        made = [(group, dist.new_group(group)) for group in groups]
        own = next(((ranks, group) for ranks, group in made if dist.get_rank() in ranks), None)
        if own is None:
            return None
        ranks, group = own
        data = self.data[: len(self.data) // len(ranks) * len(ranks)]
        sent, arrived = (len(ranks) - 1) / len(ranks) * data.nbytes, self.torch.empty_like(data)
        # what is summed again and again overflows
        reduce = self._best(lambda: dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group))
        return 2 * sent / reduce, sent / self._best(lambda: dist.all_to_all_single(arrived, data, group=group))

    def _best(self, collective: Callable[[], object]) -> float:
        """Seconds of the quickest."""
        best = float("inf")
        for _ in range(RING_TIMES + 1):  # the first one connects
            self._finish()
            begun = time.perf_counter()
            collective()
            self._finish()
            best = min(best, time.perf_counter() - begun)
        return best

    def _finish(self) -> None:
        if self.backend == "nccl":
            self.torch.cuda.synchronize(self.device)
