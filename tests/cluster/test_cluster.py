"""Cluster files: each of ours is valid and read whole, and what is wrong in one is found with its line."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from cluster import ClusterError, launch
from cluster import connect as connect_module
from cluster.connect import connect, running_here
from cluster.files import FOLDER, bootstrap_config, read_cluster, validate_file
from cluster.remote import free_port, is_open
from cluster.shape import NodeState, link, of_gpus, of_nodes
from tests.running import environment, here, trireme, wait_until

OWN = {
    "laptop": ("local", 0),
    "onprem": ("local", 12),
    "aws": ("aws", 64),
    "gcp": ("gcp", 64),
    "azure": ("azure", 64),
    "kuberay-cluster": ("kuberay", 64),
    "kuberay-job": ("kuberay", 16),
}


@pytest.mark.parametrize("name", OWN)
def test_own_files_are_valid_and_complete(name: str) -> None:
    assert [str(problem) for problem in validate_file(name)] == []
    shape = read_cluster(name)
    assert (shape.provider, shape.max_gpus) == OWN[name]
    assert shape.head.price_per_hour is not None
    text = (FOLDER / f"{name}.yaml").read_text()
    token = "mode: token" in text or ("RAY_AUTH_MODE=token" in text and "--dashboard-host=127.0.0.1" in text)
    assert token or name == "laptop", "a cluster of several machines asks for a token"
    for kind in shape.workers:
        assert kind.gpu and kind.gpus and kind.cpus and kind.memory_bytes, "the planner needs all of it"
        assert kind.link_within and kind.link_across and kind.price_per_hour is not None
        assert 0 <= kind.min_nodes <= kind.max_nodes


@pytest.mark.parametrize("name", ["kuberay-cluster", "kuberay-job"])
def test_pods_have_probes_of_their_own(name: str) -> None:
    """KubeRay's run wget (BaseWgetHealthCommand in its ray-operator), which a slim image has not."""
    pods = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))[-1]["spec"]
    pods = pods.get("rayClusterSpec", pods)
    groups = [pods["headGroupSpec"], *pods["workerGroupSpecs"]]
    containers = [group["template"]["spec"]["containers"][0] for group in groups]
    assert len(containers) == 2 and all({"livenessProbe", "readinessProbe"} <= each.keys() for each in containers)
    assert "wget" not in json.dumps(containers)


def test_a_head_knows_the_file_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bootstrap_config() is None
    shutil.copy(FOLDER / "aws.yaml", tmp_path / "ray_bootstrap_config.yaml")  # as the files' `ray start` lines name it
    assert "~/ray_bootstrap_config.yaml" in (FOLDER / "aws.yaml").read_text()
    found = bootstrap_config()
    assert found is not None and found.max_gpus == OWN["aws"][1]


# One planted error per row: file, what is replaced by what, the line's number is that of the replaced text, and what
# the sentence must name.
PLANTED = [
    ("onprem", "head_ip: 192", "head_ipp: 192", "did you mean 'head_ip'"),
    ("onprem", "gpu: rtx-4090", "gpu: rtx-9999", "rtx-9999"),
    ("onprem", "link_across: 10Gb", "link_across: quick", "a link of 'quick'"),
    ("aws", "type: aws", "type: awss", "the provider 'awss' is not supported: did you mean 'aws'?"),
    ("aws", "Ebs: {VolumeSize: 100,", "Ebs: {VolumeSize: large,", "VolumeSize: 'large' is not of type 'integer'"),
    ("aws", "GPU: 8}", "GPU: 4}", "a p4d.24xlarge has 8"),
    ("aws", "min_workers: 0", "min_workers: 9", "more than its max_workers"),
    ("aws", "head_node_type: head", "head_node_type: haed", "did you mean 'head'"),
    ("aws", ", Groups: [sg-0123456789abcdef0]}", "}", "lacks the key 'Groups'"),
    ("gcp", "machineType: n2-standard-4", "machineType: {a: b}", "write a machine such as"),
    ("azure", "vmSize: Standard_D4s_v5", "vmSize: {a: b}", "write a machine such as"),
    ("kuberay-cluster", "maxReplicas: 4", "maxReplicas: four", "'four' is not of type 'integer'"),
    ("kuberay-cluster", "memory: 1900Gi", "memory: 1900Gib", "'1900Gib' does not match"),
    ("kuberay-job", "kind: RayJob", "kind: RayJobb", "did you mean 'RayJob'"),
    ("kuberay-job", "trireme/gpu: h100-80gb", "trireme/gpu: h100-81tb", "h100-81tb"),
]
"""Of each kind; keys and words misspelt by rule: test_cluster_files.py."""


