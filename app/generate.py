"""Text from a trained language model: what most probably comes next, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from app.errors import UserError
from app.prediction import called, logits_of
from app.tasks.base import Task
from app.tasks.language import TextInput


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the probabilities of all.

    temperature: divides the logits; 0 takes the most probable. top_k: of that many of the most probable. top_p: of the
    fewest whose probabilities reach this (Holtzman et al. 2020)."""

    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        wrong = {
            "max-tokens": self.max_tokens if self.max_tokens < 1 else None,
            "temperature": self.temperature if self.temperature < 0 else None,
            "top-k": self.top_k if self.top_k is not None and self.top_k < 1 else None,
            "top-p": self.top_p if self.top_p is not None and not 0 < self.top_p <= 1 else None,
        }
        for name, value in wrong.items():
            if value is not None:
                limits = (
                    "above 0 and at most 1"
                    if name == "top-p"
                    else "at least 0"
                    if name == "temperature"
                    else "1 or more"
                )
                raise UserError(f"--{name} is {value}, but it must be {limits}")

    def draw(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """A token's number; generator: of the logits' device."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        sorted_V, order_V = (logits_V.float() / self.temperature).sort(descending=True)
        if self.top_k is not None:
            sorted_V = sorted_V[: self.top_k]
        chances_V = sorted_V.softmax(0)
        if self.top_p is not None:  # a token is left out when those before it reach top_p already
            chances_V = chances_V * (chances_V.cumsum(0) - chances_V < self.top_p)
        return int(order_V[torch.multinomial(chances_V, 1, generator=generator)])


def text_input(task: Task) -> TextInput:
    """How the task turns texts into tokens and back. Raises UserError: it is not a language model's."""
    found = task.preprocessor()
    if not isinstance(found, TextInput):
        raise UserError(
            f"the run's task is {type(task).__name__}, which does not continue texts: this is for language models "
            "whose task_args name their tokenizer"
        )
    return found


def continuation(
    model: nn.Module, given: TextInput, prompt: str, sampling: Sampling, generator: torch.Generator
) -> Iterator[str]:
    """The text that follows the prompt, piece by piece as it is drawn, until its end token or `max_tokens`."""
    tokens, shown = given.encode(prompt), ""
    first = tokens.shape[1]
    reader, ends = _Reader(model, given), _end_tokens(model)
    for _ in range(sampling.max_tokens):
        token = sampling.draw(reader.logits(tokens), generator)
        if token in ends:
            return
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
        text = given.decode(tokens[0, first:].tolist())
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else part of a letter, or of nothing
            yield text[len(shown) :]
            shown = text
    yield given.decode(tokens[0, first:].tolist())[len(shown) :]


class _Reader:
    """Logits after the last token. A model of `transformers` keeps the keys and values of those before; of another
    everything is computed again, as far as it looks back."""

    def __init__(self, model: nn.Module, given: TextInput) -> None:
        self.model, self.given = model, given
        self.past: Any = None
        self.seen = 0

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """tokens_BT: (1, T). Returns (V,)."""
        if "use_cache" in self.given.keywords and tokens_BT.shape[1] <= self.given.longest:
            new = {self.given.keyword: tokens_BT[:, self.seen :], "use_cache": True, "past_key_values": self.past}
            output = called(self.model, new)
            self.past, self.seen = output.past_key_values, tokens_BT.shape[1]
        else:
            output = called(self.model, self.given(tokens_BT))
        return logits_of(output)[0, -1]


def _end_tokens(model: nn.Module) -> set[int]:
    """Of a model of `transformers`; others have none."""
    found = getattr(getattr(model, "config", None), "eos_token_id", None)
    return set(found) if isinstance(found, list) else {found} if isinstance(found, int) else set()
