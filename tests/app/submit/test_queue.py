"""The queue: who is next, who is stopped for whom, and when it is expected; and a small Ray that lets runs in."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from app.submit.queue import Book, Entry, Row, State, expected, first, kueue, line, state_of, victims
from tests.running import (
    POINTS,
    ROOT,
    Ended,
    committed,
    environment,
    here,
    mlflow_run,
    ray_head_with_jobs,
    trireme,
    wait_until,
)


def row(id: str, priority: int = 0, workers: int = 1, state: State = State.WAITING, **more: Any) -> Row:
    left = more.pop("left", None)
    known: dict[str, Any] = {"user": "ada", "words": (), "since": 0.0, "each": {"CPU": 1.0}, "job": id, "run": id}
    return Row(Entry(id=id, priority=priority, workers=workers, **known | more), state, left)


RUNS = State.RUNNING


@pytest.mark.parametrize(
    ("rows", "quotas", "chosen"),
    [
        ([row("b", since=2), row("a", since=1)], {}, "a"),
        ([row("a", since=1), row("b", 5, since=2)], {}, "b"),
        ([row("a", since=1, workers=99), row("b", since=2)], {}, "a"),  # nobody overtakes it, or it would starve
        ([row("a"), row("s", state=State.STARTING)], {}, None),  # what it takes is not yet seen
        ([row("a", since=1), row("b", since=2, user="bob"), row("r", state=RUNS)], {"ada": 1}, "b"),
        ([row("a", since=1), row("r", state=RUNS)], {"*": 2}, "a"),
        ([row("a", workers=2), row("r", state=RUNS)], {"*": 2, "ada": 3}, "a"),
        ([row("a", workers=3), row("r", state=RUNS)], {"*": 2}, None),
        ([row("a", since=1, state=State.LOST), row("b", since=2)], {}, "a"),
    ],
)
def test_who_is_next(rows: list[Row], quotas: dict[str, int], chosen: str | None) -> None:
    found = first(rows, quotas)
    assert (found and found.entry.id) == chosen


@pytest.mark.parametrize(
    ("wants", "rows", "free", "stopped"),
    [
        (row("a", 5), [row("r", state=RUNS)], {}, ["r"]),
        (row("a", 5), [row("r", 5, state=RUNS)], {}, []),
        (row("a", 5, 3), [row("r", state=RUNS)], {"CPU": 1.0}, []),  # it would not be enough
        (row("a", 5, 2), [row("r", state=RUNS)], {"CPU": 1.0}, ["r"]),
        (row("a", 5), [row("old", state=RUNS, started=1.0), row("new", state=RUNS, started=2.0)], {}, ["new"]),
        (row("a", 5), [row("new", 1, state=RUNS, started=2.0), row("low", state=RUNS, started=1.0)], {}, ["low"]),
        (row("a", 5), [row("r", state=RUNS), row("s", state=State.STOPPING)], {}, []),
        (row("a", 5), [row("r", state=State.STARTING)], {}, []),  # it has nothing to save yet
    ],
)
def test_who_is_stopped_for_it(wants: Row, rows: list[Row], free: dict[str, float], stopped: list[str]) -> None:
    assert [each.entry.id for each in victims(wants, [wants, *rows], free)] == stopped


def test_when_each_is_expected_to_start() -> None:
    runs = [row("r", workers=2, state=RUNS, left=60.0), row("s", workers=2, state=RUNS, left=20.0)]
    waiting = [row("a", 5, workers=1), row("b", workers=3, since=1), row("c", workers=3, since=2)]
    assert expected([*waiting, *runs], {}) == {"a": 20.0, "b": 60.0, "c": None}, "nobody knows how long b takes"
    assert expected([*waiting[:1], row("r", state=RUNS)], {"CPU": 1.0}) == {"a": 0.0}


@pytest.mark.parametrize(
    ("status", "entry", "steps", "state"),
    [
        ("RUNNING", {}, False, State.WAITING),
        ("RUNNING", {"started": 100.0}, False, State.STARTING),
        ("RUNNING", {"started": 100.0}, True, State.RUNNING),
        ("RUNNING", {"started": 100.0, "stopped_for": "b"}, True, State.STOPPING),
        ("STOPPED", {"started": 100.0, "stopped_for": "b"}, True, State.LOST),
        ("SUCCEEDED", {"started": 100.0, "stopped_for": "b"}, True, State.OVER),
        ("STOPPED", {"started": 100.0}, True, State.OVER),
        (None, {"started": 100.0}, True, State.LOST),
    ],
)
def test_what_a_job_says_about_its_entry(status: str | None, entry: dict[str, Any], steps: bool, state: State) -> None:
    assert state_of(dataclasses.replace(row("a").entry, **entry), status, steps, 110.0) is state


def test_it_is_kept_in_the_storage(tmp_path: Path) -> None:
    book, entry = Book(str(tmp_path)), row("queue-a", 3, words=("x.yaml", "workers=2")).entry
    book.write(entry)
    book.set_quota("ada", 8)
    book.set_quota("bob", 2)
    book.set_quota("ada", None)
    again = Book(str(tmp_path))
    assert again.entries() == [entry] and again.quotas() == {"bob": 2}
    again.remove("queue-a")
    assert line([]) == book.entries() == []


def test_on_kubernetes_kueue_gets_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "cluster" / "kuberay-job.yaml")
    words = ["submit", *POINTS, "run.name=x", "--queue", "--cluster", file, "--priority", "7"]
    manifest = yaml.safe_load(here(monkeypatch, capsys, *words).out)
    labels = {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/priority-class": "priority-7"}
    assert manifest["metadata"]["labels"] == labels and manifest["spec"]["suspend"] is True
    assert manifest["spec"]["entrypoint"] == f"trireme train {' '.join(POINTS)} run.name=x"
    cluster = str(ROOT / "cluster" / "kuberay-cluster.yaml")
    assert "takes a RayJob, and this is a RayCluster" in here(monkeypatch, capsys, *words[:-3], cluster).err
    assert kueue(manifest, [], "x", 0)["metadata"]["labels"] == labels


@contextlib.contextmanager
def cluster() -> Iterator[Callable[..., Ended]]:
    """Runs commands for a new head with four CPUs and a job server."""
    with ray_head_with_jobs() as (_, dashboard):
        env = environment(RAY_ADDRESS=dashboard, RAY_AUTH_MODE="disabled")
        yield lambda *words, **more: trireme(*words, env=env | more)


@pytest.mark.slow
def test_three_users_runs_on_one_cluster(tmp_path: Path) -> None:
    """Ada's run takes the whole cluster, so bob's waits. Eve's, of a higher priority, has ada's save and wait again.
    Then the head is lost with all jobs: at the next one each goes on, by priority and age."""
    slow, storage = tmp_path / "slow", f"run.storage={tmp_path}"
    slow.touch()
    run = ["submit", *POINTS, storage, "workers=2", "resources_per_worker.CPU=2", "strategy=ddp", "launcher=actors"]
    run += ["train.steps=400", "checkpoint.every_seconds=5", "task_args.step_seconds=5", f"task_args.slow_while={slow}"]

    def submit(user: str, *more: str) -> None:
        sent = there(*run, f"run.name={user}", "--queue", "--detach", *more, LOGNAME=user)
        assert sent.code == 0, sent.err

    def queue() -> dict[str, Any]:
        said = there("queue", "--storage", str(tmp_path), "--json")
        assert said.code == 0, said.out + said.err
        return {row["entry"]["run"]: row for row in cast(Any, said.json)}

    with cluster() as there:
        submit("ada")
        wait_until(lambda: committed(tmp_path / "ada"))
        submit("bob")
        wait_until(lambda: queue().get("bob", {}).get("starts_in") is not None)
        assert queue()["ada"]["state"] == "running"
        submit("eve", "--priority", "5")
        wait_until(lambda: committed(tmp_path / "eve"))
        wanted = {"eve": "running", "ada": "waiting", "bob": "waiting"}
        wait_until(lambda: {name: row["state"] for name, row in queue().items()} == wanted)
        at = {name: committed(tmp_path / name)[-1] for name in ("ada", "eve")}
    slow.unlink()
    with cluster() as there:
        sent = there("queue", "resume", "--storage", str(tmp_path))
        assert "3 sent again" in sent.out, sent.out + sent.err
        wait_until(lambda: all(committed(tmp_path / name)[-1:] == [400] for name in ("eve", "ada", "bob")))
        wait_until(lambda: queue() == {})
    ended = {name: (tmp_path / name / "model" / "weights.pt").stat().st_mtime for name in ("ada", "bob", "eve")}
    assert sorted(ended, key=lambda name: ended[name]) == ["eve", "ada", "bob"]
    for name, step in at.items():
        assert int(mlflow_run(tmp_path, name).data.tags["trireme.resumed_from"]) >= step > 0
