"""A task may use its model as on one device: methods and parts of it, several calls, scalars, masks of float32."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.layout import choose
from strategies.parallelize import Options, parallelize
from tests.pool import run_distributed


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


def curve(rank: int, name: str, ways: int, loss: Any, precision: str = "fp32", micro_batches: int = 2) -> list[float]:
    pp = 2 if "pipeline" in name else 1
    layout = choose(name, ways * pp, dp_shard=2 if name == "hsdp" else None, pp=pp)

    def build() -> nn.Module:
        torch.manual_seed(1)
        return Two()

    torch.manual_seed(0)
    tokens, targets = torch.randint(0, 12, (16, 5)), torch.randint(0, 4, (16,))
    options, example = Options(precision=precision), (loss, (tokens, targets))
    parallel = parallelize(build, layout, options, device=torch.device("cpu"), example=example)
    groups = ([p for p in parallel.parameters() if p.dim()], [p for p in parallel.parameters() if not p.dim()])
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.02)
    share, rank = 16 // ways, rank % ways
    found = []
    for _ in range(4):
        batches = [
            (tokens[at : at + share // micro_batches], targets[at : at + share // micro_batches])
            for at in range(rank * share, (rank + 1) * share, share // micro_batches)
        ]
        value = parallel.forward_backward(batches, [1 / (ways * micro_batches)] * micro_batches, loss)
        norm = parallel.grad_norm_(None)
        optimizer.step()
        optimizer.zero_grad()
        found += [parallel.total(value).item(), norm.item()]
    evaluated = parallel.forward(lambda model, batch: {"loss": loss(model, batch)}, (tokens, targets))
    after = evaluated["loss"].item() if evaluated is not None else math.nan  # a stage that is not the last
    return [*found, parallel.full_model_state().get("scale", torch.zeros(())).item(), after]


@pytest.mark.parametrize("loss", [by_forward, by_method, twice])
@pytest.mark.parametrize(("name", "ways"), [("ddp", 2), ("fsdp", 2), ("zero2", 2), ("hsdp", 4)])
def test_the_model_is_used_as_on_one_device(name: str, ways: int, loss: Any) -> None:
    expected = curve(0, "single", 1, loss)
    assert expected[-2] != 0.5, "the scalar has learnt"
    assert run_distributed(curve, ways, name, ways, loss)[0] == pytest.approx(expected, rel=2e-5)


def test_a_scalar_in_a_pipelines_sharded_stages() -> None:
    found = run_distributed(curve, 4, "fsdp+pipeline", 2, by_forward)
    told = [*found[2][:-2], found[0][-2], found[2][-1]]
    assert told == pytest.approx(curve(0, "single", 1, by_forward), rel=2e-5)


@pytest.mark.parametrize("loss", [by_forward, by_method])
def test_a_float32_mask_is_cast_where_16_bits_are_wanted(loss: Any) -> None:
    expected = curve(0, "single", 1, loss, "bf16")
    for name in ("ddp", "fsdp"):
        assert run_distributed(curve, 2, name, 2, loss, "bf16")[0] == pytest.approx(expected, rel=0.05)


def figures(model: Any, batch: Any) -> dict[str, Tensor]:
    right = (model(batch[0]).argmax(-1) == batch[1]).float().mean()
    return {"loss": by_forward(model, batch), "right": right}


def evaluated(rank: int, name: str) -> dict[str, float] | None:
    torch.manual_seed(0)
    batch = torch.randint(0, 12, (16, 5)), torch.randint(0, 4, (16,))

    def build() -> nn.Module:
        torch.manual_seed(1)
        return Two()

    layout = choose(name, 2 if name == "pipeline" else 1)
    parallel = parallelize(build, layout, device=torch.device("cpu"), example=(by_forward, batch))
    parallel.module.eval()
    found = [parallel.forward(figures, some) for some in (batch, (batch[0][:8], batch[1][:8]))]
    return None if found[0] is None else {k: round(v.item(), 6) for each in found for k, v in (each or {}).items()}


def test_metrics_may_call_the_model_again_in_a_pipeline() -> None:
    assert run_distributed(evaluated, 2, "pipeline")[-1] == evaluated(0, "single")
