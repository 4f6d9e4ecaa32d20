"""Language modelling: predict the next token of a text."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
from app.tasks.base import EvaluationLog
from app.tasks.items import same_for_every_row
from app.tasks.parts import (
    InputsAndTargets,
    SplitDataTask,
    checked_model,
    one_of,
    require_known,
    whole_number,
)

if TYPE_CHECKING:
    from pandas import DataFrame

DEFAULT_EVAL_FRACTION = 0.1
DEFAULT_EVAL_SEQUENCES = 256  # the most sequences that are held out by default
PROMPT_TOKENS = 16  # tokens of the held-out data that a sample at an evaluation begins with
SAMPLE_TOKENS = 32  # tokens that the model adds to them
PREDICTED_TOKENS = 64  # tokens that the model in MLflow adds to a text
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>")
"""What tokenizers call the token after a text."""
MAX_EXPONENT = 700.0  # exp of a larger loss overflows float64


@dataclass(kw_only=True)
class TextInput(Preprocessor):
    """Texts, which the model continues.

    Args:
        tokenizer: A Tokenizer of the tokenizers library; None means bytes.
        longest: How many tokens the model takes at most: the last ones.
        keyword: The argument of the model that takes tokens; "" means the first by position.
        keywords: Further arguments of the model.
        end: What comes after the text that is asked for.
    """

    tokenizer: Any
    longest: int
    keyword: str = ""
    keywords: dict[str, Any] = field(default_factory=dict)
    end: str = ""

    @property
    def example(self) -> DataFrame:
        """A table of texts with one row."""
        import pandas

        return pandas.DataFrame({"text": ["def "]})

    def encode(self, text: str) -> Tensor:
        """The tokens of a text, int64 (1, tokens); one token 0 for an empty text."""
        if self.tokenizer:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        else:
            ids = list(text.encode())
        return torch.tensor([ids or [0]])

    def decode(self, ids: list[int]) -> str:
        """The text of tokens."""
        if self.tokenizer:
            return self.tokenizer.decode(ids)
        # A model with a larger vocabulary than 256 may give tokens that are not bytes.
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def __call__(self, text: Any) -> tuple[Any, ...] | dict[str, Any]:
        """The model's arguments.

        Args:
            text: One text, also in a list or a table; or tokens (B, T).
        """
        tokens_BT = text if isinstance(text, Tensor) else self.encode(texts_of(text)[0])
        tokens_BT = tokens_BT[:, -self.longest :]
        if self.keyword:
            return {self.keyword: tokens_BT, **self.keywords}
        return (tokens_BT,)

    def predict(self, model: nn.Module, texts: Any) -> DataFrame:
        """Each text with the most probable tokens that follow it."""
        import pandas

        continued = [text + self._continuation(model, text) for text in texts_of(texts)]
        return pandas.DataFrame({"text": continued})

    def _continuation(self, model: nn.Module, text: str) -> str:
        tokens_BT = self.encode(text)
        for _ in range(PREDICTED_TOKENS):
            logits_BTV = logits_of(call_model(model, self(tokens_BT)))
            next_B1 = logits_BTV[:, -1].argmax(-1, keepdim=True).cpu()
            tokens_BT = torch.cat([tokens_BT, next_B1], 1)
        added_T = tokens_BT[0, -PREDICTED_TOKENS:]
        return self.decode(up_to_end(added_T, end_tokens(model, self.tokenizer)).tolist())


class TokenSource(NamedTuple):
    """Text or tokens, as `read_tokens` has read them.

    Args:
        files: The token files.
        min_vocab_size: The least size of the vocabulary.
        bytes_per_token: Bytes of text for each token; None if they are not known.
    """

    files: list[TokenFile]
    min_vocab_size: int
    bytes_per_token: float | None


class LanguageModelling(SplitDataTask):
    """A GPT that predicts each next token of a text.

    One sample is one sequence; `items` and the throughput count tokens.

    Args:
        data: Text files as a path, a glob (`**` too) or a list of them; `python`, the source of
            Python's own library; token files: .bin (bare numbers of `token_dtype`) or .npy, which
            may be far larger than memory; or a data set of documents (app/data/sets.py: a folder of
            save_to_disk, .parquet, .jsonl, …, also s3://). A mapping of any of these to weights
            mixes them: {python: 3, "notes/*.txt": 1} takes three quarters of the samples from the
            first.
        text: The column of a data set's documents.
        stream: Reads a data set where it is, in its own order, instead of making a token file of it
            first; needs train.steps, and eval_samples (default 0) are the documents at its
            beginning that are held out.
        tokenizer: `bytes` (256 tokens) or the path of a Hugging Face tokenizers file; text is
            tokenised once and kept in the cache.
        token_dtype: `uint16`, `uint32` or `uint8`: the numbers in a .bin file.
        vocab_size: Size of the vocabulary; needed with token files, else at least the tokenizer's
            (its default).
        mixture: Makes the feed-forward layers mixtures of experts: a mapping of n_experts, top_k,
            d_expert, d_shared, balance_weight, bias_rate, all optional; see app/models/mixture.py.
        sequence_length, d_model, n_layers, n_heads, d_hidden, tie_weights, dropout: The model; see
            app/models/gpt.py.
        residual_in_fp32: false: with a 16-bit train.precision, the activations between blocks have
            16 bits too: fewer bytes to move and to keep, and rounded as they always are under
            strategies that shard parameters.
        fused_projections: Compute attention's q, k and v in one operation, and the feed-forward
            layer's gate and up in another, where a worker has them whole and blocks are not
            compiled (app/models/linear.py). Checkpoints are the same.
        linear_loss: Compute the loss from the last layer's input, so that all logits never exist at
            once (app/models/cross_entropy.py), where this process has the last layer whole. null
            (the default): on a GPU with a vocabulary of 8,192 or more; true: on a CPU too.
        eval_samples: Sequences held out at the end of the text (default: a tenth, at most 256).
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
        self.sequence_length = whole_number("sequence_length", sequence_length)
        self.n_heads = whole_number("n_heads", n_heads)
        self.linear_loss = linear_loss
        model_args: dict[str, Any] = {
            "d_model": whole_number("d_model", d_model),
            "n_layers": whole_number("n_layers", n_layers),
            "n_heads": n_heads,
            "d_hidden": None if d_hidden is None else whole_number("d_hidden", d_hidden),
            "tie_weights": tie_weights,
            "dropout": dropout,
            "residual_in_fp32": residual_in_fp32,
            "fused_projections": fused_projections,
        }
        if vocab_size is not None:
            whole_number("vocab_size", vocab_size)
        sources: list[Any] = list(data) if isinstance(data, Mapping) else [data]
        if not sources:
            raise UserError("task_args.data is an empty mapping; write data and their weights")
        self.bytes_per_token: float | None = None
        token_sources: list[TokenSource] = []
        if stream:
            min_vocab_size = self._open_stream(data, text, tokenizer, eval_samples=eval_samples)
        else:
            for source in sources:
                tokens = read_tokens(
                    source,
                    tokenizer=tokenizer,
                    token_dtype=token_dtype,
                    vocab_size=vocab_size,
                    text=text,
                )
                token_sources.append(TokenSource(*tokens))
            min_vocab_size = max(source.min_vocab_size for source in token_sources)
        self.vocab_size = vocab_size or min_vocab_size
        if self.vocab_size < min_vocab_size:
            raise UserError(
                f"task_args.vocab_size is {vocab_size}, but the tokenizer has {min_vocab_size} "
                f"tokens; write {min_vocab_size} or more"
            )
        self._build = self._checked_model(model_args, mixture)
        if token_sources:
            weights = list(data.values()) if isinstance(data, Mapping) else None
            self._set_windows(token_sources, weights, eval_samples)
        has_text = any(source.bytes_per_token is not None for source in token_sources)
        has_documents = any(map(is_dataset, sources))
        if tokenizer != BYTES:
            opened = load_tokenizer(existing(tokenizer, "task_args.tokenizer"))
            self._input = TextInput(tokenizer=opened, longest=self.sequence_length)
        elif has_text or has_documents:
            self._input = TextInput(tokenizer=None, longest=self.sequence_length)

    def _checked_model(
        self, model_args: dict[str, Any], mixture: Mapping[str, Any] | None
    ) -> Callable[[], nn.Module]:
        """A function that builds the model.

        Args:
            model_args: The arguments of a GPT but for the size of the vocabulary.
            mixture: The options of a mixture of experts; None for a model without experts.

        Raises:
            UserError: The arguments do not make a model.
        """
        sizes = {"vocab_size": self.vocab_size}
        if mixture is None:
            return checked_model(GPT, sizes, model_args)
        require_known(mixture, OPTIONS, key="task_args.mixture", owner="a mixture")
        mixture_args = {**model_args, **mixture}
        if mixture_args.pop("d_hidden") is not None:
            raise UserError(
                "task_args.d_hidden does not apply to a mixture of experts; write "
                "task_args.mixture.d_expert"
            )
        return checked_model(MixtureGPT, sizes, mixture_args)

    def _set_windows(
        self,
        token_sources: list[TokenSource],
        weights: list[float] | None,
        eval_samples: int | None,
    ) -> None:
        """Set the data to train on, the held-out data and its bytes per token.

        Args:
            token_sources: The sources.
            weights: The share of each source; None if there is only one.
            eval_samples: How many sequences of each source are held out; None means the default.
        """
        parts = [self._split_windows(source.files, eval_samples) for source in token_sources]
        eval_sizes = [0 if eval_part is None else len(eval_part) for _, eval_part in parts]
        self.bytes_per_token = _mean_bytes_per_token(token_sources, eval_sizes)
        if weights is None:
            ((self._train, self._eval),) = parts
            return
        self._train = Mixture([train for train, _ in parts], [float(weight) for weight in weights])
        eval_parts = [eval_part for _, eval_part in parts if eval_part is not None]
        self._eval = ConcatDataset(eval_parts) if eval_parts else None

    def _split_windows(
        self, files: list[TokenFile], eval_samples: int | None
    ) -> tuple[TokenWindows, TokenWindows | None]:
        """The sequences of token files: those to train on, and those held out at the end.

        Raises:
            UserError: There is not one sequence, or too many are to be held out.
        """
        windows = TokenWindows(files, self.sequence_length, self.vocab_size)
        total = len(windows)
        if total < 1:
            tokens = sum(file.length for file in files)
            raise UserError(
                f"task_args.data: {tokens} tokens do not fill one sequence of "
                f"{self.sequence_length} and its next token; "
                "give more text, or a smaller sequence_length"
            )
        count = held_out(total, eval_samples, DEFAULT_EVAL_FRACTION)
        if eval_samples is None:
            count = min(count, DEFAULT_EVAL_SEQUENCES)
        train = windows.part(0, total - count)
        return train, windows.part(total - count, total) if count else None

    def _open_stream(
        self, data: Any, text: str, tokenizer: str, *, eval_samples: int | None
    ) -> int:
        """Set the data to train on and the held-out data from a stream of documents.

        Args:
            data: The data set.
            text: The column of its documents.
            tokenizer: `bytes` or the path of a tokenizer.
            eval_samples: How many documents are held out.

        Returns:
            The size of the tokenizer's vocabulary.

        Raises:
            UserError: The data is not a data set.
        """
        if isinstance(data, Mapping) or not is_dataset(data):
            raise UserError(
                "task_args.stream is for one data set, such as a .parquet or .jsonl file, "
                f"not {data!r}"
            )
        rows, _ = open_dataset(data, stream=True)
        encode, vocab_size = encoder(tokenizer)
        text_column = column(rows, text, "task_args.text")

        def token_stream(documents: Any) -> TokenStream:
            return TokenStream(
                documents,
                column=text_column,
                encode=encode,
                sequence_length=self.sequence_length,
            )

        count = whole_number("eval_samples", eval_samples or 0, at_least=0)
        self._train = token_stream(rows.skip(count))
        self._eval = None
        if count:
            self._eval = list(token_stream(rows.take(count))) or None
        return vocab_size

    def loss(self, model: nn.Module, batch: InputsAndTargets) -> Tensor:
        """The mean cross entropy of the next tokens; for experts in training, also their balance.

        Args:
            model: The model.
            batch: Tokens 0 … T-1 and 1 … T, each int64 (B, T).
        """
        inputs_BT, targets_BT = batch
        uses_linear_loss = self._uses_linear_loss(model, inputs_BT)
        inner = _inner(model)
        if isinstance(inner, MixtureGPT) and inner.training:
            return model(inputs_BT, targets_BT, uses_linear_loss)
        if isinstance(inner, GPT) and uses_linear_loss:
            return model(inputs_BT, targets_BT)
        logits_BTV = model(inputs_BT)
        return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    def _uses_linear_loss(self, model: nn.Module, inputs_BT: Tensor) -> bool:
        """Whether the model computes the loss from its last layer's input, without all logits."""
        wanted = self.linear_loss
        if wanted is None:
            wanted = inputs_BT.is_cuda and self.vocab_size >= LARGE_VOCABULARY
        inner = _inner(model)
        return wanted and isinstance(inner, (GPT, MixtureGPT)) and inner.has_own_head

    def on_gpu(self) -> LanguageModelling | None:
        """The task with the loss that a GPU computes, where that depends on the device."""
        if self.linear_loss is not None or self.vocab_size < LARGE_VOCABULARY:
            return None
        task = copy.copy(self)
        task.linear_loss = True
        return task

    def on_evaluation(self, model: nn.Module, log: EvaluationLog) -> None:
        """Log a sample of what the model writes."""
        log_sample(self, model, log)

    @same_for_every_row
    def items(self, batch: InputsAndTargets) -> int | Tensor:
        """The number of tokens."""
        _, targets_BT = batch
        return targets_BT.numel()

    def metrics(self, model: nn.Module, batch: InputsAndTargets) -> dict[str, Tensor]:
        """The loss, and for text of known size the bits for each byte."""
        loss = self.loss(model, batch)
        if self.bytes_per_token is None:
            return {"loss": loss}
        bits_per_token = loss / math.log(2)
        return {"loss": loss, "bits_per_byte": bits_per_token / self.bytes_per_token}

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """The perplexity."""
        return {"perplexity": math.exp(min(means["loss"], MAX_EXPONENT))}

    def tensor_plan(self, model: nn.Module) -> dict[str, str] | None:
        """The plan of the model, without the shared expert if it has none."""
        plan = MIXTURE_PLAN if isinstance(model, MixtureGPT) else TENSOR_PLAN
        has_shared = any(name.endswith(".mlp.shared") for name, _ in model.named_modules())
        if has_shared:
            return dict(plan)
        return {name: split for name, split in plan.items() if ".shared." not in name}

    def heads(self) -> int | None:
        """The number of attention heads."""
        return self.n_heads


def _mean_bytes_per_token(sources: list[TokenSource], eval_sizes: list[int]) -> float | None:
    """The mean over the held-out data of several sources; None if a source's is not known.

    Args:
        sources: The sources.
        eval_sizes: How many sequences of each are held out. If none are, all sources count alike.
    """
    weights = eval_sizes if any(eval_sizes) else [1] * len(sources)
    total = 0.0
    for source, weight in zip(sources, weights, strict=True):
        if weight and source.bytes_per_token is None:
            return None
        total += weight * (source.bytes_per_token or 0.0)
    return total / sum(weights)


def log_sample(task: SplitDataTask, model: nn.Module, log: EvaluationLog) -> None:
    """Log how the model continues the beginning of the held-out data."""
    preprocessor = task.preprocessor()
    data = task.eval_data()
    if isinstance(preprocessor, TextInput) and data is not None:
        inputs_T, _ = data[0]
        log("sample", sample_text(model, preprocessor, inputs_T[:PROMPT_TOKENS]))


def end_tokens(model: nn.Module, tokenizer: Any = None) -> set[int]:
    """The tokens after which a text is over.

    Args:
        model: The model; one of `transformers` names them in its configuration.
        tokenizer: One of the tokenizers library or of `transformers`, which may have one of
            `END_OF_TEXT`.
    """
    token_ids = getattr(getattr(_inner(model), "config", None), "eos_token_id", None)
    ends = set(token_ids) if isinstance(token_ids, list) else {token_ids}
    if tokenizer is not None:
        vocabulary = tokenizer.get_vocab()
        ends |= {vocabulary.get(name) for name in END_OF_TEXT}
    return {token for token in ends if isinstance(token, int)}


def up_to_end(tokens_T: Tensor, ends: set[int]) -> Tensor:
    """The tokens up to the first one that ends the text, which is kept."""
    for index, token in enumerate(tokens_T.tolist()):
        if token in ends:
            return tokens_T[: index + 1]
    return tokens_T


def sample_text(model: nn.Module, preprocessor: TextInput, prompt_T: Tensor) -> str:
    """The text of a prompt and of at most `SAMPLE_TOKENS` tokens after it."""
    ends = end_tokens(model, preprocessor.tokenizer)
    sampled_T = sample_tokens(model, preprocessor, prompt_T, length=preprocessor.longest, ends=ends)
    prompt = preprocessor.decode(prompt_T.tolist())
    return f"{prompt} → {preprocessor.decode(sampled_T.tolist())}"


def sample_tokens(
    model: nn.Module,
    arguments: Callable[[Tensor], Any],
    prompt_T: Tensor,
    *,
    length: int,
    ends: set[int],
) -> Tensor:
    """`SAMPLE_TOKENS` tokens after a prompt, drawn with torch's global generator, up to an end.

    The model is always called with the same number of tokens, so that every call has one shape.
    Those that are still to come are zeros, which a causal model does not see. It is called equally
    often on every rank, so what comes after the end is drawn too, and left out.

    Args:
        model: The model.
        arguments: The arguments of the model for tokens (1, length).
        prompt_T: The tokens to begin with.
        length: How many tokens the model is called with.
        ends: The tokens that end a text.
    """
    # Not at the top: MLflow's writer imports this file too, and DTensors import for a second.
    from torch.distributed.tensor import DTensor

    tokens_T = prompt_T
    for _ in range(SAMPLE_TOKENS):
        context_T = tokens_T[-length:]
        padded_T = F.pad(context_T, (0, length - len(context_T)))
        logits_BTV = logits_of(call_model(model, arguments(padded_T[None])))
        logits_V = logits_BTV[0, len(context_T) - 1]
        if isinstance(logits_V, DTensor):
            logits_V = logits_V.full_tensor()
        probabilities_V = logits_V.float().cpu().softmax(-1)
        tokens_T = torch.cat([tokens_T, torch.multinomial(probabilities_V, 1)])
    return up_to_end(tokens_T[len(prompt_T) :], ends)


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
