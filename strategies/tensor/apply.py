"""Tensor parallelism: each layer's matrices are split over workers that see the same samples.

Take two linear layers with an elementwise function f between them. Split the first by columns of
its matrix A, the second by rows of its matrix B:

    Y = f(X·A)·B,    A = [A₁ A₂],    B = [B₁; B₂]      ⇒      Y = Σᵣ f(X·Aᵣ)·Bᵣ

Worker r computes f(X·Aᵣ)·Bᵣ alone, and one all-reduce for each pair of layers gives the sum. A
feed-forward block is such a pair; so is attention, where the heads are the columns. Between pairs
all workers would compute the same. With *sequence parallelism* each does so on its part of the
sequence instead: the all-reduce becomes a reduce-scatter after B and an all-gather before A, which
sends the same and divides the activations. The last layer is split by vocabulary, and so is the
loss (loss.py). Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198.

Choose it for layers that are too large for one device, or if there are more workers than samples in
a batch. Use it within a node only: it communicates several times in each block. Backward hides a
part of that behind products (layers.py), and `parallel.async_tp` more (overlap.py). Combine it with
fsdp across nodes.

Every parameter becomes a DTensor, split or replicated, so that optimizers, clipping and checkpoints
see one kind. What a module *reads* is plain, however: split layers compute with their own part and
the collectives of ops.py, other modules read whole parameters, and any other code that reads a
split layer's weight gets it gathered. So a model's own code runs unchanged. plan.py says which
module does what.

- All workers have the same seed, so that dropout is the same on all of them where activations are.
  On split activations each worker draws numbers of its own (randomness.py).
- The gradients of whole parameters that are used on a part of the sequence are summed over workers,
  with one all-reduce per step.
- In the first step the gradients of the other whole parameters are compared between workers. So a
  plan that splits activations where the model does not expect it is an error that says so, and does
  not silently train a worse model.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from strategies.dims import LayoutError
from strategies.grad_sync import all_reduce_, local
from strategies.options import Options
from strategies.precision import Product
from strategies.strategy import MicroStep, Strategy
from strategies.tensor import experts, ops
from strategies.tensor.layers import SplitLayers
from strategies.tensor.loss import VocabularyLogits
from strategies.tensor.plan import Plan, is_transposed_linear, make_plan, out_features
from strategies.tensor.randomness import own_stream
from strategies.torch_internals import rnn_reading_its_parameters
from strategies.traits import CHANGING_OR_HOOKED, Trait

_LINEAR_STYLES = (
    *("colwise", "colwise_gather", "head", "rowwise"),
    *("adapter_in", "adapter_rowwise"),
)
"""The styles of layers whose product fp8 may replace (precision.py)."""
_READ_AS_PARTS = ("experts", "adapter_rowwise")
"""The styles of modules whose parameters the model's code reads as this worker's part.

The experts' own code computes with that part, and peft looks at the type of an adapter's weight.
"""
_SHAPE_ERRORS = ("shape", "size of tensor", "unflatten", "mat1 and mat2", "size mismatch")
"""Words of torch's errors about shapes that an operation cannot use."""

ReplaceParameter = Callable[[nn.Parameter, int | None], nn.Parameter]
"""(parameter, the dimension along which it is split or None) → what replaces it on this worker."""
SplitModule = Any
"""A module whose class `_split_class` has made: `rewrite` has set _split, _is_transposed,
_gets_gathered_input and, for some styles, _product or _compute_experts."""


# --- the forwards of split modules ----------------------------------------------------------------


def _own_part(module: nn.Module, name: str) -> Any:
    """This worker's part of a parameter; None for a bias that the module does not have."""
    parameter = nn.Module.__getattr__(module, name)  # not the property of that name, which gathers
    if not isinstance(parameter, DTensor):
        return parameter
    part = parameter.to_local()
    if not torch.compiler.is_compiling():
        ops.set_parameter(part, parameter)
    return part


def _own_matrix(module: SplitModule) -> Tensor:
    """This worker's part of a linear layer's weight as (out, in)."""
    weight = module._split.narrow_weight(module, _own_part(module, "weight"))
    return weight.t() if module._is_transposed else weight


def _colwise_forward(self: SplitModule, x: Tensor) -> Tensor:
    weight = _own_matrix(self)
    bias = _own_part(self, "bias")
    is_autocast = torch.is_autocast_enabled(x.device.type)
    if bias is not None and bias.dtype != weight.dtype and not is_autocast:
        # fsdp keeps some biases whole and in float32.
        bias = bias.to(weight.dtype)
    y = self._split.columns(
        x, weight, bias, is_gathered=self._gets_gathered_input, product=self._product
    )
    return ops.mark_split(y)


