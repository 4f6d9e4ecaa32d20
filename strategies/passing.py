"""Tensors on their way round a ring of workers."""

import torch
import torch.distributed as dist
from torch import Tensor


class Passing:
    """Tensors on their way to the next worker, and those of the worker before on their way here, while this worker
    computes. tag: the first of as many as there are tensors; what is under way at once needs its
    own."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup, tag: int = 0) -> None:
        self.sent = tensors  # kept until it has gone
        self.coming = [torch.empty_like(tensor) for tensor in tensors]
        ahead, behind = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
        operations = [
            dist.P2POp(what, tensor, group=group, tag=tag + i, group_peer=peer)
            for what, peer, several in (
                (dist.isend, ahead, self.sent),
                (dist.irecv, behind, self.coming),
            )
            for i, tensor in enumerate(several)
        ]
        self.works = dist.batch_isend_irecv(operations)

    def arrived(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.coming
