"""Random numbers under tensor parallelism: alike on what workers have alike, each worker's own on what is split.

Workers of one layer are seeded alike, so that dropout on activations that all of them have is the same on all, without
which they would drift apart. On activations that are split, along the sequence or over heads and features, the same
numbers would repeat one part's mask on every other: on one device masks of different places are independent. Megatron
has two random streams for that, between which its layers switch (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053,
§B.2); here the model's own code does not know.

So tensors know. What a split layer gives, or what is cut along the sequence, is marked; what is computed from marked
tensors is marked too; and what a collective makes whole again is not. A function that draws random numbers for a marked
tensor (dropout, attention with dropout_p, noise like it) draws them from a stream of the worker's own:

    seed ← the common stream, which thereby goes on alike everywhere      own stream ← (seed, worker)

for this one call. So nothing has to be kept: recomputing a block, which brings the common stream back to where it was,
repeats every worker's own numbers too.

A mask that is broadcast along what is split (stochastic depth: one number a sample) has another size than the tensor it
was made like, and is drawn alike. Marks are followed by a TorchFunctionMode around the model and each of its blocks, in
training alone, and from the second micro-batch on only where the first drew anything. Compiled code is not followed: a
compiled block draws from its worker's own stream where a plan splits the sequence, so that all in it is split, and from
the common one otherwise; there masks repeat over heads and features.
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

from strategies.parallel import seed_generators
from strategies.tensor.ops import MARK, Peers, ShapePeers, mark
from strategies.tensor.plan import Plan
from strategies.tree import tree_leaves

_NAMES = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
_DROPOUTS = (F.dropout, F.alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout, torch.native_dropout)
_LIKE = (torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.normal, torch.poisson)
RANDOM = frozenset(
    {
        *_DROPOUTS,
        *_LIKE,
        *(getattr(Tensor, name) for name in _NAMES),
        Tensor.bernoulli,
        F.gumbel_softmax,
        F.rrelu,
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
    }
)
"""What draws numbers for the elements of its arguments. (Dropout of whole channels does not: it drops them alike along
what may be split.)"""
_MADE_LIKE = frozenset({Tensor.new_empty, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros})
_PRIME = 6364136223846793005


@contextmanager
def own_stream(peers: Peers, device: torch.device) -> Iterator[None]:
    """What is drawn within is this worker's own. The common stream goes on as on every other worker."""
    if isinstance(peers, ShapePeers):  # nothing is drawn where there are only shapes
        yield
        return
    common = torch.default_generator
    drawn = int(torch.randint(2**62, (), generator=common, device="cpu"))
    of_device = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
    state = common.get_state()
    device_state = None if of_device is None else of_device.get_state()
    seed_generators((drawn * _PRIME + (peers.rank + 1) * 1442695040888963407) % 2**63, device)
    try:
        yield
    finally:
        common.set_state(state)
        if of_device is not None and device_state is not None:
            of_device.set_state(device_state)


def _is_marked(value: Any) -> bool:
    if isinstance(value, Tensor):
        return getattr(value, MARK, False)
    return isinstance(value, (tuple, list)) and any(map(_is_marked, value))


class _Following(TorchFunctionMode):
    """Follows marks through what is computed."""

    def __init__(self, peers: Peers) -> None:
        super().__init__()
        self.peers = peers

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_marked(args) and not (kwargs and _is_marked(list(kwargs.values()))):
            return func(*args, **kwargs)
        if func in RANDOM and _draws(func, args, kwargs):
            with own_stream(self.peers, _device(args, kwargs)):
                made = func(*args, **kwargs)
        else:
            made = func(*args, **kwargs)
        if func in _MADE_LIKE and made.numel() != args[0].numel():
            return made
        for leaf in (made,) if isinstance(made, Tensor) else tree_leaves(made):
            if isinstance(leaf, Tensor):
                mark(leaf)
        return made


def _draws(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is F.scaled_dot_product_attention:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if func in _DROPOUTS:
        probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        return bool(probability) and bool(training)
    return True


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    return next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


class SplitRandomness:
    """What lets a split model draw its own numbers on split activations.

    Args:
        plan: what is split.
        peers: the workers that layers are split over.
        arriving: whether blocks get activations that another worker has cut (a pipeline's stages).
    """

    def __init__(self, plan: Plan, peers: Peers, *, arriving: bool) -> None:
        self.plan, self.peers = plan, peers
        self.arriving = arriving and plan.sequence and not plan.whole_embeddings
        self.active = False
        self.drawn: bool | None = None
        """Whether the model draws random numbers; None: not known before its first forward in training."""

    def follow(self, module: nn.Module, blocks: list[str]) -> None:
        """Follows marks through the module, in place. Blocks by themselves too, because one that is recomputed runs in
        backward, on a GPU in another thread."""
        for name in blocks:
            block = module.get_submodule(name)
            block.forward = self._following(block, block.forward, is_block=True)
        if "" not in blocks:
            module.forward = self._following(module, module.forward, is_block=False)

    def around_compiled(self, module: nn.Module, blocks: list[str], device: torch.device) -> None:
        """Lets compiled blocks draw their own numbers, in place, where all in them is split."""
        if self.plan.sequence:
            for name in blocks:
                block = module.get_submodule(name)
                block.forward = self._apart(block, block.forward, device)

    def _apart(self, block: nn.Module, forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        @functools.wraps(forward)
        def apart(*args: Any, **kwargs: Any) -> Any:
            if not block.training:
                return forward(*args, **kwargs)
            with own_stream(self.peers, device):
                return forward(*args, **kwargs)

        return apart

    def _following(self, part: nn.Module, forward: Callable[..., Any], *, is_block: bool) -> Callable[..., Any]:
        @functools.wraps(forward)
        def following(*args: Any, **kwargs: Any) -> Any:
            if not part.training or self.drawn is False:
                return forward(*args, **kwargs)
            if is_block and self.arriving and args and isinstance(args[0], Tensor) and args[0].dim() > 2:
                mark(args[0])
            if self.active:
                return forward(*args, **kwargs)
            is_first = not is_block and self.drawn is None
            before = _states() if is_first else []
            self.active = True
            try:
                with _Following(self.peers):
                    made = forward(*args, **kwargs)
            finally:
                self.active = False
            if is_first:
                self.drawn = not all(map(torch.equal, before, _states()))
            return made

        return following


def _states() -> list[Tensor]:
    """Where the common streams are; no device is waited for."""
    of_devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [generator.get_state() for generator in (torch.default_generator, *of_devices)]
