"""What a trained model is given by a person: from rows, images and texts as they are it answers as in training."""

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


def made(name: str, **arguments: Any) -> tuple[Any, Predictor]:
    task = load_task(name, arguments)
    torch.manual_seed(0)
    return task, Predictor(task.build_model().eval(), task.preprocessor())


@pytest.mark.parametrize("target", ["y", "kind"])
def test_rows_of_a_table(tmp_path: Path, target: str) -> None:
    """Numbers, dates, categories and gaps, as pandas reads the same file."""
    rows = [f"{i / 3 if i % 5 else ''},2026-01-{i % 9 + 1:02},{'abc'[i % 3]},{i % 7}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["x,day,kind,y", *rows]))
    task, predictor = made("tabular", data=str(tmp_path / "t.csv"), target=target)
    inputs = fetch(task.train_data(), [(i, i) for i in range(40)])[0]
    table = pandas.read_csv(tmp_path / "t.csv")
    all_rows = predictor(table)
    trained = predictor.model(inputs)
    assert all((all_rows - row).abs().amax(1).min() < 1e-5 for row in trained), "each training row is there"
    found = predictor.predict(table)
    assert next(iter(found)) == target and len(found) == 60
    if target == "y":
        assert np.allclose(found["y"], all_rows[:, 0].detach() * task.std + task.mean)
    else:
        assert set(found["kind"]) <= {"a", "b", "c"}
    with pytest.raises(ValueError, match="no column 'x'"):
        predictor(table.drop(columns="x"))
    asked = _signature(predictor.preprocessor.example, found).inputs
    for numbers in ([1, 2], [1.5, 2.0], [1.0, np.nan]):  # as pandas reads files of whole numbers, of others, with gaps
        given = table.head(2).assign(x=numbers, y=numbers)
        validate_schema(given.astype({"day": str}), asked)
        assert len(predictor.predict(given)) == 2


def test_images_as_they_are_in_the_data() -> None:
    task, predictor = made("image_classification", data="digits")
    raw = task.train_data().images[:4]
    (standardised, labels) = fetch(task.train_data(), [(i, i) for i in range(4)])
    expected = predictor.model(standardised)
    for given in (raw.numpy(), raw[:, 0], raw.permute(0, 2, 3, 1)):
        assert torch.allclose(predictor(given), expected, atol=1e-5)
    assert predictor.predict(raw)["class"].tolist() == expected.argmax(1).tolist() and labels.shape == (4,)
    with pytest.raises(ValueError, match="takes images of shape"):
        predictor(raw[0, 0])


@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_texts_are_continued(tmp_path: Path, own_tokenizer: bool) -> None:
    data, file = tmp_path / "t.txt", tmp_path / "tokenizer.json"
    data.write_text("to be or not to be " * 200)
    more: dict[str, Any] = {"sequence_length": 16, "d_model": 8, "n_layers": 1, "n_heads": 1}
    if own_tokenizer:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
        tokenizer.train([str(data)], tokenizers.trainers.BpeTrainer(vocab_size=60))
        tokenizer.save(str(file))
        more["tokenizer"] = str(file)
    _, predictor = made("language_modelling", data=str(data), **more)
    found = predictor.predict(["to be", "or"])
    assert [text[:2] for text in found["text"]] == ["to", "or"] and all(len(text) > 5 for text in found["text"])
    assert found.equals(predictor.predict(pandas.DataFrame({"any": ["to be", "or"]})))
    asked = _signature(predictor.preprocessor.example, found).inputs
    for given in ("to be", ["to be", "or"], pandas.DataFrame({"text": ["to be"]})):
        validate_schema(given, asked)


class Several(nn.Module):
    def forward(self, x: Tensor, y: Tensor, *, scale: float, more: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sum": x + y * scale + more["z"]}


def test_arguments_of_a_model_are_found_by_watching_a_call() -> None:
    ones = torch.ones(2, 3)
    batch = {"x": ones, "y": 2 * ones, "z": ones}
    model = Several()
    asked = watched_arguments(model, lambda m, b: m(b["x"], y=b["y"], scale=2.0, more={"z": b["z"]})["sum"], batch)
    assert list(asked.example) == ["x", "y", "more.z"]
    found = Predictor(model, asked).predict({**asked.example, "x": np.zeros((2, 3))})
    assert found["sum"].tolist() == [[5.0] * 3] * 2
    with pytest.raises(ValueError, match="but y is not given"):
        Predictor(model, asked).predict({"x": ones, "more.z": ones})
    whole = watched_arguments(nn.Identity(), lambda m, b: m(b)["x"].sum(), batch)
    assert list(whole.example) == ["x", "y", "z"]
    with pytest.raises(ValueError, match="does not call its model"):
        watched_arguments(model, lambda m, b: b["x"].sum(), batch)


def test_two_models_in_one_process_find_their_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, module in (("first", "__init__"), ("second", "__init__"), ("second", "only_here")):
        (tmp_path / code / "half_a_package").mkdir(parents=True, exist_ok=True)
        (tmp_path / code / "half_a_package" / f"{module}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    importlib.import_module("half_a_package")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("half_a_package.only_here")
    extend_package_paths(tmp_path / "second")
    importlib.import_module("half_a_package.only_here")
