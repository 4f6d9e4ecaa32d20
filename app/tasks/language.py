"""Language modelling: predict the next token."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from app.data.order import held_out
from app.data.text import BYTES, TOKEN_DTYPES, TokenWindows, read_tokens
from app.errors import UserError
from app.models.cross_entropy import LARGE_VOCABULARY, cross_entropy
from app.models.gpt import GPT, TENSOR_PLAN
from app.tasks.base import Batch
from app.tasks.parts import InParts, checked_model, one_of, whole

DEFAULT_EVAL_FRACTION, DEFAULT_EVAL_SEQUENCES = 0.1, 256


class LanguageModelling(InParts):
    """A GPT that predicts each next token of a text.

    data: text files as a path, a glob (`**` too) or a list of them; `python`, the source of Python's own library; or
        token files: .bin (bare numbers of `token_dtype`) or .npy, which may be far larger than memory.
    tokenizer: `bytes` (256 tokens) or the path of a Hugging Face tokenizers file; text is tokenised once and kept
        in the cache.
    token_dtype: `uint16`, `uint32` or `uint8`: the numbers in a .bin file.
    vocab_size: size of the vocabulary; needed with token files, else at least the tokenizer's (its default).
    sequence_length, d_model, n_layers, n_heads, d_hidden, tie_weights, dropout: the model; see app/models/gpt.py.
    linear_loss: compute the loss from the last layer's input, so that all logits never exist at once
        (app/models/cross_entropy.py), where this process has the last layer whole. null (the default): on a GPU with
        a vocabulary of 8,192 or more; true: on a CPU too.
    eval_samples: sequences held out at the end of the text (default: a tenth, at most 256).

    One sample is one sequence; `items` and the throughput count tokens.
    """

    unit = "tokens"
    float_output = False

    def __init__(
        self,
        *,
        data: str | list[str],
        tokenizer: str = BYTES,
        token_dtype: str = "uint16",
        vocab_size: int | None = None,
        sequence_length: int = 256,
        d_model: int = 256,
        n_layers: int = 4,
        n_heads: int = 4,
        d_hidden: int | None = None,
        tie_weights: bool = False,
        dropout: float = 0.0,
        linear_loss: bool | None = None,
        eval_samples: int | None = None,
    ) -> None:
        one_of("token_dtype", token_dtype, TOKEN_DTYPES)
        self.sequence_length = whole("sequence_length", sequence_length)
        self.n_heads = whole("n_heads", n_heads)
        model_args: dict[str, Any] = {
            "d_model": whole("d_model", d_model),
            "n_layers": whole("n_layers", n_layers),
            "n_heads": n_heads,
            "d_hidden": None if d_hidden is None else whole("d_hidden", d_hidden),
            "tie_weights": tie_weights,
            "dropout": dropout,
        }
        self.linear_loss = linear_loss
        if vocab_size is not None:
            whole("vocab_size", vocab_size)
        files, least, self.bytes_per_token = read_tokens(data, tokenizer, token_dtype, vocab_size)
        self.vocab_size = vocab_size or least
        if self.vocab_size < least:
            raise UserError(
                f"task_args.vocab_size is {vocab_size}, but the tokenizer has {least} tokens; write {least} or more"
            )
        self._build = checked_model(GPT, {"vocab_size": self.vocab_size}, model_args)
        windows = TokenWindows(files, self.sequence_length, self.vocab_size)
        total = len(windows)
        if total < 1:
            raise UserError(
                f"task_args.data: {sum(file.length for file in files)} tokens do not fill one sequence of "
                f"{self.sequence_length} and its next token; give more text, or a smaller sequence_length"
            )
        count = held_out(total, eval_samples, DEFAULT_EVAL_FRACTION)
        count = min(count, DEFAULT_EVAL_SEQUENCES) if eval_samples is None else count
        self._train = windows.part(0, total - count)
        self._eval = windows.part(total - count, total) if count else None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        if self._is_linear(model, inputs):
            return model(inputs, targets)
        logits_BTV = model(inputs)
        return cross_entropy(logits_BTV.flatten(0, 1), targets.flatten())

    def _is_linear(self, model: nn.Module, inputs: Tensor) -> bool:
        """Whether the model can give the loss itself, and is to."""
        wanted = self.linear_loss
        if wanted is None:
            wanted = inputs.is_cuda and self.vocab_size >= LARGE_VOCABULARY
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return wanted and isinstance(inner, GPT) and inner.has_own_head

    def items(self, batch: Batch) -> int | Tensor:
        return batch[1].numel()

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        loss = self.loss(model, batch)
        if self.bytes_per_token is None:
            return {"loss": loss}
        return {"loss": loss, "bits_per_byte": loss / (math.log(2) * self.bytes_per_token)}

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(means["loss"], 700.0))}

    def tensor_plan(self, model: nn.Module) -> dict[str, str] | None:
        return dict(TENSOR_PLAN)

    def heads(self) -> int | None:
        return self.n_heads
