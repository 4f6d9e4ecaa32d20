"""How commands end on signals, and when nobody reads their output; each runs in a process."""

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

TERM = signal.SIGTERM
HUP = signal.SIGHUP
INT = signal.SIGINT
LOCAL = [
    "train",
    *POINTS,
    "launcher=local",
    "tracking.enabled=false",
    "train.steps=100000",
    "run.name=run",
]
SLOW = ["task_args.step_seconds=0.02", "checkpoint.every_seconds=null"]
PROGRAM = [sys.executable, "-m", "app"]


def begin(
    *arguments: str, program: list[str] | None = None, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts the command in a new process group, as a scheduler does."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [*(program or PROGRAM), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=env or environment(), text=True, start_new_session=True, **streams
    )


def wait_until_caught(process: subprocess.Popen[str], signal_number: int) -> None:
    """Waits up to a minute for the process to have a handler of the signal (proc(5), SigCgt)."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process.pid}/status").read_text()
        (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
        if int(caught, 16) >> (signal_number - 1) & 1:
            return
        time.sleep(0.02)
    name = signal.Signals(signal_number).name
    raise AssertionError(f"the command has set no handler for {name} in a minute")


SLOW_TOO = pytest.mark.slow
"""For rows that test much the same as another row of `make test`, and start a command."""


def assert_stops(
    process: subprocess.Popen[str], lines: Lines, signal_number: int, storage: Path
) -> None:
    """Signals a training run's process group, and checks that it saves and says how it goes on."""
    os.killpg(process.pid, signal_number)
    os.killpg(process.pid, signal_number)  # `timeout` too signals twice: its child, then the group
    assert process.wait(120) == 130, lines.text
    lines.when("run the same command again to continue")
    assert committed(storage / "run")


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [HUP, INT])
def test_training_stops_when_its_process_group_gets_a_signal(
    signal_number: int, tmp_path: Path
) -> None:
    """The test with nohup has the same with SIGTERM."""
    process = begin(*LOCAL, *SLOW, f"run.storage={tmp_path}")
    lines = Lines(process)
    lines.when("step 1/")
    assert_stops(process, lines, signal_number, tmp_path)


@pytest.mark.parametrize(
    "seconds", [0.8, *(pytest.param(delay, marks=SLOW_TOO) for delay in (0.0, 0.4, 1.6, 2.4))]
)
@pytest.mark.parametrize("signal_number", [TERM, pytest.param(HUP, marks=SLOW_TOO)])
def test_a_command_that_starts_is_ended_at_any_moment(
    signal_number: int, seconds: float, tmp_path: Path
) -> None:
    """At any moment after it has set its signal handlers.

    Most of that time it imports modules, where an exception of a signal handler would be lost.
    """
    process = begin(*LOCAL, *SLOW, f"run.storage={tmp_path}")
    lines = Lines(process)
    wait_until_caught(process, signal_number)
    time.sleep(seconds)
    process.send_signal(signal_number)
    assert process.wait(60) == 130, lines.text
    name = signal.Signals(signal_number).name
    wait_until(lambda: name in lines.text or "stopping: " in lines.text)  # a run is stopped
    assert "did not end" not in lines.text
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


def stopped_while_it_waits(program: str, *, code: int) -> Lines:
    """What a program prints, ended with an exit code, that gets SIGTERM when it prints "waits"."""
    process = begin(program=[sys.executable, "-c", program])
    lines = Lines(process)
    lines.when("waits")
    process.send_signal(TERM)
    assert process.wait(60) == code, lines.text
    return lines


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


def test_a_process_that_does_not_end_in_time_is_killed() -> None:
    lines = stopped_while_it_waits(LOST, code=130)
    lines.when("stopped by SIGTERM; what had been started did not end within 1 s")


LOSES = """
import contextlib, sys, threading, time
from app.run import stopping
class Finalizer:
    def __del__(self):
        wait()
def wait():
    print("waits", flush=True)
    time.sleep(60)
def catch():
    with contextlib.suppress(BaseException):
        wait()
def finalize():
    Finalizer()
stopping.end_on_signals()
"""


@pytest.mark.parametrize("lose", ["catch", "finalize"])
def test_a_stop_that_is_lost_is_raised_again(lose: str) -> None:
    lines = stopped_while_it_waits(f"{LOSES}{lose}()\ntime.sleep(60)", code=1)
    lines.when("app.run.stopping.Stopped: stopped by SIGTERM")
    assert "did not end" not in lines.text


@pytest.mark.parametrize("lose", ["catch", "finalize"])
def test_a_stop_that_is_lost_before_a_run_begins_asks_the_run_to_stop(lose: str) -> None:
    """Once, and the run may take longer to save than a command to tidy up."""
    run = f"""
stopping.END_SECONDS = 2.0
{lose}()
with stopping.stop_signals(lambda: print("asked")):
    time.sleep(3)
    print("saved")
"""
    lines = stopped_while_it_waits(LOSES + run, code=0)
    lines.when("saved")
    assert lines.text.count("asked") == 1


def test_a_stop_that_a_command_has_handled_is_not_raised_again() -> None:
    command = """
try:
    wait()
except stopping.Stopped:
    stopping.end_at_once(130)
time.sleep(2)
print("ended by itself")
sys.exit(130)
"""
    lines = stopped_while_it_waits(LOSES + command, code=130)
    lines.when("ended by itself")


