"""Tensors that are passed round a ring of workers."""

import torch
import torch.distributed as dist
from torch import Tensor


class Passing:
    """Sends tensors to the next worker and receives those of the previous one, without waiting.

    Args:
        tensors: What to send; every worker sends tensors of the same shapes and types.
        group: The ring.
        tag: The first of as many tags as there are tensors; passings that overlap need different
            tags.
    """

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup, tag: int = 0) -> None:
        next_rank = (group.rank() + 1) % group.size()
        previous_rank = (group.rank() - 1) % group.size()
        self._sent = tensors  # kept alive until they have been sent
        self._received = [torch.empty_like(tensor) for tensor in tensors]
        sends = [
            dist.P2POp(dist.isend, tensor, group=group, tag=tag + number, group_peer=next_rank)
            for number, tensor in enumerate(self._sent)
        ]
        receives = [
            dist.P2POp(dist.irecv, tensor, group=group, tag=tag + number, group_peer=previous_rank)
            for number, tensor in enumerate(self._received)
        ]
        self._works = dist.batch_isend_irecv([*sends, *receives])

    def arrived(self) -> list[Tensor]:
        """Waits for the tensors of the previous worker."""
        for work in self._works:
            work.wait()
        return self._received
