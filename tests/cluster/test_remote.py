"""What is said of machines before Ray is started on them, of SSH's refusals, and of a cluster's state."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.files import read_cluster
from cluster.launch import ASK, read_status
from cluster.pending import autoscaler_report
from cluster.remote import HostFacts, Result, SshLogin, explain, read_probe, unfit


def hosts(changed: int, **facts: Any) -> list[HostFacts]:
    sound = [HostFacts(f"10.0.0.{n}", python="3.11.7", ray="2.60.0") for n in range(3)]
    return [replace(host, **facts) if n == changed else host for n, host in enumerate(sound)]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (hosts(1), []),
        (hosts(1, busy_ports=[6379]), []),  # ports count on the head only
        (hosts(0, busy_ports=[6379]), ["port 6379 of 10.0.0.0 is taken, and Ray's head"]),
        (hosts(1, problem="10.0.0.1 does not answer"), ["10.0.0.1 does not answer"]),
        (hosts(1, python="3.12.0"), ["10.0.0.1 has Python 3.12.0 and Ray 2.60.0, and 10.0.0.0 has Python 3.11.7"]),
        (hosts(1, ray="2.59.0"), ["10.0.0.1 has Python 3.11.7 and Ray 2.59.0, and"]),
        (hosts(1, ray=""), ["10.0.0.1 has no Ray"]),
        (hosts(1, rsync=False), ["10.0.0.1 has no rsync"]),
        (hosts(1, ray_running=True), ["Ray is running on 10.0.0.1 already"]),
    ],
)
def test_what_is_wrong_with_a_machine_is_named(facts: list[HostFacts], said: list[str]) -> None:
    assert len(unfit(facts)) == len(said) and all(map(str.startswith, unfit(facts), said))


def test_an_answer_is_read_and_noise_around_it_is_not() -> None:
    answer = {"python": "3.11.7", "ray": "2.60.0", "busy_ports": [8265], "rsync": True, "ray_running": True}
    facts = read_probe(Result("h", 0, f"Welcome!\nTRIREME{json.dumps(answer)}\nbye\n", ""))
    assert facts == HostFacts("h", python="3.11.7", ray="2.60.0", busy_ports=[8265], ray_running=True)
    assert "no usable `python`" in read_probe(Result("h", 127, "", "bash: python: command not found")).problem
    assert read_probe(Result("h", 255, "", "", "it is off")).problem == "it is off"
    refused = explain("h", SshLogin("ubuntu", "/k"), "Warning: x\nubuntu@h: Permission denied (publickey).\n")
    assert refused.startswith("SSH to ubuntu@h fails (Warning: x / ubuntu@h: Permission denied (publickey).): check")


STATUS = """======== Autoscaler status: 2026-11-23 02:32:57.759385 ========
Node status
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
Total Usage:
 0.0/1.0 CPU
"""


def test_the_state_of_a_cluster_in_words() -> None:
    worker = {"CPU": 96.0, "GPU": 8.0, "memory": "20.670 GiB"}, {"ray.io/node-group": "a100"}
    rows = [
        {"node_ip": "10.0.0.1", "state": "ALIVE", "is_head_node": True, "resources_total": {"CPU": 4.0}},
        {"node_ip": "10.0.0.2", "state": "ALIVE", "resources_total": worker[0], "labels": worker[1]},
        {"node_ip": "10.0.0.3", "state": "DEAD", "resources_total": {"GPU": 8.0}},
    ]
    status = read_status("c", Result("h", 0, f"Welcome!\n{json.dumps(rows)}\n{STATUS}", ""), read_cluster("aws"))
    assert [node["ip"] for node in status.alive] == ["10.0.0.1", "10.0.0.2"]
    assert status.starting == ["a100, 2 launching", "10.0.0.4: a100, waiting-for-ssh"]
    assert [text.split(":")[0] for text in status.failed] == ["a100", "a100-spot"]
    assert status.dollars_per_hour == pytest.approx(0.2016 + 21.957642) and status.unpriced == 0
    assert any("$22.16 an hour" in line for line in status.lines())
    quiet = STATUS.replace(" a100, 2 launching\n 10.0.0.4: a100, waiting-for-ssh", " (no pending nodes)")
    assert autoscaler_report(quiet).starting == ()
    silent = read_status("c", Result("h", 1, "", "AuthenticationError: 401"), read_cluster("aws"))
    assert not silent.reachable
    assert silent.lines() == ["c is not up: Ray does not answer on its head (AuthenticationError: 401)"]


def test_a_heads_token_is_used_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "ray").write_text("#!/bin/sh\necho mode=$RAY_AUTH_MODE")
    (tmp_path / "ray").chmod(0o755)

    def mode(**more: str) -> str:
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), **more}
        return subprocess.check_output(ASK.format(dashboard=1, gcs=2), shell=True, env=env, text=True)

    assert mode() == "mode=\nmode=\n"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    assert mode() == "mode=token\nmode=token\n" and mode(RAY_AUTH_MODE="disabled") == "mode=disabled\n" * 2
