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
from tests.running import ROOT, wait_until


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
from pathlib import Path
from cluster.detached import Guard
Guard(Path(sys.argv[1]))
print(1, flush=True)
time.sleep(600)
"""


def _process_of_ray(folder: Path, title: str = "", *, detach: bool = True) -> subprocess.Popen[str]:
    """A process that logs in a folder, as those of a Ray.

    Args:
        folder: Where that Ray keeps its files.
        title: Of the process, as the agents set it, in place of arguments with the folder.
        detach: Whether it has left this process's session.
    """
    name = title or f"--temp-dir={folder}"
    with open(folder / "log", "a") as log:
        command = ["bash", "-c", 'exec -a "$0" sleep 600', name]
        process = subprocess.Popen(command, stdout=log, start_new_session=detach, text=True)
    wait_until(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(name.encode()))
    return process


def test_a_guard_ends_its_ray_when_its_maker_ends_and_when_it_is_closed(tmp_path: Path) -> None:
    """The agents of Ray's raylet, too, which no death of a parent ends."""
    folder_of_other = tmp_path / "other"
    folder = tmp_path / "own"
    folder_of_other.mkdir()
    folder.mkdir()
    maker = subprocess.Popen(
        [sys.executable, "-c", GUARDING_PROGRAM, str(folder_of_other)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert maker.stdout is not None
    assert maker.stdout.read(1) == b"1"
    guard = Guard(folder)
    # Started after the guards, as a Ray is.
    rays_of_other = [_process_of_ray(folder_of_other), _process_of_ray(folder_of_other, "ray::A")]
    rays = [_process_of_ray(folder), _process_of_ray(folder, "ray::A")]
    others = [_process_of_ray(folder, "a program"), _process_of_ray(folder, detach=False)]
    try:
        assert all(process.poll() is None for process in rays_of_other)
        maker.kill()
        maker.wait()
        assert [process.wait(30) for process in rays_of_other] == [-signal.SIGKILL] * 2
        wait_until(lambda: not folder_of_other.exists())
        assert all(process.poll() is None for process in rays)
        guard.close()
        assert [process.wait(30) for process in rays] == [-signal.SIGKILL] * 2
        assert not folder.exists()
        assert all(process.poll() is None for process in others)
        guard.close()  # a second time does nothing
    finally:
        for process in rays_of_other + rays + others:
            process.kill()
            process.wait()
