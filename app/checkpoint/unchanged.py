"""What did not change since the last commit is not written again: frozen layers, say.

A save tells by checksums, bit for bit, which of a rank's tensors are as they were in the save before. From the second
save on those have a file of their own; from the third on, as long as none of them changes, that file is a hard link to
the last commit's, on file systems that have such links. What has changed once is written ever after, so that training
a whole model costs two saves' checksums and nothing later.

A linked file is one file with several names: removing a checkpoint takes away its name only. But what damages it
damages every checkpoint that has it, so after `MOST_LINKS` links it is written anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from app.checkpoint.commit import File
from app.storage import Storage

LEAST_BYTES = 64 * 1024
"""Less than this is not worth a file."""
MOST_LINKS = 50


@dataclass(frozen=True)
class Kept:
    """A file of unchanged tensors as it is in a checkpoint."""

    here: Storage
    name: str
    file: File
    pieces: frozenset[Any]  # the shards in it
    sums: dict[str, bytes]
    results: list[Any]  # what DCP is told of it
    links: int = 0


class Unchanged:
    """A rank's tensors from save to save. `look` begins a save; `committed` or `failed` ends it."""

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        self._least = least_bytes
        self._sums: dict[str, bytes] | None = None  # of those that have never changed; None: nothing was saved yet
        self._kept: Kept | None = None
        self._new: Kept | None = None

    def look(self, data: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Names of the tensors that are as they were in the save before; data: copies that nobody changes."""
        before = self._sums
        self._sums = {name: checksum(data[name]) for name in data if before is None or name in before}
        if before is None:
            return frozenset()
        self._sums = {name: found for name, found in self._sums.items() if found == before[name]}
        if sum(data[name].nbytes for name in self._sums) < self._least:
            return frozenset()
        return frozenset(self._sums)

    def link(self, here: Storage, name: str, pieces: frozenset[Any]) -> Kept | None:
        """Gives the last commit's file of exactly these shards a name in `here`; None where it must be written."""
        kept = self._kept
        if kept is None or not here.is_local or kept.links >= MOST_LINKS:
            return None
        if (kept.name, kept.pieces, kept.sums) != (name, pieces, self._sums):
            return None
        try:
            if kept.here.size(name) != kept.file.size:
                return None
            os.link(kept.here.local_path / name, here.local_path / name)
        except OSError:  # gone, or a file system without such links
            return None
        self._new = Kept(here, name, kept.file, pieces, kept.sums, kept.results, kept.links + 1)
        return self._new

    def wrote(self, here: Storage, name: str, file: File, pieces: frozenset[Any], results: list[Any]) -> None:
        """The file that was written instead."""
        self._new = Kept(here, name, file, pieces, dict(self._sums or {}), results)

    def committed(self) -> None:
        self._kept, self._new = self._new, None

    def failed(self) -> None:
        self._new = None


def checksum(tensor: torch.Tensor) -> bytes:
    """SHA-256 of a CPU tensor's bits, its shape and its type."""
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if tensor.numel():
        bits: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(bits)
    return digest.digest()
