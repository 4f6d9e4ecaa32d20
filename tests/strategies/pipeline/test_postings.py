"""No stage waits for what depends on itself: the runtime's requests to a GPU, without a GPU.

The runtime's own code runs with blocks that compute nothing, and what it requests is recorded,
stage by stage. Then the requests are played: a message needs both its ends, and at every request a
stage waits until all its earlier requests are over. No device waits for more than that, since it
would have to wait for what has not been requested.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from strategies.dims import LayoutError
from strategies.pipeline import p2p, runtime
from strategies.pipeline.interface import Placeholders, Signature
from strategies.pipeline.postings import (
    Message,
    PostedReceive,
    connections,
    endpoints,
    posted_receives,
)
from strategies.pipeline.schedules import SCHEDULES, Op, Placement, Schedule
from strategies.pipeline.simulate import Times, simulate
from strategies.pipeline.weight_grad import DeferredWeightGrad
from tests.strategies.pipeline.test_schedules import make_schedule, schedules_of

pytestmark = pytest.mark.pure

CPU = torch.device("cpu")

Connection = tuple[str, int, int]
"""(F or B, from, to)."""


class Request(NamedTuple):
    """What the runtime requests of a device.

    Attributes:
        kind: "send" or "receive".
        connection: The connection of the message.
        number: Which message of the connection it is.
    """

    kind: str
    connection: Connection
    number: int


class Recorder:
    """Stands in for torch.distributed and for a stage, and records what is requested."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.requests: list[Request] = []
        self.counts: Counter[tuple[str, Connection]] = Counter()
        self.output = torch.zeros(0, requires_grad=True)
        self._module = torch.nn.Identity()

    # --- torch.distributed ---

    def get_process_group_ranks(self, group: Any) -> range:
        return range(100)

    def isend(self, tensor: Any, rank: int, group: Any, tag: int) -> Any:
        return self._record("send", ("FB"[tag], self.stage, rank))

    def irecv(self, tensor: Any, rank: int, group: Any, tag: int) -> Any:
        return self._record("receive", ("FB"[tag], rank, self.stage))

    # Connections are opened by these.
    send = isend
    recv = irecv

    def _record(self, kind: str, connection: Connection) -> Any:
        number = self.counts[kind, connection]
        self.counts[kind, connection] += 1
        self.requests.append(Request(kind, connection, number))
        return SimpleNamespace(wait=lambda: None)

    # --- a stage ---

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


def _runtime_of(recorder: Recorder, schedule: Schedule) -> runtime.Runtime:
    """The runtime of the recorder's stage; the recorder must stand in for torch.distributed."""
    group: Any = None
    comm = p2p.P2PComm(schedule.placement, recorder.stage, group=group, device=CPU, pipelines=[])
    return runtime.Runtime(
        recorder,
        comm,
        schedule.placement,
        autocast=contextlib.nullcontext,
        wire=None,
        sync=None,
        deferred=DeferredWeightGrad(),
    )


def _requests_of(
    schedule: Schedule,
    stage: int,
    receives: Sequence[PostedReceive],
    *,
    steps: int,
    odd_shapes: int,
) -> list[Request]:
    """What a stage requests in a few steps.

    Args:
        schedule: The schedule.
        stage: The stage.
        receives: When it posts its receives.
        steps: The number of steps.
        odd_shapes: How many of the last micro-batches have other shapes.
    """
    recorder = Recorder(stage)
    count = schedule.micro_batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p, "dist", recorder)
        patch.setattr(p2p, "decode", lambda _: (p2p.TensorMeta.of(recorder.output, None),))
        patch.setattr(runtime, "seed_generators", lambda *_: None)
        patch.setattr(torch.autograd, "backward", lambda *_: None)
        patch.setattr(runtime.weight_grad, "finish", lambda _: None)
        stage_runtime = _runtime_of(recorder, schedule)
        key = (schedule.name, count, schedule.chunks)
        stage_runtime._posted_receives[key] = tuple(receives)
        signatures: list[Signature] = [("usual",)] * (count - odd_shapes)
        signatures += [("odd",)] * odd_shapes
        loss: Any = None
        step = runtime.Step(
            batches=[None] * count,
            weights=[1.0] * count,
            factors=[1.0] * count,
            signatures=signatures,
            loss=loss,
        )
        for _ in range(steps):
            stage_runtime.step(schedule, step)
    return recorder.requests


