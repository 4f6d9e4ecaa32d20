"""Predictions from rows, images and texts as users have them, equal to those in training."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import tokenizers
import torch
from mlflow.models import validate_schema
from torch import Tensor, nn

from app.data.loader import fetch
from app.models.prediction import Predictor, extend_package_paths, watched_arguments
from app.tasks import load_task
from app.tracking.model import _signature


def predictor_of(name: str, **task_args: Any) -> tuple[Any, Predictor]:
    """A task and a predictor with its untrained model."""
    task = load_task(name, task_args)
    torch.manual_seed(0)
    return task, Predictor(task.build_model().eval(), task.preprocessor())


@pytest.mark.parametrize("target", ["y", "kind"])
def test_rows_of_a_table_are_predicted_as_in_training(tmp_path: Path, target: str) -> None:
    """Numbers, dates, categories and gaps, as pandas reads the same file."""
    rows = [
        f"{i / 3 if i % 5 else ''},2026-01-{i % 9 + 1:02},{'abc'[i % 3]},{i % 7}" for i in range(60)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["x,day,kind,y", *rows]))
    task, predictor = predictor_of("tabular", data=str(tmp_path / "t.csv"), target=target)
    inputs = fetch(task.train_data(), [(i, i) for i in range(40)])[0]
    table = pandas.read_csv(tmp_path / "t.csv")
    all_rows = predictor(table)
    trained = predictor.model(inputs)
    for row in trained:
        assert (all_rows - row).abs().amax(1).min() < 1e-5, "each training row is in the table"
    predictions = predictor.predict(table)
    assert next(iter(predictions)) == target and len(predictions) == 60
    if target == "y":
        assert np.allclose(predictions["y"], all_rows[:, 0].detach() * task.std + task.mean)
    else:
        assert set(predictions["kind"]) <= {"a", "b", "c"}
    with pytest.raises(ValueError, match="no column 'x'"):
        predictor(table.drop(columns="x"))
    schema = _signature(predictor.preprocessor.example, predictions).inputs
    # As pandas reads columns of whole numbers, of fractions, and with missing values.
    for numbers in ([1, 2], [1.5, 2.0], [1.0, np.nan]):
        two_rows = table.head(2).assign(x=numbers, y=numbers)
        validate_schema(two_rows.astype({"day": str}), schema)
        assert len(predictor.predict(two_rows)) == 2


def test_images_are_predicted_as_in_training() -> None:
    task, predictor = predictor_of("image_classification", data="digits")
    raw = task.train_data().images[:4]
    (standardised, labels) = fetch(task.train_data(), [(i, i) for i in range(4)])
    expected = predictor.model(standardised)
    for images in (raw.numpy(), raw[:, 0], raw.permute(0, 2, 3, 1)):
        assert torch.allclose(predictor(images), expected, atol=1e-5)
    assert predictor.predict(raw)["class"].tolist() == expected.argmax(1).tolist()
    assert labels.shape == (4,)
    with pytest.raises(ValueError, match="takes images of shape"):
        predictor(raw[0, 0])


@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_texts_are_continued(tmp_path: Path, own_tokenizer: bool) -> None:
    data = tmp_path / "t.txt"
    file = tmp_path / "tokenizer.json"
    data.write_text("to be or not to be " * 200)
    task_args: dict[str, Any] = {"sequence_length": 16, "d_model": 8, "n_layers": 1, "n_heads": 1}
    if own_tokenizer:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
        tokenizer.train([str(data)], tokenizers.trainers.BpeTrainer(vocab_size=60))
        tokenizer.save(str(file))
        task_args["tokenizer"] = str(file)
    _, predictor = predictor_of("language_modelling", data=str(data), **task_args)
    continued = predictor.predict(["to be", "or"])
    assert [text[:2] for text in continued["text"]] == ["to", "or"]
    assert all(len(text) > 5 for text in continued["text"])
    assert continued.equals(predictor.predict(pandas.DataFrame({"any": ["to be", "or"]})))
    schema = _signature(predictor.preprocessor.example, continued).inputs
    for texts in ("to be", ["to be", "or"], pandas.DataFrame({"text": ["to be"]})):
        validate_schema(texts, schema)


class Several(nn.Module):
    """A model with several arguments, one of them a mapping."""

    def forward(
        self, x: Tensor, y: Tensor, *, scale: float, tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        return {"sum": x + y * scale + tensors["z"]}


def test_arguments_of_a_model_are_found_by_watching_a_call() -> None:
    ones = torch.ones(2, 3)
    batch = {"x": ones, "y": 2 * ones, "z": ones}
    model = Several()

    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch["x"], y=batch["y"], scale=2.0, tensors={"z": batch["z"]})["sum"]

    preprocessor = watched_arguments(model, loss, batch)
    assert list(preprocessor.example) == ["x", "y", "tensors.z"]
    outputs = Predictor(model, preprocessor).predict(
        {**preprocessor.example, "x": np.zeros((2, 3))}
    )
    assert outputs["sum"].tolist() == [[5.0] * 3] * 2
    with pytest.raises(ValueError, match="but y is not given"):
        Predictor(model, preprocessor).predict({"x": ones, "tensors.z": ones})
    of_identity = watched_arguments(nn.Identity(), lambda m, b: m(b)["x"].sum(), batch)
    assert list(of_identity.example) == ["x", "y", "z"]
    with pytest.raises(ValueError, match="does not call its model"):
        watched_arguments(model, lambda _, batch: batch["x"].sum(), batch)


def test_two_models_in_one_process_import_their_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, module in (("first", "__init__"), ("second", "__init__"), ("second", "only_here")):
        (tmp_path / code / "half_a_package").mkdir(parents=True, exist_ok=True)
        (tmp_path / code / "half_a_package" / f"{module}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    importlib.import_module("half_a_package")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("half_a_package.only_here")
    extend_package_paths(tmp_path / "second")
    importlib.import_module("half_a_package.only_here")
