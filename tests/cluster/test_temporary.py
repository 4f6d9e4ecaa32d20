"""The folder of a command's own Ray is there as long as the command is."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.temporary import TemporaryFolder, sweep
from tests.running import ROOT

MAKES = "import time; from cluster.temporary import TemporaryFolder as T; print(T().path, flush=True); time.sleep(600)"


def test_what_a_killed_command_has_left_is_swept_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    other = subprocess.Popen([sys.executable, "-c", MAKES], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    (theirs / "session").mkdir()
    own = TemporaryFolder()
    assert own.path.stat().st_mode & 0o777 == 0o700, "other users see nothing of it"
    sweep()
    assert theirs.is_dir() and own.path.is_dir()
    other.kill()
    other.wait()
    (tmp_path / "tr-ray-again" / "session").mkdir(parents=True)  # a process of Ray that ended last made it again
    sweep()
    assert not theirs.exists() and own.path.is_dir()
    own.remove()
    assert list(tmp_path.iterdir()) == []
