"""Whether the Ray that this process is connected to still answers.

It asks the head's control service and this node's raylet. Ray's own calls wait for either without
a limit of their own, and after a minute Ray ends the process without a message.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping

from cluster.addresses import join_address, split_address

LOOK_SECONDS = 0.5
"""Seconds from one look to the next."""
SAY_SECONDS = 10.0
"""Seconds without an answer after which the user gets a message."""
GONE_SECONDS = 45.0
"""Seconds without an answer until Ray is given up.

Ray ends the process after 60 s (RAY_gcs_rpc_server_reconnect_timeout_s).
"""
OWN_SECONDS = 1.0
"""The same for a Ray that this process has started, which nobody else will start again."""
HERE = "Ray on this machine"
"""The name of this node's raylet in messages."""
Address = tuple[str, int]


def addresses() -> dict[str, Address]:
    """The addresses of what this process needs, each by its name in messages."""
    import ray

    context = ray.get_runtime_context()
    by_name = {}
    head = split_address(context.gcs_address)
    if head is not None:
        by_name["Ray's head"] = head
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            by_name[HERE] = (node["NodeManagerAddress"], node["NodeManagerPort"])
    return by_name


class RayWatch:
    """A thread that asks until `close` whether Ray still answers.

    Args:
        at: The addresses to ask, each by its name in messages.
        patience: Seconds without an answer after which Ray is given up.
        say: Called with a sentence when something does not answer, and when it answers again.
        lost: Called once with a sentence when Ray is given up; then the thread ends.
    """

    def __init__(
        self,
        at: Mapping[str, Address],
        *,
        patience: float,
        say: Callable[[str], None],
        lost: Callable[[str], None],
    ) -> None:
        self.at = at
        self.patience = patience
        self.say = say
        self.lost = lost
        self._closed = threading.Event()
        # Whether this node has left the cluster, which is for ever: its id does not come back.
        self.has_left = False
        threading.Thread(target=self._look, daemon=True, name="ray").start()

    def close(self) -> None:
        self._closed.set()

    def is_usable(self) -> bool:
        """Whether everything answers and this node has not left the cluster.

        To be asked before Ray's objects are used after something broke: where this machine's store
        of them is gone, Ray ends the process without a message.
        """
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        is_alive = any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())
        if not is_alive:
            self.has_left = True  # the thread gives it up too, though something may listen there
        return is_alive and all(map(answers, self.at.values()))

    def _look(self) -> None:
        silent_since: dict[str, float] = {}
        announced: set[str] = set()
        while not self._closed.wait(LOOK_SECONDS):
            for name, address in self.at.items():
                now = time.monotonic()
                where = f"{name} ({join_address(*address)})"
                if answers(address) and not (self.has_left and name == HERE):
                    if name in announced:
                        self.say(f"{where} answers again")
                    silent_since.pop(name, None)
                    announced.discard(name)
                    continue
                seconds = now - silent_since.setdefault(name, now)
                if seconds > self.patience:
                    if not self._closed.is_set():
                        self.lost(f"{where} is gone")
                    return
                if seconds > SAY_SECONDS and name not in announced:
                    announced.add(name)
                    self.say(f"{where} does not answer: waiting up to {self.patience:.0f} s for it")


def answers(address: Address) -> bool:
    """Whether something listens at an address."""
    try:
        socket.create_connection(address, timeout=2.0).close()
        return True
    except OSError:
        return False
