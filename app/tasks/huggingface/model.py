"""Finds models of the `transformers` library, resolves their configuration and builds them.

Nothing is fetched from the hub that is on this machine already, and code that comes with a model is
never run. Weights are built in float32, whatever the type they were stored in; frozen matrices are
then kept in the type of train.precision (strategies/frozen.py).
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
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from app.errors import UserError, nearest
from app.tasks.huggingface import lora
from app.tasks.huggingface.experts import group_experts
from app.tasks.huggingface.quantized import quantize_layers

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of which a folder with weights has one."""
HUB_SECONDS = 5.0  # how long the hub may take to answer
HUB_FILES = ["*.json", "*.txt", "*.model"]
UNDECLARED = {"head_dim", "decoder_start_token_id"}
"""Keys that models read although their configuration may not declare them."""
FROM_HEADS = ("num_key_value_heads", "head_dim")
"""Keys whose default follows from the number of heads."""
POSITION_TABLES = ("position_embeddings", "embed_positions", "wpe")
"""What models call their learnt embeddings of positions."""


def library() -> ModuleType:
    """The transformers package, without its log messages and progress bars.

    Raises:
        UserError: It is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "the huggingface task needs the package transformers, which is not installed: "
            "run pip install 'trireme[huggingface]'"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def last_line(error: BaseException) -> str:
    """The last line of an error's message, without its full stop.

    The library writes what matters there.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")


# --- finding it ---


@dataclass(frozen=True)
class ModelSource:
    """What `task_args.model` names.

    Args:
        folder: The folder of the model; None for a model type.
        base: Its configuration.
    """

    folder: Path | None
    base: PreTrainedConfig

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer file in the folder; None if there is none."""
        if self.folder is None:
            return None
        path = self.folder / "tokenizer.json"
        return path if path.is_file() else None


def find_model(name: Any, *, weights: bool) -> ModelSource:
    """The model that a folder, an id on the hub or a model type names.

    Args:
        name: `task_args.model`.
        weights: Whether its weights are needed too.

    Raises:
        UserError: There is no such model, or it has no weights.
    """
    if not isinstance(name, str) or not name:
        raise UserError(
            f"task_args.model is {name!r}; "
            "write a model type such as llama, a folder or an id on the hub"
        )
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _from_folder(folder, weights=weights)
    model_types = list(library().CONFIG_MAPPING)
    if name in model_types:
        if weights:
            raise UserError(
                f"task_args.pretrained is true, but {name!r} is a model type without weights: "
                "write a folder or an id on the hub as task_args.model"
            )
        base = _read_config(name, library().AutoConfig.for_model)
        return ModelSource(folder=None, base=base)
    is_path = name.startswith((".", "/", "~"))
    if is_path or name.count("/") != 1:
        hint = nearest(name, model_types)
        raise UserError(
            f"task_args.model: there is no folder and no model type {name!r}{hint}; "
            "write a folder with a config.json, an id on the hub (owner/name) "
            "or a model type such as llama, gpt2, bert or vit"
        )
    return _from_folder(_hub_folder(name, weights=weights), weights=weights)


def _from_folder(folder: Path, *, weights: bool) -> ModelSource:
    if not (folder / "config.json").is_file():
        raise UserError(
            f"task_args.model: {folder} has no config.json; give the folder of a transformers model"
        )
    if weights and not _has_weights(folder):
        raise UserError(
            f"task_args.pretrained is true, but {folder} has no weights ({WEIGHTS[0]}); "
            "write pretrained: false to begin from none"
        )
    read = partial(
        library().AutoConfig.from_pretrained, local_files_only=True, trust_remote_code=False
    )
    return ModelSource(folder=folder, base=_read_config(folder, read))


def _read_config(source: str | Path, read: Callable[[Any], Any]) -> PreTrainedConfig:
    try:
        return read(source)
    except Exception as error:  # the library raises many kinds of errors
        raise UserError(
            f"task_args.model: {source} has no configuration that makes a model of transformers "
            f"({last_line(error)})"
        ) from error


def _hub_folder(name: str, *, weights: bool) -> Path:
    """The folder of a model in the hub's cache on this machine.

    Files that the folder lacks are fetched.

    Raises:
        UserError: They cannot be fetched.
    """
    library()
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = [*HUB_FILES, "*.safetensors"] if weights else HUB_FILES
    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            folder = Path(
                hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True)
            )
            has_config = (folder / "config.json").is_file()
            if has_config and (not weights or _has_weights(folder)):
                return folder
        return Path(hub.snapshot_download(name, allow_patterns=patterns, etag_timeout=HUB_SECONDS))
    except Exception as error:
        if isinstance(error, RepositoryNotFoundError):  # the same for models that need a login
            reason = "there is no such model, or it needs a login (hf auth login)"
        else:
            reason = f"it is not on this machine, and {hub.constants.ENDPOINT} does not answer"
        raise UserError(
            f"task_args.model: {name!r} cannot be fetched from the hub ({reason}); "
            "give the folder of a copy"
        ) from error


def has_weights_here(name: str) -> bool:
    """Whether a folder, or the hub's cache on this machine, has the weights of a model.

    Args:
        name: `task_args.model`.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _has_weights(folder)
    library()
    import huggingface_hub as hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = [*HUB_FILES, "*.safetensors"]
    try:
        return _has_weights(
            Path(hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        )
    except (LocalEntryNotFoundError, hub.errors.HFValidationError):
        return False


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in WEIGHTS)


