"""The actor between workers and driver: in a file that imports next to nothing, so that its process starts quickly."""

from __future__ import annotations

import ray


@ray.remote(num_cpus=0)
class Inbox:
    """What workers have said and the driver has not yet heard; and whether they are to stop."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets an earlier run."""
        self.said: list[bytes] = []
        self.stop = False

    def put(self, events: bytes) -> bool:
        """events: pickled, since what they hold may take this process seconds to import."""
        self.said.append(events)
        return self.stop

    def drain(self, stop: bool) -> list[bytes]:
        self.stop = self.stop or stop
        said, self.said = self.said, []
        return said
