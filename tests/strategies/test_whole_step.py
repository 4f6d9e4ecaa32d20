"""A task may use its model as on one device: methods and parts of it, several calls, scalars, masks of float32."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.parity import curves
from experiments.parity.curves import Curve, Trial
from experiments.parity.rows import SINGLE, Row
from strategies.parallelize import Options
from tests.pool import run_distributed
from tests.strategies.models import seeded

CPU = torch.device("cpu")


class Two(nn.Module):
    """Two towers with a temperature, as CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(3)})
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * (tokens > 3).float()[..., None]  # float32, whatever the embedding is
        for block in self.blocks.values():
            x = x + torch.tanh(block(x))
        return self.norm(x).mean(1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens)) * self.scale.exp()


def by_forward(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def by_method(model: Any, batch: Any) -> Tensor:
    x = model.encode(batch[0])
    return F.cross_entropy((model.head(x) * model.scale.exp()).float(), batch[1])


def twice(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - model(batch[0].flip(1)).detach()).square().mean() + by_forward(model, batch)


def figures(model: Any, batch: Any) -> dict[str, Tensor]:
    right = (model(batch[0]).argmax(-1) == batch[1]).float().mean()
    return {"loss": by_forward(model, batch), "right": right}


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 12, (16, 5), generator=generator), torch.randint(0, 4, (16,), generator=generator)


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The scalar is in a group of its own."""
    own = list(parameters)
    return torch.optim.AdamW([{"params": [p for p in own if bool(p.dim()) == some]} for some in (True, False)], lr=0.02)


def _trial(loss: Any) -> Trial:
    return Trial(seeded(Two), loss, _batch, steps=2, micro_batches=2, optimizer=_optimizer)


def _train(_: int, row: Row, losses: list[Any], precision: str = "fp32") -> list[Curve]:
    return [curves.train(_trial(loss), row.layout, Options(precision=precision), CPU) for loss in losses]


ROWS = [Row(name, 2) for name in ("ddp", "fsdp", "zero2")]
WIDE = [Row("hsdp", 4, {"dp_shard": 2}), Row("fsdp+pipeline", 4, {"pp": 2})]


@pytest.mark.parametrize("row", [*ROWS, *WIDE], ids=str)
def test_the_model_is_used_as_on_one_device(row: Row) -> None:
    losses = [by_forward, by_method, twice] if row in ROWS else [by_forward]
    found = run_distributed(_train, row.workers, row, losses)[0]
    for curve, truth in zip(found, _train(0, SINGLE, losses), strict=True):
        assert truth.weights["scale"] != 0.5, "the scalar has learnt"
        assert curves.difference(truth, curve).within(1e-5), curves.difference(truth, curve)


def test_a_float32_mask_is_cast_where_16_bits_are_wanted() -> None:
    asked = ([by_forward, by_method], "bf16")
    for row in ROWS[:2]:
        for curve, truth in zip(run_distributed(_train, 2, row, *asked)[0], _train(0, SINGLE, *asked), strict=True):
            assert curves.difference(truth, curve).loss < 0.05


def _evaluated(_: int, row: Row) -> list[dict[str, Tensor] | None]:
    parallel = curves.begin(_trial(by_forward), row.layout, Options(), CPU)
    parallel.module.eval()
    return [parallel.forward(figures, (tokens[:n], targets[:n])) for n in (16, 8) for tokens, targets in (_batch(0),)]


def test_metrics_may_call_the_model_again_in_a_pipeline() -> None:
    *_, last = run_distributed(_evaluated, 2, Row("pipeline", 2))
    torch.testing.assert_close(last, _evaluated(0, SINGLE))
