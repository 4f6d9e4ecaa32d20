"""Uses of a trained run: `trireme export` for other libraries, and `trireme generate`."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from app.errors import UserError
from app.models.prediction import call_model, logits_of
from app.results.generate import (
    Sampling,
    _EncoderDecoderNextToken,
    _NextToken,
    continuation,
    text_input,
)
from app.tasks import load_task
from app.tasks.huggingface.inputs import PairsInput
from app.tasks.language import TextInput
from tests.app.kit import a_run
from tests.app.tasks.test_tasks_huggingface import BART, GPT2, GROUPED, SMALL, T5
from tests.running import flip, invoke, same_bits, weights

POINTS = ("tests.tasks:Plain", {"width": 8})
LOGITS = torch.log(torch.tensor([0.1, 0.6, 0.3]))
OURS: dict[str, Any] = {"d_model": 16, "n_layers": 2, "n_heads": 2}


pytestmark = pytest.mark.usefixtures("own_cache")


def refused(*arguments: str | Path) -> str:
    """The sentence that the command ends with."""
    sentence = invoke(*arguments, code=2).stderr.strip()
    assert sentence.startswith("trireme: ") and "\n" not in sentence and "Traceback" not in sentence
    return sentence


@pytest.mark.slow
def test_transformers_loads_an_exported_model_and_its_tokenizer(tmp_path: Path, text: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    args = {"model": "gpt2", "config": GPT2, "data": text, "sequence_length": 8}
    (trained,) = a_run(tmp_path / "gpt2", "huggingface", args, steps=(3,))
    done = json.loads(invoke("export", tmp_path / "gpt2", "--to", "huggingface", "--json").stdout)
    assert done["status"] == "complete" and done["step"] == 3
    folder = Path(done["folder"])
    assert folder == tmp_path / "gpt2" / "export" / "huggingface-step-00000003"
    assert done["files"] == sorted(path.name for path in folder.iterdir())
    assert set(load_file(folder / "model.safetensors")) == set(trained.state_dict()) - {
        "lm_head.weight"
    }
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()) and model.lm_head.weight is model.transformer.wte.weight, report
    assert same_bits(model.state_dict(), trained.state_dict())
    tokens = AutoTokenizer.from_pretrained(folder)("a pénny", return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [list("a pénny".encode())]
    assert torch.equal(model(tokens).logits, trained(tokens).logits)


def test_an_exported_classifier_keeps_its_classes_and_its_padding(tmp_path: Path) -> None:
    """The number of classes comes from the data; another number would make another model."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    table = tmp_path / "reviews.csv"
    out = tmp_path / "out"
    table.write_text("text,label\n" + "good day,yes\nbad day,no\n" * 10)
    (trained,) = a_run(
        tmp_path / "bert", "huggingface", {"model": "bert", "config": SMALL, "data": str(table)}
    )
    export = ("export", tmp_path / "bert", "--to", "huggingface", "--out")
    invoke(*export, out)
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.id2label == {0: "no", 1: "yes"}
    texts = AutoTokenizer.from_pretrained(out)(
        ["good", "a bad day"], padding=True, return_tensors="pt"
    )
    assert texts["input_ids"][0].tolist() == [byte + 1 for byte in b"good"] + [0] * 5
    ids = texts["input_ids"]
    mask = texts["attention_mask"]
    assert mask[0].sum() == 4
    exported_logits = model(input_ids=ids, attention_mask=mask).logits
    trained_logits = trained(input_ids=ids, attention_mask=mask).logits
    assert torch.allclose(exported_logits, trained_logits, atol=1e-7)
    table.write_text("text,label\n" + "good,yes\nbad,no\nso so,perhaps\n" * 9)
    message = refused(*export, tmp_path / "other")
    assert "classifier.weight is (2, 16) in the checkpoint and (3, 16) now" in message
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob(".*.tmp"))


