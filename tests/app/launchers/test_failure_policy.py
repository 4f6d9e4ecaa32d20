"""Failures: their classification, the decision after one, and the rank that makes others hang.

A hanging rank is named by heartbeats and by records in the format of torch's flight recorder.
No process is started.
"""

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed import DistBackendError

from app.checkpoint import CheckpointError
from app.launchers.blame import rank_behind, summary
from app.launchers.failure_policy import (
    Action,
    Capacity,
    Failure,
    Kind,
    Limits,
    decide,
    fewer_workers,
    growth,
)
from app.launchers.heartbeats import Hang, HangDetector, HeartbeatThread, Reply
from app.launchers.recovery import Device, Nodes, State, classify, device_failure
from app.launchers.supervisor import Supervisor
from app.launchers.workers import Failures, Status, WorkerLost
from app.training.events import WorkerInfo
from app.training.job import Heartbeat

pytestmark = pytest.mark.pure


def failure(kind: Kind, **fields: Any) -> Failure:
    """A failure at step 10 of a run that had made progress."""
    return Failure(kind=kind, **{"sentence": "it broke", "step": 10, "progressed": True} | fields)


DIED = failure(Kind.DIED)
STILLBORN = failure(Kind.DIED, progressed=False)
ANNOUNCED = failure(Kind.PREEMPTED)
BUG = failure(Kind.EXCEPTION)
CRASH = failure(Kind.CRASHED, signal="SIGSEGV")
LATER_CRASH = failure(Kind.CRASHED, signal="SIGSEGV", step=20)
ON_A = failure(Kind.DIED, node="a", progressed=False)
HUNG_ON_A = failure(Kind.HUNG, node="a", progressed=False)
OOM_ON_A = failure(Kind.OUT_OF_MEMORY, node="a", progressed=False)
GPU_ON_A = failure(Kind.DEVICE_FAILED, node="a", progressed=False)
ON_B = failure(Kind.DIED, node="b", progressed=False)
LATER = failure(Kind.DIED, clock=3601.0)
"""More than an hour after the others."""
LATER_ON_A = failure(Kind.DIED, node="a", clock=3601.0)
ECC = "CUDA error: uncorrectable ECC error encountered"
STUCK = "no step further: trying again would not help"
AGAIN = "twice at the same step: trying again would not help"


@pytest.mark.parametrize(
    ("history", "max_restarts", "action", "reason_end", "pause"),
    [
        ([DIED] * 3, 3, Action.RETRY, "it broke", 0),
        ([DIED] * 4, 3, Action.GIVE_UP, "fault.max_restarts=3 is used up", 0),
        ([DIED], 0, Action.GIVE_UP, "it broke; fault.max_restarts is 0", 0),
        ([DIED] * 3 + [LATER], 3, Action.RETRY, "it broke", 0),
        ([DIED] * 3 + [failure(Kind.DIED, clock=3600.0)], 3, Action.GIVE_UP, "used up", 0),
        ([ANNOUNCED] * 50 + [DIED], 1, Action.RETRY, "it broke", 0),
        ([DIED] + [failure(Kind.NO_CAPACITY)] * 9, 1, Action.RETRY, "it broke", 0),
        ([failure(Kind.NON_RETRYABLE)], 3, Action.GIVE_UP, "it broke", 0),
        ([failure(Kind.EXCEPTION, progressed=False)], 3, Action.GIVE_UP, "it broke", 0),
        ([DIED, BUG, BUG], 9, Action.GIVE_UP, AGAIN, 0),
        # A first crash may be a hardware fault; a second one without a step between is the program.
        ([CRASH], 9, Action.RETRY, "it broke", 0),
        ([CRASH, CRASH], 9, Action.GIVE_UP, STUCK, 0),
        ([LATER_CRASH, CRASH], 9, Action.GIVE_UP, "would not help", 0),
        ([CRASH, DIED, CRASH], 9, Action.GIVE_UP, STUCK, 0),
        ([CRASH, LATER_CRASH], 9, Action.RETRY, "it broke", 0),
        ([CRASH, failure(Kind.CRASHED, signal="SIGBUS")], 9, Action.RETRY, "it broke", 0),
        ([BUG, failure(Kind.EXCEPTION, step=20)], 3, Action.RETRY, "it broke", 0),
        ([BUG, failure(Kind.EXCEPTION, sentence="another")], 3, Action.RETRY, "another", 0),
        ([DIED, BUG], 3, Action.RETRY, "it broke", 0),
        # The pause doubles as long as no step is taken.
        ([DIED, STILLBORN, STILLBORN], 99, Action.RETRY, "it broke", 2),
        ([STILLBORN] * 30, 99, Action.RETRY, "it broke", 60),
        ([STILLBORN, failure(Kind.NO_CAPACITY, progressed=False)], 99, Action.RETRY, "it broke", 1),
    ],
)
def test_the_history_decides_whether_and_when_to_start_again(
    history: Any, max_restarts: int, action: Action, reason_end: str, pause: float
) -> None:
    decision = decide(history, Limits(max_restarts))
    assert (decision.action, decision.pause) == (action, pause)
    assert decision.reason.startswith(history[-1].sentence) and decision.reason.endswith(reason_end)


