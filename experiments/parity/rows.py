"""The parity matrix as data: what is tried at how many workers. A new strategy is a new row."""

from dataclasses import dataclass, field, replace
from typing import Any

from experiments.parity.curves import Trial
from strategies.layout import Layout, choose
from strategies.options import Options


@dataclass(frozen=True)
class Row:
    """A layout by its name and degrees; `tolerance` on the relative difference of the loss in float32.

    options: of the layout, beside those of the trial. micro_batches: that it needs.
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

    def applied(self, trial: Trial, options: Options) -> tuple[Trial, Options]:
        """The trial and the options as this row runs them."""
        if self.micro_batches is not None:
            trial = replace(trial, micro_batches=self.micro_batches)
        return trial, replace(options, **self.options)

    def __str__(self) -> str:
        options = (key if value is True else str(value) for key, value in self.options.items())
        return " ".join([str(self.layout), *options])


def _pipeline(name: str, workers: int, schedule: str, stages: int, micro_batches: int = 4, **more: int) -> Row:
    chunks = {"chunks": more.pop("chunks")} if "chunks" in more else {}
    return Row(
        name, workers, {"pp": stages, **more}, options={"schedule": schedule, **chunks}, micro_batches=micro_batches
    )


def _context(name: str, workers: int, method: str, **degrees: int) -> Row:
    piped = 4 if "pp" in degrees else None
    return Row(name, workers, degrees, options={"context": method}, micro_batches=piped)


SINGLE = Row("single", 1)

ROWS: tuple[Row, ...] = (
    Row("dp", 1),
    Row("model_parallel", 1),
    *(Row(name, n) for name in ("ddp_model_parallel", "ddp", "zero1", "zero2", "zero3", "fsdp") for n in (2, 4)),
    Row("hsdp", 4, {"dp_shard": 2}),
    Row("zero1", 4, {"dp_replicate": 2}),
    Row("zero2", 4, {"dp_replicate": 2}),
    Row("tensor", 2),
    Row("tensor", 4),
    Row("tensor", 2, options={"async_tp": True}),
    *(Row(f"{name}+tensor", 4, {"tp": 2}) for name in ("ddp", "zero1", "zero2", "fsdp")),
    _pipeline("pipeline", 2, "1f1b", 2),
    _pipeline("pipeline", 2, "zbv", 2),
    _pipeline("pipeline", 4, "zb_h1", 4),
    _pipeline("pipeline", 4, "zb_h2", 4, micro_batches=8),
    _pipeline("ddp+pipeline", 4, "interleaved_1f1b", 2, chunks=2),
    _pipeline("fsdp+pipeline", 4, "zb_h2", 2),
    _pipeline("tensor+pipeline", 4, "1f1b", 2),
    *(_context("context", 2, method) for method in ("ring", "allgather", "ulysses")),
    _context("context", 4, "ring"),
    *(_context(f"{name}+context", 4, "ring", cp=2) for name in ("ddp", "zero1", "zero2", "fsdp")),
    _context("tensor+context", 4, "ulysses", tp=2),
    _context("pipeline+context", 4, "allgather", pp=2),
)
"""Every name and every pair, at 2 and 4 workers."""

THREE: tuple[Row, ...] = (
    Row("hsdp+tensor", 8, {"dp_shard": 2, "tp": 2}),
    _pipeline("ddp+tensor+pipeline", 8, "1f1b", 2, tp=2),
    _pipeline("fsdp+tensor+pipeline", 8, "1f1b", 2, tp=2),
    _context("hsdp+context", 8, "ring", dp_shard=2, cp=2),
    _context("fsdp+tensor+context", 8, "ring", tp=2, cp=2),
    _context("ddp+tensor+context", 8, "ulysses", tp=2, cp=2),
    _context("fsdp+pipeline+context", 8, "ring", pp=2, cp=2),
    _context("tensor+pipeline+context", 8, "ring", tp=2, pp=2, cp=2),
)
"""Three sides of the grid at once, at the fewest workers that have them: 8."""

MIXTURES: tuple[Row, ...] = (
    *(Row("ddp+expert", n, {"ep": ep}) for n, ep in ((2, 2), (4, 2), (4, 4))),
    *(Row("fsdp+expert", n, {"ep": ep}) for n, ep in ((2, 2), (4, 2), (4, 4))),
    *(Row("hsdp+expert", 4, {"dp_shard": 2, "ep": ep}) for ep in (2, 4)),
    Row("zero2+expert", 4, {"ep": 2}),
    *(Row(f"{name}+tensor+expert", 4, {"tp": 2, "ep": 2}) for name in ("ddp", "fsdp")),
    *(Row("fsdp+context+expert", 4, {"cp": 2, "ep": ep}) for ep in (2, 4)),
    _pipeline("ddp+pipeline+expert", 4, "1f1b", 2, ep=2),
    _pipeline("fsdp+pipeline+expert", 4, "zb_h2", 2, ep=2),
)
"""Of a mixture's experts: with each kind of data parallelism, and with tensor and context parallelism and pipelines."""

ALL_FIVE: tuple[Row, ...] = (
    *(_pipeline(f"{name}+tensor+pipeline+expert", 8, "1f1b", 2, tp=2, ep=2) for name in ("ddp", "fsdp")),
    _pipeline("fsdp+pipeline+context+expert", 8, "1f1b", 2, cp=2, ep=4),
    _pipeline("fsdp+tensor+pipeline+context+expert", 16, "1f1b", 2, tp=2, cp=2, ep=2),
)
"""Of a mixture: four dimensions at once, and all of them."""

DEEPSPEED = Row("deepspeed", 2, tolerance=2e-5)
"""The optional extra, where it is installed; its engine adds up in buckets of its own."""
