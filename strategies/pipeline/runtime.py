"""Doing a stage's list of instructions: forward, send; receive, backward, send; and nothing else.

    F   take what the part before sent, run the part, keep its graph, send the outputs on
    B   take the gradients of the outputs, run backward, send the gradients of what was taken
    W   the weights' gradients that B left (schedules that split backward)

Waiting happens only where an instruction needs what has not arrived. Gradients add up in the parameters over
micro-batches; `sync` is told of a chunk's last backward before and after it, so that reducing them over data-parallel
workers overlaps with what is still computed.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.dims import LayoutError
from strategies.grad_sync import GradSync
from strategies.parallel import Loss, seed_generators
from strategies.pipeline import weight_grad
from strategies.pipeline.p2p import P2PComm, Receiver, TensorMeta, TensorMetas, encode
from strategies.pipeline.postings import Arrival, arrivals, ends
from strategies.pipeline.schedules import Op, Placement, Schedule
from strategies.pipeline.stage import Stage
from strategies.pipeline.timeline import Timeline
from strategies.zero_weight import has_no_weight, recorded_outputs, silence


@dataclass
class Step:
    """A step's inputs. factors: what each micro-batch's loss is multiplied by before backward. A micro-batch of weight
    0.0 is left out, and its loss may be nan."""

    batches: Sequence[Any]
    weights: Sequence[Any]
    factors: Sequence[Any]
    loss: Loss
    kinds: list[Any]


@dataclass
class Alive:
    """What a forward leaves for backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class Runtime:
    """Runs schedules on one worker.

    autocast: put around forward. wire: what float32 activations travel as; None: as they are. sync: what reduces
    gradients; None: nothing does. deferred: what the modules' backward leaves for W. clear: to be called after forward.
    """

    def __init__(
        self,
        stage: Stage,
        comm: P2PComm,
        placement: Placement,
        *,
        autocast: Callable[[], AbstractContextManager[Any]],
        wire: torch.dtype | None,
        sync: GradSync | None,
        deferred: weight_grad.DeferredWeightGrad,
        clear: Callable[[], None] = lambda: None,
    ) -> None:
        self.stage, self.comm, self.placement = stage, comm, placement
        self.autocast, self.wire, self.sync, self.clear = autocast, wire, sync, clear
        self.metas: dict[Any, TensorMetas] = {}
        """Of what crosses an edge, by (edge, kind of batch)."""
        self.deferred = deferred
        self.timeline: Timeline | None = None
        """Of the last step, if it was profiled."""
        self._arrivals: dict[Any, tuple[Arrival, ...]] = {}

    # --- a training step ----------------------------------------------------------------------------------------

    def step(self, schedule: Schedule, step: Step, device: torch.device, profiled: bool = False) -> Tensor:
        """One optimizer step's forwards and backwards; Σ weight · loss where the last part is, else 0."""
        ops = schedule.lists[self.comm.stage]
        self.total = torch.zeros((), device=device)
        if profiled:  # all workers' clocks begin here: a GPU's at the same place in its stream
            dist.all_reduce(self.total)
        self.timeline = Timeline(self.comm.stage, device) if profiled else None
        self._open(schedule, step.kinds)
        self.alive: dict[tuple[int, int], Alive] = {}
        self.left: dict[tuple[int, int], list[Callable[[], None]]] = {}
        release = "W" if schedule.split else "B"
        final = {op.chunk: i for i, op in enumerate(ops) if op.kind == release}
        seed = torch.initial_seed()
        # Both remember cast weights until they end: all micro-batches in flight share one copy of each.
        with self.autocast(), self.deferred.casting_once():
            self._play(schedule, step, device, seed, ops, final)
        seed_generators(_mixed(seed, self.placement.parts, 0), device)
        self.comm.settle()
        return self.total

    def _play(
        self, schedule: Schedule, step: Step, device: torch.device, seed: int, ops: Sequence[Op], final: dict[int, int]
    ) -> None:
        """Does the instructions. final: by chunk the place of the one after which its gradients are complete."""
        for i, op in enumerate(ops):
            part = self.placement.part(self.comm.stage, op.chunk)
            if op.kind == "F":
                placeholders = self.stage.placeholders(step.kinds[op.micro], step.loss, step.batches[op.micro])
                seed_generators(_mixed(seed, part, op.micro), device)
                self._forward(step, op, part, placeholders)
            elif op.kind == "B":
                if final[op.chunk] == i and self.sync is not None:
                    self.sync.last_backward(op.chunk)
                self._backward(step, schedule.split, op, part)
            else:
                self._weights(op, part)
            if final[op.chunk] == i and self.sync is not None:
                self.sync.chunk_done(op.chunk)
            self.receiver.ask(i + 1)

    def reduced(self, work: Callable[[], None]) -> None:
        """Waits for the gradients' reduction, which is `work`."""
        self._timed("REDUCE", Op("REDUCE", 0), work)

    def _forward(self, step: Step, op: Op, part: int, placeholders: dict[str, Any]) -> None:
        arrived = self._take("F", part - 1, op) if part else []
        metas = self.metas[part - 1, step.kinds[op.micro]] if part else ()
        inputs = [tensor.requires_grad_() if meta.grad else tensor for tensor, meta in zip(arrived, metas, strict=True)]
        is_last = part == self.placement.parts - 1
        is_left_out = is_last and has_no_weight(step.weights[op.micro])
        with recorded_outputs(self.stage.module, is_left_out) as recorded:
            answer, outputs = self._timed("F", op, lambda: self._run(step, op.micro, part, placeholders, inputs))
        if is_left_out:
            silence(answer, recorded)
            outputs = [answer * 0.0]
        elif is_last:
            value = answer * step.factors[op.micro]
            self.total = self.total + answer.detach() * step.weights[op.micro]
            outputs = [value]
        else:
            self._send_on(outputs, op, part, step.kinds[op.micro])
        self.alive[part, op.micro] = Alive(inputs, outputs)

    def _run(
        self, step: Step, micro: int, part: int, placeholders: dict[str, Any], inputs: list[Tensor]
    ) -> tuple[Any, list[Tensor]]:
        with self.autocast():
            answer, outputs = self.stage.run(part, step.loss, step.batches[micro], placeholders, inputs)
        self.clear()
        return answer, outputs

    def _backward(self, step: Step, split: bool, op: Op, part: int) -> None:
        kept = self.alive.pop((part, op.micro))
        gradients: list[Any]
        if part == self.placement.parts - 1:
            ends, gradients = kept.outputs, [None]
        else:
            ends = [tensor for tensor in kept.outputs if tensor.requires_grad]
            gradients = self._take("B", part, op)
        if split:
            self.deferred.waiting = self.left[part, op.micro] = []
        with torch.autocast(self.comm.device.type, enabled=False):  # backward's types are forward's
            self._timed("B", op, lambda: torch.autograd.backward(ends, gradients) if ends else None)
        self.deferred.waiting = None
        if part:
            back = [
                tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                for tensor in kept.inputs
                if tensor.requires_grad
            ]
            metas = self.metas[part - 1, step.kinds[op.micro]]
            self._give("B", part - 1, op, back, tuple(meta for meta in metas if meta.grad))

    def _weights(self, op: Op, part: int) -> None:
        waiting = self.left.pop((part, op.micro))
        with torch.autocast(self.comm.device.type, enabled=False):
            self._timed("W", op, lambda: weight_grad.finish(waiting))

    def _send_on(self, outputs: list[Tensor], op: Op, part: int, kind: Any) -> None:
        metas = tuple(TensorMeta.of(tensor, self.wire) for tensor in outputs)
        known = self.metas.get((part, kind))
        if known is None:
            self.metas[part, kind] = metas
            target = self.placement.stage(part + 1)
            if target != self.comm.stage:
                self.comm.send("F", target, [encode(metas).to(self.comm.device)])
        elif known != metas:
            i = next((i for i, (a, b) in enumerate(zip(metas, known)) if a != b), 0)
            raise LayoutError(
                f"block {self.stage.assignment.last[part]} puts out {metas[i]} for one batch and {known[i]} for "
                "another of the same shape: a pipeline needs shapes that depend on the batch's alone"
            )
        self._give("F", part, op, outputs, metas)

    # --- what travels -------------------------------------------------------------------------------------------

    def _open(self, schedule: Schedule, kinds: list[Any]) -> None:
        """Prepares for what neighbours will send during the step."""
        self.local: dict[tuple[str, int, int], list[Tensor]] = {}
        key = (schedule.name, schedule.micro_batches, schedule.chunks)
        if key not in self._arrivals:
            self._arrivals[key] = arrivals(schedule)[self.comm.stage]
        self.receiver = Receiver(self.comm, self._arrivals[key], kinds, self.metas)

    def _take(self, kind: str, edge: int, op: Op) -> list[Tensor]:
        """What crosses from part `edge` to the next (F), or back to it (B)."""
        key = (kind, edge, op.micro)
        if key in self.local:
            return self.local.pop(key)
        return self._timed("RECV", op, lambda: self.receiver.take(key))

    def _give(self, kind: str, edge: int, op: Op, tensors: list[Tensor], metas: TensorMetas) -> None:
        key = (kind, edge, op.micro)
        source, target = ends(self.placement, key)
        if source == target:
            self.local[key] = [tensor.detach() for tensor in tensors]
        else:
            self._timed("SEND", op, lambda: self.comm.send(kind, target, _as_sent(tensors, metas), key))

    def _timed(self, kind: str, op: Op, work: Callable[[], Any]) -> Any:
        return work() if self.timeline is None else self.timeline.timed(kind, op, work)

    # --- evaluation ---------------------------------------------------------------------------------------------

    def evaluate(self, function: Callable[..., Any], batch: Any) -> Any:
        """The function's answer where the last part is, else None. Of several in a row the next begins here while this
        one is still computed on later stages."""
        kind, answer, place = self.stage.signature(batch), None, self.placement
        ops = tuple(Op("F", 0, chunk) for chunk in range(place.chunks))
        self._open(
            Schedule("forward", place.stages, 1, place.chunks, (ops,) * place.stages, folded=place.folded), [kind]
        )
        self.timeline = None
        step = Step([batch], [1.0], [1.0], function, [kind])
        placeholders = self.stage.placeholders(kind, function, batch)
        for done, op in enumerate(ops, 1):
            part = place.part(self.comm.stage, op.chunk)
            arrived = self._take("F", part - 1, op) if part else []
            answer, outputs = self._run(step, 0, part, placeholders, arrived)
            if part < place.parts - 1:
                self._send_on(outputs, op, part, kind)
            self.receiver.ask(done)
        self.comm.settle()
        return answer


def _as_sent(tensors: list[Tensor], metas: TensorMetas) -> list[Tensor]:
    return [tensor.detach().to(meta.sent) for tensor, meta in zip(tensors, metas, strict=True)]


def _mixed(seed: int, part: int, micro: int) -> int:
    """Random numbers of their own for every part and micro-batch, the same under every schedule."""
    return (seed * 6364136223846793005 + (part * 65537 + micro + 1) * 1442695040888963407) % 2**63
