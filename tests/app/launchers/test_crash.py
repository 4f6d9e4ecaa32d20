"""The signal that a worker died by, read from its log. Real processes die by each signal."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.launchers.crash import fatal_signal, log_sizes
from app.launchers.failure_policy import Kind
from app.launchers.recovery import Nodes, State, classify, error_to_raise, oom_kills
from app.launchers.workers import WorkerLost
from app.training.events import WorkerInfo
from tests.running import ROOT, environment, trireme

SIGNALS = ["SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT"]
DIE = """
import faulthandler, os, signal
faulthandler.enable(all_threads=False)
def loss():
    os.kill(os.getpid(), signal.{})
loss()
"""
RUN = """
import sys
from pathlib import Path
from app.launchers.crash_notice import announce_crash
with announce_crash("worker 0, process 7 on node-1,", Path("driver.log"), sys.stderr):
    {}
"""
LOST_PEER = RuntimeError(
    "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:15779"
)


def dies(log: Path, signal_name: str) -> int:
    """Runs a process that writes to this log and dies by that signal; returns its process ID."""
    script = log.with_name("model.py")
    script.write_text(DIE.format(signal_name))
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, str(script)], stderr=file, env=environment(), cwd=ROOT
        )
    assert process.wait() == -signal.Signals[signal_name]
    return process.pid


@pytest.mark.parametrize("signal_name", SIGNALS)
def test_a_crash_of_a_worker_is_told_with_its_signal_and_place(
    signal_name: str, tmp_path: Path
) -> None:
    (tmp_path / "rank-1.log").write_text("epoch 1\n")
    sizes = log_sizes(tmp_path)
    dies(tmp_path / "rank-1.log", signal_name)
    infos = {
        rank: WorkerInfo(
            rank=rank, pid=100 + rank, ip=f"10.0.0.{rank}", node="node", oom_kills=oom_kills()
        )
        for rank in range(2)
    }
    state = State(
        workers=infos, step=7, progressed=True, logs=tmp_path, nodes=Nodes(), log_sizes=sizes
    )
    for failures in ({1: WorkerLost(details="End of file")}, {0: LOST_PEER}):
        failure = classify(failures, state, [])
        assert (failure.kind, failure.signal) == (Kind.CRASHED, signal_name)
        assert (
            f"worker 1, process 101 on 10.0.0.1, died after step 7 by {signal_name} ("
            in failure.sentence
        )
        assert f"model.py:5 in loss (see {tmp_path}/rank-1.log)" in failure.sentence


def run_announced(statement: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a statement in a process that announces a crash."""
    script = folder / "model.py"
    script.write_text(RUN.format(statement))
    env = environment()
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=env, capture_output=True, text=True
    )


def test_a_crash_of_the_driver_itself_is_one_sentence(tmp_path: Path) -> None:
    ended = run_announced("import ctypes; ctypes.string_at(0)", tmp_path)
    assert ended.returncode == -signal.SIGSEGV
    beginning = "trireme: worker 0, process 7 on node-1, died by SIGSEGV (it accessed memory"
    assert ended.stderr.startswith(beginning)
    place = f"at {tmp_path}/model.py:6 in <module> (see driver.log): run the same command again"
    assert place in ended.stderr
    assert ended.stderr.count("\n") == 1, "no stack on the terminal"
    assert "Stack (most recent call first)" in (tmp_path / "driver.log").read_text()


@pytest.mark.parametrize("statement", ["pass", "raise SystemExit(3)", "import os; os._exit(3)"])
def test_a_process_that_does_not_crash_announces_nothing(statement: str, tmp_path: Path) -> None:
    assert run_announced(statement, tmp_path).stderr == ""


@pytest.mark.slow
def test_a_run_in_one_process_tells_the_signal_that_it_died_by(tmp_path: Path) -> None:
    overrides = [
        "task=tests.tasks:Crashes",
        "strategy=single",
        "train.steps=20",
        "train.global_batch_size=16",
    ]
    ended = trireme(
        "train", "launcher=local", *overrides, f"run.storage={tmp_path}", "run.name=run"
    )
    assert ended.code == -signal.SIGSEGV
    assert "worker 0, process" in ended.err and "died by SIGSEGV" in ended.err, ended.err
    assert "tests/tasks.py:" in ended.err and "Stack" not in ended.err, ended.err
    assert "step 1/20" in ended.out, "it died in training and not before"


def test_the_signal_of_an_earlier_attempt_is_not_told_of_a_later_one(tmp_path: Path) -> None:
    dies(tmp_path / "rank-1.log", "SIGSEGV")
    assert fatal_signal(tmp_path / "rank-1.log", {}) is not None
    assert fatal_signal(tmp_path / "rank-1.log", log_sizes(tmp_path)) is None
    assert fatal_signal(tmp_path / "rank-9.log", {}) is None, "a worker that wrote nothing"


def test_rays_message_about_a_signal_is_understood(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text(
        "*** SIGSEGV received at time=1764176567 on cpu 1 ***\nPC: @ 0x7f\n"
    )
    assert fatal_signal(tmp_path / "rank-0.log", {}) == ("SIGSEGV", "")


def test_a_killed_rank_of_torchrun_is_named_by_the_rank_that_lost_it(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    pid = dies(log, "SIGKILL")
    host = socket.gethostname()
    infos = {
        rank: WorkerInfo(rank=rank, pid=each, ip=host, node="", oom_kills=oom_kills())
        for rank, each in enumerate((1, pid))
    }
    failures = {0: LOST_PEER}
    state = State(workers=infos, step=4, progressed=True, logs=tmp_path, nodes=Nodes())
    failure = classify(failures, state, [])
    assert failure.kind is Kind.DIED
    assert (
        f"worker 1, process {pid} on" in failure.sentence and "as after SIGKILL" in failure.sentence
    )
    assert str(error_to_raise(failures, failure.sentence, here=True)) == failure.sentence
