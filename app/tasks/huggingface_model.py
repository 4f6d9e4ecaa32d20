"""Models of the `transformers` library: where a description is, what kind of model it makes, and making it.

Weights are float32 whatever the type they were stored in, code that comes with a model is never run, and nothing is
fetched from the hub that is on this machine already.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.errors import UserError
from app.tasks.arguments import nearest

KINDS = {
    "causal_lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "sequence_classification": (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "image_classification": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
"""Kind: (the library's class that makes it, its table of model types that have the kind)."""

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
UNDECLARED = {"head_dim"}
"""Keys that models read though their configuration may have no field for them."""
HUB_SECONDS = 5.0
"""How long the hub may take to say that it is there."""
HUB_FILES = ["*.json", "*.txt", "*.model"]


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


@dataclass(frozen=True)
class Found:
    """What `task_args.model` names: a folder with a config.json, or a model type; `base` is its configuration."""

    named: str
    folder: Path | None
    base: Any

    @property
    def model_type(self) -> str:
        return str(self.base.model_type)

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
        raise UserError(
            f"task_args.model is {named!r}; write a model type such as llama, a folder or an id on the hub"
        )
    types = _names("CONFIG_MAPPING_NAMES", "configuration_auto")
    folder = Path(named).expanduser()
    if folder.is_dir():
        return _in_folder(named, folder, weights)
    if named in types:
        if weights:
            raise UserError(
                f"task_args.pretrained is true, but {named!r} is a model type without weights: write a folder or an "
                "id on the hub as task_args.model"
            )
        return Found(named, None, library().AutoConfig.for_model(named))
    if named.startswith((".", "/", "~")) or named.count("/") != 1:
        raise UserError(
            f"task_args.model: there is no folder and no model type {named!r}{nearest(named, types)}; write a folder "
            "with a config.json, an id on the hub (owner/name) or a model type such as llama, gpt2, bert or vit"
        )
    return _in_folder(named, _from_hub(named, weights), weights)


def _in_folder(named: str, folder: Path, weights: bool) -> Found:
    if not (folder / "config.json").is_file():
        raise UserError(f"task_args.model: {folder} has no config.json; give the folder of a transformers model")
    if weights and not any((folder / name).is_file() for name in WEIGHTS):
        raise UserError(
            f"task_args.pretrained is true, but {folder} has no weights ({WEIGHTS[0]}); write pretrained: false to "
            "begin from none"
        )
    try:
        base = library().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds
        raise UserError(
            f"task_args.model: {folder}/config.json describes no model that transformers has ({last_line(error)})"
        ) from error
    return Found(named, folder, base)


def _from_hub(named: str, weights: bool) -> Path:
    """The folder in the hub's cache on this machine, fetched if it is not there."""
    library()
    import huggingface_hub as hub

    wanted = [*HUB_FILES, "*.safetensors"] if weights else HUB_FILES
    with contextlib.suppress(Exception):  # not here, or not all of it
        folder = Path(hub.snapshot_download(named, allow_patterns=wanted, local_files_only=True))
        if (folder / "config.json").is_file() and (not weights or any((folder / name).is_file() for name in WEIGHTS)):
            return folder
    try:
        # The library would try for half a minute; one short question tells whether to begin.
        hub.get_session().head(hub.constants.ENDPOINT, timeout=HUB_SECONDS)
        return Path(hub.snapshot_download(named, allow_patterns=wanted, etag_timeout=HUB_SECONDS))
    except Exception as error:
        if type(error).__name__ in ("RepositoryNotFoundError", "GatedRepoError"):
            why = "there is no such model, or it needs a login (hf auth login)"
        else:
            why = f"it is not on this machine, and {hub.constants.ENDPOINT} cannot be reached"
        raise UserError(
            f"task_args.model: {named!r} cannot be had from the hub ({why}); give the folder of a copy"
        ) from error


def _names(table: str, module: str) -> dict[str, Any]:
    library()
    return dict(getattr(importlib.import_module(f"transformers.models.auto.{module}"), table))


def kinds_of(model_type: str) -> list[str]:
    """The kinds that a model type has."""
    return [kind for kind, (_, table) in KINDS.items() if model_type in _names(table, "modeling_auto")]


def choose_kind(found: Found, wanted: str) -> str:
    """`wanted` if the model has it; for auto what its configuration says it was, else what it is mostly used for.

    Raises UserError.
    """
    has = kinds_of(found.model_type)
    if wanted != "auto":
        if wanted not in has:
            raise UserError(
                f"task_args.kind is {wanted}, which {found.model_type} is not made for"
                + (f"; write {' or '.join(has)}" if has else ": none of the kinds is")
            )
        return wanted
    built = (found.base.architectures or [""])[0]
    for ending, kind in (
        ("ForCausalLM", "causal_lm"),
        ("LMHeadModel", "causal_lm"),
        ("ForSequenceClassification", "sequence_classification"),
        ("ForImageClassification", "image_classification"),
    ):
        if built.endswith(ending) and kind in has:
            return kind
    if is_encoder(found.model_type) and "sequence_classification" in has:
        return "sequence_classification"
    if not has:
        raise UserError(f"task_args.model: {found.model_type} is made for none of {', '.join(KINDS)}; give another")
    return has[0]


def is_encoder(model_type: str) -> bool:
    """Whether the model looks at a text from both sides, as BERT does."""
    return model_type in _names("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "modeling_auto")


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
        auto = getattr(library(), KINDS[self.kind][0])
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
            model, report = auto.from_pretrained(
                self.folder,
                config=config,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **how,
            )
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
        raise UserError(
            f"task_args.config does not make a {recipe.config.model_type}: {last_line(error)}"
        ) from error


def forward_on_meta(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raises UserError if a batch of these shapes does not go through the model."""
    try:
        with torch.device("meta"), torch.no_grad():
            model.eval()(*(x.to("meta") for x in inputs))  # normalising a batch wants more than one
    except NotImplementedError:  # it looks at values, which there are none of here
        return
    except (RuntimeError, ValueError) as error:
        shapes = " and ".join(str(tuple(x.shape[1:])) for x in inputs)
        raise UserError(
            f"{type(model).__name__} of this task_args.config does not take samples of {shapes}: {last_line(error)}"
        ) from error


def last_line(error: BaseException) -> str:
    """The last line of what an error says, where the library puts what matters, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")


def read_json(path: Path) -> dict[str, Any]:
    """A folder's small JSON file; {} where there is none or it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}


def position_tables(model: nn.Module) -> Iterator[int]:
    """How many positions each learnt table of positions in the model can serve."""
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and leaf in ("position_embeddings", "embed_positions", "wpe"):
            kept = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from behind it
            yield module.num_embeddings - kept - int(getattr(module, "offset", 0))
