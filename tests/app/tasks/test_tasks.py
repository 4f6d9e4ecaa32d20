"""The built-in tasks: their data, losses, metrics and models, on real and on tiny data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.data.loader import fetch, train_batches
from app.evaluation import evaluate
from app.job import Heartbeat
from app.tasks import Task, load_task
from strategies.parallelize import choose, parallelize

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("own_cache")
SIXTEEN = {"d_model": 16, "n_layers": 2, "n_heads": 2, "sequence_length": 16}


def arguments(name: str, text: str, table: str) -> tuple[str, dict[str, Any]]:
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        "vision": ("image_classification", {"data": "digits", "model_args": {"widths": [4, 8]}}),
        "resnet": (
            "image_classification",
            {"data": "digits", "model": "resnet", "model_args": {"width": 8, "norm": "group"}},
        ),
        "image mlp": ("image_classification", {"data": "digits", "model": "mlp", "augment_shift": 1}),
        "language": ("language_modelling", {"data": text, **SIXTEEN}),
        "regression": ("tabular", {"data": table, "target": "y"}),
        "classification": ("tabular", {"data": table, "target": "class", "ignore": ["y"]}),
    }
    return rows[name]


NAMES = ["vision", "resnet", "image mlp", "language", "regression", "classification"]


@pytest.fixture(params=NAMES)
def task(request: pytest.FixtureRequest, text: str, table: str) -> Task:
    return load_task(*arguments(request.param, text, table))


def one_batch(task: Task, count: int) -> Any:
    return fetch(task.train_data(), [(i, i) for i in range(count)])


def built(task: Task, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return task.build_model()


def gradients(task: Task, model: nn.Module, batches: list[Any]) -> list[Tensor]:
    """Of the mean over the items of all batches, each batch's mean weighed as the training loop does."""
    model.zero_grad()
    total = sum(int(task.items(batch)) for batch in batches)
    for batch in batches:
        (task.loss(model, batch) * task.items(batch) / total).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_micro_batches_5_by_2_have_the_exact_gradient_of_the_whole_batch(task: Task) -> None:
    model = built(task).double()

    def load(micro: int | None) -> list[Any]:
        steps = train_batches(
            task.train_data(), seed=1, global_batch_size=5, micro_batch_size=micro, dp_rank=0, dp_size=1,
            samples_seen=0, steps=1, device=CPU,
        )  # fmt: skip
        return [[t.double() if t.is_floating_point() else t for t in batch] for batch in next(steps)]

    model.eval()  # BatchNorm and dropout are the only layers that see more than a row
    whole, parts = load(None), load(2)
    assert len(whole) == 1 and [int(task.items(batch)) for batch in parts][-1] < int(task.items(parts[0]))
    expected, found = gradients(task, model, whole), gradients(task, model, parts)
    # The tasks' losses are computed in float32, as under mixed precision.
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7 * expected[0].abs().max().clamp(min=1).item())


def test_the_whole_interface(task: Task) -> None:
    model = built(task)
    batch = one_batch(task, 6)
    loss = task.loss(model, batch)
    assert loss.shape == () and loss.isfinite()
    loss.backward()
    figures = task.metrics(model.eval(), batch)
    assert all(figure.shape == () and figure.isfinite() for figure in figures.values())
    assert torch.allclose(figures["loss"], task.loss(model, batch))
    means = {name: figure.item() for name, figure in figures.items()}
    assert all(math.isfinite(value) for value in task.derived(means).values())
    names = dict(model.named_modules())
    blocks = task.blocks(model)
    assert blocks and all(name in names for name in blocks)
    assert model(*task.example_input()).shape[0] == 1
    held_out = task.eval_data()
    assert held_out is not None and len(held_out) > 0  # type: ignore[arg-type]
    for one, many in zip(task.train_data()[3], batch, strict=True):
        assert one.shape == many.shape[1:] and one.dtype == many.dtype
        assert getattr(task.train_data(), "shift", 0) or torch.equal(one, many[3]), "a sample is a row of a batch"


def train(task: Task, steps: int, lr: float, batch: int = 32) -> dict[str, float]:
    model = built(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    batches = train_batches(
        task.train_data(), seed=0, global_batch_size=batch, micro_batch_size=None, dp_rank=0, dp_size=1,
        samples_seen=0, steps=steps, device=CPU,
    )  # fmt: skip
    for (micro,) in batches:
        optimizer.zero_grad()
        task.loss(model, micro).backward()
        optimizer.step()
    return evaluated(task, model)


def evaluated(task: Task, model: nn.Module) -> dict[str, float]:
    held_out = task.eval_data()
    assert held_out is not None
    parallel = parallelize(lambda: model, choose("single", 1), device=CPU)
    return evaluate(task, parallel, held_out, 7, 0, CPU, Heartbeat())


@pytest.mark.parametrize(
    ("name", "steps", "lr", "figure", "at_least"),
    [
        ("vision", 250, 5e-3, "accuracy", 0.92),
        ("regression", 300, 3e-3, "r2", 0.9),
        ("classification", 200, 3e-3, "accuracy", 0.85),
    ],
)
def test_tasks_learn(name: str, steps: int, lr: float, figure: str, at_least: float, text: str, table: str) -> None:
    assert train(load_task(*arguments(name, text, table)), steps, lr)[figure] > at_least


def test_language_is_learnt(text: str) -> None:
    figures = train(load_task("language_modelling", {"data": text, **SIXTEEN}), steps=120, lr=1e-2)
    assert figures["loss"] < 0.6  # chance: ln 256 = 5.5; from the last byte alone, so without attention: 0.86
    assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / math.log(2))
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))


def test_a_user_may_leave_everything_but_three_methods_out() -> None:
    class Least(Task):
        def build_model(self) -> nn.Module:
            return nn.Linear(3, 1)

        def train_data(self) -> Any:
            return [(torch.ones(3), torch.ones(1))] * 4

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return nn.functional.mse_loss(model(batch[0]), batch[1])

    task = Least()
    model = built(task)
    batch = one_batch(task, 4)
    assert task.items(batch) == 4 and task.unit == "samples" and not task.items_vary
    assert set(task.metrics(model, batch)) == {"loss"} and task.derived({"loss": 1.0}) == {}
    assert task.eval_data() is None and task.blocks(model) is None and task.tensor_plan(model) is None
    assert task.heads() is None
    assert [x.shape for x in task.example_input()] == [(1, 3)]
