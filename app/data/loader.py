"""Batches, already on the device when the training loop asks for them.

app/data/order.py decides which samples belong to a step. This file divides them between ranks and
micro-batches, fetches them and moves them to the device. A batch is tensors in tuples, lists and
dicts, nested as the data set likes; by convention (inputs, targets).

A data set is map-style, with `__len__` and `__getitem__(i)`, or a stream (stream.py), or a Mixture
of map-style data sets (mixture.py). A map-style data set may have methods that fetch faster:

- `__getitems__(indices)`: a whole batch in one call. A list is a list of samples, which are
  collated (PyTorch's convention); anything else (a tuple, dict or tensor) is a batch.
- `batch_at(indices, positions)`: a batch, from the samples' numbers and their positions in the
  run's stream. Random augmentation can be a function of the position: it is then the same after a
  resume and on any number of workers.

A data set or a stream whose samples `default_collate` cannot stack, such as texts of different
lengths, has a method `collate_fn(samples)`, as DataLoader takes it (collate.py). It gets the
samples of one micro-batch. If it pads them, the loss should be a mean over what is not padding, and
the task should count that in `items`. What `collate_fn` draws at random (as masking does) depends
on how samples are divided into micro-batches; if every layout must draw the same, draw where the
samples are made.

If its samples have different lengths, it may have `longest_sample`, the number of the one that
takes the most memory, by which runs are planned. `reference` is described in tasks/base.py.

A data set may draw from the global generators of torch, NumPy and Python. They are seeded before
every sample from (seed, position), in the training process and in data workers, so that every
layout and every start sees the same samples. (If `__getitems__` or `batch_at` returns a batch, they
are seeded once, from the batch's first position.) With `data_workers=0` the training process
fetches the samples. On a GPU a thread does so ahead of training, unless the data set draws random
numbers, since the thread would share the generators with the model.

To find out whether a data set draws, `PROBED` samples from all over it are made. A data set that
draws for other samples only is seeded once for each batch, from its first sample's position: a
resumed run sees the same samples, but another number of workers or micro-batches does not, and the
thread of a GPU is not seeded at all. Such a data set should have an attribute `draws = True`.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_convert

from app.config.batch_schedule import BatchSchedule
from app.data.collate import collate_of
from app.data.mixture import ORDER_VERSION, MixtureOrder, order_of
from app.data.order import HELD_OUT_SEED, Order, StepShares, shares
from app.data.randomness import host_state, seed_sample
from app.data.stream import examples, is_stream, stream_steps
from app.errors import UserError
from strategies.tree import tree_leaves, tree_map

Batch = Any
T = TypeVar("T")
Picks = list[tuple[int, int]]
"""The samples of a micro-batch: (sample number, position in the run's stream) of each."""
PROBED = 8  # samples that are made to find out whether a data set draws random numbers
AHEAD = 2  # finished items: the first hides the time to make an item, the second its variation


def map_tensors(function: Callable[[Tensor], Any], batch: Batch) -> Batch:
    """The batch with `function` applied to each tensor."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def tensors(batch: Batch) -> list[Tensor]:
    """The batch's tensors in order."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def length(dataset: Dataset[Any]) -> int | None:
    """The number of samples in a data set; None for a stream."""
    return None if is_stream(dataset) else len(dataset)  # type: ignore[arg-type]


def rows(batch: Batch) -> int:
    """The number of rows of the first tensor in a batch.

    Raises:
        UserError: The batch has no tensor.
    """
    for tensor in tensors(batch):
        return tensor.shape[0] if tensor.dim() else 1
    raise UserError(
        "a batch holds no tensor; "
        "the task's data must give tensors, such as a tuple (inputs, targets)"
    )


def number_on(device: torch.device, value: float | Tensor) -> Tensor:
    """The value as a float64 scalar on the device, without a copy that the host would wait for."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


# --- batches of a rank ----------------------------------------------------------------------------


def train_batches(
    dataset: Dataset[Any],
    *,
    seed: int,
    batches: BatchSchedule,
    micro_batch_size: int | None,
    dp_rank: int,
    dp_size: int,
    samples_seen: int,
    steps: int,
    device: torch.device,
    data_workers: int = 0,
    order_version: int = ORDER_VERSION,
    mark: str = "",
    note: Callable[[str], object] = lambda mark: None,
    counted: Callable[[Batch], Any] = lambda batch: batch,
) -> Generator[list[Any]]:
    """This rank's micro-batches of each training step.

    In a step every rank gets the same number of micro-batches, of which the last may be smaller (5
    samples by 2: 2, 2, 1).

    Args:
        dataset: Map-style, a stream or a Mixture.
        seed: The run's seed.
        batches: Samples of a step on all ranks; multiples of `dp_size`.
        micro_batch_size: Samples of a micro-batch; None means all of the rank's share.
        dp_rank: This rank's number among those that have different data.
        dp_size: The number of ranks that have different data.
        samples_seen: The position in the run's stream at which it continues.
        steps: The number of steps.
        device: Where to move the batches.
        data_workers: Processes that fetch samples of a map-style data set; 0 means this process.
        order_version: How the sets of a Mixture are shuffled.
        mark: Where a stream continues.
        note: Called with the stream's mark after each step.
        counted: Makes the item that is yielded from a micro-batch. It receives the batch as it was
            fetched, so that it can read numbers without waiting for the device.

    Yields:
        The step's micro-batches, on the device.
    """
    step_shares = StepShares(
        batches=batches,
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        samples_seen=samples_seen,
        steps=steps,
    )
    if is_stream(dataset):
        return _stream_batches(
            dataset,
            step_shares,
            seed=seed,
            device=device,
            mark=mark,
            note=note,
            counted=counted,
        )
    return _map_style_batches(
        dataset,
        step_shares,
        order=order_of(dataset, seed, order_version),
        seed=seed,
        device=device,
        data_workers=data_workers,
        counted=counted,
    )


def _map_style_batches(
    dataset: Dataset[Any],
    step_shares: StepShares,
    *,
    order: Order | MixtureOrder,
    seed: int,
    device: torch.device,
    data_workers: int,
    counted: Callable[[Batch], Any],
) -> Generator[list[Any]]:
    """A rank's micro-batches of each step, from a map-style data set.

    Args:
        dataset: Map-style.
        step_shares: The rank's share of each step.
        order: Of the samples.
        seed: The run's seed.
        device: Where to move the batches.
        data_workers: Processes that fetch samples; 0 means this process.
        counted: Makes the item that is yielded from a micro-batch.
    """
    is_random = draws(dataset, seed)
    ahead = _ahead(device, in_thread=bool(data_workers) or not is_random)

    def picks() -> Iterator[Picks]:
        for share in step_shares:
            indices = order.indices(share.begin, share.size).tolist()
            for part in share.micro_batches:
                positions = range(share.begin + part.start, share.begin + part.stop)
                yield list(zip(indices[part], positions, strict=True))

    def make_steps() -> Iterator[list[Any]]:
        fetched = _fetched(
            dataset,
            picks,
            seed=seed if is_random or not ahead else None,
            is_random=is_random,
            data_workers=data_workers,
        )
        for share in step_shares:
            micro_batches = [next(fetched) for _ in share.micro_batches]
            yield [counted(batch) for batch in micro_batches]

    yield from prefetched(make_steps, device, ahead=ahead)


def _stream_batches(
    dataset: Dataset[Any],
    step_shares: StepShares,
    *,
    seed: int,
    device: torch.device,
    mark: str,
    note: Callable[[str], object],
    counted: Callable[[Batch], Any],
) -> Generator[list[Any]]:
    """A rank's micro-batches of each step, from a stream.

    Args:
        dataset: The stream.
        step_shares: The rank's share of each step.
        seed: The run's seed.
        device: Where to move the batches.
        mark: Where the stream continues.
        note: Called with the stream's mark after each step.
        counted: Makes the item that is yielded from a micro-batch.
    """

    def make_steps() -> Iterator[tuple[str, list[Any]]]:
        steps_read = stream_steps(dataset, seed=seed, mark=mark, steps=step_shares)
        for mark_after, micro_batches in steps_read:
            yield mark_after, [counted(batch) for batch in micro_batches]

    in_thread = device.type != "cpu" and not draws(dataset, seed)
    ahead = _ahead(device, in_thread=in_thread)
    for mark_after, micro_batches in prefetched(make_steps, device, ahead=ahead):
        note(mark_after)
        yield micro_batches


def eval_batches(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
    whole_batches: bool = False,
) -> Generator[tuple[Batch, float]]:
    """This rank's part of the held-out data in order, in as many batches as on every other rank.

    Over all ranks, sum(weight * mean) / sum(weight) is the mean over the data.

    Args:
        dataset: Map-style.
        batch_size: Samples of a batch; the last batch may have fewer.
        dp_rank: This rank's number among those that have different data.
        dp_size: The number of ranks that have different data.
        device: Where to move the batches.
        whole_batches: Whether the same samples are in a batch for any number of ranks, though some
            ranks then have a batch less.

    Yields:
        (batch, weight). The weight is the number of samples, or 0.0 for a batch that only lets this
        rank take part in the collectives.
    """
    count = len(dataset)  # type: ignore[arg-type]
    parts = shares(count, dp_size)
    if whole_batches:
        batches_of_ranks = shares(-(-count // batch_size), dp_size)
        parts = [
            slice(numbers.start * batch_size, min(numbers.stop * batch_size, count))
            for numbers in batches_of_ranks
        ]
    is_random = draws(dataset, HELD_OUT_SEED)
    ahead = _ahead(device, in_thread=not is_random)
    seed = HELD_OUT_SEED if is_random or not ahead else None
    part = parts[dp_rank]
    most_samples = parts[0].stop - parts[0].start
    rounds = -(-most_samples // batch_size)

    def batches() -> Iterator[tuple[Batch, float]]:
        for number in range(rounds):
            begin = part.start + number * batch_size
            indices = list(range(begin, min(begin + batch_size, part.stop)))
            picks = [(index, index) for index in indices or [0]]
            batch = fetch(dataset, picks, seed=seed, is_random=is_random)
            yield batch, float(len(indices))

    yield from prefetched(batches, device, ahead=ahead)


# --- fetching -------------------------------------------------------------------------------------


def fetch(
    dataset: Dataset[Any], picks: Picks, *, seed: int | None = 0, is_random: bool = True
) -> Batch:
    """One batch, by the fastest method that the data set has.

    Args:
        dataset: Map-style, or a stream, which gives its first samples, as many as are picked.
        picks: (sample number, position) of each sample.
        seed: Seeds the generators; None leaves them alone.
        is_random: Whether the data set draws random numbers. If not, the generators are seeded only
            once for the batch.
    """
    if is_stream(dataset):
        return collate_of(dataset)(examples(dataset, len(picks), seed or 0))
    indices = [index for index, _ in picks]
    positions = [position for _, position in picks]
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
        if seed is None or not is_random:
            return collate_of(dataset)(batch)
    samples = []
    for index, position in picks:
        if seed is not None and is_random:
            seed_sample(seed, position)
        samples.append(dataset[index])
    return collate_of(dataset)(samples)


def pipeline_example(dataset: Dataset[Any], micro_batch_size: int | None) -> Batch:
    """The micro-batch from which a pipeline learns the shapes between its stages.

    It has two samples unless micro-batches have only one, because a layer such as BatchNorm1d does
    not train on a single sample.
    """
    rows = 1 if micro_batch_size == 1 else min(2, length(dataset) or 2)
    return fetch(dataset, [(index, index) for index in range(rows)])


def draws(dataset: Dataset[Any], seed: int) -> bool:
    """Whether making samples draws from the global generators.

    The data set's attribute `draws` says so, or making samples from all over the data set shows it.
    """
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
        fetch(dataset, [(index, index)], seed=None)
        if host_state() != before:
            return True
    return False


def is_reproducible(dataset: Dataset[Any]) -> bool:
    """Whether the first sample is the same when it is made twice with the same seed."""
    first = tensors(fetch(dataset, [(0, 0)]))
    second = tensors(fetch(dataset, [(0, 0)]))
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _fetched(
    dataset: Dataset[Any],
    picks: Callable[[], Iterator[Picks]],
    *,
    seed: int | None,
    is_random: bool,
    data_workers: int,
) -> Iterator[Batch]:
    """The batches of `picks()`; see `fetch`."""
    if data_workers < 1:
        return (fetch(dataset, pick, seed=seed, is_random=is_random) for pick in picks())
    loader = DataLoader(
        _WorkerDataset(dataset, seed or 0, is_random=is_random),
        batch_sampler=picks(),  # type: ignore[arg-type]
        num_workers=data_workers,
        collate_fn=default_convert,  # `fetch` has collated the batch
        # DataLoader would otherwise draw from the global generator, which dropout uses.
        generator=torch.Generator().manual_seed((seed or 0) % 2**63),
    )
    return iter(loader)


class _WorkerDataset(Dataset[Any]):
    """A data set for DataLoader's worker processes, which takes picks and returns a batch."""

    def __init__(self, dataset: Dataset[Any], seed: int, *, is_random: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.is_random = is_random

    def __getitems__(self, picks: Picks) -> Batch:
        return fetch(self.dataset, picks, seed=self.seed, is_random=self.is_random)


# --- prefetching ----------------------------------------------------------------------------------


def _ahead(device: torch.device, *, in_thread: bool) -> int:
    """How many items to make ahead of the loop.

    On a CPU none: the thread would compute on the cores that train, and wake at every step
    (experiments/LOG.md).

    Args:
        device: Where the items go.
        in_thread: Whether a thread may make items during a training step.
    """
    return AHEAD if in_thread and device.type != "cpu" else 0


def prefetched(
    make: Callable[[], Iterator[T]], device: torch.device, *, ahead: int | None = None
) -> Generator[T]:
    """Make items in a thread ahead of the consumer, and move them to a device.

    On CUDA an item is copied from pinned memory on a separate stream, and the consumer's stream
    waits only for that copy. An exception in the thread is raised to the consumer. `close()` and
    garbage collection stop the thread.

    Args:
        make: Returns the items.
        device: Where to move the items' tensors.
        ahead: How many items to make ahead; 0, the default on a CPU, means without a thread.

    Yields:
        The items of `make()`, on the device.
    """
    ahead = _ahead(device, in_thread=True) if ahead is None else ahead
    if not ahead:
        for item in make():
            yield item if device.type == "cpu" else _moved(item, device)
        return
    ready: queue.Queue[Any] = queue.Queue(maxsize=ahead)
    stop = threading.Event()
    thread = threading.Thread(
        target=_produce, args=(make, device, ready, stop), name="trireme-prefetch", daemon=True
    )
    thread.start()
    try:
        while (message := ready.get()) is not None:
            if isinstance(message, BaseException):
                raise message
            item, copy_event = message
            if copy_event is not None:
                stream = torch.cuda.current_stream(device)
                stream.wait_event(copy_event)
                for tensor in tensors(item):
                    # The copying stream owns the memory, and must not reuse it during a step.
                    tensor.record_stream(stream)
            yield item
    finally:
        stop.set()
        while thread.is_alive():  # the thread may be waiting for room in the queue
            while not ready.empty():
                ready.get_nowait()
            thread.join(timeout=0.02)


def _produce(
    make: Callable[[], Iterator[T]],
    device: torch.device,
    ready: queue.Queue[Any],
    stop: threading.Event,
) -> None:
    """Put (item, event of its copy) for each item, and at the end None or an exception."""
    try:
        stream = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            stream = torch.cuda.Stream(device)
            # If the data set is on the device, wait until it has been copied there.
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # without a stream this does nothing
            for item in make():
                moved = _moved(item, device)
                if stop.is_set():
                    return
                ready.put((moved, None if stream is None else stream.record_event()))
        ready.put(None)
    except BaseException as error:  # the consumer raises it
        # A caller that keeps the error must not keep DataLoader's processes alive by its frames.
        traceback.clear_frames(error.__traceback__)
        ready.put(error)


def _moved(item: T, device: torch.device) -> T:
    return map_tensors(lambda tensor: _moved_tensor(tensor, device), item)


def _moved_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
