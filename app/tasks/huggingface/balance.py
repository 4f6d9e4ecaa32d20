"""The balance loss of the library's mixtures, added up from layer to layer.

Of one layer and one sequence let f be the share of its tokens that chose each expert, and P each expert's mean score,
the softmax of the router's logits. With E experts and means over layers (equations 4 to 6 of Fedus et al. 2021,
https://arxiv.org/abs/2101.03961, as the library's `load_balancing_loss_func` has them)

    balance = E · Σ over experts of (mean f) · (mean P)         the mean over sequences

The library takes f and P of the whole batch, which is no mean over samples and depends on how a batch is divided. And
it multiplies means over all layers, of which a pipeline's stage has its own. So here every layer takes the sum of the
f and P before it and hands it on with its own added, (2, B, E) numbers beside its (B, T, D): from stage to stage, too.
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
"""sums: of the layers before, in the forward that is under way; None where nothing is added up."""


def add_up(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that is built, with layers that do so; who calls them sees only what they return otherwise.

    Raises:
        UserError: a mixture outside the layers, or without a router."""
    model = build()
    layers = plan.layers(model)
    routers = {found.name: found.router for found in find_mixtures(model)}
    inside = {name for name, router in routers.items() if router and name.startswith(tuple(f"{at}." for at in layers))}
    if len(inside) < len(routers):
        raise UserError(
            f"task_args.config.output_router_logits is true, but of {min(routers.keys() - inside)} no router is found "
            "whose balance could be computed: write false"
        )
    for path in layers:
        layer, own = model.get_submodule(path), [r for name, r in routers.items() if name.startswith(f"{path}.")]
        for router in own:
            router.register_forward_hook(_keep)  # type: ignore[union-attr]
        layer.forward = functools.partial(_summed, layer.forward, own)
        layer.register_forward_pre_hook(_give, with_kwargs=True)
        layer.register_forward_hook(_take)
    return model


@contextlib.contextmanager
def summed(sequences: int, experts: int, device: torch.device) -> Iterator[None]:
    """Around a call of the model with so many sequences; without it nothing is added up."""
    _forward.sums = torch.zeros(2, sequences, experts, device=device)
    try:
        yield
    finally:
        _forward.sums = None


def total(mixtures: int) -> Tensor:
    """After the call, within `summed`: the balance loss, 0-dimensional. mixtures: how many layers have one. Of a split
    sequence the choices are all workers'; the scores this worker's, as its loss is."""
    chosen, scores = _forward.sums / mixtures
    return scores.size(-1) * (mean_over_sequence(chosen) * scores).sum(-1).mean()


def _keep(router: Any, _: Any, output: Any) -> None:
    """The softmax here and not at the layer's end: then backward comes to what it has kept after the experts, when a
    layer that is sharded and recomputed has been gathered again."""
    router.scores = output[0].float().softmax(-1)


def _summed(forward: Callable[..., Any], routers: list[Any], *args: Any, sums: Tensor | None, **kwargs: Any) -> Any:
    """What the layer returns; with sums, those and its own added beside it."""
    output = forward(*args, **kwargs)
    for router in routers:
        scores = router.scores
        del router.scores
        if sums is not None:
            scores = scores.reshape(sums.size(1), -1, sums.size(2))  # (B, T, E)
            chosen = torch.zeros_like(scores).scatter_(-1, scores.topk(router.top_k, -1).indices, 1.0)
            sums = sums + torch.stack([chosen.mean(1), scores.mean(1)])
    return output if sums is None else (output, sums)


def _give(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "sums": getattr(_forward, "sums", None)}


def _take(_: Any, __: Any, output: Any) -> Any:
    if getattr(_forward, "sums", None) is not None:
        output, _forward.sums = output
    return output
