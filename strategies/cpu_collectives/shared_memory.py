"""Collectives through memory that the processes of one machine share, where there is no GPU: first, gradients' average.

gloo sends a gradient to a process on the same machine as it would to another machine: through the kernel's sockets,
copied four times. Here every rank writes its share of the average into memory that all of them see, waits until the
others have too, and adds the shares up:

    shareᵢ[r] = gᵣ / R          (each rank r writes its own; two areas take turns, so that one wait per piece is enough)
    ḡ = ((shareᵢ[0] + shareᵢ[1]) + …)       (each rank reads all, in the same order: every rank gets the same bits)

Pieces are small enough to stay in the cores' caches. For two ranks the result is gloo's own to the last bit.

    rank 0:  write 0 │ write 1 │ add 0 … each rank's counter says up to which piece its shares are written; whoever
    rank 1:  write 0 │ wait    │ add 0     writes piece k+2 has seen all counters reach k+1, so no rank still reads k.

What each rank has for each other one (`all_to_all`) goes the same way: a rank's area has a part for every other rank,
and how long its longest message is, is written beside it, so that all know how many pieces there are.

A peer that has ended, or leaves, is noticed by a connection to it that closes, as gloo notices it.
"""

import contextlib
import mmap
import os
import platform
import secrets
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

PIECE_BYTES = 1 << 20
MOST_RANKS = 8
"""Every rank reads all shares: of more, gloo's ring passes over less memory."""
LINE = 64
"""Bytes between two counters: each has a line of the cache of its own."""
HEAD = 4096
SPINS = 100
NAP_SECONDS = (2e-4, 2e-3)
"""The shortest and the longest; between them, an eighth of what has been waited."""
LOOK_SECONDS = 0.05


