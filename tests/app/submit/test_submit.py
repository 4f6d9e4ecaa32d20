"""`trireme submit` and its queue: refusals, what is sent, who is next; and jobs on real servers."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from app.errors import UserError
from app.submit import submission
from app.submit.client import Server
from app.submit.queue import (
    Entry,
    QueueStore,
    Row,
    State,
    expected_starts,
    next_to_start,
    runs_to_stop,
    state_of,
    waiting_line,
)
from tests.ray_heads import ray_head_with_jobs
from tests.running import (
    POINTS,
    ROOT,
    committed,
    environment,
    finish,
    here,
    mlflow_run,
    start,
    trireme,
    wait_until,
)

NOWHERE = ["--address", "http://127.0.0.1:9"]
KUBERAY = str(ROOT / "cluster" / "kuberay-cluster.yaml")
TOO_LARGE = ["--cluster", "aws", "workers=65", "resources_per_worker.GPU=1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit"], "no experiment is given"),
        (["submit", "{outside}"], f"experiment.yaml is not in {ROOT}"),
        (["submit", *POINTS, "--env", "A=planted"], "takes a variable's name"),
        (["submit", *POINTS, "--env", "NOT_THERE"], "NOT_THERE, which --env names, is not set"),
        (["submit", *POINTS, "--working-dir", "/nowhere"], "there is no folder /nowhere"),
        (["submit", *POINTS, *TOO_LARGE], "room for 64"),
        (["submit", *POINTS, *NOWHERE], "cannot be used (Failed to connect"),
        (["queue", *NOWHERE], "cannot be used (Failed to connect"),
        (["submit", "stop", "raysubmit_x", *NOWHERE], "cannot be used (Failed to connect"),
        (["submit", *POINTS, "--queue", "--dry-run"], "MLFLOW_TRACKING_PASSWORD is a secret"),
        (["submit", *POINTS, "--queue", "--cluster", KUBERAY], "takes a RayJob"),
        (["submit", *POINTS, "tracking.uri=http://me:planted@host"], "tracking.uri holds a secret"),
        (["submit", *POINTS, "task_args.hf_token=planted"], "task_args.hf_token holds a secret"),
        (["submit", *POINTS, "task_args.note=sesame"], "task_args.note holds a secret"),
        (["submit", *POINTS, "--address", "a", "--cluster", "b"], "--address and --cluster"),
        (["submit", *POINTS, "--adress", "x"], "No such option"),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(
    arguments: Any, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "sesame")
    outside = tmp_path / "experiment.yaml"
    outside.write_text("task: tabular\n")
    ended = here(monkeypatch, capsys, *(word.format(outside=outside) for word in arguments))
    assert ended.code == 2 and message in ended.err and "Usage" not in ended.err
    assert not any(secret in ended.out + ended.err for secret in ("planted", "sesame"))


def test_a_dry_run_shows_variables_by_name_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    queued = here(monkeypatch, capsys, "submit", *POINTS, "--queue", "--dry-run", "--json").json
    assert queued["command"].startswith("python -m app.submit queue enter --id queue-")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:pass@host:5000")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    for name in ("HF_TOKEN", "MLFLOW_TRACKING_TOKEN", "COPIED"):
        monkeypatch.setenv(name, "planted")
    env_options = [
        word for name in ("HF_TOKEN", "COPIED", "NCCL_DEBUG") for word in ("--env", name)
    ]
    out = here(monkeypatch, capsys, "submit", *POINTS, "run.name=x", *env_options, "--dry-run").out
    secrets = ["COPIED", "HF_TOKEN", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_URI"]
    shown = ", ".join(f"{name} (secret)" for name in secrets)
    assert f"environment {shown}, NCCL_DEBUG\n" in out and "planted" not in out
    assert "ships" in out and "task=tests.tasks:Points" in out


def test_secrets_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = Path(submission._leave_secrets("laptop", {"PLANTED_TOKEN": "planted"}))
    assert path.stat().st_mode & 0o777 == 0o600
    code = """import os, runpy, sys