@pytest.mark.parametrize(("name", "before", "after", "said"), PLANTED)
def test_a_planted_error_is_named_on_its_line(tmp_path: Path, name: str, before: str, after: str, said: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert before in text
    file = tmp_path / "cluster.yaml"
    file.write_text(text.replace(before, after, 1))
    found = validate_file(str(file))
    assert found, f"{after!r} is let through"
    named = [problem for problem in found if said in problem.message]
    assert named, [str(problem) for problem in found]
    line = text[: text.index(before)].count("\n") + 1
    assert any(abs(problem.line - line) <= 5 for problem in named), (line, [str(problem) for problem in named])


LOCAL = "cluster_name: a\nprovider: {type: local, head_ip: 10.0.0.1, worker_ips: []}\nauth: {}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "not a cluster file: it is a list"),
        ("task: image_classification\n", "it has task, but neither cluster_name"),
        ("cluster_name: [x\nprovider: {", "this is not YAML"),
        (f"cluster_name: b\n{LOCAL}", "written twice"),
        (LOCAL, "auth lacks the key 'ssh_user'"),
        ("apiVersion: v1\nkind: Namespace\nmetadata: {name: x}\n", "does not make a Ray cluster"),
    ],
)
def test_what_is_no_cluster_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ClusterError, match=said):
        read_cluster(file)


def test_a_cluster_in_thought() -> None:
    shape = of_gpus(512, "H100", 8, "400Gb")
    (node,) = shape.workers
    assert (node.gpus, node.max_nodes, shape.max_gpus, node.link_across) == (8, 64, 512, 50e9)
    assert of_gpus(4, "A100-80GB", 8).max_gpus == 4
    for gpus, name, per_node, across in [(12, "H100", 8, None), (8, "H100", 8, "fast")]:
        with pytest.raises(ClusterError):
            of_gpus(gpus, name, per_node, across)
    with pytest.raises(ValueError, match="H10000"):
        of_gpus(8, "H10000", 8)


def test_links_in_bits_and_bytes() -> None:
    assert link("400Gb") == link("400 Gb/s") == link("400Gbps") == link("50GB/s") == link("50 GB") == 50e9
    assert link(None) is None


def test_the_shape_of_living_nodes() -> None:
    head = NodeState("a", "", {"CPU": 4, "node:__internal_head__": 1, "memory": 8e9, "object_store_memory": 2e9}, {})
    worker = NodeState("b", "big", {"CPU": 64, "GPU": 8, "accelerator_type:H100": 1}, {})
    shape = of_nodes([head, worker, worker])
    assert shape.head.memory_bytes == 10**10
    (kind,) = shape.workers
    assert (kind.name, kind.gpus, kind.min_nodes, kind.max_nodes) == ("big", 8, 2, 2)
    assert kind.gpu == "h100-80gb" and kind.link_within
    with pytest.raises(ClusterError, match="no head"):
        of_nodes([worker])


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    listed = here(monkeypatch, capsys, "cluster", "list", "--json")
    assert set(listed.json) == {f"{name}.yaml" for name in OWN}
    shown = here(monkeypatch, capsys, "cluster", "show", "aws")
    assert shown.code == 0 and "8 x a100-40gb" in shown.out and "a100-spot (spot)" in shown.out
    bad = tmp_path / "bad.yaml"
    bad.write_text((FOLDER / "onprem.yaml").read_text().replace("- 192.168.1.12", "- 192.168.1.11"))
    checked = here(monkeypatch, capsys, "cluster", "validate", "laptop", str(bad))
    assert checked.code == 2 and "laptop is valid" in checked.out
    assert f"{bad}:19: the host 192.168.1.11 is named twice" in checked.err
    gone = here(monkeypatch, capsys, "cluster", "up", str(tmp_path / "no.yaml"))
    assert gone.code == 2 and "there is no file" in gone.err
    kubernetes = here(monkeypatch, capsys, "cluster", "up", "kuberay-job", "--json")
    assert kubernetes.code == 2 and "kubectl apply" in kubernetes.json["error"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("workers=16", "wrokers=16", "there is no key 'wrokers' (on the command line); did you mean 'workers'?"),
        ("strategy=fsdp", "strategy=fspd", "strategy 'fspd' is not known: did you mean fsdp?"),
    ],
)
def test_a_jobs_keys_are_looked_at(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    before: str,
    after: str,
    said: str,
) -> None:
    (tmp_path / "job.yaml").write_text((FOLDER / "kuberay-job.yaml").read_text().replace(before, after))
    checked = here(monkeypatch, capsys, "cluster", "validate", str(tmp_path / "job.yaml"))
    assert checked.code == 2 and checked.err.strip().endswith(f"its entrypoint: {said}")
    assert here(monkeypatch, capsys, "cluster", "validate", "kuberay-job").code == 0