def capacity(
    workers: int,
    available: int,
    missing_seconds: float = 0.0,
    valid_sizes: Any = (1, 2, 4),
    **available_without: int,
) -> Capacity:
    """The room for a run that wants 4 workers; `available_without` is by the node to exclude."""
    return Capacity(
        workers=workers,
        wanted=4,
        available=available,
        valid=valid_sizes,
        available_without=available_without,
        missing_seconds=missing_seconds,
    )


ELASTIC = Limits(9, elastic_seconds=30.0)
ROOM = "; there is room for 3 of 4 workers"
EXCLUDED = "; 2 failures began at that node, which is excluded"
SAYS = {Action.WAIT: ROOM, Action.RESIZE: ROOM, Action.EXCLUDE_NODE: EXCLUDED}


@pytest.mark.parametrize(
    ("history", "limits", "room", "action", "workers"),
    [
        ([STILLBORN], ELASTIC, capacity(4, 4), Action.RETRY, 0),
        ([STILLBORN], ELASTIC, capacity(4, 3, 10.0), Action.WAIT, 0),
        ([STILLBORN], ELASTIC, capacity(4, 3, 30.0), Action.RESIZE, 2),  # no layout has 3 workers
        ([DIED], Limits(9, None), capacity(4, 3, 99.0), Action.WAIT, 0),
        ([DIED], Limits(9, 30.0, min_workers=3), capacity(4, 3, 99.0), Action.WAIT, 0),
        ([DIED], Limits(9, 30.0, min_workers=2), capacity(4, 3, 99.0), Action.RESIZE, 2),
        # A node is excluded after two failures.
        ([ON_A, HUNG_ON_A], ELASTIC, capacity(4, 4, a=3), Action.EXCLUDE_NODE, 2),
        ([OOM_ON_A, ON_B, OOM_ON_A], ELASTIC, capacity(4, 4, a=2), Action.EXCLUDE_NODE, 2),
        ([GPU_ON_A], ELASTIC, capacity(4, 4, a=4), Action.RETRY, 0),
        ([GPU_ON_A, GPU_ON_A], ELASTIC, capacity(4, 4, a=4), Action.EXCLUDE_NODE, 4),
        ([ON_A, ON_A], Limits(9, None), capacity(4, 4, a=3), Action.RETRY, 0),
        ([ON_A, ON_A], ELASTIC, capacity(4, 4, b=4), Action.RETRY, 0),  # there is no other node
        ([ON_A, failure(Kind.EXCEPTION, node="a")], ELASTIC, capacity(4, 4, a=4), Action.RETRY, 0),
        ([ON_A, LATER_ON_A], ELASTIC, capacity(4, 4, a=4), Action.RETRY, 0),
    ],
)
def test_history_and_capacity_decide_with_how_many_workers_to_continue(
    history: Any, limits: Limits, room: Capacity, action: Action, workers: int
) -> None:
    decision = decide(history, limits, room)
    assert (decision.action, decision.workers) == (action, workers)
    assert decision.reason == "it broke" + SAYS.get(action, "")
    assert decision.pause == (0 if history[-1].progressed else 2 ** (len(history) - 1))
    assert decision.node == ("a" if action is Action.EXCLUDE_NODE else "")
    if action in (Action.RESIZE, Action.WAIT):
        assert fewer_workers(room, limits) == workers, "waiting ends once this changes"


