"""Keeps a run's progress in its folder as progress.json, so that others can see it (look.py)."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

from app.storage.storage import Storage

FILE = "progress.json"
LOCAL_SECONDS = 2.0
"""Seconds between two writes to a local folder."""
REMOTE_SECONDS = 10.0
"""Seconds between two writes to an object store, which is paid per request."""


class ProgressFile:
    """Writes progress.json in a thread of its own, so that training does not wait for the storage.

    Args:
        storage: The run's folder.
        attempt: This start of the run.
    """

    def __init__(self, storage: Storage, attempt: str) -> None:
        self.storage = storage
        self.values: dict[str, Any] = {"attempt": attempt}
        self._has_changed = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, values: dict[str, Any]) -> None:
        """Adds values, and returns at once. The first call starts the thread."""
        with self._lock:
            self.values = {**self.values, **values, "time": time.time()}
            self._has_changed = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="progress")
            self._thread.start()

    def close(self) -> None:
        """Writes the last values, if there were any."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        pause_seconds = LOCAL_SECONDS if self.storage.is_local else REMOTE_SECONDS
        while True:
            # Read before the values, so that the last ones are written before the thread ends.
            is_last = self._closing.is_set()
            with self._lock:
                values = self.values
                has_changed = self._has_changed
                self._has_changed = False
            if has_changed:
                # The storage may be full or out of reach; each library has exceptions of its own.
                with contextlib.suppress(Exception):
                    self.storage.write_bytes(FILE, json.dumps(values).encode())
            if is_last:
                return
            self._closing.wait(pause_seconds)
