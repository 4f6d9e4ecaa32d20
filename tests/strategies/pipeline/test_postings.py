"""No stage waits for what depends on itself: what the runtime asks of a GPU in a step, played through without one.

The runtime's own code is run with blocks that compute nothing, and what it asks for is noted, stage by stage. A model
of devices then says whether all of it can be done. A device has a stream of computation and one for each connection and
direction, each in order; a message needs both its ends at the heads of their streams. The host waits for its device

    eager    nowhere but where the runtime does (it reads the shapes of the first messages)
    lazy     as well before the first of each kind of instruction, which loads its kernels
    strict   as well before everything that it asks of it: computation, sends and receives
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strategies.layout import LayoutError
from strategies.pipeline import p2p, runtime, schedules, timeline
from strategies.pipeline.postings import Arrival, arrivals, connections, ends
from strategies.pipeline.schedules import SCHEDULES, Op, Placement, Schedule
from strategies.pipeline.simulate import Times, length, simulate
from strategies.pipeline.timeline import Timeline

CPU = torch.device("cpu")
Event = tuple[str, Any]
"""launch an instruction; send, receive: (connection, which message on it); after those: what computes next waits for
one; read: the host waits for what computes."""


class Recorder:
    """In the place of torch.distributed and of a stage, of which it notes what it is asked for."""

    def __init__(self, stage: int) -> None:
        self.stage, self.events = stage, list[Event]()
        self.count: Counter[Any] = Counter()
        self.output = torch.zeros(0, requires_grad=True)

    def get_process_group_ranks(self, group: Any) -> range:
        return range(100)

    def send(self, tensor: Any, rank: int, group: Any, tag: int) -> None:
        self.isend(tensor, rank, group, tag).wait()

    def recv(self, tensor: Any, rank: int, group: Any, tag: int) -> None:
        self.irecv(tensor, rank, group, tag).wait()

    def isend(self, tensor: Any, rank: int, group: Any, tag: int) -> Any:
        return self._note("send", ("FB"[tag], self.stage, rank))

    def irecv(self, tensor: Any, rank: int, group: Any, tag: int) -> Any:
        return self._note("receive", ("FB"[tag], rank, self.stage))

    def all_reduce(self, tensor: Any) -> None:
        """Between steps."""

    def _note(self, what: str, connection: Any) -> Any:
        message = (connection, self.count[what, connection])
        self.count[what, connection] += 1
        self.events.append((what, message))
        return SimpleNamespace(wait=lambda: self.events.append(("after", message)))

    def decode(self, header: Any) -> p2p.TensorMetas:
        self.events.append(("read", None))
        return (p2p.TensorMeta.of(self.output, None),)

    def launch(self, kind: str) -> None:
        self.events.append(("launch", kind))

    def placeholders(self, *_: Any) -> Any:
        return {}

    def run(self, part: int, *_: Any) -> Any:
        self.launch("F")
        return torch.zeros(()), [self.output]


@contextlib.contextmanager
def _recorded(recorder: Recorder) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "dist", recorder)
        patch.setattr(runtime, "dist", recorder)
        patch.setattr(p2p, "decode", recorder.decode)
        patch.setattr(runtime, "seed_generators", lambda *_: None)
        patch.setattr(torch.autograd, "backward", lambda *_: recorder.launch("B"))
        patch.setattr(runtime.weight_grad, "finish", lambda _: recorder.launch("W"))
        patch.setattr(runtime, "Timeline", lambda stage, _: Timeline(stage, torch.device("cuda")))
        patch.setattr(timeline.torch, "cuda", SimpleNamespace(Event=FakeEvent, current_stream=lambda _: "current"))
        yield


class FakeEvent:
    """Nothing waits for it but who calls synchronize."""

    clock = 0.0
    waited = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "current"
        FakeEvent.clock += 500.0
        self.at = FakeEvent.clock

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at

    def synchronize(self) -> None:
        FakeEvent.waited += 1


def _events(
    schedule: Schedule,
    stage: int,
    order: tuple[Arrival, ...],
    *,
    steps: int = 1,
    ragged: bool = False,
    known: bool = False,
    profiled: bool = False,
) -> list[Event]:
    """ragged: the last micro-batch has other shapes. known: shapes are, as in later steps."""
    recorder, count = Recorder(stage), schedule.micro_batches
    with _recorded(recorder):
        comm = p2p.P2PComm(schedule.placement, stage, None, CPU, [])  # type: ignore[arg-type]
        made = runtime.Runtime(
            recorder,  # type: ignore[arg-type]
            comm,
            schedule.placement,
            autocast=contextlib.nullcontext,
            wire=None,
            sync=None,
            deferred=SimpleNamespace(waiting=None),  # type: ignore[arg-type]
        )
        made._arrivals[schedule.name, count, schedule.chunks] = order
        kinds = ["whole"] * (count - ragged) + ["rest"] * ragged
        step = runtime.Step([None] * count, [1.0] * count, [1.0] * count, None, kinds)  # type: ignore[arg-type]
        if known:
            metas = (p2p.TensorMeta.of(recorder.output, None),)
            made.metas = {(edge, kind): metas for edge in range(schedule.placement.parts) for kind in kinds}
        for _ in range(steps):
            made.step(schedule, step, CPU, profiled)
    return recorder.events


class Device:
    """A stage's host and its streams."""

    def __init__(self, events: list[Event]) -> None:
        self.events, self.next = events, 0
        self.streams: dict[Any, list[tuple[str, Any, int]]] = {"compute": []}
        self.done: Counter[Any] = Counter()
        self.over: set[Event] = set()
        self.loaded: set[Any] = set()

    def idle(self, name: Any) -> bool:
        return self.done[name] == len(self.streams.get(name, ()))

    def host(self, model: str) -> bool:
        """Asks for the next event unless the host has to wait first."""
        if self.next == len(self.events):
            return False
        what, which = self.events[self.next]
        waits = model == "strict" and what in ("launch", "send", "receive")
        waits |= model == "lazy" and what == "launch" and which not in self.loaded
        if (waits and not all(map(self.idle, self.streams))) or (what == "read" and not self.idle("compute")):
            return False
        if what == "launch":
            self.loaded.add(which)
        if what != "read":  # a message waits for all computation that was asked for before it
            name = which[0] if what in ("send", "receive") else "compute"
            self.streams.setdefault(name, []).append((what, which, len(self.streams["compute"])))
        self.next += 1
        return True

    def head(self, name: Any, what: str) -> bool:
        """Whether that is what this stream would do now."""
        items = self.streams.get(name, ())
        if self.done[name] == len(items):
            return False
        found, _, behind = items[self.done[name]]
        return found == what and self.done["compute"] >= behind

    def finish(self, name: Any) -> None:
        self.over.add(self.streams[name][self.done[name]][1])
        self.done[name] += 1

    def compute(self) -> bool:
        if self.idle("compute"):
            return False
        what, which, _ = self.streams["compute"][self.done["compute"]]
        if what == "after" and which not in self.over:
            return False
        self.done["compute"] += 1
        return True


