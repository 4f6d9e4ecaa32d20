"""Clusters in thought and alive: their shape, how one is reached and started, what is said of machines before Ray is
started on them and of a cluster's state, and the folder of a command's own Ray."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from app.submit.client import Server
from cluster import ClusterError, ClusterUnavailable, launch
from cluster import connect as connect_module
from cluster.addresses import join_address, split_address
from cluster.connect import connect, running_here
from cluster.files import FOLDER, read_cluster
from cluster.remote import (
    CommandResult,
    HostFacts,
    SshLogin,
    free_port,
    is_open,
    read_probe,
    ssh_problem,
    start_problems,
)
from cluster.shape import NodeState, parse_link_speed, shape_of_gpus, shape_of_nodes
from cluster.temporary import TemporaryFolder, sweep
from tests.running import ROOT, environment, trireme


def test_a_cluster_in_thought() -> None:
    shape = shape_of_gpus(512, "H100", 8, "400Gb")
    (node,) = shape.workers
    assert (node.gpus, node.max_nodes, shape.max_gpus, node.link_across) == (8, 64, 512, 50e9)
    assert shape_of_gpus(4, "A100-80GB", 8).max_gpus == 4
    for gpus, name, per_node, across in [(12, "H100", 8, None), (8, "H100", 8, "fast")]:
        with pytest.raises(ClusterError):
            shape_of_gpus(gpus, name, per_node, across)
    for speed in ("400Gb", "400 Gb/s", "400Gbps", "50GB/s", "50 GB"):
        assert parse_link_speed(speed) == 50e9
    assert parse_link_speed(None) is None


def test_the_shape_of_living_nodes() -> None:
    of_head = {"CPU": 4, "node:__internal_head__": 1, "memory": 8e9, "object_store_memory": 2e9}
    of_worker = {"CPU": 64, "GPU": 8, "accelerator_type:H100": 1}
    head = NodeState(address="a", kind="", total=of_head, available={})
    worker = NodeState(address="b", kind="big", total=of_worker, available={})
    shape = shape_of_nodes([head, worker, worker])
    assert shape.head.memory_bytes == 10**10
    (kind,) = shape.workers
    assert (kind.name, kind.gpus, kind.min_nodes, kind.max_nodes) == ("big", 8, 2, 2)
    assert kind.gpu == "h100-80gb" and kind.link_within
    with pytest.raises(ClusterError, match="no head"):
        shape_of_nodes([worker])


def test_a_cluster_of_another_user_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        noted = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(noted)
        assert running_here() == noted
        raylet = {"cmdline": ["/opt/raylet", f"--gcs-address={noted}"], "uids": Mock(real=os.getuid())}
        monkeypatch.setattr("psutil.process_iter", lambda _: [Mock(info=raylet)])
        connect_module._check_reachable(noted)
        monkeypatch.setattr("cluster.connect.os.getuid", lambda: os.geteuid() + 1)
        with pytest.raises(ClusterError, match="started by another user"):
            connect_module._check_reachable(noted)
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
    ("address", "kind", "said"),
    [
        ("127.0.0.1:9", ClusterUnavailable, r"no Ray cluster answers at 127.0.0.1:9 .*\(3 tries\)"),
        ("[::1]:9", ClusterUnavailable, r"no Ray cluster answers at \[::1\]:9 "),
        ("ray://127.0.0.1:9", ClusterUnavailable, "no Ray cluster answers at ray://127.0.0.1:9"),
        ("", ClusterUnavailable, r"Ray did not start on this machine: it timed out \(5 tries\)"),
        ("local", ClusterUnavailable, r"Ray did not start on this machine: it timed out \(5 tries\)"),
        ("http://127.0.0.1:8265", ClusterError, "is a job server: `trireme submit` sends jobs there"),
        ("auto", ClusterError, "RAY_ADDRESS=auto, but no Ray cluster of this user runs on this machine"),
        ("nobody.invalid:6379", ClusterError, "RAY_ADDRESS=nobody.invalid:6379: no machine is called nobody.invalid"),
        ("::1:6379", ClusterError, r"an IPv6 address without brackets: write \[::1\]:6379"),
        ("fd00::2:6379", ClusterError, r"write \[fd00::2\]:6379"),
    ],
)
def test_an_address_where_no_cluster_is(
    address: str, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong is said at once, exit code 2; what may come is tried again first, exit code 1."""
    monkeypatch.setattr("ray.init", Mock(side_effect=Exception("it timed out")))  # Ray raises no more precise one
    monkeypatch.setattr("cluster.connect.running_here", lambda: None)
    monkeypatch.setattr("cluster.connect._runs_here", lambda: False)
    monkeypatch.setattr("cluster.connect.PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("RAY_ADDRESS", address)
    notes: list[str] = []
    with pytest.raises(kind, match=said):
        connect(say=notes.append)
    assert len(notes) == (0 if kind is ClusterError else 2 if address not in ("", "local") else 4), notes


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (ConnectionError("Failed to connect to GCS within 60 s"), ClusterUnavailable, "does not answer, though"),
        (RuntimeError("The token is invalid"), ClusterError, "its token is missing here, wrong or expired"),
        (RuntimeError("Version mismatch: the cluster was started with Ray 2.9"), ClusterError, "another version than"),
        (RuntimeError("Can't find a node with IP address 10.0.0.9"), ClusterError, "this machine is not a node of"),
    ],
)
def test_a_cluster_that_does_not_take_this_process(
    raised: Exception, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.init", Mock(side_effect=raised))
    monkeypatch.setattr("cluster.connect.PAUSE_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(kind, match=said):
            connect()


@pytest.mark.parametrize(
    ("text", "where", "joined"),
    [
        ("127.0.0.1:6379", ("127.0.0.1", 6379), "127.0.0.1:6379"),
        ("head:6379", ("head", 6379), "head:6379"),
        ("[::1]:6379", ("::1", 6379), "[::1]:6379"),
        ("[fd00::2]:6379", ("fd00::2", 6379), "[fd00::2]:6379"),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1), "[fe80::1%eth0]:1"),
        ("auto", None, ""),
        ("head", None, ""),
    ],
)
def test_addresses_are_taken_apart_and_put_together(text: str, where: tuple[str, int] | None, joined: str) -> None:
    assert split_address(text) == where
    assert where is None or join_address(*where) == joined


