"""A tree of aggregators, through which many ranks report to one driver.

Up to `DIRECT_RANKS` ranks report to the driver's `EventQueue` themselves. Of more, those of a node
report to an aggregator there, which passes on what is new, once a second or at once if it is more
than a heartbeat. An aggregator has at most `FAN_IN` others below it. So nothing that a process
receives grows with the number of ranks, but for what has changed of them, and only in the driver.

What the driver wants of the ranks, such as that they stop, goes down the same tree. Nothing here
uses Ray (driver_actors.py makes actors of it), and little is imported.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

PERIOD_SECONDS = 1.0
"""Between two heartbeats of a rank, and two reports of an aggregator."""
ANSWER_SECONDS = 3.0
"""A rank whose newest heartbeat is older than this does not answer."""
DIRECT_RANKS = 64
"""So many ranks need no aggregators: the queue takes about 1,000 calls a second."""
FAN_IN = 64
"""How many aggregators report to one."""
ANSWER_BYTES = 32 << 20
"""How much an aggregator keeps of the answers to a question. Equal answers are kept once."""

Beat = tuple[str, int, int, bool]
"""Phase, step, ticks and whether the rank waits (see `workers.Status`)."""
Answer = tuple[int, str]
"""The number of a question, and the answer."""
StoreAddress = tuple[str, int]
"""Host and port of the store in which ranks meet."""
T = TypeVar("T")


def parents(aggregators: int) -> list[int | None]:
    """The number of each aggregator's parent; None is the driver's queue.

    Args:
        aggregators: How many there are.
    """
    return [number // FAN_IN - 1 if number >= FAN_IN else None for number in range(aggregators)]


class Orders(NamedTuple):
    """What the driver wants of the ranks.

    Args:
        stop: Whether to save and stop.
        question: See `heartbeats.Reply`.
        number: Of the question.
        store: Where the ranks meet, once all have joined.
    """

    stop: bool = False
    question: str = ""
    number: int = 0
    store: StoreAddress | None = None


class Report(NamedTuple):
    """What is new since the previous report.

    Args:
        urgent: Whether the driver is to receive it at once.
        events: Lists of events, pickled.
        beats: Heartbeats that say something new, with the ranks.
        silent: All ranks that do not answer; None if they are the same as before.
        joined: Ranks that have joined, by the id of their node.
        store: Where the ranks meet; None if no rank has told it since.
        number: Of the newest question.
        answers: Answers to it, each with the ranks that give it.
    """

    urgent: bool
    events: list[bytes]
    beats: dict[Beat, list[int]]
    silent: frozenset[int] | None
    joined: dict[str, list[int]]
    store: StoreAddress | None
    number: int
    answers: dict[str, list[int]]


class RankAssignment(NamedTuple):
    """What a rank learns when all have joined.

    Args:
        local_rank: The rank among those of its node.
        store: Where the ranks meet.
    """

    local_rank: int
    store: StoreAddress


class Link(Protocol):
    """How a rank reaches what is above it, the root or an aggregator; see `Aggregator`.

    Its calls may raise if that process is gone.
    """

    def put(self, attempt: int, events: bytes, urgent: bool = False) -> Callable[[], object]:
        """Sends events without waiting; returns a function that waits until they have arrived."""

    def beat(self, attempt: int, rank: int, beat: Beat, answer: Answer | None) -> Orders:
        """Sends a heartbeat and an answer."""

    def join(self, attempt: int, rank: int, node: str, store: StoreAddress | None) -> None:
        """Reports that a rank has started."""

    def meeting(self, attempt: int, rank: int, node: str) -> RankAssignment | None:
        """Asks where ranks meet."""

    def node_rank(self, attempt: int, node: str) -> int:
        """Asks the root for the number of a node."""


class LastHeard(Generic[T]):
    """Which of several senders have been silent for a while."""

    def __init__(self) -> None:
        self._clocks: dict[T, float] = {}
        """Oldest first."""

    def heard(self, who: T, now: float) -> None:
        """Notes that a message from this sender has just arrived."""
        self._clocks.pop(who, None)
        self._clocks[who] = now

    def silent(self, now: float, seconds: float) -> Iterator[T]:
        """The senders whose last message is older than this."""
        for who, clock in self._clocks.items():
            if now - clock <= seconds:
                return
            yield who


@dataclass
class _Child:
    """An aggregator below.

    Args:
        ranks: Those that report through it.
        silent: Those of them that do not answer, as it says.
    """

    ranks: set[int] = field(default_factory=set)
    silent: frozenset[int] = frozenset()


class Aggregator:
    """What the ranks below have reported and the driver has not received yet; thread-safe.

    Calls that belong to an earlier attempt are ignored.

    Args:
        clock: Seconds that grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self.urgent = threading.Event()
        """Set if the next report is not to wait."""
        self.begin(0, 0)

    def begin(self, attempt: int, world_size: int) -> None:
        """Forgets everything, for a new attempt.

        Args:
            attempt: Its number.
            world_size: How many ranks there are below.
        """
        with self._lock:
            self.attempt = attempt
            self.world_size = world_size
            self.orders = Orders()
            self._events: list[bytes] = []
            self._beats: dict[int, Beat] = {}
            """The newest heartbeat of each rank that reports here itself."""
            self._new_beats: dict[int, Beat] = {}
            self._ranks = LastHeard[int]()
            self._children: dict[str, _Child] = {}
            self._reports = LastHeard[str]()
            self._silent: frozenset[int] = frozenset()
            """As in the newest report."""
            self._joined: dict[str, list[int]] = defaultdict(list)
            self._new_joined: dict[str, list[int]] = defaultdict(list)
            self._join_count = 0
            self._store: StoreAddress | None = None
            self._new_store: StoreAddress | None = None
            self._answers: dict[str, list[int]] = {}
            self._answer_bytes = 0
            self._below: list[Any] = []
            """The actors of the aggregators below."""
            self._passed_on = self.orders
            """What they know."""
            self.node_ranks: dict[str, int] = {}
            """The number of each node, once all ranks have joined: its place by lowest rank."""

    # --- ranks ------------------------------------------------------------------------------------

    def put(self, attempt: int, events: bytes, urgent: bool = False) -> None:
        """Takes events, as a pickled list."""
        with self._lock:
            if attempt != self.attempt:
                return
            self._events.append(events)
            if urgent:
                self.urgent.set()

    def beat(self, attempt: int, rank: int, beat: Beat, answer: Answer | None) -> Orders:
        """Takes a heartbeat and an answer."""
        with self._lock:
            if attempt != self.attempt:
                return Orders(stop=True)
            self._ranks.heard(rank, self._clock())
            if beat != self._beats.get(rank):
                self._beats[rank] = beat
                self._new_beats[rank] = beat
                if beat[0] == "finished":
                    self.urgent.set()
            if answer is not None and answer[0] == self.orders.number:
                self._take_answer(answer[1], [rank])
            return self.orders

    def join(self, attempt: int, rank: int, node: str, store: StoreAddress | None) -> None:
        """Notes that a rank has started.

        Args:
            attempt: Of the rank.
            rank: The rank.
            node: The id of its node.
            store: On rank 0 the address of the store where ranks meet; None on others.
        """
        with self._lock:
            if attempt == self.attempt:
                self._take_joined({node: [rank]}, store)
                self._pass_on()

    def meeting(self, attempt: int, rank: int, node: str) -> RankAssignment | None:
        """A rank's place on its node, and where ranks meet; None until all ranks have joined."""
        with self._lock:
            if attempt != self.attempt or self.orders.store is None:
                return None
            local_rank = sum(other < rank for other in self._joined[node])
            return RankAssignment(local_rank, self.orders.store)

    # --- aggregators ------------------------------------------------------------------------------

    def adopt(self, attempt: int, child: Any) -> None:
        """Takes the actor of an aggregator that will report here, and tells it the orders."""
        with self._lock:
            if attempt == self.attempt:
                self._below.append(child)
                child.obey.remote(attempt, self.orders)

    def report(self, attempt: int, child: str, report: Report) -> None:
        """Takes the report of an aggregator below, which this name identifies."""
        with self._lock:
            if attempt != self.attempt:
                return
            self._reports.heard(child, self._clock())
            state = self._children.setdefault(child, _Child())
            for beat, ranks in report.beats.items():
                state.ranks.update(ranks)
                self._new_beats |= dict.fromkeys(ranks, beat)
            if report.silent is not None:
                state.silent = report.silent
            self._events += report.events
            if report.joined or report.store:
                self._take_joined(report.joined, report.store)
            if report.number == self.orders.number:
                for text, ranks in report.answers.items():
                    self._take_answer(text, ranks)
            if report.urgent:
                self.urgent.set()
            self._pass_on()

    def take(self) -> Report:
        """What is new since the last call, for the parent or the driver."""
        with self._lock:
            is_urgent = self.urgent.is_set()
            self.urgent.clear()
            beats: dict[Beat, list[int]] = {}
            for rank, beat in self._new_beats.items():
                beats.setdefault(beat, []).append(rank)
            silent = self._find_silent()
            report = Report(
                urgent=is_urgent,
                events=self._events,
                beats=beats,
                silent=None if silent == self._silent else silent,
                joined=dict(self._new_joined),
                store=self._new_store,
                number=self.orders.number,
                answers=self._answers,
            )
            self._silent = silent
            self._events = []
            self._new_beats = {}
            self._new_joined = defaultdict(list)
            self._new_store = None
            self._answers = {}
            return report

    def answered(self) -> dict[str, list[int]]:
        """The answers since the last call or report, each with the ranks that give it."""
        with self._lock:
            answers = self._answers
            self._answers = {}
            return answers

    def obey(self, attempt: int, orders: Orders) -> bool:
        """Takes the driver's orders; returns whether they are new."""
        with self._lock:
            if attempt != self.attempt or orders == self.orders:
                return False
            if orders.number != self.orders.number:
                self._answers = {}
                self._answer_bytes = 0
            self.orders = orders
            self._pass_on()
            return True

    def _pass_on(self) -> None:
        """Tells the aggregators below what the driver wants, if that has changed."""
        if self.orders != self._passed_on:
            self._passed_on = self.orders
            for child in self._below:
                child.obey.remote(self.attempt, self.orders)

    def _find_silent(self) -> frozenset[int]:
        now = self._clock()
        silent = set(self._ranks.silent(now, ANSWER_SECONDS))
        mute = set(self._reports.silent(now, ANSWER_SECONDS + PERIOD_SECONDS))
        for name, child in self._children.items():
            silent |= child.ranks if name in mute else child.silent
        return frozenset(silent)

    def _take_joined(self, joined: dict[str, list[int]], store: StoreAddress | None) -> None:
        for node, ranks in joined.items():
            self._joined[node] += ranks
            self._new_joined[node] += ranks
            self._join_count += len(ranks)
        self._store = store or self._store
        self._new_store = store or self._new_store
        self.urgent.set()
        if self._join_count == self.world_size and self._store is not None:
            by_lowest_rank = sorted(self._joined, key=lambda node: min(self._joined[node]))
            self.node_ranks = {node: number for number, node in enumerate(by_lowest_rank)}
            self.orders = self.orders._replace(store=self._store)

    def _take_answer(self, text: str, ranks: Sequence[int]) -> None:
        if text not in self._answers:
            if self._answer_bytes + len(text) > ANSWER_BYTES:
                return
            self._answer_bytes += len(text)
        self._answers.setdefault(text, []).extend(ranks)
        self.urgent.set()


class RootAggregator(Aggregator):
    """The root of the tree: the messages between the workers and the driver."""

    def drain(self, stop: bool) -> Report:
        """Returns what is new since the last call.

        Args:
            stop: Whether the workers are to save and stop.
        """
        if stop:
            self.obey(self.attempt, self.orders._replace(stop=True))
        return self.take()

    def ask(self, question: str) -> None:
        """Asks every rank."""
        number = self.orders.number + 1
        self.obey(self.attempt, self.orders._replace(question=question, number=number))

    def node_rank(self, attempt: int, node: str) -> int:
        """The number of a node of this attempt; 0 for another one, which will end."""
        return self.node_ranks.get(node, 0) if attempt == self.attempt else 0