def finishes(programs: list[list[Event]], model: str) -> bool:
    """Whether the devices get through what the hosts ask of them."""
    devices = [Device(events) for events in programs]
    names = {which[0] for events in programs for what, which in events if what == "send"}
    moved = True
    while moved:
        moved = False
        for device in devices:
            while device.host(model) or device.compute():
                moved = True
        for name in names:
            _, source, target = name
            while devices[source].head(name, "send") and devices[target].head(name, "receive"):
                devices[source].finish(name)
                devices[target].finish(name)
                moved = True
    return all(each.next == len(each.events) and all(map(each.idle, each.streams)) for each in devices)


def _schedules(name: str) -> Iterator[Schedule]:
    for stages, micro_batches, chunks in itertools.product(range(2, 9), range(2, 17), (1, 2, 3)):
        with contextlib.suppress(LayoutError):
            if name != "zbv" or chunks == 2:
                yield schedules.make.__wrapped__(name, stages, micro_batches, chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_stage_waits_for_what_depends_on_itself(name: str) -> None:
    """In the strict model, and a first step: in others, and where shapes are known, less is waited for."""
    for schedule in _schedules(name):
        how = {
            "steps": 2 if schedule.micro_batches == 4 else 1,
            "ragged": schedule.micro_batches % 4 == 3,
            "profiled": schedule.micro_batches % 2 == 0,
        }
        programs = [_events(schedule, stage, order, **how) for stage, order in enumerate(arrivals(schedule))]
        assert finishes(programs, "strict"), (name, schedule.stages, schedule.micro_batches, schedule.chunks)


def _three_ahead(schedule: Schedule, stage: int) -> tuple[Arrival, ...]:
    """Asks each neighbour, in either direction, for three messages before they are needed."""
    place, needed = schedule.placement, dict[Any, int]()
    for done, op in enumerate(schedule.lists[stage]):
        part = place.part(stage, op.chunk)
        needed[op.kind, part - 1 if op.kind == "F" else part, op.micro] = done
    found, before = [], dict[Any, list[int]]()
    for arrival in arrivals(schedule)[stage]:
        taken = before.setdefault((arrival.key[0], arrival.source), [])
        found.append(Arrival(arrival.key, arrival.source, taken[-3] + 1 if len(taken) > 2 else 0, ()))
        taken.append(needed[arrival.key])
    return tuple(sorted(found, key=lambda arrival: arrival.after))


@pytest.mark.parametrize("name", SCHEDULES)
def test_to_ask_three_messages_ahead_is_seen_to_hang(name: str) -> None:
    schedule = schedules.make.__wrapped__(name, 4, 8, 2 if name in ("interleaved_1f1b", "zbv") else 1)
    programs = [_events(schedule, stage, _three_ahead(schedule, stage), known=True) for stage in range(4)]
    assert [finishes(programs, model) for model in ("eager", "lazy", "strict")] == [True, False, False]


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_asked_for_comes_in_order_and_what_was_sent_is_let_go_of(name: str) -> None:
    for schedule in itertools.islice(_schedules(name), 0, None, 7):
        place = schedule.placement
        sent = [dict[Any, list[Any]]() for _ in range(schedule.stages)]
        for stage, ops in enumerate(schedule.lists):
            for op in (op for op in ops if op.kind != "W"):
                part = place.part(stage, op.chunk)
                key = (op.kind, part if op.kind == "F" else part - 1, op.micro)
                if 0 <= key[1] < place.parts - 1 and ends(place, key)[1] != stage:
                    sent[stage].setdefault((op.kind, ends(place, key)[1]), []).append(key)
        for stage, coming in enumerate(arrivals(schedule)):
            for (kind, source), keys in _by_connection(coming).items():
                assert keys == sent[source][kind, stage], "asked for in the order in which it is sent"
            freed = [key for arrival in coming for key in arrival.frees]
            mine = [key for keys in sent[stage].values() for key in keys]
            assert len(freed) == len(set(freed)) and set(freed) <= set(mine)


def _seconds(schedule: Schedule, times: Times) -> float:
    """Of a step in which a transfer begins when both ends are ready: the receiver once it has asked."""
    place, split = schedule.placement, schedule.split
    after = [{arrival.key: arrival.after for arrival in coming} for coming in arrivals(schedule)]
    over: dict[Any, float] = {}  # (kind, part, micro-batch) → when it is done
    ended = [[0.0] for _ in schedule.lists]
    for span in simulate(schedule, times):  # an order in which everything comes after what it needs
        part, clock = place.part(span.stage, span.chunk), ended[span.stage]
        key = (span.kind, part - 1 if span.kind == "F" else part, span.micro)
        start = clock[-1]
        if key in after[span.stage]:
            sent = over[span.kind, part - 1 if span.kind == "F" else part + 1, span.micro]
            start = max(start, max(sent, clock[after[span.stage][key]]) + times.transfer)
        over[span.kind, part, span.micro] = start + times.of(span.kind, part, split)
        clock.append(over[span.kind, part, span.micro])
    return max(map(max, ended))


@pytest.mark.parametrize("name", SCHEDULES)
def test_to_ask_no_earlier_costs_nothing_with_equal_parts_and_a_fiftieth_with_others(name: str) -> None:
    for transfer in (0.05, 0.2):
        ratios = []
        for stages, draw in itertools.product((2, 4, 8), map(random.Random, range(3))):
            schedule = schedules.make.__wrapped__(
                name, stages, 4 * stages, 2 if name in ("interleaved_1f1b", "zbv") else 1
            )
            parts = [draw.uniform(0.7, 1.3) for _ in range(schedule.placement.parts)]
            times = Times(parts, parts, parts, transfer=transfer)
            ratios.append(_seconds(schedule, times) / length(simulate(schedule, times)))
        assert sum(ratios) / len(ratios) < 1.02 and max(ratios) < 1.04
    for stages, transfer in itertools.product((2, 4, 8), (0.05, 0.2)):
        schedule = schedules.make.__wrapped__(name, stages, 4 * stages, 2 if name in ("interleaved_1f1b", "zbv") else 1)
        times = Times(1.0, 1.0, 1.0, transfer=transfer)
        assert _seconds(schedule, times) == pytest.approx(length(simulate(schedule, times)))


def _by_connection(coming: tuple[Arrival, ...]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for arrival in coming:
        found.setdefault((arrival.key[0], arrival.source), []).append(arrival.key)
    return found


def test_a_small_schedule_by_hand() -> None:
    """Stage 0: F0 F1 B0 F2 B1 B2; stage 1, a forward later: F0 B0 F1 B1 F2 B2. B takes twice as long as F."""
    first, last = arrivals(schedules.make.__wrapped__("1f1b", 2, 3))
    assert [(str(Op(a.key[0], a.key[2])), a.after, a.frees) for a in last] == [
        ("F0", 0, ()),
        ("F1", 0, ()),
        ("F2", 4, (("B", 0, 0),)),
    ]
    assert [(str(Op(a.key[0], a.key[2])), a.after, a.frees) for a in first] == [
        ("B0", 2, (("F", 0, 0),)),
        ("B1", 3, (("F", 0, 1),)),
        ("B2", 5, (("F", 0, 2),)),
    ]


@pytest.mark.parametrize(("chunks", "folded"), [(1, False), (3, False), (2, True)])
def test_every_connection_is_opened_once_by_both_its_ends(chunks: int, folded: bool) -> None:
    found = connections(Placement(4, chunks, folded))
    down = {("F", 0, 1), ("F", 1, 2), ("F", 2, 3)}
    ring = {("F", 3, 0)} if chunks == 3 else {("F", b, a) for _, a, b in down} if folded else set()
    forward = down | ring
    assert len(found) == len(set(found)) and set(found) == forward | {("B", b, a) for _, a, b in forward}
    assert [source % 2 for kind, source, _ in found if kind == "F"][:2] == [0, 0], "two open at once"


def test_on_a_gpu_instructions_are_timed_by_events_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.clock = FakeEvent.waited = 0
    cuda = SimpleNamespace(Event=FakeEvent, current_stream=lambda device: "current")  # and nothing that waits
    monkeypatch.setattr(timeline.torch, "cuda", cuda)
    line = Timeline(1, torch.device("cuda", 0))
    assert [line.timed(kind, Op(kind, 2), lambda: 7) for kind in "FB"] == [7, 7] and not FakeEvent.waited
    spans = line.spans()
    assert [(s.stage, s.kind, s.micro, s.start, s.end) for s in spans] == [(1, "F", 2, 0.5, 1.0), (1, "B", 2, 1.5, 2.0)]
    assert FakeEvent.waited == 1
