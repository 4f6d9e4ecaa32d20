"""What a language model writes at an evaluation ends where it ends the text."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.tasks.language import (
    SAMPLE_TOKENS,
    TextInput,
    end_tokens,
    sample_text,
    sample_tokens,
    up_to_end,
)

pytestmark = pytest.mark.pure
WORDS = ["a", "b", "c", "d", "<|endoftext|>", "e", "f", "g"]


class NextWord(nn.Module):
    """After each token comes the one with the next number."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return 1000.0 * F.one_hot((tokens_BT + 1) % len(WORDS), len(WORDS)).float()


def test_tokens_are_drawn_up_to_an_end_and_equally_often_on_every_rank() -> None:
    model = NextWord()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))

    def written(ends: set[int]) -> list[int]:
        return sample_tokens(
            model, lambda tokens: (tokens,), torch.tensor([0]), length=4, ends=ends
        ).tolist()

    assert written({4, 6}) == [1, 2, 3, 4] and len(calls) == SAMPLE_TOKENS, (
        "collectives of ranks stay together"
    )
    assert len(written(set())) == SAMPLE_TOKENS
    assert up_to_end(torch.tensor([4, 1]), {4}).tolist() == [4] and up_to_end(
        torch.tensor([1, 2]), {4}
    ).tolist() == [
        1,
        2,
    ]


def test_the_end_is_the_models_or_the_tokenizers() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(
        WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="g")
    )
    tokenizer.pre_tokenizer = Whitespace()
    model = NextWord()
    assert end_tokens(model) == set() and end_tokens(model, tokenizer) == {4}
    text = sample_text(model, TextInput(tokenizer=tokenizer, longest=8), torch.tensor([0, 1]))
    assert text.startswith("a b → c d") and "e" not in text.replace("<|endoftext|>", "")
    model.config = SimpleNamespace(eos_token_id=[2, 6])  # type: ignore[assignment]
    assert end_tokens(model, tokenizer) == {2, 4, 6}
    model.config = SimpleNamespace(eos_token_id=2)  # type: ignore[assignment]
    assert (
        sample_text(model, TextInput(tokenizer=tokenizer, longest=8), torch.tensor([0]))
        == "a → b c"
    )
