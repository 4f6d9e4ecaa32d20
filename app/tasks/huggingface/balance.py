"""The balance loss of the library's mixtures of experts, summed from layer to layer.

For one layer and one sequence let f be the share of its tokens that chose each expert, and P each
expert's mean score, where scores are the softmax of the router's logits. With E experts and means
over layers (equations 4 to 6 of Fedus et al. 2021, https://arxiv.org/abs/2101.03961, as in the
library's `load_balancing_loss_func`)

    balance = E · Σ over experts of (mean f) · (mean P)         the mean over sequences

The library takes f and P of the whole batch. That is not a mean over samples, and depends on how a
batch is divided. It also multiplies means over all layers, while a pipeline stage has only some of
them. So here every layer takes the sums of f and P over the layers before it, adds its own and
passes them on, from stage to stage too: (2, B, E) numbers beside its output (B, T, D).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from app.errors import UserError
from app.tasks.huggingface import plan
from strategies.context.apply import mean_over_sequence
from strategies.mixtures import find_mixtures

_forward = threading.local()
"""`sums`: those of the layers so far in the current forward, (2, B, E); None outside `summed`."""


def sum_over_layers(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model whose layers sum f and P when it is called within `summed`.

    The layers return to their callers what they return otherwise.

    Args:
        build: Makes the model.

    Raises:
        UserError: The model has a mixture outside its layers, or one without a router.
    """
    model = build()
    layer_names = plan.layers(model)
    routers = {mixture.name: mixture.router for mixture in find_mixtures(model)}
    in_layers = {
        name
        for name, router in routers.items()
        if router and any(name.startswith(f"{layer_name}.") for layer_name in layer_names)
    }
    unusable = routers.keys() - in_layers
    if unusable:
        raise UserError(
            f"task_args.config.output_router_logits is true, but of {min(unusable)} no router is "
            "found whose balance could be computed: write false"
        )
    for layer_name in layer_names:
        layer = model.get_submodule(layer_name)
        layer_routers = [
            router
            for name, router in routers.items()
            if router is not None and name.startswith(f"{layer_name}.")
        ]
        for router in layer_routers:
            router.register_forward_hook(_keep_scores)
        layer.forward = functools.partial(_forward_with_sums, layer.forward, layer_routers)
        layer.register_forward_pre_hook(_pass_sums_in, with_kwargs=True)
        layer.register_forward_hook(_take_sums_out)
    return model


@contextlib.contextmanager
def summed(sequences: int, experts: int, device: torch.device) -> Iterator[None]:
    """Within this context a call of the model sums f and P.

    Args:
        sequences: The number of sequences of the call, B.
        experts: The number of experts, E.
        device: The device of the model.
    """
    _forward.sums = torch.zeros(2, sequences, experts, device=device)
    try:
        yield
    finally:
        _forward.sums = None


def balance_loss(mixtures: int) -> Tensor:
    """The balance loss of the call of the model within `summed`, a scalar.

    If sequences are split over workers, the choices are those of all workers, and the scores those
    of this worker, like its part of the loss.

    Args:
        mixtures: How many layers have a mixture.
    """
    chosen_BE, scores_BE = _forward.sums / mixtures
    experts = scores_BE.size(-1)
    return experts * (mean_over_sequence(chosen_BE) * scores_BE).sum(-1).mean()


def _keep_scores(router: Any, args: Any, output: Any) -> None:
    """A hook of a router: keep its scores until the end of the layer.

    The softmax is computed here, not at the end of the layer. Then backward reads what it has saved
    after that of the experts, when a sharded and recomputed layer has been gathered again.
    """
    logits = output[0]
    router.scores = logits.float().softmax(-1)


def _forward_with_sums(
    forward: Callable[..., Any],
    routers: list[Any],
    *args: Any,
    sums: Tensor | None,
    **kwargs: Any,
) -> Any:
    """The forward of a layer.

    Args:
        forward: The layer's own forward.
        routers: The routers in the layer.
        args: Arguments of the layer's own forward.
        sums: f and P summed over the layers before, (2, B, E); None outside `summed`.
        kwargs: Arguments of the layer's own forward.

    Returns:
        What the layer's own forward returns; with `sums`, also the sums with this layer's.
    """
    output = forward(*args, **kwargs)
    for router in routers:
        scores = router.scores
        del router.scores
        if sums is not None:
            _, sequences, experts = sums.shape
            scores_BTE = scores.reshape(sequences, -1, experts)
            index_BTk = scores_BTE.topk(router.top_k, -1).indices
            chosen_BTE = torch.zeros_like(scores_BTE).scatter_(-1, index_BTk, 1.0)
            sums = sums + torch.stack([chosen_BTE.mean(1), scores_BTE.mean(1)])
    return output if sums is None else (output, sums)


def _pass_sums_in(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A hook before a layer's forward: pass it the sums so far."""
    return args, {**kwargs, "sums": getattr(_forward, "sums", None)}


def _take_sums_out(layer: nn.Module, args: Any, output: Any) -> Any:
    """A hook after a layer's forward: keep the sums, and return the rest to the caller."""
    if getattr(_forward, "sums", None) is not None:
        output, _forward.sums = output
    return output
