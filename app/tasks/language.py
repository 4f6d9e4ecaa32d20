"""Language modelling: predict the next token."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from app.data.files import existing
from app.data.order import held_out
from app.data.text import BYTES, TOKEN_DTYPES, TokenWindows, load_tokenizer, read_tokens
from app.errors import UserError
from app.models.cross_entropy import LARGE_VOCABULARY, cross_entropy
from app.models.gpt import GPT, TENSOR_PLAN
from app.models.mixture import OPTIONS, MixtureGPT
from app.models.mixture import TENSOR_PLAN as MIXTURE_PLAN
from app.prediction import Preprocessor, called, logits_of, texts_of
from app.tasks.base import Batch
from app.tasks.parts import InParts, checked_model, one_of, require_known, whole

DEFAULT_EVAL_FRACTION, DEFAULT_EVAL_SEQUENCES = 0.1, 256
NEW_TOKENS = 64  # that the model in MLflow continues a text with


@dataclass
class TextInput(Preprocessor):
    """Texts, which the model continues. tokenizer: of the tokenizers library; None: bytes. keywords: how the model is
    called, if not by position."""

    tokenizer: Any
    longest: int  # tokens that the model looks back
    keyword: str = ""
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def example(self) -> Any:
        import pandas

        return pandas.DataFrame({"text": ["def "]})

    def encode(self, text: str) -> Tensor:
        """(1, tokens)"""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids if self.tokenizer else list(text.encode())
        return torch.tensor([ids or [0]])

    def decode(self, ids: list[int]) -> str:
        return (
            self.tokenizer.decode(ids)
            if self.tokenizer
            else bytes(i for i in ids if i < 256).decode("utf-8", "replace")
        )

    def __call__(self, given: Any) -> tuple[Any, ...] | dict[str, Any]:
        """given: one text, or tokens (n, t)."""
        tokens = (given if isinstance(given, Tensor) else self.encode(texts_of(given)[0]))[:, -self.longest :]
        return {self.keyword: tokens, **self.keywords} if self.keyword else (tokens,)

    def predict(self, model: nn.Module, given: Any) -> Any:
        """Each text with the most probable tokens that follow it."""
        import pandas

        texts = texts_of(given)
        return pandas.DataFrame({"text": [text + self._continuation(model, text) for text in texts]})

    def _continuation(self, model: nn.Module, text: str) -> str:
        tokens = self.encode(text)
        for _ in range(NEW_TOKENS):
            logits_BTV = logits_of(called(model, self(tokens)))
            tokens = torch.cat([tokens, logits_BTV[:, -1].argmax(-1, keepdim=True).cpu()], 1)
        return self.decode(tokens[0, -NEW_TOKENS:].tolist())


class LanguageModelling(InParts):
    """A GPT that predicts each next token of a text.

    data: text files as a path, a glob (`**` too) or a list of them; `python`, the source of Python's own library; or
        token files: .bin (bare numbers of `token_dtype`) or .npy, which may be far larger than memory.
    tokenizer: `bytes` (256 tokens) or the path of a Hugging Face tokenizers file; text is tokenised once and kept
        in the cache.
    token_dtype: `uint16`, `uint32` or `uint8`: the numbers in a .bin file.
    vocab_size: size of the vocabulary; needed with token files, else at least the tokenizer's (its default).
    mixture: makes the feed-forward layers mixtures of experts: a mapping of n_experts, top_k, d_expert, d_shared,
        balance_weight, bias_rate, all optional; see app/models/mixture.py.
    sequence_length, d_model, n_layers, n_heads, d_hidden, tie_weights, dropout: the model; see app/models/gpt.py.
    residual_in_fp32: false: with a 16-bit train.precision, what flows between blocks has 16 bits too: fewer bytes to
        move and to keep, and rounded as it always is under strategies that shard parameters.
    fused_projections: attention's q, k and v as one operation, and gate and up, where a worker has them whole and
        blocks are not compiled (app/models/linear.py). Checkpoints are the same.
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
        residual_in_fp32: bool = True,
        fused_projections: bool = False,
        mixture: dict[str, Any] | None = None,
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
            "residual_in_fp32": residual_in_fp32,
            "fused_projections": fused_projections,
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
        sizes = {"vocab_size": self.vocab_size}
        if mixture is None:
            self._build = checked_model(GPT, sizes, model_args)
        else:
            require_known("task_args.mixture", "a mixture", mixture, OPTIONS)
            if model_args.pop("d_hidden") is not None:
                raise UserError("task_args.d_hidden is not for a mixture of experts; write task_args.mixture.d_expert")
            self._build = checked_model(MixtureGPT, sizes, model_args | dict(mixture))
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
        made_of_tokens = self.bytes_per_token is None
        known = None if tokenizer == BYTES else load_tokenizer(existing(tokenizer, "task_args.tokenizer"))
        self._input = None if made_of_tokens and known is None else TextInput(known, self.sequence_length)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        linear, inner = self._is_linear(model, inputs), _inner(model)
        if isinstance(inner, MixtureGPT) and inner.training:  # its loss is of more than the logits
            return model(inputs, targets, linear)
        if linear and isinstance(inner, GPT):
            return model(inputs, targets)
        logits_BTV = model(inputs)
        return cross_entropy(logits_BTV.flatten(0, 1), targets.flatten())

    def _is_linear(self, model: nn.Module, inputs: Tensor) -> bool:
        """Whether the model can give the loss itself, and is to."""
        wanted = self.linear_loss
        if wanted is None:
            wanted = inputs.is_cuda and self.vocab_size >= LARGE_VOCABULARY
        inner = _inner(model)
        return wanted and isinstance(inner, (GPT, MixtureGPT)) and inner.has_own_head

    def on_gpu(self) -> LanguageModelling | None:
        if self.linear_loss is not None or self.vocab_size < LARGE_VOCABULARY:
            return None
        task = copy.copy(self)
        task.linear_loss = True
        return task

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
        plan = MIXTURE_PLAN if isinstance(model, MixtureGPT) else TENSOR_PLAN
        shared = any(name.endswith(".mlp.shared") for name, _ in model.named_modules())
        return {name: value for name, value in plan.items() if shared or ".shared." not in name}

    def heads(self) -> int | None:
        return self.n_heads


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
