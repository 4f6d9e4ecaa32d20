"""The actor between workers and driver: in a file that imports next to nothing, so that its process starts quickly."""

from __future__ import annotations

from typing import Any

import ray


@ray.remote(num_cpus=0)
class Inbox:
    """What workers have said and the driver has not yet heard; and whether they are to stop."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets an earlier run."""
        self.events: list[dict[str, Any]] = []
        self.stop = False

    def put(self, events: list[dict[str, Any]]) -> bool:
        self.events += events
        return self.stop

    def drain(self, stop: bool) -> list[dict[str, Any]]:
        self.stop = self.stop or stop
        events, self.events = self.events, []
        return events
