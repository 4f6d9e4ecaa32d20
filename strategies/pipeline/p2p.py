"""Point-to-point communication between stages: activations one way, their gradients back.

A sender sends as soon as it has something, and does not wait. A receiver posts its receives when
postings.py says so, so that messages travel while the stage computes.

The receiver must know the shapes before it can post a receive. They are sent once for each kind of
batch, in a *header* of fixed size before the first tensors of that kind; after that, nothing but
tensors is sent.

With 16-bit arithmetic (autocast), float32 activations and their gradients travel as 16 bits, which
halves the bytes. They are float32 again on arrival, so that a stage computes as one device would,
up to the rounding of what crossed. Tensors without a gradient, such as masks and positions, travel
as they are; so does everything in evaluation.
"""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.dims import LayoutError, group_of_this_rank
from strategies.pipeline.interface import Signature
from strategies.pipeline.postings import Connection, Message, PostedReceive, connections
from strategies.pipeline.schedules import Placement

HEADER_BYTES = 8192
"""Size of the message that says shapes."""
TIMEOUT = timedelta(minutes=30)
"""Time limit of an operation. It is torch's default for all groups but those of NCCL alone, which
have 10 minutes; the first step may have to compile."""
MAX_CTAS = 4
"""How many of a GPU's multiprocessors a connection may occupy. A send or receive occupies them
while it waits, and a stage has up to four at once; NCCL's default allows 32 for each."""
_TAGS = {"F": 0, "B": 1}
"""gloo tells messages of one group apart by tag."""


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """What a receiver has to know of a tensor.

    Args:
        shape: Its shape.
        dtype: Its type in the sender and the receiver.
        requires_grad: Whether a gradient of it is sent back.
        sent_dtype: The type in which it and its gradient travel.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    sent_dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor, narrow: torch.dtype | None) -> TensorMeta:
        """Describe a tensor.

        Args:
            tensor: What is to be sent.
            narrow: See `sent_dtype`.
        """
        return TensorMeta(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
            sent_dtype=sent_dtype(tensor, narrow),
        )

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


TensorMetas = tuple[TensorMeta, ...]


def sent_dtype(tensor: Tensor, narrow: torch.dtype | None) -> torch.dtype:
    """The type in which a tensor travels.

    Args:
        tensor: What is to be sent.
        narrow: The type of 16-bit arithmetic; None if all arithmetic is in float32.
    """
    is_narrowed = tensor.requires_grad and tensor.dtype == torch.float32
    return narrow if narrow is not None and is_narrowed else tensor.dtype


def encode(metas: TensorMetas) -> Tensor:
    """Put shapes into a header: (HEADER_BYTES,) uint8.

    Raises:
        LayoutError: There are more tensors than fit.
    """
    data = pickle.dumps(metas)
    if len(data) > HEADER_BYTES:
        raise LayoutError(
            f"{len(metas)} tensors go from one stage of the pipeline to the next, which are too "
            "many: divide the model elsewhere with parallel.stages, or write strategy=fsdp"
        )
    return torch.frombuffer(bytearray(data.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def decode(header: Tensor) -> TensorMetas:
    """Read a header that `encode` made; waits for the device."""
    return pickle.loads(header.cpu().numpy().tobytes())


class P2PComm:
    """The connections of one stage to its neighbours.

    Creating it is collective over all workers. On GPUs each direction of each kind of message has a
    process group of its own, because NCCL does the operations of a group one after another.
    """

    def __init__(
        self,
        placement: Placement,
        stage: int,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        pipelines: Sequence[Sequence[int]],
    ) -> None:
        """Open all connections.

        Args:
            placement: Which stage holds which parts.
            stage: Number of this worker's stage.
            group: The workers of this pipeline.
            device: Where tensors are.
            pipelines: The ranks of every pipeline, of which there are several with data or tensor
                parallelism.
        """
        self.stage = stage
        self.device = device
        self.ranks = dist.get_process_group_ranks(group)
        """The ranks of this pipeline, by stage."""
        self._group = group
        self._group_of: dict[tuple[str, bool], dist.ProcessGroup] = {}
        """(kind, whether the target is a later stage) → the group, if it has one of its own."""
        self._pending: dict[Message | None, list[tuple[dist.Work, Tensor]]] = {}
        """Tensors that are kept until they have been received, by message."""
        if device.type == "cuda":
            for kind in ("F", "B"):
                for is_downstream in (True, False):
                    self._group_of[kind, is_downstream] = _new_group(pipelines)
        self._connect(placement)

    def _connect(self, placement: Placement) -> None:
        """Send one number over every connection.

        NCCL opens a connection with its first message, for which both ends wait. The stages open
        all of them here in one order, so that no such wait happens between two others in a step.
        """
        token = torch.zeros(1, device=self.device)
        for connection in connections(placement):
            group = self._group_for(connection)
            tag = _TAGS[connection.kind]
            if self.stage == connection.source:
                dist.send(token, self.ranks[connection.target], group=group, tag=tag)
            elif self.stage == connection.target:
                dist.recv(token, self.ranks[connection.source], group=group, tag=tag)

    def _group_for(self, connection: Connection) -> dist.ProcessGroup:
        is_downstream = connection.source < connection.target
        return self._group_of.get((connection.kind, is_downstream), self._group)

    def send(
        self, kind: str, target: int, tensors: Iterable[Tensor], message: Message | None = None
    ) -> None:
        """Send tensors to a stage; returns at once.

        Args:
            kind: F or B.
            target: Number of the stage.
            tensors: What is sent.
            message: The message that they are, by which `release` knows them; None for headers.
        """
        group = self._group_for(Connection(kind, self.stage, target))
        pending = self._pending.setdefault(message, [])
        for tensor in tensors:
            data = tensor.detach().contiguous()
            work = dist.isend(data, self.ranks[target], group=group, tag=_TAGS[kind])
            assert work is not None, "this rank is in the group"
            pending.append((work, data))

    def receive(
        self, kind: str, source: int, shapes: Iterable[tuple[tuple[int, ...], torch.dtype]]
    ) -> list[tuple[dist.Work, Tensor]]:
        """Post the receive of tensors from a stage; returns at once.

        Args:
            kind: F or B.
            source: Number of the stage.
            shapes: Shape and type of each tensor.

        Returns:
            For each tensor what to wait for, and the tensor that is then filled.
        """
        group = self._group_for(Connection(kind, source, self.stage))
        receiving: list[tuple[dist.Work, Tensor]] = []
        for shape, dtype in shapes:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            work = dist.irecv(tensor, self.ranks[source], group=group, tag=_TAGS[kind])
            assert work is not None, "this rank is in the group"
            receiving.append((work, tensor))
        return receiving

    def release(self, messages: Iterable[Message | None]) -> None:
        """Let go of the tensors of messages that have been received."""
        for message in messages:
            for work, _ in self._pending.pop(message, ()):
                work.wait()

    def settle(self) -> None:
        """Wait until everything that was sent has been received."""
        self.release(list(self._pending))


def _new_group(pipelines: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """A process group of each pipeline for one direction; returns this worker's."""
    ranks = [list(pipeline) for pipeline in pipelines]
    if "nccl" not in str(dist.get_backend_config()):
        group = group_of_this_rank(ranks)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = MAX_CTAS
        with warnings.catch_warnings():
            # The options have a timeout of their own; torch warns that the argument replaces it.
            warnings.filterwarnings("ignore", "backend_options._timeout")
            group = group_of_this_rank(ranks, backend="nccl", pg_options=options, timeout=TIMEOUT)
    assert group is not None, "every worker is in a pipeline"
    return group


