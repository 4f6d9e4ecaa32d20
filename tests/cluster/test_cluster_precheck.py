"""What is said of machines before Ray is started on them, of SSH's refusals, and of a cluster's state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.precheck import HostFacts, judge, read
from cluster.remote import Answer, Login, refusal
from cluster.shape import read_cluster
from cluster.status import read_status

GOOD = {"ray": "2.60.0", "torch": "2.13.0", "mlflow": "3.17.2", "numpy": "2.3", "trireme": "0.1.0"}


def hosts(**second: Any) -> list[HostFacts]:
    facts = [
        HostFacts(f"10.0.0.{n}", python="3.11.7", packages=GOOD, resolves_to=f"10.0.0.{n}", disk_free=10**11)
        for n in range(3)
    ]
    facts[1] = replace(facts[1], **second)
    return facts


def test_nothing_is_said_of_good_machines() -> None:
    assert judge(hosts()) == []
    alone = replace(hosts()[0], resolves_to="127.0.1.1")
    assert judge([alone]) == [], "a machine without peers needs no name"


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"problem": "10.0.0.1 does not answer"}, "10.0.0.1 does not answer"),
        ({"python": "3.12.0"}, "10.0.0.1 has Python 3.12.0, and 10.0.0.0 has 3.11.7"),
        ({"packages": GOOD | {"ray": "2.59.0"}}, "10.0.0.1 has ray 2.59.0, and 10.0.0.0 has 2.60.0"),
        ({"packages": GOOD | {"torch": None}}, "10.0.0.1 has no torch"),
        ({"skew": -90.0}, "10.0.0.1 has the clock 90 s behind"),
        ({"resolves_to": "127.0.1.1"}, "the host name of 10.0.0.1 resolves to 127.0.1.1"),
        ({"resolves_to": None}, "the host name of 10.0.0.1 does not resolve"),
        ({"disk_free": 10**9}, "10.0.0.1 has 1.0 GB free"),
        ({"rsync": False}, "10.0.0.1 has no rsync"),
        ({"storage_problem": "Read-only file system"}, "10.0.0.1 cannot write to the shared storage: Read-only"),
    ],
)
def test_what_is_wrong_with_a_machine_is_named(second: dict[str, Any], said: str) -> None:
    (sentence,) = judge(hosts(**second))
    assert said in sentence


def test_a_taken_port_counts_on_the_head_only() -> None:
    head = replace(hosts()[0], busy_ports=(6379,))
    assert judge(hosts(busy_ports=(6379,))) == []
    (sentence,) = judge([head, *hosts()[1:]])
    assert "port 6379 of 10.0.0.0 is taken" in sentence and "Ray's head" in sentence


def test_an_answer_is_read_and_noise_around_it_is_not() -> None:
    text = (
        'Welcome!\nTRIREME{"time": 100.0, "python": "3.11.7", "packages": {}, "resolves_to": null, '
        '"busy_ports": [8265], "disk_free": 5, "rsync": true, "ray_running": true, "storage_problem": null}\nbye\n'
    )
    facts = read(Answer("h", 0, text, ""), 90.0, 95.0)
    assert facts.skew == 5.0 and facts.busy_ports == (8265,) and facts.ray_running
    assert read(Answer("h", 0, text, ""), 99.0, 101.0).skew == 0.0, "within the time the answer took"
    assert "no usable `python`" in read(Answer("h", 127, "", "bash: python: command not found"), 0, 1).problem
    assert read(Answer("h", 255, "", "", "it is off"), 0, 1).problem == "it is off"


@pytest.mark.parametrize(
    ("err", "said"),
    [
        ("ubuntu@h: Permission denied (publickey).", "does not let ubuntu in"),
        ("ssh: connect to host h port 22: Connection refused", "refuses SSH connections"),
        ("ssh: connect to host h port 22: Connection timed out", "does not answer"),
        ("ssh: connect to host h port 22: No route to host", "no way to h"),
        ("ssh: Could not resolve hostname h: Name or service not known", "nobody knows the name h"),
        ("Host key verification failed.", "ssh-keygen -R h"),
        ("Warning: Identity file /k not accessible: No such file or directory.", "the key /k is not there"),
        ("something new", "SSH to h fails: something new"),
    ],
)
def test_why_ssh_did_not_get_there(err: str, said: str) -> None:
    assert said in refusal("h", Login("ubuntu", "/k"), err)


def test_the_state_of_a_cluster_in_words() -> None:
    rows = [
        {"node_ip": "10.0.0.1", "state": "ALIVE", "is_head_node": True, "resources_total": {"CPU": 4.0}},
        {
            "node_ip": "10.0.0.2",
            "state": "ALIVE",
            "resources_total": {"CPU": 96.0, "GPU": 8.0},
            "labels": {"ray.io/node-group": "a100"},
        },
        {"node_ip": "10.0.0.3", "state": "DEAD", "resources_total": {"GPU": 8.0}},
    ]
    refusal_ = {"category": "InsufficientInstanceCapacity", "description": "no p4d.24xlarge in us-east-1a"}
    report = {
        "pending_nodes": [["10.0.0.4", "a100", "waiting-for-ssh"]],
        "pending_launches": {"a100": 2},
        "failed_nodes": [["10.0.0.5", "a100"]],
        "node_availability_summary": {"node_availabilities": {"a100-spot": {"unavailable_node_information": refusal_}}},
    }
    answer = {
        "nodes": {"data": {"result": {"result": rows}}},
        "autoscaler": {"data": {"clusterStatus": {"autoscalerReport": report}}},
    }
    status = read_status("c", answer, read_cluster("aws"))
    assert [node["ip"] for node in status.alive] == ["10.0.0.1", "10.0.0.2"]
    assert status.starting == ["a100 10.0.0.4: waiting-for-ssh", "2 × a100: asked for"]
    assert any("10.0.0.5" in text for text in status.failed)
    assert any("InsufficientInstanceCapacity: no p4d" in text for text in status.failed)
    assert status.dollars_per_hour == pytest.approx(0.2016 + 21.957642) and status.unpriced == 0
    assert any("$22.16 an hour" in line for line in status.lines())
    down = read_status("c", {"nodes": {"error": "URLError: refused"}}, None)
    assert not down.reachable and "is not up" in down.lines()[0]
