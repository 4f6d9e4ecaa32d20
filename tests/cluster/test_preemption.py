"""A run saves a checkpoint when a cloud is about to take a machine away."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cluster.preemption import PreemptionWatcher, aws, azure, gcp, provider_of
from tests.ray_heads import ray_head
from tests.running import POINTS, ROOT, committed, environment, finish, start, wait_until

AWS_TOKEN = "/latest/api/token"
AWS_ACTION = "/latest/meta-data/spot/instance-action"
GCP_PREEMPTED = "/computeMetadata/v1/instance/preempted"
AZURE_NAME = "/metadata/instance/compute/name"
AZURE_EVENTS = "/metadata/scheduledevents"
REQUIRED_HEADERS = {
    AWS_TOKEN: ("X-aws-ec2-metadata-token-ttl-seconds", "60"),
    AWS_ACTION: ("X-aws-ec2-metadata-token", "t1"),
    GCP_PREEMPTED: ("Metadata-Flavor", "Google"),
    AZURE_NAME: ("Metadata", "true"),
    AZURE_EVENTS: ("Metadata", "true"),
}


class Cloud(BaseHTTPRequestHandler):
    """The metadata services of three clouds, on one port.

    Attributes:
        is_preempting: Whether they are about to take this machine away.
        requested_paths: What they were asked.
    """

    is_preempting = False
    requested_paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        self.requested_paths.append(path)
        header, value = REQUIRED_HEADERS[path]
        answer = self._answer(path) if self.headers.get(header) == value else ""
        self.send_response(200 if answer else 404)
        self.end_headers()
        self.wfile.write(answer.encode())

    do_PUT = do_GET

    def _answer(self, path: str) -> str:
        """What a service answers; "" for nothing."""
        match path:
            case "/latest/api/token":
                return "t1" if self.command == "PUT" else ""
            case "/latest/meta-data/spot/instance-action":
                notice = {"action": "terminate", "time": "2026-11-21T18:02:00Z"}
                return json.dumps(notice) if self.is_preempting else ""
            case "/computeMetadata/v1/instance/preempted":
                return str(self.is_preempting).upper()
            case "/metadata/instance/compute/name":
                return "me"
        other = {"EventType": "Preempt", "Resources": ["other"], "NotBefore": ""}
        mine = other | {"Resources": ["me"], "NotBefore": "Sat, 21 Nov 2026 18:02:00 GMT"}
        events = [other, mine] if self.is_preempting else [other]
        return json.dumps({"Events": events})

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def cloud() -> Iterator[str]:
    """The address of the metadata services."""
    Cloud.is_preempting = False
    Cloud.requested_paths = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Cloud) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("service", "words"), [(aws, "18:02:00Z"), (gcp, "preempts"), (azure, "18:02:00 GMT")]
)
def test_the_warning_of_each_cloud_is_understood(cloud: str, service: Any, words: str) -> None:
    ask = service(cloud)
    assert ask() is None
    Cloud.is_preempting = True
    assert words in ask()


def test_a_service_that_does_not_answer_does_not_hide_another() -> None:
    warnings: list[str] = []
    watcher = PreemptionWatcher("", warnings.append, every=0.01)
    watcher.polls = [aws("http://127.0.0.1:9"), lambda: "soon"]
    wait_until(lambda: warnings == ["soon"])
    watcher.close()


def test_only_the_cloud_of_a_cluster_with_spot_machines_is_asked(tmp_path: Path) -> None:
    expected = {"aws": "aws", "gcp": "gcp", "azure": "azure", "laptop": "", "onprem": ""}
    assert {name: provider_of(name) for name in expected} == expected
    text = (ROOT / "cluster" / "aws.yaml").read_text()
    without_spot = tmp_path / "mine.yaml"
    without_spot.write_text(text.replace("      InstanceMarketOptions: {MarketType: spot}\n", ""))
    assert provider_of(str(without_spot)) == ""
    assert provider_of(None) == ""


DRAIN = """
import ray, sys, time
from ray._raylet import GcsClient
ray.init(address="auto", log_to_driver=False)
node = ray.nodes()[0]["NodeID"]
deadline = int((time.time() + 120) * 1000)
client = GcsClient(address=ray.get_runtime_context().gcs_address)
print(client.drain_node(node, 2, "spot", deadline))
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ray", "actors"])
def test_a_warning_leads_to_a_checkpoint_and_the_run_goes_on(
    tmp_path: Path, cloud: str, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", cloud)
    folder = tmp_path / "spot"
    run = [
        "train",
        *POINTS,
        "train.steps=100000",
        "run.name=spot",
        f"run.storage={tmp_path}",
        "checkpoint.every_seconds=null",
        "task_args.step_seconds=0.02",
        "cluster.file=aws",
        f"launcher={launcher}",
        "workers=2",
        "strategy=ddp",
    ]
    with ray_head() as address:
        env = environment(RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
        process = start(run, env=env)
        try:
            wait_until(lambda: AWS_ACTION in Cloud.requested_paths)
            assert not committed(folder)
            Cloud.is_preempting = True
            wait_until(lambda: committed(folder))
            (saved_step,) = committed(folder)
            Cloud.is_preempting = False
            if launcher == "actors":
                drained = finish(start(["-c", DRAIN], env=env, program=[sys.executable]))
                assert "True" in drained.out, drained.out + drained.err
                wait_until(lambda: len(committed(folder)) > 1)
            process.terminate()
        finally:
            ended = finish(process, 120)
    assert ended.code == 130, ended.out + ended.err
    assert (
        "is about to go (AWS will terminate this spot machine at 2026-11-21T18:02:00Z): "
        "saving a checkpoint"
    ) in ended.out
    is_drained_by_ray = "is about to go (Ray drains it, " in ended.out
    assert is_drained_by_ray == (launcher == "actors")
    assert max(committed(folder)) > saved_step, "the run has ended with the warning"
