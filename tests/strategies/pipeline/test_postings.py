"""No stage waits for what depends on itself: what the runtime asks of a GPU in a step, played through without one.

The runtime's own code is run with blocks that compute nothing, and what it asks for is noted, stage by stage. Then it
is played through: a message needs both its ends, and a stage waits, at everything that it asks for, until all that it
has asked for before is over. No device waits for more: it would have to wait for what it has not been asked for.
"""

import contextlib
import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from strategies.dims import LayoutError
from strategies.pipeline import p2p, runtime
from strategies.pipeline.interface import Placeholders, Signature
from strategies.pipeline.postings import Message, PostedReceive, connections, endpoints, posted_receives
from strategies.pipeline.schedules import SCHEDULES, Op, Placement, Schedule
from strategies.pipeline.simulate import Times, simulate
from strategies.pipeline.weight_grad import DeferredWeightGrad
from tests.strategies.pipeline.test_schedules import every, make

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")


class Recorder:
    """In the place of torch.distributed and of a stage, of which it notes what passes between stages: send or receive,
    and ((F or B, from, to), which message on this connection)."""

    def __init__(self, stage: int) -> None:
        self.stage, self.events = stage, list[tuple[str, Any]]()
        self.count: Counter[Any] = Counter()
        self.output = torch.zeros(0, requires_grad=True)
        self._module = torch.nn.Identity()

    def get_process_group_ranks(self, group: Any) -> range:
        return range(100)

    def isend(self, tensor: Any, rank: int, group: Any, tag: int) -> Any:
        return self._note("send", ("FB"[tag], self.stage, rank))

    def irecv(self, tensor: Any, rank: int, group: Any, tag: int) -> Any:
        return self._note("receive", ("FB"[tag], rank, self.stage))

    send, recv = isend, irecv  # as connections are opened

    def _note(self, what: str, connection: Any) -> Any:
        self.events.append((what, (connection, self.count[what, connection])))
        self.count[what, connection] += 1
        return SimpleNamespace(wait=lambda: None)

    @property
    def module(self) -> torch.nn.Module:
        return self._module

    @property
    def parts(self) -> frozenset[int]:
        return frozenset()

    @property
    def state_names(self) -> frozenset[str]:
        return frozenset()

    def last_block(self, part: int) -> str:
        return str(part)

    def signature(self, batch: object) -> Signature:
        return ()

    def placeholders(self, *_: Any) -> Placeholders:
        return {}

    def run(self, *_: Any, **__: Any) -> Any:
        return torch.zeros(()), [self.output]


def runtime_of(recorder: Recorder, schedule: Schedule) -> runtime.Runtime:
    """What runs the schedule on the recorder's stage, while the recorder is in torch.distributed's place."""
    group: Any = None
    return runtime.Runtime(
        recorder,
        p2p.P2PComm(schedule.placement, recorder.stage, group=group, device=CPU, pipelines=[]),
        schedule.placement,
        autocast=contextlib.nullcontext,
        wire=None,
        sync=None,
        deferred=DeferredWeightGrad(),
    )


def events_of(schedule: Schedule, stage: int, order: tuple[PostedReceive, ...], steps: int, rest: int) -> list[Any]:
    """rest: so many of the last micro-batches have other shapes."""
    recorder, count = Recorder(stage), schedule.micro_batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "dist", recorder)
        patch.setattr(p2p, "decode", lambda _: (p2p.TensorMeta.of(recorder.output, None),))
        patch.setattr(runtime, "seed_generators", lambda *_: None)
        patch.setattr(torch.autograd, "backward", lambda *_: None)
        patch.setattr(runtime.weight_grad, "finish", lambda _: None)
        made = runtime_of(recorder, schedule)
        made._posted_receives[schedule.name, count, schedule.chunks] = order
        signatures: list[Signature] = [("whole",)] * (count - rest) + [("rest",)] * rest
        loss: Any = None
        step = runtime.Step(
            batches=[None] * count,
            weights=[1.0] * count,
            factors=[1.0] * count,
            signatures=signatures,
            loss=loss,
        )
        for _ in range(steps):
            made.step(schedule, step)
    return recorder.events