@dataclass(frozen=True, kw_only=True)
class _Receiving:
    """A posted receive.

    Args:
        metas: What comes.
        tensors: For each tensor what to wait for, and the tensor that is then filled.
        delivered: See PostedReceive.
    """

    metas: TensorMetas
    tensors: list[tuple[dist.Work, Tensor]]
    delivered: tuple[Message, ...]


class Receiver:
    """Posts the receives of one stage during one step, and hands out what has come."""

    def __init__(
        self,
        comm: P2PComm,
        posted_receives: Iterable[PostedReceive],
        signatures: Sequence[Signature],
        metas: dict[tuple[int, Signature], TensorMetas],
    ) -> None:
        """Post what is to be posted before the first instruction.

        Args:
            comm: The stage's connections.
            posted_receives: What the stage receives during the step, in order.
            signatures: Of each micro-batch.
            metas: The shapes that are known, by edge and signature; headers add to them.
        """
        self._comm = comm
        self._to_post = deque(posted_receives)
        self._signatures = signatures
        self._metas = metas
        self._receiving: dict[Message, _Receiving] = {}
        self.post(0)

    def post(self, done: int) -> None:
        """Post the receives that are due once `done` instructions are done."""
        while self._to_post and self._to_post[0].after_ops <= done:
            receive = self._to_post.popleft()
            kind, edge, micro_batch = receive.message
            key = (edge, self._signatures[micro_batch])
            if key not in self._metas:
                self._metas[key] = self._receive_header(kind, receive.source)
            metas = self._metas[key]
            if kind == "B":
                metas = tuple(meta for meta in metas if meta.requires_grad)
            shapes = [(meta.shape, meta.sent_dtype) for meta in metas]
            self._receiving[receive.message] = _Receiving(
                metas=metas,
                tensors=self._comm.receive(kind, receive.source, shapes),
                delivered=receive.delivered,
            )

    def take(self, message: Message) -> list[Tensor]:
        """The tensors of a message; waits for them (on a GPU, the current stream does)."""
        receiving = self._receiving.pop(message)
        for work, _ in receiving.tensors:
            work.wait()
        self._comm.release(receiving.delivered)
        return [
            tensor.to(meta.dtype)
            for (_, tensor), meta in zip(receiving.tensors, receiving.metas, strict=True)
        ]

    def _receive_header(self, kind: str, source: int) -> TensorMetas:
        receiving = self._comm.receive(kind, source, [((HEADER_BYTES,), torch.uint8)])
        ((work, header),) = receiving
        work.wait()
        return decode(header)
