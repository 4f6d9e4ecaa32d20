"""How many CPU threads a worker with GPUs computes with: its share of its node's cores.

A worker with a GPU asks Ray for no CPUs. So it fits wherever its GPUs are free, even on a node
whose CPUs other jobs hold or that was started with --num-cpus=0, and placement groups, diagnoses
and autoscalers deal with GPUs only. But Ray gives a process without CPUs one thread, and torchrun
gives one to every process. An optimizer whose state is offloaded, and whatever else runs on the
CPU, is 5 to 10 times as fast with the cores that would be idle. Ray places no more workers on a
node than there are GPUs, so shares of cores by GPUs add up to at most the cores. A run of one
process (launcher=local) uses torch's own number, all cores.
"""

import os
from pathlib import Path

import torch

from cluster.environment import THREADS


def share(cores: int, gpus: float, worker_gpus: float) -> int:
    """Threads of a worker.

    Args:
        cores: Of its node.
        gpus: GPUs of its node.
        worker_gpus: GPUs of the worker.
    """
    share_of_gpus = min(1.0, worker_gpus / max(gpus, worker_gpus))
    return max(1, int(cores * share_of_gpus))


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and a container's CPU quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def set_by_user(starter_pid: int) -> bool:
    """Whether the user has set the number of threads, rather than Ray or torchrun.

    They set it for the processes that they start. The environment that they began with themselves
    is in /proc; if it cannot be read, the number counts as the user's.

    Args:
        starter_pid: Process id of Ray's raylet or of torchrun's agent.
    """
    try:
        variables = Path(f"/proc/{starter_pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return THREADS in os.environ
    return any(variable.startswith(f"{THREADS}=".encode()) for variable in variables)


def take_share_of_node(workers: int) -> None:
    """Takes this process's share of threads, unless the user has set a number.

    Slurm may have given the process cores of its own.

    Args:
        workers: Processes that torchrun or Slurm has started on this node, with a GPU each.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        is_set = set_by_user(os.getppid())
    else:
        is_set = THREADS in os.environ
    if is_set:
        return
    slurm_cores = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if slurm_cores.isdigit():
        take(min(int(slurm_cores), usable_cores()))
    else:
        take(share(usable_cores(), gpus=workers, worker_gpus=1))


def take(threads: int) -> None:
    """Computes with so many threads, here and in what this process starts."""
    os.environ[THREADS] = str(threads)
    torch.set_num_threads(threads)
