"""Users without a name or a usable home, and processes that leave a command's session."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster import ClusterError, environment
from cluster.connect import TOKEN_PATH, _set_token
from cluster.detached import Guard, detached
from tests.running import ROOT


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The temporary folder of a user that /etc/passwd does not know, as in many containers."""
    for name in (
        "HOME",
        "USER",
        "LOGNAME",
        "LNAME",
        "USERNAME",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
    ):
        monkeypatch.delenv(name, raising=False)

    def getpwuid(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", getpwuid)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_name_and_a_home_gets_temporary_ones(temporary_folder: Path) -> None:
    assert environment.user_name() == f"uid-{os.getuid()}"
    assert environment.home() is None
    environment.set_home()
    home = temporary_folder / f"trireme-home-{os.getuid()}"
    assert Path("~/x").expanduser() == home / "x"
    assert stat.S_IMODE(Path.home().stat().st_mode) == 0o700
    assert environment.below_home("XDG_CACHE_HOME", ".cache") == Path.home() / ".cache"


@pytest.mark.parametrize("home", ["/nonexistent", "/proc", "relative", ""])
def test_a_home_that_is_not_writable_holds_no_cache(
    home: str, temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", home)
    environment.set_home()
    temporary_home = environment.temporary_home()
    # A home that is set stays, because it may have keys to read.
    assert os.environ["HOME"] == (home or str(temporary_home))
    if home:
        assert environment.home() is None
    assert environment.below_home("XDG_CACHE_HOME", ".cache") == temporary_home / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert environment.below_home("XDG_CACHE_HOME", ".cache") == Path("/elsewhere")


def test_a_temporary_home_that_others_may_write_to_is_refused(temporary_folder: Path) -> None:
    home = temporary_folder / f"trireme-home-{os.getuid()}"
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(ClusterError, match="set HOME to a folder that can be written"):
        environment.temporary_home()


def test_commands_share_a_token_although_no_home_can_hold_it(
    temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv(TOKEN_PATH, raising=False)
    _set_token()
    file = Path(os.environ[TOKEN_PATH])
    token = file.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.delenv(TOKEN_PATH)
    _set_token()
    assert file.read_text() == token


def _session_and_blocked_signals() -> tuple[int, list[int]]:
    """Start a process.

    Returns:
        The difference of its session from its pid, and the signals that it blocks.
    """
    blocked = "signal.pthread_sigmask(signal.SIG_BLOCK, ())"
    show = f"import os, signal; print(os.getsid(0), *map(int, {blocked}))"
    process = subprocess.Popen(
        [sys.executable, "-c", show], preexec_fn=lambda: None, stdout=subprocess.PIPE, text=True
    )
    output, _ = process.communicate()
    session, *signals = map(int, output.split())
    return session - process.pid, signals


def test_a_detached_process_has_its_own_session_and_blocks_signals() -> None:
    with detached():
        difference, signals = _session_and_blocked_signals()
    assert difference == 0
    assert signals == sorted([signal.SIGTERM, signal.SIGHUP])


def test_a_process_after_the_detached_ones_has_our_session_and_blocks_nothing() -> None:
    with detached():
        pass
    difference, signals = _session_and_blocked_signals()
    assert difference != 0
    assert signals == []


GUARDING_PROGRAM = """
import sys, time
from cluster.detached import Guard
Guard(sys.argv[1:])
print(1, flush=True)
time.sleep(600)
"""


def test_a_guard_kills_processes_when_its_maker_ends_and_when_it_is_closed() -> None:
    """The agents of Ray's raylet are such processes, which no death of a parent ends."""
    already_ended, guarded_by_other, guarded = (
        subprocess.Popen(["sleep", "600"]) for _ in range(3)
    )
    already_ended.kill()
    already_ended.wait()
    pids = [str(already_ended.pid), str(guarded_by_other.pid)]
    maker = subprocess.Popen(
        [sys.executable, "-c", GUARDING_PROGRAM, *pids], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert maker.stdout is not None
    assert maker.stdout.read(1) == b"1"
    guard = Guard([guarded.pid])
    assert guarded_by_other.poll() is None
    assert guarded.poll() is None
    maker.kill()
    maker.wait()
    assert guarded_by_other.wait(30) == -signal.SIGKILL
    assert guarded.poll() is None
    guard.close()
    assert guarded.wait(30) == -signal.SIGKILL
