"""`trireme submit`: what would be shipped, what is refused before it is, and jobs on a real job server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import Config, RunConfig, TrackingConfig
from app.errors import UserError
from app.run.manifest import Run
from app.submit import secrets, submission, versions
from app.submit.client import Server as JobServer
from app.submit.client import Target, TokenRefused, target
from app.submit.package import check_size, look
from tests.running import (
    POINTS,
    ROOT,
    Ended,
    committed,
    environment,
    mlflow_run,
    ray_head_with_jobs,
    trireme,
    wait_until,
)

pytestmark = pytest.mark.alone


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in {
        "a.py": 10,
        "data/big.bin": 5000,
        ".git/pack": 9000,
        ".venv/lib.so": 9000,
        "b/c.yaml": 20,
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    (tmp_path / ".gitignore").write_text("/data/\n")
    return tmp_path


def test_what_is_shipped_is_known_before(folder: Path) -> None:
    package = look(folder)
    assert {name for name, _ in package.files} == {"a.py", "b/c.yaml", ".gitignore"}
    assert package.bytes == 37
    assert {name for name, _ in look(folder, ("*.yaml",)).files} == {"a.py", ".gitignore"}


def test_it_is_what_ray_ships(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    import zipfile

    from ray._private.runtime_env.packaging import create_package

    package = look(folder)
    target_file = tmp_path_factory.mktemp("zip") / "package.zip"
    create_package(str(folder), target_file, True, excludes=list(package.excludes))
    shipped = {name for name in zipfile.ZipFile(target_file).namelist() if not name.endswith("/")}
    assert shipped == {name for name, _ in package.files}


def test_too_much_is_refused_and_the_largest_named(folder: Path) -> None:
    (folder / "weights.pt").write_bytes(b"x" * 4000)
    with pytest.raises(UserError, match=r"weights\.pt \(4 kB\).*--exclude"):
        check_size(look(folder), 1000)
    check_size(look(folder), 10_000)


def test_versions_are_held_against_the_clusters() -> None:
    mine = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0+cpu", "numpy": "2.0"}
    versions.check_before(mine, {"python": "3.11.2", "ray": "2.60.0"})
    versions.check_before(mine, {})
    with pytest.raises(UserError, match=r"runs Ray 2\.59\.0, and this is Ray 2\.60\.0"):
        versions.check_before(mine, {"python": "3.11.2", "ray": "2.59.0"})
    with pytest.raises(UserError, match=r"Python 3\.12\.1.*submit from Python 3\.12"):
        versions.check_before(mine, {"python": "3.12.1", "ray": "2.60.0"})
    there = {"python": "3.11.9", "ray": "2.60.0", "torch": "2.13.0+cu128", "numpy": "2.1"}
    assert versions.differences(mine, there) == ["numpy is 2.1 on the cluster and 2.0 where the job came from"]


def test_variables_go_by_name_and_secrets_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:pass@host:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "planted")
    monkeypatch.setenv("HF_TOKEN", "planted")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    plain, secret = secrets.chosen(("HF_TOKEN", "NCCL_DEBUG"))
    assert plain == {"NCCL_DEBUG": "INFO"}
    assert set(secret) == {"HF_TOKEN", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_URI"}
    with pytest.raises(UserError, match="takes a variable's name"):
        secrets.chosen(("HF_TOKEN=planted",))
    with pytest.raises(UserError, match="NOT_THERE, which --env names, is not set"):
        secrets.chosen(("NOT_THERE",))


def test_secrets_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PLANTED_TOKEN", raising=False)
    path = Path(secrets.leave("laptop", {"PLANTED_TOKEN": "planted"}))
    assert path.stat().st_mode & 0o777 == 0o600
    secrets.take(path)
    assert os.environ.pop("PLANTED_TOKEN") == "planted" and not path.exists()
    secrets.take(path)


def test_where_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    assert target(None, None) == Target("http://127.0.0.1:8265")
    assert target("10.0.0.1:8265", None) == Target("http://10.0.0.1:8265")
    assert target(None, "x.yaml") == Target(cluster="x.yaml")
    with pytest.raises(UserError, match="--address and --cluster"):
        target("a", "b")


def test_a_refused_token_is_a_sentence() -> None:
    def refuse() -> None:
        raise RuntimeError("AuthenticationError: 403 invalid or expired token")

    with pytest.raises(UserError, match=r"refuses the token \(missing, wrong or expired\).*~/\.ray/auth_token"):
        JobServer(Target("http://h:8265")).said(refuse)


class Server:
    """A job server whose connection breaks after each piece of the log, and is then away for a while."""

    def __init__(self, pieces: list[str]) -> None:
        self.text, self.sent, self.tries = "".join(pieces), 0, 0
        self.pieces = pieces
        self.client: Any = self
        self.target = SimpleNamespace(words="the cluster")

    async def tail_job_logs(self, job_id: str) -> Any:
        self.sent += 1
        yield "".join(self.pieces[: self.sent])  # from the beginning, as Ray sends it
        if self.sent < len(self.pieces):
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def said(self, ask: Any) -> Any:
        return ask()

    def reconnect(self) -> None:
        self.tries += 1
        if self.tries % 2:
            raise UserError("nobody answers")

    def get_job_status(self, job_id: str) -> Any:
        return SimpleNamespace(is_terminal=lambda: self.sent >= len(self.pieces))

    def get_job_info(self, job_id: str) -> Any:
        return SimpleNamespace(status="FAILED", driver_exit_code=3, message="exit code 3")


def test_the_log_survives_dropped_connections_without_a_gap_or_a_repetition() -> None:
    server, written, said = Server(["one\n", "two\n", "three\n"]), [], []
    code = submission.follow(server, "job", written.append, said.append)  # type: ignore[arg-type]
    assert "".join(written) == "one\ntwo\nthree\n"
    assert code == 3, "the job's own exit status"
    assert any("the job goes on" in sentence for sentence in said)


def test_a_job_that_there_is_not_is_said_and_not_followed() -> None:
    class Without(Server):
        def get_job_status(self, job_id: str) -> Any:
            raise RuntimeError("Request failed with status code 404: Job job does not exist.")

    with pytest.raises(UserError, match="there is no job job at the cluster"):
        submission.follow(Without(["one"]), "job", [].append, [].append)  # type: ignore[arg-type]


def test_a_token_that_expires_while_following_ends_it() -> None:
    class Expired(Server):
        def reconnect(self) -> None:
            raise TokenRefused("the cluster refuses the token")

    with pytest.raises(UserError, match="refuses the token"):
        submission.follow(Expired(["one\n", "two\n"]), "job", [].append, [].append)  # type: ignore[arg-type]


def test_exit_status() -> None:
    for status, code, wanted in [("SUCCEEDED", 0, 0), ("FAILED", 7, 7), ("FAILED", None, 1), ("STOPPED", None, 130)]:
        assert submission.exit_status(SimpleNamespace(status=status, driver_exit_code=code)) == wanted


def test_refused_before_anything_is_sent(tmp_path: Path) -> None:
    outside = tmp_path / "experiment.yaml"
    outside.write_text("task: tabular\n")
    for arguments, said in [
        (["submit"], "no experiment is given"),
        (["submit", str(outside)], f"{outside} is not in {ROOT}"),
        (["submit", *POINTS, "--env", "A=b"], "takes a variable's name"),
        (["submit", *POINTS, "--max-size", "0.001"], "more than the limit of 1 kB"),
        (["submit", *POINTS, "--cluster", "aws", "workers=65", "resources_per_worker.GPU=1"], "room for 64"),
        (["submit", *POINTS, "--address", "http://127.0.0.1:9"], "no Ray job server answers"),
        (["submit", "stop", "raysubmit_x", "--address", "http://127.0.0.1:9"], "no Ray job server answers"),
        (["submit", *POINTS, "tracking.uri=http://me:planted@host"], "tracking.uri holds a secret"),
        (["submit", *POINTS, "task_args.hf_token=planted"], "task_args.hf_token holds a secret"),
        (["submit", *POINTS, "--adress", "x"], "No such option"),
    ]:
        ended = trireme(*arguments)
        assert ended.code == 2, (arguments, ended)
        assert said in ended.err and "Traceback" not in ended.err, (said, ended.err)
        assert "planted" not in ended.out + ended.err


def test_a_secret_of_the_configuration_stays_out_of_the_runs_folder(tmp_path: Path) -> None:
    def start(token: str) -> Run:
        args = {"hf_token": token, "pad_token": "<pad>", "nested": {"api_key": token}, "label_key": "y"}
        tracking = TrackingConfig(uri=f"https://me:{token}@host/x")
        run = RunConfig(name="kept", storage=str(tmp_path))
        return Run(Config(task="language_modelling", task_args=args, tracking=tracking, run=run))

    run = start("planted-1")
    run.open(run.config, 5)
    run.end("stopped")
    written = {file.name: file.read_text() for file in (tmp_path / "kept").rglob("*") if file.is_file()}
    assert set(written) == {"run.json", "config.yaml"}
    assert not [name for name, text in written.items() if "planted" in text], written
    assert "pad_token: <pad>" in written["config.yaml"] and "label_key: y" in written["config.yaml"]
    assert start("planted-2").manifest.uid == run.manifest.uid, "the same run, also with a newer token"


def test_a_dry_run_says_what_would_go() -> None:
    ended = trireme("submit", *POINTS, "run.name=x", "--dry-run", env=environment(MLFLOW_TRACKING_TOKEN="planted"))
    assert ended.code == 0 and "ships" in ended.out and "MLFLOW_TRACKING_TOKEN (secret)" in ended.out
    assert "planted" not in ended.out + ended.err
    assert trireme("submit", *POINTS, "--dry-run", "--json").json["files"] > 100


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
    return trireme(*run, *more, env=server, timeout=180)


@pytest.mark.slow
def test_doctor_asks_a_cluster_that_it_is_not_part_of(tmp_path: Path, server: dict[str, str]) -> None:
    told = trireme("doctor", "--json", "--storage", str(tmp_path), env=server, timeout=180)
    (node,) = json.loads(told.out)["facts"]["nodes"]
    assert node["storage_seen"] == [node["node_id"]] and node["packages"]["ray"], told.out
    bad = trireme("doctor", "--exclude-bad", "--storage", "/proc/nowhere", env=server, timeout=180)
    assert bad.code == 1 and "every node is bad" in bad.err and not bad.out, bad.out + bad.err
    ended = trireme("train", *POINTS, "train.steps=1", "run.name=x", f"run.storage={tmp_path}", env=server)
    assert ended.code == 2 and "`trireme submit`" in ended.err, ended.err


@pytest.mark.slow
def test_a_job_is_followed_to_its_own_end(tmp_path: Path, server: dict[str, str]) -> None:
    good = submit(server, tmp_path, "good", "train.steps=10")
    assert good.code == 0, good.out + good.err
    assert "step 10/10" in good.out and "ships" in good.out
    tags = mlflow_run(tmp_path, "good").data.tags
    job = next(line.split()[1] for line in good.out.splitlines() if line.startswith("job "))
    assert job in json.dumps(tags), "the MLflow run names its Ray job"
    from ray.job_submission import JobSubmissionClient

    info = JobSubmissionClient(server["RAY_ADDRESS"]).get_job_info(job)
    assert info.metadata["trireme_run"] == "good", "and the Ray job its run"
    bad = submit(server, tmp_path, "bad", "train.steps=10", "train.global_batch_size=3", "strategy=ddp")
    assert bad.code == 2 and "does not divide" in bad.out, "the job's own exit status"


@pytest.mark.slow
def test_stop_saves_a_checkpoint_first_and_the_same_submit_goes_on(tmp_path: Path, server: dict[str, str]) -> None:
    long = ["train.steps=100000", "checkpoint.every_seconds=null"]
    sent = submit(server, tmp_path, "long", *long, "--detach", "--json")
    job = sent.json["job"]
    wait_until(lambda: "step 1/" in _log(server, job), 90)
    follower = subprocess.Popen(
        [sys.executable, "-m", "app", "submit", "logs", job], cwd=ROOT, env=server, stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout and follower.stdout.readline()  # it follows
    follower.send_signal(signal.SIGINT)
    out, _ = follower.communicate(timeout=30)
    assert follower.returncode == 130 and f"trireme submit stop {job}" in out, "the job goes on"
    assert committed(tmp_path / "long") == []
    stopped = trireme("submit", "stop", job, env=server)
    assert stopped.code == 0 and "has stopped" in stopped.out, stopped.out + stopped.err
    (step,) = committed(tmp_path / "long")
    again = submit(server, tmp_path, "long", f"train.steps={step + 5}", "checkpoint.every_seconds=null")
    assert again.code == 0 and f"continuing after step {step:,}" in again.out, again.out + again.err
    twice = trireme("submit", "stop", job, env=server)
    assert twice.code == 2 and "has ended already: stopped" in twice.err
    unknown = trireme("submit", "logs", "raysubmit_unknown", env=server)
    assert unknown.code == 2 and "there is no job raysubmit_unknown" in unknown.err


def _log(server: dict[str, str], job: str) -> str:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(server["RAY_ADDRESS"]).get_job_logs(job)
