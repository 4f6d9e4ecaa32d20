"""How a `transformers` model may be split: its own tensor plan in our words, and its blocks.

The library has plans for many models
(https://huggingface.co/docs/transformers/perf_infer_gpu_multi). If it splits a part in a way that
has no equal here (multi-head latent attention), the linear layers of that part are split one by one
and gathered. That is always right, while a colwise layer without its rowwise partner would not be.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from app.errors import UserError
from strategies.mixtures import find_mixtures
from strategies.tensor.plan import SYNONYMS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from app.tasks.huggingface.lora import Adapted

GATHER = "colwise_gather"
WORDS = {
    **SYNONYMS,
    "colwise": "colwise",
    "rowwise": "rowwise",
    # The layer's input is whole, so that splitting its output serves as well.
    "rowwise_split_input": GATHER,
}
"""For each word of the library's plans that has an equal here, our word."""
LAYER_TYPES = ("Linear", "Conv1D")
ALONG_SEQUENCE = ("Norm", "Dropout", "Identity")
"""Parts of the names of classes that compute each token by itself."""


def tensor_plan(model: nn.Module, *, parallel_head: bool) -> dict[str, str] | None:
    """The tensor plan of a model, by module name (strategies/tensor/plan.py).

    Args:
        model: The model, on any device.
        parallel_head: Whether the logits are a vocabulary, whose loss can be computed on its parts.

    Returns:
        The plan; None if the library has no plan for the model.
    """
    library_plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not library_plan:
        return None
    modules = dict(model.named_modules())
    head = model.get_output_embeddings() if parallel_head else None  # type: ignore[operator]
    plan: dict[str, str] = {}
    untranslated: set[str] = set()  # modules with a part that the library splits in its own way
    for key, word in library_plan.items():
        names = _matching(key, modules)
        for name in names:
            value = WORDS.get(word)
            if value == GATHER and modules[name] is head:
                value = "head"
            if value is not None and _can_be_split(modules[name], value):
                plan[name] = value
            elif value != "embedding":  # an embedding with a forward of its own stays whole
                untranslated.add(_parent(name))
        if not names:  # the key may name a parameter of a module
            untranslated.update(_matching(_parent(key), modules))
    for parent in untranslated | _parents_without_pairs(plan):
        _gather_layers_of(parent, plan)
    table = model.get_input_embeddings()  # type: ignore[operator]
    if plan and isinstance(table, nn.Module) and _can_be_split(table, "embedding"):
        plan |= {name: "embedding" for name, module in modules.items() if module is table}
    if not plan:
        return None
    experts = {mixture.name: "experts" for mixture in find_mixtures(model)}
    return {**plan, **_sequence_parallel_plan(model, plan), **experts}


def with_adapters(plan: dict[str, str], adapted: Mapping[str, Adapted]) -> dict[str, str] | None:
    """The tensor plan of a model whose linear layers have adapters.

    An adapter adds B·(A·x) to a layer's W·x, and is split as the layer is. Beside a layer that is
    split by columns B is too, and A is whole. Beside one that is split by rows A is too, and B is
    whole: it works on what A's sum leaves, which is a part of the sequence if that is split.

    Args:
        plan: That of the same model without adapters.
        adapted: The names of the layers with adapters, and where their parts are.

    Returns:
        The plan; None if there is an adapter beside a layer that is split in another way.
    """
    splits_sequence = "sequence" in plan.values()
    adapters: dict[str, str] = {}
    for name, parts in adapted.items():
        value = plan.get(name)
        if value == "colwise":
            first = "adapter_in"
            second = "colwise"
        elif value == "rowwise":
            first = "adapter_rowwise"
            second = "sequence" if splits_sequence else "replicate"
        elif value is None and not splits_sequence:
            continue
        else:
            return None
        adapters[parts.base] = value
        adapters |= dict.fromkeys(parts.first, first)
        adapters |= dict.fromkeys(parts.second, second)
    kept = {name: value for name, value in plan.items() if name not in adapted}
    return kept | adapters


def _gather_layers_of(parent: str, plan: dict[str, str]) -> None:
    """Change a plan, in place, so that each layer of a module is split by itself and gathered."""
    for name in [name for name in plan if _parent(name) == parent]:
        if plan[name] == "partial":
            del plan[name]
        elif plan[name] in ("colwise", "rowwise"):
            plan[name] = GATHER


