"""The memory and time of one layout: whether it fits, and how a run compares with it."""

from dataclasses import dataclass

from app.planner.device import constants
from app.planner.layouts import Candidate
from app.planner.ranges import fit_probability

CLOSE = 0.1
"""A plan within this share of a GPU's memory is called close: plans err by as much (README.md)."""


@dataclass(kw_only=True)
class Estimate:
    """The memory and time of one layout.

    Args:
        candidate: The layout.
        capacity: Bytes of a device that tensors may take up.
        memory: Bytes on the fullest device, by kind: parameters, gradients, optimizer, activations,
            communication, buffers, margin.
        seconds: Seconds of one optimizer step, by the parts that timing.py names.
        flops: FLOPs of the whole step, without what is recomputed.
        reduces_each_microbatch: Whether the gradients of every micro-batch are reduced
            (parallel.accumulate_sharded); None if the layout leaves no choice.
        stages: The number of blocks of each chunk of a pipeline; None without a pipeline.
        speed_range: 80 % of runs of this kind lie between these shares of the planned speed.
        host_memory_bytes: Bytes of a host's memory that hold offloaded state and activations of its
            GPUs.
        host_bytes: Bytes of a host's memory; None if it is not known.
        unmeasured: Traits of the plan that none of the runs behind `speed_range` had.
        on_cpu: Whether the workers compute on CPUs.
        of_another_trainer: Whether another trainer than Trireme is described to the plan.
    """

    candidate: Candidate
    capacity: float
    memory: dict[str, float]
    seconds: dict[str, float]
    flops: float
    reduces_each_microbatch: bool | None
    stages: tuple[int, ...] | None
    speed_range: tuple[float, float] = (1.0, 1.0)
    host_memory_bytes: float = 0.0
    host_bytes: float | None = None
    unmeasured: tuple[str, ...] = ()
    on_cpu: bool = False
    of_another_trainer: bool = False

    def __post_init__(self) -> None:
        self.memory_bytes = sum(self.memory.values())
        self.step_seconds = sum(self.seconds.values())
        self.fits = self.memory_bytes <= self.capacity and not self.exceeds_host

    @property
    def allocated_bytes(self) -> float:
        """Bytes of tensors at the worst moment, without what fragmentation wastes."""
        return self.memory_bytes - self.memory.get("margin", 0.0)

    @property
    def host_memory_share(self) -> float | None:
        """Share of a host's memory that is offloaded to; None if its size is not known."""
        if not self.host_memory_bytes:
            return 0.0
        return self.host_memory_bytes / self.host_bytes if self.host_bytes else None

    @property
    def exceeds_host(self) -> bool:
        """Whether what is offloaded takes more than the memory of a host."""
        return (self.host_memory_share or 0.0) > 1

    @property
    def fit_probability(self) -> float:
        """The probability that it fits, by how far measured peaks were from their plans."""
        if self.exceeds_host:
            return 0.0
        peaks = constants()["peaks_of_others" if self.of_another_trainer else "peaks"]
        return fit_probability(self.capacity, self.memory_bytes, peaks)

    @property
    def verdict(self) -> str:
        """fits, close (the plan's error decides) or does not fit."""
        is_close = abs(self.memory_bytes / self.capacity - 1) < CLOSE
        if is_close and not self.exceeds_host:
            return "close"
        return "fits" if self.fits else "does not fit"

    def compare(self, seconds: float, memory: float) -> dict[str, float]:
        """The estimate beside what a run measured, as metrics to log.

        Args:
            seconds: Measured seconds per step.
            memory: Measured bytes of the model on the fullest worker; 0 if they are not known. On a
                CPU it is the growth of the process's resident memory. That includes libraries,
                threads and what malloc keeps, which no plan counts, so no error is logged.
        """
        metrics = {
            "plan/step_seconds": self.step_seconds,
            "plan/step_seconds_measured": seconds,
            "plan/step_error": self.step_seconds / seconds - 1,
            "plan/memory_bytes": self.memory_bytes,
        }
        if memory > 0 and self.on_cpu:
            metrics["plan/resident_bytes"] = memory
        elif memory > 0:
            metrics["plan/memory_bytes_measured"] = memory
            metrics["plan/memory_error"] = self.allocated_bytes / memory - 1
        return metrics
