"""Saving: stage a copy, then write, hash and commit it in the background while training continues.

What the ranks do for one save, each in a thread and over a gloo group of its own, so that nothing of it interleaves
with training's collectives:

1. rank 0 chooses the folder and makes it
2. each rank writes its part (as DCP planned when the layout was last new), hashing as it writes
3. rank 0 learns how it went on each; if well, and `fence()` still lets us, it writes DCP's metadata and the marker: now
   the checkpoint exists
4. all learn that; then rank 0 removes what is no longer kept
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.storage import WriteResult

from app.checkpoint.commit import MARKER, Commit, File, Mode, encode, folder_name, remove, superfluous, survey
from app.checkpoint.dcp import Staged, Stager, Writer
from app.checkpoint.ranks import SUPERSEDED, CheckpointError, NotFinite, RankFailed, Ranks, Superseded, describe
from app.storage.storage import Storage

_log = logging.getLogger(__name__)
_Written = tuple[dict[str, File], list[WriteResult]]
"""The files that a rank has written, and what is where in them."""


class Checkpointer:
    """Saves checkpoints into a folder, one at a time, in the background.

    With torch.distributed initialised, every rank makes one and calls save(), wait() and close() alike (making one is a
    collective call); without it, it serves the one process.

    folder: local path or URL that all ranks see.
    keep_last, keep_best, mode: how many of the newest are kept, and whether the one with the best metric is.
    attempt: names this incarnation of the run; part of the folders' names.
    fence: asked on rank 0 before a folder is made and just before committing; False means that another attempt has
        taken over, an OSError that the storage is not there just now.
    """

    def __init__(
        self,
        folder: str,
        *,
        keep_last: int = 2,
        keep_best: bool = True,
        mode: Mode = "min",
        attempt: str = "",
        fence: Callable[[], bool] = lambda: True,
    ) -> None:
        self.last_stall_seconds = 0.0
        """Time that the last save() held training up: waiting for the save before it, and copying (a GPU's, which goes
        on when save() has returned, is added once it is known)."""
        self.last_total_seconds = 0.0
        """Time from the call of the last finished save until it was committed, or had failed."""
        self._storage = Storage(folder)
        self._keep_last, self._keep_best, self._mode = keep_last, keep_best, mode
        self._attempt, self._fence = attempt, fence
        self._ranks = Ranks(own_group=True)
        self._stager = Stager(self._ranks)
        self._before: list[Commit] = []  # rank 0: those there were before the one just committed
        self._pending: Future[Commit] | None = None

    def save(
        self,
        state: dict[str, Any],
        *,
        meta: dict[str, Any],
        metric: float | None = None,
        finite: bool = True,
    ) -> None:
        """Copy `state` and start to save it; when this returns, training may change the tensors.

        state: nested dict of tensors, DTensors and numbers. Tensors of one name are the same on all ranks (or DTensors
            of one whole); a name may exist on some ranks only (pipeline stages).
        meta: JSON, with "step".
        metric: what the checkpoint is judged by; rank 0's counts, and only if it is finite.
        finite: whether all numbers of this rank's state are; if not, on any rank, NotFinite is raised on all, and
            nothing was started.
        Raises CheckpointError if the save before this one failed; then nothing was started, on any rank, and the call
        may be repeated.
        """
        started = time.perf_counter()
        self.wait()
        judged = None if metric is None or not math.isfinite(metric) else float(metric)
        commit = Commit(int(meta["step"]), "", json.loads(json.dumps(meta)), {}, judged, self._attempt)
        try:
            staged = self._stager.stage(state, finite)
        except NotFinite:
            raise
        except Exception as error:  # a rank that failed, or is gone
            raise self._failure(commit, error) from error
        self._pending = Future()
        work = (commit, staged, started, self._pending)
        self.last_stall_seconds = time.perf_counter() - started
        threading.Thread(target=self._run, args=work, name="checkpoint", daemon=True).start()

    @property
    def locked_bytes(self) -> int:
        """Host memory that is page-locked for a GPU's copies; torch's own statistics do not have it."""
        return self._stager.locked_bytes

    def check(self) -> None:
        """Raise CheckpointError if the last save has failed by now. Does not wait; and does not forget the failure,
        since ranks get here at different times and must still agree in the next save()."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def wait(self) -> None:
        """Wait until the save under way is committed. Raises CheckpointError, once, if it failed."""
        if self._pending is not None:
            try:
                self._pending.result()
            finally:
                if self._pending.done():  # not when Ctrl-C ended the waiting
                    self._pending = None

    def close(self) -> None:
        """Wait for the save under way and free the buffers. Raises CheckpointError if that save failed."""
        try:
            self.wait()
        finally:
            self._stager.close()

    # --- in the background

    def _run(self, commit: Commit, staged: Staged, started: float, outcome: Future[Commit]) -> None:
        try:
            self.last_stall_seconds += staged.wait()
            result: Any = self._save(commit, staged)
        except BaseException as error:  # a thread's exception would be lost
            result = self._failure(commit, error)
        self.last_total_seconds = time.perf_counter() - started
        if isinstance(result, CheckpointError):
            outcome.set_exception(result)
        else:
            outcome.set_result(result)

    def _failure(self, commit: Commit, error: BaseException) -> CheckpointError:
        why = str(error) if isinstance(error, RankFailed) else describe(error)
        superseded = isinstance(error, RankFailed) and SUPERSEDED in error.reasons.values()
        verb = "was not committed" if superseded else "could not be saved"
        return CheckpointError(
            f"the checkpoint of step {commit.step} in {self._storage} {verb} ({why}); "
            "those committed before are untouched",
            superseded=superseded,
        )

    def _save(self, commit: Commit, staged: Staged) -> Commit:
        here = self._storage.join(self._ranks.first(lambda: self._make_folder(commit.step)))
        try:
            commit = self._ranks.reduce(
                lambda: self._write(here, staged),
                lambda parts: self._commit(here, staged, replace(commit, path=here.url), parts),
            )
        except BaseException:
            if self._ranks.rank == 0:
                self._discard(here)
            raise
        if self._ranks.rank == 0:
            self._prune(commit)
        return commit

    def _check_fence(self) -> None:
        if not self._fence():
            raise Superseded

    def _make_folder(self, step: int) -> str:
        self._check_fence()  # before anything is made: where a storage was mounted there may be an empty folder now
        name = folder_name(step, self._attempt, self._storage.list())
        self._storage.make(name)
        return name

    def _write(self, here: Storage, staged: Staged) -> _Written:
        """Write this rank's part and say what it is."""
        here.make()
        writer = Writer(here)
        results = writer.write_data(staged.plan, staged).wait()
        return writer.files.written, results

    def _commit(self, here: Storage, staged: Staged, commit: Commit, parts: list[_Written]) -> Commit:
        assert staged.table is not None
        writer = Writer(here)
        writer.finish(staged.table, [results for _, results in parts])
        files: dict[str, File] = {}
        for written in (*(written for written, _ in parts), writer.files.written):
            files |= written
        self._before = survey(self._storage).commits
        commit = replace(commit, files=files, sequence=max((c.sequence for c in self._before), default=0) + 1)
        here.sync()
        self._storage.sync()
        self._check_fence()
        here.write_bytes(MARKER, encode(commit))
        return commit

    def _discard(self, here: Storage) -> None:
        """Make room again after a failure (the disk may be full), unless the marker is there: a rank may have died
        after it was written, before it was told. What cannot be removed is swept later."""
        try:
            if not here.exists(MARKER):
                here.remove_tree()
        except Exception as error:  # each object store library has its own exceptions
            _log.warning("the unfinished checkpoint %s could not be removed (%s)", here, describe(error))

    def _prune(self, newest: Commit) -> None:
        keep: dict[str, Any] = {"keep_last": self._keep_last, "keep_best": self._keep_best, "mode": self._mode}
        for commit in superfluous([newest, *self._before], **keep):
            try:
                remove(commit.storage)
            except Exception as error:  # each object store library has its own exceptions
                _log.warning("the old checkpoint %s could not be removed (%s)", commit.path, describe(error))
