"""Saving: stage a copy, then write, hash and commit it in the background while training goes on.

What the ranks do for one save, each in a thread and over a gloo group of its own, so that nothing of it
interleaves with training's collectives:

1. rank 0 chooses the folder and makes it
2. each rank writes its shards (as DCP planned when the layout was last new) and its own state, hashing as it writes
3. rank 0 learns how it went on each; if well, and `fence()` still lets us, it writes DCP's table and the marker: now
   the checkpoint exists
4. all learn that; then rank 0 removes what is no longer kept
"""

from __future__ import annotations

import io
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.storage import WriteResult

from app.checkpoint.commit import MARKER, Commit, File, encode, folder_name, survey
from app.checkpoint.errors import CheckpointError, Unexchangeable, Unsound, said
from app.checkpoint.exchange import RankFailed, Ranks
from app.checkpoint.files import Table, Writer
from app.checkpoint.prune import Mode, prune
from app.checkpoint.sharing import Plan, Share
from app.checkpoint.staging import StagedPlanner, Stager
from app.checkpoint.unchanged import Unchanged
from app.storage import Storage

_log = logging.getLogger(__name__)


@dataclass
class _Staged:
    """One save's content: nothing in it is shared with training."""

    commit: Commit
    """As it will be, but for folder, files and sequence number."""
    planner: StagedPlanner
    own: bytes | None
    """This rank's own state, pickled."""


_Written = tuple[dict[str, File], list[WriteResult]]
"""The files a rank has written, and what is where in them."""


