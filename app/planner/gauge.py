"""In the processes of `trireme calibrate`: what a device and the links between several of them reach.

    python -m torch.distributed.run … -m app.planner.gauge WANTED.json OUT.json

A product of m × n × k is held against the formula of rates.py, so what comes out is the rate before its factor for the
size: `matmul` is what an endlessly large product would reach.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from app.planner.rates import CONSTANTS, Rates, rates
from cluster.hardware import HardwareError, gpu

SECONDS = 0.2
"""For each thing that is measured."""
ADD = 0.9
"""Share of the datasheet's bandwidth that an addition reaches on the GPUs whose `stream` was fitted to whole trainings,
which reach less: another GPU's is scaled by what its own addition reaches."""
Seconds = Callable[[Callable[[], Any]], float]


def main(wanted: str, out: str) -> None:
    import torch.distributed as dist

    from app.planner.measure import join

    rank, device = join()
    world = dist.get_world_size()
    asked = json.loads(Path(wanted).read_text())
    found: dict[str, Any] = {}
    counts = [n for n in asked["counts"] if 1 < n <= world]
    groups = {n: dist.new_group(list(range(n))) for n in counts}
    if rank == 0:  # the others wait, so it has the machine to itself
        found = alone(device, asked["shapes"])
        found["alone"] = _little(device, timer(device))
    dist.barrier()
    for n, group in groups.items():
        if rank < n:
            seconds = timer(device, group)
            found[f"together{n}"] = _little(device, seconds)
            found[f"links{n}"] = links(device, group, n, seconds)
        dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def alone(device: Any, shapes: list[list[float]]) -> dict[str, Any]:
    """One device's constants, as rates.py names them; `entry`: what the catalogue would say of a GPU that it lacks.

    shapes: m, n, k and number of a model's own products; none: large ones.
    """
    import torch

    written = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    try:
        name = gpu(written).name
    except HardwareError:
        name = ""
    known = rates(name) if name else None
    base = known or Rates(gpu("cpu"))  # of a GPU that is not known only its defaults are used
    seconds = timer(device, best=True)
    found: dict[str, Any] = {"gpu": name or re.sub(r"[^a-z0-9]+", "-", written.lower()).strip("-")}
    precisions = _precisions(device, known)
    if not (name and _is_fitted(name)):
        found["k_half"] = _k_half(device, precisions[0], seconds)
    k_half = found.get("k_half", base.k_half)
    reached = {p: _products(device, p, shapes, k_half, base.mn_half, seconds) for p in precisions}
    bandwidth = _bandwidth(device, seconds)
    if device.type == "cpu":  # a core has no datasheet: what is measured is the peak
        found |= {"peak": reached, "matmul": dict.fromkeys(reached, 1.0), "memory_bandwidth": bandwidth, "stream": 1.0}
    elif known is not None:
        found["matmul"] = {p: rate / known.gpu.rate(p) for p, rate in reached.items()}
        if not _is_fitted(name):
            found["stream"] = min(1.0, known.stream * bandwidth / known.gpu.memory_bandwidth / ADD)
    else:
        usual = rates("a100-80gb").matmul
        found["entry"] = {
            "memory": torch.cuda.get_device_properties(device).total_memory // 2**20,
            "bandwidth": bandwidth / ADD / 1e9,
            "peak": {p: rate / usual.get(p, 0.72) / 1e12 for p, rate in reached.items()},
            "link": 25.0,
            "source": "measured by trireme calibrate",
            "aka": [written],
        }
    little = torch.ones(8, device=device, requires_grad=True)
    found["operation"] = timer(device, wait=False, best=True)(lambda: little + 1.0)
    return found


def _is_fitted(name: str) -> bool:
    """Whether published trainings on this GPU gave constants that a product alone or an addition cannot give."""
    families = yaml.safe_load(CONSTANTS.read_text())["families"].values()
    return any(name in family["gpus"] for family in families)


