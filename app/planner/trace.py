"""Traces one forward and backward of a model and records what each part of it costs.

Under fake tensors nothing is computed and nothing allocated, so that a model of 70 billion
parameters is traced on a laptop. The same recorder works on real tensors, for models whose code
looks at values (read.py falls back to that). Fused operations are recorded as GPUs have them
(fused.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from app.planner.flex import traced_flex_attention
from app.planner.fused import Fused
from app.planner.part_trace import AFTER, BEFORE, PartTrace, Trace
from app.planner.recorder import CostRecorder
from app.planner.traced_blocks import TracedBlock, traced_forward
from strategies.row_chunks import observed_by
from strategies.tensor.ops import ShapePeers


def watch(
    module: nn.Module,
    blocks: list[str],
    loss: Callable[[nn.Module], Tensor],
    peers: ShapePeers | None = None,
    *,
    on_gpu: bool = True,
    is_fake: bool = False,
) -> Trace:
    """Run a forward and a backward once and record what the parts cost.

    It works on fake and on real tensors.

    Args:
        module: The model. It is changed, and of no use afterwards.
        blocks: The names of its repeating blocks.
        loss: Computes the loss of the model that it is called with.
        peers: Counts the collectives of a model that tensor parallelism splits; otherwise None.
        on_gpu: Whether fused operations are those of a GPU (fused.py).
        is_fake: Whether tensors are fake, so that of equal chunks of a loss one is enough.
    """
    recorder = CostRecorder(module, on_gpu=on_gpu, is_fake=is_fake)
    order: list[str] = []
    for parameter in module.parameters():
        if parameter.requires_grad:  # gradients are counted by the strategies' cost functions
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    if peers is not None:
        peers.current_part = lambda: recorder.part
    traced_blocks: dict[Hashable, TracedBlock] = {}
    for block in dict.fromkeys(module.get_submodule(name) for name in blocks):
        block.forward = traced_forward(block, recorder, order, traced_blocks)
    fused = Fused(recorder, on_gpu=on_gpu)
    flex = traced_flex_attention(fused) if on_gpu else contextlib.nullcontext()
    with recorder, fused, flex, observed_by(recorder):
        with saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
            value = loss(module)
        collectives = None if peers is None else _Collectives.after_forward(peers)
        recorder.phase = "backward"
        recorder.part = AFTER if order else BEFORE
        # Called with a tensor, `backward` would be dispatched to Fused and run outside of it.
        torch.autograd.backward(get_gradient_edge(value), torch.ones_like(value))
    if collectives is not None:
        for name, part in recorder.parts.items():
            part.values.update(collectives.values_of(name))
    return Trace(_without_saved(recorder.parts, order), order)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _without_saved(parts: dict[str, PartTrace], order: list[str]) -> dict[str, PartTrace]:
    """The parts in order, with moments less what the parts up to each of them have saved."""
    ordered = {}
    saved_bytes = 0.0
    for name in (BEFORE, *dict.fromkeys(order), AFTER):
        if name not in parts:
            continue
        part = parts[name]
        saved_bytes += part.values["saved"]
        part.moments = [moment._replace(size=moment.size - saved_bytes) for moment in part.moments]
        ordered[name] = part
    return ordered


@dataclass(frozen=True)
class _Collectives:
    """The collectives of tensor parallelism, by the name of the part that is at work.

    Args:
        peers: Counts them.
        sent_forward: Bytes that one worker sends in forward.
        calls_forward: The number of collectives in forward.
        rearranged_forward: Bytes that are read and written in forward to order rows.
    """

    peers: ShapePeers
    sent_forward: dict[str, float]
    calls_forward: dict[str, int]
    rearranged_forward: dict[str, float]

    @classmethod
    def after_forward(cls, peers: ShapePeers) -> _Collectives:
        """Keep what was counted in forward, before backward adds to it."""
        return cls(peers, dict(peers.sent_bytes), dict(peers.calls), dict(peers.rearranged_bytes))

    def values_of(self, part: str) -> dict[str, float]:
        """The values of a part (part_trace.py), once backward is done."""
        peers = self.peers
        rearranged_forward = self.rearranged_forward.get(part, 0.0)
        return {
            "sent": peers.sent_bytes.get(part, 0.0),
            "collectives": peers.calls.get(part, 0.0),
            "regathered": peers.regathered_bytes.get(part, 0.0),
            "sent_beside": peers.sent_beside_bytes.get(part, 0.0),
            "rearranged_forward": rearranged_forward,
            "rearranged_backward": peers.rearranged_bytes.get(part, 0.0) - rearranged_forward,
            "sent_forward": self.sent_forward.get(part, 0.0),
            "collectives_forward": self.calls_forward.get(part, 0.0),
        }
