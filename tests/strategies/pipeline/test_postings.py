"""No stage waits for what depends on itself: what the runtime asks of a GPU in a step, played through (devices.py)."""

import contextlib
import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from strategies.layout import LayoutError
from strategies.pipeline import p2p, schedules, timeline
from strategies.pipeline.postings import Arrival, arrivals, connections, ends
from strategies.pipeline.schedules import SCHEDULES, Op, Placement, Schedule
from strategies.pipeline.simulate import Times, length, simulate
from strategies.pipeline.timeline import Timeline
from tests.strategies.pipeline.devices import FakeEvent, events_of, finishes


def _schedules(name: str) -> Iterator[Schedule]:
    for stages, micro_batches, chunks in itertools.product(range(2, 9), range(2, 17), (1, 2, 3)):
        with contextlib.suppress(LayoutError):
            if name != "zbv" or chunks == 2:
                yield schedules.make.__wrapped__(name, stages, micro_batches, chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_stage_waits_for_what_depends_on_itself(name: str) -> None:
    """In the strict model, and a first step: in others, and where shapes are known, less is waited for."""
    for schedule in _schedules(name):
        how = {"steps": 2 if schedule.micro_batches == 4 else 1, "ragged": schedule.micro_batches % 4 == 3}
        programs = [events_of(schedule, stage, order, **how) for stage, order in enumerate(arrivals(schedule))]
        assert finishes(programs, "strict"), (name, schedule.stages, schedule.micro_batches, schedule.chunks)
        again = [events_of(schedule, i, order, **how, profiled=True) for i, order in enumerate(arrivals(schedule))]
        assert again == programs, "a profiled step asks a GPU for the same, and waits for nothing more"


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
    programs = [events_of(schedule, stage, _three_ahead(schedule, stage), known=True) for stage in range(4)]
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
