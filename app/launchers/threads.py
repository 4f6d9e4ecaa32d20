"""How many CPU threads a worker with GPUs computes with: its share of its node's cores.

A GPU's worker asks Ray for no CPUs: then it fits wherever its GPUs are free, also on a node whose CPUs other jobs hold
or that was started with --num-cpus=0, and what a placement group, a diagnosis and an autoscaler are asked for stays the
GPUs. But Ray gives a process without CPUs one thread, and torchrun every process, while an optimizer whose state is
offloaded, and whatever else is left to the CPU, is 5 to 10 times as fast with the cores that nobody uses. As Ray places
no more workers on a node than there are GPUs, shares of cores by GPUs add up to the cores at most. A run of one process
(launcher=local) has torch's own number, all cores.
"""

import os
from pathlib import Path

import torch

from cluster.environment import THREADS


def share(cores: int, gpus: float, own: float) -> int:
    """Threads of a worker with `own` of its node's `gpus` GPUs; pure."""
    return max(1, int(cores * min(1.0, own / max(gpus, own))))


def usable_cores() -> int:
    """That this process may run on: its affinity, and a container's quota of CPU time (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def set_by_user(starter: int) -> bool:
    """Whether the number was there before whatever started this process set one for it, as Ray and torchrun do.

    starter: the pid of Ray's raylet or of torchrun's agent; /proc has the environment that it began with. Where that
    cannot be read, it counts as the user's."""
    try:
        found = Path(f"/proc/{starter}/environ").read_bytes().split(b"\0")
    except OSError:
        return THREADS in os.environ
    return any(entry.startswith(f"{THREADS}=".encode()) for entry in found)


def take_share_of_node(workers: int) -> None:
    """In one of the `workers` processes that torchrun or Slurm has started on this node, a GPU each. Slurm may have
    given the process cores of its own."""
    if set_by_user(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else THREADS in os.environ:
        return
    own = os.environ.get("SLURM_CPUS_PER_TASK", "")
    take(min(int(own), usable_cores()) if own.isdigit() else share(usable_cores(), workers, 1))


def take(threads: int) -> None:
    """Computes with so many, here and in what this process starts."""
    os.environ[THREADS] = str(threads)
    torch.set_num_threads(threads)
