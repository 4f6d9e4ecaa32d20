"""Measures configurations: seconds per step and peak memory, in processes of their own.

    measure(configs, workers)   starts `workers` processes (torch.distributed.run), which train each configuration for a
                                few steps with the real training loop, one after the other, and returns what they saw

On a CPU each is started twice, for its memory and for its time: exact memory costs time (EXACT).

A configuration that fails, out of memory included, is reported and ends its processes; the rest run in new ones. On a
GPU memory is the peak that torch allocated; on a CPU the peak of the process, of which `base` was there before.

Nothing else is harmed: a worker may be told how many bytes it can have; where memory ends all the same, the kernel
takes these processes first (oom_score_adj); and none outlives the one that started them (stop, and prctl).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BUDGET = 0.9
"""Seconds of steps to measure of each configuration, after warming up."""
PATIENCE = 10.0
"""Seconds that processes have to end after they were asked to."""
FIRST_USE = 50 * 2**20
"""Bytes of torch's libraries that a process on a CPU loads with the first step that it trains."""
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Memory that is freed goes back at once, so that a process's size says what it holds; and steps take twice as long."""


@dataclass(frozen=True)
class Measured:
    seconds: float | None
    """Per step, the median; None if it did not run."""
    bytes: float = 0.0
    base: float = 0.0
    """Bytes the process took before, on a CPU."""
    failure: str = ""

    @property
    def own(self) -> float:
        """Bytes of what was trained, which is what plans count."""
        return max(0.0, self.bytes - self.base - (FIRST_USE if self.base else 0))


def measure(
    configs: list[dict[str, Any]],
    workers: int,
    *,
    timeout: float = 240.0,
    budget: float = BUDGET,
    limit: float | None = None,
) -> list[Measured]:
    """What each configuration (a whole one, as `to_dict` gives) was measured to take on `workers` processes here.

    budget: seconds of steps to measure; 0: only that it runs. limit: bytes that a process on a CPU may take beside
    what it has before the model; beyond that it fails, as if memory had ended.
    """
    if not budget or torch.cuda.is_available():
        return _all(configs, workers, timeout, budget, limit, {} if torch.cuda.is_available() else EXACT)
    held = _all(configs, workers, timeout, 0.0, limit, EXACT)
    runs = [config for config, seen in zip(configs, held, strict=True) if seen.seconds is not None]
    timed = iter(_all(runs, workers, timeout, budget, None, {}))
    return [
        seen if seen.seconds is None else dataclasses.replace(next(timed), bytes=seen.bytes, base=seen.base)
        for seen in held
    ]


def _all(
    configs: list[dict[str, Any]],
    workers: int,
    timeout: float,
    budget: float,
    limit: float | None,
    environment: dict[str, str],
) -> list[Measured]:
    found: list[Measured] = []
    while len(found) < len(configs):
        asked = {"configs": configs[len(found) :], "budget": budget, "limit": limit}
        got = _start(asked, workers, timeout, environment)
        found += got
        if len(found) < len(configs) and (not got or got[-1].seconds is not None):
            found.append(Measured(None, failure="the processes ended without a word"))
    return found


