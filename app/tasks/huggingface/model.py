"""From a configuration to a model of the `transformers` library, as often as asked.

Weights are float32 whatever the type they were stored in.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.errors import UserError, nearest
from app.tasks.huggingface.find import KINDS, Found, last_line, library

UNDECLARED = {"head_dim"}  # keys that models read though their configuration may have no field for them


def settle(found: Found, derived: Mapping[str, Any], written: Mapping[str, Any]) -> Any:
    """The configuration: the library's or the folder's, what the data decides, what the person wrote on top.

    Raises UserError for a key that the configuration does not have, or a value that it refuses.
    """
    aliases = dict(type(found.base).attribute_map)
    own = found.base.to_dict()
    known = {*own, *aliases, *(field.name for field in dataclasses.fields(found.base)), "num_labels", *UNDECLARED}
    for key in written:
        if key not in known:
            raise UserError(
                f"task_args.config.{key}: the configuration of {found.model_type} has no such "
                f"key{nearest(key, known)}; it has {', '.join(sorted(own)[:12])}, …"
            )
    given = {aliases.get(key, key): value for key, value in {**derived, **written}.items() if key in known}
    for key, value in given.items():
        if isinstance(own.get(key), dict) and isinstance(value, Mapping):
            given[key] = {**own[key], **value}
    try:
        if found.folder is None:
            return library().AutoConfig.for_model(found.model_type, **given)
        if "num_labels" in given:  # the names of another number of labels would contradict it
            own = {key: value for key, value in own.items() if key not in ("id2label", "label2id")}
        return type(found.base).from_dict({**own, **given})
    except Exception as error:
        raise UserError(f"task_args.config does not make a {found.model_type}: {last_line(error)}") from error


@dataclass(frozen=True)
class Recipe:
    """Makes a model as often as asked: `folder` with weights if it begins from some, else None."""

    kind: str
    config: Any
    folder: Path | None
    attention: str | None = None

    def build(self) -> nn.Module:
        """The model in training mode. New weights come from torch's global generator; on meta none are read.

        Raises UserError for weights of another model.
        """
        auto = getattr(library(), KINDS[self.kind])
        how: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
        if self.attention is not None:
            how["attn_implementation"] = self.attention
        config = copy.deepcopy(self.config)  # making a model writes into it
        config.return_dict = True
        if self.folder is None or torch.get_default_device().type == "meta":
            return auto.from_config(config, **how).train()
        return self._read(auto, config, how).train()

    def _read(self, auto: Any, config: Any, how: dict[str, Any]) -> nn.Module:
        try:
            how |= {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
            model, report = auto.from_pretrained(self.folder, config=config, **how)
        except Exception as error:  # damaged files raise from safetensors, json and transformers alike
            raise UserError(f"the weights in {self.folder} cannot be read: {last_line(error)}") from error
        missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
        body = f"{model.base_model_prefix}."
        # A classifier's head is new where the classes are; everything else must have been learnt.
        wrong = sorted(name for name in missing if self.kind == "causal_lm" or name.startswith(body))
        if wrong:
            raise UserError(
                f"the weights in {self.folder} are of another model: {wrong[0]} is missing there or has another shape "
                f"({len(wrong)} in all); leave task_args.config as the folder has it, or write pretrained: false"
            )
        return model


def trial(recipe: Recipe) -> Any:
    """The model on meta: its structure without memory. Raises UserError if its configuration makes none."""
    try:
        with torch.device("meta"):
            return recipe.build()
    except UserError:
        raise
    except Exception as error:  # a configuration can be wrong in as many ways as there are models
        raise UserError(f"task_args.config does not make a {recipe.config.model_type}: {last_line(error)}") from error


def position_tables(model: nn.Module) -> Iterator[int]:
    """How many positions each learnt table of positions in the model can serve."""
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and leaf in ("position_embeddings", "embed_positions", "wpe"):
            kept = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from behind it
            yield module.num_embeddings - kept - int(getattr(module, "offset", 0))
