"""Storage: the same calls locally and on an object store, atomic writes, and one sentence for a bad place."""

import os
import uuid
from pathlib import Path
from unittest.mock import Mock

import pytest

from app.checkpoint import CheckpointError
from app.checkpoint.dcp import HashedFiles
from app.errors import UserError
from app.storage import Storage
from tests.app.checkpoint.kit import save


@pytest.fixture(params=["local", "file", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    urls = {"local": str(tmp_path), "file": f"file://{tmp_path}", "memory": f"memory://{uuid.uuid4().hex}"}
    url = request.getfixturevalue("bucket") if request.param == "s3" else urls[request.param]
    return Storage(url).join("runs", "a")


def test_write_read_list_remove(storage: Storage) -> None:
    storage.check_writable()
    assert storage.list() == [] and not storage.exists("one.json")
    storage.write_bytes("one.json", b"1")
    storage.write_bytes("deep/er/two.bin", b"22")
    storage.write_bytes("one.json", b"111")
    assert storage.read_bytes("one.json") == b"111" and storage.size("one.json") == 3
    assert storage.list() == ["deep", "one.json"] and storage.list("deep/er") == ["two.bin"]
    assert storage.join("deep", "er").read_bytes("two.bin") == b"22"
    assert storage.exists("deep")
    with storage.open("deep/er/two.bin") as file:
        assert file.read(1) == b"2"
    storage.rename("one.json", "uno.json")
    assert storage.list() == ["deep", "uno.json"]
    storage.remove("uno.json")
    storage.remove("uno.json")
    storage.remove_tree("deep")
    storage.remove_tree("deep")
    assert storage.list() == []
    for call in (storage.read_bytes, storage.size):
        with pytest.raises(FileNotFoundError):
            call("uno.json")


def test_local_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/nobody")
    assert Storage("runs/../out").url == str(tmp_path / "out")
    assert Storage("runs").local_path == tmp_path / "runs"
    assert Storage("~/runs").url == "/home/nobody/runs"
    assert Storage("memory://b/").url == "memory://b"
    with pytest.raises(ValueError, match="not a local folder"):
        _ = Storage("memory://b").local_path


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    storage.write_bytes("marker", b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        storage.write_bytes("marker", b"new")
    assert storage.read_bytes("marker") == b"old" and storage.list() == ["marker"]


def test_a_file_whose_writing_fails_does_not_appear_on_s3(bucket: str) -> None:
    storage = Storage(bucket).join("torn")
    with pytest.raises(ValueError, match="stop"):
        with HashedFiles(storage).create_stream("half", "wb") as stream:
            stream.write(b"half")
            raise ValueError("stop")
    del stream
    assert storage.list() == []


def test_failures_on_s3(bucket: str) -> None:
    """In a sentence; those of other places: test_bad_input.py."""
    with pytest.raises(UserError, match=r"s3://absent/runs cannot be written \(The specified bucket does not exist\)"):
        Storage("s3://absent/runs").check_writable()
    with pytest.raises(CheckpointError, match="The specified bucket does not exist"):
        save("s3://absent/runs", 1)
