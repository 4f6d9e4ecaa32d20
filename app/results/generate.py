"""Text from a trained language model, drawn token by token."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from app.errors import UserError
from app.models.gpt import Attention
from app.models.prediction import call_model, logits_of
from app.results.trained import trained
from app.storage.storage import Storage
from app.tasks.base import Task
from app.tasks.huggingface.inputs import PairsInput
from app.tasks.language import TextInput, end_tokens


@dataclass(frozen=True)
class Sampling:
    """How to draw the next token from the model's probabilities.

    Args:
        max_tokens: How many tokens to add at most.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Draw only from this many of the most probable tokens.
        top_p: Draw only from the fewest tokens whose probabilities together reach this (nucleus
            sampling, Holtzman et al. 2020).

    Raises:
        UserError: A value is out of its range.
    """

    max_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise _out_of_range("max-tokens", self.max_tokens, "1 or more")
        if self.temperature < 0:
            raise _out_of_range("temperature", self.temperature, "at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise _out_of_range("top-k", self.top_k, "1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise _out_of_range("top-p", self.top_p, "above 0 and at most 1")

    def draw(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Draw a token.

        Args:
            logits_V: The logits of all tokens, (vocabulary,).
            generator: A random-number generator on the device of the logits.

        Returns:
            The token's id.
        """
        if self.temperature == 0:
            return int(logits_V.argmax())
        sorted_V, order_V = (logits_V.float() / self.temperature).sort(descending=True)
        if self.top_k is not None:
            sorted_V = sorted_V[: self.top_k]
        probabilities_V = sorted_V.softmax(0)
        if self.top_p is not None:
            # Drop a token if the more probable ones already reach top_p.
            preceding_V = probabilities_V.cumsum(0) - probabilities_V
            probabilities_V = probabilities_V * (preceding_V < self.top_p)
        return int(order_V[torch.multinomial(probabilities_V, 1, generator=generator)])


def _out_of_range(option: str, value: float, limits: str) -> UserError:
    return UserError(f"--{option} is {value}, but it must be {limits}")


def text_input(task: Task) -> TextInput | PairsInput:
    """The preprocessor that turns texts into tokens for the task's model, and tokens into texts.

    Raises:
        UserError: The task does not train a language model.
    """
    preprocessor = task.preprocessor()
    if not isinstance(preprocessor, (TextInput, PairsInput)):
        raise UserError(
            f"the run's task is {type(task).__name__}, which does not continue texts: "
            "this is for language models whose task_args name their tokenizer"
        )
    return preprocessor


