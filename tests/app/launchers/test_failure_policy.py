"""What is decided after a failure and what it is called; which rank hangs, or holds up the others, by heartbeats and by
records as torch's flight recorder writes them. No process is started."""

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed import DistBackendError

from app.checkpoint import CheckpointError
from app.launchers.blame import rank_behind
from app.launchers.failure_policy import Action, Capacity, Failure, Kind, Limits, decide, fewer_workers, growth
from app.launchers.heartbeats import Hang, HangDetector, HeartbeatThread, Reply
from app.launchers.recovery import Device, Nodes, State, classify, device_failure
from app.launchers.supervisor import Supervisor
from app.launchers.workers import Failures, Status, WorkerLost
from app.training.events import WorkerInfo
from app.training.job import Heartbeat

pytestmark = pytest.mark.pure


def failure(kind: Kind, **more: Any) -> Failure:
    return Failure(kind=kind, **{"sentence": "it broke", "step": 10, "progressed": True} | more)


DIED, STILLBORN = failure(Kind.DIED), failure(Kind.DIED, progressed=False)
ANNOUNCED, BUG = failure(Kind.PREEMPTED), failure(Kind.EXCEPTION)
CRASH = failure(Kind.CRASHED, signal="SIGSEGV")
ON_A, HUNG_ON_A, OOM_ON_A, GPU_ON_A = (
    failure(kind, node="a", progressed=False) for kind in (Kind.DIED, Kind.HUNG, Kind.OUT_OF_MEMORY, Kind.DEVICE_FAILED)
)
ON_B = failure(Kind.DIED, node="b", progressed=False)


@pytest.mark.parametrize(
    ("history", "limit", "action", "says", "pause"),
    [
        ([DIED] * 3, 3, Action.RETRY, "it broke", 0),
        ([DIED] * 4, 3, Action.GIVE_UP, "fault.max_restarts=3 is used up", 0),
        ([DIED], 0, Action.GIVE_UP, "it broke; fault.max_restarts is 0", 0),
        ([DIED] * 3 + [failure(Kind.DIED, clock=3601.0)], 3, Action.RETRY, "it broke", 0),  # an hour later
        ([DIED] * 3 + [failure(Kind.DIED, clock=3600.0)], 3, Action.GIVE_UP, "used up", 0),
        ([ANNOUNCED] * 50 + [DIED], 1, Action.RETRY, "it broke", 0),
        ([DIED] + [failure(Kind.NO_CAPACITY)] * 9, 1, Action.RETRY, "it broke", 0),
        ([failure(Kind.NON_RETRYABLE)], 3, Action.GIVE_UP, "it broke", 0),
        ([failure(Kind.EXCEPTION, progressed=False)], 3, Action.GIVE_UP, "it broke", 0),
        ([DIED, BUG, BUG], 9, Action.GIVE_UP, "twice at the same step: trying again would not help", 0),
        # a crash may be memory that failed, once; the same again, no step further on, is the program
        ([CRASH], 9, Action.RETRY, "it broke", 0),
        ([CRASH, CRASH], 9, Action.GIVE_UP, "no step further: trying again would not help", 0),
        ([failure(Kind.CRASHED, signal="SIGSEGV", step=20), CRASH], 9, Action.GIVE_UP, "would not help", 0),
        ([CRASH, DIED, CRASH], 9, Action.GIVE_UP, "no step further: trying again would not help", 0),
        ([CRASH, failure(Kind.CRASHED, signal="SIGSEGV", step=20)], 9, Action.RETRY, "it broke", 0),
        ([CRASH, failure(Kind.CRASHED, signal="SIGBUS")], 9, Action.RETRY, "it broke", 0),
        ([BUG, failure(Kind.EXCEPTION, step=20)], 3, Action.RETRY, "it broke", 0),
        ([BUG, failure(Kind.EXCEPTION, sentence="another")], 3, Action.RETRY, "another", 0),
        ([DIED, BUG], 3, Action.RETRY, "it broke", 0),
        # the pause doubles while no step is taken
        ([DIED, STILLBORN, STILLBORN], 99, Action.RETRY, "it broke", 2),
        ([STILLBORN] * 30, 99, Action.RETRY, "it broke", 60),
        ([STILLBORN, failure(Kind.NO_CAPACITY, progressed=False)], 99, Action.RETRY, "it broke", 1),
    ],
)
def test_whether_and_when_to_start_again(history: Any, limit: int, action: Action, says: str, pause: float) -> None:
    decision = decide(history, Limits(limit))
    assert (decision.action, decision.pause) == (action, pause)
    assert decision.reason.startswith(history[-1].sentence) and decision.reason.endswith(says)


def capacity(workers: int, free: int, seconds: float = 0.0, valid: Any = (1, 2, 4), **without: int) -> Capacity:
    return Capacity(
        workers=workers,
        wanted=4,
        available=free,
        valid=valid,
        available_without=without,
        missing_seconds=seconds,
    )