@pytest.mark.parametrize("written", ["::1", "fd00::2", "[fd00::2]", "[fd00::2]:8265", "head:8265", "10.0.0.1:8265"])
def test_the_job_server_of_an_address(written: str) -> None:
    bare = written.count(":") > 1 and not written.startswith("[")
    assert Server(written).address == f"http://{f'[{written}]' if bare else written}"


@pytest.mark.parametrize("name", ["/nonexistent", "/proc", "/tmp/" + "x" * 90])
def test_a_folder_that_ray_cannot_use_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.connect.running_here", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", name)
    with pytest.raises(ClusterError, match=f"RAY_TMPDIR={name}.*: set RAY_TMPDIR to a folder that can be written"):
        connect()


def test_a_cloud_cluster_that_is_up_is_not_started_over(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setattr(launch, "make_token", lambda: None)
    node = launch.LivingNode(ip="10.0.0.1", head=True, resources={}, type="")
    running = launch.Status(name="trireme-aws", reachable=True, alive=[node, node])
    monkeypatch.setattr(launch, "status_of", lambda data, file: running)
    monkeypatch.setattr(
        launch, "_run_logged", lambda *_, **__: pytest.fail("`ray up` restarts the head and ends its jobs")
    )
    with pytest.raises(ClusterError, match=r"trireme-aws is up already, with 2 nodes: .*cluster down"):
        launch.up("aws", lambda _: None)


@pytest.mark.parametrize(
    ("host", "facts", "said"),
    [
        (1, {"busy_ports": [6379]}, []),  # ports count on the head only
        (0, {"busy_ports": [6379]}, ["port 6379 of 10.0.0.0 is taken, and Ray's head"]),
        (1, {"problem": "10.0.0.1 does not answer"}, ["10.0.0.1 does not answer"]),
        (1, {"python": "3.12.0"}, ["10.0.0.1 has Python 3.12.0 and Ray 2.60.0, and 10.0.0.0 has Python 3.11.7"]),
        (1, {"ray": "2.59.0"}, ["10.0.0.1 has Python 3.11.7 and Ray 2.59.0, and"]),
        (1, {"ray": ""}, ["10.0.0.1 has no Ray"]),
        (1, {"rsync": False}, ["10.0.0.1 has no rsync"]),
        (1, {"ray_running": True}, ["Ray is running on 10.0.0.1 already"]),
    ],
)
def test_what_is_wrong_with_a_machine_is_named(host: int, facts: dict[str, Any], said: list[str]) -> None:
    sound: dict[str, Any] = {"python": "3.11.7", "ray": "2.60.0"}
    hosts = [HostFacts(host=f"10.0.0.{n}", **sound | (facts if n == host else {})) for n in range(2)]
    found = start_problems(hosts)
    assert len(found) == len(said) and all(map(str.startswith, found, said))


def test_an_answer_is_read_and_noise_around_it_is_not() -> None:
    answer = {"python": "3.11.7", "ray": "2.60.0", "busy_ports": [8265], "rsync": True, "ray_running": True}
    printed = f"Welcome!\nTRIREME{json.dumps(answer)}\nbye\n"
    facts = read_probe(CommandResult(host="h", exit_code=0, stdout=printed))
    assert facts == HostFacts(host="h", python="3.11.7", ray="2.60.0", busy_ports=[8265], ray_running=True)
    no_python = CommandResult(host="h", exit_code=127, stderr="bash: python: command not found")
    assert "no usable `python`" in read_probe(no_python).problem
    assert read_probe(CommandResult(host="h", exit_code=255, problem="it is off")).problem == "it is off"
    refused = ssh_problem("h", SshLogin("ubuntu", "/k"), "Warning: x\nubuntu@h: Permission denied (publickey).\n")
    assert refused.startswith("SSH to ubuntu@h fails (Warning: x / ubuntu@h: Permission denied (publickey).): check")


STATUS = """Node status
---------------------------------------------------------------
Active:
 1 head
Pending:
 a100, 2 launching
 10.0.0.4: a100, waiting-for-ssh
Recent failures:
 a100: NodeTerminated (ip: 10.0.0.5)
 a100-spot: InsufficientInstanceCapacity (latest_attempt: 14:02:11) - no p4d.24xlarge in us-east-1a

Resources
---------------------------------------------------------------
"""


def test_the_state_of_a_cluster_in_words() -> None:
    worker = {"CPU": 96.0, "GPU": 8.0, "memory": "20.670 GiB"}, {"ray.io/node-group": "a100"}
    rows = [
        {"node_ip": "10.0.0.1", "state": "ALIVE", "is_head_node": True, "resources_total": {"CPU": 4.0}},
        {"node_ip": "10.0.0.2", "state": "ALIVE", "resources_total": worker[0], "labels": worker[1]},
        {"node_ip": "10.0.0.3", "state": "DEAD", "resources_total": {"GPU": 8.0}},
    ]
    answer = CommandResult(host="h", exit_code=0, stdout=f"Welcome!\n{json.dumps(rows)}\n{STATUS}")
    status = launch.read_status("c", answer, read_cluster("aws"))
    assert [node["ip"] for node in status.alive] == ["10.0.0.1", "10.0.0.2"]
    assert status.starting == ["a100, 2 launching", "10.0.0.4: a100, waiting-for-ssh"]
    assert [text.split(":")[0] for text in status.failed] == ["a100", "a100-spot"]
    assert status.dollars_per_hour == pytest.approx(0.2016 + 21.957642) and status.unpriced == 0
    assert any("$22.16 an hour" in line for line in status.lines())
    assert launch.autoscaler_report("Pending:\n (no pending nodes)\n").starting == ()
    refusal = CommandResult(host="h", exit_code=1, stderr="AuthenticationError: 401")
    silent = launch.read_status("c", refusal, read_cluster("aws"))
    assert not silent.reachable
    assert silent.lines() == ["c is not up: Ray does not answer on its head (AuthenticationError: 401)"]


def test_a_heads_token_is_used_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "ray").write_text("#!/bin/sh\necho mode=$RAY_AUTH_MODE")
    (tmp_path / "ray").chmod(0o755)

    def mode(**more: str) -> str:
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), **more}
        return subprocess.check_output(
            launch.STATUS_COMMANDS.format(dashboard=1, gcs=2), shell=True, env=env, text=True
        )

    assert mode() == "mode=\nmode=\n"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    assert mode() == "mode=token\nmode=token\n" and mode(RAY_AUTH_MODE="disabled") == "mode=disabled\n" * 2


MAKES = "import time; from cluster.temporary import TemporaryFolder as T; print(T().path, flush=True); time.sleep(600)"


def test_what_a_killed_command_has_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    other = subprocess.Popen([sys.executable, "-c", MAKES], cwd=ROOT, stdout=subprocess.PIPE, text=True)
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
