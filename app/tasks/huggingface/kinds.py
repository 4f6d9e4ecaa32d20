"""The kinds of models, by name, and which of them a model is.

Those whose data, loss and metrics another task has too are here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from app.data.loader import fetch
from app.data.text import SUFFIXES, find_files
from app.errors import UserError
from app.models.prediction import Preprocessor
from app.tasks.base import EvaluationLog
from app.tasks.huggingface.answers import log_answer
from app.tasks.huggingface.conversations import Conversations, TextPairs, end_of_answer
from app.tasks.huggingface.image_text import ImageText
from app.tasks.huggingface.inputs import (
    ChatInput,
    FittedImages,
    PairsInput,
    PromptInput,
    TextsInput,
    fitted,
    sides_of,
)
from app.tasks.huggingface.kind import (
    PACKED,
    UNPADDED,
    ConfigKeys,
    Kind,
    Settings,
    causal_keys,
    fit_vocabulary,
    label_keys,
    vocabulary_keys,
)
from app.tasks.huggingface.labelled_text import LabelledText
from app.tasks.huggingface.masked import MaskedLM
from app.tasks.huggingface.model import ModelSource, is_in_table
from app.tasks.huggingface.pictures_to_text import PicturesToText
from app.tasks.huggingface.preferences import PreferenceLoss, Preferences, split_pairs
from app.tasks.huggingface.questions import QuestionAnswering
from app.tasks.huggingface.segmentation import SemanticSegmentation
from app.tasks.huggingface.speech import CTC, SpeechToText
from app.tasks.huggingface.tagging import TokenClassification
from app.tasks.huggingface.tokenizer import (
    accepted,
    chat_tokenizer,
    open_tokenizer,
    pair_tokenizer,
    preference_tokenizer,
)
from app.tasks.language import LanguageModelling, TextInput, log_sample
from app.tasks.vision import ImageClassification, ImageInput
from strategies.context.apply import ContextPlan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class CausalLM(Kind, LanguageModelling):
    """The next token of running text."""

    name = "causal_lm"
    model_class = "AutoModelForCausalLM"
    table = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    options = ("tokenizer", "token_dtype", "sequence_length")
    default_length = 256
    adapter_type = "CAUSAL_LM"
    has_parallel_head = True
    rows = UNPADDED
    splits_sequence = True

    def __init__(self, settings: Settings, *, token_dtype: str | None = None) -> None:
        data = settings.data
        has_token_files = any(path.suffix in SUFFIXES for path in find_files(data))
        if has_token_files and settings.vocab_size is None:
            raise UserError(
                "task_args.config.vocab_size is needed with token files; write the tokenizer's"
            )
        LanguageModelling.__init__(
            self,
            data=data,
            tokenizer=settings.tokenizer_path,
            token_dtype="uint16" if token_dtype is None else token_dtype,
            vocab_size=settings.vocab_size if has_token_files else None,
            sequence_length=settings.sequence_length,
            eval_samples=settings.eval_samples,
            # Its model is not used.
            d_model=2,
            n_layers=1,
            n_heads=1,
        )
        self.tokenizer = settings.tokenizer
        keys = causal_keys(settings.base)
        if settings.vocab_size is None:
            keys["vocab_size"] = self.vocab_size
        self.config_keys = keys | fit_vocabulary(settings, self.vocab_size, keys)

    @staticmethod
    def open_tokenizer(source: ModelSource, path: str) -> Any:
        """The library's tokenizer, without padding."""
        return open_tokenizer(source, path, padded=False)

    def arguments(self, inputs: Tensor) -> dict[str, Any]:
        """The model's arguments for tokens (B, T)."""
        return {"input_ids": inputs, **self.keywords}

    def model_input(self, config: PreTrainedConfig) -> Preprocessor | None:
        """Texts to continue; None for token files, whose text is not known."""
        if not isinstance(self._input, TextInput):
            return None
        return replace(self._input, keyword="input_ids", keywords=dict(self.keywords))

    def log_example(self, task: Any, model: nn.Module, log: EvaluationLog) -> None:
        """Log a sample of what the model writes."""
        log_sample(task, model, log)


