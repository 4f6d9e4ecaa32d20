"""What is decided after a failure, and what it is called: tables of functions that start no process."""

from pathlib import Path

import pytest
from torch.distributed import DistBackendError

from app.launchers.failure_policy import Action, Capacity, Failure, Kind, Limits, decide, fewer_workers, growth
from app.launchers.recovery import Device, Nodes, State, classify, device_failure
from app.launchers.workers import WorkerInfo, WorkerLost


def failure(
    kind: Kind, step: int = 10, *, progressed: bool = True, sentence: str = "it broke", node: str = "", at: float = 0.0
) -> Failure:
    return Failure(kind, sentence, step, progressed, node, at)


DIED, STILLBORN = failure(Kind.DIED), failure(Kind.DIED, progressed=False)
ANNOUNCED, BUG = failure(Kind.PREEMPTED), failure(Kind.EXCEPTION)
ON_A, HUNG_ON_A, OOM_ON_A, GPU_ON_A, ON_B = (
    failure(kind, node=node, progressed=False)
    for kind, node in (
        *((Kind.DIED, "a"), (Kind.HUNG, "a"), (Kind.OUT_OF_MEMORY, "a"), (Kind.DEVICE_FAILED, "a"), (Kind.DIED, "b")),
    )
)


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
        ([failure(Kind.EXCEPTION, 10), failure(Kind.EXCEPTION, 20)], 3, Action.RETRY, "it broke", 0),
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
        ([failure(Kind.NON_RETRYABLE)], ELASTIC, capacity(4, 3, 99.0), Action.GIVE_UP, 0),
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


WHO = "worker 3, process 47 on 10.0.0.2,"


@pytest.mark.parametrize(
    ("details", "kills", "alive", "notice", "kind", "sentence"),
    [
        ("", 1, True, "spot", Kind.DIED, f"{WHO} died after step 812 (see {{}}/rank-3.log)"),
        ("", 2, True, "", Kind.OUT_OF_MEMORY, f"{WHO} died after step 812, killed by the kernel for memory"),
        ("OUT_OF_MEMORY", 1, True, "", Kind.OUT_OF_MEMORY, "ended by Ray because its node ran out of memory"),
        ("", 2, False, "", Kind.NODE_LOST, f"{WHO} died after step 812 with its node"),
        ("", 1, False, "spot", Kind.PREEMPTED, f"{WHO} went after step 812 with its node, as announced (spot)"),
    ],
)
def test_the_true_cause_in_one_sentence(
    details: str, kills: int, alive: bool, notice: str, kind: Kind, sentence: str, tmp_path: Path
) -> None:
    info = WorkerInfo(3, 47, "10.0.0.2", "n", oom_kills=1)
    nodes = Nodes(lambda node: alive, lambda node: kills, {"n": notice} if notice else {})
    state = State({3: info}, 812, True, tmp_path, nodes)
    (tmp_path / "rank-3.log").touch()
    found = classify({1: RuntimeError("Connection closed by peer"), 3: WorkerLost(details=details)}, state, [])
    assert found.kind is kind and found.sentence.endswith(sentence.format(tmp_path)) and found.node == "n"
    assert "see" not in classify({1: WorkerLost()}, state, []).sentence, "a log that does not exist is not named"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ...", Device.HARDWARE),
        ("CUDA error: uncorrectable NVLink error detected during the execution", Device.HARDWARE),
        ("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", Device.HARDWARE),
        ("NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.", Device.HARDWARE),
        ("CUDA error: device-side assert triggered", Device.PROGRAM),
        ("CUDA error: an illegal memory access was encountered", Device.PROGRAM),
        ("CUDA error: unspecified launch failure", Device.PROGRAM),
        ("CUDA driver error: misaligned address", Device.PROGRAM),
        # these leave the device as it was
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", None),
        ("CUDA error: out of memory", None),
        ("CUDA error: invalid device ordinal", None),
        ("CUDA error: no kernel image is available for execution on the device", None),
        ("NCCL communicator was aborted on rank 1.", None),
        ("a hardware stack error of the user's", None),
    ],
)
def test_what_cuda_says_of_a_device_that_can_compute_no_more(text: str, expected: Device | None) -> None:
    assert device_failure(RuntimeError(text)) is expected


NCCL_SAYS = (
    "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.27.3",
    "NCCL communicator was aborted on rank 1. Original reason for failure was: NCCL error: ncclRemoteError",
)


@pytest.mark.parametrize("said", NCCL_SAYS)
@pytest.mark.parametrize("alive", [True, False])
def test_a_survivor_that_lost_its_peer_is_not_the_cause(said: str, alive: bool, tmp_path: Path) -> None:
    infos = {rank: WorkerInfo(rank, 40 + rank, f"10.0.0.{rank}", "ab"[rank]) for rank in (0, 1)}
    nodes = Nodes(lambda node: alive or node == "a", lambda node: 0, {})
    state = State(infos, 0, False, tmp_path, nodes)
    found = classify({0: DistBackendError(said)}, state, [])
    assert (found.kind, found.node) == ((Kind.DIED, "") if alive else (Kind.NODE_LOST, ""))
    assert alive or found.sentence == "worker 1, process 41 on 10.0.0.1, died before the first step with its node"
    assert decide([found], Limits(3)).action is Action.RETRY, "also before the first step"


def test_a_failed_gpu_is_the_cause_and_its_node_is_known(tmp_path: Path) -> None:
    state = State({1: WorkerInfo(1, 41, "10.0.0.1", "b")}, 7, True, tmp_path, Nodes())
    broken = RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")
    found = classify({0: RuntimeError(NCCL_SAYS[0]), 1: broken}, state, [])
    assert (found.kind, found.node) == (Kind.DEVICE_FAILED, "b")
    said = "the GPU of worker 1, process 41 on 10.0.0.1, failed after step 7: CUDA error: uncorrectable ECC"
    assert found.sentence.startswith(said)
    code = RuntimeError("CUDA error: device-side assert triggered")
    assert classify({0: RuntimeError(NCCL_SAYS[0]), 1: code}, state, []).kind is Kind.EXCEPTION