@pytest.mark.parametrize(
    ("workers", "available", "expected"),
    [(1, 4, 4), (1, 9, 4), (1, 3, 2), (2, 3, None), (2, 2, None), (4, 8, None), (2, 0, None)],
)
def test_a_run_grows_to_the_largest_layout_that_has_room(
    workers: int, available: int, expected: int | None
) -> None:
    assert growth(capacity(workers, available, valid_sizes=(1, 2, 4, 8))) == expected


def test_cuda_errors_of_a_failed_device_are_recognized() -> None:
    expected = {
        f"{ECC}\nCUDA kernel errors might be ...": Device.HARDWARE,
        "NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.": Device.HARDWARE,
        "CUDA error: an illegal memory access was encountered": Device.PROGRAM,
        "CUDA error: out of memory": None,  # the device still works
        "a hardware stack error of the user's": None,
    }
    assert {text: device_failure(RuntimeError(text)) for text in expected} == expected


INFOS = {
    rank: WorkerInfo(rank=rank, pid=44 + rank, ip=f"10.0.0.{rank}", node=f"n{rank}", oom_kills=1)
    for rank in range(4)
}
WHO = "worker 3, process 47 on 10.0.0.3,"
PEER = {1: RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")}
SAVING = {1: CheckpointError(str(PEER[1]))}
LOST = PEER | {3: WorkerLost()}
NO_MEMORY = PEER | {3: WorkerLost(details="OUT_OF_MEMORY")}
NCCL = (
    "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, "
    "NCCL version 2.27.3"
)
ABORTED = (
    "NCCL communicator was aborted on rank 0. Original reason for failure was: "
    "NCCL error: ncclRemoteError"
)
SILENT = "without a message, as after SIGKILL (`kill -9`, a scheduler, or lack of memory)"
KERNEL = "killed by the kernel for lack of memory"

ASSERT = "CUDA error: device-side assert triggered"
FAILED_GPU = {0: RuntimeError(NCCL), 3: RuntimeError(f"{ECC}\nmore")}
FAILED_ASSERT = {0: RuntimeError(NCCL), 3: RuntimeError(ASSERT)}
NCCL_ERROR = {0: DistBackendError(NCCL)}
NCCL_ABORTED = {0: DistBackendError(ABORTED)}
DIED_SILENTLY = f"{WHO} died after step 812 {SILENT} (see {{}}/rank-3.log)"
DIED_FOR_MEMORY = f"{WHO} died after step 812, by SIGKILL: {KERNEL}"
ENDED_BY_RAY = "ended by Ray because its node ran out of memory"
DIED_WITH_NODE = f"{WHO} died after step 812 with its node"
ANNOUNCED_LOSS = f"{WHO} was lost after step 812 with its node, as announced (spot)"
PEER_DIED = "a worker that worker 1 was connected to died after step 812"
PEER_OF_0_DIED = "that worker 0 was connected to died after step 812"
GPU_FAILED = f"the GPU of {WHO} failed after step 812: {ECC}"
ASSERT_FAILED = f"RuntimeError on worker 3: {ASSERT} (see {{}}/rank-3.log)"


@pytest.mark.parametrize(
    ("failures", "alive", "kills", "notice", "kind", "node", "sentence"),
    [
        (LOST, True, 1, "spot", Kind.DIED, "n3", DIED_SILENTLY),
        (LOST, True, 2, "", Kind.OUT_OF_MEMORY, "n3", DIED_FOR_MEMORY),
        (NO_MEMORY, True, 1, "", Kind.OUT_OF_MEMORY, "n3", ENDED_BY_RAY),
        (LOST, False, 2, "", Kind.NODE_LOST, "n3", DIED_WITH_NODE),
        (LOST, False, 1, "spot", Kind.PREEMPTED, "n3", ANNOUNCED_LOSS),
        # A survivor that has lost its peer is not the cause.
        (PEER, True, 1, "", Kind.DIED, "", PEER_DIED),
        (SAVING, True, 1, "", Kind.DIED, "", PEER_DIED),
        (NCCL_ERROR, True, 1, "", Kind.DIED, "", PEER_OF_0_DIED),
        (NCCL_ABORTED, True, 1, "", Kind.DIED, "", "was connected to died after step 812"),
        (NCCL_ERROR, False, 1, "", Kind.NODE_LOST, "", DIED_WITH_NODE),
        # A failed GPU is the cause, and so is an error in a rank's own code.
        (FAILED_GPU, True, 1, "", Kind.DEVICE_FAILED, "n3", GPU_FAILED),
        (FAILED_ASSERT, True, 1, "", Kind.EXCEPTION, "n3", ASSERT_FAILED),
    ],
)
def test_a_failure_is_laid_to_its_true_cause_in_one_sentence(
    failures: Failures,
    alive: bool,
    kills: int,
    notice: str,
    kind: Kind,
    node: str,
    sentence: str,
    tmp_path: Path,
) -> None:
    nodes = Nodes(
        lost=lambda nodes: set() if alive else set(nodes) & {"n3"},
        oom_kills=lambda name: kills,
        preempted={"n3": notice} if notice else {},
    )
    state = State(workers=INFOS, step=812, progressed=True, logs=tmp_path, nodes=nodes)
    (tmp_path / "rank-3.log").touch()
    classified = classify(failures, state, [])
    assert classified.kind is kind
    assert classified.sentence.endswith(sentence.format(tmp_path))
    assert classified.node == node
    without_log = classify({1: WorkerLost()}, state, []).sentence
    assert "see" not in without_log, "a log that does not exist is not named"


# --- heartbeats -----------------------------------------------------------------------------------

status = partial(Status, phase="training", step=9, ticks=0, waiting=False)


def trained(hang_seconds: float, gaps: list[float]) -> tuple[HangDetector, float]:
    """A detector that has seen steps at these intervals, and the time of the last step."""
    detector = HangDetector(hang_seconds, 0.0)
    time = 0.0
    for step, gap in enumerate([100.0, *gaps]):  # loading may take long before the first step
        for second in range(0, int(gap), 3):  # the driver is not stopped
            assert detector.update({}, time + second) is None
        time += gap
        assert detector.update({0: status(step=step), 1: status(step=step)}, time) is None
    return detector, time


WAITS = status(waiting=True)
TRAINS = status()
SILENT = status(phase="training")
EVALUATES = status(phase="evaluating")
STARTS = status(phase="starting", step=0)
MUTE = status(phase="starting", step=0)
STEADY = [1.0] * 8
QUICK = [0.1] * 8


@pytest.mark.parametrize(
    ("hang_seconds", "gaps", "first", "second", "expected_seconds", "rank", "reason"),
    [
        (10.0, STEADY, WAITS, SILENT, 20, 1, "does not answer"),
        (10.0, STEADY, SILENT, SILENT, 20, 0, "does not answer"),
        (10.0, STEADY, WAITS, TRAINS, 20, 1, "has been training after step 9"),
        (10.0, STEADY, WAITS, status(step=8, waiting=True), 20, 1, "after step 8"),
        (10.0, STEADY, WAITS, EVALUATES, 70, 1, "has been evaluating"),
        (10.0, STEADY, WAITS, status(phase="reading"), 70, 1, "has been reading"),
        (10.0, STEADY, status(phase="saving"), status(phase="saving"), 1810, 0, "has been saving"),
        # The limit grows with the pauses that were seen before.
        (2.0, QUICK, WAITS, TRAINS, 2 + 2, 1, ""),
        (2.0, [3.0] * 8, WAITS, TRAINS, 15 + 6, 1, ""),
        (2.0, [0.1, 0.1, 3.0, 0.1], WAITS, TRAINS, 15 + 6, 1, ""),
        (2.0, [6.0] * 8, WAITS, EVALUATES, 30 + 6 * 12, 1, ""),
        (0.0, QUICK, WAITS, TRAINS, None, None, ""),  # switched off
        # Before the second step only a rank that does not answer is said to hang.
        (2.0, [], STARTS, MUTE, 22, 1, "does not answer"),
        (10.0, [], STARTS, MUTE, 40, 1, "does not answer"),
        (2.0, [], STARTS, STARTS, None, None, ""),
    ],
)
def test_a_hang_is_noticed_in_time_and_laid_to_the_rank_that_causes_it(
    hang_seconds: float,
    gaps: list[float],
    first: Status,
    second: Status,
    expected_seconds: float | None,
    rank: int | None,
    reason: str,
) -> None:
    statuses = {0: first, 1: second}
    silent = {rank for rank, status in statuses.items() if status is SILENT or status is MUTE}
    detector, time = trained(hang_seconds, gaps)
    detector.update(statuses, time, silent)
    hang = None
    seconds = None
    for tenth in range(18_200 if expected_seconds else 17_000):
        hang = detector.update({}, time + tenth / 10, silent)
        if hang:
            seconds = tenth / 10
            break
    assert seconds == pytest.approx(expected_seconds, abs=0.2)
    if hang:
        assert hang.rank == rank and reason in hang.why
        assert hang.silent == silent


@pytest.mark.parametrize("gaps", [[], STEADY], ids=["before the first step", "while it evaluates"])
def test_a_rank_that_answers_now_and_then_is_not_stuck(gaps: list[float]) -> None:
    """As on a busy machine, where a rank imports and loads for minutes, seconds at a time."""
    detector, time = trained(10.0, gaps)
    works = EVALUATES if gaps else STARTS
    detector.update({0: works, 1: works}, time)
    for second in range(60):
        silent = {1} if second % 10 < 9 else set()
        assert detector.update({}, time + second, silent) is None
    hangs = [detector.update({}, time + second, {1}) for second in range(60, 100)]
    limit = 20 if gaps else 40
    first = next(second for second, hang in enumerate(hangs) if hang)
    assert first == pytest.approx(limit, abs=4), "silent for longer than a rank may be"
    hang = hangs[first]
    assert hang is not None and hang.rank == 1 and hang.silent == {1}


def test_a_driver_that_was_stopped_itself_starts_to_look_anew() -> None:
    """As on a laptop that sleeps: nothing has moved, but nobody hangs."""
    detector, time = trained(2.0, QUICK)
    detector.update({1: TRAINS}, time)
    assert detector.update({}, time + 65, {0, 1}) is None
    assert detector.update({}, time + 66, {0, 1}) is None
    hang = detector.update({}, time + 69.1, {1})
    assert hang is not None and hang.rank == 1


def test_any_sign_of_progress_ends_a_pause() -> None:
    for progress in (status(step=10), status(phase="saving"), status(ticks=1)):
        detector, time = trained(2.0, QUICK)
        for seconds, second in ((0.0, TRAINS), (3.9, TRAINS), (3.95, progress), (7.5, progress)):
            assert detector.update({0: TRAINS, 1: second}, time + seconds) is None


def test_a_driver_that_is_gone_is_not_contacted_in_a_busy_loop() -> None:
    """Not even when an answer is left to send."""
    closed = threading.Event()
    sent: list[Any] = []

    def send(heartbeat: Any, answer: Any) -> Reply:
        closed.wait(60)
        sent.append(answer)
        if answer is not None:
            raise ConnectionError
        return Reply(question="stack", number=1)

    thread = HeartbeatThread(Heartbeat(), send, lambda reply: None)
    thread.close()
    closed.set()
    thread._thread.join(60)
    assert not thread._thread.is_alive()
    assert len(sent) == 2 and sent[0] is None


# --- records --------------------------------------------------------------------------------------

COMPLETED = "completed"
STARTED = "started"
SCHEDULED = "scheduled"
RANKS = {
    "world": [0, 1, 2, 3],
    "tp01": [0, 1],
    "tp23": [2, 3],
    "dp02": [0, 2],
    "dp13": [1, 3],
    "pp": [2, 5],
}


def entry(
    group: str, number: int, state: str, name: str = "nccl:all_reduce", pg_id: int = 0
) -> dict[str, Any]:
    """A collective as FlightRecorderDetail.hpp's dump_json writes it; the fields that are read."""
    fields = {
        "pg_id": pg_id,
        "process_group": [group, "default_pg"],
        "profiling_name": name,
        "state": state,
    }
    return fields | {
        "collective_seq_id": number,
        "retired": state == COMPLETED,
        "is_p2p": "->" in name or "<-" in name,
    }


def collectives(
    group: str, scheduled: int, completed: int, started: int = 0, **fields: Any
) -> list[dict[str, Any]]:
    """The first `scheduled` collectives of a group, with how far each has come."""
    entries = []
    for number in range(1, scheduled + 1):
        state = SCHEDULED
        if number <= completed:
            state = COMPLETED
        elif number <= started:
            state = STARTED
        entries.append(entry(group, number, state, **fields))
    return entries


def record(*entries: dict[str, Any], ranks: dict[str, list[int]] = RANKS, first_id: int = 0) -> str:
    """The flight record of one rank, as JSON."""
    config = {
        name: {"name": name, "desc": "", "ranks": str(members)} for name, members in ranks.items()
    }
    numbered = [entry_ | {"record_id": first_id + i} for i, entry_ in enumerate(entries)]
    return json.dumps({"version": "2.10", "pg_config": config, "entries": numbered})


def at(**reached: tuple[int, ...]) -> str:
    """The record of a rank by the collectives scheduled, completed and started in each group."""
    entries = []
    for group, counts in reached.items():
        entries += collectives(group, *counts)
    return record(*entries)


def later_group(scheduled: int) -> list[dict[str, Any]]:
    """Two completed collectives of a second group of the same name."""
    return collectives("world", scheduled, 2, pg_id=1)


EARLIER = collectives("world", 9, 9)
GLOO = "gloo:all_reduce"
RECV = "nccl:recv 1<-0"
SEND = "nccl:send 0->1"
AHEAD = at(world=(9, 7))
CHAIN = {0: at(tp01=(5, 5), dp02=(3, 2)), 1: at(tp01=(5, 5), dp13=(3, 2))}
# Rank 3 hangs. Rank 2 waits for it in a tensor-parallel group; 0 and 1 wait in data-parallel ones.
CHAIN |= {2: at(tp23=(5, 4), dp02=(2, 2)), 3: at(tp23=(4, 4), dp13=(2, 2))}
CASES: dict[str, tuple[dict[int, str], int | None, str]] = {
    # The other ranks have scheduled two more collectives, and wait in .cpu().
    "asked": ({0: AHEAD, 1: AHEAD, 2: at(world=(7, 7)), 3: AHEAD}, 2, "collective 7 asked for"),
    # All have scheduled the same; one GPU has not started (needs TORCH_NCCL_ENABLE_TIMING=1).
    "started": ({r: at(world=(9, 7, 7 if r == 1 else 8)) for r in range(4)}, 1, "7 started"),
    "completed": ({r: at(world=(9, 6 if r == 3 else 8, 9)) for r in range(4)}, 3, "6 completed"),
    "nothing asked yet": ({0: AHEAD, 1: AHEAD, 2: AHEAD, 3: at()}, 3, "collective 0 asked for"),
    "all alike": (dict.fromkeys(range(4), AHEAD), None, ""),
    "no record": ({0: "", 1: ""}, None, ""),
    "a chain": (CHAIN, 3, "in group"),
    # Each waits for the other, and the records do not show which is wrong.
    "a circle": ({0: at(tp01=(3, 2), world=(2, 2)), 1: at(tp01=(2, 2), world=(3, 2))}, None, ""),
    # The record is full, and has dropped the entries of a group that is seldom used.
    "full": (
        {
            0: at(world=(9, 9), tp01=(1, 1)),
            1: record(*collectives("world", 9, 9)[3:], first_id=500),
        },
        None,
        "",
    ),
    "gloo": (
        {r: record(*collectives("0", 3 - r, 3, name=GLOO), ranks={}) for r in (0, 1)},
        1,
        "2 asked for",
    ),
    # An earlier group of the same name had come further.
    "again": ({r: record(*EARLIER, *later_group(3 - r)) for r in (0, 1)}, 1, "2 asked for"),
    "not sent": (
        {0: at(), 1: record(entry("world", 1, SCHEDULED, RECV))},
        0,
        "what rank 1 waits to receive",
    ),
    "sent": (
        {r: record(entry("world", 1, SCHEDULED, name)) for r, name in enumerate((SEND, RECV))},
        None,
        "",
    ),
    "received": ({0: at(), 1: record(entry("world", 1, COMPLETED, RECV))}, None, ""),
    "a stage of a pipeline": (
        {2: at(), 5: record(entry("pp", 1, STARTED, RECV))},
        2,
        "what rank 5 waits",
    ),
}


def summaries(records: dict[int, str]) -> dict[int, str]:
    """What the ranks with a record tell the driver of it."""
    by_rank = {rank: summary(rank, record) for rank, record in records.items()}
    return {rank: text for rank, text in by_rank.items() if text}


@pytest.mark.parametrize(("records", "rank", "reason"), CASES.values(), ids=CASES)
def test_the_rank_that_the_others_wait_for(
    records: dict[int, str], rank: int | None, reason: str
) -> None:
    blame = rank_behind(summaries(records))
    if rank is None:
        assert blame is None
    else:
        assert blame is not None and blame.rank == rank and reason in blame.why


@pytest.mark.parametrize(
    ("silent_ranks", "case", "ended_rank", "message"),
    [
        ([], "asked", 2, "worker 2, process 0 on , is behind in group world"),
        ([], "all alike", 0, "worker 0, process 0 on , has been training"),
        ([0], "asked", 0, "worker 0, process 0 on , has been training"),  # it has no record
    ],
)
def test_a_hang_is_laid_to_the_rank_behind_and_not_to_rank_0(
    silent_ranks: list[int], case: str, ended_rank: int, message: str
) -> None:
    """All ranks wait in `.cpu()`, so heartbeats alone would name the first."""
    answers = {
        "stack": {},
        "collectives": summaries(CASES[case][0]),
        "flight_recorder": CASES[case][0],
    }
    workers = mock.Mock(restartable=True, ask=answers.get)
    supervisor = Supervisor(workers, mock.Mock(step=9))
    supervisor.infos = {
        rank: WorkerInfo(rank=rank, pid=0, ip="", node="", oom_kills=0) for rank in range(4)
    }
    hang = Hang(0, "has been training for 20 s without progress", frozenset(silent_ranks))
    blamed = supervisor._end_hang(hang)
    assert list(blamed) == [ended_rank] and str(blamed[ended_rank]).startswith(message)
    assert workers.kill.call_args == mock.call([supervisor.infos[ended_rank]])