class SharedMemory:
    """What a group of processes on one machine averages and exchanges. Made by `shared_memory`, on every rank."""

    def __init__(self, memory: mmap.mmap, rank: int, peers: list[socket.socket], listener: socket.socket) -> None:
        self.rank, self.size = rank, len(peers) + 1
        self._memory, self._sockets = memory, [listener, *peers]
        self._poll = select.poll()
        for peer in peers:
            self._poll.register(peer, select.POLLIN)
        self._written, *self._lengths = (self._numbers(row) for row in range(3))
        self._piece = 0
        places = ((HEAD + (turn * self.size + r) * PIECE_BYTES) for turn in range(2) for r in range(self.size))
        shares = [torch.frombuffer(memory, dtype=torch.uint8, count=PIECE_BYTES, offset=place) for place in places]
        self._areas = (shares[: self.size], shares[self.size :])

    def average_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces a one-dimensional CPU tensor by its average over the ranks. Collective.

        Raises ConnectionError if a rank is gone."""
        for piece in tensor.split(PIECE_BYTES // tensor.element_size()):
            areas, _ = self._begun()
            first, second, *rest = shares = [area[: piece.nbytes].view(piece.dtype) for area in areas]
            torch.mul(piece, 1 / self.size, out=shares[self.rank])
            self._wait()
            torch.add(first, second, out=piece)
            for share in rest:
                piece.add_(share)
        return tensor

    def all_to_all(
        self, arrived: torch.Tensor, given: torch.Tensor, takes: Sequence[int], gives: Sequence[int]
    ) -> None:
        """Sends `gives[j]` consecutive rows of `given` to rank j, and gets `takes[j]` from it; contiguous. Collective.

        Raises ConnectionError if a rank is gone."""
        sent, found = _bytes_of(given, gives), _bytes_of(arrived, takes)
        found[self.rank].copy_(sent[self.rank])
        sent[self.rank] = found[self.rank] = sent[self.rank][:0]
        width = PIECE_BYTES // self.size
        done, longest = 0, 1
        while done < longest:
            areas, lengths = self._begun()
            for part, place in zip(sent, areas[self.rank].split(width)):
                piece = part[done : done + width]
                place[: len(piece)].copy_(piece)
            lengths[self.rank] = max(map(len, sent))
            self._wait()
            for part, area in zip(found, areas):
                piece = part[done : done + width]
                piece.copy_(area[self.rank * width :][: len(piece)])
            done, longest = done + width, max(lengths)

    def _begun(self) -> tuple[list[torch.Tensor], Any]:
        """Where the next piece goes: each rank's area, and its number beside it."""
        self._piece += 1
        return self._areas[self._piece % 2], self._lengths[self._piece % 2]

    def _numbers(self, row: int) -> Any:
        """One for each rank, all ranks' in `row` of the memory's head."""
        first = 1 + row * MOST_RANKS
        return memoryview(self._memory)[first * LINE : (first + self.size) * LINE].cast("q")[:: LINE // 8]

    def _wait(self) -> None:
        """Until every rank has written the piece, as this one has now."""
        self._written[self.rank] = self._piece
        for _ in range(SPINS):
            if self._all_written():
                return
            os.sched_yield()
        begun = looked = now = time.monotonic()
        shortest, longest = NAP_SECONDS
        while not self._all_written():
            time.sleep(min(max(shortest, (now - begun) / 8), longest))
            if (now := time.monotonic()) - looked > LOOK_SECONDS:
                looked = now
                if self._poll.poll(0) and not self._all_written():
                    raise ConnectionError("the ranks cannot go on together, one is gone: Connection closed by peer")

    def _all_written(self) -> bool:
        return min(self._written) >= self._piece

    def close(self) -> None:
        """Leaves the group: what its peers still wait for fails there."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _bytes_of(rows: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """As many rows for each size."""
    width = rows[0].nbytes if len(rows) else 0
    return list(rows.view(-1).view(torch.uint8).split([size * width for size in sizes]))


def shared_memory(group: dist.ProcessGroup | None, device: torch.device) -> SharedMemory | None:
    """What averages over a group, where all its ranks are on this machine and on CPUs; otherwise None, on every rank.

    Collective over `group`.
    """
    size = dist.get_world_size(group)
    if device.type != "cpu" or not 2 <= size <= MOST_RANKS or "cpu:gloo" not in str(dist.get_backend_config(group)):
        return None
    with _offered() as (port, offer):
        offers: list[Any] = [None] * size
        dist.all_gather_object(offers, offer, group=group)
        rank = dist.get_rank(group)
        found = _found(offers[0], [other["port"] for other in offers[:rank]]) if all(offers) else None
        answers: list[Any] = [None] * size
        dist.all_gather_object(answers, found is not None, group=group)
        if found is None or not all(answers):
            return None
        memory, called = found
        calling = [port.accept()[0] for _ in range(rank + 1, size)]  # who has answered has called
        return SharedMemory(memory, rank, [*called, *calling], port.dup())


@contextlib.contextmanager
def _offered() -> Any:
    """Memory and a port that this rank offers, and how to find them; None for that where it cannot be done here."""
    with contextlib.ExitStack() as stack:
        port = offer = None
        # Elsewhere processors may show one core's writes to another in another order.
        if sys.platform == "linux" and platform.machine() == "x86_64":
            with contextlib.suppress(OSError):
                memory = os.memfd_create("trireme")
                stack.callback(os.close, memory)
                token = secrets.token_bytes(16)
                os.pwrite(memory, token, 0)
                os.ftruncate(memory, HEAD + 2 * MOST_RANKS * PIECE_BYTES)
                port = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                offer = {"path": f"/proc/{os.getpid()}/fd/{memory}", "token": token, "port": port.getsockname()[1]}
        yield port, offer


def _found(offer: dict[str, Any], ports: list[int]) -> tuple[mmap.mmap, list[socket.socket]] | None:
    """The first rank's memory, and connections to all ranks below; None where they are on another machine."""
    with contextlib.suppress(OSError):
        with open(offer["path"], "r+b", buffering=0) as file:
            if os.pread(file.fileno(), len(offer["token"]), 0) == offer["token"]:
                peers = [socket.create_connection(("127.0.0.1", port), 5) for port in ports]
                return mmap.mmap(file.fileno(), 0), peers
    return None
