"""cluster/aws.yaml through Ray's own AWS provider, against moto's stand-in for the AWS API: as far as that carries."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cluster.files import FOLDER


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """boto3, with nothing behind it but moto. Ray writes its key pair into the home folder."""
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    with moto.mock_aws():
        yield boto3


def test_the_file_becomes_machines_and_they_go_again(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.autoscaler._private.aws import config as ray_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.autoscaler.tags import TAG_RAY_NODE_KIND, TAG_RAY_NODE_NAME, TAG_RAY_USER_NODE_TYPE

    # Ray waits half a minute for a new role to be known everywhere.
    monkeypatch.setattr(ray_aws, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    subnet = next(
        iter(aws.resource("ec2").subnets.filter(Filters=[{"Name": "availabilityZone", "Values": ["us-east-1a"]}]))
    )
    group = next(iter(aws.resource("ec2").security_groups.all()))
    image = aws.client("ec2").describe_images()["Images"][0]["ImageId"]
    for profile in ("trireme-head", "trireme-worker"):
        aws.client("iam").create_instance_profile(InstanceProfileName=profile)
    text = (FOLDER / "aws.yaml").read_text()
    for placeholder, real in (("subnet", subnet.id), ("sg", group.id), ("ami", image)):
        text = text.replace(f"{placeholder}-0123456789abcdef0", real)
    config = prepare_config(yaml.safe_load(text))
    validate_config(config)
    config = ray_aws.bootstrap_aws(config)
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    for kind in ("head", "a100", "a100-spot"):
        tags = {
            TAG_RAY_NODE_KIND: "head" if kind == "head" else "worker",
            TAG_RAY_USER_NODE_TYPE: kind,
            TAG_RAY_NODE_NAME: kind,
        }
        wanted = config["available_node_types"][kind]["node_config"]
        provider.create_node(copy.deepcopy(wanted), tags, 1)
    nodes = provider.non_terminated_nodes({})
    machines = [
        (instance["InstanceType"], instance.get("InstanceLifecycle"), instance["SubnetId"])
        for reservation in aws.client("ec2").describe_instances(InstanceIds=nodes)["Reservations"]
        for instance in reservation["Instances"]
    ]
    assert sorted(machines, key=str) == [
        ("m7i.xlarge", None, machines[0][2]),
        ("p4d.24xlarge", "spot", subnet.id),
        ("p4d.24xlarge", None, subnet.id),
    ]
    provider.terminate_nodes(nodes)
    assert provider.non_terminated_nodes({}) == []
