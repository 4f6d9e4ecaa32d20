"""What is decided after a failure, and what it is called: tables of functions that start no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.launchers.failure_policy import Action, Capacity, Failure, Kind, Limits, decide, fewer_workers, growth
from app.launchers.recovery import Nodes, State, classify
from app.launchers.workers import WorkerInfo, WorkerLost


def failure(
    kind: Kind, step: int = 10, *, progressed: bool = True, sentence: str = "it broke", node: str = "", at: float = 0.0
) -> Failure:
    return Failure(kind, sentence, step, progressed, node, at)


DIED, STILLBORN = failure(Kind.DIED), failure(Kind.DIED, progressed=False)
ANNOUNCED, BUG = failure(Kind.PREEMPTED), failure(Kind.EXCEPTION)
ON_A, HUNG_ON_A, OOM_ON_A, ON_B = (
    failure(kind, node=node, progressed=False)
    for kind, node in ((Kind.DIED, "a"), (Kind.HUNG, "a"), (Kind.OUT_OF_MEMORY, "a"), (Kind.DIED, "b"))
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