def test_an_export_takes_the_newest_usable_or_the_given_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "points"
    first, second = a_run(run, *POINTS, steps=(1, 2))

    def assert_exported(message: str, model: nn.Module, to: str, *more: str) -> None:
        before = os.umask(0o027)
        assert (
            message in invoke("export", run, "--to", to, *more, "--out", tmp_path / message).stdout
        )
        os.umask(before)
        (path,) = (tmp_path / message).iterdir()
        assert path.stat().st_mode & 0o777 == 0o640, "the umask's, as the folder has it"
        got = load_file(path) if to == "safetensors" else torch.load(path, weights_only=True)
        assert same_bits(got, model.state_dict())

    assert_exported("step 2 of", second, "torch")
    assert_exported("step 1 of", first, "safetensors", "--step", "1")
    (file,) = run.glob("checkpoints/step-00000002*/__0_0.distcp")
    flip(file)
    message = refused("export", run, "--to", "torch", "--step", "2")
    assert "the checkpoint of step 2 is damaged" in message
    assert_exported("is skipped", first, "safetensors")


def test_a_wrong_export_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "points"
    to_torch = ("--to", "torch")
    full = tmp_path / "full"
    a_run(run, *POINTS)
    full.mkdir()
    (full / "file").touch()
    for message, arguments in (
        ("did you mean 'huggingface'", (run, "--to", "hugging_face")),
        ("it can be safetensors, huggingface, peft, torch", (run, "--to", "onnx")),
        ("--to is ''; it can be", (run, "--to", "")),
        ("is not a run's folder", (tmp_path / "nowhere", *to_torch)),
        ("whose model transformers does not have", (run, "--to", "huggingface")),
        ("no checkpoint of step 7", (run, *to_torch, "--step", "7")),
        ("is not empty", (run, *to_torch, "--out", full)),
        ("cannot be written", (run, *to_torch, "--out", "/proc/nowhere/out")),
    ):
        assert message in refused("export", *arguments)
    shutil.rmtree(run / "checkpoints")
    assert "there is no good checkpoint" in refused("export", run, *to_torch)
    assert not (run / "export").exists() and not list(tmp_path.glob(".*.tmp"))


def test_tokens_are_drawn_by_temperature_top_k_and_top_p() -> None:
    def drawn(**options: Any) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        return [Sampling(**options).draw(LOGITS, generator) for _ in range(1000)]

    unlimited = drawn(temperature=1.0)
    assert set(unlimited) == {0, 1, 2} and unlimited.count(1) / 1000 == pytest.approx(0.6, abs=0.04)
    assert set(drawn(temperature=0.0)) == set(drawn(top_k=1)) == set(drawn(top_p=0.5)) == {1}
    assert set(drawn(temperature=1.0, top_k=2)) == set(drawn(temperature=1.0, top_p=0.7)) == {1, 2}
    for mistake in ({"top_p": 0.0}, {"top_k": 0}, {"temperature": -1.0}, {"max_tokens": 0}):
        with pytest.raises(UserError, match="it must be"):
            Sampling(**mistake)  # type: ignore[arg-type]


