"""No stage waits for what depends on itself: what the runtime asks of a GPU in a step, played through without one.

The runtime's own code is run with blocks that compute nothing, and what it asks for is noted, stage by stage. Then it
is played through: a message needs both its ends, and a stage waits, at everything that it asks for, until all that it
has asked for before is over. No device waits for more: it would have to wait for what it has not been asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from strategies.layout import LayoutError
from strategies.pipeline import p2p, runtime, schedules, timeline
from strategies.pipeline.postings import Arrival, arrivals, connections, ends
from strategies.pipeline.schedules import SCHEDULES, Op, Placement, Schedule
from strategies.pipeline.simulate import Times, length, simulate
from strategies.pipeline.timeline import Timeline

make = schedules.make.__wrapped__
CPU = torch.device("cpu")
Event = tuple[str, Any]
"""launch an instruction; send, receive: ((F or B, from, to), which message on this connection); after one of those."""


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

    def launch(self) -> None:
        self.events.append(("launch", None))

    def placeholders(self, *_: Any) -> Any:
        return {}

    def run(self, part: int, *_: Any) -> Any:
        self.launch()
        return torch.zeros(()), [self.output]


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


def events_of(
    schedule: Schedule,
    stage: int,
    order: tuple[Arrival, ...],
    *,
    steps: int = 1,
    ragged: bool = False,
    profiled: bool = False,
) -> list[Event]:
    """ragged: the last micro-batch has other shapes."""
    recorder, count = Recorder(stage), schedule.micro_batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "dist", recorder)
        patch.setattr(runtime, "dist", recorder)
        patch.setattr(p2p, "decode", lambda _: (p2p.TensorMeta.of(recorder.output, None),))
        patch.setattr(runtime, "seed_generators", lambda *_: None)
        patch.setattr(torch.autograd, "backward", lambda *_: recorder.launch())
        patch.setattr(runtime.weight_grad, "finish", lambda _: recorder.launch())
        patch.setattr(runtime, "Timeline", lambda stage, _: Timeline(stage, torch.device("cuda")))
        patch.setattr(timeline.torch, "cuda", SimpleNamespace(Event=FakeEvent, current_stream=lambda _: "current"))
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
        for _ in range(steps):
            made.step(schedule, step, CPU, profiled)
    return recorder.events


def finishes(programs: list[list[Event]]) -> bool:
    """Whether all stages get through what they ask for: a message goes when it is the next of both its ends."""
    left = [[event for event in events if event[0] in ("send", "receive")] for events in programs]
    moved = True
    while moved:
        moved = False
        for events in left:
            while events and events[0][0] == "send" and left[events[0][1][0][2]][:1] == [("receive", events[0][1])]:
                del left[events.pop(0)[1][0][2]][0]
                moved = True
    return not any(left)


def _schedules(name: str, every: bool = False) -> Iterator[Schedule]:
    sizes = (range(2, 9), range(2, 17)) if every else ((2, 3, 4, 7), range(2, 13))
    for stages, micro_batches, chunks in itertools.product(*sizes, (1, 2, 3)):
        with contextlib.suppress(LayoutError):
            if name != "zbv" or chunks == 2:
                yield make(name, stages, micro_batches, chunks)


def _usual(name: str, stages: int, micro_batches: int) -> Schedule:
    return make(name, stages, micro_batches, 2 if name in ("interleaved_1f1b", "zbv") else 1)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_stage_waits_for_what_depends_on_itself(name: str, every: bool) -> None:
    """In a first step: where shapes are known, less is waited for."""
    for schedule in _schedules(name, every):
        short = schedule.micro_batches == 4
        how, orders = {"steps": 1 + short, "ragged": schedule.micro_batches % 4 == 3}, arrivals(schedule)
        programs = [events_of(schedule, stage, order, **how) for stage, order in enumerate(orders)]
        assert finishes(programs), (name, schedule.stages, schedule.micro_batches, schedule.chunks)
        if short:
            again = [events_of(schedule, stage, order, **how, profiled=True) for stage, order in enumerate(orders)]
            assert again == programs, "a profiled step asks a GPU for the same, and waits for nothing more"


@pytest.mark.parametrize("name", SCHEDULES)
def test_to_ask_two_instructions_earlier_is_seen_to_hang(name: str) -> None:
    schedule = _usual(name, 4, 8)
    early = [[replace(one, after=max(0, one.after - 2)) for one in coming] for coming in arrivals(schedule)]
    assert not finishes([events_of(schedule, stage, tuple(coming)) for stage, coming in enumerate(early)])


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
            for kind, source in {(arrival.key[0], arrival.source) for arrival in coming}:
                asked = [a.key for a in coming if (a.key[0], a.source) == (kind, source)]
                assert asked == sent[source][kind, stage], "in the order in which it is sent"
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
            schedule = _usual(name, stages, 4 * stages)
            parts = [draw.uniform(0.7, 1.3) for _ in range(schedule.placement.parts)]
            times = Times(parts, parts, parts, transfer=transfer)
            ratios.append(_seconds(schedule, times) / length(simulate(schedule, times)))
            equal = Times(1.0, 1.0, 1.0, transfer=transfer)
            assert _seconds(schedule, equal) == pytest.approx(length(simulate(schedule, equal)))
        assert sum(ratios) / len(ratios) < 1.02 and max(ratios) < 1.04


def test_a_small_schedule_by_hand() -> None:
    """Stage 0: F0 F1 B0 F2 B1 B2; stage 1, a forward later: F0 B0 F1 B1 F2 B2. B takes twice as long as F."""
    found = [[(str(Op(a.key[0], a.key[2])), a.after, a.frees) for a in stage] for stage in arrivals(make("1f1b", 2, 3))]
    assert found[0] == [("B0", 2, (("F", 0, 0),)), ("B1", 3, (("F", 0, 1),)), ("B2", 5, (("F", 0, 2),))]
    assert found[1] == [("F0", 0, ()), ("F1", 0, ()), ("F2", 4, (("B", 0, 0),))]


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


def test_an_operation_of_any_direction_may_take_as_long_as_one_of_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's groups have 10 minutes unless they are told, others 30."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(p2p, "own_group", lambda every, **how: made.append(how) or object())
    monkeypatch.setattr(p2p.P2PComm, "_connect", lambda *_: None)
    options = SimpleNamespace(config=SimpleNamespace())
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda: options), raising=False)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    p2p.P2PComm(Placement(2), 0, object(), torch.device("cuda", 0), [[0, 1]])  # type: ignore[arg-type]
    assert len(made) == 4 and {how["timeout"] for how in made} == {dist.distributed_c10d.default_pg_timeout}
    assert options.config.max_ctas == p2p.CTAS and all(how["pg_options"] is options for how in made)
