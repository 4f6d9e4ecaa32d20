"""Batches made ahead of the loop by a thread, and put on the device."""

from __future__ import annotations

import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from app.data.batch import map_tensors, tensors

T = TypeVar("T")
Items = queue.Queue[tuple[str, Any, Any]]
AHEAD = 2  # items that wait ready: one hides the time of making it, the second hides its variation


class Prefetcher(Generic[T]):
    """An iterator over what `make()` yields, moved to `device`, made in a thread up to `ahead` items ahead.

    On CUDA an item is copied from pinned memory on a stream of its own, and the consumer's stream waits for that copy
    only. An exception in the thread is raised by `next()`. `close()` and garbage collection stop the thread.

    ahead: 0 for no thread: `next()` makes each item. This is the default on a CPU, where a thread would compute on the
    cores that train, and wake at every step (experiments/LOG.md).
    """

    def __init__(self, make: Callable[[], Iterator[T]], device: torch.device, *, ahead: int | None = None) -> None:
        ahead = (0 if device.type == "cpu" else AHEAD) if ahead is None else ahead
        self._device, self._done = device, False
        self._source = None if ahead else make()
        self._queue: Items = queue.Queue(maxsize=ahead)
        self._stop: Callable[[], Any] = lambda: None
        if ahead:
            stop = threading.Event()
            # The thread must not hold this object, or it could never be collected.
            arguments = (make, device, self._queue, stop)
            thread = threading.Thread(target=_produce, args=arguments, name="trireme-prefetch", daemon=True)
            self._stop = weakref.finalize(self, _end, stop, self._queue, thread)
            thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._done:
            raise StopIteration
        if self._source is not None:
            try:
                return next(self._source)
            except BaseException:  # StopIteration too
                self.close()
                raise
        kind, value, copied = self._queue.get()
        if kind == "item":
            if copied is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(copied)
                for tensor in tensors(value):
                    # Its memory belongs to the copying stream; it must not be reused while this one computes.
                    tensor.record_stream(stream)
            return value
        self.close()
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and wait for it; further `next()` raise StopIteration."""
        self._done, self._source = True, None
        self._stop()


def _produce(make: Callable[[], Iterator[T]], device: torch.device, out: Items, stop: threading.Event) -> None:
    try:
        stream = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            stream = torch.cuda.Stream(device)
            # A data set may live on the device; what put it there comes first.
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # without a stream this does nothing
            for item in make():
                moved = map_tensors(lambda tensor: _moved(tensor, device), item)
                if not stop.is_set():
                    out.put(("item", moved, None if stream is None else stream.record_event()))
                if stop.is_set():
                    return
        out.put(("end", None, None))
    except BaseException as error:  # whatever it is, it belongs to the consumer
        # Whoever keeps the error must not keep what its frames hold alive, such as DataLoader's processes.
        traceback.clear_frames(error.__traceback__)
        out.put(("error", error, None))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _end(stop: threading.Event, waiting: Items, thread: threading.Thread) -> None:
    stop.set()
    while thread.is_alive():
        # The thread may be waiting for room in the queue.
        while not waiting.empty():
            waiting.get_nowait()
        thread.join(timeout=0.02)
