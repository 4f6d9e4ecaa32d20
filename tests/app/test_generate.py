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
from app.tasks import load_task
from app.tasks.huggingface.inputs import PairsInput
from app.tasks.language import TextInput
from tests.running import POINTS

LOGITS = torch.log(torch.tensor([0.1, 0.6, 0.3]))


def drawn(sampling: Sampling, count: int = 400) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {sampling.draw(LOGITS, generator) for _ in range(count)}


def test_how_a_token_is_drawn() -> None:
    assert drawn(Sampling(temperature=1.0)) == {0, 1, 2}
    assert drawn(Sampling(temperature=0.0)) == drawn(Sampling(top_k=1)) == drawn(Sampling(top_p=0.5)) == {1}
    assert drawn(Sampling(temperature=1.0, top_k=2)) == drawn(Sampling(temperature=1.0, top_p=0.7)) == {1, 2}
    counts = [Sampling(temperature=1.0).draw(LOGITS, torch.Generator().manual_seed(s)) for s in range(2000)]
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


@pytest.mark.parametrize("mixture", [None, {"n_experts": 2, "top_k": 1}])
def test_our_own_models_keep_keys_and_values_too(mixture: Any, text: str, own_cache: Path) -> None:
    args = {"data": text, "sequence_length": 8, "d_model": 16, "n_layers": 2, "n_heads": 2, "mixture": mixture}
    task = load_task("language_modelling", args)
    network, given = task.build_model().eval(), text_input(task)
    plain, tokens = copy.deepcopy(network), given.encode("a penny saved")  # longer than what it looks back
    kept = _Reader(network, given)
    for end in range(3, tokens.shape[1] + 1):
        assert torch.allclose(kept.logits(tokens[:, :end]), plain(*given(tokens[:, :end]))[0, -1], atol=1e-5)
        assert kept.seen == min(end, 8)
    assert torch.equal(network(tokens), plain(tokens)), "nothing is kept any more"


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_keys_and_values_that_are_kept_change_nothing(model: str, text: str, own_cache: Path) -> None:
    sizes = {"llama": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}}
    sizes |= {"gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2}}
    args: dict[str, Any] = {"model": model, "data": text, "sequence_length": 8, "config": sizes[model]}
    task = load_task("huggingface", args)
    network, given = task.build_model().eval(), text_input(task)
    kept, tokens = _Reader(network, given), given.encode("a penny saved")  # longer than what it looks back
    for end in range(1, tokens.shape[1] + 1):
        plain = _Reader(network, given)
        assert torch.allclose(kept.logits(tokens[:, :end]), plain.logits(tokens[:, :end]), atol=1e-5)
    assert kept.past is not None


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

    known = ["launcher=local", "strategy=single", f"run.storage={tmp_path}", "tracking.enabled=false"]
    sizes = f"task_args={{data: {text}, sequence_length: 16, d_model: 32, n_layers: 1, n_heads: 2}}"
    train = ["train.steps=150", "train.global_batch_size=16", "optimizer.lr=0.01", "run.name=gpt"]
    assert trireme("train", "task=language_modelling", sizes, *train, *known).exit_code == 0
    said = trireme("generate", str(tmp_path / "gpt"), "saved is a penny ", "--max-tokens", "6", "--temperature", "0")
    assert said.stdout == "saved is a penny earned\n", said.output
    seeded = [trireme("generate", str(tmp_path / "gpt"), "a", "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert seeded[0] == seeded[1] != seeded[2]
    assert trireme("train", *POINTS, "train.steps=2", "run.name=points", *known).exit_code == 0
    refused = trireme("generate", str(tmp_path / "points"), "a")
    assert refused.exit_code == 2 and "does not continue texts" in refused.stderr