def _start(asked: dict[str, Any], workers: int, timeout: float, environment: dict[str, str]) -> list[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        wanted, out = Path(folder) / "wanted.json", Path(folder) / "out.jsonl"
        wanted.write_text(json.dumps(asked))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        command += ["-m", "app.planner.measure", str(wanted), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with open(Path(folder) / "log", "w+") as log:
            agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                agent.wait(timeout)
            except subprocess.TimeoutExpired:
                log.write(f"\nit took too long: more than {timeout:.0f} s\n")
            finally:
                stop(agent)
            log.flush()
            log.seek(0)
            said = log.read()
        lines = out.read_text().splitlines() if out.exists() else []
        found = [Measured(**json.loads(line)) for line in lines]
        if len(found) < len(asked["configs"]) and (not found or found[-1].seconds is not None):
            found.append(Measured(None, failure=_reason(said)))
        return found


def stop(agent: subprocess.Popen[Any]) -> None:
    """Ends torchrun and all that it has started; its workers are sessions of their own, so each is looked for."""
    import psutil

    if agent.poll() is not None:
        return  # it has ended, and its workers with it
    started = psutil.Process(agent.pid).children(recursive=True)
    agent.terminate()
    try:
        agent.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
    for process in started:  # psutil knows a process by its start too, so a number that is used again is not hit
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if process.is_running():
                process.kill()
    psutil.wait_procs(started, timeout=PATIENCE)


def _reason(said: str) -> str:
    """The line that says it best; torchrun puts its own around every line of a worker's."""
    for wanted in (r"took too long", r"out of memory|OutOfMemory|can't allocate|MemoryError", r"Error:|Killed|Signal"):
        for line in said.splitlines():
            if re.search(wanted, line):
                return re.sub(r"^(\[\w+\]:)+", "", line.strip())[:300]
    return "the processes ended without a word"


# --- in the processes -------------------------------------------------------------------------------------------


def main(wanted: str, out: str) -> None:
    _expendable()
    import torch.distributed as dist

    rank, device = join()
    asked = json.loads(Path(wanted).read_text())
    for number, config in enumerate(asked["configs"]):
        with tempfile.TemporaryDirectory() as folder:
            found = _one(config, rank, device, f"{folder}/{number}", asked["budget"], asked["limit"])
        if rank == 0:
            with open(out, "a") as file:
                file.write(json.dumps(dataclasses.asdict(found)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def join() -> tuple[int, torch.device]:
    """Rank and device of a process that torchrun has started, once it is in the process group."""
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return int(os.environ["RANK"]), device


def _expendable() -> None:
    """The kernel takes this process first when memory ends, and ends it with the one that started it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _bound(limit: float | None, device: Any) -> None:
    """Lets this process have `limit` bytes more than it has; on a GPU memory has its own end."""
    if limit is not None and device.type == "cpu":
        most = int(_status("VmData") + limit)
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _one(values: dict[str, Any], rank: int, device: Any, folder: str, budget: float, limit: float | None) -> Measured:
    import torch.distributed as dist

    from app.config_io import from_dict
    from app.job import Job, Place, SilentChannel
    from app.loop import Training
    from app.run.prepare import prepare, read_task

    config = from_dict(values)
    world = dist.get_world_size()
    prepared = prepare(config, read_task(config), world, devices_per_node=world)
    gc.collect()  # what the configuration before has left
    base = _start_peak(device)
    _bound(limit, device)
    job = Job(config, prepared.layout, folder, "measure", "measure", 10**9, os.getcwd())
    training = Training(job, Place(rank, world, rank, device), SilentChannel())
    batches = training.batches()
    seconds = _agreed(_timed(lambda: training.step(next(batches)), device, budget), device)
    peak, before = _agreed(_peak(device), device), _agreed(base, device)
    getattr(batches, "close", lambda: None)()
    training.close()
    return Measured(seconds, peak, before)


def _timed(advance: Callable[[], None], device: Any, budget: float) -> float:
    """Seconds per step, the median of five blocks, after three steps to warm up; budget 0: of one step after two."""
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
    if not budget:
        return steps(1)
    each = int(max(1, min(20, budget / 5 / _agreed(steps(1), device))))
    return statistics.median(steps(each) for _ in range(5))


def _agreed(value: float, device: Any) -> float:
    """The largest of all ranks."""
    import torch.distributed as dist

    held = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return float(held)


def _start_peak(device: Any) -> float:
    """Begins a new peak; bytes that are there already."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return 0.0
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: Any) -> float:
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> float:
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{key}:\s+(\d+) kB", text)
    assert match
    return float(match[1]) * 1024


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
