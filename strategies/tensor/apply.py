"""Tensor parallelism: split each layer's matrices over workers that see the same samples.

Two linear layers with an elementwise function between them, the first split by columns of A, the second by rows of B:

    Y = f(X·A)·B,   A = [A₁ A₂],   B = [B₁; B₂]      ⇒      Y = Σᵣ f(X·Aᵣ)·Bᵣ

so a worker computes f(X·Aᵣ)·Bᵣ alone, and one all-reduce per pair (attention: heads are columns; feed-forward) gives
the sum. Between pairs everything would be computed by all alike; *sequence parallelism* lets each do it on its part of
the sequence instead: the all-reduce becomes a reduce-scatter after B and an all-gather before A, which sends the same
and divides the activations. The last layer is split by vocabulary and so is the loss (loss.py). Shoeybi et al.
2019, https://arxiv.org/abs/1909.08053; Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.

Choose it for layers too large for one device, or when there are more workers than samples in the batch; within a node
only, since it communicates several times per block, and hides that behind products only where it is told to
(overlap.py). Combine it with fsdp across nodes.

How: every parameter is a DTensor, split or replicated, so that optimizers, clipping and checkpoints see one kind. What
a module *reads*, though, is plain: split layers compute on their own part with the collectives of ops.py, any
other module reads whole parameters, and other code that reads a split layer's weight gets it gathered. So a model's
own code runs unchanged. What each module does is in plan.py.

- Workers are seeded alike, by data rank: dropout on what all of them have is the same on all. On what is split each has
  numbers of its own (randomness.py).
- Gradients of parameters used on a part of the sequence are sums over workers: one all-reduce of all, once per step.
- In the first step the replicated parameters' gradients are compared over the workers: a plan that splits activations
  where the model does not expect it ends there with a sentence, not with a worse model.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from strategies.dims import LayoutError
from strategies.grad_sync import all_reduce_, local
from strategies.options import Options
from strategies.precision import Product
from strategies.strategy import Strategy
from strategies.tensor import experts, ops
from strategies.tensor.layers import SplitLayers
from strategies.tensor.loss import VocabularyLogits
from strategies.tensor.plan import Plan, is_transposed_linear, make_plan, out_features
from strategies.tensor.randomness import own_stream
from strategies.torch_internals import rnn_reading_its_parameters
from strategies.traits import CHANGING_OR_HOOKED, Trait

WITH_PRODUCT = ("colwise", "colwise_gather", "head", "rowwise")
"""Styles of layers whose product fp8 may replace (precision.py)."""
OF_SHAPES = ("shape", "size of tensor", "unflatten", "mat1 and mat2", "size mismatch")
"""In what torch says where an operation cannot work on the shapes it was given."""


def _own(module: nn.Module, name: str) -> Any:
    """This worker's part of a parameter, None for a bias that is not there."""
    parameter = nn.Module.__getattr__(module, name)  # past the property of that name
    if not isinstance(parameter, DTensor):
        return parameter
    slice = parameter.to_local()
    if not torch.compiler.is_compiling():
        slice.of_parameter = parameter  # type: ignore[attr-defined]  # a pipeline that splits backward adds to it
    return slice


def _matrix(self: Any) -> Tensor:
    """This worker's part of a linear layer's weight as (out, in)."""
    weight = self._split.narrowed(self, _own(self, "weight"))
    return weight.t() if self._transposed else weight


def _colwise(self: Any, x: Tensor) -> Tensor:
    weight, bias = _matrix(self), _own(self, "bias")
    if bias is not None and bias.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        bias = bias.to(weight.dtype)  # one that fsdp keeps whole, in float32
    return ops.mark(self._split.columns(x, weight, bias, self._gathered, self._product))


def _colwise_gather(self: Any, x: Tensor) -> Tensor:
    return ops.gather_features(_colwise(self, x), self._split.peers, out_features(self))


def _head(self: Any, x: Tensor) -> Tensor:
    part = _colwise(self, x)
    if self._split.loss_parallel and self.training and torch.is_grad_enabled():
        return VocabularyLogits(part, self._split.peers, out_features(self))
    return ops.gather_features(part, self._split.peers, out_features(self))


def _rowwise(self: Any, x: Tensor) -> Tensor:
    weight = _matrix(self)
    if x.size(-1) != weight.size(1):
        raise LayoutError(
            f"a layer that the tensor plan splits rowwise got {x.size(-1)} features and has {weight.size(1)} "
            "here: what comes before it must be colwise, or leave it out of the plan"
        )
    y = self._split.rows(x, weight, self._product)
    bias = _own(self, "bias")
    return y if bias is None else y + bias.to(y.dtype)


