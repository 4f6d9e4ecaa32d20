"""Text from trained language models."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from app.cli import group
from app.errors import UserError
from app.generate import Sampling, _PairsReader, _Reader, continuation, text_input
from app.prediction import called, logits_of
from app.tasks import load_task
from app.tasks.huggingface.inputs import PairsInput
from app.tasks.language import TextInput
from tests.app.kit import a_run
from tests.running import same_bits, weights

LOGITS = torch.log(torch.tensor([0.1, 0.6, 0.3]))


def drawn(sampling: Sampling, count: int = 100) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {sampling.draw(LOGITS, generator) for _ in range(count)}


def test_how_a_token_is_drawn() -> None:
    assert drawn(Sampling(temperature=1.0)) == {0, 1, 2}
    assert drawn(Sampling(temperature=0.0)) == drawn(Sampling(top_k=1)) == drawn(Sampling(top_p=0.5)) == {1}
    assert drawn(Sampling(temperature=1.0, top_k=2)) == drawn(Sampling(temperature=1.0, top_p=0.7)) == {1, 2}
    counts = [Sampling(temperature=1.0).draw(LOGITS, torch.Generator().manual_seed(s)) for s in range(1000)]
    assert counts.count(1) / len(counts) == pytest.approx(0.6, abs=0.04)
    for wrong in ({"top_p": 0.0}, {"top_k": 0}, {"temperature": -1.0}, {"max_tokens": 0}):
        with pytest.raises(UserError, match="it must be"):
            Sampling(**wrong)  # type: ignore[arg-type]


class Parrot(nn.Module):
    """Says the bytes of a text one after another, whatever it reads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.said = list(text.encode())
        self.longest = 0

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        self.longest = max(self.longest, tokens_BT.shape[1])
        return nn.functional.one_hot(torch.tensor([[self.said.pop(0)]]), 256).float()


def test_letters_of_several_bytes_come_whole_and_no_more_is_read_than_the_model_knows() -> None:
    text = "für 1 € 🚀!"
    model = Parrot(text)
    sampling = Sampling(max_tokens=len(text.encode()), temperature=0.0)
    pieces = list(continuation(model, TextInput(None, longest=6), "abc", sampling, torch.Generator()))
    assert "".join(pieces) == text and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert model.longest == 6


OURS: dict[str, Any] = {"d_model": 16, "n_layers": 2, "n_heads": 2}
LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("task", "args"),
    [
        ("language_modelling", OURS),
        ("language_modelling", OURS | {"mixture": {"n_experts": 2, "top_k": 1}}),
        ("huggingface", {"model": "llama", "config": LLAMA}),
        ("huggingface", {"model": "gpt2", "config": {"n_embd": 16, "n_layer": 2, "n_head": 2}}),
    ],
)
def test_keys_and_values_that_are_kept_change_nothing(
    task: str, args: dict[str, Any], text: str, own_cache: Path
) -> None:
    made = load_task(task, {"data": text, "sequence_length": 8, **args})
    network, given = made.build_model().eval(), text_input(made)
    plain, tokens = copy.deepcopy(network), given.encode("a penny saved")  # longer than what it looks back
    kept = _Reader(network, given)
    for end in range(3, tokens.shape[1] + 1):
        whole = logits_of(called(plain, given(tokens[:, :end])))[0, -1]
        assert torch.allclose(kept.logits(tokens[:, :end]), whole, atol=1e-5)
        assert kept.seen == min(end, 8)
    found, whole = (logits_of(called(each, given(tokens))) for each in (network, plain))
    assert torch.equal(found, whole), "nothing is kept any more"


def test_of_a_text_a_model_with_an_encoder_makes_another(tmp_path: Path, own_cache: Path) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("text,target\n" + "".join(f"word {n},drow {n}\n" for n in range(40)))
    args: dict[str, Any] = {"data": str(pairs), "tokenizer": "bytes", "sequence_length": 16}
    for model, config in (
        ("t5", {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}),
        ("bart", {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 16}),
    ):
        task = load_task("huggingface", args | {"model": model, "config": config})
        network, given = task.build_model().eval(), text_input(task)
        assert isinstance(given, PairsInput)
        kept, tokens = _PairsReader(network, given, "word 3"), torch.tensor([[given.start, 5, 9, 60, 61]])
        for end in range(1, 6):
            plain = network(**given(["word 3"]) | {"decoder_input_ids": tokens[:, :end], "use_cache": False})
            assert torch.allclose(kept.logits(tokens[:, :end]), plain.logits[0, -1], atol=1e-5)
        said = continuation(network, given, "word 3", Sampling(50, 0.0), torch.Generator())
        assert "".join(said).startswith("\n") and "</s>" not in "".join(said)


def test_a_trained_run_continues_texts_and_others_say_why_not(tmp_path: Path, text: str) -> None:
    def trireme(*words: str) -> Result:
        return CliRunner().invoke(group, words)

    known = ["launcher=local", "strategy=single", f"run.storage={tmp_path}", "tracking.enabled=false", "run.name=gpt"]
    sizes = f"task_args={{data: {text}, sequence_length: 16, d_model: 32, n_layers: 1, n_heads: 2}}"
    train = ["train.steps=100", "train.global_batch_size=16", "optimizer.lr=0.02"]
    assert trireme("train", "task=language_modelling", sizes, *train, *known).exit_code == 0
    said = trireme("generate", str(tmp_path / "gpt"), "saved is a penny ", "--max-tokens", "6", "--temperature", "0")
    assert said.stdout == "saved is a penny earned\n", said.output
    seeded = [trireme("generate", str(tmp_path / "gpt"), "a", "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert seeded[0] == seeded[1] != seeded[2]
    assert trireme("export", str(tmp_path / "gpt"), "--to", "torch", "--out", str(tmp_path / "out")).exit_code == 0
    (file,) = (tmp_path / "out").iterdir()
    assert same_bits(torch.load(file, weights_only=True), weights(tmp_path / "gpt"))
    a_run(tmp_path / "points", "tests.tasks:Points", {})
    refused = trireme("generate", str(tmp_path / "points"), "a")
    assert refused.exit_code == 2 and "does not continue texts" in refused.stderr
