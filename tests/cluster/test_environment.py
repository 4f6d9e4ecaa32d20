"""A user without a name or a home, or with one that cannot be written to; processes that leave a command's session."""

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
def nameless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user that /etc/passwd does not know, as many containers have one; where its temporary files are."""
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)

    def getpwuid(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", getpwuid)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_name_and_a_home(nameless: Path) -> None:
    assert environment.user_name() == f"uid-{os.getuid()}"
    assert environment.home() is None
    environment.set_home()
    assert Path("~/x").expanduser() == nameless / f"trireme-home-{os.getuid()}" / "x"
    assert stat.S_IMODE(Path.home().stat().st_mode) == 0o700
    assert environment.below_home("XDG_CACHE_HOME", ".cache") == Path.home() / ".cache"


@pytest.mark.parametrize("home", ["/nonexistent", "/proc", "relative", ""])
def test_a_home_that_cannot_be_written_to(home: str, nameless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    environment.set_home()
    assert os.environ["HOME"] == (home or str(environment.temporary_home())), "one that is set may hold keys to read"
    if home:
        assert environment.home() is None
    assert environment.below_home("XDG_CACHE_HOME", ".cache") == environment.temporary_home() / ".cache"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert environment.below_home("XDG_CACHE_HOME", ".cache") == Path("/elsewhere")


def test_a_temporary_home_of_another_user_is_refused(nameless: Path) -> None:
    (nameless / f"trireme-home-{os.getuid()}").mkdir(mode=0o777)
    (nameless / f"trireme-home-{os.getuid()}").chmod(0o777)
    with pytest.raises(ClusterError, match="set HOME to a folder that can be written"):
        environment.temporary_home()


def test_ray_has_a_token_where_no_home_can_hold_one(nameless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc")
    for name in ("RAY_AUTH_TOKEN", TOKEN_PATH):
        monkeypatch.delenv(name, raising=False)
    _set_token()
    token = Path(os.environ[TOKEN_PATH])
    first = token.read_text()
    assert len(first) == 64 and stat.S_IMODE(token.stat().st_mode) == 0o600
    monkeypatch.delenv(TOKEN_PATH)
    _set_token()
    assert token.read_text() == first, "the next command, and workers of this one, have the same"


def test_what_a_command_detaches_has_a_session_of_its_own_and_blocks_signals() -> None:
    show = "import os, signal; print(os.getsid(0), *map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    program = [sys.executable, "-c", show]

    def sessions() -> tuple[int, list[int]]:
        process = subprocess.Popen(program, preexec_fn=lambda: None, stdout=subprocess.PIPE, text=True)
        words = process.communicate()[0].split()
        return int(words[0]) - process.pid, [int(word) for word in words[1:]]

    with detached():
        assert sessions() == (0, sorted([signal.SIGTERM, signal.SIGHUP]))
    offset, mask = sessions()
    assert offset and not mask, "afterwards as ever"


GUARDS = (
    "import sys, time; from cluster.detached import Guard; Guard(sys.argv[1:]); print(1, flush=True); time.sleep(600)"
)


def test_a_guard_ends_processes_with_the_one_that_made_it_and_when_it_is_closed() -> None:
    """Processes that no death of a parent reaches, as the agents of Ray's raylet; one has ended before."""
    ended, orphan, other = (subprocess.Popen(["sleep", "600"]) for _ in range(3))
    ended.kill()
    ended.wait()
    pids = [str(ended.pid), str(orphan.pid)]
    command = subprocess.Popen([sys.executable, "-c", GUARDS, *pids], cwd=ROOT, stdout=subprocess.PIPE)
    assert command.stdout is not None and command.stdout.read(1) == b"1"
    guard = Guard([other.pid])
    assert orphan.poll() is None and other.poll() is None
    command.kill()
    command.wait()
    assert orphan.wait(30) == -signal.SIGKILL and other.poll() is None
    guard.close()
    assert other.wait(30) == -signal.SIGKILL
