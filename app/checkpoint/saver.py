"""Saving: copy the state, then write, hash and commit the copy while training continues.

What the ranks do for one save, each in a thread and over a gloo group of its own, so that nothing
interleaves with the collectives of training:

1. Rank 0 chooses the folder and makes it.
2. Each rank writes its part, as DCP has planned it, and hashes what it writes.
3. Rank 0 learns how it went on each rank, and where the shards are if that has changed. If it went
   well, and `fence()` still allows it, rank 0 writes DCP's metadata and the marker: now the
   checkpoint exists.
4. All ranks learn that; then rank 0 removes the checkpoints that are no longer kept.
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

from app.checkpoint.commit import (
    MARKER,
    Commit,
    File,
    Mode,
    encode,
    folder_name,
    survey,
)
from app.checkpoint.dcp import KnownResults, StagedState, Stager, Writer
from app.checkpoint.ranks import (
    SUPERSEDED,
    CheckpointError,
    NotFinite,
    RankFailed,
    Ranks,
    Superseded,
    describe,
)
from app.checkpoint.retention import Retention, prune
from app.storage.storage import Storage

_log = logging.getLogger(__name__)
_Written = tuple[dict[str, File], list[WriteResult] | None]
"""(the files that a rank has written, what DCP has to know of each shard in them or None if rank 0
knows it)"""


class Checkpointer:
    """Saves checkpoints into a folder, one at a time, in the background.

    With torch.distributed every rank makes one, which is a collective call, and calls save(),
    wait() and close() alike.

    Args:
        folder: A local path or URL that all ranks see.
        keep_last: How many of the newest checkpoints are kept.
        keep_best: Whether the one with the best metric is kept.
        mode: Whether a large or a small metric is good.
        metric: Its name among the results of evaluations beside training (evaluations.py).
        keeps_waiting: Whether checkpoints that wait for such an evaluation are kept.
        attempt: Identifies this start of the run, and is part of the folders' names.
        fence: Called on rank 0 before a folder is made and before a commit. False means that
            another attempt has taken over, an OSError that the storage is away.

    Attributes:
        last_stall_seconds: How long the last save() has held up training: waiting for the save
            before it, and copying. Copying from a GPU goes on after save() has returned, and is
            added later.
        last_total_seconds: From the call of the last finished save to its commit or failure.
    """

    def __init__(
        self,
        folder: str,
        *,
        keep_last: int = 2,
        keep_best: bool = True,
        mode: Mode = "min",
        metric: str = "loss",
        keeps_waiting: bool = False,
        attempt: str = "",
        fence: Callable[[], bool] = lambda: True,
    ) -> None:
        self.last_stall_seconds = 0.0
        self.last_total_seconds = 0.0
        self._storage = Storage(folder)
        self._retention = Retention(
            keep_last=keep_last,
            keep_best=keep_best,
            mode=mode,
            metric=metric,
            keeps_waiting=keeps_waiting,
        )
        self._attempt = attempt
        self._fence = fence
        self._ranks = Ranks(own_group=True)
        self._stager = Stager(self._ranks)
        self._results = KnownResults()
        self._earlier_commits: list[Commit] = []
        """On rank 0: those before the newest one."""
        self._pending: Future[None] | None = None

    def save(
        self,
        state: dict[str, Any],
        *,
        meta: dict[str, Any],
        metric: float | None = None,
        finite: bool = True,
    ) -> None:
        """Copy a state, and begin to save it. Training may then change the tensors.

        Args:
            state: Nested dict of tensors, DTensors and numbers. Tensors of one name are the same on
                all ranks, or DTensors of one tensor. A name may exist on some ranks only, as in a
                pipeline.
            meta: JSON, with "step".
            metric: What the checkpoint is judged by: that of rank 0, if it is finite.
            finite: Whether all numbers of this rank's state are finite.

        Raises:
            NotFinite: The state of some rank is not finite. Nothing was begun.
            CheckpointError: The save before this one has failed. Nothing was begun on any rank, and
                the call may be repeated.
        """
        started = time.perf_counter()
        self.wait()
        commit = Commit(
            step=int(meta["step"]),
            path="",
            meta=json.loads(json.dumps(meta)),  # a copy
            files={},
            metric=float(metric) if metric is not None and math.isfinite(metric) else None,
            attempt=self._attempt,
        )
        try:
            staged = self._stager.stage(state, finite)
        except NotFinite:
            raise
        except Exception as error:  # a rank has failed, or is gone
            raise self._failure(commit, error) from error
        self._pending = Future()
        self.last_stall_seconds = time.perf_counter() - started
        threading.Thread(
            target=self._run,
            args=(commit, staged, started, self._pending),
            name="checkpoint",
            daemon=True,
        ).start()

    @property
    def locked_bytes(self) -> int:
        """Host memory that is page-locked for copies from GPUs, which torch does not count."""
        return self._stager.locked_bytes

    def check(self) -> None:
        """Look whether the last save has failed by now, without waiting.

        The failure is not forgotten: ranks get here at different times, and must agree in the next
        save().

        Raises:
            CheckpointError: It has failed.
        """
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: It has failed; raised once.
        """
        if self._pending is None:
            return
        try:
            self._pending.result()
        finally:
            if self._pending.done():  # it is not if Ctrl-C has ended the waiting
                self._pending = None

    def close(self) -> None:
        """Wait for the save under way, and free the memory.

        Raises:
            CheckpointError: The save has failed.
        """
        try:
            self.wait()
        finally:
            self._stager.close()

    # --- in the background ------------------------------------------------------------------------

    def _run(
        self, commit: Commit, staged: StagedState, started: float, outcome: Future[None]
    ) -> None:
        failure: CheckpointError | None = None
        try:
            self.last_stall_seconds += staged.wait()
            self._save(commit, staged)
        except BaseException as error:  # the exception of a thread would be lost
            failure = self._failure(commit, error)
        self.last_total_seconds = time.perf_counter() - started
        if failure is not None:
            outcome.set_exception(failure)
        else:
            outcome.set_result(None)

    def _failure(self, commit: Commit, error: BaseException) -> CheckpointError:
        reason = describe(error)
        superseded = False
        if isinstance(error, RankFailed):
            reason = str(error)
            superseded = SUPERSEDED in error.reasons.values()
        verb = "was not committed" if superseded else "could not be saved"
        return CheckpointError(
            f"the checkpoint of step {commit.step} in {self._storage} {verb} ({reason}); "
            "those committed before are untouched",
            superseded=superseded,
        )

    def _save(self, commit: Commit, staged: StagedState) -> None:
        name = self._ranks.run_on_first(lambda: self._make_folder(commit.step))
        folder = self._storage.join(name)
        commit = replace(commit, path=folder.url)

        def commit_files(by_rank: list[_Written]) -> None:
            # The other ranks do not learn of all files, which are as many as there are ranks.
            nonlocal commit
            commit = self._commit(folder, staged, commit, by_rank=by_rank)

        try:
            self._ranks.run_and_combine(lambda: self._write(folder, staged), commit_files)
        except BaseException:
            self._results.forget()
            if self._ranks.rank == 0:
                self._discard(folder)
            raise
        if self._ranks.rank == 0:
            self._prune(commit)

    def _check_fence(self) -> None:
        if not self._fence():
            raise Superseded

    def _make_folder(self, step: int) -> str:
        # First the fence: where a storage was mounted there may now be an empty local folder.
        self._check_fence()
        name = folder_name(step, self._attempt, self._storage.list())
        self._storage.make(name)
        return name

    def _write(self, folder: Storage, staged: StagedState) -> _Written:
        """Write this rank's part."""
        folder.make()
        writer = Writer(folder)
        results = writer.write_data(staged.plan, staged).wait()
        return writer.files.written, self._results.news(results)

    def _commit(
        self, folder: Storage, staged: StagedState, commit: Commit, *, by_rank: list[_Written]
    ) -> Commit:
        """On rank 0: write the metadata and the marker."""
        assert staged.checkpoint_metadata is not None
        files: dict[str, File] = {}
        for files_of_rank, _ in by_rank:
            files |= files_of_rank
        writer = Writer(folder)
        results = self._results.complete([news for _, news in by_rank])
        writer.finish(staged.checkpoint_metadata, results)
        files |= writer.files.written
        self._earlier_commits = survey(self._storage).commits
        newest = max((earlier.sequence for earlier in self._earlier_commits), default=0)
        commit = replace(commit, files=files, sequence=newest + 1)
        folder.sync()
        self._storage.sync()
        self._check_fence()
        folder.write_bytes(MARKER, encode(commit))
        return commit

    def _discard(self, folder: Storage) -> None:
        """Remove what a failed save has written, since the disk may be full.

        If the marker is there the checkpoint stays: a rank may have died after the commit, before
        it learnt of it. What cannot be removed is swept later.
        """
        try:
            if not folder.exists(MARKER):
                folder.remove_tree()
        except Exception as error:  # each object store library has its own exceptions
            _log.warning(
                "the unfinished checkpoint %s could not be removed (%s)", folder, describe(error)
            )

    def _prune(self, newest: Commit) -> None:
        """Remove the checkpoints that are no longer kept."""
        prune(self._storage, [newest, *self._earlier_commits], self._retention)
