"""`trireme submit`: what is refused before it is sent, what goes along, and jobs on a real job server."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from app.errors import UserError
from app.submit import submission
from app.submit.client import Server
from tests.running import (
    POINTS,
    ROOT,
    Ended,
    committed,
    environment,
    finish,
    here,
    ray_head_with_jobs,
    start,
    trireme,
    wait_until,
)


def test_variables_go_by_name_and_secrets_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:pass@host:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "planted")
    monkeypatch.setenv("HF_TOKEN", "planted")
    monkeypatch.setenv("COPIED", "planted")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    plain, secret = submission._variables(("HF_TOKEN", "COPIED", "NCCL_DEBUG"))
    assert plain == {"NCCL_DEBUG": "INFO"}
    assert set(secret) == {"HF_TOKEN", "COPIED", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_URI"}
    with pytest.raises(UserError, match="NOT_THERE, which --env names, is not set"):
        submission._variables(("NOT_THERE",))


def test_secrets_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = Path(submission._leave_secrets("laptop", {"PLANTED_TOKEN": "planted"}))
    assert path.stat().st_mode & 0o777 == 0o600
    code = """import os, runpy, sys
sys.argv = ["trireme", "--help"]
try: runpy.run_module("app.submit", run_name="__main__")
finally: print(os.environ["PLANTED_TOKEN"], "TRIREME_SECRETS" in os.environ)"""
    env = environment(TRIREME_SECRETS=str(path))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.endswith("planted False\n") and not path.exists(), done.stderr


class Broken:
    """A job server whose connection breaks after each piece of the log, and is then away for a while."""

    def __init__(self, pieces: list[str], status: str, exit_code: int | None) -> None:
        self.pieces, self.sent, self.tries = pieces, 0, 0
        self.client: Any = self
        self.get_job_status = lambda job_id: JobStatus.RUNNING
        ended = SimpleNamespace(status=JobStatus(status), driver_exit_code=exit_code, message="it ended")
        self.get_job_info = lambda job_id: ended

    async def tail_job_logs(self, job_id: str) -> Any:
        self.sent += 1
        yield "".join(self.pieces[: self.sent])  # from the beginning, as Ray sends it
        if self.sent < len(self.pieces):
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def connect(self) -> None:
        self.tries += 1
        if self.tries % 2:
            raise UserError("no server answers")


@pytest.mark.parametrize(
    ("pieces", "status", "exit_code", "wanted", "says"),
    [
        (["one\n", "two\n", "three\n"], "FAILED", 3, 3, ["the job continues"]),
        (["one\n"], "SUCCEEDED", 0, 0, []),
        (["one\n"], "FAILED", None, 1, ["Ray says: it ended"]),
        (["one\n"], "STOPPED", None, 130, []),
    ],
)
def test_the_log_survives_dropped_connections_and_ends_with_the_jobs_own_exit_code(
    pieces: list[str], status: str, exit_code: int | None, wanted: int, says: list[str]
) -> None:
    server: Any = Broken(pieces, status, exit_code)
    written, said = [], []
    assert submission.follow(server, "job", written.append, said.append) == wanted
    assert "".join(written) == "".join(pieces), "without a gap or a repetition"
    assert len(said) == len(says) and all(part in line for part, line in zip(says, said, strict=True))


def test_a_refused_token_ends_the_following_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: Any = Broken(["one\n", "two\n"], "SUCCEEDED", 0)
    lost.connect = Server("127.0.0.1:9").connect
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Mock(side_effect=AuthenticationError("not yours")))
    with pytest.raises(UserError, match=r"cannot be used \("):
        submission.follow(lost, "job", str, str)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["submit"], "no experiment is given"),
        (["submit", "{outside}"], f"experiment.yaml is not in {ROOT}"),
        (["submit", *POINTS, "--env", "A=planted"], "takes a variable's name"),
        (["submit", *POINTS, "--working-dir", "/nowhere"], "there is no folder /nowhere"),
        (["submit", *POINTS, "--cluster", "aws", "workers=65", "resources_per_worker.GPU=1"], "room for 64"),
        (["submit", *POINTS, "--address", "http://127.0.0.1:9"], "cannot be used (Failed to connect"),
        (["queue", "--address", "http://127.0.0.1:9"], "cannot be used (Failed to connect"),
        (["submit", *POINTS, "--queue", "--dry-run"], "MLFLOW_TRACKING_PASSWORD is a secret"),
        (["submit", "stop", "raysubmit_x", "--address", "http://127.0.0.1:9"], "cannot be used (Failed to connect"),
        (["submit", *POINTS, "tracking.uri=http://me:planted@host"], "tracking.uri holds a secret"),
        (["submit", *POINTS, "task_args.hf_token=planted"], "task_args.hf_token holds a secret"),
        (["submit", *POINTS, "task_args.note=sesame"], "task_args.note holds a secret"),
        (["submit", *POINTS, "--address", "a", "--cluster", "b"], "--address and --cluster"),
        (["submit", *POINTS, "--adress", "x"], "No such option"),
    ],
)
def test_refused_before_anything_is_sent(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "sesame")
    outside = tmp_path / "experiment.yaml"
    outside.write_text("task: tabular\n")
    ended = here(monkeypatch, capsys, *(word.format(outside=outside) for word in arguments))
    assert ended.code == 2 and said in ended.err and "Usage" not in ended.err
    assert not any(secret in ended.out + ended.err for secret in ("planted", "sesame"))


def test_a_dry_run_says_what_would_go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    queued = here(monkeypatch, capsys, "submit", *POINTS, "--queue", "--dry-run", "--json").json
    assert queued["runs"].startswith("python -m app.submit queue enter --id queue-")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "planted")
    out = here(monkeypatch, capsys, "submit", *POINTS, "run.name=x", "--dry-run").out
    assert "ships" in out and "MLFLOW_TRACKING_TOKEN (secret)" in out and "planted" not in out
    assert "task=tests.tasks:Points" in out


def test_a_folder_with_a_package_called_app_does_not_hide_triremes(tmp_path: Path) -> None:
    for file, flag in (("mine.py", ""), ("app.py", "-P "), ("app/mine.py", "-P "), ("app/submit/__main__.py", "")):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()  # beside those before; the last is Trireme itself, which is shipped
        job = submission.prepare("train", ("task=app.mine:Mine",), [], run="x", folder=tmp_path)
        assert job.entrypoint == f"python {flag}-m app.submit train task=app.mine:Mine"


@pytest.mark.slow
def test_a_job_is_followed_and_stopped_with_a_checkpoint_and_the_same_submit_goes_on(tmp_path: Path) -> None:
    with ray_head_with_jobs() as (_, dashboard):
        env = environment(RAY_ADDRESS=dashboard, RAY_AUTH_MODE="disabled")

        def submit(name: str, *more: str) -> Ended:
            own = ["workers=2", "train.log_every=1", "checkpoint.every_seconds=null", f"run.storage={tmp_path}"]
            return trireme("submit", *POINTS, *own, f"run.name={name}", *more, env=env)

        told = trireme("doctor", "--json", "--storage", str(tmp_path), env=env)  # of a cluster that it is not part of
        (node,) = json.loads(told.out)["facts"]["nodes"]
        assert node["storage_seen"] == [node["node_id"]] and node["versions"]["ray"], told.out
        bad = submit("bad", "train.steps=10", "train.global_batch_size=3", "strategy=ddp")
        assert bad.code == 2 and "does not divide" in bad.out, "the job's own exit status"
        job, client = (
            submit("long", "train.steps=100000", "--detach", "--json").json["job"],
            JobSubmissionClient(dashboard),
        )
        assert client.get_job_info(job).metadata["trireme_run"] == "long", "the Ray job names its run"
        wait_until(lambda: "step 1/" in client.get_job_logs(job))
        follower = start(["submit", "logs", job], env=env)
        assert follower.stdout.readline()  # it follows
        follower.send_signal(signal.SIGINT)
        left = finish(follower)
        assert left.code == 130 and f"trireme submit stop {job}" in left.out, "the job continues"
        assert committed(tmp_path / "long") == []
        stopped = trireme("submit", "stop", job, env=env)
        assert stopped.code == 0 and "has stopped" in stopped.out, stopped.out + stopped.err
        (step,) = committed(tmp_path / "long")
        again = submit("long", f"train.steps={step + 5}")
        assert again.code == 0 and f"continuing after step {step:,}" in again.out, again.out + again.err
        assert f"step {step + 5:,}/{step + 5:,}" in again.out and "ships" in again.out
        for words, said in (
            (["stop", job], "has ended already: stopped"),
            (["logs", "raysubmit_unknown"], "the job raysubmit_unknown cannot be found at"),
        ):
            refused = trireme("submit", *words, env=env)
            assert refused.code == 2 and said in refused.err
