"""Measures what devices and the links between them reach: `trireme calibrate`, half a minute.

On one device: large matrix products, an addition in its memory, the launch of an operation that does nothing. Between
the devices of a node, and two nodes: all-reduces of a small and a large tensor. What is measured goes before the
datasheet and what is fitted. All of it is on random normal numbers, as a model's are: a GPU that multiplies ones, or
zeros, draws less power, so that its clock stays higher than any training sees it.
"""

import contextlib
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from app.errors import RunFailed
from app.planner.device import Device, device, remember
from app.planner.processes import in_processes
from cluster.addresses import join_address
from cluster.hardware import HardwareError, add_gpu, find_gpu
from cluster.remote import free_port
from cluster.shape import NodeState, living_nodes

TIMEOUT = 180.0
PATIENCE = 240.0
"""Seconds for a node of a cluster, waiting for devices that others use included."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SECONDS = 0.2
"""For each thing that is measured."""
ADD = 0.9
"""Share of the datasheet's bandwidth that an addition reaches on the GPUs whose `stream` was fitted to whole trainings,
which reach less: another GPU's is scaled by what its own addition reaches."""


def calibrate(workers: int) -> dict[str, Any]:
    """The constants of this machine's devices, as device.py names them, with `gpu` the catalogue's name.

    workers: processes that measure links together; 1: no links. A GPU that the catalogue lacks comes with `entry`, what
    it would say of it.
    Raises:
        RunFailed: the processes failed, or took too long.
    """
    return dict(in_processes(_measure, workers, timeout=TIMEOUT))


def calibrate_cluster(workers: int | None = None) -> dict[str, Any]:
    """The same on the Ray cluster that this process is connected to: a node of those with most GPUs, else CPUs, and the
    link between two of them.

    Raises:
        RunFailed: a node failed, or its devices were not free.
    """
    alive = living_nodes()
    unit, usual = ("GPU", 10**6) if any(node.total.get("GPU", 0) >= 1 for node in alive) else ("CPU", 4)
    most = int(max(node.total.get(unit, 0) for node in alive))
    nodes = [node for node in alive if node.total.get(unit, 0) == most][:2]
    count = min(workers or usual, most)
    (found,) = _on_nodes(lambda _: calibrate(count), nodes[:1], unit, count)
    if len(nodes) > 1:
        (port,) = _on_nodes(lambda _: free_port(), nodes[:1], unit, 1)
        address = f"tcp://{join_address(nodes[0].address, port)}"
        found |= _on_nodes(lambda rank: _link(rank, address), nodes, unit, 1)[0]
    return found


def _on_nodes(function: Callable[[int], Any], nodes: list[NodeState], unit: str, count: int) -> list[Any]:
    """What `function(rank)` gives on each of the nodes, at the same time, with `count` of the devices of each."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    demand = {"num_gpus": count, "num_cpus": 0} if unit == "GPU" else {"num_cpus": count}
    strategies = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
    tasks = [
        ray.remote(function).options(**demand, scheduling_strategy=there, max_retries=0).remote(rank)
        for rank, there in enumerate(strategies)
    ]
    try:
        return list(ray.get(tasks, timeout=PATIENCE))
    except ray.exceptions.GetTimeoutError:
        raise RunFailed(f"a node's devices were in use, or hung, for {PATIENCE:.0f} s: try again later") from None
    except ray.exceptions.RayError as error:
        raise RunFailed(f"calibration failed on a node: {str(getattr(error, 'cause', error)).strip()}") from None
    finally:
        for task in tasks:
            ray.cancel(task, force=True)


def _link(rank: int, address: str) -> dict[str, float]:
    """On each of two nodes."""
    own = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if own.type == "cuda" else "gloo", init_method=address, rank=rank, world_size=2)
    try:
        return _links(own, "across")
    finally:
        dist.destroy_process_group()


def keep(found: dict[str, Any]) -> tuple[str, Path]:
    """Remembers what was found; a GPU that the catalogue lacks goes into the user's own. Its name, the file."""
    values = dict(found)
    name, entry = values.pop("gpu"), values.pop("entry", None)
    if entry is not None:
        add_gpu(name, entry)
    return name, remember(name, values)


# --- in the processes -------------------------------------------------------------------------------------------


