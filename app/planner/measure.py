"""Measures configurations: seconds per step and peak memory, in processes of their own.

    measure(configs, workers)   starts `workers` processes (torch.distributed.run), which train each configuration for a
                                few steps with the real training loop, one after the other, and returns what they saw

A configuration that fails, out of memory included, is reported and ends its processes; the rest run in new ones. On a
GPU memory is the peak that torch allocated; on a CPU the peak of the process, of which `base` was there before.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUDGET = 0.9
"""Seconds of steps to measure of each configuration, after warming up."""
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Memory that is freed goes back at once, so that a process's size says what it holds."""


@dataclass(frozen=True)
class Measured:
    seconds: float | None
    """Per step, the median; None if it did not run."""
    bytes: float = 0.0
    base: float = 0.0
    """Bytes the process took before, on a CPU."""
    failure: str = ""


def measure(
    configs: list[dict[str, Any]], workers: int, *, timeout: float = 240.0, budget: float = BUDGET
) -> list[Measured]:
    """What each configuration (a whole one, as `to_dict` gives) was measured to take on `workers` processes here."""
    found: list[Measured] = []
    while len(found) < len(configs):
        got = _start(configs[len(found) :], workers, timeout, budget)
        found += got
        if len(found) < len(configs) and (not got or got[-1].seconds is not None):
            found.append(Measured(None, failure="the processes ended without a word"))
    return found


def _start(configs: list[dict[str, Any]], workers: int, timeout: float, budget: float) -> list[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        wanted, out = Path(folder) / "wanted.json", Path(folder) / "out.jsonl"
        wanted.write_text(json.dumps({"configs": configs, "budget": budget}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        command += ["-m", "app.planner.measure", str(wanted), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **MALLOC}
        with open(Path(folder) / "log", "w+") as log:
            try:
                subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=timeout, check=False)
            except subprocess.TimeoutExpired:
                log.write("it took too long")
            log.flush()
            log.seek(0)
            said = log.read()
        lines = out.read_text().splitlines() if out.exists() else []
        found = [Measured(**json.loads(line)) for line in lines]
        if len(found) < len(configs) and (not found or found[-1].seconds is not None):
            found.append(Measured(None, failure=_reason(said)))
        return found


def _reason(said: str) -> str:
    lines = [line for line in said.splitlines() if re.search(r"Error:|took too long|Killed|Signal", line)]
    return lines[0].strip()[:300] if lines else "the processes ended without a word"


# --- in the processes -------------------------------------------------------------------------------------------


def main(wanted: str, out: str) -> None:
    import torch
    import torch.distributed as dist

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    asked = json.loads(Path(wanted).read_text())
    for number, config in enumerate(asked["configs"]):
        with tempfile.TemporaryDirectory() as folder:
            found = _one(config, rank, device, f"{folder}/{number}", asked["budget"])
        if rank == 0:
            with open(out, "a") as file:
                file.write(json.dumps(dataclasses.asdict(found)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _one(values: dict[str, Any], rank: int, device: Any, folder: str, budget: float) -> Measured:
    import torch.distributed as dist

    from app.config_file import from_dict
    from app.job import Job, Place
    from app.launchers.torchrun import Silence
    from app.prepare import prepare, read_task
    from app.worker import Training

    config = from_dict(values)
    world = dist.get_world_size()
    prepared = prepare(config, read_task(config), world, devices_per_node=world)
    gc.collect()  # what the configuration before has left
    base = _start_peak(device)
    job = Job(config, prepared.layout, folder, "measure", "measure", 10**9, os.getcwd())
    training = Training(job, Place(rank, world, rank, device), Silence())
    batches = training.batches()
    seconds = _agreed(_timed(lambda: training.step(next(batches)), device, budget), device)
    peak, before = _agreed(_peak(device), device), _agreed(base, device)
    getattr(batches, "close", lambda: None)()
    training.close()
    return Measured(seconds, peak, before)


def _timed(advance: Callable[[], None], device: Any, budget: float) -> float:
    """Seconds per step, the median of five blocks, after three steps to warm up."""
    import torch
    import torch.distributed as dist

    def steps(count: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(count):
            advance()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begun) / count

    steps(2)
    each = int(max(1, min(20, budget / 5 / _agreed(steps(1), device))))
    return statistics.median(steps(each) for _ in range(5))


def _agreed(value: float, device: Any) -> float:
    """The largest of all ranks."""
    import torch
    import torch.distributed as dist

    held = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return float(held)


def _start_peak(device: Any) -> float:
    """Begins a new peak; bytes that are there already."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return 0.0
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: Any) -> float:
    import torch

    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> float:
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{key}:\s+(\d+) kB", text)
    assert match
    return float(match[1]) * 1024


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
