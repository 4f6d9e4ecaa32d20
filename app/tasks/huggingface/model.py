"""Where a model of the `transformers` library is, what kinds of model it can be, and making it as often as asked.

Nothing is fetched from the hub that is on this machine already, and code that comes with a model is never run. Weights
are float32 whatever the type they were stored in.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.errors import UserError, nearest
from app.tasks.huggingface import lora
from app.tasks.huggingface.experts import group_experts

KINDS = {
    "causal_lm": "AutoModelForCausalLM",
    "instructions": "AutoModelForCausalLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}
"""Kind: the library's class that makes it."""
TABLES = {"instructions": "causal_lm", "seq2seq_lm": "seq_to_seq_causal_lm"}
"""Kind: what the library calls it in its tables of models, if otherwise."""

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
HUB_SECONDS = 5.0  # how long the hub may take to answer
HUB_FILES = ["*.json", "*.txt", "*.model"]
UNDECLARED = {
    "head_dim",
    "decoder_start_token_id",
}  # keys that models read though their configuration may have no field for them


def library() -> Any:
    """The transformers package, quiet. Raises UserError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "the huggingface task needs the package transformers, which is not installed: run pip install "
            "'trireme[huggingface]'"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def last_line(error: BaseException) -> str:
    """The last line of what an error says, where the library puts what matters, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")


@dataclass(frozen=True)
class Found:
    """What `task_args.model` names: a folder with a config.json, or a model type; `base` is its configuration."""

    folder: Path | None
    base: Any

    @property
    def tokenizer(self) -> Path | None:
        """The folder's own tokenizer file."""
        path = self.folder / "tokenizer.json" if self.folder else None
        return path if path is not None and path.is_file() else None


def find(named: Any, *, weights: bool) -> Found:
    """The model that a person means by a folder, an id on the hub or a model type.

    weights: whether its weights are wanted too. Raises UserError.
    """
    if not isinstance(named, str) or not named:
        raise UserError(f"task_args.model is {named!r}; write a model type such as llama, a folder or an id on the hub")
    types = list(library().CONFIG_MAPPING)
    folder = Path(named).expanduser()
    if folder.is_dir():
        return _in_folder(folder, weights)
    if named in types:
        if weights:
            raise UserError(
                f"task_args.pretrained is true, but {named!r} is a model type without weights: write a folder or an "
                "id on the hub as task_args.model"
            )
        return Found(None, _configuration(named, library().AutoConfig.for_model))
    if named.startswith((".", "/", "~")) or named.count("/") != 1:
        raise UserError(
            f"task_args.model: there is no folder and no model type {named!r}{nearest(named, types)}; write a folder "
            "with a config.json, an id on the hub (owner/name) or a model type such as llama, gpt2, bert or vit"
        )
    return _in_folder(_from_hub(named, weights), weights)


def _in_folder(folder: Path, weights: bool) -> Found:
    if not (folder / "config.json").is_file():
        raise UserError(f"task_args.model: {folder} has no config.json; give the folder of a transformers model")
    if weights and not _has_weights(folder):
        raise UserError(
            f"task_args.pretrained is true, but {folder} has no weights ({WEIGHTS[0]}); write pretrained: false to "
            "begin from none"
        )
    read = partial(library().AutoConfig.from_pretrained, local_files_only=True, trust_remote_code=False)
    return Found(folder, _configuration(folder, read))


def _configuration(source: Any, make: Callable[[Any], Any]) -> Any:
    try:
        return make(source)
    except Exception as error:  # the library raises many kinds
        raise UserError(
            f"task_args.model: {source} has no configuration that makes a model of transformers ({last_line(error)})"
        ) from error


def _from_hub(named: str, weights: bool) -> Path:
    """The folder in the hub's cache on this machine, fetched where that is not complete."""
    library()
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    wanted = [*HUB_FILES, "*.safetensors"] if weights else HUB_FILES
    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = Path(hub.snapshot_download(named, allow_patterns=wanted, local_files_only=True))
            if (folder / "config.json").is_file() and (not weights or _has_weights(folder)):
                return folder
        return Path(hub.snapshot_download(named, allow_patterns=wanted, etag_timeout=HUB_SECONDS))
    except Exception as error:
        away = f"it is not on this machine, and {hub.constants.ENDPOINT} does not answer"
        unknown = isinstance(error, RepositoryNotFoundError)  # also where it needs a login (gated)
        why = "there is no such model, or it needs a login (hf auth login)" if unknown else away
        raise UserError(
            f"task_args.model: {named!r} cannot be fetched from the hub ({why}); give the folder of a copy"
        ) from error


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in WEIGHTS)


def _is_in(table: str, model_type: str) -> bool:
    """Whether a table of the library's, by model type, has this one."""
    return model_type in getattr(importlib.import_module("transformers.models.auto.modeling_auto"), table)


