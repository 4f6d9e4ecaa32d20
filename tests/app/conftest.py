"""A bucket on a real S3 server (moto) at the loopback interface, which s3fs uses."""

import uuid
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The URL of a folder in the bucket."""
    s3fs = pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    with pytest.MonkeyPatch.context() as patch:
        s3 = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        s3.start()
        host, port = s3.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()  # instances keep the endpoint they were made with
        name = f"bucket-{uuid.uuid4().hex}"  # servers of one process share their buckets
        s3fs.S3FileSystem().mkdir(name)
        yield f"s3://{name}/runs"
        s3fs.S3FileSystem.clear_instance_cache()
        s3.stop()