IN_A_RUN = """
import contextlib, sys, time
from pathlib import Path
from app.cli.common import verb
from app.console.terminal import Console
from app.run import stopping
stopping.END_SECONDS = 1.0
log = Path(sys.argv.pop())
@verb("hangs")
def hangs(cli):
    with cli.console.capture(log):
        cli.console.say("waits")
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(60)
stopping.end_on_signals()
hangs()
"""


def test_a_person_is_told_why_a_command_is_killed_while_its_output_goes_to_a_log(
    tmp_path: Path,
) -> None:
    log = tmp_path / "driver.log"
    process = begin(str(log), program=[sys.executable, "-c", IN_A_RUN])
    lines = Lines(process)
    lines.when("waits")
    process.send_signal(TERM)
    assert process.wait(60) == 130
    lines.when("stopped by SIGTERM; what had been started did not end within 1 s")
    assert "stopped by SIGTERM" in log.read_text()


def test_under_nohup_a_run_outlives_its_terminal_and_stops_at_a_signal(tmp_path: Path) -> None:
    nohup = "import signal, os, sys; signal.signal(1, signal.SIG_IGN)"
    nohup += "; os.execv(*sys.argv[1:2], sys.argv[1:])"
    program = [sys.executable, "-c", nohup]
    process = begin(*PROGRAM, *LOCAL, *SLOW, f"run.storage={tmp_path}", program=program)
    lines = Lines(process)
    lines.when("step 1/")
    process.send_signal(HUP)
    time.sleep(0.5)
    assert process.poll() is None and "stopping" not in lines.text
    assert_stops(process, lines, TERM, tmp_path)


# --- a Ray that the command starts ----------------------------------------------------------------

PRIVATE_RAY = [
    *POINTS,
    "tracking.enabled=false",
    "train.steps=100000",
    "run.name=run",
    "workers=2",
    "strategy=ddp",
    *SLOW,
]


def end_group(process: subprocess.Popen[str]) -> None:
    """Signals the process group, as `timeout`, a shell and CI do."""
    os.killpg(process.pid, TERM)


def end_all_processes(process: subprocess.Popen[str]) -> None:
    """Signals every process, as systemd and Slurm do."""
    command = psutil.Process(process.pid)
    for each in [*command.children(recursive=True), command]:
        each.send_signal(TERM)


def kill_command_alone(process: subprocess.Popen[str]) -> None:
    process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "exit_code"),
    [(end_group, 130), (end_all_processes, 130), (kill_command_alone, -signal.SIGKILL)],
)
def test_ray_lives_until_its_command_has_ended_and_no_longer(
    end: Callable[[Any], None], exit_code: int, tmp_path: Path
) -> None:
    process = begin("train", *PRIVATE_RAY, f"run.storage={tmp_path}")
    lines = Lines(process)
    lines.when("step 1/")
    tree = psutil.Process(process.pid).children(recursive=True)
    assert {"gcs_server", "raylet"} <= {each.name() for each in tree}

    def is_alive(each: psutil.Process) -> bool:
        return each.is_running() and each.status() != psutil.STATUS_ZOMBIE

    end(process)
    assert process.wait(120) == exit_code, lines.text
    assert bool(committed(tmp_path / "run")) == (exit_code == 130), lines.text
    wait_until(lambda: not any(is_alive(each) for each in tree), 30)


@pytest.mark.slow
def test_a_worker_that_crashes_at_the_same_step_again_is_given_up(tmp_path: Path) -> None:
    overrides = [word for word in PRIVATE_RAY if not word.startswith("task")]
    overrides.append("task=tests.tasks:Crashes")
    process = begin("train", *overrides, f"run.storage={tmp_path}")
    lines = Lines(process)
    assert process.wait(200) == 1, lines.text
    lines.when("by SIGSEGV (it accessed memory that does not belong to it)")
    lines.when("for the second time and no step further: trying again would not help")
    restarts = lines.text.count("starting again from the last checkpoint")
    assert restarts <= 2, "two, since the step that the driver knows lags by a report"


# --- output that nobody reads ---------------------------------------------------------------------


def shell(command: str) -> subprocess.CompletedProcess[str]:
    env = environment(TRIREME=" ".join(PROGRAM))
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "runs {}",
        *(
            pytest.param(command, marks=SLOW_TOO)
            for command in ("config experiments/mnist.yaml", "doctor --help")
        ),
    ],
)
def test_a_closed_pipe_is_no_error_of_a_command(command: str, tmp_path: Path) -> None:
    done = shell(f"$TRIREME {command.format(tmp_path)} | head -0; echo ${{PIPESTATUS[0]}}")
    assert done.stdout == "0\n"
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr, done


@SLOW_TOO
def test_training_continues_when_nobody_reads_its_output(tmp_path: Path) -> None:
    arguments = " ".join([*LOCAL, "train.steps=20", f"run.storage={tmp_path}"])
    done = shell(f"$TRIREME {arguments} 2>&1 | head -1; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.splitlines()[-1] == "0", done
    assert committed(tmp_path / "run") == [20]


@SLOW_TOO
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-", "<&-"])
def test_training_runs_with_closed_streams(closed: str, tmp_path: Path) -> None:
    arguments = " ".join([*LOCAL, "train.steps=20", f"run.storage={tmp_path}"])
    done = shell(f"$TRIREME {arguments} {closed}")
    assert done.returncode == 0, done
    assert committed(tmp_path / "run") == [20]
    manifest = (tmp_path / "run" / "run.json").read_text()
    before_summary, _, _ = manifest.partition("summary")
    assert "step" not in before_summary.replace('"steps"', "")
