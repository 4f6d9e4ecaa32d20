"""A machine that is about to be taken away says so, and the run saves a checkpoint first."""

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


class Cloud(BaseHTTPRequestHandler):
    """The three clouds' metadata services on one port of this machine. `going` is what they know."""

    going = False
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        event = {"EventType": "Preempt", "Resources": ["other"], "NotBefore": ""}
        mine = event | {"Resources": ["me"], "NotBefore": "Sat, 21 Nov 2026 18:02:00 GMT"}
        notice = '{"action": "terminate", "time": "2026-11-21T18:02:00Z"}'
        header, value, text = {  # to whom the header is right
            "/latest/api/token": ("X-aws-ec2-metadata-token-ttl-seconds", "60", "t1" * (self.command == "PUT")),
            "/latest/meta-data/spot/instance-action": ("X-aws-ec2-metadata-token", "t1", notice * self.going),
            "/computeMetadata/v1/instance/preempted": ("Metadata-Flavor", "Google", str(self.going).upper()),
            "/metadata/instance/compute/name": ("Metadata", "true", "me"),
            "/metadata/scheduledevents": ("Metadata", "true", json.dumps({"Events": [event, *[mine] * self.going]})),
        }[path]
        found = text if self.headers.get(header) == value else ""
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(found.encode())

    do_PUT = do_GET

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def cloud() -> Iterator[str]:
    """Where it answers."""
    Cloud.going, Cloud.asked = False, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Cloud) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("service", "said"), [(aws, "18:02:00Z"), (gcp, "preempts"), (azure, "18:02:00 GMT")])
def test_each_cloud_is_understood(cloud: str, service: Any, said: str) -> None:
    ask = service(cloud)
    assert ask() is None
    Cloud.going = True
    assert said in ask()


def test_a_service_that_does_not_answer_is_no_harm() -> None:
    heard: list[str] = []
    watch = PreemptionWatcher("", heard.append, every=0.01)
    watch.polls = [aws("http://127.0.0.1:9"), lambda: "soon"]
    wait_until(lambda: heard == ["soon"])
    watch.close()


def test_only_a_cluster_with_spot_machines_is_asked(tmp_path: Path) -> None:
    expected = {"aws": "aws", "gcp": "gcp", "azure": "azure", "laptop": "", "onprem": ""}
    assert {name: provider_of(name) for name in expected} == expected
    text, file = (ROOT / "cluster" / "aws.yaml").read_text(), tmp_path / "mine.yaml"
    file.write_text(text.replace("      InstanceMarketOptions: {MarketType: spot}\n", ""))
    assert provider_of(str(file)) == "" and provider_of(None) == ""


DRAIN = """
import ray, sys, time
from ray._raylet import GcsClient
ray.init(address="auto", log_to_driver=False)
node = ray.nodes()[0]["NodeID"]
deadline = int((time.time() + 120) * 1000)
print(GcsClient(address=ray.get_runtime_context().gcs_address).drain_node(node, 2, "spot", deadline))
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ray", "actors"])
def test_a_warning_leads_to_a_checkpoint_and_the_run_goes_on(
    tmp_path: Path, cloud: str, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", cloud)
    run = ["train", *POINTS, "train.steps=100000", "run.name=spot", f"run.storage={tmp_path}"]
    run += ["checkpoint.every_seconds=null", "task_args.step_seconds=0.02", "cluster.file=aws"]
    run += [f"launcher={launcher}", "workers=2", "strategy=ddp"]
    with ray_head() as address:
        env = environment(RAY_ADDRESS=address, RAY_AUTH_MODE="disabled")
        process = start(run, env=env)
        try:
            wait_until(lambda: "/latest/meta-data/spot/instance-action" in Cloud.asked)
            assert not committed(tmp_path / "spot")
            Cloud.going = True
            wait_until(lambda: committed(tmp_path / "spot"))
            (saved,) = committed(tmp_path / "spot")
            Cloud.going = False
            if launcher == "actors":
                done = finish(start(["-c", DRAIN], env=env, program=[sys.executable]))
                assert "True" in done.out, done.out + done.err
                wait_until(lambda: len(committed(tmp_path / "spot")) > 1)
            process.terminate()
        finally:
            ended = finish(process, 120)
    assert ended.code == 130, ended.out + ended.err
    warning = "is about to go (AWS will terminate this spot machine at 2026-11-21T18:02:00Z): saving a checkpoint"
    assert warning in ended.out
    assert ("is about to go (Ray drains it, " in ended.out) == (launcher == "actors")
    assert max(committed(tmp_path / "spot")) > saved, "it went on after the warning"
