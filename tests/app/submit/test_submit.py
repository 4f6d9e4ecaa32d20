"""`trireme submit`: what is refused before it is sent, what goes along, and jobs on a real job server."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from app.errors import UserError
from app.submit import submission
from app.submit.client import Server as JobServer
from tests.running import POINTS, ROOT, Ended, committed, environment, here, ray_head_with_jobs, trireme, wait_until


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


class Server:
    """A job server whose connection breaks after each piece of the log, and is then away for a while."""

    def __init__(self, pieces: list[str], status: str, exit_code: int | None) -> None:
        self.pieces, self.sent, self.tries = pieces, 0, 0
        self.status, self.exit_code = status, exit_code
        self.client: Any = self

    async def tail_job_logs(self, job_id: str) -> Any:
        self.sent += 1
        yield "".join(self.pieces[: self.sent])  # from the beginning, as Ray sends it
        if self.sent < len(self.pieces):
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def connect(self) -> None:
        self.tries += 1
        if self.tries % 2:
            raise UserError("no server answers")

    def get_job_status(self, job_id: str) -> Any:
        return JobStatus.RUNNING

    def get_job_info(self, job_id: str) -> Any:
        return SimpleNamespace(status=JobStatus(self.status), driver_exit_code=self.exit_code, message="it ended")


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
    server: Any = Server(pieces, status, exit_code)
    written, said = [], []
    assert submission.follow(server, "job", written.append, said.append) == wanted
    assert "".join(written) == "".join(pieces), "without a gap or a repetition"
    assert len(said) == len(says) and all(part in line for part, line in zip(says, said, strict=True))


class Refuses(BaseHTTPRequestHandler):
    """A job server to which our token means nothing."""

    def do_GET(self) -> None:
        self.send_error(401)


def test_a_refused_token_ends_the_following_at_once() -> None:
    lost: Any = Server(["one\n", "two\n"], "SUCCEEDED", 0)
    with HTTPServer(("127.0.0.1", 0), Refuses) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        lost.connect = JobServer(f"127.0.0.1:{http.server_port}").connect
        with pytest.raises(UserError, match=r"cannot be used \(Authentication required"):
            submission.follow(lost, "job", str, str)
        http.shutdown()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["submit"], "no experiment is given"),
        (["submit", "{outside}"], f"experiment.yaml is not in {ROOT}"),
        (["submit", *POINTS, "--env", "A=planted"], "takes a variable's name"),
        (["submit", *POINTS, "--working-dir", "/nowhere"], "there is no folder /nowhere"),
        (["submit", *POINTS, "--cluster", "aws", "workers=65", "resources_per_worker.GPU=1"], "room for 64"),
        (["submit", *POINTS, "--address", "http://127.0.0.1:9"], "cannot be used (Failed to connect"),
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
    assert ended.code == 2 and said in ended.err and "planted" not in ended.out + ended.err


def test_a_dry_run_says_what_would_go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "planted")
    out = here(monkeypatch, capsys, "submit", *POINTS, "run.name=x", "--dry-run").out
    assert "ships" in out and "MLFLOW_TRACKING_TOKEN (secret)" in out and "planted" not in out
    assert "task=tests.tasks:Points" in out


def test_a_folder_with_a_package_called_app_does_not_hide_triremes(tmp_path: Path) -> None:
    def line() -> str:
        return submission.prepare("train", ("task=app.mine:Mine",), [], run="x", folder=tmp_path).entrypoint

    assert line() == "python -m app.submit train task=app.mine:Mine"
    for own in ("app.py", "app/mine.py"):
        (tmp_path / own).parent.mkdir(exist_ok=True)
        (tmp_path / own).touch()
        assert line() == "python -P -m app.submit train task=app.mine:Mine"
    (tmp_path / "app" / "submit").mkdir()
    (tmp_path / "app" / "submit" / "__main__.py").touch()  # Trireme itself is shipped
    assert line() == "python -m app.submit train task=app.mine:Mine"


# --- on a job server -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        # A job's `python` is the one on the head's PATH.
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        with ray_head_with_jobs() as (_, dashboard):
            yield environment(RAY_ADDRESS=dashboard, RAY_AUTH_MODE="disabled")


def submit(server: dict[str, str], storage: Path, name: str, *more: str) -> Ended:
    run = ["submit", *POINTS, "train.log_every=1", f"run.name={name}", f"run.storage={storage}", "workers=2"]
    return trireme(*run, *more, env=server)


@pytest.mark.slow
def test_doctor_asks_a_cluster_that_it_is_not_part_of(tmp_path: Path, server: dict[str, str]) -> None:
    told = trireme("doctor", "--json", "--storage", str(tmp_path), env=server)
    (node,) = json.loads(told.out)["facts"]["nodes"]
    assert node["storage_seen"] == [node["node_id"]] and node["versions"]["ray"], told.out
    ended = trireme("train", *POINTS, "train.steps=1", "run.name=x", f"run.storage={tmp_path}", env=server)
    assert ended.code == 2 and "`trireme submit`" in ended.err, ended.err


@pytest.mark.slow
def test_a_job_is_followed_to_its_own_end(tmp_path: Path, server: dict[str, str]) -> None:
    good = submit(server, tmp_path, "good", "train.steps=10")
    assert good.code == 0, good.out + good.err
    assert "step 10/10" in good.out and "ships" in good.out
    job = next(line.split()[1] for line in good.out.splitlines() if line.startswith("job "))
    info = JobSubmissionClient(server["RAY_ADDRESS"]).get_job_info(job)
    assert info.metadata["trireme_run"] == "good", "the Ray job names its run"
    bad = submit(server, tmp_path, "bad", "train.steps=10", "train.global_batch_size=3", "strategy=ddp")
    assert bad.code == 2 and "does not divide" in bad.out, "the job's own exit status"


@pytest.mark.slow
def test_stop_saves_a_checkpoint_first_and_the_same_submit_goes_on(tmp_path: Path, server: dict[str, str]) -> None:
    long = ["train.steps=100000", "checkpoint.every_seconds=null"]
    sent = submit(server, tmp_path, "long", *long, "--detach", "--json")
    job = sent.json["job"]
    client = JobSubmissionClient(server["RAY_ADDRESS"])
    wait_until(lambda: "step 1/" in client.get_job_logs(job))
    follower = subprocess.Popen(
        [sys.executable, "-m", "app", "submit", "logs", job], cwd=ROOT, env=server, stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout and follower.stdout.readline()  # it follows
    follower.send_signal(signal.SIGINT)
    out, _ = follower.communicate(timeout=120)
    assert follower.returncode == 130 and f"trireme submit stop {job}" in out, "the job continues"
    assert committed(tmp_path / "long") == []
    stopped = trireme("submit", "stop", job, env=server)
    assert stopped.code == 0 and "has stopped" in stopped.out, stopped.out + stopped.err
    (step,) = committed(tmp_path / "long")
    again = submit(server, tmp_path, "long", f"train.steps={step + 5}", "checkpoint.every_seconds=null")
    assert again.code == 0 and f"continuing after step {step:,}" in again.out, again.out + again.err
    twice = trireme("submit", "stop", job, env=server)
    assert twice.code == 2 and "has ended already: stopped" in twice.err
    unknown = trireme("submit", "logs", "raysubmit_unknown", env=server)
    assert unknown.code == 2 and "the job raysubmit_unknown cannot be found at" in unknown.err
