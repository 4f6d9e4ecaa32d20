"""Batches, already on the device when the loop asks.

app/data/order.py decides what the samples of a step are; here they are cut into ranks' shares and micro-batches,
fetched, and moved. A batch is tensors in tuples, lists and dicts, nested as the data set likes; conventionally
(inputs, targets).

A data set is map-style, with `__len__` and `__getitem__(i)`, or a stream (stream.py), or a Mixture of map-style ones
(mixture.py). A map-style one may have, each faster or more able than the last:

- `__getitems__(indices)`: a whole batch in one call. A returned list is taken for a list of samples and
  collated (PyTorch's convention); anything else (tuple, dict, tensor) for a batch that is ready.
- `batch_at(indices, positions)`: likewise a ready batch, told also the position of each sample in the run's
  stream, so that random augmentation can be a function of the position: the same after a resume and on any
  number of workers.

A data set may draw from the global generators of torch, NumPy and Python: they are seeded before every sample from
(seed, position), in the training process as in data workers, so every layout and every start sees the same samples.
(What a `__getitems__` or `batch_at` that makes ready batches draws is a function of the batch's first position.) With
`data_workers=0` samples are fetched in the training process: on a GPU in a thread ahead of training, but for data sets
that draw, since the thread would share the generators with the model.

Whether a data set draws is found from `PROBED` samples from all over it. One that draws for none of these, but for
others, is seeded once for each batch, by its first sample's position: a resumed run sees the same, another number of
workers or micro-batches does not, and a GPU's thread is not seeded at all. An attribute `draws = True` of the data set
says that it does.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, default_convert

from app.data.mixture import order_of
from app.data.order import HELD_OUT_SEED, shares
from app.data.randomness import host_state, seed_sample
from app.data.stream import examples, is_stream, stream_steps
from app.errors import UserError
from strategies.tree import tree_leaves, tree_map

Batch = Any
T = TypeVar("T")
Picks = list[tuple[int, int]]  # of a micro-batch: (sample number, position in the run's stream) of every sample
PROBED = 8  # samples that are made to see whether a data set draws random numbers
AHEAD = 2  # items that wait ready: one hides the time of making it, the second hides its variation


def map_tensors(function: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """The batch with each tensor replaced by `function` of it."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def tensors(batch: Batch) -> list[Tensor]:
    """The batch's tensors in order."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def length(dataset: Dataset[Any]) -> int | None:
    """Samples in a data set; None for a stream, which does not tell."""
    return None if is_stream(dataset) else len(dataset)  # type: ignore[arg-type]


def rows(batch: Batch) -> int:
    """Rows of the first tensor in a batch."""
    for tensor in tensors(batch):
        return tensor.shape[0] if tensor.dim() else 1
    raise UserError("a batch holds no tensor; the task's data must give tensors, such as a tuple (inputs, targets)")


def number_on(device: torch.device, value: float | Tensor) -> Tensor:
    """0-dimensional float64 there, without a copy from the host, for which the host would wait."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


# --- what a rank trains and evaluates on --------------------------------------------------------------------------


def train_batches(
    dataset: Dataset[Any],
    *,
    seed: int,
    global_batch_size: int,
    micro_batch_size: int | None,
    dp_rank: int,
    dp_size: int,
    samples_seen: int,
    steps: int,
    device: torch.device,
    data_workers: int = 0,
    mark: str = "",
    note: Callable[[str], object] = lambda mark: None,
    counted: Callable[[Batch], Any] = lambda batch: batch,
) -> Generator[list[Any]]:
    """For each of `steps` steps the list of this rank's micro-batches, on the device.

    The stream continues at position `samples_seen`. `dp_size` divides the global batch; every rank gets the same number
    of micro-batches, of which the last may be smaller (5 by 2: 2, 2, 1). mark: where a stream continues instead; note
    is told the mark after each step; data_workers have no part in it. counted: makes of each micro-batch what is moved
    to the device and yielded in its place; it is called with the batch as it was fetched, so that its numbers can be
    read without waiting for a device.
    """
    share = global_batch_size // dp_size
    cuts = micro_batch_slices(share, micro_batch_size)
    if is_stream(dataset):
        own = slice(dp_rank * share, (dp_rank + 1) * share)
        step = {"steps": steps, "global_batch_size": global_batch_size, "own": own, "cuts": cuts}
        read = partial(stream_steps, dataset, seed=seed, mark=mark, **step)  # type: ignore[arg-type]

        def make() -> Iterator[tuple[str, list[Any]]]:
            return ((mark, [counted(batch) for batch in batches]) for mark, batches in read())

        ahead = _ahead(device, beside=device.type == "cpu" or not draws(dataset, seed))
        for mark, batches in prefetched(make, device, ahead=ahead):
            note(mark)
            yield batches
        return
    drawn = draws(dataset, seed)

    def picks() -> Iterator[Picks]:
        order = order_of(dataset, seed)
        for step in range(steps):
            start = samples_seen + step * global_batch_size + dp_rank * share
            indices = order.indices(start, share).tolist()
            for cut in cuts:
                yield list(zip(indices[cut], range(start + cut.start, start + cut.stop), strict=True))

    def grouped() -> Iterator[list[Any]]:
        source = _fetched(dataset, picks, seed if drawn or not ahead else None, drawn, data_workers)
        for first in source:
            yield [counted(batch) for batch in (first, *(next(source) for _ in cuts[1:]))]

    ahead = _ahead(device, beside=bool(data_workers) or not drawn)
    yield from prefetched(grouped, device, ahead=ahead)