def choose_kind(found: Found, wanted: str) -> str:
    """`wanted` if the model has it; for auto what its configuration says it was, else what it is mostly used for.

    Raises UserError, also for a model of several that is not trained as one.
    """
    tables = {kind: f"MODEL_FOR_{TABLES.get(kind, kind).upper()}_MAPPING_NAMES" for kind in KINDS}
    has = [kind for kind, table in tables.items() if _is_in(table, found.base.model_type)]
    if getattr(found.base, "is_encoder_decoder", False):
        has = [kind for kind in has if kind == "seq2seq_lm"]
    if not has or wanted not in ("auto", *has):
        made_for = " or ".join(has) or "none of the kinds"
        raise UserError(
            f"task_args.kind is {wanted}, but {found.base.model_type} is made for {made_for}; write another"
        )
    built = (found.base.architectures or [""])[0].replace("LMHeadModel", "ForCausalLM")
    named = [kind for kind in has if built.endswith(KINDS[kind].removeprefix("AutoModel"))]
    encoder = _is_in("MODEL_FOR_MASKED_LM_MAPPING_NAMES", found.base.model_type)  # looks at a text from both sides
    usual = [kind for kind in has if kind == "sequence_classification" and encoder]
    kind = wanted if wanted != "auto" else (named + usual + has)[0]
    if kind != "image_classification" and not hasattr(found.base, "vocab_size"):
        parts = ", ".join(found.base.sub_configs) or "others"
        raise UserError(
            f"task_args.model: {found.base.model_type} is made of several models ({parts}); give the one of the text"
        )
    return kind


# --- making it ----------------------------------------------------------------------------------------------------


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
                f"task_args.config.{key}: the configuration of {found.base.model_type} has no such "
                f"key{nearest(key, known)}; it has {', '.join(sorted(own)[:12])}, …"
            )
    given = {aliases.get(key, key): value for key, value in {**derived, **written}.items() if key in known}
    for key, value in given.items():
        if isinstance(own.get(key), dict) and isinstance(value, Mapping):
            given[key] = {**own[key], **value}
    try:
        if found.folder is None:
            return library().AutoConfig.for_model(found.base.model_type, **given)
        if "num_labels" in given:  # the names of another number of labels would contradict it
            own = {key: value for key, value in own.items() if key not in ("id2label", "label2id")}
        return type(found.base).from_dict({**own, **given})
    except Exception as error:
        raise UserError(f"task_args.config does not make a {found.base.model_type}: {last_line(error)}") from error


@dataclass(frozen=True)
class Recipe:
    """Makes a model as often as asked: `folder` with weights if it begins from some, else None. adapters: peft's."""

    kind: str
    config: Any
    folder: Path | None
    attention: str | None = None
    adapters: Any = None

    def build(self) -> nn.Module:
        """The model in training mode, with its adapters. See `whole`."""
        return self.wrapped().get_base_model() if self.adapters is not None else self.whole()

    def wrapped(self) -> Any:
        """The model with its adapters as peft's model."""
        return lora.adapted(self.whole(), self.adapters)

    def whole(self) -> nn.Module:
        """The model in training mode. New weights come from torch's global generator; on meta none are read.

        Raises UserError for weights of another model.
        """
        auto = getattr(library(), KINDS[self.kind])
        how: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
        if self.attention is not None:
            how["attn_implementation"] = self.attention
        config = copy.deepcopy(self.config)  # making a model writes into it
        config.return_dict = True
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False  # what balances experts is ours: balance.py
        fresh = self.folder is None or torch.get_default_device().type == "meta"
        model = auto.from_config(config, **how) if fresh else self._read(auto, config, how)
        group_experts(model)
        return model.train()

    def _read(self, auto: Any, config: Any, how: dict[str, Any]) -> nn.Module:
        try:
            how |= {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
            model, report = auto.from_pretrained(self.folder, config=config, **how)
        except Exception as error:  # damaged files raise from safetensors, json and transformers alike
            raise UserError(f"the weights in {self.folder} cannot be read: {last_line(error)}") from error
        missing = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
        body = f"{model.base_model_prefix}."
        # A classifier's head is new where the classes are, and so is a pooler that a masked language model has not;
        # everything else must have been learnt. peft saves the head with its adapters, but no pooler.
        classifier, pooler = self.kind.endswith("classification"), f"{body}pooler."
        new = {n for n in missing if not n.startswith(body) or (n.startswith(pooler) and self.adapters is None)}
        wrong = sorted(missing - new if classifier else missing)
        if wrong:
            raise UserError(
                f"the weights in {self.folder} are of another model: {wrong[0]} is missing there or has another shape "
                f"({len(wrong)} in all); leave task_args.config as the folder has it, or write pretrained: false"
            )
        return model


def unmasked_attention() -> str:
    """The name of torch's attention without a mask, for causal models that look at all tokens before, of rows without
    padding. Under its own name the library first looks whether positions begin anew in a row, and a GPU's host waits
    for the answer in every forward. https://huggingface.co/docs/transformers/attention_interface
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    library().AttentionInterface.register("sdpa_unmasked", sdpa_attention_forward)
    return "sdpa_unmasked"


def takes_any_attention(structure: Any) -> bool:
    """Whether the model computes torch's attention and would take another under any name; an older one, such as Falcon
    or GPT-J, has a table of its own with the names that it takes."""
    return structure.config._attn_implementation == "sdpa" and structure.is_backend_compatible()


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
    """How many positions each learnt table of positions in the model can serve; rotary models have none."""
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and leaf in ("position_embeddings", "embed_positions", "wpe"):
            kept = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from behind it
            yield module.num_embeddings - kept - int(getattr(module, "offset", 0))
