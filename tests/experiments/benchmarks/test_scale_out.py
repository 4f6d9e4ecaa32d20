"""What the control plane costs grows with the number of ranks at most, and for a rank not at all.

Counted are bytes, values and calls as the benchmark counts them, and instructions of Python in
place of its seconds.
"""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from app.launchers.aggregator import ANSWER_BYTES, FAN_IN, Orders, parents
from app.launchers.heartbeats import Hang, HangDetector
from app.launchers.workers import Status
from app.tracking.system import EACH_NODES, SystemMetrics
from experiments.benchmarks.scale_out import ROWS, Row, Tree, exponent

pytestmark = pytest.mark.pure

FEW = 512
MANY = 1024
TOLERANCE = 0.05
"""A logarithm, or a part that does not grow, may change an exponent by so much."""


def instructions(function: Callable[[], object]) -> int:
    """How many instructions of Python a call takes."""
    if sys.version_info >= (3, 12):
        return monitored_instructions(function)
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def monitored_instructions(function: Callable[[], object]) -> int:
    """How many instructions of Python a call takes, from Python 3.12 on."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    tool = monitoring.DEBUGGER_ID
    instruction = monitoring.events.INSTRUCTION
    count = 0

    def counted(code: object, offset: int) -> None:
        nonlocal count
        count += 1

    monitoring.use_tool_id(tool, "instructions")
    monitoring.register_callback(tool, instruction, counted)
    monitoring.set_events(tool, instruction)
    try:
        function()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return count


def cost(row: Row, ranks: int) -> float:
    measured = row.prepare(ranks)
    return instructions(measured) if row.unit == "s" else float(measured())  # type: ignore[arg-type]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_no_cost_grows_faster_than_it_may(row: Row) -> None:
    few = cost(row, FEW)
    many = cost(row, MANY)
    assert few > 0
    assert exponent((FEW, few), (MANY, many)) <= row.exponent + TOLERANCE


def test_a_cost_that_grows_faster_is_seen() -> None:
    squared = Row("", lambda ranks: lambda: [x for x in range(ranks) for _ in range(ranks)])
    assert exponent((16, cost(squared, 16)), (128, cost(squared, 128))) > 1.8


def test_no_aggregator_has_more_below_it_than_it_can_hear() -> None:
    for aggregators in (0, 1, FAN_IN, FAN_IN + 1, 2048, 20_000):
        above = parents(aggregators)
        assert all(parent is None or parent < child for child, parent in enumerate(above))
        assert max(Counter(above).values(), default=0) <= FAN_IN


RANKS = 4096
BEAT = ("training", 1, 0, True)


class Seconds:
    """A run of so many simulated ranks, second by second, as its driver sees it.

    Args:
        ranks: The number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.tree = Tree(ranks)
        self.detector = HangDetector(10.0, 0.0)
        self.silent: frozenset[int] = frozenset()

    def next(self, step: int, silent: frozenset[int] = frozenset()) -> Hang | None:
        """The hang that the driver sees once every rank but the silent ones has told its step."""
        self.tree.clock += 1.0
        self.tree.beat(step, silent)
        self.tree.deliver()
        report = self.tree.queue.take()
        self.news = sum(map(len, report.beats.values()))
        if report.silent is not None:
            self.silent = report.silent
        statuses = {rank: Status.of(beat) for beat, ranks in report.beats.items() for rank in ranks}
        return self.detector.update(statuses, self.tree.clock, self.silent)


@pytest.mark.parametrize("silent", [{2345}, set(range(512, 1024))], ids=["rank", "rack"])
def test_ranks_that_hang_among_4096_are_found_in_time(silent: set[int]) -> None:
    """They do not answer any more, and all others wait for them."""
    run = Seconds(RANKS)
    for step in range(6):
        assert run.next(step) is None
        assert run.news == RANKS and not run.silent
    seconds = 0
    hang = None
    while hang is None:
        seconds += 1
        hang = run.next(5, frozenset(silent))
        assert run.news == 0, "only what is new is told"
    assert hang.rank == min(silent) and hang.silent == silent
    assert 20 <= seconds <= 22, "twice fault.hang_seconds, as with two ranks"


def test_a_node_whose_aggregator_is_gone_does_not_answer() -> None:
    run = Seconds(RANKS)
    run.next(1)
    number = FAN_IN + 3  # it reports to another one
    run.tree.gone = {number}
    for _ in range(6):
        run.next(1)
    assert run.silent == {*range(8 * number, 8 * number + 8)}


def test_ranks_meet_are_asked_and_are_stopped_through_their_aggregators() -> None:
    tree = Tree(128)
    for rank in range(127):
        tree.above(rank).join(1, rank, f"n{rank // 8}", ("host", 1) if rank == 0 else None)
    tree.deliver()
    assert tree.above(5).meeting(1, 5, "n0") is None, "one rank is missing"
    tree.above(127).join(1, 127, "n15", None)
    tree.deliver()
    places = [tree.above(rank).meeting(1, rank, f"n{rank // 8}") for rank in range(128)]
    assert places == [(rank % 8, ("host", 1)) for rank in range(128)]
    assert [tree.queue.node_ranks[f"n{node}"] for node in range(16)] == [*range(16)]
    tree.queue.obey(1, tree.queue.orders._replace(question="stack", number=1))
    for rank in range(128):
        orders = tree.above(rank).beat(1, rank, BEAT, (1, "the same" if rank else "another"))
        assert orders.question == "stack" and not orders.stop
    tree.above(3).beat(1, 3, BEAT, (0, "of an earlier question"))
    tree.deliver()
    answers = tree.queue.answered()
    assert answers["another"] == [0] and sorted(answers["the same"]) == [*range(1, 128)]
    assert len(answers) == 2 and tree.queue.answered() == {}
    tree.queue.obey(1, tree.queue.orders._replace(stop=True))
    assert tree.above(127).beat(1, 127, BEAT, None).stop


def test_answers_are_bounded() -> None:
    tree = Tree(8)
    tree.queue.obey(1, Orders(question="stack", number=1))
    for rank in range(8):
        tree.queue.beat(1, rank, BEAT, (1, str(rank) * (ANSWER_BYTES // 4)))
    assert len(tree.queue.answered()) == 4


def test_mlflow_gets_each_node_of_few_and_a_summary_of_many() -> None:
    few = SystemMetrics(5.0)
    for node in range(EACH_NODES):
        sample = {f"system/node-{node}/gpu_1_power_usage_watts": 10.0 * node}
        assert few.add(100.0, sample) == sample
    many = few
    assert many.add(101.0, {"system/node-8/gpu_0_power_usage_watts": 80.0}) == {
        "system/min/gpu_power_usage_watts": 0.0,
        "system/mean/gpu_power_usage_watts": 40.0,
        "system/max/gpu_power_usage_watts": 80.0,
    }
    assert many.add(102.0, {"system/node-0/gpu_1_power_usage_watts": 5.0}) == {}
    summary = many.add(130.0, {"system/node-0/gpu_1_power_usage_watts": 5.0})
    assert set(summary.values()) == {5.0}, "the other nodes are gone"