class Instructions(Kind, Conversations):
    """The assistant's messages of conversations, several of which share a row."""

    name = "instructions"
    model_class = CausalLM.model_class
    table = CausalLM.table
    options = ("tokenizer", "sequence_length")
    default_length = 512
    adapter_type = CausalLM.adapter_type
    has_parallel_head = True
    rows = PACKED

    def __init__(self, settings: Settings) -> None:
        Conversations.__init__(
            self,
            data=settings.data,
            tokenizer=settings.tokenizer,
            sequence_length=settings.sequence_length,
            eval_samples=settings.eval_samples,
        )
        self.tokenizer = settings.tokenizer
        self.sequence_length = settings.sequence_length
        self.config_keys = _answering_keys(settings)
        self._makes_mask = False

    @staticmethod
    def open_tokenizer(source: ModelSource, path: str) -> Any:
        """The library's tokenizer, with a chat template."""
        return chat_tokenizer(source, path)

    @classmethod
    def made_up(cls, words: Sequence[str], args: Mapping[str, Any], *, classes: int) -> Any:
        """A conversation with a long answer."""
        answer = {"role": "assistant", "content": " ".join(words)}
        return {"messages": [{"role": "user", "content": "?"}, answer]}

    def prepare(self, structure: Any, *, attends_fully: bool) -> None:
        """Choose how attention is kept inside a conversation.

        The mask is made here if the model takes torch's attention: the library would find out where
        positions begin anew, and the host would wait for the GPU.
        """
        if not accepted(["position_ids"], structure):
            raise UserError(
                f"{structure.config.model_type} takes no position_ids, "
                "so conversations cannot share a row"
            )
        is_sdpa = structure.config._attn_implementation == "sdpa"
        self._makes_mask = is_sdpa and attends_fully

    def arguments(self, inputs: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """The model's arguments for tokens and positions, (B, T) each."""
        tokens_BT, positions_BT = inputs
        arguments = {"input_ids": tokens_BT, "position_ids": positions_BT, **self.keywords}
        if self._makes_mask:
            conversation_BT = (positions_BT == 0).cumsum(1)
            is_same_B1TT = conversation_BT[:, None, :, None] == conversation_BT[:, None, None]
            arguments["attention_mask"] = is_same_B1TT.tril()
        return arguments

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Questions to answer."""
        return ChatInput(
            tokenizer=self.tokenizer,
            longest=self.sequence_length,
            keyword="input_ids",
            keywords=dict(self.keywords),
            end=end_of_answer(self.tokenizer),
        )

    def log_example(self, task: Any, model: nn.Module, log: EvaluationLog) -> None:
        """Log the answer to a held-out question."""
        log_answer(task, model, log)


class PreferencePairs(Kind, Preferences):
    """Which of two answers is better."""

    name = "preferences"
    model_class = CausalLM.model_class
    table = CausalLM.table
    options = ("tokenizer", "sequence_length", "dpo")
    default_length = 1024
    adapter_type = CausalLM.adapter_type
    has_parallel_head = True
    rows = UNPADDED
    splits_sequence = True

    def __init__(self, settings: Settings, *, dpo: Any = None) -> None:
        Preferences.__init__(
            self,
            data=settings.data,
            tokenizer=settings.tokenizer,
            longest=settings.sequence_length,
            loss=PreferenceLoss.of(dpo),
            eval_samples=settings.eval_samples,
        )
        self.tokenizer = settings.tokenizer
        self.sequence_length = self.longest
        self.tokens_per_sample = self.mean_tokens
        self.config_keys = _answering_keys(settings)

    @staticmethod
    def open_tokenizer(source: ModelSource, path: str) -> Any:
        """The library's tokenizer, with a chat template and an end of text."""
        return preference_tokenizer(source, path)

    @classmethod
    def made_up(cls, words: Sequence[str], args: Mapping[str, Any], *, classes: int) -> Any:
        """A pair of long answers."""
        text = " ".join(words)
        return {"prompt": "?", "chosen": text, "rejected": text}

    def arguments(self, inputs: Tensor) -> dict[str, Any]:
        """The model's arguments for tokens (N, 2, T): it takes rows one by one."""
        return {"input_ids": inputs.flatten(0, -2), **self.keywords}

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Questions or prompts to answer."""
        end = end_of_answer(self.tokenizer) if self.has_messages else self.tokenizer.eos_token
        return (ChatInput if self.has_messages else PromptInput)(
            tokenizer=self.tokenizer,
            longest=self.sequence_length,
            keyword="input_ids",
            keywords=dict(self.keywords),
            end=end,
        )

    def log_example(self, task: Any, model: nn.Module, log: EvaluationLog) -> None:
        """Log the answer to a held-out question."""
        log_answer(task, model, log)

    def split_context(self, plan: ContextPlan) -> ContextPlan:
        """A plan for context parallelism, for batches of pairs."""
        return split_pairs(plan)


def _answering_keys(settings: Settings) -> ConfigKeys:
    """The keys of a model that answers, which its tokenizer decides."""
    return causal_keys(settings.base) | vocabulary_keys(settings, _ends(settings.tokenizer))


def _ends(tokenizer: Any) -> dict[str, Any]:
    """The tokens of padding and of a text's end, by their keys in a model's configuration."""
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


class TextToText(Kind, TextPairs):
    """Texts made from texts, by an encoder and a decoder."""

    name = "seq2seq_lm"
    model_class = "AutoModelForSeq2SeqLM"
    table = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"
    options = ("tokenizer", "sequence_length", "text", "label")
    default_length = 512
    adapter_type = "SEQ_2_SEQ_LM"
    is_encoder_decoder = True
    has_parallel_head = True

    def __init__(
        self, settings: Settings, *, text: str | None = None, label: str | None = None
    ) -> None:
        tokenizer = settings.tokenizer
        special_tokens = _ends(tokenizer)
        start = getattr(settings.base, "decoder_start_token_id", None)
        if settings.source.folder is None or start is None:
            start = tokenizer.pad_token_id
            special_tokens["decoder_start_token_id"] = start
        TextPairs.__init__(
            self,
            data=settings.data,
            text="text" if text is None else text,
            label="target" if label is None else label,
            tokenizer=tokenizer,
            longest=settings.sequence_length,
            start=start,
            eval_samples=settings.eval_samples,
        )
        self.tokenizer = tokenizer
        self.config_keys = vocabulary_keys(settings, special_tokens)

    @staticmethod
    def open_tokenizer(source: ModelSource, path: str) -> Any:
        """The library's tokenizer, with padding and an end of text."""
        return pair_tokenizer(source, path)

    def arguments(self, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
        """The model's arguments for tokens, their mask and the decoder's tokens."""
        tokens_BS, mask_BS, decoder_BT = inputs
        return {
            "input_ids": tokens_BS,
            "attention_mask": mask_BS,
            "decoder_input_ids": decoder_BT,
            **self.keywords,
        }

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Texts to make others from."""
        return PairsInput(
            tokenizer=self.tokenizer,
            longest=self._train.longest,
            classes=[],
            keywords=dict(self.keywords),
            start=self._train.start,
        )

    def log_example(self, task: Any, model: nn.Module, log: EvaluationLog) -> None:
        """Log what the model makes of a held-out text."""
        log_answer(task, model, log)


class TextClassification(Kind, LabelledText):
    """Which class a text belongs to."""

    name = "sequence_classification"
    model_class = "AutoModelForSequenceClassification"
    table = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
    options = ("tokenizer", "sequence_length", "text", "label")
    default_length = 512
    adapter_type = "SEQ_CLS"
    may_have_new_head = True
    has_classes = True

    def __init__(
        self, settings: Settings, *, text: str | None = None, label: str | None = None
    ) -> None:
        tokenizer = settings.tokenizer
        LabelledText.__init__(
            self,
            data=settings.data,
            text="text" if text is None else text,
            label="label" if label is None else label,
            tokenizer=tokenizer,
            longest=settings.sequence_length,
            eval_samples=settings.eval_samples,
        )
        self.tokenizer = tokenizer
        keys = {**label_keys(self.classes), "pad_token_id": tokenizer.pad_token_id}
        if settings.vocab_size is None:
            keys["vocab_size"] = len(tokenizer)
        self.config_keys = keys | fit_vocabulary(settings, len(tokenizer), keys)

    def arguments(self, inputs: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """The model's arguments for tokens and their mask, (B, T) each."""
        tokens_BT, mask_BT = inputs
        return {"input_ids": tokens_BT, "attention_mask": mask_BT, **self.keywords}

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Texts to classify."""
        return TextsInput(
            tokenizer=self.tokenizer,
            longest=self._train.longest,
            classes=list(self.classes),
            keywords=dict(self.keywords),
        )


class Images(Kind, ImageClassification):
    """Which class an image belongs to."""

    name = "image_classification"
    model_class = "AutoModelForImageClassification"
    table = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"
    options = ("augment_shift",)
    adapter_type = "SEQ_CLS"
    may_have_new_head = True
    has_classes = True

    def __init__(self, settings: Settings, *, augment_shift: int | None = None) -> None:
        ImageClassification.__init__(
            self,
            data=settings.data,
            augment_shift=0 if augment_shift is None else augment_shift,
            eval_samples=settings.eval_samples,
            # Its model is not used.
            model="mlp",
            model_args={"hidden": []},
        )
        self.config_keys = label_keys([str(number) for number in range(self.classes)])
        if settings.source.folder is None:
            batch_images, _ = fetch(self.train_data(), [(0, 0)])
            _, channels, height, width = batch_images.shape
            self.config_keys["image_size"] = height if height == width else [height, width]
            self.config_keys["num_channels"] = channels
        self._config: Any = settings.base

    def prepare(self, structure: Any, *, attends_fully: bool) -> None:
        """Check that patches cover the images."""
        self._config = structure.config
        patch = getattr(self._config, "patch_size", None)
        sides = sides_of(self._config)
        if not isinstance(patch, int) or sides is None:
            return
        if any(side % patch for side in sides):  # the model would ignore the remaining pixels
            raise UserError(
                f"task_args.config.patch_size is {patch}, "
                f"which does not divide images of {sides[0]}×{sides[1]}; write one that does"
            )

    def arguments(self, inputs: Tensor) -> dict[str, Any]:
        """The model's arguments for images (n, channels, height, width)."""
        channels = getattr(self._config, "num_channels", inputs.shape[1])
        return {"pixel_values": fitted(inputs, channels, sides_of(self._config))}

    def model_input(self, config: PreTrainedConfig) -> FittedImages:
        """Images to classify."""
        images = cast(ImageInput, self._input)
        return FittedImages(**vars(images), channels=config.num_channels, sides=sides_of(config))

    def write_files(self, folder: Path) -> None:
        """Write how images are prepared, as the library's processors read it."""
        text = json.dumps(self.model_input(self._config).for_transformers(), indent=1)
        (folder / "preprocessor_config.json").write_text(text)


KINDS: dict[str, type[Kind]] = {
    kind.name: kind
    for kind in (
        CausalLM,
        Instructions,
        PreferencePairs,
        TextToText,
        TextClassification,
        Images,
        MaskedLM,
        TokenClassification,
        QuestionAnswering,
        CTC,
        SpeechToText,
        ImageText,
        PicturesToText,
        SemanticSegmentation,
    )
}
"""The kinds by what `task_args.kind` calls them. The first ones are what models are used for."""


def choose(source: ModelSource, name: str) -> type[Kind]:
    """The kind of model to train.

    Args:
        source: The model.
        name: `task_args.kind`. For auto it is what the configuration says the model was, else what
            such models are mostly used for.

    Raises:
        UserError: The library has no such model of this kind; or the model is made of several, and
            has no vocabulary of its own.
    """
    base = source.base
    possible = [kind for kind in KINDS.values() if is_in_table(kind.table, base.model_type)]
    if getattr(base, "is_encoder_decoder", False):
        possible = [kind for kind in possible if kind.is_encoder_decoder]
    names = [kind.name for kind in possible]
    if not possible or name not in ("auto", *names):
        made_for = " or ".join(names) or "none of the kinds"
        raise UserError(
            f"task_args.kind is {name}, but {base.model_type} is made for {made_for}; write another"
        )
    kind = _guess(base, possible) if name == "auto" else KINDS[name]
    if kind.default_length is not None and not hasattr(kind.of_texts(base), "vocab_size"):
        parts = ", ".join(base.sub_configs) or "others"
        raise UserError(
            f"task_args.model: {base.model_type} is made of several models ({parts}); "
            "give the one of the text"
        )
    return kind


def _guess(base: PreTrainedConfig, possible: list[type[Kind]]) -> type[Kind]:
    """The kind that a configuration names, else classification for encoders, else the first."""
    guesses = [kind for kind in possible if kind.is_guessed] or possible
    architecture = (base.architectures or [""])[0].replace("LMHeadModel", "ForCausalLM")
    for kind in guesses:
        if kind.is_architecture(architecture):
            return kind
    if is_in_table(MaskedLM.table, base.model_type) and TextClassification in guesses:
        return TextClassification
    return guesses[0]


def takers(option: str) -> list[str]:
    """The names of the kinds that have a use for an argument of the task."""
    return [name for name, kind in KINDS.items() if option in kind.options]
