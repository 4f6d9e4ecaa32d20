"""Ray's internals: each entry with its name there (against Ray itself), and with the names taken away; and whether Ray
is there, which is known within seconds, and said."""

from unittest.mock import Mock

import psutil
import pytest
import ray

from cluster import ray_internals, watch
from tests.running import wait_until

NAMES = ["ray._private.state.available_resources_per_node", "ray._private.state.state"]
NAMES += ["ray._private.services.get_node", "ray._private.worker._global_node"]
NODES = [
    {"NodeID": "a", "Alive": True, "Resources": {"GPU": 4.0, "CPU": 8.0}},
    {"NodeID": "b", "Alive": True, "Resources": {"GPU": 2.0, "CPU": 8.0}},
    {"NodeID": "c", "Alive": False, "Resources": {"GPU": 8.0}},
]
GROUPS = {
    "1": {"state": "CREATED", "bundles": {0: {"GPU": 3.0}, 1: {"GPU": 1.0}}, "bundles_to_node_id": {0: "a", 1: "b"}},
    "2": {"state": "PENDING", "bundles": {0: {"GPU": 1.0}}, "bundles_to_node_id": {}},
    "3": {"state": "CREATED", "bundles": {0: {"GPU": 8.0}}, "bundles_to_node_id": {0: "c"}},
}


def test_ray_itself_answers(connected: None) -> None:
    (node,) = ray.nodes()
    before = ray_internals.available_resources_per_node()
    group = ray.util.placement_group([{"memory": 2**20}])
    assert group.wait(30) and before.keys() == {node["NodeID"]}
    left = before[node["NodeID"]]["memory"] - 2**20
    wait_until(lambda: ray_internals.available_resources_per_node()[node["NodeID"]]["memory"] == left)
    assert ray_internals.draining_nodes() == {}
    assert ray.util.placement_group_table()[group.id.hex()]["bundles_to_node_id"] == {0: node["NodeID"]}
    ray.util.remove_placement_group(group)
    worker = ray.remote(lambda: ray_internals.raylet_pid())
    assert psutil.Process(ray.get(worker.remote())).name() == "raylet"


def test_each_entry_where_ray_has_none_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delattr(name)
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    assert ray_internals.raylet_pid() == 0
    monkeypatch.setattr(ray.util, "placement_group_table", lambda: GROUPS)
    expected = {"a": {"GPU": 1.0, "CPU": 8.0}, "b": {"GPU": 1.0, "CPU": 8.0}}
    assert ray_internals.available_resources_per_node() == expected
    assert ray_internals.draining_nodes() == {}
    with ray_internals.patience():
        assert not hasattr(ray._private.services, "get_node")
    ray_internals.kill_at_shutdown()


@pytest.mark.parametrize(("raylet_lives", "attempts"), [(True, 4), (False, 1)])
def test_a_node_is_waited_for_while_its_raylet_lives(
    raylet_lives: bool, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known to Ray's head at the fourth attempt; a raylet that has ended never gets there."""
    get_node = Mock(side_effect=[RuntimeError("no such node")] * 3 + [{"node_id": "a"}])
    monkeypatch.setattr("ray._private.services.get_node", get_node)
    monkeypatch.setattr(ray_internals, "_raylet_lives", lambda: raylet_lives)
    with ray_internals.patience():
        if raylet_lives:
            assert ray._private.services.get_node("address", "a") == {"node_id": "a"}
        else:
            with pytest.raises(RuntimeError, match="no such node"):
                ray._private.services.get_node("address", "a")
    assert get_node.call_count == attempts
    assert ray._private.services.get_node is get_node, "afterwards as before"


def test_patience_with_a_node_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.services.get_node", Mock(side_effect=RuntimeError("no such node")))
    monkeypatch.setattr(ray_internals, "_raylet_lives", lambda: True)
    monkeypatch.setattr(ray_internals, "START_SECONDS", 0.3)
    with ray_internals.patience(), pytest.raises(RuntimeError, match="no such node"):
        ray._private.services.get_node("address", "a")


def test_a_ray_of_this_command_is_ended_without_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes block SIGTERM, for which ray.shutdown would wait a second each."""
    node = Mock()
    kill_all_processes = node.kill_all_processes
    monkeypatch.setattr("ray._private.worker._global_node", node)
    ray_internals.kill_at_shutdown()
    node.kill_all_processes(check_alive=False, allow_graceful=True, wait=False)
    kill_all_processes.assert_called_once_with(check_alive=False, allow_graceful=False)


def test_what_does_not_answer_is_said_and_after_a_while_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that is waited for its event a second passes."""
    clock, told = Mock(now=0), list[tuple[int, str]]()

    def wait(_: float) -> bool:
        clock.now += 1
        return False

    def tell(said: str) -> None:
        told.append((clock.now, said))

    event = Mock(wait=wait, is_set=lambda: False)
    monkeypatch.setattr(watch, "threading", Mock(Event=lambda: event))  # and no thread
    monkeypatch.setattr(watch, "time", Mock(monotonic=lambda: clock.now))
    monkeypatch.setattr(watch, "answers", lambda _: clock.now < 5 or 20 <= clock.now < 30)
    watch.RayWatch({"Ray's head": ("10.0.0.1", 6379)}, patience=45.0, say=tell, lost=tell)._look()
    where = "Ray's head (10.0.0.1:6379)"
    silent = f"{where} does not answer: waiting up to 45 s for it"
    assert told == [(16, silent), (20, f"{where} answers again"), (41, silent), (76, f"{where} is gone")]


def test_whether_ray_can_be_asked_after_something_broke(connected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where its raylet does not answer, or its head counts this node as dead though something listens there yet;
    such a node is given up."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    lost = list[str]()
    looks = watch.RayWatch(watch.addresses(), patience=0.5, say=print, lost=lost.append)
    assert looks.is_usable()
    dead = [{**node, "Alive": False} for node in ray.nodes()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "nodes", lambda: dead)
        assert not looks.is_usable()
    wait_until(lambda: lost, 10)
    assert lost[0].startswith(watch.HERE)
    looks.at = {watch.HERE: ("127.0.0.1", 1)}
    assert not looks.is_usable()
