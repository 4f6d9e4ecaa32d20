"""Random numbers under tensor parallelism.

The workers of a layer have the same seed, so that dropout is the same on all of them where they
have the same activations; otherwise these would drift apart. Where activations are split, along the
sequence or over heads and features, the same numbers would repeat the mask of one part on every
other, whereas on one device the masks of different places are independent. Megatron has two random
streams for this, and its layers switch between them (Shoeybi et al. 2019, arXiv 1909.08053, §B.2).
Here the model's own code does not know that it is split.

So the tensors carry a mark. What a split layer returns, or what is cut along the sequence, is
marked as split (ops.py); what is computed from marked tensors is marked too; and what a collective
makes whole again is not. A function that draws random numbers for a marked tensor, such as dropout,
draws them from a stream of the worker's own:

    seed ← next number of the common stream (on every worker)      own stream ← (seed, worker)

The worker's own stream lasts for one call, so no state has to be kept. Recomputing a block sets the
common stream back to where it was, and so repeats every worker's own numbers too.

A mask that is broadcast along what is split, as in stochastic depth with one number for each
sample, has another size than the tensor that it was made like, and is drawn from the common stream.
Marks are followed by a TorchFunctionMode around the model and each of its blocks: in training only,
and after the first micro-batch only if that drew anything. Compiled code is not followed. A
compiled block draws from its worker's own stream if the plan splits the sequence, because then
everything in it is split. Otherwise it draws from the common stream, and masks repeat over heads
and features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strategies.seeding import seed_generators
from strategies.tensor.ops import MARK, Peers, ShapePeers, mark_split
from strategies.tensor.plan import Plan
from strategies.tree import tree_leaves

_DROPOUTS = (
    F.dropout,
    F.alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.alpha_dropout,
    torch.native_dropout,
)
_IN_PLACE = (
    Tensor.bernoulli_,
    Tensor.cauchy_,
    Tensor.exponential_,
    Tensor.geometric_,
    Tensor.log_normal_,
    Tensor.normal_,
    Tensor.random_,
    Tensor.uniform_,
)
DRAWS_NUMBERS = frozenset(
    {
        *_DROPOUTS,
        *_IN_PLACE,
        torch.rand_like,
        torch.randn_like,
        torch.randint_like,
        torch.bernoulli,
        torch.normal,
        torch.poisson,
        Tensor.bernoulli,
        F.gumbel_softmax,
        F.rrelu,
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
    }
)
"""Functions that draw numbers for the elements of their arguments. Dropout of whole channels is not
among them: it drops the same channels along a dimension that may be split."""
_MAKES_LIKE = frozenset({Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros})
"""Functions that make a tensor of the type and device of another, but of any size."""
_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407


@contextmanager
def own_stream(peers: Peers, device: torch.device) -> Iterator[None]:
    """Draw random numbers from this worker's own stream while the context is active.

    Afterwards the common stream is where it is on every other worker.

    Args:
        peers: The workers, of whose common stream this is called at the same place.
        device: The device on which numbers are drawn, besides the host.
    """
    if isinstance(peers, ShapePeers):  # nothing is drawn for tensors without storage
        yield
        return
    common = torch.default_generator
    seed = int(torch.randint(2**62, (), generator=common, device="cpu"))
    common_state = common.get_state()
    on_device: torch.Generator | None = None
    device_state: Tensor | None = None
    if device.type == "cuda":
        on_device = torch.cuda.default_generators[device.index or 0]
        device_state = on_device.get_state()
    own_seed = (seed * _MULTIPLIER + (peers.rank + 1) * _INCREMENT) % 2**63
    seed_generators(own_seed, device)
    try:
        yield
    finally:
        common.set_state(common_state)
        if on_device is not None and device_state is not None:
            on_device.set_state(device_state)


def _is_marked(value: object) -> bool:
    """Whether a value is marked as split, or one among several."""
    if isinstance(value, Tensor):
        return getattr(value, MARK, False)
    return isinstance(value, (tuple, list)) and any(map(_is_marked, value))


class _MarkFollower(TorchFunctionMode):
    """Marks what is computed from marked tensors, and lets it draw this worker's own numbers."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self._peers = peers

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_marked(args) and not _is_marked(list(kwargs.values())):
            return func(*args, **kwargs)
        if func in DRAWS_NUMBERS and _draws_now(func, args, kwargs):
            with own_stream(self._peers, _device_of(args, kwargs)):
                output = func(*args, **kwargs)
        else:
            output = func(*args, **kwargs)
        if func in _MAKES_LIKE and output.numel() != args[0].numel():
            return output
        if isinstance(output, Tensor):  # the usual case, and this is called for every operation
            mark_split(output)
            return output
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                mark_split(leaf)
        return output