ELASTIC = Limits(9, elastic_seconds=30.0)
ROOM = "; there is room for 3 of 4 workers"
EXCLUDED = "; 2 failures began at that node, which is excluded"
SAYS = {Action.WAIT: ROOM, Action.RESIZE: ROOM, Action.EXCLUDE_NODE: EXCLUDED}


@pytest.mark.parametrize(
    ("history", "limits", "found", "action", "workers"),
    [
        ([STILLBORN], ELASTIC, capacity(4, 4), Action.RETRY, 0),
        ([STILLBORN], ELASTIC, capacity(4, 3, 10.0), Action.WAIT, 0),
        ([STILLBORN], ELASTIC, capacity(4, 3, 30.0), Action.RESIZE, 2),  # 3 make no layout
        ([DIED], Limits(9, None), capacity(4, 3, 99.0), Action.WAIT, 0),
        ([DIED], Limits(9, 30.0, min_workers=3), capacity(4, 3, 99.0), Action.WAIT, 0),
        ([DIED], Limits(9, 30.0, min_workers=2), capacity(4, 3, 99.0), Action.RESIZE, 2),
        # twice at one node
        ([ON_A, HUNG_ON_A], ELASTIC, capacity(4, 4, a=3), Action.EXCLUDE_NODE, 2),
        ([OOM_ON_A, ON_B, OOM_ON_A], ELASTIC, capacity(4, 4, a=2), Action.EXCLUDE_NODE, 2),
        ([GPU_ON_A], ELASTIC, capacity(4, 4, a=4), Action.RETRY, 0),  # though no step was taken
        ([GPU_ON_A, GPU_ON_A], ELASTIC, capacity(4, 4, a=4), Action.EXCLUDE_NODE, 4),
        ([ON_A, ON_A], Limits(9, None), capacity(4, 4, a=3), Action.RETRY, 0),
        ([ON_A, ON_A], ELASTIC, capacity(4, 4, b=4), Action.RETRY, 0),  # there is no other
        ([ON_A, failure(Kind.EXCEPTION, node="a")], ELASTIC, capacity(4, 4, a=4), Action.RETRY, 0),
        ([ON_A, failure(Kind.DIED, node="a", clock=3601.0)], ELASTIC, capacity(4, 4, a=4), Action.RETRY, 0),
    ],
)
def test_with_what_to_continue(history: Any, limits: Limits, found: Capacity, action: Action, workers: int) -> None:
    decision = decide(history, limits, found)
    assert (decision.action, decision.workers) == (action, workers)
    assert decision.reason == "it broke" + SAYS.get(action, "")
    assert decision.pause == (0 if history[-1].progressed else 2 ** (len(history) - 1))
    assert decision.node == ("a" if action is Action.EXCLUDE_NODE else "")
    if action in (Action.RESIZE, Action.WAIT):
        assert fewer_workers(found, limits) == workers, "waiting ends when there is another answer"


def test_growth_is_to_the_most_that_makes_a_layout() -> None:
    cases = ((1, 4, 4), (1, 9, 4), (1, 3, 2), (2, 3, None), (2, 2, None), (4, 8, None), (2, 0, None))
    for workers, free, expected in cases:
        assert growth(capacity(workers, free, valid=(1, 2, 4, 8))) == expected


def test_what_cuda_says_of_a_device_that_can_compute_no_more() -> None:
    said = {
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ...": Device.HARDWARE,
        "NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.": Device.HARDWARE,
        "CUDA error: an illegal memory access was encountered": Device.PROGRAM,
        "CUDA error: out of memory": None,  # which leaves the device as it was
        "a hardware stack error of the user's": None,
    }
    assert {text: device_failure(RuntimeError(text)) for text in said} == said


