"""Which module is split how: a task's plan, checked against the model, or one that is made for it.

    value           module      what happens
    embedding       Embedding   rows of the table are split; the output is summed, and is whole or
                                split along the sequence
    colwise         Linear      output features are split; the output stays split
    colwise_gather  Linear      output features are split; the output is gathered
    rowwise         Linear      input features are split, as a colwise layer leaves them; the output
                                is summed
    head            Linear      output features (the vocabulary) are split; the output stays split
                                for the loss, and is gathered otherwise
    experts         experts     the hidden width of each expert is split, or the experts themselves
                                are (experts.py)
    sequence        any         parameters are whole; it works on its part of the sequence, such as
                                a norm or dropout
    split           any         whole; its output is cut to this worker's part of the sequence
    split_input     any         its input is cut to this worker's part of the sequence
    gather          any         its input is gathered along the sequence, once for all colwise
                                layers in it
    adapter_in      Linear      beside a colwise layer, the thin first layer of its adapter, whose
                                second one is colwise too: whole; in a `gather` module its gradients
                                are summed over workers
    adapter_rowwise Linear      beside a rowwise layer, the same: as rowwise, but code that reads
                                its weight gets this worker's part
    partial         any         parameters are whole and used on split activations, so that their
                                gradients are summed over workers
    replicate       any         whole; this is the default

A linear layer is an nn.Linear, or one that keeps its weight as (in, out), as GPT-2's Conv1D of
transformers does. The keys of a plan are module names, in which `*` stands for one component.
Hugging Face's words for the values are understood too.

A model without a plan gets one in which every linear layer is `colwise_gather` and every embedding
is `embedding`. That is right for any model, and slower than a plan of its own, because every output
is gathered.
"""

import fnmatch
from dataclasses import dataclass
from typing import cast

from torch import nn

from strategies.dims import LayoutError, did_you_mean
from strategies.mixtures import expert_count, find_mixtures

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
    "adapter_in": (nn.Linear, None),
    "adapter_rowwise": (nn.Linear, 1),
    "partial": (None, None),
    "replicate": (None, None),
}
"""Each value → (the class that it is for, the dimension of the weight or table that it splits)."""
_DIMS_OF_HIDDEN_WIDTH = {"gate": 1, "up": 1, "down": 2}
"""The parameters of experts whose hidden width can be split → its dimension."""

SYNONYMS = {
    "embedding_rowwise": "embedding",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "partial",
}
"""The words of Hugging Face (`tp_plan` in transformers) → ours."""


@dataclass(frozen=True)
class Plan:
    """A plan that fits a model.

    Args:
        styles: Module name → value.
        dims: Parameter name → the dimension along which it is split.
        splits_sequence: Whether activations between split layers are split along the sequence.
    """

    styles: dict[str, str]
    dims: dict[str, int]
    splits_sequence: bool

    @property
    def has_whole_embeddings(self) -> bool:
        """Whether the output of embeddings is whole, because something else splits the sequence."""
        return not self.splits_sequence or "split_input" in self.styles.values()

    def gets_gathered_input(self, path: str) -> bool:
        """Whether a module's input has been gathered for a module around it."""
        around = [path[:i] for i, letter in enumerate(path) if letter == "."]
        is_gathered = any(self.styles.get(name) == "gather" for name in around)
        return self.splits_sequence and is_gathered


def make_plan(
    module: nn.Module,
    task_plan: dict[str, str] | None,
    sequence_parallel: bool,
    *,
    tp: int = 1,
    ep: int = 1,
) -> Plan:
    """The plan for a model.

    A parameter that several modules use (a tied one) is split wherever it is used.

    Args:
        module: The model.
        task_plan: The task's, module name → value; None: one is made.
        sequence_parallel: Whether activations may be split along the sequence.
        tp: The tensor-parallel degree.
        ep: The expert-parallel degree.

    Raises:
        LayoutError: A key has no module, a value is unknown or for another class, a tied weight is
            split in two ways, or experts cannot be divided equally.
    """
    if task_plan is None:
        styles = _default_styles(module)
    else:
        styles = _styles_of_task(module, task_plan)
        _add_tied_embeddings(module, styles)
    dims = _dims_of_parameters(module, styles)
    _require_equal_experts(module, styles, tp=tp, ep=ep)
    values = set(styles.values())
    splits_sequence = sequence_parallel and "sequence" in values
    if splits_sequence and not values & {"embedding", "split", "split_input"}:
        raise LayoutError(
            "the tensor plan has sequence modules but none where the sequence is split: give an "
            "embedding the value embedding, or the module whose output (input) is to be split the "
            "value split (split_input)"
        )
    return Plan(styles, dims, splits_sequence)


# --- the styles of modules ------------------------------------------------------------------------


def _styles_of_task(module: nn.Module, task_plan: dict[str, str]) -> dict[str, str]:
    """A task's plan as module name → value, checked."""
    modules = dict(module.named_modules())
    styles: dict[str, str] = {}
    for key, written in task_plan.items():
        value = SYNONYMS.get(written, written)
        if value not in VALUES:
            hint = did_you_mean(value, VALUES, f"write one of {', '.join(VALUES)}")
            raise LayoutError(f"the tensor plan has {key}: {written}, which is not a value: {hint}")
        names = [key] if key in modules else [name for name in modules if _matches(name, key)]
        if not names:
            hint = did_you_mean(key, modules, f"it has {', '.join(list(modules)[1:6])}, …")
            raise LayoutError(
                f"the tensor plan's {key!r} matches no module of {type(module).__name__}: {hint}"
            )
        for name in names:
            _require_class(modules[name], name, value)
            styles[name] = value
    return styles


