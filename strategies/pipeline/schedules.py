"""Pipeline schedules: which micro-batch each stage computes next, as lists of instructions.

The model is divided into parts 0 … P-1; part k+1 takes the outputs of part k. A *stage* is a worker
that holds one part, or several: its *chunks* of the model (P = stages · chunks). Every micro-batch
needs one forward F and one backward B in each part. Some schedules split backward in two: their B
computes the gradient of the part's input, for which the stage before waits, and a separate W
computes the gradients of the part's weights, for which no stage waits.

Let p be the number of stages, m the number of micro-batches, and f, b and w the times of a stage's
F, B and W. Computing alone takes m(f+b+w). The *bubble* is what a step takes longer than that,
because the pipeline must fill and drain. The other price of a schedule is the number of activations
that stage s holds at once:

    schedule           bubble                   activations on stage s
    gpipe              (p-1)(f+b+w)             m
    1f1b               (p-1)(f+b+w)             p-s
    interleaved_1f1b   (p-1)(f+b+w) / chunks    (chunks-1)p + 2(p-s)-1, each of one chunk
    zb_h1              (p-1)(f+b-w)             p
    zb_h2              (p-1)f                   2p-1
    zbv                about (p-1)f/2           2p, each of half a stage

This holds for m ≥ 2p, and for zb_h2 and zbv if f ≈ b ≈ w. An activation is held from its F until
the last instruction that reads it: W if the schedule has one, else B. The papers call the bubble
of zb_h2 and zbv zero, because they let a stage begin the next step while others finish this one;
here a step ends for all stages before the next one begins.

- gpipe does all F, then all B: the simplest, and the one that holds most (Huang et al. 2019, arXiv
  1811.06965).
- 1f1b begins backward as early as it can. Choose it unless there is a reason for another
  (Narayanan et al. 2020, arXiv 2006.09503).
- interleaved_1f1b gives each stage several thin slices of the model: the pipeline fills sooner, and
  more is sent (Narayanan et al. 2021, arXiv 2104.04473).
- zb_h1 and zb_h2, the zero-bubble schedules, fill idle time with W (Qi et al. 2023, arXiv
  2401.10241).
- zbv folds the model into a V, so that the stage that reads the input also computes the loss, and
  all stages hold equally much (Qi et al. 2024, arXiv 2405.15362).

Everything here is a pure function, and no process is needed to test it. To add a schedule, write a
function `(stages, micro_batches, chunks) -> Schedule` and enter it in SCHEDULES. The tests then
prove that it does everything exactly once and cannot deadlock; simulate.py says how long it takes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from strategies.dims import LayoutError


@dataclass(frozen=True)
class Op:
    """One instruction of a stage.

    Args:
        kind: F (forward), B (backward) or W (the weights' gradients).
        micro_batch: Number of the micro-batch.
        chunk: Which of the stage's chunks computes it.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        suffix = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind}{self.micro_batch}{suffix}"


@dataclass(frozen=True)
class Placement:
    """Which stage holds which parts of the model.

    Args:
        stages: Number of stages.
        chunks: Number of parts on each stage.
        is_folded: Whether the parts go down the stages and up again, as a V. Otherwise each chunk
            starts again at the first stage.
    """

    stages: int
    chunks: int = 1
    is_folded: bool = False

    @classmethod
    def of(cls, schedule: str, stages: int, chunks: int = 1) -> Placement:
        """The placement that a schedule uses, by the schedule's name."""
        return cls(stages, chunks_per_stage(schedule, chunks), schedule in FOLDED)

    @property
    def parts(self) -> int:
        """Number of parts of the model."""
        return self.stages * self.chunks

    def part_at(self, stage: int, chunk: int) -> int:
        """The part of the model that is this chunk of the stage."""
        position = self.stages - 1 - stage if self._goes_up(chunk) else stage
        return chunk * self.stages + position

    def stage_of(self, part: int) -> int:
        """The stage that holds the part."""
        chunk, position = divmod(part, self.stages)
        return self.stages - 1 - position if self._goes_up(chunk) else position

    def parts_of(self, stage: int) -> tuple[int, ...]:
        """The parts that the stage holds, by chunk."""
        return tuple(self.part_at(stage, chunk) for chunk in range(self.chunks))

    def _goes_up(self, chunk: int) -> bool:
        """Whether the chunk's parts go from the last stage to the first."""
        return self.is_folded and chunk % 2 == 1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The instructions of one optimizer step.

    Args:
        name: Its key in SCHEDULES.
        stages: Number of stages.
        micro_batches: Number of micro-batches in the step.
        chunks: Number of parts of the model on each stage.
        ops: The instructions of each stage, in order.
        splits_backward: Whether B leaves the weights' gradients to W.
        is_folded: See Placement.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    ops: tuple[tuple[Op, ...], ...]
    splits_backward: bool = False
    is_folded: bool = False

    @functools.cached_property
    def placement(self) -> Placement:
        """Which stage holds which parts of the model."""
        return Placement(self.stages, self.chunks, self.is_folded)

    def __str__(self) -> str:
        return "\n".join(" ".join(str(op) for op in stage_ops) for stage_ops in self.ops)


# --- the schedules --------------------------------------------------------------------------------


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards."""
    stage_ops = (*_every("F", micro_batches), *_every("B", micro_batches))
    return Schedule(
        name="gpipe",
        stages=stages,
        micro_batches=micro_batches,
        chunks=1,
        ops=(stage_ops,) * stages,
    )


def one_f_one_b(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """A forward for each of the later stages, then one forward and one backward in turn."""
    forwards = _every("F", micro_batches)
    backwards = _every("B", micro_batches)
    return Schedule(
        name="1f1b",
        stages=stages,
        micro_batches=micro_batches,
        chunks=1,
        ops=tuple(
            _alternating(forwards, backwards, warmup=stages - stage - 1) for stage in range(stages)
        ),
    )


def interleaved_1f1b(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1f1b over chunks.

    Micro-batches go in groups of `stages`: a group passes the first chunk of every stage, then the
    second, and so on.
    """
    forwards: list[Op] = []
    backwards: list[Op] = []
    for start in range(0, micro_batches, stages):
        group = range(start, start + stages)
        for chunk in range(chunks):
            forwards.extend(Op("F", micro_batch, chunk) for micro_batch in group)
        for chunk in reversed(range(chunks)):
            backwards.extend(Op("B", micro_batch, chunk) for micro_batch in group)

    def warmup(stage: int) -> int:
        return 2 * (stages - stage - 1) + (chunks - 1) * stages

    return Schedule(
        name="interleaved_1f1b",
        stages=stages,
        micro_batches=micro_batches,
        chunks=chunks,
        ops=tuple(_alternating(forwards, backwards, warmup(stage)) for stage in range(stages)),
    )


def zb_h1(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """1f1b in which stage s does W of a micro-batch s micro-batches later.

    Under 1f1b the stage would be idle then. It holds at most as many activations as the first stage
    under 1f1b.
    """
    return _zero_bubble("zb_h1", stages, micro_batches, depth=1)


def zb_h2(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """zb_h1 with twice as many forwards before the first backward, and W delayed twice as long.

    A stage is then idle only until its first activation comes, and before its last gradient does.
    """
    return _zero_bubble("zb_h2", stages, micro_batches, depth=2)


def zbv(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Two chunks per stage, placed as a V: the first stage has the first part and the last one.

    Once the pipeline is full, every stage does F, B and W of one chunk and then of the other. No
    stage is idle then, whatever share of the time W takes.
    """
    return Schedule(
        name="zbv",
        stages=stages,
        micro_batches=micro_batches,
        chunks=2,
        ops=tuple(_zbv_stage(stage, stages, micro_batches) for stage in range(stages)),
        splits_backward=True,
        is_folded=True,
    )


class ScheduleFunction(Protocol):
    """Makes a schedule of one kind."""

    def __call__(self, stages: int, micro_batches: int, chunks: int) -> Schedule: ...


SCHEDULES: dict[str, ScheduleFunction] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
}
SPLIT = ("zb_h1", "zb_h2", "zbv")
"""The schedules that split backward into B and W."""
FOLDED = ("zbv",)
"""The schedules that place the parts as a V."""


@functools.cache
def make_schedule(name: str, *, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name.

    Raises:
        LayoutError: The schedule cannot use that number of micro-batches or chunks.
    """
    require_schedule(name, stages=stages, micro_batches=micro_batches, chunks=chunks)
    return SCHEDULES[name](stages, micro_batches, chunks)


def require_schedule(name: str, *, stages: int, micro_batches: int | None, chunks: int) -> None:
    """Check that a schedule can be made.

    Args:
        name: A key of SCHEDULES.
        stages: Number of stages.
        micro_batches: Number of micro-batches per step; None if it is not known yet.
        chunks: `parallel.chunks`.

    Raises:
        LayoutError: It cannot; the sentence names another schedule or number.
    """
    _require_chunks(name, chunks)
    if micro_batches is not None:
        _require_micro_batches(name, stages, micro_batches)


def _require_chunks(name: str, chunks: int) -> None:
    if chunks < 1:
        raise LayoutError(f"parallel.chunks is {chunks}: write at least 1")
    if name == "interleaved_1f1b" and chunks < 2:
        raise LayoutError(
            f"parallel.schedule={name} has several chunks per stage: write parallel.chunks=2, "
            "or 1f1b"
        )
    if name == "zbv" and chunks not in (1, 2):
        raise LayoutError(
            f"parallel.schedule=zbv has 2 chunks per stage, not {chunks}: leave parallel.chunks out"
        )
    if name not in ("interleaved_1f1b", "zbv") and chunks > 1:
        raise LayoutError(
            f"parallel.schedule={name} has one chunk per stage, but parallel.chunks is {chunks}: "
            "write parallel.schedule=interleaved_1f1b"
        )


def _require_micro_batches(name: str, stages: int, micro_batches: int) -> None:
    if name == "interleaved_1f1b" and micro_batches % stages:
        raise LayoutError(
            f"parallel.schedule={name} sends micro-batches in groups of {stages}, one per stage, "
            f"but a step has {micro_batches}: write a train.micro_batch_size that makes it a "
            f"multiple of {stages}, or parallel.schedule=1f1b, which takes any number"
        )
    # With fewer micro-batches a schedule does not have the bubble that it promises.
    minimum = {"gpipe": 1, "1f1b": 1, "zb_h2": 2 * stages - 1}.get(name, stages)
    if micro_batches < minimum:
        alternative = "zb_h1" if micro_batches >= stages else "1f1b"
        raise LayoutError(
            f"parallel.schedule={name} over {stages} stages needs at least {minimum} micro-batches "
            f"per step, but there are {micro_batches}: write a smaller train.micro_batch_size, or "
            f"parallel.schedule={alternative}"
        )


def chunks_per_stage(name: str, chunks: int) -> int:
    """The number of chunks on each stage: zbv always has two, others what is configured."""
    return 2 if name == "zbv" else chunks


def _every(kind: str, micro_batches: int) -> tuple[Op, ...]:
    """One instruction of that kind for every micro-batch."""
    return tuple(Op(kind, micro_batch) for micro_batch in range(micro_batches))


def _alternating(forwards: Sequence[Op], backwards: Sequence[Op], warmup: int) -> tuple[Op, ...]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that remain."""
    warmup = min(warmup, len(forwards))
    steady: list[Op] = []
    for forward, backward in zip(forwards[warmup:], backwards):
        steady += [forward, backward]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def _zero_bubble(name: str, stages: int, micro_batches: int, depth: int) -> Schedule:
    """1f1b with split backward and `depth` times as many forwards before the first backward.

    Stage s does W of a micro-batch after the B of the one that comes `depth` · s later.
    """
    forwards = _every("F", micro_batches)
    backwards = _every("B", micro_batches)
    ops: list[tuple[Op, ...]] = []
    for stage in range(stages):
        delay = depth * stage
        stage_ops: list[Op] = []
        for op in _alternating(forwards, backwards, warmup=depth * (stages - stage - 1)):
            stage_ops.append(op)
            if op.kind == "B" and op.micro_batch >= delay:
                stage_ops.append(Op("W", op.micro_batch - delay))
        stage_ops += [Op("W", late) for late in range(micro_batches - delay, micro_batches)]
        ops.append(tuple(stage_ops))
    return Schedule(
        name=name,
        stages=stages,
        micro_batches=micro_batches,
        chunks=1,
        ops=tuple(ops),
        splits_backward=True,
    )


def _zbv_stage(stage: int, stages: int, micro_batches: int) -> tuple[Op, ...]:
    """The instructions of one stage of zbv."""
    ops: list[Op] = []
    next_micro_batch: Counter[str] = Counter()

    def repeat(pattern: str, times: int) -> None:
        """Append a pattern; "F0" in it is the forward of the next micro-batch through chunk 0."""
        for symbol in pattern.split() * times:
            ops.append(Op(symbol[0], next_micro_batch[symbol], chunk=int(symbol[1])))
            next_micro_batch[symbol] += 1

    repeat("F0", 2 * (stages - stage) - 1)
    repeat("F1 F0", stage)
    repeat("F1 B1 W1", stages - stage)
    repeat("F0 B0 W0 F1 B1 W1", micro_batches - stages)
    repeat("B0 B1", stage)
    repeat("B0 W0", stages - stage)
    repeat("W1", stage)
    repeat("W0", stage)
    # With few micro-batches F0 runs ahead of those that exist; no other instruction does.
    return tuple(op for op in ops if op.micro_batch < micro_batches)