def is_in_table(table: str, model_type: str) -> bool:
    """Whether one of the library's tables of models has a model type.

    Args:
        table: The name of the table.
        model_type: Such as llama.
    """
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    return model_type in getattr(tables, table)


# --- its configuration ---


def resolve_config(
    source: ModelSource, derived: Mapping[str, Any], written: Mapping[str, Any]
) -> PreTrainedConfig:
    """The configuration of a model: its own, with what the data decides and what the user wrote.

    Args:
        source: The model.
        derived: Keys that follow from the data.
        written: `task_args.config`, which takes precedence.

    Raises:
        UserError: The configuration does not have a key, or refuses a value.
    """
    base = source.base
    aliases = dict(type(base).attribute_map)
    values = base.to_dict()
    known = {
        *values,
        *aliases,
        *(field.name for field in dataclasses.fields(base)),
        "num_labels",
        *UNDECLARED,
    }
    for key in written:
        if key not in known:
            hint = nearest(key, known)
            raise UserError(
                f"task_args.config.{key}: the configuration of {base.model_type} has no such "
                f"key{hint}; it has {', '.join(sorted(values)[:12])}, …"
            )
    changed = {
        aliases.get(key, key): _merged(derived.get(key), value)
        for key, value in {**derived, **written}.items()
        if key in known
    }
    for key, value in changed.items():
        if isinstance(values.get(key), dict) and isinstance(value, Mapping):
            under = dict(values[key])
            if source.folder is None and "num_attention_heads" in value:
                # What the library derives from these is derived again.
                under = {name: under[name] for name in under if name not in FROM_HEADS}
            changed[key] = _merged(under, value)
    try:
        if source.folder is None:
            return library().AutoConfig.for_model(base.model_type, **changed)
        if "num_labels" in changed:
            # The names of the folder's labels would contradict another number of labels.
            values.pop("id2label", None)
            values.pop("label2id", None)
        return type(base).from_dict({**values, **changed})
    except Exception as error:
        raise UserError(
            f"task_args.config does not make a {base.model_type}: {last_line(error)}"
        ) from error


def _merged(under: Any, value: Any) -> Any:
    """A value; a mapping with the keys of another mapping that it does not have."""
    both = isinstance(under, Mapping) and isinstance(value, Mapping)
    return {**under, **value} if both else value