sys.argv = ["trireme", "--help"]
try: runpy.run_module("app.submit", run_name="__main__")
finally: print(os.environ["PLANTED_TOKEN"], "TRIREME_SECRETS" in os.environ)"""
    env = environment(TRIREME_SECRETS=str(path))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.stdout.endswith("planted False\n") and not path.exists(), done.stderr


class Broken:
    """A job server whose connection breaks after each piece of the log, and then fails once."""

    def __init__(self, pieces: list[str], status: str, exit_code: int | None) -> None:
        self.pieces = pieces
        self.sent = 0
        self.tries = 0
        self.client: Any = self
        self.get_job_status = lambda job_id: JobStatus.RUNNING
        info = SimpleNamespace(status=JobStatus(status), driver_exit_code=exit_code)
        info.message = "it ended"
        self.get_job_info = lambda job_id: info

    async def tail_job_logs(self, job_id: str) -> Any:
        self.sent += 1
        yield "".join(self.pieces[: self.sent])  # Ray sends the log from its beginning
        if self.sent < len(self.pieces):
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def connect(self) -> None:
        self.tries += 1
        if self.tries % 2:
            raise UserError("no server answers")


@pytest.mark.parametrize(
    ("pieces", "status", "exit_code", "expected_code", "expected_lines"),
    [
        (["one\n", "two\n", "three\n"], "FAILED", 2, 2, ["the job continues"]),
        (["one\n"], "FAILED", 137, 1, []),
        (["one\n"], "SUCCEEDED", 0, 0, []),
        (["one\n"], "FAILED", None, 1, ["Ray says: it ended"]),
        (["one\n"], "STOPPED", None, 130, []),
    ],
)
def test_the_log_survives_dropped_connections_and_ends_with_the_jobs_code(
    pieces: list[str],
    status: str,
    exit_code: int | None,
    expected_code: int,
    expected_lines: list[str],
) -> None:
    server: Any = Broken(pieces, status, exit_code)
    written = []
    lines = []
    assert submission.follow(server, "job", written.append, lines.append) == expected_code
    assert "".join(written) == "".join(pieces), "no piece is missing or repeated"
    assert len(lines) == len(expected_lines)
    assert all(part in line for part, line in zip(expected_lines, lines, strict=True))


def test_a_refused_token_ends_the_following_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: Any = Broken(["one\n", "two\n"], "SUCCEEDED", 0)
    lost.connect = Server("127.0.0.1:9").connect
    refusing = Mock(side_effect=AuthenticationError("not yours"))
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", refusing)
    with pytest.raises(UserError, match=r"cannot be used \("):
        submission.follow(lost, "job", str, str)


def test_a_folder_with_a_package_called_app_does_not_hide_triremes(tmp_path: Path) -> None:
    # Each file is added to those before; the last one makes the folder Trireme's own sources.
    flags = {"mine.py": "", "app.py": "-P ", "app/mine.py": "-P ", "app/submit/__main__.py": ""}
    for file, flag in flags.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
        job = submission.prepare("train", ("task=app.mine:Mine",), [], run="x", folder=tmp_path)
        assert job.entrypoint == f"python {flag}-m app.submit train task=app.mine:Mine"


# --- the queue ------------------------------------------------------------------------------------


def row(
    id: str, priority: int = 0, workers: int = 1, state: State = State.WAITING, **fields: Any
) -> Row:
    """An entry of ada's in the queue, with its state."""
    seconds_left = fields.pop("left", None)
    defaults: dict[str, Any] = {
        "user": "ada",
        "words": (),
        "since": 0.0,
        "each": {"CPU": 1.0},
        "job": id,
        "run": id,
    }
    return Row(
        Entry(id=id, priority=priority, workers=workers, **defaults | fields), state, seconds_left
    )


RUNS = State.RUNNING
OLD = row("old", state=RUNS, started=1.0)


@pytest.mark.parametrize(
    ("rows", "quotas", "chosen"),
    [
        ([row("b", since=2), row("a", since=1)], {}, "a"),
        ([row("a", since=1), row("b", 5, since=2)], {}, "b"),
        # No other entry overtakes a large one, or it would starve.
        ([row("a", since=1, workers=99), row("b", since=2)], {}, "a"),
        # What a starting run takes is not known yet.
        ([row("a"), row("s", state=State.STARTING)], {}, None),
        ([row("a", since=1), row("b", since=2, user="bob"), row("r", state=RUNS)], {"ada": 1}, "b"),
        ([row("a", since=1), row("r", state=RUNS)], {"*": 2}, "a"),
        ([row("a", workers=2), row("r", state=RUNS)], {"*": 2, "ada": 3}, "a"),
        ([row("a", workers=3), row("r", state=RUNS)], {"*": 2}, None),
        ([row("a", since=1, state=State.LOST), row("b", since=2)], {}, "a"),
    ],
)
def test_the_next_entry_to_start_is_chosen_by_priority_age_and_quota(
    rows: list[Row], quotas: dict[str, int], chosen: str | None
) -> None:
    next_row = next_to_start(rows, quotas)
    assert (next_row and next_row.entry.id) == chosen


