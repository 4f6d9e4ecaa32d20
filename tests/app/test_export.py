"""`trireme export`: what others load is what was trained, and a wrong word gets one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from app.cli import group
from app.config_io import from_dict, to_yaml
from app.export import export_run
from app.randomness import seed_everything
from app.tasks import load_task
from tests.app.checkpoint.kit import save
from tests.app.tasks.test_tasks_huggingface import GPT2, SMALL
from tests.running import flip, same_bits, trireme, weights

POINTS = ("tests.tasks:Plain", {"width": 8})


pytestmark = pytest.mark.usefixtures("own_cache")


def a_run(folder: Path, task: str, task_args: dict[str, Any], steps: tuple[int, ...] = (1,)) -> list[Any]:
    """A run's folder as training leaves it, with a checkpoint of each of these steps; the models in them."""
    folder.mkdir()
    config = {"task": task, "task_args": task_args, "train": {"steps": steps[-1]}, "run": {"name": folder.name}}
    (folder / "config.yaml").write_text(to_yaml(from_dict(config)))
    (folder / "run.json").write_text("{}")
    made = []
    for step in steps:
        seed_everything(step)
        made.append(load_task(task, task_args).build_model().eval())
        save(folder / "checkpoints", step, state={"model": made[-1].state_dict()}, keep_last=len(steps))
    return made


def exported(*arguments: str | Path) -> Result:
    return CliRunner().invoke(group, ["export", *map(str, arguments)])


def refused(*arguments: str | Path) -> str:
    """The sentence that the command ends with."""
    result = exported(*arguments)
    assert result.exit_code == 2, result.output
    sentence = result.stderr.strip()
    assert sentence.startswith("trireme: ") and "\n" not in sentence and "Traceback" not in sentence
    return sentence


def test_trained_llama_loads_in_transformers(tmp_path: Path, text: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    changes = ["num_hidden_layers=2", "hidden_size=16", "intermediate_size=32"]
    ended = trireme(
        "train",
        "experiments/llama.yaml",
        *[f"task_args.config.{change}" for change in changes],
        *[f"task_args.data={text}", "task_args.sequence_length=16", "task_args.eval_samples=4"],
        *["launcher=local", "strategy=single", "train.steps=3", "train.global_batch_size=4"],
        *[f"run.storage={tmp_path}", "tracking.enabled=false"],
    )
    assert ended.code == 0, ended.err
    result = exported(tmp_path / "llama", "--to", "huggingface", "--json")
    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout)
    assert done["status"] == "complete" and done["step"] == 3
    folder = Path(done["folder"])
    assert folder == tmp_path / "llama" / "export" / "huggingface-step-00000003"
    assert done["files"] == sorted(path.name for path in folder.iterdir())
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    trained = weights(tmp_path / "llama")
    assert all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.num_hidden_layers == 2
    tokens = AutoTokenizer.from_pretrained(folder)("a pénny", return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [list("a pénny".encode())]
    assert model.generate(tokens, max_new_tokens=2, do_sample=False).shape[1] == tokens.shape[1] + 2


def test_tied_weights_are_written_once(tmp_path: Path, text: str) -> None:
    from transformers import AutoModelForCausalLM

    args = {"model": "gpt2", "config": GPT2, "data": text, "sequence_length": 8}
    (trained,) = a_run(tmp_path / "gpt2", "huggingface", args)
    done = export_run(str(tmp_path / "gpt2"), to="huggingface")
    assert set(load_file(done.folder / "model.safetensors")) == set(trained.state_dict()) - {"lm_head.weight"}
    model = AutoModelForCausalLM.from_pretrained(done.folder)
    assert model.lm_head.weight is model.transformer.wte.weight
    tokens = torch.arange(8)[None]
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
    assert "did you mean 'huggingface'" in refused(run, "--to", "hugging_face")
    assert "it can be safetensors, huggingface, peft, torch" in refused(run, "--to", "onnx")
    assert "--to is not given; it can be" in refused(run)
    assert "is not a run's folder" in refused(tmp_path / "nowhere", *to)
    assert "whose model transformers does not have" in refused(run, "--to", "huggingface")
    assert "no checkpoint of step 7" in refused(run, *to, "--step", "7")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "holds something already" in refused(run, *to, "--out", tmp_path / "full")
    assert "cannot be written" in refused(run, *to, "--out", "/proc/nowhere/out")
    for path in sorted((run / "checkpoints").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert "there is no good checkpoint" in refused(run, *to)
    assert not (run / "export").exists() and not list(tmp_path.glob(".*.tmp"))
