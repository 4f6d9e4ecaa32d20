"""Language modelling: predict the next token."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset

from app.data.files import existing
from app.data.mixture import Mixture
from app.data.order import held_out
from app.data.sets import column, is_dataset, open_dataset
from app.data.stream import TokenStream
from app.data.text import (
    BYTES,
    TOKEN_DTYPES,
    TokenFile,
    TokenWindows,
    encoder,
    load_tokenizer,
    read_tokens,
)
from app.errors import UserError
from app.models.cross_entropy import LARGE_VOCABULARY, cross_entropy
from app.models.gpt import GPT, TENSOR_PLAN
from app.models.mixture import OPTIONS, MixtureGPT
from app.models.mixture import TENSOR_PLAN as MIXTURE_PLAN
from app.models.prediction import Preprocessor, call_model, logits_of, texts_of
from app.tasks.base import Batch
from app.tasks.items import same_for_every_row
from app.tasks.parts import InParts, checked_model, one_of, require_known, whole

DEFAULT_EVAL_FRACTION, DEFAULT_EVAL_SEQUENCES = 0.1, 256
PROMPT, SAMPLED = 16, 32  # tokens of a text that is shown at an evaluation: given, drawn
NEW_TOKENS = 64  # that the model in MLflow continues a text with


@dataclass
class TextInput(Preprocessor):
    """Texts, which the model continues. tokenizer: of the tokenizers library; None: bytes. keywords: how the model is
    called, if not by position. end: what follows the text that is wanted."""

    tokenizer: Any
    longest: int  # tokens that the model looks back
    keyword: str = ""
    keywords: dict[str, Any] = field(default_factory=dict)
    end: str = ""

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
            logits_BTV = logits_of(call_model(model, self(tokens)))
            tokens = torch.cat([tokens, logits_BTV[:, -1].argmax(-1, keepdim=True).cpu()], 1)
        return self.decode(tokens[0, -NEW_TOKENS:].tolist())


class LanguageModelling(InParts):
    """A GPT that predicts each next token of a text.

    data: text files as a path, a glob (`**` too) or a list of them; `python`, the source of Python's own library;
        token files: .bin (bare numbers of `token_dtype`) or .npy, which may be far larger than memory; or a data set of
        documents (app/data/sets.py: a folder of save_to_disk, .parquet, .jsonl, …, also s3://). A mapping of any of
        these to weights mixes them: {python: 3, "notes/*.txt": 1} takes three quarters of the samples from the first.
    text: the column of a data set's documents.
    stream: reads a data set where it lies, in its own order, instead of making a token file of it first;
        needs train.steps, and eval_samples (default 0) are the documents at its beginning that are held out.
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
    compiles_loss = True

    def __init__(
        self,
        *,
        data: str | list[str] | dict[str, float],
        text: str = "text",
        stream: bool = False,
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
        sources: list[Any] = list(data) if isinstance(data, Mapping) else [data]
        read: list[list[TokenFile]] = []
        if stream:
            least, self.bytes_per_token = self._stream(data, text, tokenizer, eval_samples), None
        for source in () if stream else sources:
            files, least, self.bytes_per_token = read_tokens(
                source, tokenizer=tokenizer, token_dtype=token_dtype, vocab_size=vocab_size, text=text
            )
            read.append(files)
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
        parts = [self._parts(files, eval_samples) for files in read]
        if parts:
            self._train, self._eval = parts[0]
        if isinstance(data, Mapping) and parts:
            self._train = Mixture([train for train, _ in parts], [float(weight) for weight in data.values()])
            held = [part for _, part in parts if part is not None]
            self._eval = ConcatDataset(held) if held else None
        made_of_tokens = self.bytes_per_token is None and not any(is_dataset(source) for source in sources)
        known = None if tokenizer == BYTES else load_tokenizer(existing(tokenizer, "task_args.tokenizer"))
        self._input = None if made_of_tokens and known is None else TextInput(known, self.sequence_length)

    def _parts(self, files: list[TokenFile], eval_samples: int | None) -> tuple[TokenWindows, TokenWindows | None]:
        windows = TokenWindows(files, self.sequence_length, self.vocab_size)
        total = len(windows)
        if total < 1:
            raise UserError(
                f"task_args.data: {sum(file.length for file in files)} tokens do not fill one sequence of "
                f"{self.sequence_length} and its next token; give more text, or a smaller sequence_length"
            )
        count = held_out(total, eval_samples, DEFAULT_EVAL_FRACTION)
        count = min(count, DEFAULT_EVAL_SEQUENCES) if eval_samples is None else count
        return windows.part(0, total - count), windows.part(total - count, total) if count else None

    def _stream(self, data: Any, text: str, tokenizer: str, eval_samples: int | None) -> int:
        """Sets the data; the least size of the vocabulary."""
        if isinstance(data, Mapping) or not is_dataset(data):
            raise UserError(f"task_args.stream is for one data set, such as a .parquet or .jsonl file, not {data!r}")
        rows, _ = open_dataset(data, stream=True)
        encode, size = encoder(tokenizer)
        make = partial(TokenStream, column=column(rows, text, "task_args.text"), encode=encode)
        make = partial(make, sequence_length=self.sequence_length)
        count = whole("eval_samples", eval_samples or 0, 0)
        self._train = make(rows.skip(count))
        self._eval = list(make(rows.take(count))) or None if count else None
        return size

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

    def on_evaluation(self, model: nn.Module, log: Any) -> None:
        show_sample(self, model, log)

    @same_for_every_row
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


def show_sample(task: InParts, model: nn.Module, log: Any) -> None:
    """Logs what the model writes after the beginning of the held-out data."""
    given, data = task.preprocessor(), task.eval_data()
    if isinstance(given, TextInput) and data is not None:
        log("sample", sample(model, given, data[0][0][:PROMPT]))


def sample(model: nn.Module, given: TextInput, prompt_T: Tensor) -> str:
    """The prompt and `SAMPLED` tokens after it."""
    return f"{given.decode(prompt_T.tolist())} → {given.decode(drawn(model, given, prompt_T, given.longest).tolist())}"


def drawn(model: nn.Module, given: Callable[[Tensor], Any], prompt_T: Tensor, longest: int) -> Tensor:
    """`SAMPLED` tokens after the prompt, drawn as torch's generator says. The model is always called with as many
    tokens, `longest`, those to come being zeros, which a causal one does not see. given: the arguments for tokens
    (1, longest)."""
    tokens_T = prompt_T
    for _ in range(SAMPLED):
        seen_T = tokens_T[-longest:]
        whole_T = F.pad(seen_T, (0, longest - len(seen_T)))
        logits_V = logits_of(call_model(model, given(whole_T[None])))[0, len(seen_T) - 1]
        whole_V = logits_V.full_tensor() if isinstance(logits_V, DTensor) else logits_V
        tokens_T = torch.cat([tokens_T, torch.multinomial(whole_V.float().cpu().softmax(-1), 1)])
    return tokens_T[len(prompt_T) :]


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
