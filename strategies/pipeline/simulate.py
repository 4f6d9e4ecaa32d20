"""Playing a schedule through without processes: can it deadlock, how long does it take; and what a real step took.

Each stage does its instructions in order. F of part k waits for F of part k-1 of the same micro-batch and for what it
put out to travel, B for B of part k+1 (of the last part: for its own F), W for nothing but its own B. That is all.

`figures` puts what the stages were measured to do beside the simulation and the papers' formula.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strategies.dims import LayoutError
from strategies.pipeline.schedules import Op, Schedule, chunks_of, make

COMPUTE = "FBW"


@dataclass(frozen=True)
class Span:
    """Something a stage did: F, B, W, SEND (handing it over, not its travel), RECV (waiting for a neighbour) or REDUCE;
    seconds from the step's start."""

    stage: int
    kind: str
    micro: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Times:
    """Seconds per micro-batch of each part: one number for all parts, or one per part. backward: to the input alone,
    weight: to the weights; a schedule that does not split has B take both. transfer: from one stage to the next."""

    forward: float | Sequence[float]
    backward: float | Sequence[float]
    weight: float | Sequence[float]
    transfer: float = 0.0

    def of(self, kind: str, part: int, split: bool) -> float:
        def at(value: float | Sequence[float]) -> float:
            return value[part] if isinstance(value, Sequence) else value

        if kind == "B" and not split:
            return at(self.backward) + at(self.weight)
        return at({"F": self.forward, "B": self.backward, "W": self.weight}[kind])


def simulate(schedule: Schedule, times: Times) -> list[Span]:
    """When each stage computes what, by start.

    Raises:
        LayoutError: the lists wait for each other, or for what no stage does.
    """
    ends: dict[tuple[str, int, int], float] = {}  # (kind, micro-batch, part) → when it is done
    clocks, done = [0.0] * schedule.stages, [0] * schedule.stages
    spans: list[Span] = []
    moved = True
    while moved:
        moved = False
        for stage, ops in enumerate(schedule.lists):
            while done[stage] < len(ops):
                op = ops[done[stage]]
                part = schedule.placement.part(stage, op.chunk)
                ready = _ready(schedule, op, part, ends, times.transfer)
                if ready is None:
                    break
                start = max(clocks[stage], ready)
                clocks[stage] = ends[op.kind, op.micro, part] = start + times.of(op.kind, part, schedule.split)
                spans.append(Span(stage, op.kind, op.micro, op.chunk, start, clocks[stage]))
                done[stage] += 1
                moved = True
    stuck = [f"stage {s} at {ops[done[s]]}" for s, ops in enumerate(schedule.lists) if done[s] < len(ops)]
    if stuck:
        raise LayoutError(f"schedule {schedule.name} deadlocks: {', '.join(stuck)} wait for each other")
    return sorted(spans, key=lambda span: (span.start, span.stage))


def _ready(
    schedule: Schedule, op: Op, part: int, ends: dict[tuple[str, int, int], float], transfer: float
) -> float | None:
    """When everything that the instruction waits for is there; None if something has not been done yet."""
    needs = [] if op.kind == "F" else [ends.get(("F" if op.kind == "B" else "B", op.micro, part))]
    before = part - 1 if op.kind == "F" else part + 1
    if op.kind != "W" and 0 <= before < schedule.placement.parts:
        end = ends.get((op.kind, op.micro, before))
        # a folded schedule turns on one stage
        here = schedule.placement.stage(before) == schedule.placement.stage(part)
        needs.append(end if end is None or here else end + transfer)
    return None if None in needs else max((need for need in needs if need is not None), default=0.0)


def length(spans: Sequence[Span]) -> float:
    """Seconds from the first start to the last end."""
    return max(span.end for span in spans) - min(span.start for span in spans)


