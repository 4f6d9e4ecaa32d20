"""Which rank hangs, or holds up the others, by heartbeats and by records as torch's flight recorder writes them; no
process is started."""

import json
from typing import Any
from unittest import mock

import pytest

from app.launchers.blame import rank_behind
from app.launchers.heartbeats import Hang, HangDetector
from app.launchers.supervisor import Supervisor
from app.launchers.workers import Status, WorkerInfo

# --- heartbeats -------------------------------------------------------------------------------------------------------


def status(step: int = 9, phase: str = "training", ticks: int = 0, waiting: bool = False, age: float = 0.5) -> Status:
    return Status(phase, step, ticks, waiting, age)


def trained(least: float, gaps: list[float]) -> tuple[HangDetector, float]:
    """A detector that has seen steps with these gaps between them, and when the last one was."""
    detector, now = HangDetector(least, 0.0), 0.0
    for step, gap in enumerate([100.0, *gaps]):  # loading takes as long as it takes
        now += gap
        assert detector.update({0: status(step), 1: status(step)}, now) is None
    return detector, now


WAITS, TRAINS, SILENT = status(waiting=True), status(), status(age=4.0)
EVALUATES = status(phase="evaluating")
STEADY, QUICK = [1.0] * 8, [0.1] * 8


@pytest.mark.parametrize(
    ("least", "gaps", "first", "second", "after", "rank", "why"),
    [
        (10.0, STEADY, WAITS, SILENT, 20, 1, "does not answer"),
        (10.0, STEADY, SILENT, SILENT, 20, 0, "does not answer"),
        (10.0, STEADY, WAITS, TRAINS, 20, 1, "has been training after step 9"),
        (10.0, STEADY, WAITS, status(8, waiting=True), 20, 1, "after step 8"),
        (10.0, STEADY, WAITS, EVALUATES, 70, 1, "has been evaluating"),
        (10.0, STEADY, WAITS, status(phase="reading"), 70, 1, "has been reading"),
        (10.0, STEADY, status(phase="saving"), status(phase="saving"), 1810, 0, "has been saving"),
        # by the pauses before it
        (2.0, QUICK, WAITS, TRAINS, 2 + 2, 1, ""),
        (2.0, [3.0] * 8, WAITS, TRAINS, 15 + 6, 1, ""),
        (2.0, [0.1, 0.1, 3.0, 0.1], WAITS, TRAINS, 15 + 6, 1, ""),
        (2.0, [6.0] * 8, WAITS, EVALUATES, 30 + 6 * 12, 1, ""),
        (0.0, QUICK, WAITS, TRAINS, None, None, ""),  # off
        # before the second step only a silent rank hangs
        (2.0, [], status(0, "starting"), status(0, "starting", age=30.0), 22, 1, "does not answer"),
        (10.0, [], status(0, "starting"), status(0, "starting", age=30.0), 40, 1, "does not answer"),
        (2.0, [], status(0, "starting"), status(0, "starting"), None, None, ""),
    ],
)
def test_when_it_is_a_hang_and_who_holds_up_the_others(
    least: float, gaps: list[float], first: Status, second: Status, after: float | None, rank: int | None, why: str
) -> None:
    found = {0: first, 1: second}
    detector, now = trained(least, gaps)
    detector.update(found, now)
    hangs = ((tenth / 10, detector.update(found, now + tenth / 10)) for tenth in range(18_200 if after else 17_000))
    seconds, hang = next(((seconds, hang) for seconds, hang in hangs if hang), (None, None))
    assert seconds == pytest.approx(after, abs=0.2)
    if hang:
        assert hang.rank == rank and why in hang.why
        assert hang.silent == {rank for rank, status in found.items() if status.age > 3}


def test_any_sign_of_progress_ends_a_pause() -> None:
    for change in (status(10), status(phase="saving"), status(ticks=1)):
        detector, now = trained(2.0, QUICK)
        for seconds, second in ((0.0, TRAINS), (3.9, TRAINS), (3.95, change), (7.5, change)):
            assert detector.update({0: TRAINS, 1: second}, now + seconds) is None


# --- records ----------------------------------------------------------------------------------------------------------

COMPLETED, STARTED, SCHEDULED = "completed", "started", "scheduled"
RANKS = {"world": [0, 1, 2, 3], "tp01": [0, 1], "tp23": [2, 3], "dp02": [0, 2], "dp13": [1, 3], "pp": [2, 5]}


def entry(group: str, number: int, state: str, name: str = "nccl:all_reduce", pg_id: int = 0) -> dict[str, Any]:
    """What is read of one, by the names and types of FlightRecorderDetail.hpp's dump_json."""
    own = {"pg_id": pg_id, "process_group": [group, "default_pg"], "profiling_name": name, "state": state}
    return own | {"collective_seq_id": number, "retired": state == COMPLETED, "is_p2p": "->" in name or "<-" in name}


def upto(group: str, asked: int, completed: int, started: int = 0, **more: Any) -> list[dict[str, Any]]:
    states = [COMPLETED if n <= completed else STARTED if n <= started else SCHEDULED for n in range(1, asked + 1)]
    return [entry(group, number, state, **more) for number, state in enumerate(states, 1)]