class Parrot(nn.Module):
    """A model that predicts the bytes of a text one after another, whatever it reads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.remaining = list(text.encode())
        self.longest = 0

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        self.longest = max(self.longest, tokens_BT.shape[1])
        return nn.functional.one_hot(torch.tensor([[self.remaining.pop(0)]]), 256).float()


def test_letters_of_several_bytes_are_not_split_and_the_context_is_limited() -> None:
    text = "für 1 € 🚀!"
    model = Parrot(text)
    sampling = Sampling(max_tokens=len(text.encode()), temperature=0.0)
    generator = torch.Generator()
    task_input = TextInput(tokenizer=None, longest=6)
    options: Any = {"sampling": sampling, "generator": generator}
    pieces = list(continuation(model, task_input, "abc", **options))
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert model.longest == 6


@pytest.mark.parametrize(
    ("task", "args"),
    [
        ("language_modelling", OURS),
        ("language_modelling", OURS | {"mixture": {"n_experts": 2, "top_k": 1}}),
        ("huggingface", {"model": "llama", "config": GROUPED}),
        ("huggingface", {"model": "gpt2", "config": GPT2}),
    ],
)
def test_cached_keys_and_values_change_no_logits(
    task: str, args: dict[str, Any], text: str
) -> None:
    loaded_task = load_task(task, {"data": text, "sequence_length": 8, **args})
    network = loaded_task.build_model().eval()
    task_input = text_input(loaded_task)
    plain = copy.deepcopy(network)
    tokens = task_input.encode("a penny saved")  # longer than the model's context
    cached = _NextToken(network, task_input)
    for end in range(3, tokens.shape[1] + 1):
        expected = logits_of(call_model(plain, task_input(tokens[:, :end])))[0, -1]
        assert torch.allclose(cached.logits(tokens[:, :end]), expected, atol=1e-5)
        assert cached.seen == min(end, 8)
    logits = logits_of(call_model(network, task_input(tokens)))
    expected = logits_of(call_model(plain, task_input(tokens)))
    assert torch.equal(logits, expected), "afterwards nothing is cached"


@pytest.mark.parametrize(
    ("model", "config"), [("t5", T5), ("bart", BART | {"max_position_embeddings": 16})]
)
def test_a_model_with_an_encoder_generates_from_a_text(
    model: str, config: dict[str, Any], tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.csv"
    rows = [f"word {number},drow {number}\n" for number in range(40)]
    pairs.write_text("text,target\n" + "".join(rows))
    args = {
        "data": str(pairs),
        "tokenizer": "bytes",
        "sequence_length": 16,
        "model": model,
        "config": config,
    }
    task = load_task("huggingface", args)
    network = task.build_model().eval()
    task_input = text_input(task)
    assert isinstance(task_input, PairsInput)
    cached = _EncoderDecoderNextToken(network, task_input, "word 3")
    tokens = torch.tensor([[task_input.start, 5, 9, 60, 61]])
    for end in range(1, 6):
        decoder = {"decoder_input_ids": tokens[:, :end], "use_cache": False}
        plain = network(**task_input(["word 3"]) | decoder)
        assert torch.allclose(cached.logits(tokens[:, :end]), plain.logits[0, -1], atol=1e-5)
    sampling = Sampling(max_tokens=50, temperature=0.0)
    options: Any = {"sampling": sampling, "generator": torch.Generator()}
    output = "".join(continuation(network, task_input, "word 3", **options))
    assert output.startswith("\n") and "</s>" not in output


def test_a_language_model_continues_texts_and_other_runs_are_refused(
    tmp_path: Path, text: str
) -> None:
    common = [
        "launcher=local",
        "strategy=single",
        f"run.storage={tmp_path}",
        "tracking.enabled=false",
        "run.name=gpt",
    ]
    sizes = f"task_args={{data: {text}, sequence_length: 16, d_model: 32, n_layers: 1, n_heads: 2}}"
    train = ["train.steps=300", "train.global_batch_size=16", "optimizer.lr=0.02"]
    invoke("train", "task=language_modelling", sizes, *train, *common)
    run, out = tmp_path / "gpt", tmp_path / "out"
    log = (run / "logs" / "driver.log").read_text()
    assert all(words in log for words in ("step 300/300  loss", "trained   gpt: ", "held out")), (
        "what was said"
    )
    answer = invoke("generate", run, "saved is a penny ", "--max-tokens", "6", "--temperature", "0")
    assert answer.stdout == "saved is a penny earned\n", answer.output
    seeded = [invoke("generate", run, "a", "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert seeded[0] == seeded[1] != seeded[2]
    invoke("export", run, "--to", "torch", "--out", out)
    (file,) = out.iterdir()
    assert same_bits(torch.load(file, weights_only=True), weights(run))
    a_run(tmp_path / "points", *POINTS)
    assert "does not continue texts" in refused("generate", tmp_path / "points", "a")