def _embedding(self: Any, tokens: Tensor) -> Tensor:
    table = _own(self, "weight")
    start, end = self._split.peers.bounds(self.num_embeddings)
    mine = (tokens >= start) & (tokens < end)
    padding = self.padding_idx
    if padding is not None:
        padding = padding - start if start <= padding < end else None
    if end > start:
        rows = F.embedding((tokens - start).where(mine, 0), table, padding) * mine.unsqueeze(-1)
    else:
        rows = table.new_zeros((*tokens.shape, self.embedding_dim)) + table.sum()
    return self._split.leave(rows, whole=self._split.plan.whole_embeddings)


def _experts(self: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    split = self._split
    entered, shares = split.enter(x), split.share(weights)
    if not self.training or torch.compiler.is_compiling():
        return split.leave(self.computed(entered, index, shares))
    with own_stream(split.peers, x.device):  # whatever is drawn for as many tokens as are this worker's
        y = self.computed(entered, index, shares)
    return split.leave(y)


_FORWARD: dict[str, Callable[..., Tensor]] = {
    "colwise": _colwise,
    "colwise_gather": _colwise_gather,
    "head": _head,
    "rowwise": _rowwise,
    "experts": _experts,
    "embedding": _embedding,
}


def _read(name: str, part: bool, self: Any) -> Any:
    """A parameter as the model's own code reads it: plain and whole, or this worker's part. (Sharded by fsdp it is not
    for reading.)"""
    parameter = nn.Module.__getattr__(self, name)
    if not isinstance(parameter, DTensor) or parameter.device_mesh != self._split.mesh:
        return parameter
    return parameter.to_local() if part or parameter.placements[0].is_replicate() else parameter.full_tensor()


@functools.cache
def _class(kind: type[nn.Module], style: str, names: tuple[str, ...]) -> type[nn.Module]:
    """`kind` with plain reading of its parameters and the forward of `style`."""
    members: dict[str, Any] = {name: property(functools.partial(_read, name, style == "experts")) for name in names}
    if style in _FORWARD:
        members["forward"] = _FORWARD[style]
    if issubclass(kind, nn.RNNBase):
        members |= rnn_reading_its_parameters()
    return type(kind.__name__, (kind,), members)


def apply(
    module: nn.Module,
    mesh: DeviceMesh,
    given: dict[str, str] | None,
    options: Options,
    *,
    in_halves: bool = False,
    in_flight: bool = False,
    ep: int = 1,
) -> SplitLayers:
    """Splits the module in place over the one-dimensional `mesh`. in_halves: backward is (pipeline/weight_grad.py).
    in_flight: several micro-batches are. ep: ways that experts are split before.

    Raises:
        LayoutError: a plan that does not fit the model.
    """
    plan = make_plan(module, given, options.sequence_parallel, mesh.size(), ep)
    peers = ops.Peers(mesh.get_group())
    split = SplitLayers(
        mesh,
        plan,
        options.loss_parallel,
        peers,
        keeps=options.activation_checkpointing != "none",  # recomputing a block gathers its inputs again anyway
        in_halves=in_halves,
        in_flight=in_flight,
        overlaps=options.async_tp and not in_halves,
    )

    def distributed(parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        """As a DTensor, replicated on every worker or split along `dim`."""
        data = parameter.detach()
        own = data if dim is None else peers.part(data, dim).contiguous().clone()
        placement = Replicate() if dim is None else Shard(dim)
        spec: dict[str, Any] = {"run_check": False, "shape": data.shape, "stride": data.stride()}
        return nn.Parameter(DTensor.from_local(own, mesh, [placement], **spec), requires_grad=parameter.requires_grad)

    rewrite(module, split, distributed)
    torch.backends.mha.set_fastpath_enabled(False)  # it would read parameters past the modules that own them
    return split


def rewrite(module: nn.Module, split: SplitLayers, replace: Callable[[nn.Parameter, int | None], nn.Parameter]) -> None:
    """Gives every module the forward that its style has, in place. replace: makes a parameter's local form from it and
    the dimension it is split along."""
    made: dict[int, nn.Parameter] = {}
    keep: list[nn.Parameter] = []  # so that ids stay taken
    for path, owner in list(module.named_modules()):
        style = split.plan.styles.get(path, "replicate")
        transposed = is_transposed_linear(owner)
        if transposed:  # told by its shape, which is about to change
            vars(owner).update(out_features=owner.nf)
        if style == "experts":
            vars(owner)["computed"] = experts.split_forward(owner, split.peers)
        own = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in own.items():
            keep.append(parameter)
            if id(parameter) not in made:
                made[id(parameter)] = replace(parameter, split.plan.dims.get(f"{path}.{name}".lstrip(".")))
            setattr(owner, name, made[id(parameter)])
        if own:
            vars(owner).update(_split=split, _transposed=transposed, _gathered=split.plan.in_gathered(path))
            if style in WITH_PRODUCT:
                vars(owner).update(_product=Product)
            owner.__class__ = _class(type(owner), style, tuple(own))  # type: ignore[arg-type]
        if split.plan.sequence:
            _along_sequence(owner, style, split)


def _along_sequence(owner: nn.Module, style: str, split: SplitLayers) -> None:
    if style == "split":
        owner.register_forward_hook(lambda _, __, y: ops.split_sequence(y, split.peers))
    elif style in ("split_input", "gather"):
        change = split.gather if style == "gather" else functools.partial(ops.split_sequence, peers=split.peers)

        def changed(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict]:
            if given:
                return (change(given[0]), *given[1:]), named
            first = next(iter(named))
            return given, named | {first: change(named[first])}

        owner.register_forward_pre_hook(changed, with_kwargs=True)


def one_part(
    module: nn.Module,
    given: dict[str, str] | None,
    ways: int,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
) -> tuple[ops.ShapePeers, Plan]:
    """Makes a module without storage, in place, what one of `ways` workers computes; no process is needed.

    Raises:
        LayoutError: a plan that does not fit the model.
    """
    plan, peers = make_plan(module, given, sequence_parallel), ops.ShapePeers(ways)

    def slice_of(parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        if dim is None:
            return parameter
        shape = list(parameter.shape)
        shape[dim] = -(-shape[dim] // ways)
        return nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)

    rewrite(module, SplitLayers(None, plan, loss_parallel, peers), slice_of)
    return peers, plan


class GradientSums:
    """Sums, once per step, the gradients of whole parameters that were used on a part of the activations."""

    def __init__(self, module: nn.Module, split: SplitLayers) -> None:
        self.split = split
        self.partial: dict[str, nn.Parameter] = {}
        self.whole: dict[str, nn.Parameter] = {}
        for path, owner in module.named_modules():
            style = split.plan.styles.get(path, "replicate")
            sequence = split.plan.sequence and style in ("sequence", "rowwise")
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                full = f"{path}.{name}".lstrip(".")
                if not parameter.requires_grad or full in split.plan.dims:
                    continue
                (self.partial if sequence or style == "partial" else self.whole)[full] = parameter
        self.checked = False

    def micro_step(self, inner: Callable[[bool], Any]) -> Callable[[bool], Any]:
        @contextlib.contextmanager
        def context(last: bool) -> Iterator[None]:
            try:
                with inner(last):
                    yield
            except RuntimeError as error:
                if self.checked or not any(words in str(error) for words in OF_SHAPES):
                    raise
                ways = self.split.peers.size
                raise LayoutError(
                    f"the model's own code does not fit layers split over parallel.tp={ways} "
                    f"({str(error).splitlines()[0]}): a colwise layer leaves 1/{ways} of its features, so write a tp "
                    "that divides the attention heads, or count heads by -1 in forward, or leave the layer out of the "
                    "tensor plan"
                ) from error
            self.split.forget()
            if last and torch.is_grad_enabled():
                self.finish()

        return context

    @torch.no_grad()
    def finish(self) -> None:
        self.split.narrow.clear()
        all_reduce_(_local_gradients(self.partial.values()), self.split.peers.group)
        if not self.checked and _local_gradients(self.whole.values()):
            self.checked = True
            self._compare()

    def _compare(self) -> None:
        """Whole parameters used on whole activations have the same gradient on every worker."""
        named = {name: p for name, p in self.whole.items() if p.grad is not None}
        norms = torch.stack([g.float().norm() for g in _local_gradients(named.values())])
        both = torch.stack([norms, -norms])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.split.peers.group)
        largest, smallest = both[0], -both[1]
        odd = (largest - smallest) > 1e-3 * largest + 1e-6 * largest.max()
        if bool(odd.any()):
            name = list(named)[int(odd.nonzero()[0])]
            raise LayoutError(
                f"the gradient of {name} differs between tensor-parallel workers, so the model uses it on split "
                "activations: give its module the value sequence or partial in the tensor plan, or write no plan"
            )


def _local_gradients(parameters: Any) -> list[Tensor]:
    return [local(p.grad) for p in parameters if p.grad is not None]


STRATEGY = Strategy(
    name="tensor",
    summary="each layer split",
    degrees=("tp",),
    combines_with=("dp_replicate", "dp_shard", "cp", "pp", "ep"),
    # A worker has a part of each matrix, in a parameter that replaces the model's own; a module reads it whole through
    # its attribute, but a list of parameters holds the parts.
    cannot_keep=CHANGING_OR_HOOKED | {Trait.LOSS_READS_PARAMETERS, Trait.LISTS_PARAMETERS, Trait.GRADIENT_IN_LOSS},
)
