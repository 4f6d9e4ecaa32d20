"""Schedules: who computes what when, as lists of instructions; pure functions that no process is needed for.

The model is divided into parts 0 … P-1; part k+1 takes what part k puts out. A *stage* (a worker) owns one, or
several chunks of the model (P = stages · chunks). For each micro-batch and part there is a forward F and a backward B;
a schedule that splits backward has B compute the gradient of the part's input, for which the stage before waits, and a
W that computes the gradients of its weights, for which no stage waits. With p stages, m micro-batches, and times f, b,
w of a stage's F, B and W, a step takes m(f+b+w) and, because the pipe must fill and drain,

    schedule         this much more          activations alive on stage s       from
    gpipe            (p-1)(f+b+w)            m                                  Huang et al. 2019, arXiv 1811.06965
    1f1b             (p-1)(f+b+w)            p-s                                Narayanan et al. 2020, arXiv 2006.09503
    interleaved_1f1b (p-1)(f+b+w) / chunks   (chunks-1)p + 2(p-s)-1, of chunks  Narayanan et al. 2021, arXiv 2104.04473
    zb_h1            (p-1)(f+b-w)            p                                  Qi et al. 2023, arXiv 2401.10241
    zb_h2            (p-1)f                  2p-1                               the same, §2.2
    zbv              (p-1)f/2, about         2p, of half a stage                Qi et al. 2024, arXiv 2405.15362

(m ≥ 2p; for the last two f ≈ b ≈ w. An activation is alive from F until the last instruction that reads it: B, or W
where there is one. The papers call the last two zero: they let a stage begin the next step while others finish this.)
gpipe is all F, then all B: simplest, most memory. 1f1b begins backward as soon as it can: choose it unless there is a
reason. Interleaving has each stage own several thin slices, so that the pipe fills sooner and more is sent. The
zero-bubble ones fill what is left with W. zbv folds the model into a V, so that the stage that reads the input also
computes the loss, and all stages hold as much as another.

A new schedule is a function `(stages, micro_batches, chunks) -> Schedule` and a line in SCHEDULES. Its test then proves
that it cannot deadlock and does everything once; `simulate` says how long it takes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strategies.dims import LayoutError


@dataclass(frozen=True)
class Op:
    """One instruction: F, B or W of a micro-batch through one of the stage's chunks."""

    kind: str
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Placement:
    """Which stage has which parts of the model. folded: chunks go down the stages and up again, not round and round."""

    stages: int
    chunks: int = 1
    folded: bool = False

    @classmethod
    def of(cls, schedule: str, stages: int, chunks: int = 1) -> Placement:
        return cls(stages, chunks_of(schedule, chunks), schedule in FOLDED)

    @property
    def parts(self) -> int:
        return self.stages * self.chunks

    def part(self, stage: int, chunk: int) -> int:
        """Which part of the model that chunk of the stage is."""
        back = self.folded and chunk % 2 == 1
        return chunk * self.stages + (self.stages - 1 - stage if back else stage)

    def stage(self, part: int) -> int:
        """Which stage has that part."""
        chunk, place = divmod(part, self.stages)
        return self.stages - 1 - place if self.folded and chunk % 2 == 1 else place

    def own(self, stage: int) -> tuple[int, ...]:
        """The stage's parts, by chunk."""
        return tuple(self.part(stage, chunk) for chunk in range(self.chunks))


@dataclass(frozen=True)
class Schedule:
    """lists: per stage its instructions. folded: see Placement. split: B leaves the weights' gradients to W."""

    name: str
    stages: int
    micro_batches: int
    chunks: int
    lists: tuple[tuple[Op, ...], ...]
    split: bool = False
    folded: bool = False

    @functools.cached_property
    def placement(self) -> Placement:
        return Placement(self.stages, self.chunks, self.folded)

    def __str__(self) -> str:
        return "\n".join(" ".join(str(op) for op in ops) for ops in self.lists)


# --- the schedules ----------------------------------------------------------------------------------------------


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards."""
    ops = [Op("F", i) for i in range(micro_batches)] + [Op("B", i) for i in range(micro_batches)]
    return Schedule("gpipe", stages, micro_batches, 1, (tuple(ops),) * stages)


def one_f_one_b(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """As many forwards as there are stages left, then one forward per backward."""
    forward = [Op("F", i) for i in range(micro_batches)]
    backward = [Op("B", i) for i in range(micro_batches)]
    lists = (_alternating(forward, backward, stages - stage - 1) for stage in range(stages))
    return Schedule("1f1b", stages, micro_batches, 1, tuple(lists))


def interleaved_1f1b(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1f1b over chunks: `stages` micro-batches through the first chunk, the same through the second, and so on."""
    groups = [range(i, i + stages) for i in range(0, micro_batches, stages)]
    forward = [Op("F", i, chunk) for group in groups for chunk in range(chunks) for i in group]
    backward = [Op("B", i, chunk) for group in groups for chunk in reversed(range(chunks)) for i in group]
    lists = (
        _alternating(forward, backward, 2 * (stages - stage - 1) + (chunks - 1) * stages) for stage in range(stages)
    )
    return Schedule("interleaved_1f1b", stages, micro_batches, chunks, tuple(lists))


