"""Whether Ray is there is known within seconds, and said."""

from unittest.mock import Mock

import pytest
import ray

from cluster import watch
from tests.running import wait_until


class Seconds:
    """In place of an event: each time that is waited for it a second passes."""

    now = 0

    def wait(self, _: float) -> bool:
        self.now += 1
        return False

    def is_set(self) -> bool:
        return False


def test_what_does_not_answer_is_said_and_after_a_while_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Seconds(), list[tuple[int, str]]()
    monkeypatch.setattr(watch, "threading", Mock(Event=lambda: clock))  # and no thread
    monkeypatch.setattr(watch, "time", Mock(monotonic=lambda: clock.now))
    monkeypatch.setattr(watch, "answers", lambda _: clock.now < 5 or 20 <= clock.now < 30)

    def tell(said: str) -> None:
        told.append((clock.now, said))

    watch.RayWatch({"Ray's head": ("10.0.0.1", 6379)}, 45.0, tell, tell)._look()
    where = "Ray's head (10.0.0.1:6379)"
    silent = f"{where} does not answer: waiting up to 45 s for it"
    assert told == [(16, silent), (20, f"{where} answers again"), (41, silent), (76, f"{where} is gone")]


def test_whether_ray_can_be_asked_after_something_broke(connected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where its raylet does not answer, or its head counts this node as dead though something listens there yet;
    such a node is given up."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
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
