"""What the stages of a pipeline do with their time: measured in single steps, told as metrics beside the theory.

Every rank notes when it computed, waited and sent in a step that is profiled; the notes are put together here. The
clocks of different nodes are aligned by a barrier just before the first instruction, so times on different stages are
good to the barrier's own duration (tens of microseconds within a node, a round trip between nodes).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from app.config import Config
from app.job import Channel

if TYPE_CHECKING:
    from strategies.parallel import Parallel
    from strategies.pipeline.simulate import Span

COMPUTE = "FBW"
EARLY = 5
"""A step that is profiled as well, so that a short run has a profile."""
Report = Callable[[int, dict[str, float]], None]


class StageProfile:
    """Profiles every `every`-th step, an early one, and the step that is asked for as a trace."""

    def __init__(self, config: Config, parallel: Parallel, channel: Channel, replicas: int) -> None:
        self.config, self.parallel, self.channel, self.replicas = config, parallel, channel, replicas
        self.every, self.trace = config.parallel.profile_every, config.parallel.trace_step

    @classmethod
    def of(cls, config: Config, parallel: Parallel, channel: Channel) -> StageProfile | None:
        """None where there is nothing to profile, so that the loop has one thing to look at."""
        dims, wanted = parallel.layout.dims, config.parallel
        if dims.pp == 1 or not (wanted.profile_every or wanted.trace_step):
            return None
        return cls(config, parallel, channel, dims.world_size // dims.pp)

    def around(self, step: int, take: Callable[[], None], report: Report) -> None:
        """Takes a step; profiles it if it is due."""
        traced = step == self.trace
        due = self.every and (step % self.every == 0 or step == EARLY < self.every)
        if not (traced or due):
            take()
            return
        self.parallel.profiling = True
        try:
            take()
        finally:
            self.parallel.profiling = False
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [astuple(span) for span in self.parallel.profile()])
        from strategies.pipeline.simulate import Span

        ranks = [[Span(*span) for span in spans] for spans in everyone]
        report(step, figures(ranks, self.config))
        if traced:
            first = [span for spans in ranks[:: self.replicas] for span in spans]
            self.channel.emit({"type": "spans", "step": step, "spans": first})


def figures(ranks: list[list[Span]], config: Config) -> dict[str, float]:
    """The metrics of one step: per stage seconds of compute, of waiting for what neighbours send, of handing over what
    is sent to them (it travels while the stage computes on), and of reducing (means over its ranks); the share of the
    step in which stages compute nothing, and what that share would be by the schedule's formula and by
    playing the schedule through with the measured times."""
    from strategies.pipeline.schedules import chunks_of, make
    from strategies.pipeline.simulate import Times, bubble_by_formula, simulate
    from strategies.pipeline.simulate import bubble as idle_share

    totals: dict[tuple[int, str], float] = defaultdict(float)
    peers: dict[int, int] = defaultdict(int)
    for spans in ranks:
        for stage in {span.stage for span in spans}:
            peers[stage] += 1
        for span in spans:
            totals[span.stage, _heading(span.kind)] += span.end - span.start
    values: dict[str, float] = {}
    for stage, count in sorted(peers.items()):
        for heading in ("compute", "wait", "handover", "reduce"):
            values[f"pipeline/stage_{stage}/{heading}_seconds"] = totals[stage, heading] / count
    together = [span for spans in ranks for span in spans if span.kind in COMPUTE]
    if not together:
        return values
    seconds = max(span.end for span in together) - min(span.start for span in together)
    busy = sum(span.end - span.start for span in together)
    values |= {"pipeline/seconds": seconds, "pipeline/bubble": 1 - busy / (seconds * len(ranks))}
    wanted, stages = config.parallel, len(peers)
    chunks = chunks_of(wanted.schedule, wanted.chunks)
    micros = 1 + max(span.micro for span in together)
    f, b, w = (_mean(together, kind) for kind in COMPUTE)
    whole = Times(f * chunks, b * chunks, w * chunks)
    values["pipeline/bubble_by_formula"] = bubble_by_formula(wanted.schedule, stages, micros, chunks, whole)
    schedule = make(wanted.schedule, stages, micros, wanted.chunks)
    by_part = {
        (span_kind, schedule.part(stage, chunk)): _mean(
            [s for s in together if s.stage == stage and s.chunk == chunk], span_kind
        )
        for span_kind in COMPUTE
        for stage in range(stages)
        for chunk in range(schedule.chunks)
    }
    forward, backward, weight = ([by_part[kind, part] for part in range(schedule.parts)] for kind in COMPUTE)
    measured = Times(forward, backward, weight)
    values["pipeline/bubble_by_simulation"] = idle_share(simulate(schedule, measured))
    return values


def _heading(kind: str) -> str:
    return "compute" if kind in COMPUTE else {"RECV": "wait", "SEND": "handover"}.get(kind, "reduce")


def _mean(spans: list[Span], kind: str) -> float:
    found = [span.end - span.start for span in spans if span.kind == kind]
    return sum(found) / len(found) if found else 0.0


def chrome_trace(spans: list[Span]) -> dict[str, Any]:
    """For chrome://tracing or ui.perfetto.dev: a row per stage, what waits and is handed over in rows below it."""
    events: list[dict[str, Any]] = []
    for stage in sorted({span.stage for span in spans}):
        events.append({"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}})
    for span in spans:
        computes = span.kind in COMPUTE
        events.append(
            {
                "ph": "X",
                "name": f"{span.kind}{span.micro}" if span.micro >= 0 else span.kind,
                "cat": _heading(span.kind),
                "pid": span.stage,
                "tid": "compute" if computes else _heading(span.kind),
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"micro-batch": span.micro, "chunk": span.chunk},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
