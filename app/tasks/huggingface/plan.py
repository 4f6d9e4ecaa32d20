"""How a `transformers` model may be split: its own tensor plan in our words, and its repeating blocks.

The library ships plans for many models (https://huggingface.co/docs/transformers/perf_infer_gpu_multi). Where a part is
split in a way that has no equal here (multi-head latent attention), its linear layers are split one by
one and gathered, which is always right: a colwise layer whose rowwise partner stayed whole would not be.
"""

from __future__ import annotations

import fnmatch
import math
from typing import Any

from torch import nn

from app.errors import UserError
from strategies.mixtures import find_mixtures
from strategies.tensor.plan import SYNONYMS

GATHER = "colwise_gather"
WORDS = SYNONYMS | {"colwise": "colwise", "rowwise": "rowwise", "rowwise_split_input": GATHER}
"""The library's words that have an equal here. The last one's input is whole: splitting its output serves as well."""


def tensor_plan(model: nn.Module, *, parallel_head: bool) -> dict[str, str] | None:
    """{module name: value of strategies' tensor plan}, or None where the library ships no plan for the model.

    parallel_head: whether the logits are a vocabulary whose loss can be computed on the parts.
    """
    written: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    modules = dict(model.named_modules())
    if not written:
        return None
    plan: dict[str, str] = {}
    unknown: set[str] = set()  # parents of which a part is split in a way of the library's own
    head = model.get_output_embeddings() if parallel_head else None  # type: ignore[operator]
    for key, word in written.items():
        for name in _matching(key, modules):
            value = WORDS.get(word)
            if value == GATHER and modules[name] is head:
                value = "head"
            if value is not None and _fits(modules[name], value):
                plan[name] = value
            elif value != "embedding":  # a table with a forward of its own stays whole
                unknown.add(_parent(name))
        if not _matching(key, modules):  # a bare parameter, perhaps, of a module that the model has
            unknown.update(_matching(_parent(key), modules))
    for parent in unknown | _unpaired(plan):
        for name in [name for name in plan if _parent(name) == parent]:
            if plan[name] == "partial":
                del plan[name]
            elif plan[name] in ("colwise", "rowwise"):
                plan[name] = GATHER
    table = model.get_input_embeddings()  # type: ignore[operator]
    if plan and isinstance(table, nn.Module) and _fits(table, "embedding"):
        plan |= {name: "embedding" for name, module in modules.items() if module is table}
    if not plan:
        return None
    return plan | _along_sequence(model, plan) | {found.name: "experts" for found in find_mixtures(model)}


def _along_sequence(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """The rest of a plan in which the residual stream is split along the sequence; nothing where the model's layers are
    not norms around modules of which every layer is split. Positions and masks are made from the embeddings, so those
    stay whole; an attention asks its input for the sequence's length, so that is whole again."""
    names, found, table = blocks(model), {}, model.get_input_embeddings()  # type: ignore[operator]
    base = getattr(model, "base_model", model)
    if names is None or base is model or "head" not in plan.values():
        return {}
    around = {name: module for name, module in base.named_children() if not isinstance(module, nn.ModuleList)}
    prefix = next(f"{name}." for name, module in model.named_modules() if module is base)
    for name, module in around.items():
        if module is not table and any(True for _ in module.parameters()):
            found[prefix + name] = module
    for block in names:
        found |= {f"{block}.{name}": module for name, module in model.get_submodule(block).named_children()}
    inner = {path: _value_along_sequence(path, module, plan) for path, module in found.items()}
    whole = len({_parent(path) for path in names}) != 1 or None in inner.values() or _own_parameters(model, names)
    return {} if whole else {names[0]: "split_input", **{path: value for path, value in inner.items() if value}}


def _value_along_sequence(path: str, module: nn.Module, plan: dict[str, str]) -> str | None:
    layers = [name for name, child in module.named_modules() if type(child).__name__ in ("Linear", "Conv1D")]
    if not layers:
        known = ("Norm", "Dropout", "Identity")
        return "sequence" if any(word in type(module).__name__ for word in known) else None
    values = {plan.get(f"{path}.{name}") for name in layers}
    return "gather" if values == {"colwise", "rowwise"} else None


def _own_parameters(model: nn.Module, names: list[str]) -> bool:
    """Whether a block has parameters outside its modules."""
    return any(True for name in names for _ in model.get_submodule(name).parameters(recurse=False))


def require_full_attention(config: Any, length: int) -> None:
    """Raises UserError unless every layer attends to all tokens before, in sequences of this length."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if isinstance(window, int) and window < length:
        raise UserError(
            f"the model's layers see {window} tokens back (sliding_window) and task_args.sequence_length is {length}, "
            f"which parallel.cp cannot split: write a length of at most {window}, or leave parallel.cp out"
        )
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise UserError(f"the model has layers of {min(other)}, which parallel.cp cannot split: leave parallel.cp out")


def _unpaired(plan: dict[str, str]) -> set[str]:
    """Parents in which a colwise layer has no rowwise one to follow it, or the other way round."""
    columns = {_parent(name) for name, value in plan.items() if value == "colwise"}
    rows = {_parent(name) for name, value in plan.items() if value == "rowwise"}
    return columns ^ rows


def _fits(module: nn.Module, value: str) -> bool:
    kind = {"embedding": nn.Embedding, "sequence": nn.Module, "partial": nn.Module}.get(value, nn.Linear)
    plain = kind is nn.Module or type(module).forward is kind.forward
    return isinstance(module, kind) and plain


def _matching(key: str, modules: dict[str, nn.Module]) -> list[str]:
    """Names of the modules that a key of the library's plan means: `*` stands for one component."""
    wanted = key.split(".")
    return [
        name
        for name in modules
        if name.count(".") == len(wanted) - 1
        and all(fnmatch.fnmatchcase(part, want) for part, want in zip(name.split("."), wanted))
    ]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def heads(config: Any, plan: dict[str, str] | None) -> int | None:
    """What the degree of tensor parallelism must divide: query and key-value heads, where attention is split."""
    if not any(value == "rowwise" and "att" in _parent(name) for name, value in (plan or {}).items()):
        return None
    counts = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    known = [count for count in counts if isinstance(count, int) and count > 0]
    return math.gcd(*known) if known else None


def blocks(model: nn.Module) -> list[str] | None:
    """The model's layers, where it has several. None: to be looked for."""
    names = layers(model)
    return names if len(names) > 1 else None


def layers(model: nn.Module) -> list[str]:
    """The modules in lists whose class the library never splits over devices."""
    whole = set(getattr(model, "_no_split_modules", None) or ())
    modules = dict(model.named_modules())
    names = [
        name
        for name, module in modules.items()
        if type(module).__name__ in whole and isinstance(modules.get(_parent(name)), nn.ModuleList)
    ]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