def _draws_now(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one of DRAWS_NUMBERS draws numbers with these arguments."""
    if func is F.scaled_dot_product_attention:
        dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        return bool(dropout)
    if func in _DROPOUTS:
        dropout = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        return bool(dropout) and bool(training)
    return True


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device of the first tensor."""
    leaves = tree_leaves((args, kwargs))
    return next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))


class SplitRandomness:
    """Lets a split model draw each worker's own numbers on split activations."""

    def __init__(self, plan: Plan, peers: Peers, *, receives_activations: bool) -> None:
        """Note what is split.

        Args:
            plan: Which module is split how.
            peers: The workers that layers are split over.
            receives_activations: Whether blocks get activations from other workers, which are split
                without being marked (the stages of a pipeline).
        """
        self._plan = plan
        self._peers = peers
        is_split = plan.splits_sequence and not plan.has_whole_embeddings
        self._receives_split = receives_activations and is_split
        self._is_following = False
        """Whether a mode is active."""
        self._draws: bool | None = None
        """Whether the model draws numbers; None before its first forward in training."""

    def follow(self, module: nn.Module, blocks: list[str]) -> None:
        """Follow marks through a model, in place.

        Blocks are followed by themselves too, because a block that is recomputed runs in backward,
        which on a GPU is in another thread.
        """
        for name in blocks:
            block = module.get_submodule(name)
            block.forward = self._followed(block, block.forward, is_block=True)
        if "" not in blocks:
            module.forward = self._followed(module, module.forward, is_block=False)

    def around_compiled(self, module: nn.Module, blocks: list[str], device: torch.device) -> None:
        """Let compiled blocks draw each worker's own numbers, in place, if all in them is split."""
        if self._plan.splits_sequence:
            for name in blocks:
                block = module.get_submodule(name)
                block.forward = self._in_own_stream(block, block.forward, device)

    def _in_own_stream(
        self, block: nn.Module, forward: Callable[..., Any], device: torch.device
    ) -> Callable[..., Any]:
        @functools.wraps(forward)
        def forward_in_own_stream(*args: Any, **kwargs: Any) -> Any:
            if not block.training:
                return forward(*args, **kwargs)
            with own_stream(self._peers, device):
                return forward(*args, **kwargs)

        return forward_in_own_stream

    def _followed(
        self, module: nn.Module, forward: Callable[..., Any], *, is_block: bool
    ) -> Callable[..., Any]:
        """The forward of the model or of a block with marks followed in it."""

        @functools.wraps(forward)
        def followed_forward(*args: Any, **kwargs: Any) -> Any:
            if not module.training or self._draws is False:
                return forward(*args, **kwargs)
            if is_block and self._receives_split and args and _is_activation(args[0]):
                mark_split(args[0])
            if self._is_following:
                return forward(*args, **kwargs)
            is_first_forward = not is_block and self._draws is None
            states_before = _generator_states() if is_first_forward else []
            self._is_following = True
            try:
                with _MarkFollower(self._peers):
                    output = forward(*args, **kwargs)
            finally:
                self._is_following = False
            if is_first_forward:
                self._draws = not all(map(torch.equal, states_before, _generator_states()))
            return output

        return followed_forward


def _is_activation(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 2


def _generator_states() -> list[Tensor]:
    """The states of the common streams; no device is waited for."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():
        states += [generator.get_state() for generator in torch.cuda.default_generators]
    return states
