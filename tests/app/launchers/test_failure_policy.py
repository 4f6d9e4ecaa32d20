"""What is decided after a failure, and what it is called: tables of functions that start no process."""

from functools import partial
from pathlib import Path

import pytest
from torch.distributed import DistBackendError

from app.checkpoint import CheckpointError
from app.launchers.failure_policy import Action, Capacity, Failure, Kind, Limits, decide, fewer_workers, growth
from app.launchers.recovery import Device, Nodes, State, classify, device_failure
from app.launchers.workers import Failures, WorkerInfo, WorkerLost

failure = partial(Failure, sentence="it broke", step=10, progressed=True)
DIED, STILLBORN = failure(Kind.DIED), failure(Kind.DIED, progressed=False)
ANNOUNCED, BUG = failure(Kind.PREEMPTED), failure(Kind.EXCEPTION)
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
        ([DIED] * 3 + [failure(Kind.DIED, at=3601.0)], 3, Action.RETRY, "it broke", 0),  # an hour later
        ([DIED] * 3 + [failure(Kind.DIED, at=3600.0)], 3, Action.GIVE_UP, "used up", 0),
        ([ANNOUNCED] * 50 + [DIED], 1, Action.RETRY, "it broke", 0),
        ([DIED] + [failure(Kind.NO_CAPACITY)] * 9, 1, Action.RETRY, "it broke", 0),
        ([failure(Kind.NON_RETRYABLE)], 3, Action.GIVE_UP, "it broke", 0),
        ([failure(Kind.EXCEPTION, progressed=False)], 3, Action.GIVE_UP, "it broke", 0),
        ([DIED, BUG, BUG], 9, Action.GIVE_UP, "twice at the same step: trying again would not help", 0),
        ([BUG, failure(Kind.EXCEPTION, step=20)], 3, Action.RETRY, "it broke", 0),
        ([BUG, failure(Kind.EXCEPTION, sentence="another")], 3, Action.RETRY, "another", 0),
        ([DIED, BUG], 3, Action.RETRY, "it broke", 0),
        # the pause doubles while no step is taken
        ([DIED, STILLBORN, STILLBORN], 99, Action.RETRY, "it broke", 2),
        ([STILLBORN] * 30, 99, Action.RETRY, "it broke", 60),
        ([STILLBORN, failure(Kind.NO_CAPACITY, progressed=False)], 99, Action.RETRY, "it broke", 1),
    ],
)
def test_whether_and_when_to_start_again(
    history: list[Failure], limit: int, action: Action, says: str, pause: float
) -> None:
    decision = decide(history, Limits(limit))
    assert (decision.action, decision.pause) == (action, pause)
    assert decision.reason.startswith(history[-1].sentence) and decision.reason.endswith(says)


def capacity(
    workers: int, free: int, seconds: float = 0.0, valid: tuple[int, ...] = (1, 2, 4), **without: int
) -> Capacity:
    return Capacity(workers, 4, free, valid, without, seconds)


ELASTIC = Limits(9, elastic_seconds=30.0)
ROOM = "; there is room for 3 of 4 workers"
EXCLUDED = "; 2 failures began at that node, which gets no more workers"
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
        ([ON_A, failure(Kind.DIED, node="a", at=3601.0)], ELASTIC, capacity(4, 4, a=4), Action.RETRY, 0),
    ],
)
def test_with_what_to_continue(
    history: list[Failure], limits: Limits, found: Capacity, action: Action, workers: int
) -> None:
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


INFOS = {rank: WorkerInfo(rank, 44 + rank, f"10.0.0.{rank}", f"n{rank}", oom_kills=1) for rank in range(4)}
WHO = "worker 3, process 47 on 10.0.0.3,"
PEER = {1: RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")}
SAVING = {1: CheckpointError(str(PEER[1]))}
LOST, NO_MEMORY = PEER | {3: WorkerLost()}, PEER | {3: WorkerLost(details="OUT_OF_MEMORY")}
NCCL = "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.27.3"
ABORTED = "NCCL communicator was aborted on rank 0. Original reason for failure was: NCCL error: ncclRemoteError"
ECC, ASSERT = "CUDA error: uncorrectable ECC error encountered", "CUDA error: device-side assert triggered"
SICK, WRONG = ({0: RuntimeError(NCCL), 3: RuntimeError(text)} for text in (f"{ECC}\nmore", ASSERT))


@pytest.mark.parametrize(
    ("failures", "alive", "kills", "notice", "kind", "node", "sentence"),
    [
        (LOST, True, 1, "spot", Kind.DIED, "n3", f"{WHO} died after step 812 (see {{}}/rank-3.log)"),
        (LOST, True, 2, "", Kind.OUT_OF_MEMORY, "n3", f"{WHO} died after step 812, killed by the kernel for memory"),
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
    nodes = Nodes(lambda name: alive or name != "n3", lambda name: kills, {"n3": notice} if notice else {})
    state = State(INFOS, 812, True, tmp_path, nodes)
    (tmp_path / "rank-3.log").touch()
    found = classify(failures, state, [])
    assert found.kind is kind and found.sentence.endswith(sentence.format(tmp_path)) and found.node == node
    assert "see" not in classify({1: WorkerLost()}, state, []).sentence, "a log that does not exist is not named"
