"""Chunks of rows for losses that compute logits, or cast them to float32, a few rows at a time.

A loss over a large vocabulary that computed all rows at once would need several float32 numbers for
each logit. This file decides how many rows a chunk has, and lets the planner observe the chunks:
chunks of one size cost the same, and the memory of a full chunk does not grow with the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

CHUNK_NUMBERS = 1 << 24
"""The most logits of a chunk: 64 MiB in float32, enough to fill a GPU."""


class ChunkObserver(Protocol):
    """Records what chunks cost."""

    @property
    def skips_equal_chunks(self) -> bool:
        """Whether one chunk is computed in place of all of its size, so that results are wrong."""

    @property
    def compiles_kernels(self) -> bool:
        """Whether the arithmetic of a chunk is one kernel."""

    def chunk(
        self, rows: int, words: int, *, times: int, is_first: bool, is_bounded: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Active while a chunk is computed.

        Args:
            rows: Rows of all chunks.
            words: Logits of a row.
            times: How many chunks of this size there are, of which only this one is computed.
            is_first: Whether it is the first chunk. No later chunk is larger.
            is_bounded: Whether the chunk has `chunk_rows(rows, words)` rows.
        """

    def kernel(self) -> contextlib.AbstractContextManager[None]:
        """Active while what one kernel does is computed by several operations."""


_OBSERVER: ContextVar[ChunkObserver | None] = ContextVar("observer", default=None)


@contextlib.contextmanager
def observed_by(observer: ChunkObserver) -> Iterator[None]:
    """Report every chunk to an observer while the context is active."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def current_observer() -> ChunkObserver | None:
    """The observer that chunks are reported to, if there is one."""
    return _OBSERVER.get()


def chunk_rows(rows: int, words: int) -> int:
    """Rows of a chunk, so that chunks are equal and have at most CHUNK_NUMBERS logits.

    Args:
        rows: Rows of all chunks.
        words: Logits of a row, which may be more than CHUNK_NUMBERS.
    """
    chunks = -(-rows * words // CHUNK_NUMBERS)
    return max(1, -(-rows // max(1, chunks)))


def row_chunks(rows: int, words: int, *, chunks: int | None = None) -> Iterator[slice]:
    """The rows of each chunk, one after another.

    The caller should free a chunk's tensors before it asks for the next chunk.

    Args:
        rows: Rows of all chunks.
        words: Logits of a row.
        chunks: How many chunks there are at most; by default so many that none is too large.
    """
    if not rows:
        return
    is_bounded = chunks is None
    size = chunk_rows(rows, words) if chunks is None else -(-rows // chunks)
    observer = _OBSERVER.get()
    if observer is None:
        for start in range(0, rows, size):
            yield slice(start, start + size)
        return
    full, rest = divmod(rows, size)
    parts = [(0, full)] if observer.skips_equal_chunks else [(i, 1) for i in range(full)]
    if rest:
        parts.append((full, 1))
    for chunk, times in parts:
        start = chunk * size
        is_first = chunk == 0
        with observer.chunk(rows, words, times=times, is_first=is_first, is_bounded=is_bounded):
            yield slice(start, start + size)
