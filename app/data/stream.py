"""Streams: training data that can only be read from its beginning, such as an IterableDataset.

Anything with `__iter__` and without numbered samples is a stream. A stream has an order of its own,
and a step takes its next samples: position p of the run is the p-th sample of the stream, which
starts again at its end (after `set_epoch(n)`, if it has that method). Every worker reads the whole
stream and keeps its share, so that the samples of a step do not depend on the number of workers,
and workers that need the same samples have them. If reading takes most of the time, use data with
numbered samples (sets.py) instead, of which each worker reads only its own.

To continue after p samples, a stream or its iterator has `state_dict` and `load_state_dict`, as in
torchdata's StatefulDataLoader and Hugging Face's IterableDataset. The state is JSON, and the
checkpoint keeps it. A stream without a state, or whose state does not restore the samples that
follow (that of a shuffle buffer does not), is read again up to p. Samples are made with generators
seeded by (seed, p), like those of any data set.
"""

from __future__ import annotations

import contextlib
import copy
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from app.data.collate import collate_of
from app.data.order import StepShare
from app.data.randomness import seed_sample
from app.data.sets import document, reason_of
from app.errors import UserError
from strategies.tree import tree_leaves

TRIED = 3  # samples that are read before and after a state to test it
SHUFFLE_BUFFER = b"BufferShuffledExamplesIterable"
"""Hugging Face's class for a shuffle buffer, which is not part of the stream's state."""


def is_stream(data: Any) -> bool:
    """Whether the data can be iterated over, but not indexed."""
    numbered = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not numbered)


_INITIAL_STATES: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def initial_state(data: Any) -> Any:
    """The state that the stream had at the first call; None if only its iterator has a state."""
    if data not in _INITIAL_STATES:
        has_state = hasattr(data, "load_state_dict")
        _INITIAL_STATES[data] = copy.deepcopy(data.state_dict()) if has_state else None
    return _INITIAL_STATES[data]


class Reader:
    """Reads a stream sample by sample.

    Args:
        data: The stream.
        seed: The run's seed.
        mark: Where to start: what another reader's `mark` returned, or "" for the beginning.
    """

    def __init__(self, data: Any, seed: int, mark: str = "") -> None:
        self.data = data
        self.seed = seed
        self._initial_state = initial_state(data)
        fields: dict[str, Any] = {"position": 0, "epoch": 0, "taken": 0, "state": None}
        if mark:
            fields = json.loads(mark)
        self.position: int = fields["position"]
        samples_in_epoch: int = fields["taken"]
        self._begin(fields["epoch"], fields["state"])
        # Without a state, read the epoch again up to the position.
        self.samples_in_epoch = samples_in_epoch if fields["state"] is not None else 0
        while self.samples_in_epoch < samples_in_epoch:
            self._take(self.position - samples_in_epoch + self.samples_in_epoch)

    def _begin(self, epoch: int, state: Any = None) -> None:
        self.epoch = epoch
        self.samples_in_epoch = 0
        if self._initial_state is not None:
            self.data.load_state_dict(self._initial_state if state is None else state)
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        self._iterator = iter(self.data)
        if self._initial_state is None and state is not None:
            self._iterator.load_state_dict(state)  # type: ignore[attr-defined]

    def _take(self, position: int) -> Any:
        seed_sample(self.seed, position)
        sample = next(self._iterator)
        self.samples_in_epoch += 1
        return sample

    def next(self) -> Any:
        """The next sample.

        Raises:
            UserError: The stream has no samples.
        """
        try:
            sample = self._take(self.position)
        except StopIteration:
            if self.samples_in_epoch == 0:
                raise UserError(
                    f"the training data, a {type(self.data).__name__}, yields no samples"
                ) from None
            self._begin(self.epoch + 1)
            return self.next()
        self.position += 1
        return sample

    def state(self) -> Any:
        """The state of the stream or its iterator; None if neither has one."""
        owner = self.data if self._initial_state is not None else self._iterator
        return owner.state_dict() if hasattr(owner, "load_state_dict") else None

    def mark(self, *, with_state: bool = True) -> str:
        """Where another reader continues, as JSON.

        Args:
            with_state: Include the stream's state; otherwise the other reader reads the epoch
                again.
        """
        fields = {
            "position": self.position,
            "epoch": self.epoch,
            "taken": self.samples_in_epoch,
            "state": self.state() if with_state else None,
        }
        return json.dumps(fields)

    def rewind(self) -> None:
        """Stop reading and put the stream back to its beginning."""
        self._iterator = iter(())
        if self._initial_state is not None:
            self.data.load_state_dict(self._initial_state)


