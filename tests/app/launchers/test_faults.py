"""What is decided after a failure, and what it is called: tables, nearly without processes."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app import persistence
from app.config import Config
from app.config_io import load_config, with_values
from app.job import Job
from app.launchers import answers
from app.launchers.elastic import Elastic, count_room, limits_of
from app.launchers.failure_policy import (
    Action,
    Death,
    Failure,
    Kind,
    Limits,
    Room,
    between_failures,
    death_of,
    decide,
    grown,
    interval,
    settled,
)
from app.launchers.hangs import Sign
from app.launchers.watching import Watching
from app.launchers.whereabouts import kernel_kills, last_words
from app.run.prepare import prepare, read_task
from tests.running import memory_group


def failure(
    kind: Kind, step: int = 10, *, progressed: bool = True, sentence: str = "it broke", node: str = "", at: float = 0.0
) -> Failure:
    return Failure(kind, sentence, step, progressed, node, at)


DIED, STILLBORN = failure(Kind.DIED), failure(Kind.DIED, progressed=False)
ANNOUNCED, BUG = failure(Kind.NOTICE), failure(Kind.EXCEPTION)
ON_A, HUNG_ON_A, OOM_ON_A, ON_B = (
    failure(kind, node=node)
    for kind, node in ((Kind.DIED, "a"), (Kind.HUNG, "a"), (Kind.MEMORY, "a"), (Kind.DIED, "b"))
)


@pytest.mark.parametrize(
    ("history", "limit", "action", "says"),
    [
        ([DIED], 3, Action.RETRY, "it broke"),
        ([DIED] * 3, 3, Action.RETRY, "it broke"),
        ([DIED] * 4, 3, Action.GIVE_UP, "fault.max_restarts=3 is used up"),
        ([DIED], 0, Action.GIVE_UP, "fault.max_restarts is 0"),
        ([DIED] * 3 + [failure(Kind.DIED, at=3601.0)], 3, Action.RETRY, "it broke"),  # an hour later
        ([DIED] * 3 + [failure(Kind.DIED, at=3599.0)], 3, Action.GIVE_UP, "used up"),
        ([ANNOUNCED] * 50, 0, Action.RETRY, "it broke"),
        ([ANNOUNCED] * 50 + [DIED], 1, Action.RETRY, "it broke"),
        ([DIED] + [failure(Kind.NO_ROOM)] * 9, 1, Action.RETRY, "it broke"),
        ([failure(Kind.HOPELESS)], 3, Action.GIVE_UP, "it broke"),
        ([failure(Kind.EXCEPTION, progressed=False)], 3, Action.GIVE_UP, "it broke"),
        ([BUG], 3, Action.RETRY, "it broke"),
        ([BUG, BUG], 3, Action.GIVE_UP, "twice at the same step"),
        ([BUG, DIED, BUG], 9, Action.GIVE_UP, "twice at the same step"),
        ([failure(Kind.EXCEPTION, 10), failure(Kind.EXCEPTION, 20)], 3, Action.RETRY, "it broke"),
        ([BUG, failure(Kind.EXCEPTION, sentence="another")], 3, Action.RETRY, "another"),
        ([DIED, BUG], 3, Action.RETRY, "it broke"),
    ],
)
def test_whether_to_start_again(history: list[Failure], limit: int, action: Action, says: str) -> None:
    decision = decide(history, Limits(limit))
    assert decision.action is action and says in decision.reason


@pytest.mark.parametrize(
    ("history", "pause"),
    [
        ([DIED], 0),
        ([STILLBORN], 1),
        ([STILLBORN] * 3, 4),
        ([DIED, STILLBORN, STILLBORN], 2),
        ([STILLBORN, DIED], 0),
        ([STILLBORN] * 30, 60),
        ([STILLBORN, failure(Kind.NO_ROOM, progressed=False)], 1),
    ],
)
def test_the_pause_doubles_while_no_step_is_taken(history: list[Failure], pause: float) -> None:
    assert decide(history, Limits(99)).pause == pause


def room(workers: int, free: int, seconds: float = 0.0, valid: tuple[int, ...] = (1, 2, 4), **without: int) -> Room:
    return Room(workers, 4, free, valid, without, seconds)


ELASTIC = Limits(9, elastic_seconds=30.0)


@pytest.mark.parametrize(
    ("history", "limits", "there", "action", "workers"),
    [
        ([DIED], ELASTIC, room(4, 4), Action.RETRY, 0),
        ([DIED], ELASTIC, room(4, 3, 10.0), Action.WAIT, 0),
        ([DIED], ELASTIC, room(4, 3, 30.0), Action.SMALLER, 2),  # 3 make no layout
        ([DIED], ELASTIC, room(4, 0, 99.0), Action.WAIT, 0),
        ([DIED], Limits(9, None), room(4, 3, 99.0), Action.WAIT, 0),
        ([DIED], Limits(9, 30.0, min_workers=3), room(4, 3, 99.0), Action.WAIT, 0),
        ([failure(Kind.HOPELESS)], ELASTIC, room(4, 3, 99.0), Action.GIVE_UP, 0),
        # twice at one node
        ([ON_A, ON_A], ELASTIC, room(4, 4, a=4), Action.EXCLUDE, 4),
        ([ON_A, HUNG_ON_A], ELASTIC, room(4, 4, a=3), Action.EXCLUDE, 2),
        ([OOM_ON_A, ON_B, OOM_ON_A], ELASTIC, room(4, 4, a=2), Action.EXCLUDE, 2),
        ([ON_A, ON_A], Limits(9, None), room(4, 4, a=3), Action.RETRY, 0),
        ([ON_A, ON_A], ELASTIC, room(4, 4, a=0), Action.RETRY, 0),  # there is no other
        # and then the others are gone: as many as there were at once, fewer when nothing else comes
        ([ON_A, ON_A, ON_B], ELASTIC, replace(room(4, 0, 3.0), pardoned=4), Action.PARDON, 4),
        ([ON_A, ON_A, ON_B], ELASTIC, replace(room(4, 0, 2.9), pardoned=4), Action.WAIT, 0),
        ([ON_A, ON_A, ON_B], ELASTIC, replace(room(4, 1), pardoned=2), Action.WAIT, 0),
        ([ON_A, ON_A, ON_B], ELASTIC, replace(room(4, 1, 99.0), pardoned=2), Action.PARDON, 2),
        ([ON_A, ON_A, ON_B], ELASTIC, replace(room(4, 2, 99.0), pardoned=2), Action.SMALLER, 2),
        ([ON_A, ON_B], ELASTIC, room(4, 4, a=4, b=4), Action.RETRY, 0),
        ([ON_A, failure(Kind.EXCEPTION, node="a")], ELASTIC, room(4, 4, a=4), Action.RETRY, 0),
        ([ON_A, failure(Kind.DIED, node="a", at=3601.0)], ELASTIC, room(4, 4, a=4), Action.RETRY, 0),
    ],
)
def test_with_what_to_go_on(history: list[Failure], limits: Limits, there: Room, action: Action, workers: int) -> None:
    decision = decide(history, limits, there)
    assert (decision.action, decision.workers) == (action, workers)
    assert decision.node == ("a" if action is Action.EXCLUDE else "")
    if action in (Action.PARDON, Action.SMALLER, Action.WAIT):
        assert settled(there, limits) is (action is not Action.WAIT), "waiting ends when there is another answer"


def test_growing_again() -> None:
    assert grown(room(2, 4)) == 4
    assert grown(room(2, 3)) is None and grown(room(2, 3, valid=(1, 2, 3))) == 3
    assert grown(room(4, 9)) is None and grown(room(2, 1)) is None
    assert grown(room(2, 9, valid=(1, 2, 4, 8))) == 4, "as many as there were at the start"


WHO = "worker 3, process 47 on 10.0.0.2,"


@pytest.mark.parametrize(
    ("known", "kind", "sentence"),
    [
        ({}, Kind.DIED, f"{WHO} died after step 812"),
        ({"step": 0}, Kind.DIED, f"{WHO} died before the first step"),
        ({"kernel_kills": 1}, Kind.MEMORY, f"{WHO} died after step 812, killed by the kernel for memory"),
        (
            {"ray_memory": True},
            Kind.MEMORY,
            f"{WHO} died after step 812, ended by Ray because its node ran out of memory",
        ),
        ({"node_gone": True}, Kind.NODE, f"{WHO} died after step 812 with its node"),
        ({"announced": "spot"}, Kind.DIED, f"{WHO} died after step 812"),
        (
            {"node_gone": True, "announced": "spot", "kernel_kills": 1},
            Kind.NOTICE,
            f"{WHO} went after step 812 with its node, as announced (spot)",
        ),
        ({"told": "SIGTERM"}, Kind.NOTICE, f"{WHO} went after step 812, as announced (SIGTERM)"),
        (
            {"told": "SIGTERM", "ray_memory": True},
            Kind.MEMORY,
            f"{WHO} died after step 812, ended by Ray because its node ran out of memory",
        ),
        ({"told": "SIGTERM", "node_gone": True}, Kind.NODE, f"{WHO} died after step 812 with its node"),
        (
            {"last_words": "Fatal Python error: Segmentation fault", "kernel_kills": 1},
            Kind.DIED,
            f"{WHO} died after step 812: Fatal Python error: Segmentation fault",
        ),
    ],
)
def test_the_true_cause_in_one_sentence(known: dict[str, Any], kind: Kind, sentence: str) -> None:
    everything: dict[str, Any] = {"who": WHO, "step": 812} | known
    assert death_of(Death(**everything)) == (kind, sentence)


def test_what_the_kernel_ends_for_memory_is_counted() -> None:
    hog = "import sys; sys.stdin.readline(); kept = b'x' * (1 << 28)"
    with memory_group(64 << 20) as group:
        process = subprocess.Popen([sys.executable, "-c", hog], stdin=subprocess.PIPE)
        (group / "cgroup.procs").write_text(str(process.pid))
        before = kernel_kills()
        process.communicate(b"\n", timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert kernel_kills() > before


def test_last_words_of_this_attempt_only(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("hello\nFatal Python error: Aborted\n\nThread 0x1\n")
    assert last_words(log, 0) == "Fatal Python error: Aborted"
    assert last_words(log, log.stat().st_size) == "" == last_words(tmp_path / "none", 0)


# --- how often to save ------------------------------------------------------------------------------------------


def test_the_interval_loses_least() -> None:
    def lost(seconds: float, stall: float, mean: float) -> float:
        """Share of the time that is lost, with failures at exponential distances and restarts that cost nothing."""
        return 1 - seconds / (mean * math.expm1((seconds + stall) / mean))

    for stall, mean in ((0.5, 60.0), (2.0, 3600.0), (30.0, 3600.0)):
        best = interval(stall, 0.0, mean)
        around = [lost(best * factor, stall, mean) for factor in (0.8, 0.9, 1.0, 1.1, 1.25)]
        assert min(around) == around[2], (stall, mean, around)
    assert interval(0.001, 5.0, 60.0) == 5.0, "no sooner than the one before is written"
    assert interval(100.0, 1.0, 10.0) == 10.0, "saving costs more than failing"
    assert between_failures(0, 0.0, 1) == 30 * 86400 and between_failures(0, 0.0, 30) == 86400
    assert between_failures(9, 3600.0, 2592000) == pytest.approx(360.1)


def test_a_save_is_due_by_the_measured_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Any = object.__new__(persistence.Persistence)
    config = load_config([], ["task=tests.tasks:Points", "checkpoint.auto=true"])
    kept.job = SimpleNamespace(config=config, between_failures=60.0)
    kept.checkpointer = SimpleNamespace(last_total_seconds=0.1)
    kept.costliest, kept.saved_at = None, 100.0
    monkeypatch.setattr(persistence.time, "monotonic", lambda: 107.0)
    assert not kept.overdue(), "nothing is measured yet: a minute"
    kept.costliest = 0.3
    assert kept.interval() == pytest.approx(interval(0.3, 0.1, 60.0)) and 5 < kept.interval() < 7 and kept.overdue()
    kept.job.config = with_values(config, {"checkpoint.auto": False})
    assert kept.interval() == 300.0


# --- other numbers of workers -----------------------------------------------------------------------------------


def elastic(workers: int, *more: str) -> Elastic:
    def written() -> Config:
        return load_config([], ["task=tests.chain:Chain", "train.steps=5", f"workers={workers}", *more])

    config = written()
    task = read_task(config)
    prepared = prepare(config, task, workers, devices_per_node=None)
    return Elastic(written(), config, task, {"CPU": 1.0}, None, prepared)


@pytest.mark.parametrize(
    ("workers", "more", "sizes"),
    [
        (4, ["strategy=ddp", "train.global_batch_size=12"], [0, 1, 2, 3, 4, 4]),
        (4, ["strategy=fsdp", "train.global_batch_size=16"], [0, 1, 2, 2, 4, 4]),  # 16 does not divide by 3
        (4, ["strategy=ddp+pipeline", "parallel.pp=2", "train.global_batch_size=12"], [0, 0, 2, 2, 4, 4]),
        (4, ["strategy=ddp", "parallel.dp_replicate=4", "train.global_batch_size=12"], [0, 1, 2, 3, 4, 4]),
    ],
)
def test_whole_groups_and_the_same_global_batch(workers: int, more: list[str], sizes: list[int]) -> None:
    found = elastic(workers, *more)
    assert [found.largest(n) for n in range(len(sizes))] == sizes
    most = max(n for n in sizes if 0 < n < workers)
    other = found.found(most)
    assert other is not None
    config, prepared = other
    dims, first = prepared.layout.dims, found.first.layout.dims
    assert (dims.world_size, dims.pp, dims.tp) == (most, first.pp, first.tp)
    assert config.train.global_batch_size == found.started_with.train.global_batch_size
    share = config.train.global_batch_size // first.dp
    assert config.train.micro_batch_size is not None and config.train.micro_batch_size <= share, "more accumulation"
    assert prepared.steps == found.first.steps


def test_machines_that_come_back_one_after_another_cost_one_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now, nodes = [100.0], {"a": {"CPU": 2.0}}
    monkeypatch.setattr("app.launchers.elastic.time.monotonic", lambda: now[0])
    monkeypatch.setattr("app.launchers.elastic.free_by_node", lambda excluded: nodes)
    found = elastic(4, "strategy=ddp", "train.global_batch_size=12")
    job = found.job(Job(found.started_with, found.first.layout, "/nowhere", "x", "y", 5, "/"), 2)
    said: dict[float, int | None] = {}
    for second in range(100, 112):
        now[0] = float(second)
        nodes |= {"b": {"CPU": 1.0}} if second >= 102 else {}
        nodes |= {"c": {"CPU": 1.0}} if second >= 104 else {}
        said[second] = found.more(job)
    assert {second for second, more in said.items() if more is None} == set(range(100, 107))
    assert {more for second, more in said.items() if second >= 107} == {4}, "never 3"


def test_room_is_counted_by_node() -> None:
    nodes = {"a": {"CPU": 1.5, "GPU": 2.0}, "b": {"CPU": 0.9}, "c": {"CPU": 8.0, "GPU": 1.0}}
    assert count_room({"CPU": 0.5}, nodes) == 3 + 1 + 16
    assert count_room({"CPU": 1.0, "GPU": 1.0}, nodes) == 1 + 0 + 1
    assert count_room({"TPU": 1.0}, nodes) == 0


def test_where_an_autoscaler_may_add_nodes_it_has_the_time_for_it() -> None:
    config = load_config([], ["task=tests.tasks:Points", "cluster.min_workers=2"])
    assert limits_of(config) == Limits(3, 30.0, 2)
    assert limits_of(config, growing=True) == Limits(3, 600.0, 2)
    config = with_values(config, {"fault.elastic_seconds": None})
    assert limits_of(config, growing=True).elastic_seconds is None


# --- who is stuck -----------------------------------------------------------------------------------------------


def test_nobody_is_asked_before_a_long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], []
    monkeypatch.setattr("app.launchers.watching.time.monotonic", lambda: now[0])
    stands = answers.beat()[0]
    signs: dict[int, Any] = {0: (stands, True), 1: None}

    def ask(what: str) -> dict[int, Any]:
        asked.append(now[0])
        return signs if what == "beat" else {0: "in a collective", 1: None}

    watching = Watching(load_config([], ["task=tests.tasks:Points", "fault.hang_seconds=2"]), ask)
    for at in (10.0, 11.0, 12.0):
        now[0] = at
        watching.heard()
        assert watching.look() is None
    found, looks = None, 0
    while found is None and looks < 100:
        now[0], looks = now[0] + 0.5, looks + 1
        found = watching.look()
    assert found is not None and (found.rank, found.dumb) == (1, frozenset({1}))
    assert found.why.startswith("does not answer, and nothing was heard for")
    assert min(asked) > 12 + 5, "five times the longest silence of a second"
    assert Sign(*signs[0]).waits and "1\ndoes not answer" in watching.stacks(lambda rank: str(rank))