def test_another_number_of_outputs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(0)
    monkeypatch.setattr(p2p, "dist", recorder)
    made = runtime_of(recorder, make("1f1b", stages=2, micro_batches=2))
    outputs = [torch.zeros(2, 3), torch.zeros(5)]
    made._send_outputs(outputs, Op("F", 0), 0, signature=("training",))
    sentence = r"block 0 puts out no tensor for one batch and \(5,\) float32 for another"
    with pytest.raises(LayoutError, match=sentence):
        made._send_outputs(outputs[:1], Op("F", 1), 0, signature=("training",))


def finishes(schedule: Schedule, orders: Any, steps: int = 1, rest: int = 0) -> bool:
    """Whether all stages get through what they ask for: a message goes when it is the next of both its ends."""
    left = [events_of(schedule, stage, tuple(order), steps, rest) for stage, order in enumerate(orders)]
    moved = True
    while moved:
        moved = False
        for events in left:
            while events and events[0][0] == "send" and left[events[0][1][0][2]][:1] == [("receive", events[0][1])]:
                del left[events.pop(0)[1][0][2]][0]
                moved = True
    return not any(left)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_stage_waits_for_what_depends_on_itself_but_would_if_it_asked_earlier(name: str) -> None:
    """In a first step: where shapes are known, less is waited for."""
    for schedule in every(name):
        micro_batches = schedule.micro_batches
        found = finishes(schedule, posted_receives(schedule), 1 + (micro_batches == 4), micro_batches % 4 == 3)
        assert found, (name, schedule.stages, micro_batches, schedule.chunks)
    chunks = 2 if name in ("interleaved_1f1b", "zbv") else 1
    schedule = make(name, stages=4, micro_batches=8, chunks=chunks)
    early = [
        [replace(receive, after_ops=max(0, receive.after_ops - 2)) for receive in receives]
        for receives in posted_receives(schedule)
    ]
    assert not finishes(schedule, early), "two instructions earlier"


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_sent_is_asked_for_once_in_order_and_with_equal_parts_in_time(name: str) -> None:
    for schedule, transfer in itertools.product(itertools.islice(every(name), 0, None, 3), (0.05, 0.2)):
        place, spans = schedule.placement, simulate(schedule, Times.equal(1.0, transfer=transfer))
        ended = [[0.0, *(span.end for span in spans if span.stage == stage)] for stage in range(place.stages)]
        gave = {Message(s.kind, place.part_at(s.stage, s.chunk) - (s.kind == "B"), s.micro_batch): s.end for s in spans}
        crosses = [key for key in gave if key[0] != "W" and 0 <= key[1] < place.parts - 1]
        for stage, coming in enumerate(posted_receives(schedule)):
            keys, freed = [one.message for one in coming], [key for one in coming for key in one.delivered]
            assert Counter(keys) == Counter(
                k for k in crosses if endpoints(place, k)[1] == stage != endpoints(place, k)[0]
            )
            assert len(freed) == len(set(freed)) and all(endpoints(place, key)[0] == stage for key in freed)
            in_time = all(ended[stage][one.after_ops] <= gave[one.message] + 1e-9 for one in coming)
            assert in_time or schedule.micro_batches < 2 * place.stages, "the pipe is never full"
            for way in itertools.product("FB", range(place.stages)):
                own = [gave[key] for key in keys if (key[0], endpoints(place, key)[0]) == way]
                assert own == sorted(own), way


def test_a_small_schedule_by_hand() -> None:
    """Stage 0: F0 F1 B0 F2 B1 B2; stage 1, a forward later: F0 B0 F1 B1 F2 B2. B takes twice as long as F."""
    found = [
        [(str(Op(r.message.kind, r.message.micro_batch)), r.after_ops, r.delivered) for r in receives]
        for receives in posted_receives(make("1f1b", stages=2, micro_batches=3))
    ]
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


def test_nccls_groups_may_take_as_long_as_others_for_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have 10 minutes unless they are told, others 30."""
    options = SimpleNamespace(config=SimpleNamespace())
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=lambda: options), raising=False)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    long = dist.distributed_c10d.default_pg_timeout
    made: list[tuple[Any, Any]] = []
    monkeypatch.setattr(p2p, "group_of_this_rank", lambda ranks, **how: made.append((ranks, how)) or "group")
    p2p._new_group([(0, 1), (2, 3)])
    assert made == [([[0, 1], [2, 3]], {"backend": "nccl", "pg_options": options, "timeout": long})]
    assert options.config.max_ctas == p2p.MAX_CTAS
