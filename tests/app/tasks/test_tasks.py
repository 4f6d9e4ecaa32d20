"""The built-in tasks: their data, losses, metrics and models, on real and on tiny data."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from app.data.loader import fetch
from app.models.prediction import Predictor, watched_arguments
from app.tasks import load_task
from app.tasks.items import weighs_items
from app.tasks.vision import shifted
from app.training.evaluation import evaluate
from app.training.job import Heartbeat
from strategies.parallelize import choose, parallelize
from tests.app.data.test_data_loader import batches_of
from tests.app.planner.test_read import Values

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("own_cache")
SIXTEEN = {"d_model": 16, "n_layers": 2, "n_heads": 2, "sequence_length": 16}
NAMES = ("vision", "resnet", "image mlp", "language", "regression", "classification")


def make_task(name: str, text: str, table: str) -> Any:
    """A small task of each kind, by its name in `NAMES`."""
    images = "image_classification"
    digits = {"data": "digits"}
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        "vision": (images, digits | {"model_args": {"widths": [4, 8]}}),
        "resnet": (
            images,
            digits | {"model": "resnet", "model_args": {"width": 8, "norm": "group"}},
        ),
        "image mlp": (images, digits | {"model": "mlp", "augment_shift": 1}),
        "language": ("language_modelling", {"data": text, **SIXTEEN}),
        "regression": ("tabular", {"data": table, "target": "y"}),
        "classification": ("tabular", {"data": table, "target": "class", "ignore": ["y"]}),
    }
    return load_task(*rows[name])


def one_batch(task: Any, count: int = 4) -> Any:
    """A batch of the first training samples."""
    return fetch(task.train_data(), [(i, i) for i in range(count)])


def built_model(task: Any) -> Any:
    """The task's model, initialized with seed 0."""
    torch.manual_seed(0)
    return task.build_model()


@pytest.mark.parametrize("name", NAMES)
def test_every_method_of_a_task_works(name: str, text: str, table: str) -> None:
    task = make_task(name, text, table)
    model = built_model(task)
    batch = one_batch(task, 6)
    loss = task.loss(model, batch)
    assert loss.shape == () and loss.isfinite()
    loss.backward()
    metrics = task.metrics(model.eval(), batch)
    assert all(figure.shape == () and figure.isfinite() for figure in metrics.values())
    assert torch.allclose(metrics["loss"], task.loss(model, batch))
    means = {name: figure.item() for name, figure in metrics.items()}
    assert all(math.isfinite(value) for value in task.derived(means).values())
    blocks = task.blocks(model)
    assert blocks and set(blocks) <= dict(model.named_modules()).keys()
    preprocessor = task.preprocessor()
    assert len(Predictor(model, preprocessor).predict(preprocessor.example)) == 1
    assert len(task.eval_data()) > 0
    for sample_part, batch_part in zip(task.train_data()[3], batch, strict=True):
        assert sample_part.shape == batch_part.shape[1:] and sample_part.dtype == batch_part.dtype
        if not getattr(task.train_data(), "shift", 0):
            assert torch.equal(sample_part, batch_part[3]), "a sample is a row of a batch"


def evaluated(task: Any, model: nn.Module) -> dict[str, float]:
    """The task's metrics over its held-out data, on one CPU."""
    parallel = parallelize(lambda: model, choose("single", 1), device=CPU)
    return evaluate(
        task,
        parallel,
        task.eval_data(),
        batch_size=7,
        data_rank=0,
        device=CPU,
        heartbeat=Heartbeat(),
    )


def test_tasks_learn(text: str, table: str) -> None:
    def trained(name: str, steps: int, lr: float) -> dict[str, float]:
        task = make_task(name, text, table)
        model = built_model(task)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for (micro_batch,) in batches_of(task.train_data(), batch=32, steps=steps):
            optimizer.zero_grad()
            task.loss(model, micro_batch).backward()
            optimizer.step()
        return evaluated(task, model)

    assert 0.92 < trained("vision", 250, 5e-3)["accuracy"] < 1
    assert 0.9 < trained("regression", 300, 3e-3)["r2"] < 1
    metrics = trained("language", 120, 1e-2)
    # By chance it would be ln 256, and 0.86 from the last byte alone, without attention.
    assert 0 < metrics["loss"] < 0.6
    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / math.log(2))
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))


def test_a_task_needs_only_three_methods() -> None:
    task = Values()
    model = built_model(task)
    batch = one_batch(task)
    assert task.items(batch) == 4 and task.unit == "samples" and not weighs_items(task)
    assert set(task.metrics(model, batch)) == {"loss"} and task.derived({"loss": 1.0}) == {}
    assert not any((task.eval_data(), task.blocks(model), task.tensor_plan(model), task.heads()))
    assert watched_arguments(model, task.loss, batch).example.shape == (4, 16)


