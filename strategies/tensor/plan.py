"""Which module is split how: a task's plan checked against the model, or a plan for a model that came without one.

    value        module            split
    embedding    nn.Embedding      rows of the table; output summed, then whole or split along the sequence
    colwise      nn.Linear         output features; output stays split
    colwise_gather  nn.Linear      output features; output gathered
    rowwise      nn.Linear         input features, as a colwise layer left them; output summed
    experts      a mixture's   hidden width of each expert, or the experts themselves (experts.py)
    head         nn.Linear         output features (the vocabulary); kept split for the loss, else gathered
    sequence     norm, dropout     whole parameters; works on its part of the sequence
    split        any               whole; its output is narrowed to this worker's part of the sequence
    split_input  any               its input is narrowed to this worker's part of the sequence
    gather       any               its input is gathered along the sequence, once for all colwise layers in it
    partial      any               whole parameters, used on split activations: gradients are summed over workers
    replicate    any               whole

A linear layer is an nn.Linear, or one that keeps its weight the other way round, (in, out), as GPT-2's Conv1D in
transformers does. Keys are module names in which `*` stands for one component. Hugging Face's words for the same are
understood. Without a plan every linear layer is `colwise_gather` and every embedding `embedding`: always right, and
slower than a plan, because every output is gathered.
"""

import fnmatch
from dataclasses import dataclass

from torch import nn

from strategies.dims import LayoutError, did_you_mean
from strategies.mixtures import count_of, find_mixtures

VALUES: dict[str, tuple[type[nn.Module] | None, int | None]] = {
    "embedding": (nn.Embedding, 0),
    "colwise": (nn.Linear, 0),
    "colwise_gather": (nn.Linear, 0),
    "rowwise": (nn.Linear, 1),
    "experts": (None, None),
    "head": (nn.Linear, 0),
    "sequence": (None, None),
    "split": (None, None),
    "split_input": (None, None),
    "gather": (None, None),
    "partial": (None, None),
    "replicate": (None, None),
}
"""For each value the class it is for and the dimension of a weight (out, in) or table that it splits."""
BY_WIDTH = {"gate": 1, "up": 1, "down": 2}
"""By parameter, the dimension that is split where the hidden width is."""

SYNONYMS = {
    "embedding_rowwise": "embedding",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "partial",
}
"""Hugging Face's words (transformers' `tp_plan`)."""


@dataclass(frozen=True)
class Plan:
    """styles: module name → value. dims: parameter name → the dimension it is split along. sequence: whether
    activations between split layers are split along the sequence."""

    styles: dict[str, str]
    dims: dict[str, int]
    sequence: bool

    @property
    def whole_embeddings(self) -> bool:
        """Whether an embedding's output is whole, since something else splits the sequence."""
        return not self.sequence or "split_input" in self.styles.values()

    def in_gathered(self, path: str) -> bool:
        """Whether a module of that name gets what a module around it has gathered."""
        parents = [path[:i] for i, letter in enumerate(path) if letter == "."]
        return self.sequence and any(self.styles.get(parent) == "gather" for parent in parents)


def make_plan(
    module: nn.Module, given: dict[str, str] | None, sequence_parallel: bool, tp: int = 1, ep: int = 1
) -> Plan:
    """The plan `given`, checked, with a split parameter split wherever it is used; or one found. tp, ep: how many
    ways it has to be split.

    Raises:
        LayoutError: a key without a module, an unknown value, a module it does not fit, a tied weight split apart.
    """
    styles = _found(module) if given is None else _matched(module, given)
    if given is not None:
        _tie_embeddings(module, styles)
    dims = _dims(module, styles)
    _require_equal_parts(module, styles, tp, ep)
    sequence = sequence_parallel and "sequence" in styles.values()
    if sequence and not {"embedding", "split", "split_input"} & set(styles.values()):
        raise LayoutError(
            "the tensor plan has sequence modules but none where the sequence is split: give an embedding the value "
            "embedding, or the module whose output (input) is to be split the value split (split_input)"
        )
    return Plan(styles, dims, sequence)


def _matched(module: nn.Module, given: dict[str, str]) -> dict[str, str]:
    modules = dict(module.named_modules())
    styles: dict[str, str] = {}
    for key, written in given.items():
        value = SYNONYMS.get(written, written)
        if value not in VALUES:
            hint = did_you_mean(value, VALUES, f"write one of {', '.join(VALUES)}")
            raise LayoutError(f"the tensor plan has {key}: {written}, which is not a value: {hint}")
        names = [key] if key in modules else [name for name in modules if _matches(name, key)]
        if not names:
            hint = did_you_mean(key, modules, f"it has {', '.join(list(modules)[1:6])}, …")
            raise LayoutError(f"the tensor plan's {key!r} matches no module of {type(module).__name__}: {hint}")
        for name in names:
            _require_class(modules[name], name, value)
            styles[name] = value
    return styles


