"""The rows of the parity matrix as data: strategies on numbers of workers.

A new strategy is a new row.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from experiments.parity.curves import Trial
from strategies.layout import Layout, choose
from strategies.options import Options


@dataclass(frozen=True)
class Row:
    """A layout by its name and degrees.

    Attributes:
        name: A strategy, or several joined by "+".
        workers: The number of workers.
        degrees: Degrees that the name leaves open, by their names in `ParallelDims`.
        tolerance: The relative difference of the loss that is allowed in float32.
        options: The layout's own options, beside those of the trial.
        micro_batches: The number of micro-batches that it needs; None for the trial's.
    """

    name: str
    workers: int
    degrees: dict[str, int] = field(default_factory=dict)
    tolerance: float = 1e-5
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int | None = None

    @property
    def layout(self) -> Layout:
        return choose(self.name, self.workers, **self.degrees)

    def adapt(self, trial: Trial, options: Options) -> tuple[Trial, Options]:
        """The trial and the options as this row runs them."""
        if self.micro_batches is not None:
            trial = replace(trial, micro_batches=self.micro_batches)
        return trial, replace(options, **self.options)

    def __str__(self) -> str:
        words = [str(self.layout)]
        for name, value in self.options.items():
            words.append(name if value is True else str(value))
        return " ".join(words)


def _pipeline(
    name: str,
    workers: int,
    schedule: str,
    *,
    stages: int = 2,
    chunks: int | None = None,
    micro_batches: int = 4,
    **degrees: int,
) -> Row:
    """A row with a pipeline."""
    options: dict[str, Any] = {"schedule": schedule}
    if chunks is not None:
        options["chunks"] = chunks
    return Row(
        name,
        workers,
        degrees={"pp": stages, **degrees},
        options=options,
        micro_batches=micro_batches,
    )


def _context(name: str, workers: int, method: str, **degrees: int) -> Row:
    """A row with context parallelism; with a pipeline too if it has stages."""
    return Row(
        name,
        workers,
        degrees=degrees,
        options={"context": method},
        micro_batches=4 if "pp" in degrees else None,
    )


DATA_PARALLEL = ("ddp_model_parallel", "ddp", "zero1", "zero2", "zero3", "fsdp")

SINGLE = Row("single", 1)

ROWS: tuple[Row, ...] = (
    Row("dp", 1),
    Row("model_parallel", 1),
    *(Row(name, workers) for name in DATA_PARALLEL for workers in (2, 4)),
    Row("hsdp", 4, {"dp_shard": 2}),
    Row("zero1", 4, {"dp_replicate": 2}),
    Row("zero2", 4, {"dp_replicate": 2}),
    Row("tensor", 2),
    Row("tensor", 4),
    Row("tensor", 2, options={"async_tp": True}),
    *(Row(f"{name}+tensor", 4, {"tp": 2}) for name in ("ddp", "zero1", "zero2", "fsdp")),
    _pipeline("pipeline", 2, "1f1b"),
    _pipeline("pipeline", 2, "zbv"),
    _pipeline("pipeline", 4, "zb_h1", stages=4),
    _pipeline("pipeline", 4, "zb_h2", stages=4, micro_batches=8),
    _pipeline("ddp+pipeline", 4, "interleaved_1f1b", chunks=2),
    _pipeline("fsdp+pipeline", 4, "zb_h2"),
    _pipeline("tensor+pipeline", 4, "1f1b"),
    *(_context("context", 2, method) for method in ("ring", "allgather", "ulysses")),
    _context("context", 4, "ring"),
    *(_context(f"{name}+context", 4, "ring", cp=2) for name in ("ddp", "zero1", "zero2", "fsdp")),
    _context("tensor+context", 4, "ulysses", tp=2),
    _context("pipeline+context", 4, "allgather", pp=2),
)
"""Every strategy and every pair of them, on 2 and 4 workers."""

THREE_DIMENSIONS: tuple[Row, ...] = (
    Row("hsdp+tensor", 8, {"dp_shard": 2, "tp": 2}),
    _pipeline("ddp+tensor+pipeline", 8, "1f1b", tp=2),
    _pipeline("fsdp+tensor+pipeline", 8, "1f1b", tp=2),
    _context("hsdp+context", 8, "ring", dp_shard=2, cp=2),
    _context("fsdp+tensor+context", 8, "ring", tp=2, cp=2),
    _context("ddp+tensor+context", 8, "ulysses", tp=2, cp=2),
    _context("fsdp+pipeline+context", 8, "ring", pp=2, cp=2),
    _context("tensor+pipeline+context", 8, "ring", tp=2, pp=2, cp=2),
)
"""Three dimensions of the mesh at once, on the fewest workers that have them."""

MIXTURES: tuple[Row, ...] = (
    *(Row("ddp+expert", workers, {"ep": ep}) for workers, ep in ((2, 2), (4, 2), (4, 4))),
    *(Row("fsdp+expert", workers, {"ep": ep}) for workers, ep in ((2, 2), (4, 2), (4, 4))),
    *(Row("hsdp+expert", 4, {"dp_shard": 2, "ep": ep}) for ep in (2, 4)),
    Row("zero2+expert", 4, {"ep": 2}),
    *(Row(f"{name}+tensor+expert", 4, {"tp": 2, "ep": 2}) for name in ("ddp", "fsdp")),
    *(Row("fsdp+context+expert", 4, {"cp": 2, "ep": ep}) for ep in (2, 4)),
    _pipeline("ddp+pipeline+expert", 4, "1f1b", ep=2),
    _pipeline("fsdp+pipeline+expert", 4, "zb_h2", ep=2),
)
"""For mixtures of experts: experts divided beside every other dimension of the mesh."""

MIXTURES_OF_MORE_DIMENSIONS: tuple[Row, ...] = (
    _pipeline("ddp+tensor+pipeline+expert", 8, "1f1b", tp=2, ep=2),
    _pipeline("fsdp+tensor+pipeline+expert", 8, "1f1b", tp=2, ep=2),
    _pipeline("fsdp+pipeline+context+expert", 8, "1f1b", cp=2, ep=4),
    _pipeline("fsdp+tensor+pipeline+context+expert", 16, "1f1b", tp=2, cp=2, ep=2),
)
"""For mixtures of experts: four dimensions of the mesh at once, and all five."""

DEEPSPEED = Row("deepspeed", 2, tolerance=2e-5)
"""The optional extra; its engine adds gradients up in buckets of its own."""
