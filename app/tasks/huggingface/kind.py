"""What a kind of model of `transformers` is trained on, what it answers, and how that is judged.

    batch     (inputs, targets): the model's arguments by the library's names, and what its answer
              is compared with
    loss      a mean over the batch's items (`items`: rows, or the targets that are learnt)
    metrics   means over the same items. Means of counts, such as `_words` and `_wrong_words`, are
              not shown, but `derived` makes ratios of them

A mean over items, weighted by items, is the mean over all workers and batches, and the ratio of two
such means is that of the sums: so every figure is that of one device with all the data. A kind is a
class that says this, and what the library and the task must know of it: the class's attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from app.errors import UserError
from app.models.prediction import Preprocessor, logits_of
from app.tasks.base import EvaluationLog
from app.tasks.huggingface.model import ModelSource
from app.tasks.huggingface.tokenizer import open_tokenizer
from app.tasks.parts import SplitDataTask
from strategies.context.apply import ContextPlan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ConfigKeys = dict[str, Any]
"""Keys of the model's configuration that follow from the data."""
PADDED = "padded"
"""Rows are padded, with a mask."""
UNPADDED = "unpadded"
"""Rows have no padding, or only such as no token attends to."""
PACKED = "packed"
"""Rows hold several texts, each attending to itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the data of a kind depends on.

    Args:
        source: The model.
        base: Its configuration so far.
        data: `task_args.data`.
        eval_samples: How many samples are held out; None means the default.
        vocab_size: The size of its vocabulary if that is decided; None if the data decides it.
        tokenizer_path: `bytes` or the path of a tokenizers file; "" for a model without texts.
        tokenizer: The library's tokenizer for it; None for a model without texts.
        sequence_length: How many tokens a sample has, or at most; 0 for a model without texts.
    """

    source: ModelSource
    base: PreTrainedConfig
    data: Any
    eval_samples: int | None
    vocab_size: int | None = None
    tokenizer_path: str = ""
    tokenizer: Any = None
    sequence_length: int = 0


class Kind(SplitDataTask):
    """A kind of model: its data, loss and metrics. It has no model of its own.

    Wherever a model is an argument, calling it with the inputs of a batch gives `answer`.

    The `__init__` of a subclass takes Settings and those of the task's arguments that `options`
    names but for the tokenizer and the length. It sets the attributes of SplitDataTask and these:

    Attributes:
        config_keys: Keys of the model's configuration that the data decides.
        sequence_length: Tokens of every sample; None if samples differ.
        keywords: Further arguments of the model, the same in every call.
        tokenizer: The library's tokenizer; None for a model without texts.
        untrained: Parts of the model, by name, of which nothing is learnt.
    """

    name: ClassVar[str]
    """What `task_args.kind` calls it."""
    model_class: ClassVar[str]
    """The library's class that makes its models."""
    table: ClassVar[str]
    """The library's table of the model types that it has such models of."""
    options: ClassVar[tuple[str, ...]] = ()
    """Arguments of the task that not every kind has a use for, and this one has."""
    default_length: ClassVar[int | None] = None
    """Tokens of a text; None for a model without texts."""
    text_key: ClassVar[str] = ""
    """The key of the configuration below which that of the texts is; "" if it is the whole."""
    adapter_type: ClassVar[str | None] = None
    """What peft calls it; None if it has no name for it."""
    is_guessed: ClassVar[bool] = True
    """Whether `task_args.kind=auto` may mean it."""
    is_encoder_decoder: ClassVar[bool] = False
    may_have_new_head: ClassVar[bool] = False
    """Whether pretrained weights may lack those of the last layer, whose outputs are the data's."""
    has_parallel_head: ClassVar[bool] = False
    """Whether the loss can be computed where each worker has a part of the logits."""
    rows: ClassVar[str] = PADDED
    """PADDED, UNPADDED or PACKED."""
    has_classes: ClassVar[bool] = False
    """Whether the data decides how many outputs the last layer has."""
    reads_files: ClassVar[bool] = False
    """Whether the data names files, such as recordings, which cannot be made up."""
    splits_sequence: ClassVar[bool] = False
    """Whether context parallelism can split its samples."""

    gathers: bool = False
    config_keys: ConfigKeys
    sequence_length: Any = None
    keywords: Mapping[str, Any] = {}
    tokenizer: Any = None
    untrained: tuple[str, ...] = ()

    @staticmethod
    def open_tokenizer(source: ModelSource, path: str) -> Any:
        """The library's tokenizer, as this kind needs it.

        Args:
            source: The model.
            path: `bytes` or the path of a tokenizers file.
        """
        return open_tokenizer(source, path, padded=True)

    @classmethod
    def made_up(cls, words: Sequence[str], args: Mapping[str, Any], *, classes: int) -> Any:
        """A line of JSON data of the longest length, with which runs are planned without data.

        Args:
            words: As many as a sample has tokens.
            args: The task's arguments, which may name keys.
            classes: How many classes there are.

        Returns:
            A JSON value; None if the kind's data has another form.
        """
        return None

    @classmethod
    def of_texts(cls, config: Any) -> Any:
        """The part of a configuration, or of a mapping of its keys, that is for texts."""
        if not cls.text_key:
            return config
        if isinstance(config, Mapping):
            return config.get(cls.text_key) or {}
        return getattr(config, cls.text_key, config)

    @classmethod
    def is_architecture(cls, name: str) -> bool:
        """Whether a class of the library, such as BertForMaskedLM, is a model of this kind."""
        return name.endswith(cls.model_class.removeprefix("AutoModel"))

    def prepare(self, structure: Any, *, attends_fully: bool) -> None:
        """Look at the model, before it is called.

        Args:
            structure: The model on the meta device.
            attends_fully: Whether every layer attends to all earlier tokens.

        Raises:
            UserError: The model does not fit the kind.
        """

    def arguments(self, inputs: Any) -> dict[str, Any]:
        """The model's arguments.

        Args:
            inputs: Those of a batch.
        """
        return {**inputs, **self.keywords}

    def answer(self, output: Any) -> Any:
        """What the loss and the metrics need of the model's output."""
        return logits_of(output)

    def model_input(self, config: PreTrainedConfig) -> Preprocessor | None:
        """What converts a user's inputs to the model's arguments, and reads its output.

        Args:
            config: The model's configuration.
        """
        return None

    def write_files(self, folder: Path) -> None:
        """Write what the library's folder of a model has besides its configuration and tokenizer.

        Args:
            folder: The folder.
        """

    def log_example(self, task: Any, model: nn.Module, log: EvaluationLog) -> None:
        """Log at an evaluation what the model answers.

        Args:
            task: The task whose kind this is.
            model: The model.
            log: Logs it.
        """

    def split_context(self, plan: ContextPlan) -> ContextPlan:
        """A plan for context parallelism, for the batches of this kind."""
        return plan


