"""`trireme export`: what others load is what was trained, and a wrong word gets one sentence."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from app.cli import group
from tests.app.kit import a_run
from tests.app.tasks.test_tasks_huggingface import GPT2, SMALL
from tests.running import flip, same_bits

POINTS = ("tests.tasks:Plain", {"width": 8})


pytestmark = pytest.mark.usefixtures("own_cache")


def exported(*arguments: str | Path) -> Result:
    return CliRunner().invoke(group, ["export", *map(str, arguments)])


def refused(*arguments: str | Path) -> str:
    """The sentence that the command ends with."""
    result = exported(*arguments)
    assert result.exit_code == 2, result.output
    sentence = result.stderr.strip()
    assert sentence.startswith("trireme: ") and "\n" not in sentence and "Traceback" not in sentence
    return sentence


def test_transformers_load_the_model_with_its_tied_weights_once_and_its_tokenizer(tmp_path: Path, text: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    args = {"model": "gpt2", "config": GPT2, "data": text, "sequence_length": 8}
    (trained,) = a_run(tmp_path / "gpt2", "huggingface", args, steps=(3,))
    result = exported(tmp_path / "gpt2", "--to", "huggingface", "--json")
    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout)
    assert done["status"] == "complete" and done["step"] == 3
    folder = Path(done["folder"])
    assert folder == tmp_path / "gpt2" / "export" / "huggingface-step-00000003"
    assert done["files"] == sorted(path.name for path in folder.iterdir())
    assert set(load_file(folder / "model.safetensors")) == set(trained.state_dict()) - {"lm_head.weight"}
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()) and model.lm_head.weight is model.transformer.wte.weight, report
    assert same_bits(model.state_dict(), trained.state_dict())
    tokens = AutoTokenizer.from_pretrained(folder)("a pénny", return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [list("a pénny".encode())]
    assert torch.equal(model(tokens).logits, trained(tokens).logits)


def test_classifier_keeps_its_classes_and_its_padding(tmp_path: Path) -> None:
    """The number of classes comes from the data; another number would make another model."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    table = tmp_path / "reviews.csv"
    table.write_text("text,label\n" + "good day,yes\nbad day,no\n" * 10)
    args = {"model": "bert", "config": SMALL, "data": str(table)}
    (trained,) = a_run(tmp_path / "bert", "huggingface", args)
    assert exported(tmp_path / "bert", "--to", "huggingface", "--out", tmp_path / "out").exit_code == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "no", 1: "yes"}
    texts = AutoTokenizer.from_pretrained(tmp_path / "out")(["good", "a bad day"], padding=True, return_tensors="pt")
    assert texts["input_ids"][0].tolist() == [byte + 1 for byte in b"good"] + [0] * 5
    ids, mask = texts["input_ids"], texts["attention_mask"]
    assert mask[0].sum() == 4
    theirs, ours = (each(input_ids=ids, attention_mask=mask).logits for each in (model, trained))
    assert torch.allclose(theirs, ours, atol=1e-7)
    table.write_text("text,label\n" + "good,yes\nbad,no\nso so,perhaps\n" * 9)
    said = refused(tmp_path / "bert", "--to", "huggingface", "--out", tmp_path / "other")
    assert "classifier.weight is (2, 16) in the checkpoint and (3, 16) now" in said
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_any_task_its_newest_good_checkpoint_or_the_one_asked_for(to: str, tmp_path: Path) -> None:
    run = tmp_path / "points"
    first, second = a_run(run, *POINTS, steps=(1, 2))

    def assert_exported(said: str, model: torch.nn.Module, *arguments: str) -> None:
        out = tmp_path / f"out-{said[:6]}"
        result = exported(run, "--to", to, *arguments, "--out", out)
        assert result.exit_code == 0 and said in result.stdout, result.output
        (path,) = out.iterdir()
        got = load_file(path) if to == "safetensors" else torch.load(path, weights_only=True)
        assert same_bits(got, model.state_dict())

    assert_exported("step 2 of", second)
    assert_exported("step 1 of", first, "--step", "1")
    (file,) = run.glob("checkpoints/step-00000002*/__0_0.distcp")
    flip(file)
    assert "the checkpoint of step 2 is damaged" in refused(run, "--to", to, "--step", "2")
    assert_exported("is skipped", first)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, to = tmp_path / "runs" / "points", ("--to", "torch")
    run.parent.mkdir()
    a_run(run, *POINTS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for said, arguments in (
        ("did you mean 'huggingface'", (run, "--to", "hugging_face")),
        ("it can be safetensors, huggingface, peft, torch", (run, "--to", "onnx")),
        ("--to is not given; it can be", (run,)),
        ("is not a run's folder", (tmp_path / "nowhere", *to)),
        ("whose model transformers does not have", (run, "--to", "huggingface")),
        ("no checkpoint of step 7", (run, *to, "--step", "7")),
        ("holds something already", (run, *to, "--out", tmp_path / "full")),
        ("cannot be written", (run, *to, "--out", "/proc/nowhere/out")),
    ):
        assert said in refused(*arguments)
    shutil.rmtree(run / "checkpoints")
    assert "there is no good checkpoint" in refused(run, *to)
    assert not (run / "export").exists() and not list(tmp_path.glob(".*.tmp"))
