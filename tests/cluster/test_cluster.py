"""Clusters: their shape, how one is reached and started, and what is said about one.

Also what is checked on machines before Ray starts there, and the folder of a command's own Ray.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
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
from tests.running import ROOT, Ended, environment, trireme, wait_until

# --- shapes ---------------------------------------------------------------------------------------


def test_the_shape_of_a_number_of_gpus() -> None:
    shape = shape_of_gpus(512, "H100", 8, "400Gb")
    (node,) = shape.workers
    assert node.gpus == 8
    assert node.max_nodes == 64
    assert node.link_across == 50e9
    assert shape.max_gpus == 512
    assert shape_of_gpus(4, "A100-80GB", 8).max_gpus == 4


@pytest.mark.parametrize(("gpus", "link_across"), [(12, None), (8, "fast")])
def test_a_number_of_gpus_without_a_shape_is_refused(gpus: int, link_across: str | None) -> None:
    with pytest.raises(ClusterError):
        shape_of_gpus(gpus, "H100", 8, link_across)


@pytest.mark.parametrize("speed", ["400Gb", "400 Gb/s", "400Gbps", "50GB/s", "50 GB"])
def test_the_speed_of_a_link_may_be_written_in_bits_or_bytes(speed: str) -> None:
    assert parse_link_speed(speed) == 50e9


def test_a_link_may_have_no_speed() -> None:
    assert parse_link_speed(None) is None


def test_the_shape_of_living_nodes() -> None:
    head_resources = {
        "CPU": 4,
        "node:__internal_head__": 1,
        "memory": 8e9,
        "object_store_memory": 2e9,
    }
    worker_resources = {"CPU": 64, "GPU": 8, "accelerator_type:H100": 1}
    head = NodeState(address="a", kind="", total=head_resources, available={})
    worker = NodeState(address="b", kind="big", total=worker_resources, available={})
    shape = shape_of_nodes([head, worker, worker])
    assert shape.head.memory_bytes == 10**10
    (kind,) = shape.workers
    assert (kind.name, kind.gpus, kind.min_nodes, kind.max_nodes) == ("big", 8, 2, 2)
    assert kind.gpu == "h100-80gb"
    assert kind.link_within
    with pytest.raises(ClusterError, match="no head"):
        shape_of_nodes([worker])


# --- reaching a cluster ---------------------------------------------------------------------------


def test_the_cluster_of_another_user_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert running_here() == address
        command_line = ["/opt/raylet", f"--gcs-address={address}"]
        raylet = Mock(info={"cmdline": command_line, "uids": Mock(real=os.getuid())})
        monkeypatch.setattr("psutil.process_iter", lambda _: [raylet])
        connect_module._check_reachable(address)
        monkeypatch.setattr("cluster.connect.os.getuid", lambda: os.geteuid() + 1)
        with pytest.raises(ClusterError, match="started by another user"):
            connect_module._check_reachable(address)
        assert running_here() is None


NO_ANSWER = "no Ray cluster answers at"
DID_NOT_START = r"Ray did not start on this machine: it timed out \(5 tries\)"


@pytest.mark.parametrize(
    ("address", "kind", "sentence", "retries"),
    [
        ("127.0.0.1:9", ClusterUnavailable, rf"{NO_ANSWER} 127.0.0.1:9 .*\(3 tries\)", 2),
        ("[::1]:9", ClusterUnavailable, rf"{NO_ANSWER} \[::1\]:9 ", 2),
        ("ray://127.0.0.1:9", ClusterUnavailable, f"{NO_ANSWER} ray://127.0.0.1:9", 2),
        ("", ClusterUnavailable, DID_NOT_START, 4),
        ("local", ClusterUnavailable, DID_NOT_START, 4),
        (
            "http://127.0.0.1:8265",
            ClusterError,
            "is a job server: `trireme submit` sends jobs there",
            0,
        ),
        (
            "auto",
            ClusterError,
            "RAY_ADDRESS=auto, but no Ray cluster of this user runs on this machine",
            0,
        ),
        (
            "nobody.invalid:6379",
            ClusterError,
            "RAY_ADDRESS=nobody.invalid:6379: no machine is called nobody.invalid",
            0,
        ),
        (
            "::1:6379",
            ClusterError,
            r"an IPv6 address without brackets: write \[::1\]:6379",
            0,
        ),
        ("fd00::2:6379", ClusterError, r"write \[fd00::2\]:6379", 0),
    ],
)
def test_an_address_without_a_cluster_is_refused_or_tried_again(
    address: str,
    kind: type[Exception],
    sentence: str,
    retries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is wrong is said at once (exit code 2); what may still come is tried again (1)."""
    # Ray raises no more precise exception.
    monkeypatch.setattr("ray.init", Mock(side_effect=Exception("it timed out")))
    monkeypatch.setattr("cluster.connect.running_here", lambda: None)
    monkeypatch.setattr("cluster.connect._runs_here", lambda: False)
    monkeypatch.setattr("cluster.connect.PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("RAY_ADDRESS", address)
    notes: list[str] = []
    with pytest.raises(kind, match=sentence):
        connect(say=notes.append)
    assert len(notes) == retries, notes


@pytest.mark.parametrize(
    ("raised", "kind", "sentence"),
    [
        (
            ConnectionError("Failed to connect to GCS within 60 s"),
            ClusterUnavailable,
            "does not answer, though",
        ),
        (
            RuntimeError("The token is invalid"),
            ClusterError,
            "its token is missing here, wrong or expired",
        ),
        (
            RuntimeError("Version mismatch: the cluster was started with Ray 2.9"),
            ClusterError,
            "another version than",
        ),
        (
            RuntimeError("Can't find a node with IP address 10.0.0.9"),
            ClusterError,
            "this machine is not a node of",
        ),
    ],
)
def test_the_reason_why_a_cluster_does_not_take_this_process_is_said(
    raised: Exception, kind: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.init", Mock(side_effect=raised))
    monkeypatch.setattr("cluster.connect.PAUSE_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(kind, match=sentence):
            connect()


@pytest.mark.parametrize(
    ("address", "host_and_port"),
    [
        ("127.0.0.1:6379", ("127.0.0.1", 6379)),
        ("head:6379", ("head", 6379)),
        ("[::1]:6379", ("::1", 6379)),
        ("[fd00::2]:6379", ("fd00::2", 6379)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_addresses_are_split_and_joined(address: str, host_and_port: tuple[str, int]) -> None:
    assert split_address(address) == host_and_port
    host, port = host_and_port
    assert join_address(host, port) == address


@pytest.mark.parametrize("address", ["auto", "head"])
def test_an_address_without_a_port_is_not_split(address: str) -> None:
    assert split_address(address) is None


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("::1", "http://[::1]"),
        ("fd00::2", "http://[fd00::2]"),
        ("[fd00::2]", "http://[fd00::2]"),
        ("[fd00::2]:8265", "http://[fd00::2]:8265"),
        ("head:8265", "http://head:8265"),
        ("10.0.0.1:8265", "http://10.0.0.1:8265"),
    ],
)
def test_the_url_of_a_job_server(address: str, url: str) -> None:
    assert Server(address).address == url


@pytest.mark.parametrize("folder", ["/nonexistent", "/proc", "/tmp/" + "x" * 90])
def test_a_folder_that_ray_cannot_use_is_refused(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.connect.running_here", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", folder)
    sentence = f"RAY_TMPDIR={folder}.*: set RAY_TMPDIR to a folder that can be written"
    with pytest.raises(ClusterError, match=sentence):
        connect()


# --- starting a cluster ---------------------------------------------------------------------------


@pytest.fixture
def starts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`connect` starts Ray here, and tries so once."""
    monkeypatch.setattr("cluster.connect.running_here", lambda: None)
    monkeypatch.setattr("cluster.connect.START_TRIES", 1)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_start_of_ray_that_is_interrupted_or_fails_leaves_nothing(
    error: type[BaseException], starts_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither Ray's folder, nor the raylet, nor an agent that it has started already."""
    folders: list[Path] = []
    processes: list[psutil.Process] = []

    def start_and_raise(*_: Any, _temp_dir: str, **options: Any) -> None:
        folders.append(Path(_temp_dir))
        # As Ray does it, which has `detached` give the raylet a session of its own.
        raylet = psutil.Popen(["sh", "-c", RAYLET, _temp_dir], preexec_fn=lambda: None)
        (agent,) = wait_until(raylet.children)
        processes.extend([raylet, agent])
        raise error("in the middle of the start")

    monkeypatch.setattr("ray.init", start_and_raise)
    with pytest.raises((error, ClusterUnavailable)):
        connect()
    _, alive = psutil.wait_procs(processes, timeout=10)
    for process in alive:
        process.kill()
    assert not alive
    assert len(processes) == 2
    assert not folders[0].parent.exists()


RAYLET = """
exec > "$0/raylet.out"
sh -c "sleep 600; : $0" &
wait
"""
"""A shell's command that starts another process, both with Ray's folder among their arguments."""


def test_sigterm_ends_a_start_of_ray_as_this_command_wants(
    starts_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as Ray's own handlers do, which exit without a sentence."""

    class Asked(BaseException):
        """What this program's handler raises."""

    def handler(number: int, frame: Any) -> None:
        raise Asked

    def start(*_: Any, **options: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.raise_signal(signal.SIGTERM)

    handler_before = signal.signal(signal.SIGTERM, handler)
    usr1_before = signal.getsignal(signal.SIGUSR1)
    function_before = signal.signal
    monkeypatch.setattr("ray.init", start)
    try:
        with pytest.raises(Asked):
            connect()
        assert signal.signal is function_before
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, "others may be set"
    finally:
        signal.signal(signal.SIGTERM, handler_before)
        signal.signal(signal.SIGUSR1, usr1_before)


@pytest.mark.slow
def test_up_and_down_start_and_end_only_their_own_ray_on_this_machine(tmp_path: Path) -> None:
    port = free_port()
    dashboard_port = free_port()
    ray_folder = f"/tmp/ray-{port}"  # short, since paths of sockets may have 107 characters
    text = (FOLDER / "laptop.yaml").read_text()
    text = text.replace("--port=6379", f"--port={port} --num-cpus=1 --temp-dir={ray_folder}")
    text = text.replace("--dashboard-port=8265", f"--dashboard-port={dashboard_port}")
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    env = environment(RAY_AUTH_MODE="disabled", HOME=str(tmp_path))

    def cluster(command: str) -> Ended:
        return trireme("cluster", command, str(file), env=env)

    down_before_up = cluster("down").expect(2)
    assert "is not up" in down_before_up.err
    try:
        up = cluster("up").expect(0)
        assert "1 node up" in up.out
        second_up = cluster("up").expect(2)
        assert "running on this machine already" in second_up.err
    finally:
        down = cluster("down")
        shutil.rmtree(ray_folder, ignore_errors=True)
    down.expect(0)
    assert not is_open("127.0.0.1", port)
    status = cluster("status").expect(1)
    assert "is not up" in status.out


def test_a_cloud_cluster_that_is_up_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    def ray_up(*args: Any, **kwargs: Any) -> None:
        pytest.fail("`ray up` would restart the head and end its jobs")

    monkeypatch.setattr(launch, "make_token", lambda: None)
    node = launch.LivingNode(ip="10.0.0.1", head=True, resources={}, type="")
    status = launch.Status(name="trireme-aws", reachable=True, alive=[node, node])
    monkeypatch.setattr(launch, "status_of", lambda data, file: status)
    monkeypatch.setattr(launch, "_run_logged", ray_up)
    sentence = r"trireme-aws is up already, with 2 nodes: .*cluster down"
    with pytest.raises(ClusterError, match=sentence):
        launch.up("aws", lambda _: None)


# --- machines before Ray starts -------------------------------------------------------------------


HEAD_VERSIONS = "and 10.0.0.0 has Python 3.11.7"


@pytest.mark.parametrize(
    ("host", "changes", "sentences"),
    [
        (1, {"busy_ports": [6379]}, []),  # ports count only on the head
        (0, {"busy_ports": [6379]}, ["port 6379 of 10.0.0.0 is taken, and Ray's head"]),
        (1, {"problem": "10.0.0.1 does not answer"}, ["10.0.0.1 does not answer"]),
        (
            1,
            {"python": "3.12.0"},
            [f"10.0.0.1 has Python 3.12.0 and Ray 2.60.0, {HEAD_VERSIONS}"],
        ),
        (1, {"ray": "2.59.0"}, ["10.0.0.1 has Python 3.11.7 and Ray 2.59.0, and"]),
        (1, {"ray": ""}, ["10.0.0.1 has no Ray"]),
        (1, {"rsync": False}, ["10.0.0.1 has no rsync"]),
        (1, {"ray_running": True}, ["Ray is running on 10.0.0.1 already"]),
    ],
)
def test_a_machine_that_is_not_fit_is_named(
    host: int, changes: dict[str, Any], sentences: list[str]
) -> None:
    hosts = []
    for number in range(2):
        facts: dict[str, Any] = {"python": "3.11.7", "ray": "2.60.0"}
        if number == host:
            facts |= changes
        hosts.append(HostFacts(host=f"10.0.0.{number}", **facts))
    problems = start_problems(hosts)
    assert len(problems) == len(sentences)
    for problem, sentence in zip(problems, sentences):
        assert problem.startswith(sentence)


def test_the_answer_of_a_probe_is_found_among_other_output() -> None:
    answer = {
        "python": "3.11.7",
        "ray": "2.60.0",
        "busy_ports": [8265],
        "rsync": True,
        "ray_running": True,
    }
    output = f"Welcome!\nTRIREME{json.dumps(answer)}\nbye\n"
    facts = read_probe(CommandResult(host="h", exit_code=0, stdout=output))
    assert facts == HostFacts(
        host="h", python="3.11.7", ray="2.60.0", busy_ports=[8265], ray_running=True
    )


def test_a_probe_that_fails_is_a_problem() -> None:
    error = "bash: python: command not found"
    no_python = CommandResult(host="h", exit_code=127, stderr=error)
    assert "no usable `python`" in read_probe(no_python).problem
    unreachable = CommandResult(host="h", exit_code=255, problem="it is off")
    assert read_probe(unreachable).problem == "it is off"


def test_what_ssh_prints_is_a_part_of_its_problem() -> None:
    output = "Warning: x\nubuntu@h: Permission denied (publickey).\n"
    problem = ssh_problem("h", SshLogin("ubuntu", "/k"), output)
    printed = "Warning: x / ubuntu@h: Permission denied (publickey)."
    assert problem.startswith(f"SSH to ubuntu@h fails ({printed}): check")


# --- the state of a cluster -----------------------------------------------------------------------


AUTOSCALER_STATUS = """Node status
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


def test_the_state_of_a_cluster_has_its_nodes_failures_and_price() -> None:
    rows: list[dict[str, Any]] = [
        {
            "node_ip": "10.0.0.1",
            "state": "ALIVE",
            "is_head_node": True,
            "resources_total": {"CPU": 4.0},
        },
        {
            "node_ip": "10.0.0.2",
            "state": "ALIVE",
            "resources_total": {"CPU": 96.0, "GPU": 8.0, "memory": "20.670 GiB"},
            "labels": {"ray.io/node-group": "a100"},
        },
        {"node_ip": "10.0.0.3", "state": "DEAD", "resources_total": {"GPU": 8.0}},
    ]
    output = f"Welcome!\n{json.dumps(rows)}\n{AUTOSCALER_STATUS}"
    answer = CommandResult(host="h", exit_code=0, stdout=output)
    status = launch.read_status("c", answer, read_cluster("aws"))
    assert [node["ip"] for node in status.alive] == ["10.0.0.1", "10.0.0.2"]
    assert status.starting == ["a100, 2 launching", "10.0.0.4: a100, waiting-for-ssh"]
    assert [failure.split(":")[0] for failure in status.failed] == ["a100", "a100-spot"]
    head_price = 0.2016
    worker_price = 21.957642
    assert status.dollars_per_hour == pytest.approx(head_price + worker_price)
    assert status.unpriced == 0
    assert any("$22.16 an hour" in line for line in status.lines())


def test_an_autoscaler_without_pending_nodes_starts_none() -> None:
    assert launch.autoscaler_report("Pending:\n (no pending nodes)\n").starting == ()


def test_a_cluster_whose_head_does_not_answer_is_not_up() -> None:
    answer = CommandResult(host="h", exit_code=1, stderr="AuthenticationError: 401")
    status = launch.read_status("c", answer, read_cluster("aws"))
    assert not status.reachable
    assert status.lines() == [
        "c is not up: Ray does not answer on its head (AuthenticationError: 401)"
    ]


def test_a_heads_token_is_used_if_it_has_one(tmp_path: Path) -> None:
    ray_stub = tmp_path / "ray"
    ray_stub.write_text("#!/bin/sh\necho mode=$RAY_AUTH_MODE")
    ray_stub.chmod(0o755)

    def modes(**more: str) -> list[str]:
        """The mode of each of the two commands."""
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), **more}
        commands = launch.STATUS_COMMANDS.format(dashboard=1, gcs=2)
        return subprocess.check_output(commands, shell=True, env=env, text=True).splitlines()

    assert modes() == ["mode=", "mode="]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    assert modes() == ["mode=token", "mode=token"]
    assert modes(RAY_AUTH_MODE="disabled") == ["mode=disabled", "mode=disabled"]


# --- the folder of a command's own Ray ------------------------------------------------------------


MAKES_A_FOLDER = """
import time
from cluster.temporary import TemporaryFolder
print(TemporaryFolder().path, flush=True)
time.sleep(600)
"""


def test_the_folders_of_killed_commands_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    other_command = subprocess.Popen(
        [sys.executable, "-c", MAKES_A_FOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert other_command.stdout is not None
    other_folder = Path(other_command.stdout.readline().strip())
    (other_folder / "session").mkdir()
    folder = TemporaryFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700, "other users may look into it"
    sweep()
    assert other_folder.is_dir()
    assert folder.path.is_dir()
    other_command.kill()
    other_command.wait()
    # The last process of a Ray may make its folder again.
    (tmp_path / "tr-ray-again" / "session").mkdir(parents=True)
    sweep()
    assert not other_folder.exists()
    assert folder.path.is_dir()
    folder.remove()
    assert list(tmp_path.iterdir()) == []
