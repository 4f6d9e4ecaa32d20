"""Streams: training data that can only be read from its beginning on: an IterableDataset, or whatever has `__iter__`.

A stream has one order, its own, and a step takes the next samples of it: position p of the run is the p-th sample of
the stream, begun again at its end (after `set_epoch(n)`, if it has that). So every worker reads all of it and keeps its
share: a step's samples do not depend on the number of workers, and workers that need the same samples have them. Where
reading is what takes the time, give data that is asked by number (sets.py), of which each worker reads its own.

To continue after p samples, a stream has `state_dict` and `load_state_dict`, itself or its iterator, as torchdata's
StatefulDataLoader wants them and Hugging Face's IterableDataset has them: JSON, kept in the checkpoint. One without, or
whose state does not bring back the samples that follow (a shuffle buffer's does not), is read again up to p.
Samples are made under generators seeded by (seed, p), as those of any data set.
"""

from __future__ import annotations

import contextlib
import copy
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from app.data.randomness import seed_sample
from app.data.sets import document, reason_of
from app.errors import UserError
from strategies.tree import tree_leaves

TRIED = 3  # samples read before, and after, the state that is tried out
SHUFFLE_BUFFER = b"BufferShuffledExamplesIterable"  # of Hugging Face's, which its states leave out


def is_stream(data: Any) -> bool:
    """Whether samples have no numbers to ask for them by."""
    numbered = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not numbered)


_BEGINNINGS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def beginning_of(data: Any) -> Any:
    """The state that the stream had when it was first seen; None where it keeps none itself."""
    if data not in _BEGINNINGS:
        _BEGINNINGS[data] = copy.deepcopy(data.state_dict()) if hasattr(data, "load_state_dict") else None
    return _BEGINNINGS[data]


class Reader:
    """Reads a stream, sample by sample, from a mark (what `mark` of an earlier one gave; "": from its beginning on)."""

    def __init__(self, data: Any, seed: int, mark: str = "") -> None:
        self.data, self.seed = data, seed
        self._beginning = beginning_of(data)
        known: dict[str, Any] = json.loads(mark) if mark else {"position": 0, "epoch": 0, "taken": 0, "state": None}
        self.position, self.taken = known["position"], 0
        self._begin(known["epoch"], known["state"])
        self.taken = known["taken"] if known["state"] is not None else 0
        while self.taken < known["taken"]:  # without a state: what was seen is passed over
            self._take(self.position - known["taken"] + self.taken)

    def _begin(self, epoch: int, state: Any = None) -> None:
        self.epoch, start = epoch, self._beginning if state is None else state
        if self._beginning is not None:
            self.data.load_state_dict(start)
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        self._iterator = iter(self.data)
        if self._beginning is None and state is not None:
            self._iterator.load_state_dict(state)  # type: ignore[attr-defined]

    def _take(self, position: int) -> Any:
        seed_sample(self.seed, position)
        sample = next(self._iterator)
        self.taken += 1
        return sample

    def next(self) -> Any:
        """The next sample. Raises UserError: there is none at all."""
        try:
            sample = self._take(self.position)
        except StopIteration:
            if self.taken == 0:
                raise UserError(
                    f"the training data, a {type(self.data).__name__}, gives no sample when it is read first"
                ) from None
            self.taken = 0
            self._begin(self.epoch + 1)
            return self.next()
        self.position += 1
        return sample

    def state(self) -> Any:
        """The stream's own; None where it has none."""
        owner = self.data if self._beginning is not None else self._iterator
        return owner.state_dict() if hasattr(owner, "load_state_dict") else None

    def mark(self, *, with_state: bool = True) -> str:
        """From where another Reader would go on."""
        known = {"position": self.position, "epoch": self.epoch, "taken": self.taken}
        return json.dumps(known | {"state": self.state() if with_state else None})

    def rewind(self) -> None:
        """Reads no more, and leaves the stream at its beginning."""
        self._iterator = iter(())
        if self._beginning is not None:
            self.data.load_state_dict(self._beginning)


def examples(data: Any, count: int, seed: int = 0) -> list[Any]:
    """The first samples of a stream, which is left at its beginning."""
    reader = Reader(data, seed)
    try:
        return [reader.next() for _ in range(count)]
    finally:
        reader.rewind()


def continues_exactly(data: Any) -> bool:
    """Whether the stream's state brings back the samples that follow: tried with the first ones, which do not tell of a
    buffer of more."""
    reader = Reader(data, 0)
    with contextlib.suppress(Exception):  # not everything pickles
        import cloudpickle  # not at the top: a machine that trains without Ray may lack it

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
    except (TypeError, ValueError):  # no JSON
        return False
    finally:
        reader.rewind()


def _same(one: Any, other: Any) -> bool:
    """Whether two samples are made of equal values."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b) for a, b in pairs)


def stream_steps(
    data: Any, *, seed: int, mark: str, steps: int, global_batch_size: int, own: slice, cuts: Sequence[slice]
) -> Iterator[tuple[str, list[Any]]]:
    """For each step (the mark after it, this worker's micro-batches): samples `own` of the global batch, in `cuts`."""
    exact = continues_exactly(data)
    reader = Reader(data, seed, mark)
    for _ in range(steps):
        whole = [reader.next() for _ in range(global_batch_size)][own]
        yield reader.mark(with_state=exact), [default_collate(whole[cut]) for cut in cuts]


class TokenStream(IterableDataset[Any]):
    """TokenWindows' samples (text.py) from the documents of a stream with a state, as they come.

    encode: a document's text to its tokens; documents that are null are left out. The state is the stream's before the
    first document that is still used, and how many of its tokens are used up.
    """

    def __init__(self, rows: Any, column: str, encode: Callable[[str], list[int]], sequence_length: int) -> None:
        self.rows, self.column, self.encode, self.sequence_length = rows, column, encode, sequence_length
        self._state: dict[str, Any] = {"rows": rows.state_dict(), "used": 0}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.rows.load_state_dict(self._state["rows"])
        rows, used = iter(self.rows), self._state["used"]
        documents: deque[tuple[Any, list[int]]] = deque()
        have, length = -used, self.sequence_length
        before = self._state["rows"]
        while True:
            while have <= length:  # the last token of a window is a target only
                try:
                    row = next(rows, None)
                except Exception as error:  # the library's own, pyarrow's and each file system's
                    raise UserError(f"task_args.data cannot be read further: {reason_of(error)}") from error
                if row is None:
                    return
                text = document(row.get(self.column), "task_args.data", self.column)
                documents.append((before, [] if text is None else self.encode(text)))
                have += len(documents[-1][1])
                before = self.rows.state_dict()
            tokens: list[int] = []
            for number, (_, encoded) in enumerate(documents):
                begin = 0 if number else used
                tokens += encoded[begin : begin + length + 1 - len(tokens)]
            used, have = used + length, have - length
            while used >= len(documents[0][1]):
                used -= len(documents.popleft()[1])
            self._state = {"rows": documents[0][0], "used": used}
            found = torch.tensor(tokens)
            yield found[:-1], found[1:]