def zb_h1(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """1f1b in which stage s does the weights of a micro-batch s micro-batches later, when it would have waited."""
    return _zero_bubble("zb_h1", stages, micro_batches, 1)


def zb_h2(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """zb_h1 with twice as many forwards before the first backward and twice the delay, so that no stage waits but for
    the first activation and the last gradient."""
    return _zero_bubble("zb_h2", stages, micro_batches, 2)


def zbv(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Two chunks per stage, placed as a V: the first stage has the first part and the last one.

    Once the pipe is full every stage does F, B, W of one chunk and then of the other. No stage waits then,
    whatever share of them W is.
    """
    lists = (_of_a_v(stage, stages, micro_batches) for stage in range(stages))
    return Schedule("zbv", stages, micro_batches, 2, tuple(lists), split=True, folded=True)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
}
SPLIT = ("zb_h1", "zb_h2", "zbv")
"""Those that split backward."""
FOLDED = ("zbv",)


@functools.cache
def make(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name.

    Raises:
        LayoutError: micro-batches or chunks that it cannot use; another that can is named.
    """
    require(name, stages, micro_batches, chunks)
    return SCHEDULES[name](stages, micro_batches, chunks)


def require(name: str, stages: int, micro_batches: int | None, chunks: int) -> None:
    """Raises LayoutError unless the schedule can be made; micro_batches None: not known yet."""
    if chunks < 1:
        raise LayoutError(f"parallel.chunks is {chunks}: write at least 1")
    if name == "interleaved_1f1b" and chunks < 2:
        raise LayoutError(f"parallel.schedule={name} has several chunks per stage: write parallel.chunks=2, or 1f1b")
    if name == "zbv" and chunks not in (1, 2):
        raise LayoutError(f"parallel.schedule=zbv has 2 chunks per stage, not {chunks}: leave parallel.chunks out")
    if name not in ("interleaved_1f1b", "zbv") and chunks > 1:
        raise LayoutError(
            f"parallel.schedule={name} has one chunk per stage, but parallel.chunks is {chunks}: write "
            "parallel.schedule=interleaved_1f1b"
        )
    if name == "interleaved_1f1b" and micro_batches is not None and micro_batches % stages:
        raise LayoutError(
            f"parallel.schedule={name} sends micro-batches in groups of {stages}, one per stage, but a step has "
            f"{micro_batches}: write a train.micro_batch_size that makes it a multiple of {stages}, or "
            "parallel.schedule=1f1b, which takes any number"
        )
    # With fewer it does not have the bubble that it promises. gpipe and 1f1b take any number.
    least = {"gpipe": 1, "1f1b": 1, "zb_h2": 2 * stages - 1}.get(name, stages)
    if micro_batches is not None and micro_batches < least:
        other = "zb_h1" if micro_batches >= stages else "1f1b"
        raise LayoutError(
            f"parallel.schedule={name} over {stages} stages needs at least {least} micro-batches per step, but there "
            f"are {micro_batches}: write a smaller train.micro_batch_size, or parallel.schedule={other}"
        )


def chunks_of(name: str, chunks: int) -> int:
    """Chunks per stage, once the schedule has had its say."""
    return 2 if name == "zbv" else chunks


def _alternating(forward: Sequence[Op], backward: Sequence[Op], warmup: int) -> tuple[Op, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forward))
    steady = [op for pair in zip(forward[warmup:], backward) for op in pair]
    return (*forward[:warmup], *steady, *backward[len(forward) - warmup :])


def _zero_bubble(name: str, stages: int, micro_batches: int, times: int) -> Schedule:
    """1f1b with `times` as many forwards before the first backward; stage s does W of a micro-batch after the B of the
    one `times` · s later."""
    forward = [Op("F", i) for i in range(micro_batches)]
    backward = [Op("B", i) for i in range(micro_batches)]
    lists = []
    for stage in range(stages):
        ops: list[Op] = []
        for op in _alternating(forward, backward, times * (stages - stage - 1)):
            ops.append(op)
            if op.kind == "B" and op.micro >= times * stage:
                ops.append(Op("W", op.micro - times * stage))
        lists.append((*ops, *(Op("W", i) for i in range(micro_batches - times * stage, micro_batches))))
    return Schedule(name, stages, micro_batches, 1, tuple(lists), split=True)


def _of_a_v(stage: int, stages: int, micro_batches: int) -> tuple[Op, ...]:
    ops: list[Op] = []
    done: Counter[str] = Counter()

    def do(names: str, times: int) -> None:
        """F0 is the next micro-batch's forward through chunk 0."""
        for name in names.split() * times:
            ops.append(Op(name[0], done[name], int(name[1])))
            done[name] += 1

    do("F0", 2 * (stages - stage) - 1)
    do("F1 F0", stage)
    do("F1 B1 W1", stages - stage)
    do("F0 B0 W0 F1 B1 W1", micro_batches - stages)
    do("B0 B1", stage)
    do("B0 W0", stages - stage)
    do("W1", stage)
    do("W0", stage)
    return tuple(op for op in ops if op.micro < micro_batches)  # F0 alone runs ahead of what there is
