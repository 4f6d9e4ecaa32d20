"""Any language model, text classifier or image classifier of Hugging Face's `transformers`.

Language models may be causal, instructed, or have an encoder and a decoder.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from app.data.loader import tensors
from app.errors import UserError
from app.models.prediction import Preprocessor
from app.tasks.base import Batch, EvaluationLog
from app.tasks.huggingface import balance, plan
from app.tasks.huggingface import data as reading
from app.tasks.huggingface import lora as lora_options
from app.tasks.huggingface.answers import log_answer
from app.tasks.huggingface.conversations import end_of_answer
from app.tasks.huggingface.inputs import (
    ChatInput,
    FittedImages,
    PairsInput,
    PromptInput,
    TextsInput,
    fitted,
)
from app.tasks.huggingface.model import (
    KINDS,
    Recipe,
    choose_kind,
    find_model,
    meta_model,
    position_limits,
    resolve_config,
    takes_registered_attention,
    unmasked_attention,
)
from app.tasks.huggingface.preferences import PreferenceLoss, Preferences, split_pairs
from app.tasks.language import TextInput, log_sample
from app.tasks.parts import SplitDataTask, one_of, whole_number
from app.tasks.vision import ImageInput
from strategies.context.apply import ContextPlan
from strategies.mixtures import find_mixtures

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

GENERATION = "generation_config.json"
DEFAULT_LENGTHS = {
    "causal_lm": 256,
    "instructions": 512,
    "preferences": 1024,
    "seq2seq_lm": 512,
    "sequence_classification": 512,
}
"""Tokens of a sample for each kind of model of texts."""
TEXT_KINDS = tuple(DEFAULT_LENGTHS)
ONLY_FOR = {
    "tokenizer": TEXT_KINDS,
    "token_dtype": ("causal_lm",),
    "sequence_length": TEXT_KINDS,
    "text": ("seq2seq_lm", "sequence_classification"),
    "label": ("seq2seq_lm", "sequence_classification"),
    "augment_shift": ("image_classification",),
    "dpo": ("preferences",),
}
"""The kinds of model that have a use for an argument, for arguments that not all kinds have."""


class HuggingFace(SplitDataTask):
    """A model of `transformers` by its configuration, on the data of its kind.

    What the data decides (the vocabulary's size, the number of classes, the padding token) is set
    in the configuration unless written there. Trained weights are float32.

    Args:
        model: A model type (`llama`, `gpt2`, `qwen2`, `bert`, `vit`, …), a folder with a
            config.json, or an id on the hub (looked for on this machine first).
        config: Keys of the model's configuration to set, such as hidden_size or num_hidden_layers.
        kind: `causal_lm`, `instructions`, `preferences`, `seq2seq_lm`, `sequence_classification`,
            `image_classification`, or `auto`: what the configuration says.
        pretrained: Begin from the weights in the folder (or on the hub) instead of new ones. A
            classifier gets a new head.
        lora: Leave those weights as they are and train adapters beside them (lora.py): a mapping of
            r (default 16), alpha (default 2·r), dropout (default 0), targets (`auto`: every linear
            layer but the last, or names of layers), use_rslora, use_dora, and quantize: `nf4` or
            `int8` keeps the layers with adapters in 4 or 8 bits (quantized.py).
        attention: `sdpa`, `eager`, `flash_attention_2`, … (default: the library's choice).
        eval_samples: How many samples are held out.
        data, tokenizer, token_dtype, sequence_length, text, label, augment_shift, dpo: As the kind
            has them, below.

    Kinds:
        causal_lm: data, token_dtype and sequence_length (default 256) as for language_modelling;
            tokenizer: `bytes` or a tokenizers file (default: the folder's own tokenizer.json, else
            bytes).
        instructions: data: files of JSON lines with `messages`, or `python`, the docstrings of
            Python's own library; the loss is over the assistant's messages. tokenizer as above; its
            chat template, or ChatML if it has none. sequence_length (default 512): tokens of a row,
            which holds several conversations, each attending to itself.
        preferences: data: files of JSON lines with `prompt`, `chosen` and `rejected`, each a text
            or a list of messages (without `prompt` it is what both answers begin with). tokenizer
            as for instructions; sequence_length (default 1024): tokens of a prompt and an answer
            that are used. dpo: a mapping of beta (default 0.1), label_smoothing (default 0) and
            loss_type (`sigmoid`, `hinge` or `ipo`; preferences.py).
        seq2seq_lm (T5, BART): data: a .csv or .parquet file with columns `text` and `target`
            (others: task_args.text and task_args.label); tokenizer as above; sequence_length:
            tokens of either that are used (default: 512).
        sequence_classification: data: a .csv or .parquet file with columns `text` and `label`;
            tokenizer as above; sequence_length: tokens of a text that are used (default: 512, or
            what the model can).
        image_classification: data and augment_shift as for image_classification. A model type gets
            the images' size and channels; with a folder or a hub id images are resized to what its
            configuration says.
    """

    def __init__(
        self,
        *,
        model: str,
        data: str | list[str],
        config: dict[str, Any] | None = None,
        kind: str = "auto",
        pretrained: bool = False,
        lora: dict[str, Any] | None = None,
        attention: str | None = None,
        tokenizer: str | None = None,
        token_dtype: str | None = None,
        sequence_length: int | None = None,
        text: str | None = None,
        label: str | None = None,
        augment_shift: int | None = None,
        dpo: dict[str, Any] | None = None,
        eval_samples: int | None = None,
    ) -> None:
        one_of("kind", kind, ("auto", *KINDS))
        if not isinstance(pretrained, bool):
            raise UserError(f"task_args.pretrained is {pretrained!r}; it must be true or false")
        if config is not None and not isinstance(config, Mapping):
            raise UserError(f"task_args.config is {config!r}; it must be a mapping of key to value")
        written = dict(config or {})
        self.source = find_model(model, weights=pretrained)
        self.kind = choose_kind(self.source, kind)
        self._refuse_arguments_of_other_kinds(
            {
                "tokenizer": tokenizer,
                "token_dtype": token_dtype,
                "sequence_length": sequence_length,
                "text": text,
                "label": label,
                "augment_shift": augment_shift,
                "dpo": dpo,
            }
        )
        preference_loss = PreferenceLoss.of(dpo)
        weights_folder = self.source.folder if pretrained else None
        adapters = _adapters(lora, self.kind, weights_folder)
        # Mistakes in the configuration are reported before the data is read.
        base = resolve_config(self.source, derived={}, written=written)

        self.tokenizer: Any = None  # for texts the library's PreTrainedTokenizerFast
        self._data: SplitDataTask
        if self.kind == "image_classification":
            self._data, derived = reading.images(
                self.source, data, augment_shift=augment_shift, eval_samples=eval_samples
            )
        else:
            settings = self._text_settings(
                base,
                tokenizer,
                pretrained=pretrained,
                sequence_length=sequence_length,
                vocab_size_is_written="vocab_size" in written,
                eval_samples=eval_samples,
            )
            self.tokenizer = settings.tokenizer
            if self.kind in ("causal_lm", "instructions"):  # the only kinds with one length
                self.sequence_length = settings.sequence_length
            if self.kind == "preferences":
                pairs, derived = reading.preferences(settings, data, preference_loss)
                self._data = pairs
                self.sequence_length = pairs.longest
                self.tokens_per_sample = pairs.mean_tokens
            else:
                self._data, derived = self._read_texts(
                    settings, data, token_dtype=token_dtype, text=text, label=label
                )
        self._train = self._data.train_data()
        self._eval = self._data.eval_data()
        self.unit = self._data.unit
        self.float_output = self._data.float_output
        self.config = resolve_config(self.source, derived=derived, written=written)
        self.recipe = Recipe(
            kind=self.kind,
            config=self.config,
            folder=weights_folder,
            attention=attention,
            adapters=adapters,
            quantize=lora_options.quantize_method(lora),
        )
        self._prepare_model()

    def _prepare_model(self) -> None:
        """Decide, from the model's structure, how the recipe's model is built and called.

        Raises:
            UserError: The configuration does not make a model, or one that the data does not fit.
        """
        self._build = self.recipe.build
        structure = self.structure()
        forward_parameters = inspect.signature(structure.forward).parameters
        self._keywords: dict[str, Any] = {}
        if "use_cache" in forward_parameters:
            # Training has no use for keys and values that are kept for the next token.
            self._keywords["use_cache"] = False
        if self.kind == "instructions" and "position_ids" not in forward_parameters:
            raise UserError(
                f"{self.config.model_type} takes no position_ids, "
                "so conversations cannot share a row"
            )
        self._choose_attention(structure)
        self._add_balance_loss(structure)
        self._heads = plan.heads(self.config, self.tensor_plan(structure))
        self._check_patches()

    def _refuse_arguments_of_other_kinds(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            if value is not None and self.kind not in ONLY_FOR[name]:
                kinds = " and ".join(ONLY_FOR[name])
                raise UserError(
                    f"task_args.{name} is for {kinds}, but this model is for {self.kind}; "
                    "leave it out"
                )

    def _text_settings(
        self,
        base: PreTrainedConfig,
        tokenizer: str | None,
        *,
        pretrained: bool,
        sequence_length: int | None,
        vocab_size_is_written: bool,
        eval_samples: int | None,
    ) -> reading.TextSettings:
        """What the data of a model of texts depends on.

        Args:
            base: The model's configuration before the data is read.
            tokenizer: `task_args.tokenizer`.
            pretrained: Whether training starts from the folder's weights.
            sequence_length: `task_args.sequence_length`.
            vocab_size_is_written: Whether `task_args.config` has the size of the vocabulary.
            eval_samples: `task_args.eval_samples`.
        """
        path = reading.choose_tokenizer(self.source, tokenizer, pretrained=pretrained)
        if self.kind == "instructions":
            opened = reading.chat_tokenizer(self.source, path)
        elif self.kind == "preferences":
            opened = reading.preference_tokenizer(self.source, path)
        elif self.kind == "seq2seq_lm":
            opened = reading.pair_tokenizer(self.source, path)
        else:
            padded = self.kind == "sequence_classification"
            opened = reading.open_tokenizer(self.source, path, padded=padded)
        has_vocab_size = self.source.folder is not None or vocab_size_is_written
        return reading.TextSettings(
            source=self.source,
            base=base,
            vocab_size=int(base.vocab_size) if has_vocab_size else None,
            tokenizer_path=path,
            tokenizer=opened,
            sequence_length=_length(self.kind, sequence_length, base),
            eval_samples=eval_samples,
        )

    def _read_texts(
        self,
        settings: reading.TextSettings,
        data: Any,
        *,
        token_dtype: str | None,
        text: str | None,
        label: str | None,
    ) -> tuple[SplitDataTask, reading.Derived]:
        match self.kind:
            case "causal_lm":
                return reading.running_text(settings, data, token_dtype=token_dtype)
            case "instructions":
                return reading.instructions(settings, data)
            case "seq2seq_lm":
                return reading.text_pairs(settings, data, text=text, label=label)
            case _:
                return reading.labelled_text(settings, data, text=text, label=label)

    def _choose_attention(self, structure: PreTrainedModel) -> None:
        """Choose how attention is masked.

        Rows of one text need no mask. For rows of several conversations the mask is made here if
        the model takes torch's attention: the library would find out where positions begin anew,
        and the host would wait for the GPU.
        """
        self._makes_mask = False
        if self.kind == "instructions":
            is_sdpa = structure.config._attn_implementation == "sdpa"
            self._makes_mask = is_sdpa and self._attends_fully()
            return
        is_unpadded = self.kind in ("causal_lm", "preferences")  # or padded where none attends to
        can_be_unmasked = is_unpadded and takes_registered_attention(structure)
        if can_be_unmasked and self._attends_fully():
            self._build = replace(self.recipe, attention=unmasked_attention()).build

    def _attends_fully(self) -> bool:
        """Whether every layer attends to all earlier tokens."""
        try:
            plan.require_full_attention(self.config, self.sequence_length)
        except UserError:
            return False
        return True

    def _add_balance_loss(self, structure: PreTrainedModel) -> None:
        """If the configuration asks for it, train the balance of mixtures of experts.

        Raises:
            UserError: The balance of a mixture cannot be computed.
        """
        is_wanted = getattr(self.config, "output_router_logits", False)
        mixtures = find_mixtures(structure) if is_wanted else []
        self._balanced_layers = len(mixtures)
        if mixtures:
            self._experts = mixtures[0].count
            balance.sum_over_layers(lambda: structure)  # to find out here whether that is possible
            self._build = partial(balance.sum_over_layers, self._build)

    def _check_patches(self) -> None:
        patch = getattr(self.config, "patch_size", None)
        sides = _sides(self.config)
        if not isinstance(patch, int) or sides is None:
            return
        if any(side % patch for side in sides):  # the model would ignore the remaining pixels
            raise UserError(
                f"task_args.config.patch_size is {patch}, "
                f"which does not divide images of {sides[0]}×{sides[1]}; write one that does"
            )

    # --- the task ---

    def build_trained(self) -> nn.Module:
        """The model with the library's attention, which takes masks: people's rows are padded."""
        return self.recipe.build()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of the data's task, and the balance of experts if that is trained."""
        logits_model = self._logits_model(model)
        self._data.recorded = self.recorded
        if not self._balanced_layers:
            return self._data.loss(logits_model, batch)
        tokens = tensors(batch)[0]
        sequences = tokens.numel() // tokens.size(-1)
        weight = float(getattr(self.config, "router_aux_loss_coef", 0.0))
        with balance.summed(sequences, self._experts, tokens.device):
            loss = self._data.loss(logits_model, batch)
            return loss + weight * balance.balance_loss(self._balanced_layers)

    @property
    def items(self) -> Callable[[Batch], int | Tensor]:  # type: ignore[override]
        """The data's own method, which knows what the loss is the mean of."""
        return self._data.items

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The metrics of the data's task."""
        return self._data.metrics(self._logits_model(model), batch)

    def reference(self, model: nn.Module, batch: Batch) -> Tensor:
        """What the data's task needs to know of the model before the first step."""
        return self._data.reference(self._logits_model(model), batch)

    def _logits_model(self, model: nn.Module) -> nn.Module:
        """The model as the data's task calls one, which does nothing but call it."""
        return cast(nn.Module, LogitsModel(self, model))

    def on_evaluation(self, model: nn.Module, log: EvaluationLog) -> None:
        """Log a sample of what a language model writes."""
        if self.kind == "causal_lm":
            log_sample(self, model, log)
        elif self.kind in ("instructions", "preferences", "seq2seq_lm"):
            log_answer(self, model, log)

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """The further metrics of the data's task."""
        return self._data.derived(means)

    def arguments(self, inputs: Any) -> dict[str, Any]:
        """The model's arguments.

        Args:
            inputs: The inputs of a batch.
        """
        match self.kind:
            case "image_classification":
                return {"pixel_values": self.fitted(inputs)}
            case "causal_lm":
                return {"input_ids": inputs, **self._keywords}
            case "preferences":  # the model takes rows one by one
                return {"input_ids": inputs.flatten(0, -2), **self._keywords}
            case "instructions":
                return self._conversation_arguments(*inputs)
            case "seq2seq_lm":
                tokens_BS, mask_BS, decoder_BT = inputs
                return {
                    "input_ids": tokens_BS,
                    "attention_mask": mask_BS,
                    "decoder_input_ids": decoder_BT,
                    **self._keywords,
                }
            case _:
                tokens_BT, mask_BT = inputs
                return {"input_ids": tokens_BT, "attention_mask": mask_BT, **self._keywords}

    def _conversation_arguments(self, tokens_BT: Tensor, positions_BT: Tensor) -> dict[str, Any]:
        arguments = {"input_ids": tokens_BT, "position_ids": positions_BT, **self._keywords}
        if self._makes_mask:
            conversation_BT = (positions_BT == 0).cumsum(1)
            is_same_B1TT = conversation_BT[:, None, :, None] == conversation_BT[:, None, None]
            arguments["attention_mask"] = is_same_B1TT.tril()
        return arguments

    def fitted(self, images: Tensor) -> Tensor:
        """Images (n, channels, height, width) in the size and with the channels of the model."""
        channels = getattr(self.config, "num_channels", images.shape[1])
        return fitted(images, channels, _sides(self.config))

    def preprocessor(self) -> Preprocessor | None:
        """What makes the model's arguments of images, texts or questions."""
        of_data = self._data.preprocessor()
        if isinstance(of_data, ImageInput):
            return FittedImages(
                **vars(of_data), channels=self.config.num_channels, sides=_sides(self.config)
            )
        if isinstance(of_data, TextInput):
            return replace(of_data, keyword="input_ids", keywords=self._keywords)
        match self.kind:
            case "causal_lm":  # token files, whose text is not known
                return None
            case "instructions":
                return ChatInput(
                    tokenizer=self.tokenizer,
                    longest=self.sequence_length,
                    keyword="input_ids",
                    keywords=self._keywords,
                    end=end_of_answer(self.tokenizer),
                )
            case "preferences":
                has_messages = cast(Preferences, self._data).has_messages
                end = end_of_answer(self.tokenizer) if has_messages else self.tokenizer.eos_token
                return (ChatInput if has_messages else PromptInput)(
                    tokenizer=self.tokenizer,
                    longest=self.sequence_length,
                    keyword="input_ids",
                    keywords=self._keywords,
                    end=end,
                )
            case "seq2seq_lm":
                return PairsInput(
                    tokenizer=self.tokenizer,
                    longest=self._train.longest,
                    classes=[],
                    keywords=self._keywords,
                    start=self._train.start,
                )
            case _:
                data = cast(reading.LabelledText, self._data)
                return TextsInput(
                    tokenizer=self.tokenizer,
                    longest=self._train.longest,
                    classes=list(data.classes),
                    keywords=self._keywords,
                )

    def blocks(self, model: nn.Module) -> list[str] | None:
        """The names of the model's layers."""
        return plan.blocks(model)

    def tensor_plan(self, model: nn.Module) -> dict[str, str] | None:
        """The library's plan; None with adapters, so that every layer and adapter is gathered."""
        if self.recipe.adapters is not None:
            return None
        return plan.tensor_plan(model, parallel_head=not self.kind.endswith("classification"))

    def context_plan(self, model: nn.Module) -> ContextPlan | None:
        """How the model is told the positions of its tokens.

        Raises:
            UserError: The model is not a causal one that attends to all earlier tokens.
        """
        if self.kind not in ("causal_lm", "preferences"):
            raise UserError(
                "parallel.cp splits the sequences of causal_lm and preferences, "
                f"but this model is for {self.kind}"
            )
        plan.require_full_attention(self.config, self.sequence_length)

        def keywords(positions_1T: Tensor) -> dict[str, Any]:
            # Without a mask the library would take positions that jump for several sequences.
            mask_1T = positions_1T.new_ones(1, positions_1T.size(1))
            return {"position_ids": positions_1T, "attention_mask": mask_1T}

        context_plan = ContextPlan(keywords)
        return split_pairs(context_plan) if self.kind == "preferences" else context_plan

    def heads(self) -> int | None:
        """The number that the degree of tensor parallelism must divide."""
        return self._heads

    # --- for the export ---

    def structure(self) -> PreTrainedModel:
        """The model on the meta device."""
        return meta_model(self.recipe)

    def write_folder(self, folder: Path) -> None:
        """Write the files of a transformers model but for its weights.

        They are config.json, and what the model has of a tokenizer, a generation configuration and
        an image processor.
        """
        config = type(self.config).from_dict({**self.config.to_dict(), "dtype": "float32"})
        config.architectures = [type(self.structure()).__name__]
        config.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        if self.source.folder is not None:
            generation = self.source.folder / GENERATION
            if generation.is_file():
                shutil.copyfile(generation, folder / GENERATION)
        preprocessor = self.preprocessor()
        if isinstance(preprocessor, FittedImages):
            text = json.dumps(preprocessor.for_transformers(), indent=1)
            (folder / "preprocessor_config.json").write_text(text)


class LogitsModel:
    """A function from the inputs of a batch to the logits of a model of the library.

    Args:
        task: The task, which knows the model's arguments.
        model: The model.
    """

    def __init__(self, task: HuggingFace, model: nn.Module) -> None:
        self.task = task
        self.model = model

    def __call__(self, inputs: Any) -> Tensor:
        return self.model(**self.task.arguments(inputs)).logits


def _adapters(options: Any, kind: str, folder: Path | None) -> Any:
    """The configuration of LoRA adapters; None if `task_args.lora` is not written."""
    return None if options is None else lora_options.adapter_config(options, kind, folder)


def _length(kind: str, written: int | None, base: PreTrainedConfig) -> int:
    """The tokens of a sample: as written, else the kind's default, or what the model can.

    Args:
        kind: The kind of model.
        written: `task_args.sequence_length`.
        base: The model's configuration before the data is read.

    Raises:
        UserError: The model has fewer positions than are written.
    """
    untrained = meta_model(Recipe(kind=kind, config=base, folder=None))
    positions = min(position_limits(untrained), default=None)
    if written is None:
        limits = (
            DEFAULT_LENGTHS[kind],
            positions,
            getattr(base, "max_position_embeddings", None),
        )
        return min(limit for limit in limits if isinstance(limit, int) and limit > 0)
    whole_number("sequence_length", written)
    if positions is not None and written > positions:
        raise UserError(
            f"task_args.sequence_length is {written}, but the model has {positions} positions; "
            f"write at most {positions}, or a larger task_args.config.max_position_embeddings"
        )
    return written


def _sides(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Height and width of the images that a model is made for; None if it takes any."""
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return size, size
    if isinstance(size, (list, tuple)) and len(size) == 2:
        height, width = size
        return int(height), int(width)
    return None
