"""Any causal language model, text classifier or image classifier of Hugging Face's `transformers`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.loader import fetch
from app.data.text import find_files
from app.data.tokens import SUFFIXES
from app.errors import UserError
from app.tasks import huggingface_plan
from app.tasks.arguments import one_of, whole
from app.tasks.base import Batch, Task
from app.tasks.huggingface_model import (
    KINDS,
    Found,
    Recipe,
    choose_kind,
    find,
    forward_on_meta,
    is_encoder,
    position_tables,
    settle,
    trial,
)
from app.tasks.huggingface_text import chosen_tokenizer, encoding, write_tokenizer
from app.tasks.labelled_text import LabelledText
from app.tasks.language import LanguageModelling
from app.tasks.vision import ImageClassification

DEFAULT_LENGTHS = {"causal_lm": 256, "sequence_classification": 512}
ONLY_FOR = {
    "tokenizer": ("causal_lm", "sequence_classification"),
    "token_dtype": ("causal_lm",),
    "sequence_length": ("causal_lm", "sequence_classification"),
    "text": ("sequence_classification",),
    "label": ("sequence_classification",),
    "labels": ("image_classification",),
    "augment_shift": ("image_classification",),
}
"""Arguments that only some kinds have a use for."""


class HuggingFace(Task):
    """A model of `transformers` by its configuration, on the data of its kind.

    model: a model type (`llama`, `gpt2`, `qwen2`, `bert`, `vit`, …), a folder with a config.json, or an id on the hub
        (looked for on this machine first).
    config: keys of the model's configuration to set, such as hidden_size or num_hidden_layers.
    kind: `causal_lm`, `sequence_classification`, `image_classification`, or `auto`: what the configuration says.
    pretrained: begin from the weights in the folder (or on the hub) instead of new ones. A classifier gets a new head.
    attention: `sdpa`, `eager`, `flash_attention_2`, … (default: the library's choice).
    eval_samples or eval_fraction: how much of the data is held out.

    causal_lm: data, token_dtype and sequence_length (default 256) as for language_modelling; tokenizer: `bytes` or a
        tokenizers file (default: the folder's own tokenizer.json, else bytes).
    sequence_classification: data: a .csv or .parquet file with columns `text` and `label`; tokenizer as above;
        sequence_length: tokens of a text that are used (default: 512, or what the model can).
    image_classification: data, labels and augment_shift as for image_classification. A model type gets the images'
        size and channels; with a folder or a hub id images are resized to what its configuration says.

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
        attention: str | None = None,
        tokenizer: str | None = None,
        token_dtype: str = "uint16",
        sequence_length: int | None = None,
        text: str = "text",
        label: str = "label",
        labels: str | None = None,
        augment_shift: int = 0,
        eval_samples: int | None = None,
        eval_fraction: float | None = None,
    ) -> None:
        one_of("kind", kind, ("auto", *KINDS))
        one_of("pretrained", pretrained, (True, False))
        if config is not None and not isinstance(config, Mapping):
            raise UserError(f"task_args.config is {config!r}; it must be a mapping of key to value.")
        written = dict(config or {})
        self.found = find(model, weights=pretrained)
        self.kind = choose_kind(self.found, kind)
        given = {
            "tokenizer": tokenizer,
            "token_dtype": token_dtype,
            "sequence_length": sequence_length,
            "text": text,
            "label": label,
            "labels": labels,
            "augment_shift": augment_shift,
        }
        _check_use(self.kind, given)
        base = settle(self.found, {}, written)  # so that what is wrong there is known before the data is read
        held = {"eval_samples": eval_samples, "eval_fraction": eval_fraction}
        self.tokenizer = ""
        if self.kind == "image_classification":
            derived = self._images(data, labels, augment_shift, held)
        else:
            length = self._length(sequence_length, base)
            self.tokenizer = chosen_tokenizer(self.found, tokenizer, pretrained)
            if self.kind == "causal_lm":
                derived = self._text(data, token_dtype, length, base, written, held)
            else:
                derived = self._labelled_text(data, text, label, length, held)
        self.config = settle(self.found, derived, written)
        self.recipe = Recipe(self.kind, self.config, self.found.folder if pretrained else None, attention)
        structure = trial(self.recipe)
        self._check(structure)
        self.unit, self.items_vary = self._source.unit, self._source.items_vary
        self._keywords = _keywords(structure)
        self._heads = huggingface_plan.heads(self.config, self.tensor_plan(structure))

    # --- the data ----------------------------------------------------------------------------------------------
    # Each kind's data, loss and metrics are those of a task of its own, of which only the model is not used. What the
    # data decides about the model is returned.

    def _text(
        self, data: Any, token_dtype: str, length: int, base: Any, written: dict[str, Any], held: dict[str, Any]
    ) -> dict[str, Any]:
        own = base.vocab_size if self.found.folder or "vocab_size" in written else None
        tokens = any(path.suffix in SUFFIXES for path in find_files(data))
        if tokens and own is None:
            raise UserError("task_args.config.vocab_size is needed with token files; write the tokenizer's.")
        source = LanguageModelling(
            data=data,
            tokenizer=self.tokenizer,
            token_dtype=token_dtype,
            vocab_size=own if tokens else None,
            sequence_length=length,
            d_model=2,
            n_layers=1,
            n_heads=1,
            **held,
        )
        self._source: Task = source
        derived: dict[str, Any] = {} if own is not None else {"vocab_size": source.vocab_size}
        if is_encoder(self.found.model_type):
            derived["is_decoder"] = True  # else it would see the tokens that it is to predict
        self._require_vocabulary(source.vocab_size, base, derived)
        return derived

    def _labelled_text(self, data: Any, text: str, label: str, length: int, held: dict[str, Any]) -> dict[str, Any]:
        encoded = encoding(self.found, self.tokenizer, length)
        source = LabelledText(data=data, text=text, label=label, encoding=encoded, longest=length, **held)
        self._source = source
        derived: dict[str, Any] = {**_names(source.classes), "pad_token_id": encoded.padding}
        if self.found.folder is None:
            derived["vocab_size"] = encoded.vocab_size
        self._require_vocabulary(encoded.vocab_size, self.found.base, derived)
        return derived

    def _images(self, data: Any, labels: str | None, augment_shift: int, held: dict[str, Any]) -> dict[str, Any]:
        source = ImageClassification(
            data=data, labels=labels, augment_shift=augment_shift, model="mlp", model_args={"hidden": []}, **held
        )
        self._source = source
        channels, height, width = fetch(source.train_data(), [(0, 0)])[0].shape[1:]
        derived = _names([str(number) for number in range(source.classes)])
        if self.found.folder is None:
            derived |= {"image_size": height if height == width else [height, width], "num_channels": channels}
        return derived

    def _length(self, written: int | None, base: Any) -> int:
        """Tokens in a sample: as written, else the kind's default, or less where the model has fewer positions."""
        if written is not None:
            return whole("sequence_length", written)
        tables = position_tables(trial(Recipe(self.kind, base, None)))
        positions = getattr(base, "max_position_embeddings", None)
        known = [positions] if isinstance(positions, int) and positions > 0 else []
        return min(DEFAULT_LENGTHS[self.kind], *tables, *known)

    def _require_vocabulary(self, needed: int, base: Any, derived: dict[str, Any]) -> None:
        """Raises UserError if the model has fewer tokens than the tokenizer; forgets special tokens it has not."""
        size = derived.get("vocab_size", base.vocab_size)
        if size < needed:
            raise UserError(
                f"the model's vocab_size is {size}, but the tokenizer has {needed} tokens; write "
                f"task_args.config.vocab_size={needed} or more, or the model's own tokenizer as task_args.tokenizer"
            )
        if self.found.folder is None:
            special = (key for key in base.to_dict() if key.endswith("_token_id") and key not in derived)
            beyond = [key for key in special if isinstance(number := getattr(base, key), int) and number >= size]
            derived |= dict.fromkeys(beyond)

    def _check(self, structure: nn.Module) -> None:
        """Raises UserError for sizes that would fail, or be cut without a word, in the first step."""
        if self.kind == "image_classification":
            patch, sides = getattr(self.config, "patch_size", None), _sides(self.config)
            if isinstance(patch, int) and sides and any(side % patch for side in sides):
                raise UserError(
                    f"task_args.config.patch_size is {patch}, which does not divide images of "
                    f"{sides[0]}×{sides[1]}; write one that does"
                )
            forward_on_meta(structure, self.example_input())
            return
        longest, able = self.sequence_length, min(position_tables(structure), default=None)
        if able is not None and longest > able:
            raise UserError(
                f"task_args.sequence_length is {longest}, but the model has {able} positions; write at most {able}, "
                "or a larger task_args.config.max_position_embeddings"
            )

    @property
    def sequence_length(self) -> int:
        """Tokens in a sample, at most."""
        data: Any = self._source.train_data()
        return int(data.longest if isinstance(self._source, LabelledText) else data.sequence_length)

    # --- the task ----------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        return self.recipe.build()

    def train_data(self) -> Dataset[Any]:
        return self._source.train_data()

    def eval_data(self) -> Dataset[Any] | None:
        return self._source.eval_data()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        called = Called(self, model)
        loss = self._source.loss(called, batch)  # type: ignore[arg-type]
        balance = getattr(called.output, "aux_loss", None)
        if balance is not None:  # of a mixture of experts whose config has output_router_logits
            loss = loss + float(getattr(self.config, "router_aux_loss_coef", 0.0)) * balance
        return loss

    def items(self, batch: Batch) -> int | Tensor:
        return self._source.items(batch)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return self._source.metrics(Called(self, model), batch)  # type: ignore[arg-type]

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        return self._source.derived(means)

    def arguments(self, inputs: Any) -> dict[str, Any]:
        """What the model is called with, by name, for a batch's inputs."""
        if self.kind == "image_classification":
            return {"pixel_values": self.fitted(inputs)}
        if self.kind == "causal_lm":
            return {"input_ids": inputs, **self._keywords}
        tokens, mask = inputs
        return {"input_ids": tokens, "attention_mask": mask, **self._keywords}

    def fitted(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) in the size and with the channels that the model was made for."""
        channels, sides = getattr(self.config, "num_channels", images.shape[1]), _sides(self.config)
        if sides and tuple(images.shape[2:]) != sides:
            images = F.interpolate(images, sides, mode="bilinear", antialias=True)
        return images.expand(-1, channels, -1, -1) if images.shape[1] == 1 < channels else images

    def blocks(self, model: nn.Module) -> list[str] | None:
        return huggingface_plan.blocks(model)

    def tensor_plan(self, model: nn.Module) -> dict[str, str] | None:
        return huggingface_plan.tensor_plan(model, parallel_head=self.kind == "causal_lm")

    def heads(self) -> int | None:
        return self._heads

    def example_input(self) -> tuple[Any, ...]:
        inputs = fetch(self.train_data(), [(0, 0)])[0]
        if self.kind == "image_classification":
            return (self.fitted(inputs),)
        if self.kind == "causal_lm":
            return (inputs,)
        tokens, mask = inputs
        return (tokens[:, : int(mask.sum())],)  # one text needs no mask, which models do not all take as the second

    def describe(self) -> str:
        return f"{self.config.model_type} ({self.kind}), {self._source.describe()}"

    # --- for the export ----------------------------------------------------------------------------------------

    def write_folder(self, folder: Path) -> None:
        """Everything of a transformers model's folder but the weights: config.json and the tokenizer's files."""
        config = type(self.config).from_dict({**self.config.to_dict(), "dtype": "float32"})
        config.architectures = [type(trial(self.recipe)).__name__]
        config.save_pretrained(folder)
        if self.tokenizer:
            shifted = self.kind == "sequence_classification"
            write_tokenizer(folder, self.found, self.tokenizer, shifted=shifted)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of the model's state, by name."""
        return {name: tuple(tensor.shape) for name, tensor in trial(self.recipe).state_dict().items()}

    def tied_names(self) -> set[str]:
        """Names of parameters that are another under a second name, which a folder's weights leave out."""
        return set(getattr(trial(self.recipe), "all_tied_weights_keys", None) or {})


class Called:
    """A transformers model as the data's task calls one: inputs to logits. `output` is what it last answered."""

    def __init__(self, task: HuggingFace, model: nn.Module) -> None:
        self.task, self.model = task, model
        self.output: Any = None

    def __call__(self, inputs: Any) -> Tensor:
        self.output = self.model(**self.task.arguments(inputs))
        return self.output.logits


def _check_use(kind: str, given: dict[str, Any]) -> None:
    defaults = {name: p.default for name, p in inspect.signature(HuggingFace).parameters.items()}
    for name, value in given.items():
        if value != defaults[name] and kind not in ONLY_FOR[name]:
            raise UserError(
                f"task_args.{name} is for {' and '.join(ONLY_FOR[name])}, but this model is for {kind}; leave it out"
            )


def _names(classes: list[str]) -> dict[str, Any]:
    """A classifier's configuration: its classes and their names."""
    return {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def _sides(config: Any) -> tuple[int, int] | None:
    """Height and width of the images a model is made for; None if it takes any."""
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return size, size
    return (int(size[0]), int(size[1])) if isinstance(size, (list, tuple)) and len(size) == 2 else None


def _keywords(model: nn.Module) -> dict[str, Any]:
    """Keeping keys and values for the next token, which training has no use for, is switched off where there is any."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


__all__ = ["Found", "HuggingFace"]
