"""Whether Ray is there is known within seconds, and said."""

import socket
import time

import pytest
import ray

from cluster import watch
from tests.running import wait_until


def test_what_does_not_answer_is_said_and_after_a_while_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(watch, "SAY_SECONDS", 0.2)
    said, lost = list[str](), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        looks = watch.RayWatch({"Ray's head": address}, 2.0, said.append, lost.append)
        time.sleep(0.4)
        assert said == [] == lost
    wait_until(lambda: said, 5)
    with socket.create_server(address):
        wait_until(lambda: len(said) > 1, 5)
    where = f"Ray's head (127.0.0.1:{address[1]})"
    assert said == [f"{where} does not answer: waiting up to 2 s for it", f"{where} answers again"] and lost == []
    wait_until(lambda: lost, 10)
    assert lost == [f"{where} is gone"]
    looks.close()


def test_whether_ray_can_be_asked_after_something_broke(connected: None) -> None:
    """Not where its raylet does not answer, or its head counts this node as dead though something listens there yet;
    such a node is given up."""
    lost = list[str]()
    looks = watch.RayWatch(watch.addresses(), 0.5, print, lost.append)
    assert looks.whole()
    dead = [{**node, "Alive": False} for node in ray.nodes()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "nodes", lambda: dead)
        assert not looks.whole()
    wait_until(lambda: lost, 10)
    assert lost[0].startswith(watch.HERE)
    looks.at = {watch.HERE: ("127.0.0.1", 1)}
    assert not looks.whole()
