"""Text from a trained language model: what most probably comes next, token by token."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from app.errors import UserError
from app.models.gpt import Attention
from app.models.prediction import called, logits_of
from app.tasks.base import Task
from app.tasks.huggingface.inputs import PairsInput
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


def text_input(task: Task) -> TextInput | PairsInput:
    """How the task turns texts into tokens and back. Raises UserError: it is not a language model's."""
    found = task.preprocessor()
    if not isinstance(found, (TextInput, PairsInput)):
        raise UserError(
            f"the run's task is {type(task).__name__}, which does not continue texts: this is for language models "
            "whose task_args name their tokenizer"
        )
    return found


def continuation(
    model: nn.Module, given: TextInput | PairsInput, prompt: str, sampling: Sampling, generator: torch.Generator
) -> Iterator[str]:
    """The text that follows the prompt (of a model with an encoder: that it makes of the prompt), piece by piece as it
    is drawn, until its end or `max_tokens`."""
    reader: _Reader
    if isinstance(given, PairsInput):
        reader, tokens = _PairsReader(model, given, prompt), torch.tensor([[given.start]])
    else:
        reader, tokens = _Reader(model, given), given.encode(prompt)
    if given.end or isinstance(given, PairsInput):  # an answer
        yield "\n"
    text, shown, first = "", "", tokens.shape[1]
    ends = _end_tokens(model)
    with contextlib.closing(reader):
        for _ in range(min(sampling.max_tokens, reader.most)):
            token = sampling.draw(reader.logits(tokens), generator)
            if token in ends:
                break
            tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
            text, ended, _ = given.decode(tokens[0, first:].tolist()).partition(given.end or "\0")
            sure = text if ended else text[: len(text) - len(given.end)]
            if not sure.endswith("\N{REPLACEMENT CHARACTER}"):  # else part of a letter, or of nothing
                yield sure[len(shown) :]
                shown = sure
            if ended:
                break
    yield text[len(shown) :]


class _Reader:
    """Logits after the last token, with the keys and values of those before kept, as far as the model looks back; of a
    model that is neither of `transformers` nor a GPT of ours, everything is computed again."""

    def __init__(self, model: nn.Module, given: TextInput) -> None:
        self.model, self.given = model, given
        self.attentions = [module for module in model.modules() if isinstance(module, Attention)]
        self.cache = _cache_name(model)
        self.most = sys.maxsize
        """Tokens that the model can write."""
        self.past: Any = None
        self.seen = 0
        self._keep([])

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """tokens_BT: (1, T). Returns (V,)."""
        new, end = tokens_BT[:, self.seen :], tokens_BT.shape[1]
        if end > self.given.longest or not (self.attentions or "use_cache" in self.given.keywords):
            self._keep(None)
            return logits_of(called(self.model, self.given(tokens_BT)))[0, -1]
        if self.attentions:
            places = torch.arange(self.seen, end)[None]
            output = called(self.model, {"tokens_BT": new, "position_ids": places})
        else:
            output = called(self.model, {self.given.keyword: new, "use_cache": True, self.cache: self.past})
            self.past = output[self.cache]
        self.seen = end
        return logits_of(output)[0, -1]

    def close(self) -> None:
        self._keep(None)

    def _keep(self, kept: list[Tensor] | None) -> None:
        for attention in self.attentions:
            attention.kept = kept


class _PairsReader(_Reader):
    """The same of a decoder, whose encoder reads the prompt once."""

    def __init__(self, model: nn.Module, given: PairsInput, prompt: str) -> None:
        super().__init__(model, given)  # type: ignore[arg-type]
        self.most = getattr(model.config, "max_position_embeddings", self.most)  # BART's; T5 has no such limit
        self.source = given([prompt])

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        asked = self.source | {"decoder_input_ids": tokens_BT[:, self.seen :], "use_cache": True, self.cache: self.past}
        output = called(self.model, asked)
        self.past, self.seen = output[self.cache], tokens_BT.shape[1]
        if "encoder_outputs" not in self.source:
            del self.source["input_ids"]
            self.source["encoder_outputs"] = (output.encoder_last_hidden_state,)
        return logits_of(output)[0, -1]


def _cache_name(model: nn.Module) -> str:
    """What a model of `transformers` calls the keys and values of tokens before: from 5.24 on `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _end_tokens(model: nn.Module) -> set[int]:
    """Of a model of `transformers`; others have none."""
    found = getattr(getattr(model, "config", None), "eos_token_id", None)
    return set(found) if isinstance(found, list) else {found} if isinstance(found, int) else set()
