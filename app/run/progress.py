"""How far a run is, kept in its folder as progress.json, so that another shell or machine can see it (look.py)."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

from app.storage.storage import Storage

FILE = "progress.json"
SECONDS, REMOTE_SECONDS = 2.0, 10.0
"""Between two writes: to a folder; to an object store, which is paid by the request."""


class ProgressFile:
    """Written by a thread of its own, which begins with the first note: training does not wait for the storage."""

    def __init__(self, storage: Storage, attempt: str) -> None:
        self.storage = storage
        self.values: dict[str, Any] = {"attempt": attempt}
        self._changed, self._over, self._lock = False, threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def note(self, values: dict[str, Any]) -> None:
        """Adds what is new; returns at once."""
        with self._lock:
            self.values, self._changed = self.values | values | {"time": time.time()}, True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="progress")
            self._thread.start()

    def close(self) -> None:
        """Writes the last of it, if there was anything."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            over = self._over.is_set()
            with self._lock:
                values, changed, self._changed = self.values, self._changed, False
            if changed:
                with contextlib.suppress(Exception):  # the storage is full or away: each library's own exceptions
                    self.storage.write_bytes(FILE, json.dumps(values).encode())
            if over:
                return
            self._over.wait(SECONDS if self.storage.is_local else REMOTE_SECONDS)