def _matches(name: str, pattern: str) -> bool:
    """Whether a module name matches a key, component by component: `*` does not match dots."""
    parts = name.split(".")
    patterns = pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _require_class(module: nn.Module, name: str, value: str) -> None:
    """Raises LayoutError unless the module is one that the value is for."""
    if value == "experts" and not expert_count(module):
        raise LayoutError(
            f"the tensor plan splits {name} as experts, which it is not: leave it out"
        )
    kind, _ = VALUES[value]
    if kind is None or (kind is nn.Linear and is_transposed_linear(module)):
        return
    # A subclass with a forward of its own may compute something else.
    if not isinstance(module, kind) or type(module).forward is not kind.forward:
        raise LayoutError(
            f"the tensor plan splits {name} as {value}, which is for {kind.__name__}, but it is a "
            f"{type(module).__name__}: leave it out of the plan"
        )


def _default_styles(module: nn.Module) -> dict[str, str]:
    """The styles for a model without a plan."""
    styles: dict[str, str] = {}
    for name, child in module.named_modules():
        if "weight" not in dict(child.named_parameters(recurse=False)):
            # torch.nn.utils.weight_norm, for one, computes the weight from other parameters.
            continue
        is_linear = type(child) is nn.Linear or is_transposed_linear(child)
        if is_linear and out_features(child) > 1:
            styles[name] = "colwise_gather"
            continue
        # Renormalising and scaling by frequency look at the whole table and all tokens.
        is_plain_embedding = type(child) is nn.Embedding and child.max_norm is None
        if is_plain_embedding and not child.scale_grad_by_freq:
            styles[name] = "embedding"
    return styles


def _add_tied_embeddings(module: nn.Module, styles: dict[str, str]) -> None:
    """Split an embedding that is not in the plan if it shares its table with a split layer."""
    modules = dict(module.named_modules())
    split_weights = {
        id(modules[name].weight) for name, style in styles.items() if VALUES[style][1] == 0
    }
    for name, child in modules.items():
        if name not in styles and type(child) is nn.Embedding and id(child.weight) in split_weights:
            styles[name] = "embedding"


# --- the dimensions of parameters -----------------------------------------------------------------


def _dims_of_parameters(module: nn.Module, styles: dict[str, str]) -> dict[str, int]:
    """Parameter name → the dimension along which it is split; a tied one under all its names.

    Raises:
        LayoutError: A tied parameter is split in two ways.
    """
    first_split: dict[int, tuple[str, int]] = {}  # id → the first name that splits it, dimension
    ids: dict[str, int] = {}
    for name, owner in module.named_modules():
        parameters = owner.named_parameters(recurse=False, remove_duplicate=False)
        for key, parameter in parameters:
            path = f"{name}.{key}".lstrip(".")
            ids[path] = id(parameter)
            dim = _dim_of_parameter(owner, key, styles.get(name, "replicate"))
            if dim is None:
                continue
            first_path, first_dim = first_split.setdefault(id(parameter), (path, dim))
            if dim != first_dim:
                raise LayoutError(
                    f"{path} and {first_path} are one tied weight, but the tensor plan splits it "
                    "in two ways: give both modules values that split the same dimension "
                    "(embedding with head or colwise), or untie them"
                )
    return {path: first_split[key][1] for path, key in ids.items() if key in first_split}


def _dim_of_parameter(owner: nn.Module, key: str, style: str) -> int | None:
    """The dimension along which a module's parameter is split; None if it stays whole."""
    if style == "experts":
        return expert_dims(owner)[key]
    _, dim = VALUES[style]
    if key == "weight" and dim is not None and is_transposed_linear(owner):
        return 1 - dim
    is_split_bias = key == "bias" and dim == 0
    return dim if key == "weight" or is_split_bias else None


def expert_dims(experts: nn.Module) -> dict[str, int]:
    """The parameters of a mixture's experts → the dimension along which each is split."""
    names = {name for name, _ in experts.named_parameters(recurse=False)}
    if names == _DIMS_OF_HIDDEN_WIDTH.keys():
        return _DIMS_OF_HIDDEN_WIDTH
    return dict.fromkeys(names, 0)


def splits_between_experts(experts: nn.Module) -> bool:
    """Whether workers hold different experts, rather than a part of each."""
    return 0 in expert_dims(experts).values()


def _require_equal_experts(module: nn.Module, styles: dict[str, str], *, tp: int, ep: int) -> None:
    """Raises LayoutError if workers would hold different numbers of experts."""
    for mixture in find_mixtures(module):
        is_split = styles.get(mixture.name) == "experts"
        if not is_split or not splits_between_experts(mixture.experts):
            continue
        if mixture.count % (tp * ep):
            degrees = f"parallel.tp is {tp}"
            if ep > 1:
                degrees = f"parallel.tp × parallel.ep is {tp * ep}"
            divisors = [n for n in range(1, mixture.count + 1) if mixture.count % n == 0]
            raise LayoutError(
                f"{degrees}, which does not divide the {mixture.count} experts of {mixture.name}: "
                f"write {', '.join(map(str, divisors))}"
            )


# --- linear layers --------------------------------------------------------------------------------


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module computes x·W + b with W as (in, out).

    This is the Conv1D of transformers, which is recognised without importing that package.
    """
    if type(module).__name__ != "Conv1D" or not hasattr(module, "nf"):
        return False
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.dim() == 2 and weight.shape[1] == module.nf


def out_features(module: nn.Module) -> int:
    """The number of output features of a linear layer before it is split."""
    features = module.nf if is_transposed_linear(module) else module.out_features
    return cast("int", features)