# --- what the data decides ---


def causal_keys(base: PreTrainedConfig) -> ConfigKeys:
    """The keys without which models that can be encoders too look at a text in both directions."""
    declared = base.to_dict()
    return {key: True for key in ("is_decoder", "causal") if key in declared}


def label_keys(classes: list[str]) -> ConfigKeys:
    """The keys of a classifier's classes."""
    return {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def vocabulary_keys(settings: Settings, special_tokens: ConfigKeys) -> ConfigKeys:
    """The keys of a vocabulary that is the tokenizer's.

    Args:
        settings: The model, its vocabulary and its tokenizer.
        special_tokens: The keys of special tokens, for a model without weights.

    Raises:
        UserError: The model has fewer tokens than the tokenizer.
    """
    tokens = len(settings.tokenizer)
    derived = dict(special_tokens) if settings.source.folder is None else {}
    if settings.vocab_size is None:
        derived["vocab_size"] = tokens
    return derived | fit_vocabulary(settings, tokens, derived)


def fit_vocabulary(settings: Settings, tokens: int, derived: ConfigKeys) -> ConfigKeys:
    """Keys for special tokens that the vocabulary of a model without weights does not have.

    They are set to none, or for padding that must be there to the last token.

    Args:
        settings: The model and its configuration.
        tokens: The size of the tokenizer's vocabulary.
        derived: What the data decides so far.

    Raises:
        UserError: The model has fewer tokens than the tokenizer.
    """
    base = settings.base
    vocab_size = derived.get("vocab_size", base.vocab_size)
    if vocab_size < tokens:
        raise UserError(
            f"the model's vocab_size is {vocab_size}, but the tokenizer has {tokens} tokens; "
            f"write task_args.config.vocab_size={tokens} or more, "
            "or the model's own tokenizer as task_args.tokenizer"
        )
    if settings.source.folder is not None:
        return {}
    fields_of_ints = {
        field.name for field in dataclasses.fields(base) if "None" not in str(field.type)
    }
    changed: ConfigKeys = {}
    for key in base.to_dict():
        if not key.endswith("_token_id") or key in derived:
            continue
        token = getattr(base, key)
        if not isinstance(token, int) or token < vocab_size:
            continue
        if key not in fields_of_ints:
            changed[key] = None
        elif key == "pad_token_id":
            changed[key] = vocab_size - 1
    return changed
