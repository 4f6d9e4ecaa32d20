"""A disk without room, and a folder where nothing may be written: a sentence, and nothing lost.

A file that is written to is opened as /dev/full here, which always says that a disk is full.
"""

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from app.checkpoint import commits
from app.checkpoint.forks import hold, needed_by_forks
from app.errors import RunFailed, UserError, of_file
from app.results.export import export_run
from app.storage.storage import Storage, _LocalFile
from app.tracking.uploader import TransientError, mlflow_errors
from app.training import persistence
from experiments.report.runs import report
from tests.app.checkpoint.kit import save
from tests.running import POINTS, invoke

LOCAL = ["launcher=local", "strategy=single", "tracking.enabled=false", "train.steps=2"]


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file of a local storage can be written."""

    def open_full(self: _LocalFile, path: str, mode: str) -> None:
        io.FileIO.__init__(self, "/dev/full", mode)

    monkeypatch.setattr(_LocalFile, "__init__", open_full)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run."""
    invoke("train", *POINTS, *LOCAL, "run.name=it", f"run.storage={tmp_path}")
    return tmp_path / "it"


def forbid(*_: Any, **__: Any) -> None:
    """What a method does in a folder that cannot be written."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), "there")


def test_a_file_for_which_there_is_no_room_is_named_whatever_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch says only "unexpected pos" of its zip file."""
    storage = Storage(tmp_path)
    storage.write_bytes("weights.pt", b"earlier")
    fill_disk(monkeypatch)
    with pytest.raises(OSError) as raised, storage.writing("weights.pt") as file:
        torch.save(nn.Linear(300, 300).state_dict(), file)
    path = str(tmp_path / "weights.pt")
    assert of_file(raised.value).startswith(
        f"{path} cannot be written (No space left on device): make room there, "
    )
    assert of_file(raised.value).endswith(" MB are free")
    assert (tmp_path / "weights.pt").read_bytes() == b"earlier"
    with pytest.raises(
        UserError, match=r"cannot be written \(No space .*\): make room there, .* MB"
    ):
        storage.check_writable()


def test_what_a_system_refuses_is_a_sentence_and_other_errors_are_not() -> None:
    def sentence(number: int, *path: str) -> str:
        return of_file(OSError(number, os.strerror(number), *path))

    assert sentence(errno.EROFS, "/a/b").startswith("/a/b cannot be opened or written (Read-only")
    assert sentence(errno.EACCES, "/a/b").endswith(
        "give another folder, or the right to write there"
    )
    assert sentence(errno.ENOSPC).startswith("a disk is full (No space left on device): make room")
    assert sentence(errno.EACCES) == sentence(errno.ENOENT, "/a/b") == ""
    assert of_file(ValueError("x")) == ""


def test_trained_weights_without_room_are_not_tried_by_other_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trained:
        """What `Persistence.keep_weights` needs."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self) -> dict[str, torch.Tensor]:
            return {"w": torch.ones(300, 300)}

        rank = 0
        folder = str(tmp_path)

    fill_disk(monkeypatch)
    message = r"weights.pt cannot be written \(No space .* the same command writes the weights$"
    with pytest.raises(RunFailed, match=message):
        persistence.Persistence.keep_weights(Trained())  # type: ignore[arg-type]


def test_an_export_without_room_says_so_in_every_format(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    fill_disk(monkeypatch)
    monkeypatch.setattr("safetensors.torch.save_file", full)
    for to in ("torch", "safetensors"):
        message = rf"{to}-step-00000002 cannot be written \(No space left on device\): make room th"
        with pytest.raises(UserError, match=message):
            export_run(str(run), to=to)
    assert not list((run / "export").iterdir())


def test_what_reads_a_run_works_where_nothing_can_be_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the run of somebody else."""
    monkeypatch.setattr(Storage, "write_bytes", forbid)
    again = invoke("train", *POINTS, *LOCAL, "run.name=it", f"run.storage={tmp_path}")
    assert "it has finished already" in again.stdout
    monkeypatch.setattr(Path, "write_text", forbid)
    with pytest.raises(UserError, match=r"into .*it \(Read-only .*: write --out FILE.html"):
        report([str(run)], None)


def test_a_report_goes_only_where_out_says_if_the_run_cannot_be_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def write_elsewhere(self: Path, *args: Any, **options: Any) -> int:
        if run in self.parents:
            forbid()
        return write_text(self, *args, **options)

    monkeypatch.setattr(Path, "write_text", write_elsewhere)
    page, _ = report([str(run)], str(tmp_path / "pages" / "it.html"))
    assert page == tmp_path / "pages" / "it.html" and page.stat().st_size > 1000


def test_what_mlflow_says_of_a_full_database_is_the_databases_own_words() -> None:
    words = (
        "(raised as a result of Query-invoked autoflush; consider using a session.no_autoflush "
        "block) (sqlite3.OperationalError) database or disk is full\n[SQL: INSERT INTO runs (a)]\n"
        "(Background on this error at: https://sqlalche.me/e/21/e3q8)"
    )
    answer = r"\(sqlite3.OperationalError\) database or disk is full$"
    with (
        pytest.raises(TransientError, match=f"^MLflow at sqlite:///a answered: {answer}"),
        mlflow_errors("sqlite:///a"),
    ):
        raise OSError(words)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_checkpoint_of_somebody_else_is_forked_without_a_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(tmp_path, 2)
    (commit,) = commits(str(tmp_path))

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Storage, "make", refuse)
    assert not hold(commit, "/mine")
    assert needed_by_forks(str(tmp_path)) == set()
    monkeypatch.undo()
    assert hold(commit, "/mine")
