"""Workers of one machine reach the driver by a socket: what arrives, and what never waits."""

from __future__ import annotations

import errno
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.launchers.aggregator import Orders, RankAssignment
from app.launchers.driver_actors import Uplink
from app.launchers.event_socket import RETRY_SECONDS, LocalQueue, SocketLink

pytestmark = pytest.mark.pure

ATTEMPT = 3
STORE = ("127.0.0.1", 1234)
TRAINING = ("training", 7, 0, False)
SECONDS = 30.0
"""How long a busy machine may take for what takes a millisecond."""


@pytest.fixture
def local_queue(tmp_path: Path) -> Iterator[LocalQueue]:
    """The queue of an attempt of two ranks."""
    queue = LocalQueue(tmp_path)
    queue.begin(ATTEMPT, 2)
    yield queue
    queue.close()


def link_to(queue: LocalQueue) -> SocketLink:
    """A worker's link, by an uplink that was sent to its process."""
    uplink = pickle.loads(pickle.dumps(Uplink(attempt=ATTEMPT, socket=queue.path)))
    link = uplink.find()
    assert isinstance(link, SocketLink)
    return link


def test_events_of_every_rank_arrive_once_and_in_order(local_queue: LocalQueue) -> None:
    links = [link_to(local_queue) for _ in range(2)]
    for number in range(100):
        for rank, link in enumerate(links):
            link.put(ATTEMPT, f"{rank} {number}".encode())
    for rank, link in enumerate(links):
        link.put(ATTEMPT, f"{rank} last".encode(), True)()
    report = local_queue.drain(False)
    texts = [events.decode() for events in report.events]
    for rank in range(2):
        expected = [f"{rank} {number}" for number in range(100)] + [f"{rank} last"]
        assert [text for text in texts if text.startswith(f"{rank} ")] == expected
    assert report.urgent and local_queue.drain(False).events == []


def test_ranks_meet_and_learn_what_the_driver_wants(local_queue: LocalQueue) -> None:
    links = [link_to(local_queue) for _ in range(2)]
    links[1].join(ATTEMPT, 1, "a", None)
    assert links[1].meeting(ATTEMPT, 1, "a") is None
    links[0].join(ATTEMPT, 0, "a", STORE)
    assert links[1].meeting(ATTEMPT, 1, "a") == RankAssignment(1, STORE)
    assert links[0].node_rank(ATTEMPT, "a") == 0
    assert not links[0].beat(ATTEMPT, 0, TRAINING, None).stop
    assert local_queue.drain(True).beats == {TRAINING: [0]}
    local_queue.ask("stack")
    orders = links[0].beat(ATTEMPT, 0, TRAINING, None)
    assert orders == Orders(stop=True, question="stack", number=1, store=STORE)
    links[0].beat(ATTEMPT, 0, TRAINING, (1, "in a collective"))
    assert local_queue.answered() == {"in a collective": [0]}


def test_a_worker_of_an_earlier_attempt_is_ignored_and_told_to_stop(
    local_queue: LocalQueue,
) -> None:
    link = link_to(local_queue)
    local_queue.begin(ATTEMPT + 1, 2)
    link.put(ATTEMPT, b"late")()
    assert link.beat(ATTEMPT, 0, TRAINING, None).stop
    report = local_queue.drain(False)
    assert report.events == [] and report.beats == {}


def test_training_does_not_wait_for_a_driver_that_is_stopped(local_queue: LocalQueue) -> None:
    link = link_to(local_queue)
    arrived = threading.Event()
    with local_queue.root._lock:  # the driver answers nobody
        for _ in range(100):
            wait = link.put(ATTEMPT, bytes(100_000))  # more than a socket holds

        def note_arrival() -> None:
            wait()
            arrived.set()

        threading.Thread(target=note_arrival, daemon=True).start()
        assert not arrived.wait(0.2)
    assert arrived.wait(SECONDS), "the driver goes on, and gets everything"
    assert len(local_queue.drain(False).events) == 100


def test_what_cannot_arrive_raises(tmp_path: Path) -> None:
    queue = LocalQueue(tmp_path)
    link = link_to(queue)
    queue.close()
    with pytest.raises(OSError):
        link.put(ATTEMPT, b"lost")()
    with pytest.raises(OSError):
        link.beat(ATTEMPT, 0, TRAINING, None)
    assert not list(tmp_path.iterdir())


def test_a_process_with_too_many_open_files_waits_and_then_accepts(
    local_queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = local_queue._listener.accept
    refusals: list[float] = []

    def refuse_for_a_while() -> object:
        if len(refusals) < 3:
            refusals.append(time.monotonic())
            raise OSError(errno.EMFILE, "Too many open files")
        return accept()

    monkeypatch.setattr(local_queue._listener, "accept", refuse_for_a_while)
    link_to(local_queue).put(ATTEMPT, b"first", True)()  # accepted by the call that waits already
    link_to(local_queue).put(ATTEMPT, b"second", True)()
    assert local_queue.drain(False).events == [b"first", b"second"]
    # It does not use a whole processor until then.
    assert refusals[-1] - refusals[0] >= 2 * RETRY_SECONDS
