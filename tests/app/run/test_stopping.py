"""How commands end when they are asked to, and when nobody reads what they print; each is a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.running import POINTS, ROOT, Lines, committed, environment, wait_until

TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
LOCAL = ["train", *POINTS, "launcher=local", "tracking.enabled=false", "train.steps=100000", "run.name=run"]
SLOW = ["task_args.step_seconds=0.02", "checkpoint.every_seconds=null"]
PROGRAM = [sys.executable, "-m", "app"]


def begin(*words: str, program: list[str] | None = None, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """The command in a process group of its own, as a scheduler starts it."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*(program or PROGRAM), *words]
    return subprocess.Popen(command, cwd=ROOT, env=env or environment(), text=True, start_new_session=True, **streams)


def wait_until_caught(process: subprocess.Popen[str], number: int) -> None:
    """Returns when the process has a handler for the signal, as Linux tells (proc(5), SigCgt); within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process.pid}/status").read_text()
        (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        if int(caught, 16) >> (number - 1) & 1:
            return
        time.sleep(0.02)
    raise AssertionError(f"the command has set no handler for {signal.Signals(number).name} in a minute")


SLOW_TOO = pytest.mark.slow
"""Of rows whose path another row takes in `make test`: each starts a command."""


@pytest.mark.parametrize("number", [TERM, *(pytest.param(one, marks=SLOW_TOO) for one in (HUP, INT))])
def test_the_whole_group_is_signalled_while_it_trains(number: int, tmp_path: Path) -> None:
    process = begin(*LOCAL, *SLOW, f"run.storage={tmp_path}")
    lines = Lines(process)
    lines.when("step 1/")
    os.killpg(process.pid, number)
    os.killpg(process.pid, number)  # as `timeout` does: its child, then the group that both are in
    assert process.wait(120) == 130, lines.text
    lines.when("run the same command again to continue")
    assert committed(tmp_path / "run")


@pytest.mark.parametrize("seconds", [0.8, *(pytest.param(other, marks=SLOW_TOO) for other in (0.0, 0.4, 1.6, 2.4))])
@pytest.mark.parametrize("number", [TERM, pytest.param(HUP, marks=SLOW_TOO)])
def test_a_command_that_starts_is_ended_at_any_moment(number: int, seconds: float, tmp_path: Path) -> None:
    """From when it has set its handlers on; most of this time it imports, where an exception that a signal's handler
    raises would be lost."""
    process = begin(*LOCAL, *SLOW, f"run.storage={tmp_path}")
    lines = Lines(process)
    wait_until_caught(process, number)
    time.sleep(seconds)
    process.send_signal(number)
    assert process.wait(60) == 130, lines.text
    lines.when(signal.Signals(number).name if "training run" not in lines.text else "stop")
    assert "Traceback" not in lines.text
    assert "Exception ignored" not in lines.text


IMPORTS = """
import sys, time
from app.run.stopping import end_on_signals
end_on_signals()
sys.path.insert(0, {folder!r})
print("importing", flush=True)
import slow
print("imported", flush=True)
time.sleep(60)
"""


def test_an_import_that_is_interrupted_is_finished_first(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nfor i in range(20): time.sleep(0.05)\n")
    process = begin(program=[sys.executable, "-c", IMPORTS.format(folder=str(tmp_path))])
    lines = Lines(process)
    lines.when("importing")
    process.send_signal(TERM)
    process.wait(30)
    assert "imported" in lines.text and "Stopped: stopped by SIGTERM" in lines.text, lines.text


LOST = """
import time
from app.run import stopping
stopping.END_SECONDS = 1.0
stopping.end_on_signals()
class Finalizer:
    def __del__(self):
        print("waits", flush=True)
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
Finalizer()
"""


def test_a_process_that_does_not_end_when_asked_is_ended() -> None:
    process = begin(program=[sys.executable, "-c", LOST])
    lines = Lines(process)
    lines.when("waits")
    process.send_signal(TERM)
    assert process.wait(30) == 130
    lines.when("stopped by SIGTERM; what had been started did not end within 1 s")


def test_under_nohup_a_run_outlives_its_terminal(tmp_path: Path) -> None:
    program = [
        sys.executable,
        "-c",
        "import signal, os, sys; signal.signal(1, signal.SIG_IGN); os.execv(*sys.argv[1:2], sys.argv[1:])",
    ]
    process = begin(*PROGRAM, *LOCAL, *SLOW, f"run.storage={tmp_path}", program=program)
    lines = Lines(process)
    lines.when("step 1/")
    process.send_signal(HUP)
    time.sleep(0.5)
    assert process.poll() is None and "stopping" not in lines.text
    process.send_signal(TERM)
    assert process.wait(60) == 130, lines.text


# --- a Ray of the command's own -------------------------------------------------------------------------------------

OWN_RAY = [*POINTS, "tracking.enabled=false", "train.steps=100000", "run.name=run", "workers=2", "strategy=ddp", *SLOW]


def group(process: subprocess.Popen[str]) -> None:
    """As `timeout`, a shell and CI do."""
    os.killpg(process.pid, TERM)


def all_processes(process: subprocess.Popen[str]) -> None:
    """As systemd and Slurm do."""
    command = psutil.Process(process.pid)
    for each in [*command.children(recursive=True), command]:
        each.send_signal(TERM)


def command_alone(process: subprocess.Popen[str]) -> None:
    process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("act", "code"), [(group, 130), (all_processes, 130), (command_alone, -signal.SIGKILL)])
def test_ray_outlives_what_ends_its_command_and_never_the_command(
    act: Callable[[Any], None], code: int, tmp_path: Path
) -> None:
    process = begin("train", *OWN_RAY, f"run.storage={tmp_path}")
    lines = Lines(process)
    lines.when("step 1/")
    tree = psutil.Process(process.pid).children(recursive=True)
    assert {"gcs_server", "raylet"} <= {each.name() for each in tree}
    act(process)
    assert process.wait(120) == code, lines.text
    assert bool(committed(tmp_path / "run")) == (code == 130), lines.text
    wait_until(lambda: not [each for each in tree if each.is_running() and each.status() != psutil.STATUS_ZOMBIE], 30)


@pytest.mark.slow
def test_a_worker_that_crashes_at_the_same_step_again_is_given_up(tmp_path: Path) -> None:
    words = [word for word in OWN_RAY if not word.startswith("task")]
    words = [word for word in words if not word.startswith("task_args")] + ["task=tests.tasks:Crashes"]
    process = begin("train", *words, f"run.storage={tmp_path}")
    lines = Lines(process)
    assert process.wait(200) == 1, lines.text
    lines.when("by SIGSEGV (it used memory that is not its own)")
    lines.when("for the second time and no step further: trying again would not help")
    assert lines.text.count("starting again from the last checkpoint") <= 2, "the driver's step lags by a report"


# --- nobody reads ---------------------------------------------------------------------------------------------------


def shell(command: str) -> subprocess.CompletedProcess[str]:
    env = environment(TRIREME=" ".join(PROGRAM))
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("command", ["--help", "config experiments/mnist.yaml", "runs {}", "doctor --help"])
def test_a_reader_that_has_read_enough_ends_no_command(command: str, tmp_path: Path) -> None:
    done = shell(f"$TRIREME {command.format(tmp_path)} | head -0; echo ${{PIPESTATUS[0]}}")
    assert done.stdout == "0\n" and "Traceback" not in done.stderr and "Broken" not in done.stderr, done


def test_training_goes_on_when_nobody_reads_about_it_any_more(tmp_path: Path) -> None:
    words = " ".join([*LOCAL, "train.steps=20", f"run.storage={tmp_path}"])
    done = shell(f"$TRIREME {words} 2>&1 | head -1; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.splitlines()[-1] == "0", done
    assert committed(tmp_path / "run") == [20]


@pytest.mark.parametrize(
    "closed", [*(pytest.param(one, marks=SLOW_TOO) for one in (">&-", "2>&-", "<&-")), "<&- >&- 2>&-"]
)
def test_streams_that_are_closed(closed: str, tmp_path: Path) -> None:
    words = " ".join([*LOCAL, "train.steps=20", f"run.storage={tmp_path}"])
    done = shell(f"$TRIREME {words} {closed}")
    assert done.returncode == 0, done
    assert committed(tmp_path / "run") == [20]
    assert "step" not in (tmp_path / "run" / "run.json").read_text().partition("summary")[0].replace('"steps"', "")