def _sequence_parallel_plan(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """What to add to a plan so that the residual stream is split along the sequence.

    Nothing is added unless the model's layers are norms around modules in which every linear layer
    is split. Positions and masks are made from the embeddings, so those stay whole. Attention reads
    the sequence's length from its input, so that is gathered.
    """
    block_names = blocks(model)
    base = getattr(model, "base_model", model)
    if block_names is None or base is model or "head" not in plan.values():
        return {}
    in_one_list = len({_parent(name) for name in block_names}) == 1
    if not in_one_list or _have_own_parameters(model, block_names):
        return {}
    values: dict[str, str] = {block_names[0]: "split_input"}
    for name, module in _modules_around_residual(model, base, block_names).items():
        value = _sequence_value(name, module, plan)
        if value is None:
            return {}
        values[name] = value
    return values


def _modules_around_residual(
    model: nn.Module, base: nn.Module, block_names: list[str]
) -> dict[str, nn.Module]:
    """The modules that read or write the residual stream, by their names in the model.

    They are those with parameters beside the blocks, but for the input embeddings, and the children
    of the blocks.
    """
    table = model.get_input_embeddings()  # type: ignore[operator]
    base_name = next(name for name, module in model.named_modules() if module is base)
    modules: dict[str, nn.Module] = {}
    for name, module in base.named_children():
        has_parameters = any(True for _ in module.parameters())
        if not isinstance(module, nn.ModuleList) and module is not table and has_parameters:
            modules[f"{base_name}.{name}"] = module
    for block_name in block_names:
        for name, module in model.get_submodule(block_name).named_children():
            modules[f"{block_name}.{name}"] = module
    return modules


def _sequence_value(name: str, module: nn.Module, plan: dict[str, str]) -> str | None:
    """How a module's input is split along the sequence; None if it cannot be."""
    layer_names = [
        layer_name
        for layer_name, layer in module.named_modules()
        if type(layer).__name__ in LAYER_TYPES
    ]
    if not layer_names:
        class_name = type(module).__name__
        return "sequence" if any(part in class_name for part in ALONG_SEQUENCE) else None
    values = {plan.get(f"{name}.{layer_name}") for layer_name in layer_names}
    return "gather" if values == {"colwise", "rowwise"} else None


def _have_own_parameters(model: nn.Module, block_names: list[str]) -> bool:
    """Whether a block has parameters outside its child modules."""
    for name in block_names:
        if any(True for _ in model.get_submodule(name).parameters(recurse=False)):
            return True
    return False


def require_full_attention(config: PreTrainedConfig, length: int) -> None:
    """Check that every layer attends to all earlier tokens.

    Args:
        config: The model's configuration.
        length: The length of the sequences.

    Raises:
        UserError: A layer does not.
    """
    uses_window = getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if uses_window else None
    if isinstance(window, int) and window < length:
        raise UserError(
            f"the model's layers see {window} tokens back (sliding_window) and "
            f"task_args.sequence_length is {length}, which parallel.cp cannot split: "
            f"write a length of at most {window}, or leave parallel.cp out"
        )
    layer_types = set(getattr(config, "layer_types", None) or ())
    other_types = layer_types - {"full_attention", "sliding_attention"}
    if other_types:
        raise UserError(
            f"the model has layers of {min(other_types)}, which parallel.cp cannot split: "
            "leave parallel.cp out"
        )


def _parents_without_pairs(plan: dict[str, str]) -> set[str]:
    """Modules with a colwise layer that no rowwise one follows, or the other way round."""
    with_colwise = {_parent(name) for name, value in plan.items() if value == "colwise"}
    with_rowwise = {_parent(name) for name, value in plan.items() if value == "rowwise"}
    return with_colwise ^ with_rowwise


def _can_be_split(module: nn.Module, value: str) -> bool:
    """Whether a module is one that the value of a plan can be applied to."""
    if value in ("sequence", "partial"):
        return True
    module_type = nn.Embedding if value == "embedding" else nn.Linear
    return isinstance(module, module_type) and type(module).forward is module_type.forward


def _matching(key: str, modules: dict[str, nn.Module]) -> list[str]:
    """Names of the modules that a key of the library's plan means; `*` is one component."""
    patterns = key.split(".")
    names = []
    for name in modules:
        parts = name.split(".")
        if len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns)):
            names.append(name)
    return names


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def heads(config: PreTrainedConfig, plan: dict[str, str] | None) -> int | None:
    """The number that the degree of tensor parallelism must divide.

    It is the greatest common divisor of the numbers of query heads and of key-value heads.

    Args:
        config: The model's configuration.
        plan: The model's tensor plan; None if it has none.

    Returns:
        The number; None if the plan does not split attention.
    """
    splits_attention = any(
        value == "rowwise" and "att" in _parent(name) for name, value in (plan or {}).items()
    )
    if not splits_attention:
        return None
    counts = [
        getattr(config, "num_attention_heads", None),
        getattr(config, "num_key_value_heads", None),
    ]
    known = [count for count in counts if isinstance(count, int) and count > 0]
    return math.gcd(*known) if known else None


def blocks(model: nn.Module) -> list[str] | None:
    """The names of the model's layers; None if it has fewer than two."""
    names = layers(model)
    return names if len(names) > 1 else None


def layers(model: nn.Module) -> list[str]:
    """The names of the modules in lists whose class the library never splits over devices."""
    unsplit_classes = set(getattr(model, "_no_split_modules", None) or ())
    modules = dict(model.named_modules())
    names = []
    for name, module in modules.items():
        is_in_list = isinstance(modules.get(_parent(name)), nn.ModuleList)
        if is_in_list and type(module).__name__ in unsplit_classes:
            names.append(name)
    return [name for name in names if not any(name.startswith(f"{outer}.") for outer in names)]