class Writer:
    """A run's trained language model, on this machine's GPU if it has one.

    Args:
        storage: The run's folder.
        step: The step of its checkpoint; None means the newest good one.
        warn: Called with a sentence for each damaged checkpoint that is skipped.

    Raises:
        UserError: There is no such checkpoint, or the run has trained no language model.
    """

    def __init__(
        self,
        storage: Storage,
        step: int | None = None,
        warn: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        result = trained(storage, step, warn)
        self.step = result.step
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = result.model.to(self.device)
        self.preprocessor = text_input(result.task)

    def write(self, prompt: str, *, sampling: Sampling, seed: int = 0) -> Iterator[str]:
        """Generate text from a prompt; see `continuation`."""
        yield from self.write_on(prompt, sampling=sampling, generator=self.generator(seed))

    def generator(self, seed: int) -> torch.Generator:
        """A new random-number generator for `write_on`."""
        return torch.Generator(self.device).manual_seed(seed)

    def write_on(
        self, prompt: str, *, sampling: Sampling, generator: torch.Generator
    ) -> Iterator[str]:
        """Generate text from a prompt with the next random numbers of a generator."""
        return continuation(
            self.model, self.preprocessor, prompt, sampling=sampling, generator=generator
        )


def continuation(
    model: nn.Module,
    preprocessor: TextInput | PairsInput,
    prompt: str,
    *,
    sampling: Sampling,
    generator: torch.Generator,
) -> Iterator[str]:
    """Generate text from a prompt.

    Args:
        model: The trained model, in evaluation mode.
        preprocessor: From `text_input`.
        prompt: The text to continue; a model with an encoder reads it and writes a text of its own.
        sampling: How to draw tokens, and how many.
        generator: A random-number generator on the model's device.

    Yields:
        The generated text in pieces, as tokens are drawn, until the model ends it or `max_tokens`.
    """
    predictor: _NextToken
    if isinstance(preprocessor, PairsInput):
        predictor = _EncoderDecoderNextToken(model, preprocessor, prompt)
        tokens_BT = torch.tensor([[preprocessor.start]])
    else:
        predictor = _NextToken(model, preprocessor)
        tokens_BT = preprocessor.encode(prompt)
    is_answer = bool(preprocessor.end) or isinstance(preprocessor, PairsInput)
    if is_answer:
        yield "\n"
    prompt_tokens = tokens_BT.shape[1]
    tokenizer = preprocessor.tokenizer if isinstance(preprocessor, TextInput) else None
    ends = end_tokens(model, tokenizer)
    text = ""
    shown = 0  # characters of `text` that have been yielded
    with contextlib.closing(predictor):
        for _ in range(min(sampling.max_tokens, predictor.max_tokens)):
            token = sampling.draw(predictor.logits(tokens_BT), generator)
            if token in ends:
                break
            tokens_BT = torch.cat([tokens_BT, torch.tensor([[token]])], 1)
            decoded = preprocessor.decode(tokens_BT[0, prompt_tokens:].tolist())
            text, is_ended, _ = decoded.partition(preprocessor.end or "\0")
            # The last characters may be the beginning of the end marker.
            stable = text if is_ended else text[: len(text) - len(preprocessor.end)]
            # A replacement character stands for the first bytes of a longer character.
            if not stable.endswith("\N{REPLACEMENT CHARACTER}"):
                yield stable[shown:]
                shown = len(stable)
            if is_ended:
                break
    yield text[shown:]


class _NextToken:
    """The logits of the next token, with a key-value cache as far as the model looks back.

    A model that is neither from `transformers` nor our GPT computes every token again.

    Args:
        model: The language model.
        preprocessor: How the model is called.
    """

    def __init__(self, model: nn.Module, preprocessor: TextInput) -> None:
        self.model = model
        self.preprocessor = preprocessor
        self.attentions = [module for module in model.modules() if isinstance(module, Attention)]
        self.cache_name = _cache_name(model)
        self.max_tokens = sys.maxsize  # that the model can write
        self.cache: Any = None
        self.seen = 0  # tokens that are in the cache
        self._set_kept([])

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """The logits of the token after these.

        Args:
            tokens_BT: All tokens so far, (1, T).

        Returns:
            Logits, (vocabulary,).
        """
        end = tokens_BT.shape[1]
        is_cached = bool(self.attentions) or "use_cache" in self.preprocessor.keywords
        if end > self.preprocessor.longest or not is_cached:
            self._set_kept(None)
            return logits_of(call_model(self.model, self.preprocessor(tokens_BT)))[0, -1]
        new_BT = tokens_BT[:, self.seen :]
        if self.attentions:
            positions = torch.arange(self.seen, end)[None]
            output = call_model(self.model, {"tokens_BT": new_BT, "position_ids": positions})
        else:
            arguments = {
                self.preprocessor.keyword: new_BT,
                "use_cache": True,
                self.cache_name: self.cache,
            }
            output = call_model(self.model, arguments)
            self.cache = output[self.cache_name]
        self.seen = end
        return logits_of(output)[0, -1]

    def close(self) -> None:
        """Stop caching keys and values."""
        self._set_kept(None)

    def _set_kept(self, kept: list[Tensor] | None) -> None:
        for attention in self.attentions:
            attention.kv_cache = kept


class _EncoderDecoderNextToken(_NextToken):
    """The same for a decoder whose encoder reads the prompt once."""

    def __init__(self, model: nn.Module, preprocessor: PairsInput, prompt: str) -> None:
        super().__init__(model, preprocessor)  # type: ignore[arg-type]
        # BART has a limit, T5 has none.
        self.max_tokens = getattr(model.config, "max_position_embeddings", self.max_tokens)
        self.encoder_inputs = preprocessor([prompt])

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor:
        """The logits of the decoder's token after these, (vocabulary,)."""
        arguments = {
            **self.encoder_inputs,
            "decoder_input_ids": tokens_BT[:, self.seen :],
            "use_cache": True,
            self.cache_name: self.cache,
        }
        output = call_model(self.model, arguments)
        self.cache = output[self.cache_name]
        self.seen = tokens_BT.shape[1]
        if "encoder_outputs" not in self.encoder_inputs:
            del self.encoder_inputs["input_ids"]
            self.encoder_inputs["encoder_outputs"] = (output.encoder_last_hidden_state,)
        return logits_of(output)[0, -1]


def _cache_name(model: nn.Module) -> str:
    """The argument of a `transformers` model for its key-value cache, which 5.24 renamed."""
    is_renamed = "cache" in inspect.signature(model.forward).parameters
    return "cache" if is_renamed else "past_key_values"
