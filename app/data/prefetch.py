"""Batches made ahead of the loop by a thread and put on the device; or at once, where that is cheaper."""

from __future__ import annotations

import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

T = TypeVar("T")

AHEAD = 2
"""Items that wait ready: one hides the time of making it, the second hides its variation."""

CHEAP = 3e-4
"""Seconds of this thread's own computing. On a CPU, handing an item from thread to thread costs the loop about this
much (experiments/LOG.md)."""
PATIENCE = 1e-3
"""Seconds on the clock: an item that takes longer is waited for, not computed."""
WINDOW = 12


class Prefetcher(Generic[T]):
    """An iterator over what `make()` yields, moved to `device`, made in a thread up to two items ahead.

    On CUDA an item is copied from pinned memory on a stream of its own, and the consumer's stream waits for
    that copy only. An exception in the thread is raised by the `next()` that would have returned its item.
    `close()`, garbage collection and the end of the interpreter each stop the thread.

    start_inline: items that need no moving are made by `next()` itself, without a thread, until none of `WINDOW` in a
    row was made within `CHEAP` and `PATIENCE` (on a busy machine any one may be slow).
    """

    def __init__(self, make: Callable[[], Iterator[T]], device: torch.device, *, start_inline: bool = False) -> None:
        self._device = device
        self._queue: queue.Queue[tuple[str, Any, Any]] = queue.Queue(maxsize=AHEAD)
        self._done = False
        self._slow = 0  # items made slowly in a row
        self._inline: Iterator[T] | None = None
        self._finalizer: Callable[[], Any] = lambda: None
        if start_inline:
            self._inline = make()
        else:
            self._start_thread(make)

    def _start_thread(self, make: Callable[[], Iterator[T]]) -> None:
        stop = threading.Event()
        # The thread must not hold this object, or it could never be collected.
        thread = threading.Thread(
            target=_produce, args=(make, self._device, self._queue, stop), name="trireme-prefetch", daemon=True
        )
        self._finalizer = weakref.finalize(self, _stop, stop, self._queue, thread)
        thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._inline is not None:
            return self._make_now(self._inline)
        if self._done:
            raise StopIteration
        kind, value, copied = self._queue.get()
        if kind == "item":
            if copied is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(copied)
                for tensor in _tensors(value):
                    # Its memory belongs to the copying stream; it must not be reused while this one computes.
                    tensor.record_stream(stream)
            return value
        self.close()
        if kind == "error":
            raise value
        raise StopIteration

    def _make_now(self, source: Iterator[T]) -> T:
        begun, computing = time.perf_counter(), time.thread_time()
        try:
            item = next(source)
        except BaseException:  # StopIteration too
            self.close()
            raise
        cheap = time.thread_time() - computing <= CHEAP and time.perf_counter() - begun <= PATIENCE
        self._slow = 0 if cheap else self._slow + 1
        if self._slow == WINDOW:
            self._inline = None
            self._start_thread(lambda: source)
        return item

    def close(self) -> None:
        """Stop the thread and wait for it; further `next()` raise StopIteration."""
        self._done, self._inline = True, None
        self._finalizer()


def _produce(
    make: Callable[[], Iterator[T]],
    device: torch.device,
    out: queue.Queue[tuple[str, Any, Any]],
    stop: threading.Event,
) -> None:
    try:
        stream = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            stream = torch.cuda.Stream(device)
            # A data set may live on the device; what put it there comes first.
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # without a stream this does nothing
            for item in make():
                if stop.is_set():
                    return
                out.put(("item", *_moved(item, device, stream)))
                if stop.is_set():
                    return
        out.put(("end", None, None))
    except BaseException as error:  # whatever it is, it belongs to the consumer
        # Whoever keeps the error must not keep what its frames hold alive, such as DataLoader's processes.
        traceback.clear_frames(error.__traceback__)
        out.put(("error", error, None))


def _moved(item: T, device: torch.device, stream: torch.cuda.Stream | None) -> tuple[T, torch.cuda.Event | None]:
    """The item on the device and, with a stream (the current one), the event after which it is complete there."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if stream is None or leaf.device.type != "cpu":
            return leaf.to(device)
        return leaf.pin_memory().to(device, non_blocking=True)

    return tree_map(move, item), None if stream is None else stream.record_event()


def _tensors(item: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(item) if isinstance(leaf, torch.Tensor)]


def _stop(stop: threading.Event, waiting: queue.Queue[tuple[str, Any, Any]], thread: threading.Thread) -> None:
    stop.set()
    while thread.is_alive():
        # The thread may be waiting for room in the queue.
        while not waiting.empty():
            waiting.get_nowait()
        thread.join(timeout=0.02)
