"""Ray's internals, with and without the names that we use; and whether Ray still answers."""

from unittest.mock import Mock

import psutil
import pytest
import ray

from cluster import ray_internals, watch
from tests.running import wait_until

NAMES = (
    "ray._private.state.available_resources_per_node",
    "ray._private.state.state",
    "ray._private.services.get_node",
    "ray._private.worker._global_node",
)
NODES = [
    {"NodeID": "a", "Alive": True, "Resources": {"GPU": 4.0, "CPU": 8.0}},
    {"NodeID": "b", "Alive": True, "Resources": {"GPU": 2.0, "CPU": 8.0}},
    {"NodeID": "c", "Alive": False, "Resources": {"GPU": 8.0}},
]
PLACEMENT_GROUPS = {
    "1": {
        "state": "CREATED",
        "bundles": {0: {"GPU": 3.0}, 1: {"GPU": 1.0}},
        "bundles_to_node_id": {0: "a", 1: "b"},
    },
    "2": {"state": "PENDING", "bundles": {0: {"GPU": 1.0}}, "bundles_to_node_id": {}},
    "3": {"state": "CREATED", "bundles": {0: {"GPU": 8.0}}, "bundles_to_node_id": {0: "c"}},
}


# --- names ----------------------------------------------------------------------------------------


def test_ray_itself_has_the_names_and_they_mean_what_we_think(connected: None) -> None:
    (node,) = ray.nodes()
    node_id = node["NodeID"]
    available_before = ray_internals.available_resources_per_node()
    assert available_before.keys() == {node_id}
    bundle_bytes = 2**20
    group = ray.util.placement_group([{"memory": bundle_bytes}])
    assert group.wait(30)
    expected = available_before[node_id]["memory"] - bundle_bytes

    def available_memory() -> float:
        return ray_internals.available_resources_per_node()[node_id]["memory"]

    wait_until(lambda: available_memory() == expected)
    assert ray_internals.draining_nodes() == {}
    row = ray.util.placement_group_table()[group.id.hex()]
    assert row["bundles_to_node_id"] == {0: node_id}
    ray.util.remove_placement_group(group)
    worker = ray.remote(lambda: ray_internals.raylet_pid())
    assert psutil.Process(ray.get(worker.remote())).name() == "raylet"


def test_each_entry_has_an_answer_if_ray_has_none_of_the_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NAMES:
        monkeypatch.delattr(name)
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    assert ray_internals.raylet_pid() == 0
    monkeypatch.setattr(ray.util, "placement_group_table", lambda: PLACEMENT_GROUPS)
    expected = {"a": {"GPU": 1.0, "CPU": 8.0}, "b": {"GPU": 1.0, "CPU": 8.0}}
    assert ray_internals.available_resources_per_node() == expected
    assert ray_internals.draining_nodes() == {}
    with ray_internals.patience():
        assert not hasattr(ray._private.services, "get_node")
    ray_internals.kill_at_shutdown()


# --- starting and ending a Ray --------------------------------------------------------------------


def test_a_node_is_waited_for_while_its_raylet_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [RuntimeError("no such node")] * 3
    get_node = Mock(side_effect=[*failures, {"node_id": "a"}])
    monkeypatch.setattr("ray._private.services.get_node", get_node)
    monkeypatch.setattr(ray_internals, "_raylet_lives", lambda: True)
    with ray_internals.patience():
        assert ray._private.services.get_node("address", "a") == {"node_id": "a"}
    assert get_node.call_count == 4
    assert ray._private.services.get_node is get_node, "it is not restored"


def test_a_node_whose_raylet_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    get_node = Mock(side_effect=RuntimeError("no such node"))
    monkeypatch.setattr("ray._private.services.get_node", get_node)
    monkeypatch.setattr(ray_internals, "_raylet_lives", lambda: False)
    with ray_internals.patience(), pytest.raises(RuntimeError, match="no such node"):
        ray._private.services.get_node("address", "a")
    assert get_node.call_count == 1


def test_a_node_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    get_node = Mock(side_effect=RuntimeError("no such node"))
    monkeypatch.setattr("ray._private.services.get_node", get_node)
    monkeypatch.setattr(ray_internals, "_raylet_lives", lambda: True)
    monkeypatch.setattr(ray_internals, "START_SECONDS", 0.3)
    with ray_internals.patience(), pytest.raises(RuntimeError, match="no such node"):
        ray._private.services.get_node("address", "a")


def test_the_ray_of_a_command_is_killed_without_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes block SIGTERM, and ray.shutdown would wait a second for each of them."""
    node = Mock()
    kill_all_processes = node.kill_all_processes
    monkeypatch.setattr("ray._private.worker._global_node", node)
    ray_internals.kill_at_shutdown()
    node.kill_all_processes(check_alive=False, allow_graceful=True, wait=False)
    kill_all_processes.assert_called_once_with(check_alive=False, allow_graceful=False)


# --- whether Ray answers --------------------------------------------------------------------------


def test_a_head_that_does_not_answer_is_reported_and_after_a_while_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second passes whenever the watch waits for its event."""
    clock = Mock(now=0)
    reports: list[tuple[int, str]] = []

    def wait(seconds: float) -> bool:
        clock.now += 1
        return False

    def report(sentence: str) -> None:
        reports.append((clock.now, sentence))

    def answers(address: tuple[str, int]) -> bool:
        return clock.now < 5 or 20 <= clock.now < 30

    event = Mock(wait=wait, is_set=lambda: False)
    monkeypatch.setattr(watch, "threading", Mock(Event=lambda: event))  # starts no thread
    monkeypatch.setattr(watch, "time", Mock(monotonic=lambda: clock.now))
    monkeypatch.setattr(watch, "answers", answers)
    addresses = {"Ray's head": ("10.0.0.1", 6379)}
    watch.RayWatch(addresses, patience=45.0, say=report, lost=report)._look()
    head = "Ray's head (10.0.0.1:6379)"
    silent = f"{head} does not answer: waiting up to 45 s for it"
    assert reports == [
        (16, silent),
        (20, f"{head} answers again"),
        (41, silent),
        (76, f"{head} is gone"),
    ]


def test_ray_is_not_usable_if_its_head_counts_this_node_as_dead(
    connected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something may still listen at the node's address. Such a node is given up."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    lost: list[str] = []
    ray_watch = watch.RayWatch(watch.addresses(), patience=0.5, say=print, lost=lost.append)
    assert ray_watch.is_usable()
    dead_nodes = [{**node, "Alive": False} for node in ray.nodes()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "nodes", lambda: dead_nodes)
        assert not ray_watch.is_usable()
    wait_until(lambda: lost, 10)
    assert lost[0].startswith(watch.HERE)
    ray_watch.at = {watch.HERE: ("127.0.0.1", 1)}
    assert not ray_watch.is_usable()
