"""What the pipeline's runtime asks of GPUs in a step, noted and played through without one.

The runtime's own code is run with blocks that compute nothing, and what it asks for is noted, stage by stage. A model
of devices then says whether all of it can be done. A device has a stream of computation and one for each connection and
direction, each in order; a message needs both its ends at the heads of their streams. The host waits for its device

    eager    nowhere but where the runtime does (it reads the shapes of the first messages)
    lazy     as well before the first of each kind of instruction, which loads its kernels
    strict   as well before everything that it asks of it: computation, sends and receives
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strategies.pipeline import p2p, runtime, timeline
from strategies.pipeline.postings import Arrival
from strategies.pipeline.schedules import Schedule
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
def recorded(recorder: Recorder) -> Iterator[None]:
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


def events_of(
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
    with recorded(recorder):
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
