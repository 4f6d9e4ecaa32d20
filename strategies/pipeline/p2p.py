"""What goes between stages: activations one way, gradients back, straight from process to process.

A sender sends as soon as it has something and does not wait. A receiver knows from the sender's own list of
instructions in which order things will come, and has asked for the next few before it needs them, so that they travel
while it computes. Shapes are sent once per kind of batch, in a message of fixed size before the first tensors of that
kind: after that nothing but tensors is sent.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.dims import LayoutError, own_group

AHEAD = 3
"""Messages that a receiver has asked for before it needs them, per neighbour and direction."""
HEADER_BYTES = 8192
"""Of a message that says shapes."""


@dataclass(frozen=True)
class TensorMeta:
    """A tensor's shape and type, and whether a gradient of it is sent back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


TensorMetas = tuple[TensorMeta, ...]


def encode(metas: TensorMetas) -> Tensor:
    """(HEADER_BYTES,) uint8."""
    data = pickle.dumps(metas)
    if len(data) > HEADER_BYTES:
        raise LayoutError(
            f"{len(metas)} tensors go from one stage of the pipeline to the next, which are too many: divide the model "
            "elsewhere with parallel.stages, or write strategy=fsdp"
        )
    return torch.frombuffer(bytearray(data.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


@dataclass(frozen=True)
class Message:
    """What is sent at once: the outputs of (or the gradients for) part and micro-batch. kind: what shapes it has."""

    part: int
    micro: int
    kind: Any


class P2PComm:
    """The process groups and neighbours of one worker. Collective over all workers.

    group: this worker's pipeline. pipelines: the ranks of all of them. On a GPU every direction has a group of its own,
    since NCCL does what one group is asked in order; gloo tells messages apart by tag.
    """

    def __init__(
        self, stage: int, group: dist.ProcessGroup, device: torch.device, pipelines: Sequence[Sequence[int]]
    ) -> None:
        self.stage, self.device, self.group = stage, device, group
        self.ranks = dist.get_process_group_ranks(group)
        """By stage."""
        self.groups: dict[tuple[str, bool], dist.ProcessGroup] = {}
        self.sent: dict[Any, list[tuple[Any, Tensor]]] = {}
        """What is kept until it has been sent, by the key it was sent with."""
        if device.type == "cuda":
            for key in ((kind, down) for kind in ("F", "B") for down in (True, False)):
                self.groups[key] = own_group([list(ranks) for ranks in pipelines])  # type: ignore[assignment]

    def _group(self, kind: str, source: int, target: int) -> dist.ProcessGroup:
        return self.groups.get((kind, source < target), self.group)

    def send(self, kind: str, stage: int, tensors: Iterable[Tensor], key: Any = None) -> None:
        """Returns at once. key: by which `received` knows these tensors."""
        group, tag = self._group(kind, self.stage, stage), "FB".index(kind)
        for done in [key for key, pairs in self.sent.items() if all(work.is_completed() for work, _ in pairs)]:
            del self.sent[done]
        for tensor in tensors:
            data = tensor.detach().contiguous()
            work = dist.isend(data, self.ranks[stage], group=group, tag=tag)
            self.sent.setdefault(key, []).append((work, data))

    def receive(self, kind: str, stage: int, tensors: Iterable[Tensor]) -> list[Any]:
        group, tag = self._group(kind, stage, self.stage), "FB".index(kind)
        return [dist.irecv(tensor, self.ranks[stage], group=group, tag=tag) for tensor in tensors]

    def received(self, key: Any) -> None:
        """Lets go of what was sent with this key: an answer to it has come. (gloo says of a message that it has been
        sent only to who waits for it.)"""
        for work, _ in self.sent.pop(key, ()):
            work.wait()

    def settle(self) -> None:
        """Waits until everything that was sent has been taken."""
        for key in list(self.sent):
            self.received(key)


class Receiver:
    """What one neighbour sends in one direction during a step, asked for in the order in which it will come."""

    def __init__(
        self, comm: P2PComm, kind: str, stage: int, messages: Iterable[Message], metas: dict[Any, TensorMetas]
    ) -> None:
        """metas: shapes by (part, kind of batch); grows by what headers say."""
        self.comm, self.kind, self.stage = comm, kind, stage
        self.coming = deque(messages)
        self.metas = metas
        self.asked: dict[tuple[int, int], tuple[list[Any], list[Tensor]]] = {}
        self.ahead()

    def ahead(self) -> None:
        """Asks for the next messages whose shapes are known."""
        while self.coming and len(self.asked) < AHEAD and self._meta(self.coming[0]) is not None:
            self._ask()

    def take(self, part: int, micro: int) -> list[Tensor]:
        """The tensors of that message; waits for them."""
        while (part, micro) not in self.asked:
            if self._meta(self.coming[0]) is None:
                self._learn(self.coming[0])
            self._ask()
        works, tensors = self.asked.pop((part, micro))
        for work in works:
            work.wait()
        self.ahead()
        return tensors

    def _meta(self, message: Message) -> TensorMetas | None:
        return self.metas.get((message.part, message.kind))

    def _ask(self) -> None:
        message = self.coming.popleft()
        metas = self.metas[message.part, message.kind]
        if self.kind == "B":
            metas = tuple(meta for meta in metas if meta.grad)
        tensors = [torch.empty(meta.shape, dtype=meta.dtype, device=self.comm.device) for meta in metas]
        self.asked[message.part, message.micro] = (self.comm.receive(self.kind, self.stage, tensors), tensors)

    def _learn(self, message: Message) -> None:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self.comm.device)
        for work in self.comm.receive(self.kind, self.stage, [header]):
            work.wait()
        self.metas[message.part, message.kind] = pickle.loads(header.cpu().numpy().tobytes())
