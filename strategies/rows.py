"""The parity matrix as data: what is tried at how many workers. A new strategy is a new row."""

from __future__ import annotations

from dataclasses import dataclass, field

from strategies.names import Layout, choose


@dataclass(frozen=True)
class Row:
    """A layout by its name and degrees; `tolerance` on the relative difference of the loss in float32."""

    name: str
    workers: int
    degrees: dict[str, int] = field(default_factory=dict)
    tolerance: float = 1e-5

    @property
    def layout(self) -> Layout:
        return choose(self.name, self.workers, **self.degrees)

    def __str__(self) -> str:
        return str(self.layout)


ROWS: tuple[Row, ...] = (
    Row("dp", 1),
    Row("model_parallel", 1),
    Row("ddp_model_parallel", 2),
    Row("ddp_model_parallel", 4),
    Row("ddp", 2),
    Row("ddp", 4),
    Row("zero1", 2),
    Row("zero1", 4),
    Row("zero2", 2),
    Row("zero2", 4),
    Row("zero3", 2),
    Row("fsdp", 2),
    Row("fsdp", 4),
    Row("hsdp", 4, {"dp_shard": 2}),
    Row("zero1", 4, {"dp_replicate": 2}),
    Row("zero2", 4, {"dp_replicate": 2}),
    Row("tensor", 2),
    Row("tensor", 4),
    Row("ddp+tensor", 4, {"tp": 2}),
    Row("zero1+tensor", 4, {"tp": 2}),
    Row("zero2+tensor", 4, {"tp": 2}),
    Row("fsdp+tensor", 4, {"tp": 2}),
)
"""Every name and every pair, at 2 and 4 workers."""