def examples(data: Any, count: int, seed: int = 0) -> list[Any]:
    """The first samples of a stream, which is put back to its beginning."""
    reader = Reader(data, seed)
    try:
        return [reader.next() for _ in range(count)]
    finally:
        reader.rewind()


def continues_exactly(data: Any) -> bool:
    """Whether the stream's state restores the samples that follow.

    The first samples are read twice to test it. They do not reveal a buffer that is larger than
    `TRIED`, so that Hugging Face's shuffle buffers are recognised by their class.
    """
    reader = Reader(data, 0)
    with contextlib.suppress(Exception):  # not every stream can be pickled
        import cloudpickle  # not at the top: it comes with Ray, which may be missing

        if SHUFFLE_BUFFER in cloudpickle.dumps(data):
            return False
    try:
        for _ in range(TRIED):
            reader.next()
        if reader.state() is None:
            return False
        mark = reader.mark()
        expected = [reader.next() for _ in range(TRIED)]
        reader = Reader(data, 0, mark)
        return all(_same(sample, reader.next()) for sample in expected)
    except (TypeError, ValueError):  # the state is not JSON
        return False
    finally:
        reader.rewind()


def _same(first: Any, second: Any) -> bool:
    """Whether two samples consist of equal values."""
    for a, b in zip(tree_leaves(first), tree_leaves(second), strict=True):
        is_equal = torch.equal(a, b) if isinstance(a, Tensor) else repr(a) == repr(b)
        if not is_equal:
            return False
    return True


def stream_steps(
    data: Any,
    *,
    seed: int,
    mark: str,
    steps: Iterable[StepShare],
) -> Iterator[tuple[str, list[Any]]]:
    """The micro-batches of a worker, step by step.

    Args:
        data: The stream.
        seed: The run's seed.
        mark: Where to start; see `Reader`.
        steps: This worker's share of each step.

    Yields:
        (the mark after the step, this worker's micro-batches)
    """
    with_state = continues_exactly(data)
    collate = collate_of(data)
    reader = Reader(data, seed, mark)
    for share in steps:
        samples = [reader.next() for _ in range(share.global_batch_size)]
        samples = samples[share.before : share.before + share.size]
        batches = [collate(samples[part]) for part in share.micro_batches]
        yield reader.mark(with_state=with_state), batches


class TokenStream(IterableDataset[Any]):
    """Samples like those of TokenWindows (text.py), from the documents of a stream with a state.

    The state is that of the stream before the first document that is still in use, and how many of
    its tokens have been used.

    Args:
        rows: A Hugging Face IterableDataset.
        column: The column of the documents' texts; rows where it is null are skipped.
        encode: Returns the tokens of a text.
        sequence_length: Tokens of a sample.
    """

    def __init__(
        self, rows: Any, *, column: str, encode: Callable[[str], list[int]], sequence_length: int
    ) -> None:
        self.rows = rows
        self.column = column
        self.encode = encode
        self.sequence_length = sequence_length
        self._state: dict[str, Any] = {"rows": rows.state_dict(), "used": 0}

    def state_dict(self) -> dict[str, Any]:
        """The state after the last sample."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state at the next `iter`."""
        self._state = state

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the documents' stream."""
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.rows.load_state_dict(self._state["rows"])
        rows = iter(self.rows)
        length = self.sequence_length
        used = self._state["used"]  # tokens of the first document
        unused = -used  # tokens of all documents here
        documents: deque[tuple[Any, list[int]]] = deque()  # (the stream's state before it, tokens)
        state_before = self._state["rows"]
        while True:
            while unused <= length:  # the last token of a window is a target only
                try:
                    row = next(rows, None)
                except Exception as error:  # from the library, pyarrow or a file system
                    raise UserError(
                        f"task_args.data cannot be read further: {reason_of(error)}"
                    ) from error
                if row is None:
                    return
                text = document(row.get(self.column), "task_args.data", self.column)
                encoded = [] if text is None else self.encode(text)
                documents.append((state_before, encoded))
                unused += len(encoded)
                state_before = self.rows.state_dict()
            tokens: list[int] = []
            for number, (_, encoded) in enumerate(documents):
                begin = 0 if number else used
                tokens += encoded[begin : begin + length + 1 - len(tokens)]
            used += length
            unused -= length
            while used >= len(documents[0][1]):
                used -= len(documents.popleft()[1])
            self._state = {"rows": documents[0][0], "used": used}
            window = torch.tensor(tokens)
            yield window[:-1], window[1:]