def _precisions(device: Any, known: Rates | None) -> list[str]:
    """What can be measured, the one that trains first."""
    import torch

    if device.type == "cpu":
        return [p for p in ("fp32", "bf16") if known is None or p in known.gpu.peak]
    usual = ["bf16", "fp16", "fp32"] if torch.cuda.is_bf16_supported() else ["fp16", "fp32"]
    return [p for p in usual if known is None or p in known.gpu.peak]


def _products(
    device: Any, precision: str, shapes: list[list[float]], k_half: float, mn_half: float, seconds: Seconds
) -> float:
    """FLOP/s of products before their factor for the size: those of a model together, by the time that they take."""
    large = 4096 if device.type == "cuda" else 512
    ideal = taken = 0.0
    for m, n, k, many in shapes or [[large, large, large, 1]]:
        size = k / (k + k_half) * (m * n) / (m * n + mn_half)
        ideal += many * 2 * m * n * k / size
        taken += many * seconds(_product(device, int(m), int(n), int(k), precision))
    return ideal / taken


def _k_half(device: Any, precision: str, seconds: Seconds) -> float:
    """Inner dimension at which a product runs at half of its speed.

    From dimensions that are short for the device, and long enough that it does not wait for memory."""
    large, short = (4096, (512, 1024)) if device.type == "cuda" else (512, (32, 128))

    def each(k: int) -> float:
        return seconds(_product(device, large, large, k, precision)) / k

    whole = each(large)
    halves = []
    for k in short:
        ratio = each(k) / whole  # (1 + half / k) / (1 + half / large)
        halves.append((ratio - 1) / max(1e-9, 1 / k - ratio / large))
    return float(np.clip(np.median(halves), 1.0, 2000.0))


def _bandwidth(device: Any, seconds: Seconds) -> float:
    """Bytes/s of an addition over more than fits in caches."""
    import torch

    x = torch.ones(2**26 if device.type == "cuda" else 2**23, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / seconds(lambda: torch.add(x, 1.0, out=y))


def links(device: Any, group: Any, ways: int, seconds: Seconds) -> dict[str, float]:
    """Bytes/s and seconds per hop of an all-reduce over a group; `shared`: of an average in memory, between two."""
    import torch
    import torch.distributed as dist

    from strategies.collectives import shared_memory_all_reduce

    large = torch.ones(2**26 if device.type == "cuda" else 2**21, device=device)
    small = torch.ones(8, device=device)
    slow = seconds(lambda: dist.all_reduce(large, group=group))
    quick = seconds(lambda: dist.all_reduce(small, group=group))
    moved = 2 * large.numel() * 4 * (ways - 1) / ways
    found = {"bandwidth": moved / max(1e-9, slow - quick), "latency": quick / (2 * float(np.log2(ways)))}
    memory = shared_memory_all_reduce(group, device) if ways == 2 else None
    if memory is not None:
        found["shared"] = large.numel() * 4 / seconds(lambda: memory.average_(large))
        memory.close()
    return found


def _little(device: Any, seconds: Seconds) -> float:
    return seconds(_product(device, 512, 512, 512, "fp32"))


def _product(device: Any, m: int, n: int, k: int, precision: str) -> Callable[[], Any]:
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    a, b = torch.ones(m, k, device=device, dtype=dtype), torch.ones(k, n, device=device, dtype=dtype)
    return lambda: a @ b


def timer(device: Any, group: Any = None, wait: bool = True, best: bool = False) -> Seconds:
    """Measures seconds of one call: the median (best: the least, whatever else the machine does) of five blocks.

    With a group its ranks make the same number of calls."""
    import torch
    import torch.distributed as dist

    def block(function: Callable[[], Any], count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            function()
        if device.type == "cuda" and wait:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begun) / count

    def seconds(function: Callable[[], Any]) -> float:
        block(function, 2)
        count = torch.tensor([max(1, min(1000, int(SECONDS / 5 / max(block(function, 1), 1e-7))))], device=device)
        if group is not None:
            dist.all_reduce(count, op=dist.ReduceOp.MIN, group=group)
        blocks = [block(function, int(count)) for _ in range(5)]
        return min(blocks) if best else float(np.median(blocks))

    return seconds


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