def record(*entries: dict[str, Any], ranks: dict[str, list[int]] = RANKS, first: int = 0) -> str:
    config = {name: {"name": name, "desc": "", "ranks": str(own)} for name, own in ranks.items()}
    numbered = [one | {"record_id": first + i} for i, one in enumerate(entries)]
    return json.dumps({"version": "2.10", "pg_config": config, "entries": numbered})


def at(**reached: tuple[int, ...]) -> str:
    """Of a rank that has reached in each group so many collectives: asked for, completed and started."""
    return record(*(one for group, far in reached.items() for one in upto(group, *far)))


RECV, SEND = "nccl:recv 1<-0", "nccl:send 0->1"
AHEAD = at(world=(9, 7))
CHAIN = {0: at(tp01=(5, 5), dp02=(3, 2)), 1: at(tp01=(5, 5), dp13=(3, 2))}
# 3 stands still; 2 waits for it under tensor parallelism, and 0 and 1 for both under data parallelism
CHAIN |= {2: at(tp23=(5, 4), dp02=(2, 2)), 3: at(tp23=(4, 4), dp13=(2, 2))}
CASES: dict[str, tuple[dict[int, str], int | None, str]] = {
    # the others have asked for two more, and wait in .cpu()
    "asked": ({0: AHEAD, 1: AHEAD, 2: at(world=(7, 7)), 3: AHEAD}, 2, "collective 7 asked for"),
    # all have asked; only one GPU has not begun: with TORCH_NCCL_ENABLE_TIMING=1
    "started": ({r: at(world=(9, 7, 7 if r == 1 else 8)) for r in range(4)}, 1, "7 started"),
    "completed": ({r: at(world=(9, 6 if r == 3 else 8, 9)) for r in range(4)}, 3, "6 completed"),
    "nothing asked yet": ({0: AHEAD, 1: AHEAD, 2: AHEAD, 3: at()}, 3, "collective 0 asked for"),
    "all alike": (dict.fromkeys(range(4), AHEAD), None, ""),
    "no record": ({0: "", 1: ""}, None, ""),
    "a chain": (CHAIN, 3, "in group"),
    # each waits for the other: the records do not tell who was wrong
    "a circle": ({0: at(tp01=(3, 2), world=(2, 2)), 1: at(tp01=(2, 2), world=(3, 2))}, None, ""),
    # the record is full, and what it had of a group that is seldom used has left it
    "full": ({0: at(world=(9, 9), tp01=(1, 1)), 1: record(*upto("world", 9, 9)[3:], first=500)}, None, ""),
    "gloo": ({r: record(*upto("0", 3 - r, 3, name="gloo:all_reduce"), ranks={}) for r in (0, 1)}, 1, "2 asked for"),
    # a group of the same name was there before, and had come further
    "again": ({r: record(*upto("world", 9, 9), *upto("world", 3 - r, 2, pg_id=1)) for r in (0, 1)}, 1, "2 asked for"),
    "not sent": ({0: at(), 1: record(entry("world", 1, SCHEDULED, RECV))}, 0, "what rank 1 waits to receive"),
    "sent": ({r: record(entry("world", 1, SCHEDULED, name)) for r, name in enumerate((SEND, RECV))}, None, ""),
    "received": ({0: at(), 1: record(entry("world", 1, COMPLETED, RECV))}, None, ""),
    "a stage of a pipeline": ({2: at(), 5: record(entry("pp", 1, STARTED, RECV))}, 2, "what rank 5 waits"),
}


@pytest.mark.parametrize(("records", "rank", "why"), CASES.values(), ids=CASES)
def test_the_rank_that_the_others_wait_for(records: dict[int, str], rank: int | None, why: str) -> None:
    found = rank_behind(records)
    assert (found.rank if found else None) == rank and (found is None or why in found.why)


@pytest.mark.parametrize(
    ("silent", "case", "ended", "said"),
    [
        ([], "asked", 2, "worker 2, process 0 on , is behind in group world"),
        ([], "all alike", 0, "worker 0, process 0 on , has been training"),
        ([0], "asked", 0, "worker 0, process 0 on , has been training"),  # it has no record
    ],
)
def test_a_hang_is_laid_to_that_rank_and_not_to_rank_0(silent: list[int], case: str, ended: int, said: str) -> None:
    """All wait in `.cpu()`, where heartbeats name the first rank."""
    workers = mock.Mock(restartable=True, ask={"flight_recorder": CASES[case][0], "stack": {}}.get)
    supervisor = Supervisor(workers, mock.Mock(step=9))
    supervisor.infos = {rank: WorkerInfo(rank, 0, "", "") for rank in range(4)}
    blamed = supervisor._end_hang(Hang(0, "has been training for 20 s without progress", frozenset(silent)))
    assert list(blamed) == [ended] and str(blamed[ended]).startswith(said)
    assert workers.kill.call_args == mock.call([supervisor.infos[ended]])