@pytest.mark.parametrize(
    ("waiting", "rows", "free", "stopped"),
    [
        (row("a", 5), [row("r", state=RUNS)], {}, ["r"]),
        (row("a", 5), [row("r", 5, state=RUNS)], {}, []),
        (row("a", 5, 3), [row("r", state=RUNS)], {"CPU": 1.0}, []),  # not enough would be free
        (row("a", 5, 2), [row("r", state=RUNS)], {"CPU": 1.0}, ["r"]),
        (row("a", 5), [OLD, row("new", state=RUNS, started=2.0)], {}, ["new"]),
        (row("a", 5), [row("new", 1, state=RUNS, started=2.0), OLD], {}, ["old"]),
        (row("a", 5), [row("r", state=RUNS), row("s", state=State.STOPPING)], {}, []),
        (row("a", 5), [row("r", state=State.STARTING)], {}, []),  # nothing to save yet
    ],
)
def test_runs_of_lower_priority_are_stopped_where_that_makes_enough_room(
    waiting: Row, rows: list[Row], free: dict[str, float], stopped: list[str]
) -> None:
    assert [
        stopped_row.entry.id for stopped_row in runs_to_stop(waiting, [waiting, *rows], free)
    ] == stopped


def test_expected_starts_follow_from_the_time_that_runs_need() -> None:
    runs = [row("r", workers=2, state=RUNS, left=60.0), row("s", workers=2, state=RUNS, left=20.0)]
    waiting = [row("a", 5, workers=1), row("b", workers=3, since=1), row("c", workers=3, since=2)]
    # How long b will take is not known, so c's start is not either.
    assert expected_starts([*waiting, *runs], {}) == {"a": 20.0, "b": 60.0, "c": None}
    assert expected_starts([*waiting[:1], row("r", state=RUNS)], {"CPU": 1.0}) == {"a": 0.0}


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
def test_the_state_of_an_entry_follows_from_that_of_its_job(
    status: str | None, entry: dict[str, Any], steps: bool, state: State
) -> None:
    assert state_of(dataclasses.replace(row("a").entry, **entry), status, steps, 110.0) is state


def test_the_queue_is_kept_in_the_storage(tmp_path: Path) -> None:
    store = QueueStore(str(tmp_path))
    entry = row("queue-a", 3, words=("x.yaml", "workers=2")).entry
    store.write(entry)
    for user, limit in (("ada", 8), ("bob", 2), ("ada", None)):
        store.set_quota(user, limit)
    reopened = QueueStore(str(tmp_path))
    assert reopened.entries() == [entry] and reopened.quotas() == {"bob": 2}
    reopened.remove("queue-a")
    assert waiting_line([]) == store.entries() == []


