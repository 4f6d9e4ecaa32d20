"""Whether the Ray that this process is connected to still answers: the head's control service and this node's raylet.

Ray's own calls wait for either as long as they may, and after a minute Ray ends the process without a word.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping

from cluster.addresses import join_address, split_address

LOOK_SECONDS = 0.5
SAY_SECONDS = 10.0  # without an answer, until a person is told
GONE_SECONDS = 45.0  # until it is given up; Ray ends the process after 60 (RAY_gcs_rpc_server_reconnect_timeout_s)
OWN_SECONDS = 1.0  # of a Ray that this process has started, which nobody else will start again
HERE = "Ray on this machine"
Address = tuple[str, int]


def addresses() -> dict[str, Address]:
    """Of what this process needs, by a name for a person."""
    import ray

    context = ray.get_runtime_context()
    head = split_address(context.gcs_address)
    found = {"Ray's head": head} if head else {}
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            found[HERE] = (node["NodeManagerAddress"], node["NodeManagerPort"])
    return found


class RayWatch:
    """A thread that looks, until `close`. say: told, in a sentence, once something does not answer, and when it does
    again. lost: called once, with why, when that lasts `patience` seconds; then the thread ends."""

    def __init__(
        self, at: Mapping[str, Address], patience: float, say: Callable[[str], None], lost: Callable[[str], None]
    ) -> None:
        self.at, self.patience, self.say, self.lost = at, patience, say, lost
        self.over = threading.Event()
        self.left = False  # this node has left the cluster, for ever: its id does not come back
        threading.Thread(target=self._look, daemon=True, name="ray").start()

    def close(self) -> None:
        self.over.set()

    def whole(self) -> bool:
        """Whether all of it answers, and this node has not left the cluster. To be asked before Ray's objects are used
        after something broke: where this machine's store of them is gone, Ray ends the process without a word."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        alive = any(node["NodeID"] == here and node["Alive"] for node in ray.nodes())
        self.left = self.left or not alive  # so that the thread gives it up too, though something may listen there
        return alive and all(map(answers, self.at.values()))

    def _look(self) -> None:
        silent: dict[str, float] = {}
        said: set[str] = set()
        while not self.over.wait(LOOK_SECONDS):
            for name, address in self.at.items():
                now, where = time.monotonic(), f"{name} ({join_address(*address)})"
                if answers(address) and not (self.left and name == HERE):
                    if name in said:
                        self.say(f"{where} answers again")
                    silent.pop(name, None)
                    said.discard(name)
                    continue
                seconds = now - silent.setdefault(name, now)
                if seconds > self.patience:
                    return None if self.over.is_set() else self.lost(f"{where} is gone")
                if seconds > SAY_SECONDS and name not in said:
                    said.add(name)
                    self.say(f"{where} does not answer: waiting up to {self.patience:.0f} s for it")


def answers(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=2.0).close()
        return True
    except OSError:
        return False
