"""Measures what devices and the links between them reach: `trireme calibrate`, half a minute.

On one device it measures large matrix products, an addition in memory, and the launch of an
operation that does nothing. Between the devices of a node, and between two nodes, it measures
all-reduces of a small and a large tensor. Measured values override datasheets and fits. Everything
runs on normally distributed random numbers, as a model's are: a GPU that multiplies ones or zeros
draws less power, so that its clock stays higher than in any training.
"""

import contextlib
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from app.errors import RunFailed
from app.planner.device import Device, device_named
from app.planner.measurements import save_measured_values
from app.planner.processes import in_processes
from cluster.addresses import join_address
from cluster.hardware import HardwareError, add_gpu, find_gpu
from cluster.remote import free_port
from cluster.shape import NodeState, living_nodes

TIMEOUT = 180.0
NODE_TIMEOUT = 240.0
"""Seconds for a node of a cluster, with waiting for devices that others use."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SECONDS = 0.2
"""For each measurement."""
BLOCKS = 5
"""Blocks of calls in a measurement."""
ADDITION_SHARE = 0.9
"""Share of the datasheet's bandwidth that an addition reaches on the GPUs with a fitted `stream`.

That was fitted to whole trainings, which reach less. The `stream` of another GPU is scaled by what
its own addition reaches.
"""
CPU_WORKERS = 4
"""Processes on a node without GPUs."""


def calibrate(workers: int) -> dict[str, Any]:
    """Measure this machine's devices.

    Args:
        workers: Processes that measure links together; with 1 no links are measured.

    Returns:
        Constants by the names of device.py, and as `gpu` the name in the catalogue. For a GPU that
        the catalogue does not have, `entry` is what it would say.

    Raises:
        RunFailed: The processes failed, or took too long.
    """
    return dict(in_processes(_measure, workers, timeout=TIMEOUT))


def calibrate_cluster(workers: int | None = None) -> dict[str, Any]:
    """Measure the devices of the Ray cluster that this process is connected to.

    It measures one of the nodes with the most GPUs, or CPUs if there are none, and the link between
    two of these nodes.

    Args:
        workers: Processes on a node; None for one on each GPU.

    Raises:
        RunFailed: A node failed, or its devices were not free.
    """
    alive = living_nodes()
    has_gpus = any(node.total.get("GPU", 0) >= 1 for node in alive)
    resource: Literal["GPU", "CPU"] = "GPU" if has_gpus else "CPU"
    most = int(max(node.total.get(resource, 0) for node in alive))
    largest_nodes = [node for node in alive if node.total.get(resource, 0) == most][:2]
    count = most if workers is None and has_gpus else min(workers or CPU_WORKERS, most)
    (measured,) = _on_nodes(
        lambda _: calibrate(count), largest_nodes[:1], resource=resource, count=count
    )
    if len(largest_nodes) == 2:
        first = largest_nodes[:1]
        (port,) = _on_nodes(lambda _: free_port(), first, resource=resource, count=1)
        address = f"tcp://{join_address(largest_nodes[0].address, port)}"
        of_ranks = _on_nodes(
            lambda rank: _measure_link_across(rank, address),
            largest_nodes,
            resource=resource,
            count=1,
        )
        measured |= of_ranks[0]
    return measured


def _on_nodes(
    function: Callable[[int], Any],
    nodes: list[NodeState],
    *,
    resource: Literal["GPU", "CPU"],
    count: int,
) -> list[Any]:
    """The results of `function(rank)` on each of the nodes, at the same time.

    Args:
        function: Gets the number of the node in the list.
        nodes: The nodes.
        resource: The devices that it uses.
        count: How many of them, on each node.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    demand = {"num_gpus": count, "num_cpus": 0} if resource == "GPU" else {"num_cpus": count}
    remote = ray.remote(function)
    tasks = []
    for rank, node in enumerate(nodes):
        affinity = NodeAffinitySchedulingStrategy(node.id, soft=False)
        on_node = remote.options(**demand, scheduling_strategy=affinity, max_retries=0)
        tasks.append(on_node.remote(rank))
    try:
        return list(ray.get(tasks, timeout=NODE_TIMEOUT))
    except ray.exceptions.GetTimeoutError:
        raise RunFailed(
            f"a node's devices were in use, or hung, for {NODE_TIMEOUT:.0f} s: try again later"
        ) from None
    except ray.exceptions.RayError as error:
        cause = str(getattr(error, "cause", error)).strip()
        raise RunFailed(f"calibration failed on a node: {cause}") from None
    finally:
        for task in tasks:
            ray.cancel(task, force=True)


def keep(measured: dict[str, Any]) -> tuple[str, Path]:
    """Keep what was measured for later plans.

    A GPU that the catalogue does not have goes into the user's own catalogue.

    Returns:
        (the name of the GPU, the file)
    """
    values = dict(measured)
    name = values.pop("gpu")
    entry = values.pop("entry", None)
    if entry is not None:
        add_gpu(name, entry)
    # What runs have said was beside plans with the values that are measured anew.
    return name, save_measured_values(name, {**values, "corrections": []})


# --- in the processes -----------------------------------------------------------------------------


def _measure(rank: int, device: torch.device) -> dict[str, Any]:
    """What rank 0 measures alone, and then all ranks together."""
    measured = _measure_device(device) if rank == 0 else {}
    dist.barrier()  # the others have waited, so rank 0 had the machine to itself
    if dist.get_world_size() > 1:
        measured |= _measure_links(device, "within")
        if "entry" in measured:
            measured["entry"]["link"] = measured["link_within"] / 1e9
    measured["measured"] = True
    return measured