def micro_batch_slices(share: int, micro_batch_size: int | None) -> list[slice]:
    """Where a rank's share of a global batch is cut into micro-batches: full ones, the last may be smaller."""
    micro = micro_batch_size or share
    return [slice(begin, min(begin + micro, share)) for begin in range(0, share, micro)]


def eval_batches(
    dataset: Dataset[Any], *, batch_size: int, dp_rank: int, dp_size: int, device: torch.device
) -> Generator[tuple[Batch, float]]:
    """This rank's part of the data in order, as (batch, weight), with equally many batches on every rank.

    The weight is the number of samples in the batch, 0.0 for a batch that is only there so that every rank takes part
    in the collectives; so sum(weight * mean) / sum(weight) over all ranks is the mean over the data.
    """
    parts, drawn = shares(len(dataset), dp_size), draws(dataset, HELD_OUT_SEED)  # type: ignore[arg-type]
    ahead = _ahead(device, beside=not drawn)
    mine = parts[dp_rank]
    rounds = -(-(parts[0].stop - parts[0].start) // batch_size)

    def batches() -> Iterator[tuple[Batch, float]]:
        for number in range(rounds):
            begin = mine.start + number * batch_size
            indices = list(range(begin, min(begin + batch_size, mine.stop)))
            picks = [(index, index) for index in indices or [0]]
            yield fetch(dataset, picks, HELD_OUT_SEED if drawn or not ahead else None, drawn), float(len(indices))

    yield from prefetched(batches, device, ahead=ahead)


# --- fetching -----------------------------------------------------------------------------------------------------


def fetch(dataset: Dataset[Any], picks: Picks, seed: int | None = 0, drawn: bool = True) -> Batch:
    """One batch, by the most able way the data set offers.

    seed: of the generators that samples are drawn under; None leaves them alone. drawn: whether the data set draws;
    where not, they are seeded once for the batch. Of a stream it is the first samples, as many as are picked.
    """
    if is_stream(dataset):
        return default_collate(examples(dataset, len(picks), seed or 0))
    indices, positions = [index for index, _ in picks], [position for _, position in picks]
    if type(dataset) is TensorDataset:
        return tuple(tensor[torch.as_tensor(indices)] for tensor in dataset.tensors)
    if seed is not None:
        seed_sample(seed, positions[0])
    if hasattr(dataset, "batch_at"):
        return dataset.batch_at(indices, positions)
    if hasattr(dataset, "__getitems__"):
        batch = dataset.__getitems__(indices)
        if not isinstance(batch, list):
            return batch
        if seed is None or not drawn:
            return default_collate(batch)
    samples = []
    for index, position in picks:
        if seed is not None and drawn:
            seed_sample(seed, position)
        samples.append(dataset[index])
    return default_collate(samples)


def pipeline_example(dataset: Dataset[Any], micro_batch_size: int | None) -> Batch:
    """The micro-batch that a pipeline learns the model from: of two samples where micro-batches are larger than one,
    because a layer such as BatchNorm1d does not train on one."""
    rows = 1 if micro_batch_size == 1 else min(2, length(dataset) or 2)
    return fetch(dataset, [(index, index) for index in range(rows)])


def draws(dataset: Dataset[Any], seed: int) -> bool:
    """Whether making samples draws from the global generators; found by making some from all over the data, unless the
    data set says so."""
    if getattr(dataset, "draws", False):
        return True
    for number in range(PROBED if is_stream(dataset) else 0):
        seed_sample(seed, number)
        before = host_state()
        examples(dataset, number + 1, seed)
        if host_state() != before:
            return True
    n = length(dataset) or 0
    for index in range(0, n, max(1, n // PROBED)):
        seed_sample(seed, index)
        before = host_state()
        fetch(dataset, [(index, index)], None)
        if host_state() != before:
            return True
    return False


def is_reproducible(dataset: Dataset[Any]) -> bool:
    """Whether a sample is the same when it is made again under the same seed."""
    first, again = (tensors(fetch(dataset, [(0, 0)])) for _ in range(2))
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again, strict=True))


def _fetched(
    dataset: Dataset[Any], picks: Callable[[], Iterator[Picks]], seed: int | None, drawn: bool, data_workers: int
) -> Iterator[Batch]:
    if data_workers < 1:
        return (fetch(dataset, pick, seed, drawn) for pick in picks())
    loader = DataLoader(
        _Fetching(dataset, seed or 0, drawn),
        batch_sampler=picks(),  # type: ignore[arg-type]
        num_workers=data_workers,
        collate_fn=default_convert,  # a batch is one already
        # A generator of its own: DataLoader would otherwise draw from the global one that dropout uses.
        generator=torch.Generator().manual_seed((seed or 0) % 2**63),
    )
    return iter(loader)


class _Fetching(Dataset[Any]):
    """A data set as DataLoader's worker processes see it: asked for picks, it answers with a batch."""

    def __init__(self, dataset: Dataset[Any], seed: int, drawn: bool) -> None:
        self.dataset, self.seed, self.drawn = dataset, seed, drawn

    def __getitems__(self, picks: Picks) -> Batch:
        return fetch(self.dataset, picks, self.seed, self.drawn)


# --- ahead of the loop --------------------------------------------------------------------------------------------


def _ahead(device: torch.device, beside: bool) -> int:
    """How many items are made ahead in a thread. On a CPU none: it would compute on the cores that train, and wake at
    every step (experiments/LOG.md). beside: whether they can be made beside a training step."""
    return AHEAD if beside and device.type != "cpu" else 0


def prefetched(make: Callable[[], Iterator[T]], device: torch.device, *, ahead: int | None = None) -> Generator[T]:
    """What `make()` yields, moved to `device`, made in a thread up to `ahead` items ahead.

    On CUDA an item is copied from pinned memory on a stream of its own, and the consumer's stream waits for that copy
    only. An exception in the thread is raised to the consumer. `close()` and garbage collection stop the thread.

    ahead: 0 for no thread; the default on a CPU.
    """
    ahead = _ahead(device, beside=True) if ahead is None else ahead
    if not ahead:
        for item in make():
            yield item if device.type == "cpu" else map_tensors(lambda tensor: _moved(tensor, device), item)
        return
    ready: queue.Queue[Any] = queue.Queue(maxsize=ahead)
    stop = threading.Event()
    thread = threading.Thread(target=_produce, args=(make, device, ready, stop), name="trireme-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            value, copied = item
            if copied is not None:
                stream = torch.cuda.current_stream(device)
                stream.wait_event(copied)
                for tensor in tensors(value):
                    # Its memory belongs to the copying stream; it must not be reused while this one computes.
                    tensor.record_stream(stream)
            yield value
    finally:
        stop.set()
        while thread.is_alive():  # it may be waiting for room in the queue
            while not ready.empty():
                ready.get_nowait()
            thread.join(timeout=0.02)


def _produce(
    make: Callable[[], Iterator[T]], device: torch.device, out: queue.Queue[Any], stop: threading.Event
) -> None:
    """Puts (item, event of its copy), then None, or the exception that ended it."""
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
                if stop.is_set():
                    return
                out.put((moved, None if stream is None else stream.record_event()))
        out.put(None)
    except BaseException as error:  # whatever it is, it belongs to the consumer
        # A caller that keeps the error must not keep what its frames hold alive, such as DataLoader's processes.
        traceback.clear_frames(error.__traceback__)
        out.put(error)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
