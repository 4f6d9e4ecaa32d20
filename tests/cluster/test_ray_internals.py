"""Ray's internals: each entry with its name there (against Ray itself), and with it taken away."""

from __future__ import annotations

import ast
import importlib

import pytest
import ray

from cluster import ray_internals
from tests.running import ROOT, wait_until

ENTRIES = {
    "available_resources_per_node": ("ray._private.state", "available_resources_per_node"),
    "draining_nodes": ("ray._private.state", "state"),
    "start_lean_head": ("ray._private.node", "Node"),
    "actor_ids_from_system": ("ray.actor", "ActorClassID"),
}
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


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Ray as a version that has not got the entry's name."""
    module, name = ENTRIES[request.param]
    monkeypatch.delattr(importlib.import_module(module), name)


def test_every_entry_has_a_row_here() -> None:
    tree = ast.parse((ROOT / "cluster" / "ray_internals.py").read_text())
    entries = {n.name: ast.get_docstring(n) for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert entries.keys() == ENTRIES.keys()
    assert all("Why:" in (text or "") and "Missing:" in (text or "") for text in entries.values())


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


@pytest.mark.parametrize("without", ["available_resources_per_node"], indirect=True)
def test_free_resources_without_the_name(without: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    monkeypatch.setattr(ray.util, "placement_group_table", lambda: GROUPS)
    expected = {"a": {"GPU": 1.0, "CPU": 8.0}, "b": {"GPU": 1.0, "CPU": 8.0}}
    assert ray_internals.available_resources_per_node() == expected


@pytest.mark.parametrize("without", ["draining_nodes"], indirect=True)
def test_draining_without_the_name(without: None) -> None:
    assert ray_internals.draining_nodes() == {}


@pytest.mark.parametrize("without", ["start_lean_head"], indirect=True)
def test_a_lean_head_without_the_name_is_refused(without: None) -> None:
    with pytest.raises((ImportError, AttributeError)):
        ray_internals.start_lean_head(100_000_000, "")


@pytest.mark.parametrize("without", ["actor_ids_from_system"], indirect=True)
def test_without_the_name_ids_are_drawn_as_ray_draws_them(without: None) -> None:
    with ray_internals.actor_ids_from_system():
        assert not hasattr(ray.actor, "ActorClassID")


def test_ids_of_actors_are_drawn_from_the_system_for_a_while() -> None:
    own = ray.actor.ActorClassID
    with ray_internals.actor_ids_from_system():
        one, other = ray.actor.ActorClassID.from_random(), ray.actor.ActorClassID.from_random()
    assert isinstance(one, own) and one != other and ray.actor.ActorClassID is own
