"""Measures what this machine's devices and links reach, in half a minute: `trireme calibrate`.

On one device: matrix products of several sizes and inner dimensions, copies through its memory, launches of an
operation that does nothing. Between this machine's devices: all-reduces of a small and a large tensor, alone and while
all of them compute (on CPUs workers share cores, so each is slower: `crowd`). What is found goes before the datasheet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 0.25
"""For each thing that is measured."""


def calibrate(workers: int) -> dict[str, Any]:
    """The constants of this machine's devices, as rates.py names them, with `gpu` the catalogue's name.

    workers: processes that measure links together; 1: no links.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        found: dict[str, Any] = _run(1, out)
        crowd = [(1, 1.0)]
        for count in [n for n in (2, 4) if n <= max(workers, 1)]:
            together = _run(count, out)
            crowd.append((count, max(1.0, found["alone"] and together["alone"] / found["alone"])))
            if count == 2 or found["gpu"] != "cpu":
                found |= {key: together[key] for key in ("link_within", "latency_within") if key in together}
        alone = found.pop("alone")
        if found["gpu"] == "cpu" and len(crowd) > 1:
            found["crowd"] = crowd
        return found | {"measured": True, "seconds_of_a_product": alone}


def _run(workers: int, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command += ["-m", "app.planner.calibrate", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        from app.errors import RunFailed

        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise RunFailed(f"calibration on {workers} processes failed: {last}")
    return dict(json.loads(out.read_text()))


# --- in the processes -------------------------------------------------------------------------------------------


def main(out: str) -> None:
    import torch
    import torch.distributed as dist

    from cluster.hardware import HardwareError, gpu

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    try:
        name = gpu(name).name
    except HardwareError as error:
        raise SystemExit(str(error)) from None
    found: dict[str, Any] = {"gpu": name}
    dist.barrier()
    if dist.get_world_size() == 1:
        found |= _alone(device, name)
    else:
        found |= _links(device)
    found["alone"] = _seconds(_product(device, 512, 512, 512, torch.float32), device)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _alone(device: Any, name: str) -> dict[str, Any]:
    """Rates of products by precision, of memory, and of launches."""
    import torch

    from cluster.hardware import gpu

    large = 4096 if device.type == "cuda" else 512
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    matmul: dict[str, float] = {}
    peak: dict[str, float] = {}
    for precision, dtype in dtypes.items():
        if precision not in gpu(name).peak or (device.type == "cpu" and precision == "fp16"):
            continue
        rate = 2 * large**3 / _seconds(_product(device, large, large, large, dtype), device)
        if device.type == "cpu":  # a core has no datasheet: what is measured is the peak
            peak[precision], matmul[precision] = rate, 1.0
        else:
            matmul[precision] = rate / gpu(name).rate(precision)
    thin = [(large, k) for k in (32, 128, large)]
    times = [_seconds(_product(device, m, m, k, torch.float32), device) / (2 * m * m * k) for m, k in thin]
    halves = [k * (t / times[-1] - 1) for (_, k), t in zip(thin, times)][:-1]
    found: dict[str, Any] = {"matmul": matmul, "k_half": float(max(1.0, np.median(halves)))}
    if peak:
        found["peak"] = peak
    numbers = 2**26 if device.type == "cuda" else 2**23  # more than fits in caches
    x = torch.ones(numbers, device=device)
    y = torch.empty_like(x)
    bandwidth = 2 * x.numel() * 4 / _seconds(lambda: torch.add(x, 1.0, out=y), device)
    if device.type == "cpu":
        found |= {"memory_bandwidth": bandwidth, "stream": 1.0}
    else:
        found["stream"] = min(1.0, bandwidth / gpu(name).memory_bandwidth)
    little = torch.ones(8, device=device, requires_grad=True)
    found["operation"] = _seconds(lambda: little + 1.0, device, wait=False)
    return found


def _links(device: Any) -> dict[str, Any]:
    """Bytes/s and seconds per hop of an all-reduce over all processes."""
    import torch
    import torch.distributed as dist

    ways = dist.get_world_size()
    large = torch.ones(2**26 if device.type == "cuda" else 2**21, device=device)
    small = torch.ones(8, device=device)
    slow = _seconds(lambda: dist.all_reduce(large), device)
    quick = _seconds(lambda: dist.all_reduce(small), device)
    moved = 2 * large.numel() * 4 * (ways - 1) / ways
    return {"link_within": moved / max(1e-9, slow - quick), "latency_within": quick / 2, "within": 1.0}


def _product(device: Any, m: int, n: int, k: int, dtype: Any) -> Callable[[], Any]:
    import torch

    a, b = torch.ones(m, k, device=device, dtype=dtype), torch.ones(k, n, device=device, dtype=dtype)
    return lambda: a @ b


def _seconds(function: Callable[[], Any], device: Any, wait: bool = True) -> float:
    """Of one call: the median of five blocks; the same number of calls on every rank."""
    import torch
    import torch.distributed as dist

    def block(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            function()
        if device.type == "cuda" and wait:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begun) / count

    block(2)
    count = torch.tensor([max(1, min(1000, int(SECONDS / 5 / max(block(1), 1e-7))))], device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    return float(np.median([block(int(count)) for _ in range(5)]))


if __name__ == "__main__":
    main(sys.argv[1])