def _measure(rank: int, own: Any) -> dict[str, Any]:
    found = _alone(own) if rank == 0 else {}
    dist.barrier()  # the others waited, so the first had the machine to itself
    if dist.get_world_size() > 1:
        found |= _links(own, "within")
        if "entry" in found:
            found["entry"]["link"] = found["link_within"] / 1e9
    return found | {"measured": True}


def _alone(own: Any) -> dict[str, Any]:
    """One device's constants."""
    written = torch.cuda.get_device_name(own) if own.type == "cuda" else "cpu"
    known: Device | None = None
    with contextlib.suppress(HardwareError):
        known = device(find_gpu(written).name)
    base = known or Device(find_gpu("cpu"))
    name = known.gpu.name if known else re.sub(r"[^a-z0-9]+", "-", written.lower()).strip("-")
    able = ("fp32", "bf16") if own.type == "cpu" else ("fp32", "bf16", "fp16") if known is None else known.gpu.peak
    reached = {precision: _matmul_rate(own, precision, base) for precision in DTYPES if precision in able}
    x = torch.randn(2**26 if own.type == "cuda" else 2**23, device=own)  # more than fits in caches
    y, little = torch.empty_like(x), torch.ones(8, device=own, requires_grad=True)
    bandwidth = 2 * x.nbytes / seconds_of(lambda: torch.add(x, 1.0, out=y), own)
    found: dict[str, Any] = {"gpu": name, "operation": seconds_of(lambda: little + 1.0, own, wait=False)}
    if own.type == "cpu":  # a core has no datasheet: what is measured is the peak
        found |= {"peak": reached, "matmul": dict.fromkeys(reached, 1.0), "memory_bandwidth": bandwidth, "stream": 1.0}
    elif known is not None:
        found["matmul"] = {precision: rate / known.gpu.rate(precision) for precision, rate in reached.items()}
        if not known.fitted:
            found["stream"] = min(1.0, known.stream * bandwidth / known.gpu.memory_bandwidth / ADD)
    else:
        usual = device("a100-80gb").matmul
        found["entry"] = {
            "memory": torch.cuda.get_device_properties(own).total_memory // 2**20,
            "bandwidth": bandwidth / ADD / 1e9,
            "peak": {precision: rate / usual.get(precision, 0.72) / 1e12 for precision, rate in reached.items()},
            "link": 25.0,
            "source": "measured by trireme calibrate",
            "aka": [written],
        }
    return found


def _matmul_rate(own: Any, precision: str, base: Device) -> float:
    """FLOP/s that an endlessly large product would reach, from a large one and device.py's factor for its size."""
    size = 4096 if own.type == "cuda" else 512
    a, b = torch.randn(2, size, size, device=own).to(getattr(torch, DTYPES[precision]))
    return float(2 * size**3 / base.product_share(size, size, size) / seconds_of(lambda: a @ b, own))


def _links(own: Any, where: str) -> dict[str, float]:
    """Bytes/s and seconds per hop of an all-reduce between all processes; where: "within" a node or "across" two."""
    ways = dist.get_world_size()
    large, small = torch.randn(2**26 if own.type == "cuda" else 2**21, device=own), torch.randn(8, device=own)
    most = dist.ReduceOp.MAX  # the sum of sums of sums would not be finite for long
    slow = seconds_of(lambda: dist.all_reduce(large, op=most), own, together=True)
    quick = seconds_of(lambda: dist.all_reduce(small, op=most), own, together=True)
    moved, hops = 2 * large.nbytes * (ways - 1) / ways, 2 * math.log2(ways)
    return {f"link_{where}": moved / max(1e-9, slow - quick), f"latency_{where}": quick / hops, where: 1.0}


def seconds_of(function: Callable[[], Any], own: Any, *, wait: bool = True, together: bool = False) -> float:
    """Seconds of one call, from five blocks of calls: the least, whatever else the machine does.

    wait: until the device has done them. together: all ranks make the same number of calls; the median, as networks
    are shared."""

    def block(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            function()
        if own.type == "cuda" and wait:
            torch.cuda.synchronize(own)
        return (time.perf_counter() - begun) / count

    block(2)
    count = torch.tensor([max(1, min(1000, int(SECONDS / 5 / max(block(1), 1e-7))))], device=own)
    if together:
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
    blocks = sorted(block(int(count)) for _ in range(5))
    return blocks[2] if together else blocks[0]
