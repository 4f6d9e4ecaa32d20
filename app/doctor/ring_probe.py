"""One rank of doctor's all-reduce: NCCL on one GPU, or gloo on a node's CPU. Sent by value, as `probe` is."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

BYTES = {"nccl": 256 << 20, "gloo": 16 << 20}
TIMES = 5
JOIN_SECONDS = 25


class Ring:
    """The actor. gpu: the driver's index of the one it uses; None: the CPU. interface: where gloo's peers find it."""

    def __init__(self, gpu: int | None, interface: str) -> None:
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        import torch

        self.torch, self.backend = torch, "gloo" if gpu is None else "nccl"
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        self.store: Any = None
        self.data: Any = None

    def open(self, address: str) -> tuple[str, int]:
        """The first rank's part: where all find one another."""
        from torch.distributed import TCPStore

        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def join(self, rank: int, ranks: int, store: tuple[str, int]) -> str:
        import torch.distributed as dist

        if self.device.type == "cuda":
            self.torch.cuda.set_device(self.device)
        wait = timedelta(seconds=JOIN_SECONDS)
        found = self.store or dist.TCPStore(*store, is_master=False, timeout=wait)
        dist.init_process_group(self.backend, store=found, rank=rank, world_size=ranks, timeout=wait)
        self.data = self.torch.ones(BYTES[self.backend] // 4, device=self.device)
        return self.backend

    def rate(self, groups: list[list[int]]) -> float | None:
        """Bytes/s that leave each rank while its group reduces, in a ring: 2 (n-1)/n of the data. Every rank calls this
        with the same disjoint groups; None where it is in none of them."""
        import torch.distributed as dist

        own = next((group for group in groups if dist.get_rank() in group), None)
        made = {tuple(group): dist.new_group(group) for group in groups}
        if own is None or len(own) < 2:
            return None
        best = float("inf")
        for _ in range(TIMES + 1):  # the first one connects
            self._finish()
            begun = time.perf_counter()
            dist.all_reduce(self.data, group=made[tuple(own)])
            self._finish()
            best = min(best, time.perf_counter() - begun)
            self.data.fill_(1.0)
        return 2 * (len(own) - 1) / len(own) * BYTES[self.backend] / best

    def _finish(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)
