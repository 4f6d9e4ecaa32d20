"""How long a schedule takes: simulated, by the papers' formulas, and as a real step measured it.

The simulation needs no processes. Each stage does its instructions in order, and an instruction
starts as soon as its inputs are there:

- F of part k waits for F of part k-1 of the same micro-batch, and for its output to be sent;
- B of part k waits for B of part k+1, and for its gradient to be sent; B of the last part waits for
  its own F;
- W waits for its own B only.

A schedule in which no stage can go on deadlocks, which the simulation reports.

`pipeline_metrics` compares what was measured in the stages of a real step with the simulation and
the formulas.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strategies.dims import LayoutError
from strategies.pipeline.schedules import (
    Op,
    Placement,
    Schedule,
    chunks_per_stage,
    make_schedule,
)

COMPUTE = "FBW"
"""The kinds of span in which a stage computes."""
_HEADINGS = {
    "F": "compute",
    "B": "compute",
    "W": "compute",
    "RECV": "wait",
    "SEND": "handover",
    "REDUCE": "reduce",
    "BLOCK": "blocks",
}
"""What metrics and traces call each kind of span."""
Finished = dict[tuple[str, int, int], float]
"""(kind, micro-batch, part) → the second at which that instruction ended."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a stage did.

    Args:
        stage: Number of the stage.
        kind: F, B, W, SEND (handing a message over, not its travel), RECV (waiting for a message),
            REDUCE (waiting for gradients to be reduced) or BLOCK (a block's forward, within an F).
        micro_batch: Number of the micro-batch; -1 for REDUCE.
        chunk: Which of the stage's chunks.
        start: Seconds from the start of the step.
        end: Seconds from the start of the step.
        block: The name of the block's call; "" for other kinds.
    """

    stage: int
    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float
    block: str = ""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def heading(self) -> str:
        """What metrics and traces call its kind: compute, wait, handover, reduce or blocks."""
        return _HEADINGS[self.kind]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds per micro-batch, as one number for all parts or one for each part.

    Args:
        forward: Of F.
        backward: Of the gradient of a part's input.
        weight: Of the gradients of a part's weights. B of a schedule that does not split backward
            takes `backward` and `weight` together.
        transfer: Of sending an activation or a gradient from one stage to the next.
    """

    forward: float | Sequence[float]
    backward: float | Sequence[float]
    weight: float | Sequence[float]
    transfer: float = 0.0

    @classmethod
    def equal(cls, seconds: float, transfer: float = 0.0) -> "Times":
        """F, B and W take equally long."""
        return cls(forward=seconds, backward=seconds, weight=seconds, transfer=transfer)

    def of(self, kind: str, part: int, splits_backward: bool) -> float:
        """Seconds of one instruction.

        Args:
            kind: F, B or W.
            part: The part that computes it.
            splits_backward: Whether the schedule has W.
        """
        if kind == "F":
            return _of_part(self.forward, part)
        if kind == "W":
            return _of_part(self.weight, part)
        if splits_backward:
            return _of_part(self.backward, part)
        return _of_part(self.backward, part) + _of_part(self.weight, part)


def _of_part(seconds: float | Sequence[float], part: int) -> float:
    return seconds[part] if isinstance(seconds, Sequence) else seconds


def _of_all_parts(seconds: float | Sequence[float]) -> float:
    assert not isinstance(seconds, Sequence), "the formulas hold for equal parts"
    return seconds


# --- simulation -----------------------------------------------------------------------------------


def simulate(schedule: Schedule, times: Times) -> list[Span]:
    """Play a schedule through.

    Returns:
        What every stage computes when, sorted by start.

    Raises:
        LayoutError: Stages wait for each other, or for something that no stage does.
    """
    finished: Finished = {}
    clocks = [0.0] * schedule.stages
    done = [0] * schedule.stages
    spans: list[Span] = []
    has_progress = True
    while has_progress:
        has_progress = False
        for stage, ops in enumerate(schedule.ops):
            while done[stage] < len(ops):
                op = ops[done[stage]]
                part = schedule.placement.part_at(stage, op.chunk)
                ready = _ready_at(schedule, op, finished, part=part, transfer=times.transfer)
                if ready is None:
                    break
                start = max(clocks[stage], ready)
                end = start + times.of(op.kind, part, schedule.splits_backward)
                clocks[stage] = end
                finished[op.kind, op.micro_batch, part] = end
                spans.append(
                    Span(
                        stage=stage,
                        kind=op.kind,
                        micro_batch=op.micro_batch,
                        chunk=op.chunk,
                        start=start,
                        end=end,
                    )
                )
                done[stage] += 1
                has_progress = True
    _require_finished(schedule, done)
    return sorted(spans, key=lambda span: (span.start, span.stage))


def _require_finished(schedule: Schedule, done: list[int]) -> None:
    stuck = [
        f"stage {stage} at {ops[done[stage]]}"
        for stage, ops in enumerate(schedule.ops)
        if done[stage] < len(ops)
    ]
    if stuck:
        raise LayoutError(
            f"schedule {schedule.name} deadlocks: {', '.join(stuck)} wait for each other"
        )


def _ready_at(
    schedule: Schedule, op: Op, finished: Finished, *, part: int, transfer: float
) -> float | None:
    """The second at which an instruction's inputs are there; None if one is not computed yet."""
    inputs: list[float | None] = []
    if op.kind == "B":
        inputs.append(finished.get(("F", op.micro_batch, part)))
    if op.kind == "W":
        inputs.append(finished.get(("B", op.micro_batch, part)))
    source = part - 1 if op.kind == "F" else part + 1
    if op.kind != "W" and 0 <= source < schedule.placement.parts:
        end = finished.get((op.kind, op.micro_batch, source))
        # At the turn of a V, both parts are on the same stage and nothing is sent.
        placement = schedule.placement
        is_sent = placement.stage_of(source) != placement.stage_of(part)
        if end is not None and is_sent:
            end += transfer
        inputs.append(end)
    ready = 0.0
    for end in inputs:
        if end is None:
            return None
        ready = max(ready, end)
    return ready


def step_seconds(spans: Sequence[Span]) -> float:
    """Seconds from the first start to the last end."""
    return max(span.end for span in spans) - min(span.start for span in spans)


def bubble(spans: Sequence[Span]) -> float:
    """The share of all stages' time, from the first start to the last end, without computation."""
    stages = len({span.stage for span in spans})
    busy = math.fsum(span.seconds for span in spans if span.kind in COMPUTE)
    return 1 - busy / (stages * step_seconds(spans))


def drawing(schedule: Schedule) -> str:
    """A schedule as text: a line per stage, a column per unit of time.

    F, B and W take one unit each, B without W two, and transfers none. Chunk 1 is marked by a
    prime.
    """
    spans = simulate(schedule, Times.equal(1.0))
    columns = round(step_seconds(spans))
    rows = [["·"] * columns for _ in range(schedule.stages)]
    for span in spans:
        start = round(span.start)
        end = round(span.end)
        name = f"{span.kind}{span.micro_batch}" + "'" * span.chunk
        rows[span.stage][start:end] = [name] + ["──"] * (end - start - 1)
    width = 3 if schedule.chunks == 1 else 4
    lines = []
    for stage, row in enumerate(rows):
        cells = "".join(cell.ljust(width) for cell in row)
        lines.append(f"stage {stage}  {cells}".rstrip())
    return "\n".join(lines)


# --- formulas -------------------------------------------------------------------------------------


def activations_by_formula(
    name: str, *, stages: int, micro_batches: int, chunks: int, stage: int
) -> int:
    """The most activations that a stage holds at once, by the papers' formulas.

    Args:
        name: The schedule's.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Number of chunks on each stage.
        stage: Number of the stage in question.

    Returns:
        The number of activations, each of one micro-batch and one chunk.
    """
    formulas = {
        "gpipe": micro_batches,
        "1f1b": stages - stage,
        "interleaved_1f1b": (chunks - 1) * stages + 2 * (stages - stage) - 1,
        "zb_h1": stages,
        "zb_h2": 2 * stages - 1,
        # 2 · stages, if there are enough micro-batches
        "zbv": min(micro_batches, 2 * stages - stage - 1) + stage + 1,
    }
    return min(formulas[name], micro_batches * chunks)


SCHEDULED_PER_STAGE = 4
"""Micro-batches for each stage with which a schedule reaches its most activations.

A stage holds those of fewer than 2 · stages at once, and what follows repeats.
"""


@functools.cache
def backward_moments(
    name: str, *, stages: int, micro_batches: int, chunks: int, stage: int
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The activations that a stage holds each time that a chunk begins a backward.

    Args:
        name: The schedule's.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Number of chunks on each stage.
        stage: Number of the stage in question.

    Returns:
        The distinct pairs of the chunk that goes backward, and for each chunk the number of
        micro-batches whose activations are held, this one's included.
    """
    if name != "gpipe":  # which holds those of all micro-batches
        micro_batches = min(micro_batches, SCHEDULED_PER_STAGE * stages)
    schedule = make_schedule(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
    last = "W" if schedule.splits_backward else "B"
    live = [0] * schedule.chunks
    moments = set()
    for op in schedule.ops[stage]:
        if op.kind == "F":
            live[op.chunk] += 1
        elif op.kind == "B":
            moments.add((op.chunk, tuple(live)))
        if op.kind == last:
            live[op.chunk] -= 1
    return tuple(sorted(moments))


def bubble_by_formula(
    name: str, *, stages: int, micro_batches: int, chunks: int, times: Times
) -> float:
    """The bubble's share of a step, by the papers' formulas.

    Args:
        name: The schedule's.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Number of chunks on each stage.
        times: Of all of a stage's chunks together. The formulas hold for stages that take equally
            long and for free transfers.
    """
    forward = _of_all_parts(times.forward)
    backward = _of_all_parts(times.backward)
    weight = _of_all_parts(times.weight)
    busy = forward + backward + weight
    idle_per_stage = {
        "gpipe": busy,
        "1f1b": busy,
        "interleaved_1f1b": busy / chunks,
        "zb_h1": forward + backward - weight,
        "zb_h2": forward,
        "zbv": forward / 2,
    }
    idle = idle_per_stage[name] * (stages - 1)
    return idle / (idle + micro_batches * busy)


# --- a measured step ------------------------------------------------------------------------------


def pipeline_metrics(
    spans_by_rank: Sequence[Sequence[Span]], schedule_name: str, chunks: int
) -> dict[str, float]:
    """The metrics of one measured step.

    Args:
        spans_by_rank: The spans of every rank, of which there is at least one.
        schedule_name: `parallel.schedule`.
        chunks: `parallel.chunks`.

    Returns:
        `pipeline/stage_N/…_seconds`, means over the ranks of a stage, of: compute; wait (for
        messages of neighbours); handover (of messages, which travel while the stage computes on);
        reduce. `pipeline/seconds` of the step. `pipeline/bubble`, the share of it in which stages
        compute nothing; `pipeline/bubble_by_formula` and `pipeline/bubble_by_simulation`, what that
        share would be with the measured times by the formula and by the simulation.
    """
    metrics: dict[str, float] = {}
    stages = 1 + max(span.stage for spans in spans_by_rank for span in spans)
    for stage in range(stages):
        ranks_of_stage = [spans for spans in spans_by_rank if spans[0].stage == stage]
        spans_of_stage = [span for spans in ranks_of_stage for span in spans]
        for heading in ("compute", "wait", "handover", "reduce"):
            seconds = sum(span.seconds for span in spans_of_stage if span.heading == heading)
            metrics[f"pipeline/stage_{stage}/{heading}_seconds"] = seconds / len(ranks_of_stage)

    computing = [span for spans in spans_by_rank for span in spans if span.kind in COMPUTE]
    total_seconds = step_seconds(computing)
    busy = sum(span.seconds for span in computing)
    metrics["pipeline/seconds"] = total_seconds
    metrics["pipeline/bubble"] = 1 - busy / (total_seconds * len(spans_by_rank))

    micro_batches = 1 + max(span.micro_batch for span in computing)
    chunks = chunks_per_stage(schedule_name, chunks)
    metrics["pipeline/bubble_by_formula"] = bubble_by_formula(
        schedule_name,
        stages=stages,
        micro_batches=micro_batches,
        chunks=chunks,
        times=Times(
            forward=_mean_seconds(computing, "F") * chunks,
            backward=_mean_seconds(computing, "B") * chunks,
            weight=_mean_seconds(computing, "W") * chunks,
        ),
    )

    schedule = make_schedule(
        schedule_name, stages=stages, micro_batches=micro_batches, chunks=chunks
    )
    placement = schedule.placement
    spans_by_part: list[list[Span]] = [[] for _ in range(placement.parts)]
    for span in computing:
        spans_by_part[placement.part_at(span.stage, span.chunk)].append(span)
    times = Times(
        forward=[_mean_seconds(spans, "F") for spans in spans_by_part],
        backward=[_mean_seconds(spans, "B") for spans in spans_by_part],
        weight=[_mean_seconds(spans, "W") for spans in spans_by_part],
    )
    metrics["pipeline/bubble_by_simulation"] = bubble(simulate(schedule, times))
    return metrics


@dataclass(frozen=True, kw_only=True)
class BlockSeconds:
    """What the pieces of a pipeline's model compute in one step, in seconds.

    Args:
        before: What is before the first block, such as an embedding.
        blocks: Each block, first to last.
        after: What is after the last block, such as a head and the loss.
    """

    before: float
    blocks: tuple[float, ...]
    after: float

    def of_parts(self, sizes: Sequence[int]) -> list[float]:
        """What the parts compute if the blocks are divided so.

        Args:
            sizes: The number of blocks in each part, first to last.
        """
        parts = []
        end = 0
        for size in sizes:
            parts.append(sum(self.blocks[end : end + size]))
            end += size
        parts[0] += self.before
        parts[-1] += self.after
        return parts


def seconds_by_block(
    spans_by_rank: Sequence[Sequence[Span]], schedule_name: str, chunks: int
) -> BlockSeconds:
    """Seconds that the blocks of the model, and what is around them, have computed in one step.

    Only a block's forward is timed by itself. Its backward is assumed to take the same share of its
    part's computation as its forward. What the first part computes outside of its blocks counts as
    before the blocks, and what the last part computes so counts as after them. In the parts
    between, it is counted with the part's blocks.

    Args:
        spans_by_rank: The spans of every rank of one measured step; there is at least one of each.
        schedule_name: `parallel.schedule`.
        chunks: `parallel.chunks`.

    Returns:
        Means over the ranks that compute a part.
    """
    stages = 1 + max(span.stage for spans in spans_by_rank for span in spans)
    placement = Placement.of(schedule_name, stages, chunks_per_stage(schedule_name, chunks))
    ranks_of_stage = len(spans_by_rank) / stages
    computing = [0.0] * placement.parts
    forward = [0.0] * placement.parts
    forward_of_blocks: list[dict[str, float]] = [{} for _ in range(placement.parts)]
    for span in (span for spans in spans_by_rank for span in spans):
        part = placement.part_at(span.stage, span.chunk)
        if span.kind in COMPUTE:
            computing[part] += span.seconds / ranks_of_stage
        if span.kind == "F":
            forward[part] += span.seconds / ranks_of_stage
        if span.kind == "BLOCK":
            seconds = forward_of_blocks[part].get(span.block, 0.0)
            forward_of_blocks[part][span.block] = seconds + span.seconds / ranks_of_stage

    blocks: list[float] = []
    around = {0: 0.0, placement.parts - 1: 0.0}
    for part, seconds_of_block in enumerate(forward_of_blocks):
        if part in around:
            per_forward = computing[part] / forward[part]
            around[part] = computing[part] - per_forward * sum(seconds_of_block.values())
        else:
            per_forward = computing[part] / sum(seconds_of_block.values())
        blocks += [per_forward * seconds for seconds in seconds_of_block.values()]
    return BlockSeconds(before=around[0], blocks=tuple(blocks), after=around[placement.parts - 1])


def _mean_seconds(spans: Sequence[Span], kind: str) -> float:
    """The mean over spans of one kind; 0 if there is none."""
    seconds = [span.seconds for span in spans if span.kind == kind]
    return sum(seconds) / len(seconds) if seconds else 0.0


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """A step in the format of chrome://tracing and ui.perfetto.dev.

    Every stage is a process. Its rows are computing, the blocks' forwards in it, waiting, handing
    over and reducing.
    """
    events: list[dict[str, Any]] = []
    for stage in sorted({span.stage for span in spans}):
        events.append(
            {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}}
        )
    for span in spans:
        number = f"{span.kind}{span.micro_batch}" if span.micro_batch >= 0 else span.kind
        events.append(
            {
                "ph": "X",
                "name": span.block or number,
                "cat": span.heading,
                "pid": span.stage,
                "tid": span.heading,
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"micro-batch": span.micro_batch, "chunk": span.chunk},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