def bubble(spans: Sequence[Span]) -> float:
    """The share of all stages' time in which they compute nothing, from the first start to the last end."""
    stages = len({span.stage for span in spans})
    busy = math.fsum(span.end - span.start for span in spans if span.kind in COMPUTE)
    return 1 - busy / (stages * length(spans))


def alive_by_formula(schedule: Schedule, stage: int) -> int:
    """The most activations (of one micro-batch and chunk) that the stage holds at once, as the papers say."""
    p, m, chunks = schedule.stages, schedule.micro_batches, schedule.chunks
    formulas = {
        "gpipe": m,
        "1f1b": p - stage,
        "interleaved_1f1b": (chunks - 1) * p + 2 * (p - stage) - 1,
        "zb_h1": p,
        "zb_h2": 2 * p - 1,
        "zbv": min(m, 2 * p - stage - 1) + stage + 1,  # 2p, once there are enough micro-batches
    }
    return min(formulas[schedule.name], m * chunks)


def bubble_by_formula(name: str, stages: int, micro_batches: int, chunks: int, times: Times) -> float:
    """The idle share that the papers give for equal parts and free transfers; times are of a whole stage's work."""
    f, b, w = (float(value) for value in (times.forward, times.backward, times.weight))  # type: ignore[arg-type]
    idle = {
        "gpipe": f + b + w,
        "1f1b": f + b + w,
        "interleaved_1f1b": (f + b + w) / chunks,
        "zb_h1": f + b - w,
        "zb_h2": f,
        "zbv": f / 2,
    }[name]
    idle *= stages - 1
    return idle / (idle + micro_batches * (f + b + w))


# --- beside what was measured -----------------------------------------------------------------------------------------


def figures(ranks: list[list[Span]], schedule_name: str, chunks_wanted: int) -> dict[str, float]:
    """The metrics of one step: per stage seconds of compute, of waiting for what neighbours send, of handing over what
    is sent to them (it travels while the stage computes on), and of reducing (means over its ranks); the share of the
    step in which stages compute nothing, and what that share would be by the schedule's formula and by
    playing the schedule through with the measured times."""
    values: dict[str, float] = {}
    stages = 1 + max(span.stage for spans in ranks for span in spans)
    for stage in range(stages):
        own = [spans for spans in ranks if spans[0].stage == stage]
        for heading in ("compute", "wait", "handover", "reduce"):
            seconds = sum(s.end - s.start for spans in own for s in spans if _heading(s.kind) == heading)
            values[f"pipeline/stage_{stage}/{heading}_seconds"] = seconds / len(own)
    together = [span for spans in ranks for span in spans if span.kind in COMPUTE]
    busy = sum(span.end - span.start for span in together)
    values |= {"pipeline/seconds": length(together), "pipeline/bubble": 1 - busy / (length(together) * len(ranks))}
    chunks = chunks_of(schedule_name, chunks_wanted)
    micros = 1 + max(span.micro for span in together)
    f, b, w = (_mean(together, kind) for kind in COMPUTE)
    whole = Times(f * chunks, b * chunks, w * chunks)
    values["pipeline/bubble_by_formula"] = bubble_by_formula(schedule_name, stages, micros, chunks, whole)
    schedule = make(schedule_name, stages, micros, chunks_wanted)
    by_part = [
        [s for s in together if schedule.placement.part(s.stage, s.chunk) == part]
        for part in range(schedule.placement.parts)
    ]
    forward, backward, weight = ([_mean(spans, kind) for spans in by_part] for kind in COMPUTE)
    values["pipeline/bubble_by_simulation"] = bubble(simulate(schedule, Times(forward, backward, weight)))
    return values


def _heading(kind: str) -> str:
    return "compute" if kind in COMPUTE else {"RECV": "wait", "SEND": "handover"}.get(kind, "reduce")


def _mean(spans: list[Span], kind: str) -> float:
    found = [span.end - span.start for span in spans if span.kind == kind]
    return sum(found) / len(found) if found else 0.0


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
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