INFOS = {
    rank: WorkerInfo(rank=rank, pid=44 + rank, ip=f"10.0.0.{rank}", node=f"n{rank}", oom_kills=1) for rank in range(4)
}
WHO = "worker 3, process 47 on 10.0.0.3,"
PEER = {1: RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")}
SAVING = {1: CheckpointError(str(PEER[1]))}
LOST, NO_MEMORY = PEER | {3: WorkerLost()}, PEER | {3: WorkerLost(details="OUT_OF_MEMORY")}
NCCL = "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.27.3"
ABORTED = "NCCL communicator was aborted on rank 0. Original reason for failure was: NCCL error: ncclRemoteError"
SILENT = "without a word, as by SIGKILL (`kill -9`, a scheduler, or the kernel for memory)"
KERNEL = "killed by the kernel for memory"
ECC, ASSERT = "CUDA error: uncorrectable ECC error encountered", "CUDA error: device-side assert triggered"
SICK, WRONG = ({0: RuntimeError(NCCL), 3: RuntimeError(text)} for text in (f"{ECC}\nmore", ASSERT))


@pytest.mark.parametrize(
    ("failures", "alive", "kills", "notice", "kind", "node", "sentence"),
    [
        (LOST, True, 1, "spot", Kind.DIED, "n3", f"{WHO} died after step 812 {SILENT} (see {{}}/rank-3.log)"),
        (LOST, True, 2, "", Kind.OUT_OF_MEMORY, "n3", f"{WHO} died after step 812, by SIGKILL: {KERNEL}"),
        (NO_MEMORY, True, 1, "", Kind.OUT_OF_MEMORY, "n3", "ended by Ray because its node ran out of memory"),
        (LOST, False, 2, "", Kind.NODE_LOST, "n3", f"{WHO} died after step 812 with its node"),
        (LOST, False, 1, "spot", Kind.PREEMPTED, "n3", f"{WHO} went after step 812 with its node, as announced (spot)"),
        # a survivor that has lost its peer is not the cause
        (PEER, True, 1, "", Kind.DIED, "", "a worker that worker 1 was connected to died after step 812"),
        (SAVING, True, 1, "", Kind.DIED, "", "a worker that worker 1 was connected to died after step 812"),
        ({0: DistBackendError(NCCL)}, True, 1, "", Kind.DIED, "", "that worker 0 was connected to died after step 812"),
        ({0: DistBackendError(ABORTED)}, True, 1, "", Kind.DIED, "", "was connected to died after step 812"),
        ({0: DistBackendError(NCCL)}, False, 1, "", Kind.NODE_LOST, "", f"{WHO} died after step 812 with its node"),
        # but a failed GPU is, and what its code did
        (SICK, True, 1, "", Kind.DEVICE_FAILED, "n3", f"the GPU of {WHO} failed after step 812: {ECC}"),
        (WRONG, True, 1, "", Kind.EXCEPTION, "n3", f"RuntimeError on worker 3: {ASSERT} (see {{}}/rank-3.log)"),
    ],
)
def test_the_true_cause_in_one_sentence(
    failures: Failures, alive: bool, kills: int, notice: str, kind: Kind, node: str, sentence: str, tmp_path: Path
) -> None:
    nodes = Nodes(
        is_alive=lambda name: alive or name != "n3",
        oom_kills=lambda name: kills,
        preempted={"n3": notice} if notice else {},
    )
    state = State(workers=INFOS, step=812, progressed=True, logs=tmp_path, nodes=nodes)
    (tmp_path / "rank-3.log").touch()
    found = classify(failures, state, [])
    assert found.kind is kind and found.sentence.endswith(sentence.format(tmp_path)) and found.node == node
    assert "see" not in classify({1: WorkerLost()}, state, []).sentence, "a log that does not exist is not named"


# --- heartbeats -------------------------------------------------------------------------------------------------------

status = partial(Status, phase="training", step=9, ticks=0, waiting=False, age=0.5)


def trained(least: float, gaps: list[float]) -> tuple[HangDetector, float]:
    """A detector that has seen steps with these gaps between them, and when the last one was."""
    detector, now = HangDetector(least, 0.0), 0.0
    for step, gap in enumerate([100.0, *gaps]):  # loading takes as long as it takes
        now += gap
        assert detector.update({0: status(step=step), 1: status(step=step)}, now) is None
    return detector, now


WAITS, TRAINS, SILENT = status(waiting=True), status(), status(age=4.0)
EVALUATES, STARTS = status(phase="evaluating"), status(phase="starting", step=0)
MUTE = status(phase="starting", step=0, age=30.0)
STEADY, QUICK = [1.0] * 8, [0.1] * 8


@pytest.mark.parametrize(
    ("least", "gaps", "first", "second", "after", "rank", "why"),
    [
        (10.0, STEADY, WAITS, SILENT, 20, 1, "does not answer"),
        (10.0, STEADY, SILENT, SILENT, 20, 0, "does not answer"),
        (10.0, STEADY, WAITS, TRAINS, 20, 1, "has been training after step 9"),
        (10.0, STEADY, WAITS, status(step=8, waiting=True), 20, 1, "after step 8"),
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
        (2.0, [], STARTS, MUTE, 22, 1, "does not answer"),
        (10.0, [], STARTS, MUTE, 40, 1, "does not answer"),
        (2.0, [], STARTS, STARTS, None, None, ""),
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
    for change in (status(step=10), status(phase="saving"), status(ticks=1)):
        detector, now = trained(2.0, QUICK)
        for seconds, second in ((0.0, TRAINS), (3.9, TRAINS), (3.95, change), (7.5, change)):
            assert detector.update({0: TRAINS, 1: second}, now + seconds) is None


def test_a_driver_that_is_gone_is_not_asked_without_a_pause() -> None:
    """Also when there is an answer that it has not got."""
    closed = threading.Event()
    sent: list[Any] = []

    def send(beat: Any, answer: Any) -> Reply:
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
    supervisor.infos = {rank: WorkerInfo(rank=rank, pid=0, ip="", node="") for rank in range(4)}
    blamed = supervisor._end_hang(Hang(0, "has been training for 20 s without progress", frozenset(silent)))
    assert list(blamed) == [ended] and str(blamed[ended]).startswith(said)
    assert workers.kill.call_args == mock.call([supervisor.infos[ended]])
