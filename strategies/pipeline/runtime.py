"""Executing a stage's instructions.

    F   receive the inputs of the part, run it, keep its graph, send its outputs
    B   receive the gradients of the outputs, run backward, send the gradients of the inputs
    W   compute the weights' gradients that B has left (schedules that split backward)

A stage waits only where an instruction needs a message that has not arrived. Gradients add up in
the parameters over micro-batches. `GradSync` is called before and after the last backward of each
chunk, so that the chunk's gradients are reduced over data-parallel workers while the stage still
computes others.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.dims import LayoutError
from strategies.grad_sync import GradSync
from strategies.parallel import Loss
from strategies.pipeline import weight_grad
from strategies.pipeline.interface import PipelineStage, Placeholders, Signature
from strategies.pipeline.p2p import P2PComm, Receiver, TensorMeta, TensorMetas, encode
from strategies.pipeline.postings import Message, PostedReceive, endpoints, posted_receives
from strategies.pipeline.schedules import Op, Placement, Schedule
from strategies.pipeline.timeline import Timeline
from strategies.seeding import seed_generators
from strategies.zero_weight import has_no_weight, recorded_outputs, silence

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Step:
    """The inputs of one optimizer step.

    Args:
        batches: The micro-batches.
        weights: The weight of each in the loss that is returned. A micro-batch of weight 0.0 is
            left out, and its loss may be nan.
        factors: What the loss of each is multiplied by before backward.
        signatures: The kind of each.
        loss: (model, micro-batch) → its mean loss, 0-dimensional.
    """

    batches: Sequence[Any]
    weights: Sequence[float | Tensor]
    factors: Sequence[float | Tensor]
    signatures: Sequence[Signature]
    loss: Loss


@dataclass(frozen=True)
class InFlight:
    """What forward keeps for backward, of one part and micro-batch."""

    inputs: list[Tensor]
    outputs: list[Tensor]


class Runtime:
    """Executes schedules on one stage."""

    def __init__(
        self,
        stage: PipelineStage,
        comm: P2PComm,
        placement: Placement,
        *,
        autocast: Callable[[], AbstractContextManager[object]],
        wire: torch.dtype | None,
        sync: GradSync | None,
        deferred: weight_grad.DeferredWeightGrad,
        after_forward: Callable[[], None] = lambda: None,
    ) -> None:
        """Put the pieces together.

        Args:
            stage: Runs the model.
            comm: The connections to other stages.
            placement: Which stage holds which parts.
            autocast: Makes the context of every forward.
            wire: The 16-bit type in which float32 activations travel; None: they stay float32.
            sync: Reduces gradients over data-parallel workers; None if there is one worker.
            deferred: Takes what B leaves for W.
            after_forward: Called after every forward.
        """
        self.stage = stage
        self.comm = comm
        self.placement = placement
        self.wire = wire
        self.sync = sync
        self.deferred = deferred
        self.timeline: Timeline | None = None
        """Of the last step, if it was profiled."""
        self.metas: dict[tuple[int, Signature], TensorMetas] = {}
        """What crosses an edge, by the edge and the kind of batch."""
        self.in_flight: dict[tuple[int, int], InFlight] = {}
        """By part and micro-batch."""
        self.deferred_work: dict[tuple[int, int], list[weight_grad.Work]] = {}
        """What B has left for W, by part and micro-batch."""
        self._autocast = autocast
        self._after_forward = after_forward
        self._posted_receives: dict[tuple[str, int, int], tuple[PostedReceive, ...]] = {}
        """This stage's, by schedule: name, micro-batches, chunks."""
        self._total = torch.zeros(())
        """Σ weight · loss of the current step."""
        self._local_messages: dict[Message, list[Tensor]] = {}
        """Messages between two parts on this stage."""
        self._receiver = Receiver(comm, posted_receives=(), signatures=(), metas=self.metas)

    # --- a training step --------------------------------------------------------------------------

    def step(self, schedule: Schedule, step: Step, *, is_profiled: bool = False) -> Tensor:
        """Do forward and backward of all micro-batches of one optimizer step.

        Args:
            schedule: The order.
            step: The inputs.
            is_profiled: Whether `timeline` is to have what this stage did when.

        Returns:
            Σ weight · loss on the stage that has the last part, 0 on others; 0-dimensional.

        Raises:
            LayoutError: The model's shapes are not a function of the batch's shapes.
        """
        device = self.comm.device
        self._total = torch.zeros((), device=device)
        self.timeline = None
        if is_profiled:
            # The clocks of all workers start here; a GPU's, at the same place in its stream.
            dist.all_reduce(self._total)
            self.timeline = Timeline(self.comm.stage, device)
        self._open(schedule, step.signatures)
        self.in_flight = {}
        self.deferred_work = {}
        seed = torch.initial_seed()
        # Both keep cast weights until they end, so that all micro-batches in flight share one copy.
        with self._autocast(), self.deferred.casting_once():
            self._execute(schedule, step, seed)
        # The step leaves the generators in a state that does not depend on the schedule.
        seed_generators(_mixed_seed(seed, self.placement.parts, 0), device)
        self.comm.settle()
        return self._total

    def _execute(self, schedule: Schedule, step: Step, seed: int) -> None:
        """Do this stage's instructions one after another."""
        ops = schedule.ops[self.comm.stage]
        completing_kind = "W" if schedule.splits_backward else "B"
        last_op_of_chunk = {
            op.chunk: index for index, op in enumerate(ops) if op.kind == completing_kind
        }
        for index, op in enumerate(ops):
            part = self.placement.part_at(self.comm.stage, op.chunk)
            # After this instruction, the chunk's gradients are complete.
            completes_chunk = last_op_of_chunk[op.chunk] == index
            if op.kind == "F":
                batch = step.batches[op.micro_batch]
                signature = step.signatures[op.micro_batch]
                # This may run the model without data, so the generators are seeded after it.
                placeholders = self.stage.placeholders(signature, step.loss, batch)
                seed_generators(_mixed_seed(seed, part, op.micro_batch), self.comm.device)
                self._forward(step, op, part, placeholders=placeholders)
            elif op.kind == "B":
                if completes_chunk and self.sync is not None:
                    self.sync.last_backward(op.chunk)
                self._backward(step, op, part, splits=schedule.splits_backward)
            else:
                self._weight_gradients(op, part)
            if completes_chunk and self.sync is not None:
                self.sync.chunk_done(op.chunk)
            self._receiver.post(index + 1)

    def timed_reduction(self) -> AbstractContextManager[None]:
        """The context in which the step's gradients are reduced."""
        return self._timed("REDUCE", None)

    def _forward(self, step: Step, op: Op, part: int, *, placeholders: Placeholders) -> None:
        signature = step.signatures[op.micro_batch]
        inputs: list[Tensor] = []
        if part > 0:
            inputs = self._receive("F", part - 1, op)
            for tensor, meta in zip(inputs, self.metas[part - 1, signature], strict=True):
                if meta.requires_grad:
                    tensor.requires_grad_()
        is_last = part == self.placement.parts - 1
        is_left_out = is_last and has_no_weight(step.weights[op.micro_batch])
        with (
            recorded_outputs(self.stage.module, is_left_out) as recorded,
            self._timed("F", op),
        ):
            loss, outputs = self._run_part(
                part,
                step.loss,
                step.batches[op.micro_batch],
                op=op,
                placeholders=placeholders,
                inputs=inputs,
            )
        if is_last:
            assert loss is not None, "the last part computes the loss"
            if is_left_out:
                silence(loss, recorded)
                outputs = [loss * 0.0]
            else:
                self._total = self._total + loss.detach() * step.weights[op.micro_batch]
                outputs = [loss * step.factors[op.micro_batch]]
        else:
            self._send_outputs(outputs, op, part, signature=signature)
        self.in_flight[part, op.micro_batch] = InFlight(inputs, outputs)

    def _run_part(
        self,
        part: int,
        function: Callable[[nn.Module, Any], T],
        batch: Any,
        *,
        op: Op,
        placeholders: Placeholders,
        inputs: list[Tensor],
    ) -> tuple[T | None, list[Tensor]]:
        with self._autocast():
            result = self.stage.run(
                part,
                function,
                batch,
                placeholders=placeholders,
                inputs=inputs,
                timed_block=lambda block: self._timed("BLOCK", op, block),
            )
        self._after_forward()
        return result

    def _backward(self, step: Step, op: Op, part: int, *, splits: bool) -> None:
        in_flight = self.in_flight.pop((part, op.micro_batch))
        outputs = in_flight.outputs
        gradients: list[Tensor] | None = None  # of the loss: 1
        if part < self.placement.parts - 1:
            outputs = [tensor for tensor in outputs if tensor.requires_grad]
            gradients = self._receive("B", part, op)
        deferring: AbstractContextManager[None] = contextlib.nullcontext()
        if splits:
            work: list[weight_grad.Work] = []
            self.deferred_work[part, op.micro_batch] = work
            deferring = self.deferred.deferring_to(work)
        # The types of backward are those of forward, whatever autocast would choose.
        no_autocast = torch.autocast(self.comm.device.type, enabled=False)
        with no_autocast, deferring, self._timed("B", op):
            if outputs:
                torch.autograd.backward(outputs, gradients)
        if part > 0:
            signature = step.signatures[op.micro_batch]
            self._send_input_gradients(in_flight.inputs, op, part, signature=signature)

    def _send_input_gradients(
        self, inputs: list[Tensor], op: Op, part: int, *, signature: Signature
    ) -> None:
        gradients: list[Tensor] = []
        for tensor in inputs:
            if tensor.grad is not None:
                gradients.append(tensor.grad)
            elif tensor.requires_grad:
                gradients.append(torch.zeros_like(tensor))
        metas = self.metas[part - 1, signature]
        sent_back = tuple(meta for meta in metas if meta.requires_grad)
        self._send("B", part - 1, op, tensors=gradients, metas=sent_back)

    def _weight_gradients(self, op: Op, part: int) -> None:
        work = self.deferred_work.pop((part, op.micro_batch))
        with torch.autocast(self.comm.device.type, enabled=False), self._timed("W", op):
            weight_grad.finish(work)

    # --- messages ---------------------------------------------------------------------------------

    def _open(self, schedule: Schedule, signatures: Sequence[Signature]) -> None:
        """Prepare for the messages that come during a step."""
        self._local_messages = {}
        key = (schedule.name, schedule.micro_batches, schedule.chunks)
        if key not in self._posted_receives:
            self._posted_receives[key] = posted_receives(schedule)[self.comm.stage]
        self._receiver = Receiver(
            self.comm,
            posted_receives=self._posted_receives[key],
            signatures=signatures,
            metas=self.metas,
        )

    def _receive(self, kind: str, edge: int, op: Op) -> list[Tensor]:
        """The tensors that cross from part `edge` to part `edge` + 1 (F), or back (B)."""
        message = Message(kind, edge, op.micro_batch)
        if message in self._local_messages:
            return self._local_messages.pop(message)
        with self._timed("RECV", op):
            return self._receiver.take(message)

    def _send(
        self, kind: str, edge: int, op: Op, *, tensors: list[Tensor], metas: TensorMetas
    ) -> None:
        message = Message(kind, edge, op.micro_batch)
        source, target = endpoints(self.placement, message)
        if source == target:
            self._local_messages[message] = [tensor.detach() for tensor in tensors]
            return
        with self._timed("SEND", op):
            narrowed = [
                tensor.detach().to(meta.sent_dtype)
                for tensor, meta in zip(tensors, metas, strict=True)
            ]
            self.comm.send(kind, target, narrowed, message=message)

    def _send_outputs(
        self, outputs: list[Tensor], op: Op, part: int, *, signature: Signature
    ) -> None:
        """Send a part's outputs to the next part, and their shapes before the first of a kind."""
        metas = tuple(TensorMeta.of(tensor, self.wire) for tensor in outputs)
        known_metas = self.metas.get((part, signature))
        if known_metas is None:
            self.metas[part, signature] = metas
            target = self.placement.stage_of(part + 1)
            if target != self.comm.stage:
                self.comm.send("F", target, [encode(metas).to(self.comm.device)])
        elif metas != known_metas:
            pairs = itertools.zip_longest(metas, known_metas, fillvalue="no tensor")
            meta, known_meta = next(pair for pair in pairs if pair[0] != pair[1])
            raise LayoutError(
                f"block {self.stage.last_block(part)} returns {meta} for one batch and "
                f"{known_meta} for another of the same shape: in a pipeline the shapes must depend "
                "on the batch's shapes alone"
            )
        self._send("F", part, op, tensors=outputs, metas=metas)

    def _timed(self, kind: str, op: Op | None, block: str = "") -> AbstractContextManager[None]:
        if self.timeline is None:
            return contextlib.nullcontext()
        return self.timeline.timed(kind, op, block)

    # --- evaluation -------------------------------------------------------------------------------

    def evaluate(self, function: Callable[[nn.Module, Any], T], batch: Any) -> T | None:
        """Call a function of the model and a batch, forward only.

        Of several calls in a row, the next begins on this stage while later stages still compute
        this one.

        Returns:
            What the function returned on the stage that has the last part; None on others.
        """
        placement = self.placement
        ops = tuple(Op("F", 0, chunk) for chunk in range(placement.chunks))
        schedule = Schedule(
            name="forward",
            stages=placement.stages,
            micro_batches=1,
            chunks=placement.chunks,
            ops=(ops,) * placement.stages,
            is_folded=placement.is_folded,
        )
        signature = self.stage.signature(batch)
        self._open(schedule, [signature])
        self.timeline = None
        placeholders = self.stage.placeholders(signature, function, batch)
        answer: T | None = None
        for done, op in enumerate(ops, start=1):
            part = placement.part_at(self.comm.stage, op.chunk)
            inputs = self._receive("F", part - 1, op) if part > 0 else []
            answer, outputs = self._run_part(
                part, function, batch, op=op, placeholders=placeholders, inputs=inputs
            )
            if part < placement.parts - 1:
                self._send_outputs(outputs, op, part, signature=signature)
            self._receiver.post(done)
        self.comm.settle()
        return answer


def _mixed_seed(seed: int, part: int, micro_batch: int) -> int:
    """A seed for each part and micro-batch, the same under every schedule."""
    stream = part * 65537 + micro_batch + 1
    return (seed * 6364136223846793005 + stream * 1442695040888963407) % 2**63