def _measure_link_across(rank: int, address: str) -> dict[str, float]:
    """The link between two nodes; runs on each of them."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=2)
    try:
        return _measure_links(device, "across")
    finally:
        dist.destroy_process_group()


def _measure_device(device: torch.device) -> dict[str, Any]:
    """The constants of one device."""
    is_cpu = device.type == "cpu"
    full_name = "cpu" if is_cpu else torch.cuda.get_device_name(device)
    known: Device | None = None
    with contextlib.suppress(HardwareError):
        known = device_named(find_gpu(full_name).name)
    if known is not None:
        name = known.gpu.name
    else:
        name = re.sub(r"[^a-z0-9]+", "-", full_name.lower()).strip("-")
    matmul_rates = _measure_matmul_rates(device, known)
    bandwidth = _measure_bandwidth(device)
    measured: dict[str, Any] = {"gpu": name, "operation": _measure_launch(device)}
    if is_cpu:  # a core has no datasheet, so the peak is what is measured
        measured["peak"] = matmul_rates
        measured["matmul"] = dict.fromkeys(matmul_rates, 1.0)
        measured["memory_bandwidth"] = bandwidth
        measured["stream"] = 1.0
    elif known is not None:
        measured["matmul"] = {
            precision: rate / known.gpu.rate(precision) for precision, rate in matmul_rates.items()
        }
        if not known.fitted:
            reached = bandwidth / known.gpu.memory_bandwidth / ADDITION_SHARE
            measured["stream"] = min(1.0, known.stream * reached)
    else:
        measured["entry"] = _catalogue_entry(device, full_name, matmul_rates, bandwidth)
    return measured


def _catalogue_entry(
    device: torch.device, full_name: str, matmul_rates: dict[str, float], bandwidth: float
) -> dict[str, Any]:
    """What the catalogue would say of a GPU that reaches of its peaks what an A100 reaches."""
    usual = device_named("a100-80gb").matmul
    peak = {
        precision: rate / usual.get(precision, 0.72) / 1e12
        for precision, rate in matmul_rates.items()
    }
    return {
        "memory": torch.cuda.get_device_properties(device).total_memory // 2**20,
        "bandwidth": bandwidth / ADDITION_SHARE / 1e9,
        "peak": peak,
        "link": 25.0,
        "source": "measured by trireme calibrate",
        "aka": [full_name],
    }


def _measure_matmul_rates(device: torch.device, known: Device | None) -> dict[str, float]:
    """FLOP/s by precision that an infinitely large product would reach.

    They follow from a large product and from device.py's factor for its size.
    """
    is_cpu = device.type == "cpu"
    if is_cpu:
        precisions = {"fp32", "bf16"}
    elif known is None:
        precisions = set(DTYPES)
    else:
        precisions = set(known.gpu.peak)
    size = 512 if is_cpu else 4096
    model = known or Device(gpu=find_gpu("cpu"))
    flops = 2 * size**3 / model.product_share(size, size, size)
    rates = {}
    for precision, dtype in DTYPES.items():
        if precision not in precisions:
            continue
        a, b = torch.randn(2, size, size, device=device).to(dtype)
        rates[precision] = float(flops / seconds_of(_product_of(a, b), device))
    return rates


def _product_of(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    return lambda: a @ b


def _measure_bandwidth(device: torch.device) -> float:
    """Bytes/s of an addition whose tensors do not fit into caches."""
    x = torch.randn(2**23 if device.type == "cpu" else 2**26, device=device)
    out = torch.empty_like(x)
    return 2 * x.nbytes / seconds_of(lambda: torch.add(x, 1.0, out=out), device)


def _measure_launch(device: torch.device) -> float:
    """Seconds of the host to launch a small operation with a gradient."""
    x = torch.ones(8, device=device, requires_grad=True)
    return seconds_of(lambda: x + 1.0, device, wait=False)


def _measure_links(device: torch.device, place: Literal["within", "across"]) -> dict[str, float]:
    """Bytes/s and seconds per hop of an all-reduce between all processes.

    Args:
        device: This rank's device.
        place: Whether the processes are within a node or across two.
    """
    ways = dist.get_world_size()
    large = torch.randn(2**21 if device.type == "cpu" else 2**26, device=device)
    small = torch.randn(8, device=device)
    operation = dist.ReduceOp.MAX  # repeated sums would overflow
    large_seconds = seconds_of(lambda: dist.all_reduce(large, op=operation), device, together=True)
    small_seconds = seconds_of(lambda: dist.all_reduce(small, op=operation), device, together=True)
    sent_bytes = 2 * large.nbytes * (ways - 1) / ways
    hops = 2 * math.log2(ways)
    return {
        f"link_{place}": sent_bytes / max(1e-9, large_seconds - small_seconds),
        f"latency_{place}": small_seconds / hops,
        place: 1.0,
    }


def seconds_of(
    function: Callable[[], Any],
    device: torch.device,
    *,
    wait: bool = True,
    together: bool = False,
) -> float:
    """Seconds of one call, from several blocks of calls.

    It is the least of the blocks, so that what else the machine does matters little; of calls
    together it is the median, because networks are shared.

    Args:
        function: What is measured.
        device: The device on which it computes.
        wait: Whether to wait until the device has finished.
        together: Whether all ranks make the same number of calls.
    """

    def seconds_per_call(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        if device.type == "cuda" and wait:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / calls

    seconds_per_call(2)  # the first calls are slower
    calls = int(SECONDS / BLOCKS / max(seconds_per_call(1), 1e-7))
    calls_of_block = torch.tensor([max(1, min(1000, calls))], device=device)
    if together:
        dist.all_reduce(calls_of_block, op=dist.ReduceOp.MIN)
    blocks = sorted(seconds_per_call(int(calls_of_block)) for _ in range(BLOCKS))
    return blocks[BLOCKS // 2] if together else blocks[0]