def test_held_out_sizes(tmp_path: Path) -> None:
    def sizes(data: str, **task_args: Any) -> tuple[int, int]:
        task: Any = load_task("image_classification", {"data": data, **task_args})
        return len(task.train_data()), len(task.eval_data() or ())

    train = load_task("image_classification", {"data": "digits"}).train_data()
    images, _ = fetch(train, [(i, i) for i in range(1438)])
    assert images.mean().abs() < 1e-4 and (images.std() - 1).abs() < 1e-4
    assert sizes("digits") == (1438, 359)
    assert sizes("digits", eval_samples=97) == (1700, 97)
    assert sizes("digits", eval_samples=0) == (1797, 0)
    pixels = np.zeros((9, 8, 8), dtype=np.uint8)
    labels = np.arange(9) % 3
    file = str(tmp_path / "a.npz")
    np.savez(file, x_train=pixels, y_train=labels, x_test=pixels[:4], y_test=labels[:4])
    assert sizes(file) == (9, 4), "the file has held-out images"
    assert sizes(file, eval_samples=3) == (6, 3)


def test_shifts_move_images_and_are_a_function_of_the_position() -> None:
    images = torch.arange(1, 26).float().reshape(1, 1, 5, 5).repeat(200, 1, 1, 1)
    moved = shifted(images, 2, np.arange(200, dtype=np.uint64))
    assert torch.equal(moved, shifted(images, 2, np.arange(200, dtype=np.uint64)))
    centres = [(image[0] == 13).nonzero()[0].tolist() for image in moved]
    everywhere = {(row, column) for row in range(5) for column in range(5)}
    assert {tuple(centre) for centre in centres} == everywhere
    for image, (row, column) in zip(moved, centres, strict=True):
        padded = nn.functional.pad(images[0, 0], (2, 2, 2, 2))
        assert torch.equal(image[0], padded[4 - row : 9 - row, 4 - column : 9 - column])
    task = load_task("image_classification", {"data": "digits", "augment_shift": 2})
    data: Any = task.train_data()
    copies = data.images[3:4].expand(50, -1, -1, -1)
    plain = shifted(copies, 2, np.arange(50, dtype=np.uint64)).float()
    inputs, _ = data.batch_at([3] * 50, range(50))
    assert torch.equal(inputs, (plain - data.mean) / data.std)
    assert task.eval_data().shift == 0  # type: ignore[union-attr]


def test_language_data_is_held_out_at_the_end(text: str) -> None:
    task: Any = load_task("language_modelling", {"data": text, "eval_samples": 7, **SIXTEEN})
    train = task.train_data()
    held_out = task.eval_data()
    content = Path(text).read_bytes()
    total = (len(content) - 1) // 16
    assert (len(train), len(held_out)) == (total - 7, 7)
    assert bytes(held_out[0][0].tolist()) == content[16 * (total - 7) : 16 * (total - 6)]
    assert task.unit == "tokens" and task.items(one_batch(task, 3)) == 48
    assert task.heads() == 2 and task.tensor_plan(built_model(task))


def test_regression_figures_are_in_the_targets_units(table: str) -> None:
    task: Any = load_task("tabular", {"data": table, "target": "y"})
    inputs, targets = task.eval_data().tensors
    in_units = targets * task.std + task.mean
    model = nn.Linear(inputs.shape[1], 1)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, targets.mean().item())
    metrics = evaluated(task, model)
    assert metrics["r2"] == pytest.approx(0, abs=1e-5)
    assert metrics["mse"] == pytest.approx(in_units.var(unbiased=False).item(), rel=1e-5)
    assert metrics["rmse"] == pytest.approx(in_units.std(unbiased=False).item(), rel=1e-5)
    mean_error = (in_units - in_units.mean()).abs().mean().item()
    assert metrics["mae"] == pytest.approx(mean_error, rel=1e-5)


def test_table_columns_and_kinds(table: str) -> None:
    """`kind` is auto unless it is set; rows without a target are left out."""
    args: Any = {"data": table, "target": "code"}
    regression: Any = load_task("tabular", args | {"target": "y", "ignore": ["class", "code"]})
    assert len(regression.train_data()) + len(regression.eval_data()) == 199
    # The columns are `a` with its mark of missing values, and the kinds x and z.
    assert one_batch(regression, 1)[0].shape == (1, 2 + 2)
    kinds: Any = [
        load_task("tabular", args | options) for options in ({}, {"kind": "classification"})
    ]
    assert [task.classes for task in kinds] == [[], ["0", "1", "2"]]