def _matches(name: str, key: str) -> bool:
    """Component by component, so that `*` does not run over dots."""
    parts, wanted = name.split("."), key.split(".")
    return len(parts) == len(wanted) and all(fnmatch.fnmatchcase(p, w) for p, w in zip(parts, wanted))


def _require_class(module: nn.Module, name: str, value: str) -> None:
    kind = VALUES[value][0]
    if value == "experts" and not count_of(module):
        raise LayoutError(f"the tensor plan splits {name} as experts, which it is not: leave it out")
    if kind is nn.Linear and is_transposed_linear(module):
        return
    if kind is not None and (not isinstance(module, kind) or type(module).forward is not kind.forward):
        raise LayoutError(
            f"the tensor plan splits {name} as {value}, which is for {kind.__name__}, but it is a "
            f"{type(module).__name__}: leave it out of the plan"
        )


def expert_dims(experts: nn.Module) -> dict[str, int]:
    """By parameter, the dimension that is split."""
    names = {name for name, _ in experts.named_parameters(recurse=False)}
    return BY_WIDTH if names == BY_WIDTH.keys() else dict.fromkeys(names, 0)


def _require_equal_parts(module: nn.Module, styles: dict[str, str], tp: int, ep: int) -> None:
    """
    Raises:
        LayoutError: experts that are split whole, in parts that would not be equal.
    """
    for found in find_mixtures(module):
        if styles.get(found.name) == "experts" and 0 in expert_dims(found.experts).values() and found.count % (tp * ep):
            degrees = f"parallel.tp × parallel.ep is {tp * ep}" if ep > 1 else f"parallel.tp is {tp}"
            fitting = ", ".join(str(n) for n in range(1, found.count + 1) if found.count % n == 0)
            raise LayoutError(
                f"{degrees}, which does not divide the {found.count} experts of {found.name}: write {fitting}"
            )


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether it computes x·W + b with W (in, out): transformers' Conv1D, known by its looks, not imported."""
    if type(module).__name__ != "Conv1D" or not hasattr(module, "nf"):
        return False
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.dim() == 2 and weight.shape[1] == module.nf


def out_features(module: nn.Module) -> int:
    """Of a linear layer before it is split."""
    return module.nf if is_transposed_linear(module) else module.out_features  # type: ignore[return-value]


def _found(module: nn.Module) -> dict[str, str]:
    styles = {}
    for name, child in module.named_modules():
        if "weight" not in dict(child.named_parameters(recurse=False)):
            continue  # torch.nn.utils.weight_norm, for one, makes the weight of other parameters
        if (type(child) is nn.Linear or is_transposed_linear(child)) and out_features(child) > 1:
            styles[name] = "colwise_gather"
        elif type(child) is nn.Embedding and child.max_norm is None and not child.scale_grad_by_freq:
            styles[name] = "embedding"
    return styles


def _tie_embeddings(module: nn.Module, styles: dict[str, str]) -> None:
    """An embedding outside the plan that shares its table with a split layer is split likewise."""
    modules = dict(module.named_modules())
    split = {id(modules[name].weight) for name, style in styles.items() if VALUES[style][1] == 0}
    for name, child in modules.items():
        if name not in styles and type(child) is nn.Embedding and id(child.weight) in split:
            styles[name] = "embedding"


def _dims(module: nn.Module, styles: dict[str, str]) -> dict[str, int]:
    """Along which dimension each parameter is split, aliases included.

    Raises:
        LayoutError: one parameter, two ways.
    """
    chosen: dict[int, tuple[str, int]] = {}  # parameter → the first name that splits it
    names: dict[str, int] = {}
    for name, owner in module.named_modules():
        dim = VALUES[styles.get(name, "replicate")][1]
        for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            path = f"{name}.{key}".lstrip(".")
            names[path] = id(parameter)
            split = dim if key == "weight" or (key == "bias" and dim == 0) else None
            if styles.get(name) == "experts":
                split = expert_dims(owner)[key]
            if key == "weight" and dim is not None and is_transposed_linear(owner):
                split = 1 - dim
            if split is None:
                continue
            before = chosen.setdefault(id(parameter), (path, split))
            if before[1] != split:
                raise LayoutError(
                    f"{path} and {before[0]} are one tied weight, but the tensor plan splits it in two ways: give both "
                    "modules values that split the same dimension (embedding with head or colwise), or untie them"
                )
    return {path: chosen[each][1] for path, each in names.items() if each in chosen}