class Checkpointer:
    """Saves checkpoints into a folder, one at a time, in the background.

    With torch.distributed initialised, every rank makes one and calls save(), wait() and close() alike
    (making one is a collective call); without it, it serves the one process.

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
        """Time that the last save() held training up: waiting for the save before it, and copying."""
        self.last_total_seconds = 0.0
        """Time from the call of the last finished save until it was committed, or had failed."""
        self.last_commit: Commit | None = None
        """The last one that this object committed; every rank knows it."""
        self._storage = Storage(folder)
        self._keep_last, self._keep_best, self._mode = keep_last, keep_best, mode
        self._attempt, self._fence = attempt, fence
        self._stager = Stager()
        self._unchanged = Unchanged()
        self._ranks = Ranks()
        self._share = Share(self._ranks)
        self._table = Table()
        self._before: list[Commit] = []  # rank 0: those there were before the one just committed
        self._pending: Future[Commit] | None = None

    def save(
        self,
        state: dict[str, Any],
        *,
        meta: dict[str, Any],
        per_rank: object = None,
        metric: float | None = None,
        finite: bool = True,
    ) -> None:
        """Copy `state` and start to save it; when this returns, training may change the tensors.

        state: nested dict of tensors, DTensors and numbers. Tensors of one name are the same on all ranks
            (or DTensors of one whole); a name may exist on some ranks only (pipeline stages).
        meta: JSON, with "step".
        per_rank: anything picklable that belongs to this rank alone (its generators' states).
        metric: what the checkpoint is judged by; rank 0's counts, and only if it is finite.
        finite: whether all numbers of this rank's state are; if not, on any rank, Unsound is raised on all, and
            nothing was started.
        Raises CheckpointError if the save before this one failed; then nothing was started, on any rank, and the
        call may be repeated.
        """
        started = time.perf_counter()
        self.wait()
        judged = None if metric is None or not math.isfinite(metric) else float(metric)
        commit = Commit(int(meta["step"]), "", json.loads(json.dumps(meta)), {}, judged, self._attempt)
        own = None if per_rank is None else _pickled(per_rank)
        try:
            wanted = self._share.of(state, finite)
        except Unsound:
            raise
        except Exception as error:  # a rank that failed, or is gone
            raise self._failure(commit, error) from error
        staged = _Staged(commit, self._stager.stage(state, wanted), own)
        self._pending = Future()
        threading.Thread(
            target=self._run, args=(staged, started, self._pending), name="checkpoint", daemon=True
        ).start()
        self.last_stall_seconds = time.perf_counter() - started

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None and not self._pending.done()

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

    # -- in the background

    def _run(self, staged: _Staged, started: float, outcome: Future[Commit]) -> None:
        failure: CheckpointError | None = None
        try:
            self.last_commit = self._save(staged)
            self._unchanged.committed()
        except BaseException as error:  # a thread's exception would be lost
            failure = self._failure(staged.commit, error)
            self._unchanged.failed()
        self.last_total_seconds = time.perf_counter() - started
        if failure:
            outcome.set_exception(failure)
        else:
            assert self.last_commit is not None
            outcome.set_result(self.last_commit)

    def _failure(self, commit: Commit, error: BaseException) -> CheckpointError:
        why = str(error) if isinstance(error, RankFailed) else said(error)
        superseded = why.endswith(_SUPERSEDED)
        verb = "was not committed" if superseded else "could not be saved"
        return CheckpointError(
            f"the checkpoint of step {commit.step} in {self._storage} {verb} ({why}); "
            "those committed before are untouched",
            superseded=superseded,
        )

    def _save(self, staged: _Staged) -> Commit:
        name = self._ranks.first(lambda: self._make_folder(staged.commit.step))
        here = self._storage.join(name)
        try:
            plan = self._share.plan(staged.planner)
            commit = self._ranks.reduce(
                lambda: self._write(here, plan, staged),
                lambda parts: self._commit(here, plan, replace(staged.commit, path=here.url), parts),
            )
        except BaseException:
            if not self._is_committed(here):
                self._discard(here)
            raise
        if self._ranks.rank == 0:
            self._prune(commit)
        return commit

    def _make_folder(self, step: int) -> str:
        if not self._fence():  # before anything is made: where a storage was mounted there may be an empty folder now
            raise Unexchangeable(_SUPERSEDED)
        name = folder_name(step, self._attempt, self._storage.list())
        self._storage.make(name)
        return name

    def _write(self, here: Storage, plan: Plan, staged: _Staged) -> _Written:
        """Write this rank's part and say what it is."""
        here.make()
        writer = Writer(here, self._unchanged, self._unchanged.look(staged.planner.data))
        results = writer.write(self._ranks.rank, plan.items, staged.planner)
        if staged.own is not None:
            writer.add(own_name(self._ranks.rank), staged.own)
        return writer.written, results

    def _commit(self, here: Storage, plan: Plan, commit: Commit, parts: list[_Written]) -> Commit:
        assert plan.metadata is not None
        writer = Writer(here)
        writer.add(Table.NAME, self._table.content(plan.metadata, [results for _, results in parts]))
        files = {
            name: file for written in (*(each for each, _ in parts), writer.written) for name, file in written.items()
        }
        self._before = survey(self._storage).commits
        commit = replace(commit, files=files, sequence=max((c.sequence for c in self._before), default=0) + 1)
        here.sync()
        self._storage.sync()
        if not self._fence():
            raise Unexchangeable(_SUPERSEDED)
        here.write_bytes(MARKER, encode(commit))
        return commit

    def _is_committed(self, here: Storage) -> bool:
        """Whether the marker is there: a peer may have died after it was written, before it heard of it."""
        try:
            return here.exists(MARKER)
        except Exception:  # each object store library has its own exceptions; what is no checkpoint is swept later
            return True

    def _discard(self, here: Storage) -> None:
        """Make room again after a failure (the disk may be full). What cannot be removed is swept later."""
        if self._ranks.rank == 0:
            try:
                here.remove_tree()
            except Exception as error:  # each object store library has its own exceptions
                _log.warning("the unfinished checkpoint %s could not be removed (%s)", here, said(error))

    def _prune(self, newest: Commit) -> None:
        warnings = prune([newest, *self._before], keep_last=self._keep_last, keep_best=self._keep_best, mode=self._mode)
        for warning in warnings:
            _log.warning("%s", warning)


_SUPERSEDED = "superseded: another attempt of this run has taken over"


def own_name(rank: int) -> str:
    """The file of a rank's own state."""
    return f"rank-{rank}.pt"


def _pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
