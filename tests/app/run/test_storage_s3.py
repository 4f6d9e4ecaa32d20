"""Checkpoints over the real S3 protocol: s3fs against moto's server on the loopback interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")

from app import checkpoint  # noqa: E402
from app.checkpoint import Checkpointer, CheckpointError  # noqa: E402
from app.checkpoint.dcp import HashedFiles  # noqa: E402
from app.errors import UserError  # noqa: E402
from app.storage import Storage  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a bucket of a fresh S3 server."""
    import s3fs

    with pytest.MonkeyPatch.context() as patch:
        s3 = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        s3.start()
        host, port = s3.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()  # instances remember the endpoint they were made with
        s3fs.S3FileSystem().mkdir("bucket")
        yield "s3://bucket/runs"
        s3fs.S3FileSystem.clear_instance_cache()
        s3.stop()


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((2_000_000,), value)}, "n": value}


def test_checkpoints_on_s3(bucket: str) -> None:
    folder = f"{bucket}/a/checkpoints"
    Storage(bucket).check_writable()
    checkpointer = Checkpointer(folder, keep_last=2, attempt="1")
    for step in (1, 2, 3):
        checkpointer.save(state_of(step), meta={"step": step})
    checkpointer.close()
    found = checkpoint.commits(folder)
    assert [c.step for c in found] == [3, 2]
    assert Storage(found[0].path).list() == [".metadata", "COMMIT.json", "__0_0.distcp"]
    into = state_of(0.0)
    checkpoint.load(found[0], into)
    assert into["n"] == 3 and torch.equal(into["model"]["w"], state_of(3.0)["model"]["w"])
    storage = Storage(found[0].path)
    storage.write_bytes("__0_0.distcp", storage.read_bytes("__0_0.distcp")[:-1])
    good, passed = checkpoint.latest_good(folder)
    assert good == found[1] and "__0_0.distcp has" in passed[0]
    storage.remove("COMMIT.json")
    checkpoint.sweep(folder)
    assert Storage(folder).list() == ["step-00000002-1"]


def test_a_file_whose_writing_fails_does_not_appear(bucket: str) -> None:
    storage = Storage(bucket).join("torn")
    with pytest.raises(ValueError, match="stop"):
        with HashedFiles(storage).create_stream("half", "wb") as stream:
            stream.write(b"half")
            raise ValueError("stop")
    del stream
    assert storage.list() == []


def test_failures_on_s3(bucket: str) -> None:
    with pytest.raises(UserError, match=r"s3://absent/runs cannot be written \(The specified bucket does not exist\)"):
        Storage("s3://absent/runs").check_writable()
    checkpointer = Checkpointer("s3://absent/runs")
    checkpointer.save(state_of(1.0), meta={"step": 1})
    with pytest.raises(CheckpointError, match="The specified bucket does not exist"):
        checkpointer.close()