def _colwise_gather_forward(self: SplitModule, x: Tensor) -> Tensor:
    return ops.gather_features(_colwise_forward(self, x), self._split.peers, out_features(self))


def _head_forward(self: SplitModule, x: Tensor) -> Tensor:
    logits = _colwise_forward(self, x)
    if self._split.loss_parallel and self.training and torch.is_grad_enabled():
        return VocabularyLogits(logits, self._split.peers, out_features(self))
    return ops.gather_features(logits, self._split.peers, out_features(self))


def _rowwise_forward(self: SplitModule, x: Tensor) -> Tensor:
    weight = _own_matrix(self)
    if x.size(-1) != weight.size(1):
        raise LayoutError(
            f"a layer that the tensor plan splits rowwise got {x.size(-1)} features and has "
            f"{weight.size(1)} here: what comes before it must be colwise, or leave it out of the "
            "plan"
        )
    y = self._split.rows(x, weight, product=self._product)
    bias = _own_part(self, "bias")
    return y if bias is None else y + bias.to(y.dtype)


def _adapter_in_forward(self: SplitModule, x: Tensor) -> Tensor:
    weight = _own_part(self, "weight")
    bias = _own_part(self, "bias")
    if not self._gets_gathered_input:
        return self._product.forward(x, weight, bias)
    return self._split.columns(x, weight, bias, is_gathered=True, product=self._product)


def _embedding_forward(self: SplitModule, tokens: Tensor) -> Tensor:
    table = _own_part(self, "weight")
    split = self._split
    start, end = split.peers.bounds(self.num_embeddings)
    if end > start:
        is_own = (tokens >= start) & (tokens < end)
        own_tokens = (tokens - start).where(is_own, 0)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < end else None
        rows = F.embedding(own_tokens, table, padding) * is_own.unsqueeze(-1)
    else:
        # Adding the empty table's sum, which is 0, keeps the parameter in the graph.
        rows = table.new_zeros((*tokens.shape, self.embedding_dim)) + table.sum()
    if torch.is_autocast_enabled(tokens.device.type):
        rows = rows.float()  # a frozen table has 16 bits (frozen.py), what autocast leaves has 32
    return split.leave(rows, keeps_whole=split.plan.has_whole_embeddings)


