"""What goes between stages: activations one way, gradients back, straight from process to process.

A sender sends as soon as it has something and does not wait. A receiver asks for what will come when the schedule says
so (postings.py), so that it travels while the stage computes. Shapes are sent once per kind of batch, in a message of
fixed size before the first tensors of that kind: after that nothing but tensors is sent.

With 16-bit arithmetic (autocast) float32 activations travel as 16 bits, and their gradients too: half the bytes. On
arrival they are float32 again, so that a stage computes as one device would, but for the rounding of what crossed.
What carries no gradient (masks, positions) travels as it is, as does everything in evaluation.
"""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.dims import LayoutError, group_of_this_rank
from strategies.pipeline.postings import Arrival, Key, connections
from strategies.pipeline.schedules import Placement

HEADER_BYTES = 8192
"""Of a message that says shapes."""
TIMEOUT = timedelta(minutes=30)
"""Of an operation: torch's of every group that is not NCCL's alone, which has 10. The first step may compile."""
CTAS = 4
"""Most of a GPU's multiprocessors that one connection may occupy. A receive or send occupies them while it waits, and a
stage has up to four at once; NCCL alone may take 32 for each."""


@dataclass(frozen=True)
class TensorMeta:
    """A tensor's shape and type, whether a gradient of it is sent back, and the type that both travel as."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    sent: torch.dtype

    @staticmethod
    def of(tensor: Tensor, wire: torch.dtype | None) -> TensorMeta:
        """wire: see sent_dtype."""
        return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, sent_dtype(tensor, wire))

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


TensorMetas = tuple[TensorMeta, ...]


def sent_dtype(tensor: Tensor, wire: torch.dtype | None) -> torch.dtype:
    """What the tensor travels as. wire: the type of 16-bit arithmetic; None: all is float32."""
    return wire if wire is not None and tensor.requires_grad and tensor.dtype == torch.float32 else tensor.dtype


def encode(metas: TensorMetas) -> Tensor:
    """(HEADER_BYTES,) uint8."""
    data = pickle.dumps(metas)
    if len(data) > HEADER_BYTES:
        raise LayoutError(
            f"{len(metas)} tensors go from one stage of the pipeline to the next, which are too many: divide the model "
            "elsewhere with parallel.stages, or write strategy=fsdp"
        )
    return torch.frombuffer(bytearray(data.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def decode(header: Tensor) -> TensorMetas:
    """What `encode` was given; waits for the device."""
    return pickle.loads(header.cpu().numpy().tobytes())


class P2PComm:
    """The process groups and neighbours of one worker. Collective over all workers.

    group: this worker's pipeline. pipelines: the ranks of all of them. On a GPU every direction has a group of its own,
    since NCCL does what one group is asked in order; gloo tells messages apart by tag.
    """

    def __init__(
        self, placement: Placement, stage: int, group: dist.ProcessGroup, device: torch.device, pipelines: Sequence[Any]
    ) -> None:
        self.stage, self.device, self.group = stage, device, group
        self.ranks = dist.get_process_group_ranks(group)
        """By stage."""
        self.groups: dict[tuple[str, bool], dist.ProcessGroup] = {}
        self.sent: dict[Key | None, list[tuple[Any, Tensor]]] = {}
        """What is kept until it has been taken, by the key it was sent with."""
        if device.type == "cuda":
            with warnings.catch_warnings():  # of the options' own timeout, that the argument goes before it
                warnings.filterwarnings("ignore", "backend_options._timeout")
                for key in ((kind, down) for kind in ("F", "B") for down in (True, False)):
                    made = group_of_this_rank([list(ranks) for ranks in pipelines], **_nccl())
                    assert made is not None
                    self.groups[key] = made
        self._connect(placement)

    def _connect(self, placement: Placement) -> None:
        """NCCL opens a connection with its first message, and both ends wait for it: so here, in one order."""
        token = torch.zeros(1, device=self.device)
        for kind, source, target in connections(placement):
            if self.stage == source:
                dist.send(token, self.ranks[target], **self._way(kind, source, target))
            elif self.stage == target:
                dist.recv(token, self.ranks[source], **self._way(kind, source, target))

    def _way(self, kind: str, source: int, target: int) -> dict[str, Any]:
        return {"group": self.groups.get((kind, source < target), self.group), "tag": "FB".index(kind)}

    def send(self, kind: str, stage: int, tensors: Iterable[Tensor], key: Key | None = None) -> None:
        """Returns at once. key: by which `release` knows these tensors."""
        for tensor in tensors:
            data = tensor.detach().contiguous()
            work = dist.isend(data, self.ranks[stage], **self._way(kind, self.stage, stage))
            self.sent.setdefault(key, []).append((work, data))

    def receive(
        self, kind: str, stage: int, shapes: Iterable[tuple[tuple[int, ...], torch.dtype]]
    ) -> tuple[list[Any], list[Tensor]]:
        """Returns at once: what to wait for, and where the tensors will be."""
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
        way = self._way(kind, stage, self.stage)
        return [dist.irecv(tensor, self.ranks[stage], **way) for tensor in tensors], tensors

    def release(self, keys: Iterable[Key | None]) -> None:
        """Lets go of what was sent with these keys, which has been taken."""
        for key in keys:
            for work, _ in self.sent.pop(key, ()):
                work.wait()

    def settle(self) -> None:
        """Waits until everything that was sent has been taken."""
        self.release(list(self.sent))


def _nccl() -> dict[str, Any]:
    """How to make a group of few multiprocessors, where NCCL is what GPUs talk over."""
    if "nccl" not in str(dist.get_backend_config()):
        return {}
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = CTAS
    return {"backend": "nccl", "pg_options": options, "timeout": TIMEOUT}


class Receiver:
    """What a stage is sent during a step."""

    def __init__(
        self, comm: P2PComm, coming: Iterable[Arrival], kinds: Sequence[Any], metas: dict[Any, TensorMetas]
    ) -> None:
        """kinds: of each micro-batch. metas: shapes by (edge, kind of batch); grows by what headers say."""
        self.comm, self.coming, self.kinds, self.metas = comm, deque(coming), kinds, metas
        self.asked: dict[Key, tuple[Arrival, TensorMetas, list[Any], list[Tensor]]] = {}
        self.ask(0)

    def ask(self, done: int) -> None:
        """Asks for what is to be asked for once that many instructions are done."""
        while self.coming and self.coming[0].after <= done:
            arrival = self.coming.popleft()
            (kind, edge, micro), source = arrival.key, arrival.source
            batch = self.kinds[micro]
            if (edge, batch) not in self.metas:
                self.metas[edge, batch] = self._learn(kind, source)
            metas = tuple(meta for meta in self.metas[edge, batch] if kind == "F" or meta.grad)
            works, tensors = self.comm.receive(kind, source, ((meta.shape, meta.sent) for meta in metas))
            self.asked[arrival.key] = arrival, metas, works, tensors

    def take(self, key: Key) -> list[Tensor]:
        """The tensors of that message; waits for them (on a GPU, the current stream does)."""
        arrival, metas, works, tensors = self.asked.pop(key)
        for work in works:
            work.wait()
        self.comm.release(arrival.frees)
        return [tensor.to(meta.dtype) for tensor, meta in zip(tensors, metas, strict=True)]

    def _learn(self, kind: str, source: int) -> TensorMetas:
        works, (header,) = self.comm.receive(kind, source, [((HEADER_BYTES,), torch.uint8)])
        for work in works:
            work.wait()
        return decode(header)