def test_on_kubernetes_the_queue_is_kueues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(ROOT / "cluster" / "kuberay-job.yaml")
    arguments = ["submit", *POINTS, "run.name=x", "--queue", "--cluster", file, "--priority", "7"]
    manifest = yaml.safe_load(here(monkeypatch, capsys, *arguments).out)
    labels = {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/priority-class": "priority-7"}
    assert manifest["metadata"]["labels"] == labels and manifest["spec"]["suspend"] is True
    assert manifest["spec"]["entrypoint"] == f"trireme train {' '.join(POINTS)} run.name=x"


# --- on real job servers --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_job_saves_a_checkpoint_and_the_same_submit_resumes_it(tmp_path: Path) -> None:
    with ray_head_with_jobs() as (_, dashboard):
        env = environment(RAY_ADDRESS=dashboard, RAY_AUTH_MODE="disabled")

        def submit(name: str, *arguments: str) -> Any:
            overrides = [
                "workers=2",
                "train.log_every=1",
                "checkpoint.every_seconds=null",
                f"run.storage={tmp_path}",
            ]
            return trireme("submit", *POINTS, *overrides, f"run.name={name}", *arguments, env=env)

        # The doctor examines a cluster that this machine is not part of.
        doctor = trireme("doctor", "--json", "--storage", str(tmp_path), env=env)
        (node,) = json.loads(doctor.out)["facts"]["nodes"]
        assert node["storage_seen"] == [node["node_id"]] and node["versions"]["ray"], doctor.out
        failed = submit("bad", "train.steps=10", "train.global_batch_size=3", "strategy=ddp")
        assert failed.code == 2 and "does not divide" in failed.out, "the job's own exit status"
        client = JobSubmissionClient(dashboard)
        job = submit("long", "train.steps=100000", "--detach", "--json").json["job"]
        assert client.get_job_info(job).metadata["trireme_run"] == "long"
        wait_until(lambda: "step 1/" in client.get_job_logs(job))
        follower = start(["submit", "logs", job], env=env)
        assert follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        interrupted = finish(follower)
        assert interrupted.code == 130
        assert f"trireme submit stop {job}" in interrupted.out, "the job continues"
        assert committed(tmp_path / "long") == []
        stopped = trireme("submit", "stop", job, env=env)
        assert stopped.code == 0 and "has stopped" in stopped.out, stopped.out + stopped.err
        (step,) = committed(tmp_path / "long")
        resumed = submit("long", f"train.steps={step + 5}")
        assert resumed.code == 0
        assert f"continuing after step {step:,}" in resumed.out, resumed.out + resumed.err
        assert f"step {step + 5:,}/{step + 5:,}" in resumed.out and "ships" in resumed.out
        refused = trireme("submit", "stop", job, env=env).expect(2)
        assert "has ended already: stopped" in refused.err
        refused = trireme("submit", "logs", "raysubmit_unknown", env=env).expect(2)
        assert "the job raysubmit_unknown cannot be found at" in refused.err


@pytest.mark.slow
def test_three_users_share_a_cluster_by_priority(tmp_path: Path) -> None:
    """Runs wait, are stopped for one of higher priority, and continue after the head is lost.

    Ada's run takes the whole cluster, so bob's waits. For eve's, of a higher priority, ada's saves
    a checkpoint and waits again. Then the head is lost with all jobs: with the next head each run
    continues, by priority and age.
    """
    slow = tmp_path / "slow"
    storage = f"run.storage={tmp_path}"
    slow.touch()
    arguments = [
        "submit",
        *POINTS,
        storage,
        "workers=2",
        "resources_per_worker.CPU=2",
        "strategy=ddp",
        "launcher=actors",
        "train.steps=400",
        "checkpoint.every_seconds=5",
        "task_args.step_seconds=5",
        f"task_args.slow_while={slow}",
    ]

    def run_command(*command: str, **variables: str) -> Any:
        env = environment(RAY_ADDRESS=dashboard, RAY_AUTH_MODE="disabled", **variables)
        return trireme(*command, env=env)

    def submit(user: str, *options: str) -> None:
        run_command(
            *arguments, f"run.name={user}", "--queue", "--detach", *options, LOGNAME=user
        ).expect()

    def queue() -> dict[str, Any]:
        rows = run_command("queue", "--storage", str(tmp_path), "--json").expect().json["runs"]
        return {row["entry"]["run"]: row for row in rows}

    with ray_head_with_jobs() as (_, dashboard):
        submit("ada")
        wait_until(lambda: committed(tmp_path / "ada"))
        submit("bob")
        wait_until(lambda: queue().get("bob", {}).get("starts_in_seconds") is not None)
        assert queue()["ada"]["state"] == "running"
        submit("eve", "--priority", "5")
        wait_until(lambda: committed(tmp_path / "eve"))
        expected = {"eve": "running", "ada": "waiting", "bob": "waiting"}
        wait_until(lambda: {name: row["state"] for name, row in queue().items()} == expected)
        steps = {name: committed(tmp_path / name)[-1] for name in ("ada", "eve")}
    slow.unlink()
    with ray_head_with_jobs() as (_, dashboard):
        resumed = run_command("queue", "resume", "--storage", str(tmp_path))
        assert "3 sent again" in resumed.out, resumed.out + resumed.err
        names = ("eve", "ada", "bob")
        wait_until(lambda: all(committed(tmp_path / name)[-1:] == [400] for name in names))
        wait_until(lambda: queue() == {})
    ended = {
        name: (tmp_path / name / "model" / "weights.pt").stat().st_mtime
        for name in ("ada", "bob", "eve")
    }
    assert sorted(ended, key=lambda name: ended[name]) == ["eve", "ada", "bob"]
    for name, step in steps.items():
        assert int(mlflow_run(tmp_path, name).data.tags["trireme.resumed_from"]) >= step > 0