def _all_stages_finish(
    schedule: Schedule,
    receives_by_stage: Iterable[Sequence[PostedReceive]],
    *,
    steps: int = 1,
    odd_shapes: int = 0,
) -> bool:
    """Whether all requests get done.

    A message passes if it is the next request of both its ends.
    """
    waiting = []
    for stage, receives in enumerate(receives_by_stage):
        waiting.append(_requests_of(schedule, stage, receives, steps=steps, odd_shapes=odd_shapes))
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for requests in waiting:
            while requests and _passes(requests[0], waiting):
                send = requests.pop(0)
                _, _, receiver = send.connection
                waiting[receiver].pop(0)
                has_progressed = True
    return not any(waiting)


def _passes(request: Request, waiting: list[list[Request]]) -> bool:
    """Whether a request is a send whose receiver waits for it."""
    if request.kind != "send":
        return False
    _, _, receiver = request.connection
    return waiting[receiver][:1] == [request._replace(kind="receive")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_stage_waits_for_what_depends_on_itself(name: str) -> None:
    """Mostly in a first step: once shapes are known, stages wait for less."""
    for schedule in schedules_of(name):
        count = schedule.micro_batches
        is_done = _all_stages_finish(
            schedule,
            posted_receives(schedule),
            steps=2 if count == 4 else 1,
            odd_shapes=1 if count % 4 == 3 else 0,
        )
        assert is_done, str(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_that_posted_receives_earlier_would_deadlock(name: str) -> None:
    chunks = 2 if name in ("interleaved_1f1b", "zbv") else 1
    schedule = make_schedule(name, stages=4, micro_batches=8, chunks=chunks)
    early_receives = []
    for receives in posted_receives(schedule):
        early_receives.append(
            [replace(receive, after_ops=max(0, receive.after_ops - 2)) for receive in receives]
        )
    assert not _all_stages_finish(schedule, early_receives)


def test_a_block_that_returns_another_number_of_tensors_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(0)
    monkeypatch.setattr(p2p, "dist", recorder)
    schedule = make_schedule("1f1b", stages=2, micro_batches=2)
    stage_runtime = _runtime_of(recorder, schedule)
    outputs = [torch.zeros(2, 3), torch.zeros(5)]
    stage_runtime._send_outputs(outputs, Op("F", 0), 0, signature=("training",))
    sentence = r"block 0 returns no tensor for one batch and \(5,\) float32 for another"
    with pytest.raises(LayoutError, match=sentence):
        stage_runtime._send_outputs(outputs[:1], Op("F", 1), 0, signature=("training",))


# --- posted receives ------------------------------------------------------------------------------


def _sent_at(schedule: Schedule, transfer: float) -> dict[Message, float]:
    """When each message between parts could be sent, of equal stages."""
    placement = schedule.placement
    times = {}
    for span in simulate(schedule, Times.equal(1.0, transfer=transfer)):
        part = placement.part_at(span.stage, span.chunk)
        boundary = part - 1 if span.kind == "B" else part
        if span.kind != "W" and 0 <= boundary < placement.parts - 1:
            times[Message(span.kind, boundary, span.micro_batch)] = span.end
    return times


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfer", [0.05, 0.2])
def test_each_message_is_received_once_and_in_the_order_of_its_connection(
    name: str, transfer: float
) -> None:
    for schedule in itertools.islice(schedules_of(name), 0, None, 3):
        placement = schedule.placement
        sent_at = _sent_at(schedule, transfer)
        for stage, receives in enumerate(posted_receives(schedule)):
            messages = [receive.message for receive in receives]
            expected = []
            for message in sent_at:
                source, destination = endpoints(placement, message)
                if destination == stage and source != stage:
                    expected.append(message)
            assert Counter(messages) == Counter(expected)
            delivered = [message for receive in receives for message in receive.delivered]
            assert len(delivered) == len(set(delivered))
            for message in delivered:
                assert endpoints(placement, message)[0] == stage
            for kind, source in itertools.product("FB", range(placement.stages)):
                times = []
                for message in messages:
                    is_of_connection = endpoints(placement, message)[0] == source
                    if message.kind == kind and is_of_connection:
                        times.append(sent_at[message])
                assert times == sorted(times), (kind, source)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfer", [0.05, 0.2])
def test_receives_are_posted_in_time_if_the_pipeline_is_ever_full(
    name: str, transfer: float
) -> None:
    for schedule in itertools.islice(schedules_of(name), 0, None, 3):
        stages = schedule.placement.stages
        if schedule.micro_batches < 2 * stages:
            continue
        spans = simulate(schedule, Times.equal(1.0, transfer=transfer))
        sent_at = _sent_at(schedule, transfer)
        for stage, receives in enumerate(posted_receives(schedule)):
            ends = [0.0, *(span.end for span in spans if span.stage == stage)]
            for receive in receives:
                assert ends[receive.after_ops] <= sent_at[receive.message] + 1e-9


def test_the_receives_of_a_small_schedule_are_those_worked_out_by_hand() -> None:
    """Stage 0 does F0 F1 B0 F2 B1 B2; stage 1, one forward later, F0 B0 F1 B1 F2 B2.

    B takes twice as long as F.
    """
    schedule = make_schedule("1f1b", stages=2, micro_batches=3)
    receives_by_stage = []
    for receives in posted_receives(schedule):
        readable = []
        for receive in receives:
            op = Op(receive.message.kind, receive.message.micro_batch)
            readable.append((str(op), receive.after_ops, receive.delivered))
        receives_by_stage.append(readable)
    assert receives_by_stage == [
        [
            ("B0", 2, (("F", 0, 0),)),
            ("B1", 3, (("F", 0, 1),)),
            ("B2", 5, (("F", 0, 2),)),
        ],
        [
            ("F0", 0, ()),
            ("F1", 0, ()),
            ("F2", 4, (("B", 0, 0),)),
        ],
    ]


# --- connections ----------------------------------------------------------------------------------

_DOWN = {("F", 0, 1), ("F", 1, 2), ("F", 2, 3)}
_UP = {("F", 1, 0), ("F", 2, 1), ("F", 3, 2)}


@pytest.mark.parametrize(
    ("chunks", "is_folded", "forward"),
    [(1, False, _DOWN), (3, False, _DOWN | {("F", 3, 0)}), (2, True, _DOWN | _UP)],
)
def test_every_connection_is_opened_once_by_both_its_ends(
    chunks: int, is_folded: bool, forward: set[Connection]
) -> None:
    opened = connections(Placement(4, chunks, is_folded))
    backward = {("B", destination, source) for _, source, destination in forward}
    assert len(opened) == len(set(opened))
    assert set(opened) == forward | backward
    forward_sources = [source for kind, source, _ in opened if kind == "F"]
    assert [source % 2 for source in forward_sources[:2]] == [0, 0], "two open at once"


def test_nccls_groups_have_the_timeout_of_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default they have 10 minutes, other groups 30."""
    options = SimpleNamespace(config=SimpleNamespace())
    nccl = SimpleNamespace(Options=lambda: options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    calls: list[tuple[Any, dict[str, Any]]] = []

    def new_group(ranks: Any, **arguments: Any) -> str:
        calls.append((ranks, arguments))
        return "group"

    monkeypatch.setattr(p2p, "group_of_this_rank", new_group)
    p2p._new_group([(0, 1), (2, 3)])
    timeout = dist.distributed_c10d.default_pg_timeout
    expected = {"backend": "nccl", "pg_options": options, "timeout": timeout}
    assert calls == [([[0, 1], [2, 3]], expected)]
    assert options.config.max_ctas == p2p.MAX_CTAS