def _experts_forward(self: SplitModule, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    split = self._split
    entered = split.enter(x)
    shared_weights = split.share(weights)
    if not self.training or torch.compiler.is_compiling():
        return split.leave(self._compute_experts(entered, index, shared_weights))
    # Workers compute different numbers of tokens, and so draw different numbers.
    with own_stream(split.peers, x.device):
        y = self._compute_experts(entered, index, shared_weights)
    return split.leave(y)


_FORWARDS: dict[str, Callable[..., Tensor]] = {
    "colwise": _colwise_forward,
    "colwise_gather": _colwise_gather_forward,
    "head": _head_forward,
    "rowwise": _rowwise_forward,
    "adapter_in": _adapter_in_forward,
    "adapter_rowwise": _rowwise_forward,
    "experts": _experts_forward,
    "embedding": _embedding_forward,
}


def _read_parameter(name: str, reads_part: bool, self: SplitModule) -> Any:
    """A parameter as the model's own code reads it.

    It is plain, and whole unless `reads_part`. One that fsdp has sharded as well is returned as it
    is, which the model's code cannot use.
    """
    parameter = nn.Module.__getattr__(self, name)
    if not isinstance(parameter, DTensor) or parameter.device_mesh != self._split.mesh:
        return parameter
    if reads_part or parameter.placements[0].is_replicate():
        return parameter.to_local()
    return parameter.full_tensor()


@functools.cache
def _split_class(kind: type[nn.Module], style: str, parameters: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of `kind` with the forward of `style` and properties that read parameters."""
    members: dict[str, Any] = {}
    for name in parameters:
        reads_part = style in _READ_AS_PARTS
        members[name] = property(functools.partial(_read_parameter, name, reads_part))
    if style in _FORWARDS:
        members["forward"] = _FORWARDS[style]
    if issubclass(kind, nn.RNNBase):
        members |= rnn_reading_its_parameters()
    return type(kind.__name__, (kind,), members)


# --- splitting a model ----------------------------------------------------------------------------


def apply(
    module: nn.Module,
    mesh: DeviceMesh,
    task_plan: dict[str, str] | None,
    options: Options,
    *,
    splits_backward: bool = False,
    shares_narrow_weights: bool = False,
    ep: int = 1,
) -> SplitLayers:
    """Split a model in place.

    Args:
        module: The model, on meta.
        mesh: The workers, in one dimension.
        task_plan: The task's tensor plan; None: one is made.
        options: How the layers behave.
        splits_backward: Whether backward is in two halves (pipeline/weight_grad.py).
        shares_narrow_weights: See SplitLayers.
        ep: The ways that experts have been split before.

    Returns:
        What the split layers share.

    Raises:
        LayoutError: The plan does not fit the model.
    """
    plan = make_plan(module, task_plan, options.sequence_parallel, tp=mesh.size(), ep=ep)
    peers = ops.Peers(mesh.get_group())
    split = SplitLayers(
        mesh,
        plan,
        peers,
        loss_parallel=options.loss_parallel,
        # Recomputing a block in backward gathers its inputs again anyway.
        keeps_gathered=options.activation_checkpointing != "none",
        splits_backward=splits_backward,
        shares_narrow_weights=shares_narrow_weights,
        overlaps=options.async_tp and not splits_backward,
    )

    def distribute(parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        whole = parameter.detach()
        if dim is None:
            part = whole
            placement: Placement = Replicate()
        else:
            part = peers.part(whole, dim).contiguous().clone()
            placement = Shard(dim)
        distributed = DTensor.from_local(
            part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return nn.Parameter(distributed, requires_grad=parameter.requires_grad)

    rewrite(module, split, distribute)
    # The fast path of nn.MultiheadAttention would read parameters past the modules that own them.
    torch.backends.mha.set_fastpath_enabled(False)
    return split


def rewrite(module: nn.Module, split: SplitLayers, replace: ReplaceParameter) -> None:
    """Give every module its parameters on this worker and the forward of its style, in place.

    Args:
        module: The model.
        split: What the split layers share.
        replace: Makes what replaces a parameter.
    """
    replaced: dict[int, nn.Parameter] = {}
    originals: list[nn.Parameter] = []  # keeps them alive, so that no other gets an id of theirs
    for path, owner in list(module.named_modules()):
        style = split.plan.styles.get(path, "replicate")
        is_transposed = is_transposed_linear(owner)
        if is_transposed:
            # It is recognised by the shape of its weight, which is about to change.
            vars(owner)["out_features"] = owner.nf
        if style == "experts":
            vars(owner)["_compute_experts"] = experts.split_forward(owner, split.peers)
        parameters = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in parameters.items():
            originals.append(parameter)
            if id(parameter) not in replaced:
                dim = split.plan.dims.get(f"{path}.{name}".lstrip("."))
                replaced[id(parameter)] = replace(parameter, dim)
            setattr(owner, name, replaced[id(parameter)])
        if parameters:
            vars(owner)["_split"] = split
            vars(owner)["_is_transposed"] = is_transposed
            vars(owner)["_gets_gathered_input"] = split.plan.gets_gathered_input(path)
            if style in _LINEAR_STYLES:
                vars(owner)["_product"] = Product
            kind: Any = type(owner)  # mypy takes its instances' __hash__ for its own
            owner.__class__ = _split_class(kind, style, tuple(parameters))
        if split.plan.splits_sequence:
            _split_sequence_around(owner, style, split)


def _split_sequence_around(owner: nn.Module, style: str, split: SplitLayers) -> None:
    """Cut or gather a module's input or output along the sequence, if its style says so."""
    if style == "split":
        owner.register_forward_hook(lambda _, __, y: ops.split_sequence(y, split.peers))
    elif style == "split_input":
        _change_first_argument(owner, functools.partial(ops.split_sequence, peers=split.peers))
    elif style == "gather":
        _change_first_argument(owner, split.gather)


def _change_first_argument(owner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def changed(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, kwargs | {first: change(kwargs[first])}

    owner.register_forward_pre_hook(changed, with_kwargs=True)


def one_part(
    module: nn.Module,
    task_plan: dict[str, str] | None,
    workers: int,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
) -> tuple[ops.ShapePeers, Plan]:
    """Make a model without storage, in place, what one of several workers computes.

    No process is needed.

    Args:
        module: The model.
        task_plan: The task's tensor plan; None: one is made.
        workers: Number of workers.
        sequence_parallel: Whether activations may be split along the sequence.
        loss_parallel: Whether logits stay split for the loss.

    Returns:
        What counts the bytes that would be sent, and the plan.

    Raises:
        LayoutError: The plan does not fit the model.
    """
    plan = make_plan(module, task_plan, sequence_parallel)
    peers = ops.ShapePeers(workers)

    def cut(parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        if dim is None:
            return parameter
        shape = list(parameter.shape)
        shape[dim] = -(-shape[dim] // workers)
        return nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)

    rewrite(module, SplitLayers(None, plan, peers, loss_parallel=loss_parallel), cut)
    return peers, plan


# --- gradients of whole parameters ----------------------------------------------------------------


class GradientSums:
    """Completes the gradients of parameters that every worker holds whole, once per step.

    Those that were used on a part of the activations are summed over workers. The others should be
    the same on all workers, which is checked in the first step.
    """

    def __init__(self, module: nn.Module, split: SplitLayers) -> None:
        """Sort the parameters.

        Args:
            module: The model.
            split: What its split layers share.
        """
        self._split = split
        self._used_on_parts: dict[str, nn.Parameter] = {}
        self._used_on_whole: dict[str, nn.Parameter] = {}
        self._is_checked = False
        for path, owner in module.named_modules():
            style = split.plan.styles.get(path, "replicate")
            is_used_on_part = style == "partial"
            if split.plan.splits_sequence and style in ("sequence", "rowwise"):
                is_used_on_part = True
            if style == "adapter_in" and split.plan.gets_gathered_input(path):
                is_used_on_part = True
            chosen = self._used_on_parts if is_used_on_part else self._used_on_whole
            parameters = owner.named_parameters(recurse=False, remove_duplicate=False)
            for name, parameter in parameters:
                full_name = f"{path}.{name}".lstrip(".")
                if parameter.requires_grad and full_name not in split.plan.dims:
                    chosen[full_name] = parameter

    def micro_step(self, inner: MicroStep) -> MicroStep:
        """What is put around a micro-batch's forward and backward, with `inner` inside."""

        @contextlib.contextmanager
        def context(last: bool) -> Iterator[None]:
            with self._explained_errors(), inner(last):
                yield
            self._split.forget_inputs()
            if last and torch.is_grad_enabled():
                self.finish()

        return context

    @contextlib.contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Says what an error about shapes in the first step means."""
        try:
            yield
        except RuntimeError as error:
            if self._is_checked or not any(words in str(error) for words in _SHAPE_ERRORS):
                raise
            workers = self._split.peers.size
            raise LayoutError(
                f"the model's own code does not fit layers split over parallel.tp={workers} "
                f"({str(error).splitlines()[0]}): a colwise layer leaves 1/{workers} of its "
                "features, so write a tp that divides the attention heads, or count heads by -1 in "
                "forward, or leave the layer out of the tensor plan"
            ) from error

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the step's gradients. Collective over the tensor-parallel workers.

        Raises:
            LayoutError: In the first step, if gradients differ that should not.
        """
        self._split.forget_narrow_weights()
        all_reduce_(_own_gradients(self._used_on_parts.values()), self._split.peers.group)
        if not self._is_checked and _own_gradients(self._used_on_whole.values()):
            self._is_checked = True
            self._require_same_gradients()

    def _require_same_gradients(self) -> None:
        """Compare the norms of gradients between workers, by their maximum and minimum."""
        named = {name: p for name, p in self._used_on_whole.items() if p.grad is not None}
        norms = torch.stack([g.float().norm() for g in _own_gradients(named.values())])
        extremes = torch.stack([norms, -norms])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._split.peers.group)
        largest = extremes[0]
        smallest = -extremes[1]
        tolerance = 1e-3 * largest + 1e-6 * largest.max()
        differing = (largest - smallest > tolerance).nonzero()
        if differing.numel() > 0:
            name = list(named)[int(differing[0])]
            raise LayoutError(
                f"the gradient of {name} differs between tensor-parallel workers, so the model "
                "uses it on split activations: give its module the value sequence or partial in "
                "the tensor plan, or write no plan"
            )


def _own_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This worker's memory of the gradients that there are."""
    return [local(p.grad) for p in parameters if p.grad is not None]


STRATEGY = Strategy(
    name="tensor",
    summary="each layer split",
    degrees=("tp",),
    combines_with=("dp_replicate", "dp_shard", "cp", "pp", "ep"),
    # A worker has a part of each matrix, in a parameter that replaces the model's own. A module
    # reads it whole through its attribute, but a list of parameters holds the parts.
    cannot_keep=CHANGING_OR_HOOKED
    | {Trait.LOSS_READS_PARAMETERS, Trait.LISTS_PARAMETERS, Trait.GRADIENT_IN_LOSS},
)
