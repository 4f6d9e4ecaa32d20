"""Any language model (causal, instructed, or of an encoder and a decoder), text classifier or image classifier of
Hugging Face's `transformers`."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from app.data.loader import tensors
from app.errors import UserError
from app.models.prediction import Preprocessor
from app.tasks.base import Batch
from app.tasks.huggingface import balance, plan
from app.tasks.huggingface import data as reading
from app.tasks.huggingface import lora as low_rank
from app.tasks.huggingface.answers import show_answer
from app.tasks.huggingface.conversations import end_of_answer
from app.tasks.huggingface.inputs import ChatInput, FittedImages, PairsInput, TextsInput, fitted
from app.tasks.huggingface.model import (
    KINDS,
    Recipe,
    choose_kind,
    find,
    position_tables,
    settle,
    takes_any_attention,
    trial,
    unmasked_attention,
)
from app.tasks.language import TextInput, show_sample
from app.tasks.parts import InParts, one_of, whole
from app.tasks.vision import ImageInput
from strategies.context.apply import ContextPlan
from strategies.mixtures import find_mixtures

GENERATION = "generation_config.json"
READERS: dict[str, Callable[..., tuple[InParts, reading.Derived]]] = {
    "causal_lm": reading.running_text,
    "instructions": reading.instructions,
    "seq2seq_lm": reading.text_pairs,
    "sequence_classification": reading.labelled_text,
}
DEFAULT_LENGTHS = {"causal_lm": 256, "instructions": 512, "seq2seq_lm": 512, "sequence_classification": 512}
ONLY_FOR = {
    "tokenizer": tuple(READERS),
    "token_dtype": ("causal_lm",),
    "sequence_length": tuple(READERS),
    "text": ("seq2seq_lm", "sequence_classification"),
    "label": ("seq2seq_lm", "sequence_classification"),
    "augment_shift": ("image_classification",),
}
"""Arguments that only some kinds have a use for."""


class HuggingFace(InParts):
    """A model of `transformers` by its configuration, on the data of its kind.

    model: a model type (`llama`, `gpt2`, `qwen2`, `bert`, `vit`, …), a folder with a config.json, or an id on the hub
        (looked for on this machine first).
    config: keys of the model's configuration to set, such as hidden_size or num_hidden_layers.
    kind: `causal_lm`, `instructions`, `seq2seq_lm`, `sequence_classification`, `image_classification`, or `auto`: what
        the configuration says.
    pretrained: begin from the weights in the folder (or on the hub) instead of new ones. A classifier gets a new head.
    lora: leave those weights as they are and train adapters beside them (lora.py): a mapping of r (default 16), alpha
        (default 2·r), dropout (default 0) and targets: `auto` for every linear layer but the last, or names of layers.
    attention: `sdpa`, `eager`, `flash_attention_2`, … (default: the library's choice).
    eval_samples: how many samples are held out.

    causal_lm: data, token_dtype and sequence_length (default 256) as for language_modelling; tokenizer: `bytes` or a
        tokenizers file (default: the folder's own tokenizer.json, else bytes).
    instructions: data: files of JSON lines with `messages`, or `python`, the docstrings of Python's own library; the
        loss is over the assistant's messages. tokenizer as above; its chat template, or ChatML if it has none.
        sequence_length (default 512): tokens of a row, which holds several conversations, each attending to itself.
    seq2seq_lm (T5, BART): data: a .csv or .parquet file with columns `text` and `target` (others: task_args.text and
        task_args.label); tokenizer as above; sequence_length: tokens of either that are used (default: 512).
    sequence_classification: data: a .csv or .parquet file with columns `text` and `label`; tokenizer as above;
        sequence_length: tokens of a text that are used (default: 512, or what the model can).
    image_classification: data and augment_shift as for image_classification. A model type gets the images' size and
        channels; with a folder or a hub id images are resized to what its configuration says.

    What the data decides (the vocabulary's size, the number of classes, the padding token) is set in the
    configuration unless written there. Weights are float32.
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
        eval_samples: int | None = None,
    ) -> None:
        one_of("kind", kind, ("auto", *KINDS))
        if not isinstance(pretrained, bool):
            raise UserError(f"task_args.pretrained is {pretrained!r}; it must be true or false")
        if config is not None and not isinstance(config, Mapping):
            raise UserError(f"task_args.config is {config!r}; it must be a mapping of key to value")
        written = dict(config or {})
        self.found = found = find(model, weights=pretrained)
        self.kind = choose_kind(found, kind)
        given = {"tokenizer": tokenizer, "token_dtype": token_dtype, "sequence_length": sequence_length}
        given |= {"text": text, "label": label, "augment_shift": augment_shift}
        own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        for name in own:
            if self.kind not in ONLY_FOR[name]:
                kinds = " and ".join(ONLY_FOR[name])
                raise UserError(f"task_args.{name} is for {kinds}, but this model is for {self.kind}; leave it out")
        own |= {"data": data, "eval_samples": eval_samples}
        weights = found.folder if pretrained else None
        adapters = None if lora is None else low_rank.adapters(lora, self.kind, weights)
        base = settle(found, {}, written)  # so that what is wrong there is known before the data is read
        self.tokenizer: Any = None  # the library's, for the export
        if self.kind == "image_classification":
            self._data: Any
            self._data, derived = reading.images(found, **own)
        else:
            chosen = reading.chosen_tokenizer(found, tokenizer, pretrained)
            self.tokenizer = self._tokenizer(chosen)
            own["sequence_length"] = _length(self.kind, sequence_length, base)
            if self.kind in ("causal_lm", "instructions"):  # other texts have lengths of their own
                self.sequence_length = own["sequence_length"]
            own_size = int(base.vocab_size) if found.folder or "vocab_size" in written else None
            own["tokenizer"] = chosen if self.kind == "causal_lm" else self.tokenizer
            self._data, derived = READERS[self.kind](found, base, own_size, **own)
        self._train, self._eval = self._data.train_data(), self._data.eval_data()
        self.unit = self._data.unit
        self.float_output = self._data.float_output
        self.config = settle(found, derived, written)
        self.recipe = Recipe(self.kind, self.config, weights, attention, adapters)
        self._build = self.recipe.build
        structure = trial(self.recipe)
        # Keeping keys and values for the next token has no use in training.
        known = inspect.signature(structure.forward).parameters
        self._keywords: dict[str, Any] = {"use_cache": False} if "use_cache" in known else {}
        if self.kind == "instructions":
            if "position_ids" not in known:
                raise UserError(f"{found.base.model_type} takes no position_ids, so conversations cannot share a row")
            self._own_mask = structure.config._attn_implementation == "sdpa" and self._attends_fully()
        elif self.kind == "causal_lm" and takes_any_attention(structure) and self._attends_fully():
            self._build = replace(self.recipe, attention=unmasked_attention()).build
        mixtures = find_mixtures(structure) if getattr(self.config, "output_router_logits", False) else []
        self._balanced = len(mixtures)
        if mixtures:
            self._experts = mixtures[0].count
            balance.add_up(lambda: structure)  # so that what has no balance is refused here
            self._build = partial(balance.add_up, self._build)
        self._heads = plan.heads(self.config, self.tensor_plan(structure))
        patch, sides = getattr(self.config, "patch_size", None), _sides(self.config)
        if isinstance(patch, int) and sides and any(side % patch for side in sides):  # a rest would be left out
            raise UserError(
                f"task_args.config.patch_size is {patch}, which does not divide images of {sides[0]}×{sides[1]}; write "
                "one that does"
            )

    def _tokenizer(self, chosen: str) -> Any:
        if self.kind == "instructions":
            return reading.chat_tokenizer(self.found, chosen)
        if self.kind == "seq2seq_lm":
            return reading.pair_tokenizer(self.found, chosen)
        return reading.tokenizer_of(self.found, chosen, padded=self.kind == "sequence_classification")

    def _attends_fully(self) -> bool:
        try:
            plan.require_full_attention(self.config, self.sequence_length)
        except UserError:
            return False
        return True

    # --- the task ----------------------------------------------------------------------------------------------

    def build_trained(self) -> nn.Module:
        return self.recipe.build()  # which heeds a mask: people's rows may be padded

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        called: Any = Called(self, model)
        if not self._balanced:
            return self._data.loss(called, batch)
        first, weight = tensors(batch)[0], float(getattr(self.config, "router_aux_loss_coef", 0.0))
        with balance.summed(len(first), self._experts, first.device):
            return self._data.loss(called, batch) + weight * balance.total(self._balanced)

    @property
    def items(self) -> Callable[[Batch], int | Tensor]:  # type: ignore[override]
        """The data's own method, which knows what the loss is the mean of."""
        return self._data.items

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        called: Any = Called(self, model)
        return self._data.metrics(called, batch)

    def on_evaluation(self, model: nn.Module, log: Any) -> None:
        if self.kind == "causal_lm":
            show_sample(self, model, log)
        elif self.kind in ("instructions", "seq2seq_lm"):
            show_answer(self, model, log)

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        return self._data.derived(means)

    def arguments(self, inputs: Any) -> dict[str, Any]:
        """What the model is called with, by name, for a batch's inputs."""
        if self.kind == "image_classification":
            return {"pixel_values": self.fitted(inputs)}
        if self.kind == "causal_lm":
            return {"input_ids": inputs, **self._keywords}
        if self.kind == "instructions":
            tokens, positions = inputs
            given = {"input_ids": tokens, "position_ids": positions, **self._keywords}
            if not self._own_mask:  # the library finds where positions begin anew, for which a GPU's host waits
                return given
            document = (positions == 0).cumsum(1)
            return {**given, "attention_mask": (document[:, None, :, None] == document[:, None, None]).tril()}
        if self.kind == "seq2seq_lm":
            tokens, mask, decoder = inputs
            given = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": decoder}
            return {**given, **self._keywords}
        tokens, mask = inputs
        return {"input_ids": tokens, "attention_mask": mask, **self._keywords}

    def fitted(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) in the size and with the channels that the model was made for."""
        return fitted(images, getattr(self.config, "num_channels", images.shape[1]), _sides(self.config))

    def preprocessor(self) -> Preprocessor | None:
        given = self._data.preprocessor()
        if isinstance(given, ImageInput):
            return FittedImages(**vars(given), channels=self.config.num_channels, sides=_sides(self.config))
        if isinstance(given, TextInput):
            return replace(given, keyword="input_ids", keywords=self._keywords)
        if self.kind == "causal_lm":
            return given  # token files
        if self.kind == "instructions":
            longest, end = self.sequence_length, end_of_answer(self.tokenizer)
            return ChatInput(self.tokenizer, longest, "input_ids", self._keywords, end)
        if self.kind == "seq2seq_lm":
            pairs = self._train
            return PairsInput(self.tokenizer, pairs.longest, [], self._keywords, pairs.start)
        return TextsInput(self.tokenizer, self._train.longest, list(self._data.classes), self._keywords)

    def blocks(self, model: nn.Module) -> list[str] | None:
        return plan.blocks(model)

    def tensor_plan(self, model: nn.Module) -> dict[str, str] | None:
        if self.recipe.adapters is not None:  # every layer, and every adapter, is split by itself and gathered
            return None
        return plan.tensor_plan(model, parallel_head=not self.kind.endswith("classification"))

    def context_plan(self, model: nn.Module) -> ContextPlan | None:
        if self.kind != "causal_lm":
            raise UserError(f"parallel.cp splits the sequences of causal_lm, but this model is for {self.kind}")
        plan.require_full_attention(self.config, self.sequence_length)

        def keywords(places: Tensor) -> dict[str, Any]:
            """With a mask without padding, because the library takes places that jump for several sequences in one."""
            return {"position_ids": places, "attention_mask": places.new_ones(1, places.size(1))}

        return ContextPlan(keywords)

    def heads(self) -> int | None:
        return self._heads

    # --- for the export ----------------------------------------------------------------------------------------

    def structure(self) -> nn.Module:
        """The model on meta."""
        return trial(self.recipe)

    def write_folder(self, folder: Path) -> None:
        """Everything of a transformers model's folder but the weights: config.json and the tokenizer's files."""
        config = type(self.config).from_dict({**self.config.to_dict(), "dtype": "float32"})
        config.architectures = [type(self.structure()).__name__]
        config.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        if self.found.folder is not None and (self.found.folder / GENERATION).is_file():
            shutil.copyfile(self.found.folder / GENERATION, folder / GENERATION)
        if isinstance(given := self.preprocessor(), FittedImages):
            (folder / "preprocessor_config.json").write_text(json.dumps(given.for_transformers(), indent=1))


class Called:
    """A transformers model as the data's task calls one: inputs to logits."""

    def __init__(self, task: HuggingFace, model: nn.Module) -> None:
        self.task, self.model = task, model

    def __call__(self, inputs: Any) -> Tensor:
        return self.model(**self.task.arguments(inputs)).logits


def _length(kind: str, written: int | None, base: Any) -> int:
    """Tokens in a sample: as written, else the kind's default, or less where the model has fewer positions.

    Raises UserError where more is written than the model has."""
    able = min(position_tables(trial(Recipe(kind, base, None))), default=None)
    if written is None:
        known = (DEFAULT_LENGTHS[kind], able, getattr(base, "max_position_embeddings", None))
        return min(length for length in known if isinstance(length, int) and length > 0)
    whole("sequence_length", written)
    if able is not None and written > able:
        raise UserError(
            f"task_args.sequence_length is {written}, but the model has {able} positions; write at most {able}, or a "
            "larger task_args.config.max_position_embeddings"
        )
    return written


def _sides(config: Any) -> tuple[int, int] | None:
    """Height and width of the images a model is made for; None if it takes any."""
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return size, size
    return (int(size[0]), int(size[1])) if isinstance(size, (list, tuple)) and len(size) == 2 else None