# --- building it ---


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Builds a model, as often as it is needed.

    Args:
        model_class: The library's class that makes it, such as AutoModelForCausalLM.
        config: Its configuration.
        folder: The folder of the weights to start from; None for new weights.
        may_have_new_head: Whether those weights may lack the head.
        attention: The library's name of the attention; None for its choice.
        adapters: The configuration of LoRA adapters; None for none.
        quantize: How layers are quantized; None: they are not.
        quantize_layers: Which layers are: `adapted`, those with adapters, or `all` but the last.
        untrained: Parts of the model, by name, that stay as they are, such as vision_tower.
    """

    model_class: str
    config: PreTrainedConfig
    folder: Path | None
    may_have_new_head: bool = False
    attention: str | None = None
    adapters: LoraConfig | None = None
    quantize: str | None = None
    quantize_layers: str = "adapted"
    untrained: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        """The model in training mode, with its adapters.

        New weights are drawn from torch's global generator. On the meta device no weights are read.

        Raises:
            UserError: The weights in the folder are of another model.
        """
        if self.adapters is None:
            model = self.build_base()
        else:
            model = self.build_with_adapters().get_base_model()
        for name, parameter in model.named_parameters():
            if any(is_part(name, part) for part in self.untrained):
                parameter.requires_grad_(False)
        return model

    def build_with_adapters(self) -> PeftModel:
        """peft's model around the model with its adapters; see `build`."""
        model = lora.with_adapters(
            self.build_base(), self.adapters, trains_head=self.may_have_new_head
        )
        if self.quantize is not None:
            quantize_layers(model, self.quantize, self.quantize_layers)
        return model

    def build_base(self) -> nn.Module:
        """The model in training mode, without adapters; see `build`."""
        auto_class = getattr(library(), self.model_class)
        options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        config = copy.deepcopy(self.config)  # the library changes it
        config.return_dict = True
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False  # balance.py computes the balance loss
        on_meta = torch.get_default_device().type == "meta"
        if self.folder is None or on_meta:
            model = auto_class.from_config(config, **options)
        else:
            model = self._read_weights(auto_class, config, options)
        group_experts(model)
        return model.train()

    def _read_weights(
        self, auto_class: Any, config: PreTrainedConfig, options: Mapping[str, Any]
    ) -> PreTrainedModel:
        try:
            model, report = auto_class.from_pretrained(
                self.folder,
                config=config,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
        except Exception as error:  # damaged files raise errors of safetensors, json and others
            raise UserError(
                f"the weights in {self.folder} cannot be read: {last_line(error)}"
            ) from error
        mismatched = (name for name, *_ in report["mismatched_keys"])
        missing = {*report["missing_keys"], *mismatched}
        wrong = sorted(name for name in missing if not self._may_be_new(name, model))
        if wrong:
            raise UserError(
                f"the weights in {self.folder} are of another model: {wrong[0]} is missing there "
                f"or has another shape ({len(wrong)} in all); "
                "leave task_args.config as the folder has it, or write pretrained: false"
            )
        return model

    def _may_be_new(self, name: str, model: PreTrainedModel) -> bool:
        """Whether training may start from new values of a parameter that the weights lack.

        That is so for a classifier's head, whose classes are new, and for a classifier's pooler,
        which a masked language model does not have. peft saves a head with its adapters, but not a
        pooler.
        """
        if not self.may_have_new_head:
            return False
        body = f"{model.base_model_prefix}."
        is_head = not name.startswith(body)
        is_pooler = name.startswith(f"{body}pooler.")
        return is_head or (is_pooler and self.adapters is None)


def is_part(name: str, part: str) -> bool:
    """Whether a parameter belongs to a part of a model.

    Args:
        name: Its name.
        part: The name of the part, or the end or the middle of it: whole components.
    """
    return f".{part}." in f".{name}."


def meta_model(recipe: Recipe) -> PreTrainedModel:
    """The model on the meta device: its structure, without memory for weights.

    Raises:
        UserError: Its configuration does not make a model.
    """
    try:
        with torch.device("meta"):
            return recipe.build()
    except UserError:
        raise
    except Exception as error:  # a wrong configuration may raise anything
        raise UserError(
            f"task_args.config does not make a {recipe.config.model_type}: {last_line(error)}"
        ) from error


# --- what it can do ---


def unmasked_attention() -> str:
    """The name of torch's causal attention without a mask, for rows without padding.

    For the name "sdpa" the library first checks whether positions begin anew within a row, and the
    host waits for a GPU's answer in every forward.
    https://huggingface.co/docs/transformers/attention_interface
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    library().AttentionInterface.register("sdpa_unmasked", sdpa_attention_forward)
    return "sdpa_unmasked"


FUSED_ATTENTION = "flex_attention"
"""The library's name of the attention that torch compiles, for masks and sinks of any kind."""


def with_fused_attention(recipe: Recipe) -> Recipe | None:
    """The recipe with a fused attention, if its model keeps scores in memory by itself.

    Returns:
        The recipe; None if the user has chosen an attention, or if the library's choice is fused,
        or if the model takes no fused one.
    """
    if recipe.attention is not None:
        return None
    if meta_model(recipe).config._attn_implementation != "eager":
        return None
    fused = dataclasses.replace(recipe, attention=FUSED_ATTENTION)
    try:
        meta_model(fused)
    except UserError:
        return None
    return fused


def takes_registered_attention(model: PreTrainedModel) -> bool:
    """Whether the model computes torch's attention, and takes it under another name too.

    Older models, such as Falcon and GPT-J, have tables of their own with the names that they take.
    """
    return model.config._attn_implementation == "sdpa" and model.is_backend_compatible()


def position_limits(model: nn.Module) -> Iterator[int]:
    """How many positions each learnt table in the model has; rotary models have no tables."""
    for name, module in model.named_modules():
        is_table = name.rpartition(".")[2] in POSITION_TABLES
        if not is_table or not isinstance(module, nn.Embedding):
            continue
        # RoBERTa's positions begin after that of padding.
        reserved = 0 if module.padding_idx is None else module.padding_idx + 1
        offset: Any = getattr(module, "offset", 0)
        yield module.num_embeddings - reserved - int(offset)