def test_a_cluster_that_another_user_has_started_here_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        noted = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(noted)
        assert running_here() == noted
        words = [sys.executable, "-c", "import time; time.sleep(600)", f"--gcs-address={noted}"]
        with subprocess.Popen(["/opt/raylet", *words[1:]], executable=words[0]) as raylet:
            wait_until(lambda: "raylet" in Path(f"/proc/{raylet.pid}/cmdline").read_text())
            connect_module._check_reachable(noted)
            monkeypatch.setattr("cluster.connect.os.getuid", lambda: os.geteuid() + 1)
            with pytest.raises(ClusterError, match="started by another user"):
                connect_module._check_reachable(noted)
            raylet.kill()
        assert running_here() is None


@pytest.mark.slow
def test_this_machine_is_brought_up_and_down_and_no_other_ray_with_it(tmp_path: Path) -> None:
    port, dashboard = free_port(), free_port()
    temporary = f"/tmp/ray-{port}"  # short: Ray makes sockets in it, whose paths may have 107 characters
    text = (FOLDER / "laptop.yaml").read_text()
    text = text.replace("--port=6379", f"--port={port} --num-cpus=1 --temp-dir={temporary}")
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace("--dashboard-port=8265", f"--dashboard-port={dashboard}"))
    env = environment(RAY_AUTH_MODE="disabled", HOME=str(tmp_path))
    down = trireme("cluster", "down", str(file), env=env)
    assert down.code == 2 and "is not up" in down.err
    try:
        up = trireme("cluster", "up", str(file), env=env)
        assert up.code == 0 and "1 node up" in up.out, up.out + up.err
        twice = trireme("cluster", "up", str(file), env=env)
        assert twice.code == 2 and "running on this machine already" in twice.err
    finally:
        ended = trireme("cluster", "down", str(file), env=env)
        shutil.rmtree(temporary, ignore_errors=True)
    assert ended.code == 0, ended.err
    assert not is_open("127.0.0.1", port)
    gone = trireme("cluster", "status", str(file), env=env)
    assert gone.code == 1 and "is not up" in gone.out


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9"),
        ("ray://127.0.0.1:9", "no Ray cluster answers at ray://127.0.0.1:9"),
        ("http://127.0.0.1:8265", "is a job server: `trireme submit` sends jobs there"),
        ("", "does not start on this machine; try again when it is less busy: it timed out"),
    ],
)
def test_an_address_where_no_cluster_is(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", Mock(side_effect=Exception("it timed out")))  # Ray raises no more precise one
    monkeypatch.setattr("cluster.connect.running_here", str)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError, match=said):
        connect()


def test_a_cloud_cluster_that_is_up_is_not_started_over(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setattr(launch, "make_token", lambda: None)
    there = launch.Status("trireme-aws", True, alive=[{}, {}])
    monkeypatch.setattr(launch, "status_of", lambda data, file: there)
    monkeypatch.setattr(launch, "_run", lambda *_: pytest.fail("`ray up` restarts the head and ends its jobs"))
    with pytest.raises(ClusterError, match=r"trireme-aws is up already, with 2 nodes: .*cluster down"):
        launch.up("aws", lambda _: None)
