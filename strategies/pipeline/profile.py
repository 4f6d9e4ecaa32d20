"""What the stages of a pipeline did with a step's time, beside the theory: pure functions of measured spans."""

from __future__ import annotations

from typing import Any

from strategies.pipeline.schedules import chunks_of, make
from strategies.pipeline.simulate import Span, Times, bubble, bubble_by_formula, length, simulate

COMPUTE = "FBW"


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
    by_part = [[s for s in together if schedule.part(s.stage, s.chunk) == part] for part in range(schedule.parts)]
    forward, backward, weight = ([_mean(spans, kind) for spans in by_part] for kind in COMPUTE)
    values["pipeline/bubble_by_simulation"] = bubble(simulate(schedule, Times(forward, backward, weight)))
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
